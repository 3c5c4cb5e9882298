"""Who starts the processes: srun, or otherwise the Trainer, which runs this script again for each.

Here is what keeps the Trainer's way safe: no process stays behind, whichever dies, and the one that
failed is named.
"""

import ctypes
import functools
import os
import signal
import sys
import threading
import time
import warnings

import torch

from plumbing import hangs, processes, quiet_lightning

FIRST_BATCH_STEP = 4294967290  # SLURM numbers its batch and interactive steps from here on


def started_by_srun():
    """Return whether srun has started this process; otherwise it is the first, or started by it.

    A batch script has no step id, or one of the highest; a shell of `srun --pty` has
    SLURM_PTY_PORT.
    """
    step = os.environ.get("SLURM_STEP_ID")
    if step is None:
        return False
    return int(step) < FIRST_BATCH_STEP and "SLURM_PTY_PORT" not in os.environ


def devices_per_node(srun):
    """Return the number of processes that this node has, or gets unless --devices says another."""
    if not srun:
        return torch.cuda.device_count() or 2
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    return gpus or int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))


def check_tasks(parser, args):
    """Refuse a number of tasks with which Lightning would wait forever."""
    if not args.srun:
        return
    started = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))
    if not per_node * args.nodes == started == args.world_size:
        wrong = f"srun started {started} tasks on {args.nodes} nodes, not {args.devices} on each"
        advice = "use #SBATCH --ntasks-per-node instead of --ntasks"
        parser.error(f"{wrong} (--devices, or one per GPU): {advice}")


def prepare_process(args):
    """Prepare this process before it joins the others, and set what Lightning reads."""
    hangs.listen()
    hangs.watch_start(args)
    processes.explain_errors()
    processes.check_environment()
    processes.keep_memory()
    processes.keep_printing()
    if args.srun:
        # The process with rank 0 is on the first of these nodes.
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]
    elif "STARTED_BY" in os.environ:  # by the process that has this id
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when that one does
        if os.getppid() != int(os.environ["STARTED_BY"]):
            os._exit(1)  # that one has ended before
    else:
        os.environ["STARTED_BY"] = f"{os.getpid()}"  # in the environment of those that it starts
        # A notebook may have these from another launcher.
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
            os.environ.pop(name, None)
    if not args.srun:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all of them without a traceback
        # The loopback interface works even if the host's name cannot be resolved.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # srun gives each process cores of its own.
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) if args.srun else 0
    torch.set_num_threads(cores or max(1, len(os.sched_getaffinity(0)) // args.devices))
    # Without this variable Lightning sets another number of threads.
    os.environ["OMP_NUM_THREADS"] = f"{torch.get_num_threads()}"
    quiet_lightning()
    # DDP warns about the strides of conv1's gradient. It is harmless: with one channel, both memory
    # layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")


def watch(launcher):
    """Have this process, which has started others, end when one of them fails, and name it."""

    def wait_for(number, process):
        status = process.wait()
        if not status:
            return
        if status != 2:  # otherwise fail() has printed the error
            cause = signal.Signals(-status).name if status < 0 else "an exception"
            message = f"process {number} ended with {cause}: fix the cause, then use --resume"
            print(f"train.py: error: {message}", file=sys.stderr, flush=True)
        os._exit(2 if status == 2 else 1)

    for number, process in enumerate(launcher.procs, 1):
        threading.Thread(target=wait_for, args=(number, process), daemon=True).start()
    # Lightning looks at these every 5 s, and would kill this process without a word.
    launcher.procs.clear()


def print_errors(main):
    """Have a process that fails print its traceback at once, before others fail because of it.

    It may have failed because it has lost the connection to one that has died: watch() first says
    which one that is.
    """

    @functools.wraps(main)
    def wrapped(*args):
        try:
            main(*args)
        except Exception as error:
            # If another process has failed before, watch() ends this one without a traceback. If
            # that was the one that has started this one, the kernel does so, a moment after it has
            # closed the connection.
            first = os.environ.get("STARTED_BY") == f"{os.getpid()}"
            time.sleep(1 if first else 0.2)
            sys.excepthook(type(error), error, error.__traceback__)
            time.sleep(1)  # for the launcher's word on a process that has died
            os._exit(1)

    return wrapped
