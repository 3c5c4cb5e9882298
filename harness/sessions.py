"""What the sessions of noxfile.py are made of: what they tell pytest, and what they decide by the machine."""

import atexit
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from harness.launchers import ROOT

if TYPE_CHECKING:
    import nox


def at_once() -> int:
    """Return how many tests run at once: each starts two to four processes, of up to 1 GB each; at least two."""
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows, where no test runs
        return 2
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return max(2, min(3 * len(os.sched_getaffinity(0)) // 2, int(gigabytes // 4)))


# Of each session: marks of the tests, their files, a file in tests/ with what they need, and how many run at once.
KINDS = {
    "smoke": ("smoke", ["tests/test_contract.py", "tests/test_minimal.py"], "requirements-smoke.txt", 1),
    "checks": ("not smoke and not full", ["tests"], "requirements-checks.txt", max(2, 2 * at_once() // 3)),
    "slurm": ("slurm and not full", ["tests/slurm"], "requirements-checks.txt", at_once()),
    "full": ("full", ["tests"], "requirements.txt", max(2, 2 * at_once() // 3)),
    "repo": ("repo and not full", [], "requirements.txt", at_once()),
}


def pytest(session: "nox.Session", kind: str, *arguments: str) -> None:
    """Run the tests of a kind, several at once, which take work from each other."""
    marks, paths, requirements, workers = KINDS[kind]
    session.install("-r", f"tests/{requirements}")
    options = [f"--numprocesses={workers}", "--dist=worksteal"] if workers > 1 else []
    session.run("pytest", "-m", marks, *options, "--durations=10", "--durations-min=5", *paths, *arguments)


def in_ci() -> bool:
    """Whether CI=true is set, or CI=1."""
    return os.environ.get("CI") in ("true", "1")


skipped: list[str] = []


def skip_without_compiler(session: "nox.Session") -> None:
    """Skip a session that compiles Horovod where this machine cannot; in CI, install.sh fails there."""
    programs = [os.environ.get("CXX", "c++"), "make", "cmake", "mpicxx", "mpirun"]
    missing = [program for program in programs if not shutil.which(program)]
    missing += ["Python.h"] * (not Path(sysconfig.get_path("include"), "Python.h").exists())
    if missing and not in_ci():
        skipped.append(session.name)
        session.skip(f"Horovod has to be compiled, and there is no {', '.join(missing)}")


@atexit.register
def say_what_was_skipped() -> None:
    """Print as the last line of all what was skipped, and what to install first."""
    if skipped:
        packages = "g++ make cmake python3-dev openmpi-bin libopenmpi-dev"
        print(f"skipped: {', '.join(skipped)}; they need: apt-get install {packages}", file=sys.stderr)


def shell_scripts() -> list[str]:
    """Return the paths of what bash runs."""
    patterns = ("*/*.sh", "*/*.slurm", "examples/*/*.sh", "examples/*/*.slurm")
    return [str(path) for pattern in patterns for path in sorted(ROOT.glob(pattern))]
