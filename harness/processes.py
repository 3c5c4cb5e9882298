"""The processes of a run: the environment that they start with, how to find and end them, and how to wait."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ASK_SLURM = 1.0  # seconds between two questions to SLURM: several tests wait at a time, on few cores
FOREIGN = re.compile(
    r"SLURM|OMPI_|PMI|HOROVOD_|MASTER_|TORCHELASTIC|PET_"  # a job, or another launcher
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME|PYTHONDONTWRITEBYTECODE)$"  # a shell
    r"|(OUTPUT_DIR|VENV|IMAGE|UV_PYTHON)$"  # what a run.slurm is told, and uv by nox
)


def clean_environment() -> dict[str, str]:
    """Return this environment without what a job, another launcher or a shell has set for others, and without GPUs."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def find_processes(variable: str) -> list[int]:
    """Return the ids of all living processes that have `variable`, as NAME=value, in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def command_lines(pids: list[int]) -> list[str]:
    """Return the command lines of those of these processes that are still there."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            if words := Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0"):
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def workers(pids: list[int]) -> list[int]:
    """Of these processes return those that train: they have PyTorch or TensorFlow loaded, and started no other such.

    The workers of PyTorch's DataLoader, which read data for one of them, are left out.
    """
    parents = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            # As bytes: the kernel cuts names after 15 of them, also inside a letter.
            reads_data = Path(f"/proc/{pid}/comm").read_bytes() == b"pt_data_worker\n"
            if not reads_data and re.search(b"libtorch|libtensorflow", Path(f"/proc/{pid}/maps").read_bytes()):
                parents[pid] = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return [pid for pid in parents if pid not in parents.values()]


def end_processes(variable: str) -> None:
    """End all processes that have `variable`, as NAME=value, in their environment, and wait for that."""

    def none_left() -> bool:
        left = find_processes(variable)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(none_left, 300, f"the end of all processes with {variable}", pause=0.01)


def finish(words: Sequence[str | os.PathLike[str]], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, with its output as text, as subprocess.run does; `options` go to subprocess.Popen.

    On a time-out, or another exception, all that it has started in its session is ended, too.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def wait_until(condition: Callable[[], object], seconds: float, what: str, pause: float = 0.2) -> None:
    """Wait until a condition holds; raise AssertionError, with `what`, if it does not within `seconds`.

    `pause` is the time between two questions: ASK_SLURM where each costs several processes.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(pause)


@contextlib.contextmanager
def running(words: Sequence[str | os.PathLike[str]], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command for as long as the block lasts, with pipes for its stdin and its output."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **pipes | options) as process:
        try:
            yield process
        finally:
            process.terminate()


def read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the next line of a process's stdout, or what comes before its end; after `seconds` it is ended."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
