"""The processes of a run: the environment that they start with, and how to find them, wherever they are."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

FOREIGN = re.compile(r"SLURM|OMPI_|PMI|HOROVOD_|MASTER_|TORCHELASTIC|(RANK|WORLD_SIZE|LOCAL_RANK|OMP_NUM_THREADS)$")


def clean_environment() -> dict[str, str]:
    """Return this environment without what a job or another launcher has set, and without GPUs."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def find_processes(variable: str) -> list[int]:
    """Return the ids of all living processes that have `variable`, as NAME=value, in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def with_framework(pids: list[int]) -> dict[int, int]:
    """Of these processes return those that have PyTorch or TensorFlow loaded, with their parents.

    The workers of PyTorch's DataLoader, which read data for one of them, are left out.
    """
    found = {}
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/comm").read_text() == "pt_data_worker\n":
                continue
            if re.search("libtorch|libtensorflow", Path(f"/proc/{pid}/maps").read_text()):
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    return found


def workers(pids: list[int]) -> list[int]:
    """Of these processes return those that train: they have a framework loaded, and started none of the others."""
    parents = with_framework(pids)
    return [pid for pid in parents if pid not in parents.values()]


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds; raise AssertionError, with `what`, if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.2)
