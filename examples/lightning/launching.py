"""Who starts the processes: srun, or else the Trainer, which runs this script again for each but the first.

Here is what keeps the Trainer's way safe: no process stays behind, whichever dies, and the one that failed is named.
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


def started_by_srun():
    """Return whether srun has started this process; else it is the first one, or the first one has started it.

    A batch script has no step id, or one of the highest; a shell of `srun --pty` has SLURM_PTY_PORT.
    """
    return int(os.environ.get("SLURM_STEP_ID", 2**32)) < 4294967290 and "SLURM_PTY_PORT" not in os.environ


def devices_per_node(srun):
    """Return the number of processes that this node has, or should have, unless --devices says another."""
    if not srun:
        return torch.cuda.device_count() or 2
    return int(os.environ.get("SLURM_GPUS_ON_NODE", 0)) or int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))


def check_tasks(parser, args):
    """Refuse a number of tasks with which Lightning would wait forever."""
    if not args.srun:
        return
    started, per_node = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("STEP_NUM_TASKS", "NTASKS_PER_NODE"))
    if not per_node * args.nodes == started == args.world_size:
        wrong = f"srun started {started} tasks on {args.nodes} nodes, not {args.devices} on each"
        parser.error(f"{wrong} (--devices, or one per GPU): use #SBATCH --ntasks-per-node instead of --ntasks")


def prepare_process(args):
    """Make this process end when its launcher does, print lines immediately, and set what Lightning reads."""
    hangs.listen()
    hangs.watch_start(args)
    processes.explain_errors()
    processes.check_environment()
    processes.keep_memory()
    processes.keep_printing()
    if args.srun:
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]  # rank 0 is on the first of these
    elif "STARTED_BY" in os.environ:  # by the process that has this id
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
        if os.getppid() != int(os.environ["STARTED_BY"]):
            os._exit(1)  # it has ended before
    else:
        os.environ["STARTED_BY"] = f"{os.getpid()}"  # in the environment of those that it starts
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
            os.environ.pop(name, None)  # what a notebook may have from another launcher
    if not args.srun:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback, and the others with it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) if args.srun else 0  # srun gives each process its own
    torch.set_num_threads(cores or max(1, len(os.sched_getaffinity(0)) // args.devices))
    os.environ["OMP_NUM_THREADS"] = f"{torch.get_num_threads()}"  # else Lightning sets another number
    quiet_lightning()
    # DDP warns about the strides of conv1's gradient. It is harmless: with one channel, both memory layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")
    # Lightning warns that the output folder is not empty. Only one run at a time writes to it, as .lock says.
    warnings.filterwarnings("ignore", "Checkpoint directory")


def watch(launcher):
    """Have this process, which has started others, end when one of them fails, and say which one did."""

    def wait_for(number, process):
        if status := process.wait():
            cause = signal.Signals(-status).name if status < 0 else "an exception"
            if status != 2:  # fail() has printed the error
                message = f"process {number} ended with {cause}: fix the cause, then use --resume"
                print(f"train.py: error: {message}", file=sys.stderr, flush=True)
            os._exit(2 if status == 2 else 1)

    for number, process in enumerate(launcher.procs, 1):
        threading.Thread(target=wait_for, args=(number, process), daemon=True).start()
    launcher.procs.clear()  # Lightning looks at these every 5 s, and would kill this process without a word


def print_errors(main):
    """Have a process that fails print its traceback at once: what fails later in others is often a consequence.

    It may have failed because it has lost the connection to one that has died: watch() first says which one that is.
    """

    @functools.wraps(main)
    def wrapped(*args):
        try:
            main(*args)
        except Exception as error:
            # If another process has failed before, watch() ends this one without a traceback; if it is the one that has
            # started this one and has ended, the kernel does so, a moment after it has closed the connection.
            time.sleep(1 if os.environ.get("STARTED_BY") == f"{os.getpid()}" else 0.2)
            sys.excepthook(type(error), error, error.__traceback__)
            time.sleep(1)  # for the launcher's word on a process that has died
            os._exit(1)

    return wrapped
