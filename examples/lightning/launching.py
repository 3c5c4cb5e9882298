"""Who starts the processes: srun, or the Trainer, which runs this script again for all but one.

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

# SLURM gives this id, or a higher one, to what is no step of srun, such as a batch script.
FIRST_SPECIAL_STEP = 2**32 - 6


def started_by_srun():
    """Return whether srun has started this process.

    Otherwise it is the first one, or the first one has started it. A shell of `srun --pty` has
    SLURM_PTY_PORT.
    """
    step = int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP))
    return step < FIRST_SPECIAL_STEP and "SLURM_PTY_PORT" not in os.environ


def devices_per_node(srun):
    """Return the number of processes of this node, unless --devices says another."""
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
        wrong += " (--devices, or one per GPU)"
        parser.error(f"{wrong}: use #SBATCH --ntasks-per-node instead of --ntasks")


def prepare_process(args):
    """Make this process end when its launcher does, print at once, and set what Lightning reads."""
    hangs.listen()
    hangs.watch_start(args)
    processes.explain_errors()
    processes.check_environment()
    processes.keep_memory()
    processes.keep_printing()
    if args.srun:
        # Rank 0 is on the first of these nodes.
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]
    elif "STARTED_BY" in os.environ:  # by the process that has this id
        # PR_SET_PDEATHSIG: no worker outlives its launcher.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ["STARTED_BY"]):
            os._exit(1)  # it has ended before
    else:
        os.environ["STARTED_BY"] = str(os.getpid())  # those that it starts inherit it
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
            os.environ.pop(name, None)  # what a notebook may have from another launcher
    if not args.srun:
        # Ctrl-C ends it without a traceback, and the others with it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The loopback interface works even if the host name cannot be resolved.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cores = max(1, len(os.sched_getaffinity(0)) // args.devices)
    if args.srun:  # it gives each process its own cores
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or cores
    torch.set_num_threads(cores)
    # Otherwise Lightning sets another number.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    quiet_lightning()
    # DDP warns about the strides of conv1's gradient. It is harmless: with one channel, both memory
    # layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")


def watch(launcher):
    """Have this process, which has started others, end when one fails, and say which one did."""

    def wait_for(number, process):
        status = process.wait()
        if status == 0:
            return
        if status == 2:  # fail() has printed the error
            os._exit(2)
        cause = signal.Signals(-status).name if status < 0 else "an exception"
        message = f"process {number} ended with {cause}: fix the cause, then use --resume"
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    for number, process in enumerate(launcher.procs, 1):
        threading.Thread(target=wait_for, args=(number, process), daemon=True).start()
    # Lightning looks at these every 5 s, and would kill this process without a word.
    launcher.procs.clear()


def print_errors(main):
    """Have a process that fails print its traceback at once.

    What fails later in others is often a consequence. It may have failed because it has lost the
    connection to one that has died: watch() first says which one that is.
    """

    @functools.wraps(main)
    def wrapped(*args):
        try:
            main(*args)
        except Exception as error:
            # If another process has failed before, watch() ends this one without a traceback. If
            # that is the one which has started this one, the kernel does so, a moment after it has
            # closed the connection.
            is_first = os.environ.get("STARTED_BY") == str(os.getpid())
            time.sleep(1 if is_first else 0.2)
            sys.excepthook(type(error), error, error.__traceback__)
            time.sleep(1)  # for the launcher's word on a process that has died
            os._exit(1)

    return wrapped
