"""What the sessions of noxfile.py are made of: what they tell pytest, and what they decide by the machine.

That is the number of workers, the build of PyTorch, and whether Horovod has been built.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.launchers import ROOT

if TYPE_CHECKING:
    import nox


def workers(cores: int, gigabytes: float) -> int:
    """Return how many tests run at once: each starts two to four processes, of up to 1 GB each; at least two."""
    return max(2, min(3 * cores // 2, int(gigabytes // 4)))


def at_once() -> int:
    """Return the number of workers for this machine; macOS and Windows, where no test runs, have a number, too."""
    if not hasattr(os, "sched_getaffinity"):
        return 2
    return workers(len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9)


class Kind(NamedTuple):
    """What a session tells pytest: tests with which marks, in which files, what they need, and how many at once."""

    marks: str
    paths: list[str]
    requirements: str  # a file in tests/
    at_once: int  # 1: without pytest-xdist


KINDS = {
    "smoke": Kind("smoke", ["tests/test_contract.py", "tests/test_minimal.py"], "requirements-smoke.txt", 1),
    "checks": Kind(
        "not smoke and not slurm and not weekly",
        ["--ignore=tests/slurm", "tests"],
        "requirements-checks.txt",
        at_once(),
    ),
    "slurm": Kind("slurm and not weekly", ["tests/slurm"], "requirements-checks.txt", at_once()),
    "weekly": Kind("weekly", ["tests"], "requirements.txt", max(2, 2 * at_once() // 3)),
    "repo": Kind("repo and not weekly", [], "requirements.txt", at_once()),
}


def in_ci() -> bool:
    """Whether CI=true is set, or CI=1."""
    return os.environ.get("CI") in ("true", "1")


@functools.cache  # once for all sessions: where packets are dropped, it takes 10 s
def can_have_cpu_build(uv: str, pin: str) -> bool:
    """Return whether uv can have the build for CPUs of a PyTorch, for this Python."""
    words = ["--dry-run", "--reinstall", "--no-deps", "--torch-backend=cpu", "--python", sys.executable]
    variables = {"UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "10"}
    command = [uv, "pip", "install", *words, pin]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **variables}).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def build_of_torch(uv: str, requirements: Path) -> tuple[dict[str, str], str]:
    """Return the variable with which uv takes PyTorch's build for CPUs, where that will do, and which build it is.

    That one is a tenth of the download. On Linux, PyPI has the build for CUDA; elsewhere it has the one for CPUs.
    """
    if sys.platform != "linux":
        return {}, "PyPI's build, which is for CPUs on this system"
    if backend := os.environ.get("UV_TORCH_BACKEND"):
        return {}, f"the build that UV_TORCH_BACKEND={backend} names"
    if shutil.which("nvidia-smi"):
        return {}, "PyPI's build for CUDA, since there is an NVIDIA driver"
    if not uv:
        return {}, "PyPI's build for CUDA, since uv does not install it"
    pin = re.search(r"^torch==\S+", requirements.read_text(), re.MULTILINE)[0]
    if not can_have_cpu_build(uv, pin):
        return {}, "PyPI's build for CUDA, since the index of those for CPUs cannot be reached"
    return {"UV_TORCH_BACKEND": "cpu"}, "the build for CPUs, since there is no NVIDIA driver"


def horovod_is_built(example: str, python: str) -> bool:
    """Return whether the cache has the wheel that an example's install.sh builds, for a Python such as "3.11".

    Which MPI there is, and which build of PyTorch, the script alone knows: any will do here.
    """
    folder = ROOT / "examples" / example
    pins = (folder / "requirements.txt").read_text()
    framework = re.search(r"^(torch)==(\S+)", pins, re.MULTILINE) or re.search(r"^(tensorflow)-cpu==(\S+)", pins)
    script = (folder / "install.sh").read_text()
    version, recipe = (re.search(rf"^{name}=(\S+)", script, re.MULTILINE)[1] for name in ("version", "recipe"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "horovod-wheels")
    return any(cache.glob(f"{version}-{recipe}-{framework[1]}{framework[2]}*-py{python}-*/*.whl"))


@functools.cache
def temporary_folder() -> tempfile.TemporaryDirectory:
    """Return a folder that is removed when nox ends."""
    return tempfile.TemporaryDirectory(prefix="references-")


def references() -> str:
    """Return the folder of the reference runs: REFERENCES, in which `.ci/run` keeps them, or one for this nox."""
    return os.environ.get("REFERENCES") or temporary_folder().name


def releases() -> dict[str, str]:
    """Return other releases of PyTorch to test with, and the torchvision of each: preflight's, and one more."""
    table = json.loads((ROOT / "preflight" / "releases.json").read_text())
    wheels = [row["wheel"] for row in table["nvidia"] if row["wheel"]] + [table["tested_besides"]]
    return {torch: torchvision for torch, torchvision, _ in wheels}


def other_release(session: "nox.Session", folder: Path) -> list[str]:
    """Have requirements.txt pin the PyTorch of `-- --torch 2.9.1`; return what else follows `--`, which is pytest's."""
    arguments = list(session.posargs)
    if "--torch" not in arguments:
        return arguments
    at = arguments.index("--torch")
    release = "".join(arguments[at + 1 : at + 2])
    if release not in releases():
        session.error(f"--torch {release}: choose from {', '.join(releases())}")
    pins = (folder / "requirements.txt").read_text()
    pins = re.sub(r"^torch==\S+", f"torch=={release}", pins, flags=re.MULTILINE)
    pins = re.sub(r"^torchvision==\S+", f"torchvision=={releases()[release]}", pins, flags=re.MULTILINE)
    (folder / "requirements.txt").write_text(pins)
    return arguments[:at] + arguments[at + 2 :]


def shell_scripts() -> list[str]:
    """Return the paths of what bash runs; the examples' copies are left out."""
    patterns = ("*/*.sh", "*/*.slurm", "examples/*/*.sh", "examples/*/more/*.sh", "examples/*/*.slurm")
    found = [path.relative_to(ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [".ci/run", *(str(path) for path in found if path.name != "job.sh" or path.parts[0] != "examples")]
