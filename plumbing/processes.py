"""How a process starts: what it prints, what it reads from the environment, its memory, its GPU."""

import contextlib
import ctypes
import fcntl
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from . import checks, hangs
from .launchers import fail, horovod, set_up_horovod


def prepare_process(args):
    """Prepare this process before it joins the others: its output, its memory, its signals."""
    hangs.listen()
    hangs.watch_start(args)
    explain_errors()
    keep_memory()
    keep_printing()
    check_environment()
    if horovod():
        set_up_horovod(args)
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when its launcher does
    if args.processes == args.world_size:
        # On one node the loopback interface works even if the host's name cannot be resolved.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # DDP warns about the strides of gradients. It is harmless: where a dimension is 1, both memory
    # layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")


def check_environment():
    """Refuse variables of the shell that lead to another program or network.

    Variables that should be numbers, and are none, are dropped, and a TMPDIR that is too long.
    """
    main = sys.modules["__main__"]
    folder = Path(getattr(main, "__file__", "/-")).resolve().parent  # of train.py
    names = {path.stem for path in folder.glob("*.py")}
    names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    for name in names - sys.stdlib_module_names:
        file = getattr(sys.modules.get(name), "__file__", None) or folder / "not imported"
        if folder not in (*Path(file).absolute().parents, *Path(file).resolve().parents):
            wrong = f"{name} is imported from {file}, not from {folder}"
            fail(f"{wrong}: unset PYTHONPATH and PYTHONSAFEPATH")
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, wanted.split(",")):
        if not has_address(name):
            others = [other for _, other in socket.if_nameindex() if has_address(other)]
            found = f"{os.uname().nodename} has no interface {name} with an address"
            found += f"; it has: {' '.join(others)}"
            fail(f"GLOO_SOCKET_IFNAME={wanted}: {found}; name one of these, or unset the variable")
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):  # such as "8,1", "auto" or nothing
        first = os.environ.pop(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            os.environ[name] = first
    # Workers of a DataLoader have a socket there, whose path may have 107 bytes, 32 of them after
    # the folder's. Otherwise they would hang, and all others with them.
    with contextlib.suppress(OSError):  # no folder is of use
        if len(os.fsencode(tempfile.gettempdir())) > 107 - 32:
            tempfile.tempdir = "/tmp"


def has_address(interface):
    """Return whether this node has a network interface of that name, with an address."""
    request = interface.encode().ljust(40, b"\0")[:40]
    any_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with any_socket, contextlib.suppress(OSError):
        fcntl.ioctl(any_socket, 0x8915, request)  # SIOCGIFADDR: fails without an address of IPv4
        return True
    with contextlib.suppress(OSError):  # there is no IPv6
        return interface in Path("/proc/net/if_inet6").read_text().split()
    return False


class Log(io.FileIO):
    """Standard output that a full disk, or a reader that has gone, does not end the run with."""

    lost = False

    def write(self, data):
        """Write bytes; if that fails, drop them, and say so on stderr the first time."""
        try:
            return super().write(data)
        except OSError as error:
            if not self.lost:
                self.lost = True
                wrong = f"standard output cannot be written ({error.strerror})"
                said = f"{Path(sys.argv[0]).name}: {wrong}: the run goes on without it\n"
                with contextlib.suppress(OSError):
                    os.write(2, said.encode())  # at once: a buffer would fail at the end again
            return len(data)


def keep_printing():
    """Print lines at once, and go on where they cannot be written."""
    if not sys.stdout:
        return  # it was closed: its number may be that of another file by now
    log = io.BufferedWriter(Log(sys.stdout.fileno(), "w", closefd=False))
    # A locale without umlauts would end the run at a path that has some: hence backslashreplace.
    encoding = sys.stdout.encoding
    sys.stdout = io.TextIOWrapper(log, encoding, "backslashreplace", line_buffering=True)


def explain_errors():
    """Have an exception that says too little to a beginner end this process with one line."""

    def hook(kind, error, trace):
        message = checks.explain(error)
        if not message:
            return sys.__excepthook__(kind, error, trace)
        with contextlib.suppress(OSError):  # what torchrun would print, a traceback
            os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        # torch.distributed collects what a hook prints, to put the rank before each line.
        sys.stderr = sys.__stderr__
        fail(message)

    sys.excepthook = hook


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step.

    To return it to the kernel in each step costs up to a fifth of the speed on CPUs.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return  # another C library, which does not have these two settings
    # M_MMAP_THRESHOLD (-3) is the largest block that is kept: 1 GB, or where glibc is 2.34 (RHEL 9)
    # or older the most that it accepts, 32 MiB. M_TRIM_THRESHOLD (-1): up to 2 GB are kept.
    if libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25):
        libc.mallopt(-1, 2**31 - 1)


def check_gpu(device):
    """Refuse GPUs on which PyTorch cannot compute, and the CPU in a job that has GPUs.

    ALLOW_CPU=1 in the environment permits the latter.
    """
    import torch

    given = (os.environ.get("SLURM_GPUS_ON_NODE") or "0") != "0"
    if device.type == "cpu" and not (given and os.environ.get("ALLOW_CPU") != "1"):
        return
    try:
        # A GPU that is too old is found, but there are no kernels for it.
        torch.ones(1, device="cuda" if device.type == "cpu" else device).sum().item()
    except (RuntimeError, AssertionError) as error:
        command = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
        driver = subprocess.getoutput(command).partition("\n")[0]
        build = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
        reason = f"NVIDIA driver: {driver}; {checks.first_line(str(error))}"
        row = 'the row "no GPU, AMD, V100, an NVIDIA driver below 580" of README.md'
        message = f"{build}, cannot use the GPUs of this job ({reason}): {row} says what to install"
        if device.type == "cpu":
            message += "; to train on the CPU all the same, set ALLOW_CPU=1"
        fail(message)


def quiet_lightning():
    """Silence what Lightning says and what says nothing about this script.

    It also warns that the output folder is not empty; .lock keeps other runs out of it.
    """
    logging.disable(logging.INFO)
    ignored = "The (`srun` command|number of training)|`isinstance.tree|Seems like `optimizer.step"
    warnings.filterwarnings("ignore", f"{ignored}|Checkpoint directory")
