"""Who this process is among how many, and how it leaves them: what differs by launcher.

The processes of a run know each other through torch.distributed or through Horovod; a program
that joins neither is alone, as rank 0.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

IMPORTED_BY = os.getpid()
# Functions that wait for what a thread of this process still does, such as a save; see finish().
UNFINISHED = []


def horovod():
    """Return Horovod's module for the framework that train.py uses, or None without Horovod."""
    return sys.modules.get("horovod.torch") or sys.modules.get("horovod.tensorflow")


def process_group():
    """Return torch.distributed if this process has joined a process group there, or None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist and dist.is_available() and dist.is_initialized() else None


def rank():
    """Return the number of this process among all processes of the run."""
    group = horovod() or process_group()
    if not group:
        return 0
    return group.rank() if group is horovod() else group.get_rank()


def gather(value, group=None):
    """Return the list of what each process has given, by rank.

    `group` is another process group of all processes, for a thread of its own.
    """
    if hvd := horovod():
        return hvd.allgather_object(value, name="gather")
    dist = process_group()
    if not dist:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def patient_group():
    """Return a group of all processes of torch.distributed that wait for each other for days.

    A slow disk is no reason to give up after --timeout, which is for what all do together.
    """
    dist = process_group()
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@contextlib.contextmanager
def others_waiting():
    """Have all processes wait at the end for what rank 0 does, however long that takes."""
    dist = process_group()
    patient = patient_group()
    yield
    dist.barrier(patient)


def wait_for_unfinished():
    """Wait for what threads of this process still do."""
    for wait in UNFINISHED:
        wait()


def disconnect():
    """Leave the other processes."""
    if hvd := horovod():
        hvd.shutdown()
    elif dist := process_group():
        dist.destroy_process_group()


def fail(message):
    """Print an error in the style of argparse and exit at once: to wait for others could hang."""
    line = f"{Path(sys.argv[0]).name}: error: {message}\n"
    print(line, end="", file=sys.stderr, flush=True)  # whole: others may print theirs as well
    end(2)


def refuse(message, switch):
    """End all processes with an error message, which rank 0 prints; all of them call this.

    If the environment variable `switch` is 1, they go on, with the message. `switch` may be None.
    """
    if switch and os.environ.get(switch) == "1":
        if rank() == 0:
            print(f"{switch}=1: {message}")
        return
    if rank() == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    gather(None)  # waits for that line: the launcher ends all others when one has ended
    end(2)


def end(status):
    """End this process at once, and remove its empty folders in the temporary folder."""
    if hvd := horovod():
        hvd.shutdown()  # otherwise the others would report that they have lost this one
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()  # a worker of a DataLoader, which could outlive this process
    if multiprocessing.parent_process() is None:
        with contextlib.suppress(OSError):  # there are sockets of the workers of a DataLoader
            shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    with contextlib.suppress(OSError):  # a report, or another process's folder, is in it
        # torchrun makes FOLDER/none_RUN/attempt_N/RANK/error.json: remove these four folders.
        for folder in list(Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents)[:4]:
            folder.rmdir()
    # The interpreter's own shutdown is no way out: Gloo's threads can abort the process meanwhile.
    os._exit(status)


def call_exit_functions():
    """Call what is registered with atexit, such as a logger that then writes its last rows.

    `end` leaves the interpreter without that.
    """
    if os.getpid() != IMPORTED_BY:
        return  # it was forked, from a notebook for instance, whose functions are not for it
    # Loader workers end by themselves; these functions would wait for them.
    waiting = [multiprocessing.util._exit_function, end]
    if "torch" in sys.modules:
        loader = sys.modules["torch"].utils.data.dataloader._MultiProcessingDataLoaderIter
        for name in ("_clean_up_worker", "_clean_up_persistent_workers_atexit"):
            waiting.append(getattr(loader, name, None))  # the first in PyTorch up to about 2.14
    for function in waiting:
        atexit.unregister(function)
    atexit._run_exitfuncs()
    # The interpreter would also write what open files have not yet written.
    for file in gc.get_objects():
        if type(file) in (io.TextIOWrapper, io.BufferedWriter):
            with contextlib.suppress(OSError, ValueError):  # it may be closed
                file.flush()


# Launchers of PyTorch


def print_errors(main):
    """Have a process that fails print its traceback at once, before others fail because of it."""

    @functools.wraps(main)
    def wrapped(*args):
        try:
            main(*args)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)

    return wrapped


def end_on_ctrl_c():
    """Have Ctrl-C end this process, and with it those that it starts, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def report_failure(error):
    """End this process, which has started the others, because one of them has failed."""
    if error.exit_code == 2:
        sys.exit(2)  # fail() has printed the error
    cause = getattr(error, "signal_name", None) or "an exception"
    process = f"process {error.error_index} ended with {cause}"
    sys.exit(f"train.py: error: {process}: fix the cause, then use --resume")


def set_timeout(args, *groups):
    """Limit how long a collective of these process groups may wait, to --timeout."""
    dist = sys.modules["torch.distributed"]
    # Older releases of PyTorch have no public name for this function.
    limit = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in groups:
        limit(timedelta(seconds=args.timeout), group)


# Horovod


def set_up_horovod(args):
    """Set what Horovod reads when it starts, unless the environment says it already."""
    restart_watchdog(args)
    launchers = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
    if not any(name in os.environ for name in launchers):  # each launcher sets one of these
        # One process needs neither MPI nor a network.
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        os.environ["HOROVOD_GLOO_IFACE"] = "lo"
    # With tensor fusion the order of a sum depends on timing: three or more processes would not
    # reproduce the same bits.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # Milliseconds between looks for gradients to send; 5 was the fastest that was measured.
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(args.timeout)
    # Over MPI, rank 0 then names the missing ranks, after two to four times as long.
    stall = min(60, max(1, args.timeout // 8))
    os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(stall))


def check_connected(args):
    """Refuse tasks of srun that know nothing of each other: each would train alone."""
    restart_watchdog(args)
    args.backend = "mpi" if horovod().mpi_enabled() else "gloo"
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if args.world_size == 1 and tasks > 1:
        advice = "use srun --mpi=pmix (other types: srun --mpi=list)"
        fail(f"srun started {tasks} tasks that are not connected: {advice}")


def restart_watchdog(args):
    """Have this process end, and print where it hung, unless this is called within --timeout.

    MPI would wait forever for a process that hangs.
    """
    faulthandler.dump_traceback_later(args.timeout, exit=True)
