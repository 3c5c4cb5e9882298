"""What the user's shell holds: variables that train.py corrects or refuses in one line, and an output that is lost.

The functions of plumbing/ are the same in all examples, so most are called right here.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.launchers import ROOT
from harness.processes import clean_environment
from harness.refusals import RefusedError
from harness.runs import Run
from plumbing.processes import check_environment

pytestmark = pytest.mark.usefixtures("refusing")

NUMBERS = {"8,1": "8", "": None, "auto": None, "0": None, "-1": None, "4": "4", " 6 ": "6", "2.5": None, "8x": None}


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"])
def test_numbers(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The first number counts, and what is none is as if it was not set: int() of it would end the run."""
    monkeypatch.setenv(name, value)
    check_environment()
    assert os.environ.get(name) == NUMBERS[value]


LISTEN = """
from multiprocessing.connection import Listener
from plumbing.processes import check_environment
check_environment()
print(Listener(family="AF_UNIX").address)
"""


@pytest.mark.parametrize("length", [20, 75, 76, 120])
def test_long_temporary_folder(tmp_path: Path, length: int) -> None:
    """In a TMPDIR that is too long for a socket's path, loader workers would raise in a thread, and then hang."""
    folder = Path("/tmp", f"{os.getpid()}-".ljust(length - len("/tmp/"), "x"))
    folder.mkdir()
    try:
        environment = clean_environment() | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        run = subprocess.run(
            [sys.executable, "-c", LISTEN], env=environment, capture_output=True, text=True, timeout=300
        )
    finally:
        shutil.rmtree(folder)
    assert run.returncode == 0 and run.stdout.startswith(f"{folder}/" if length <= 75 else "/tmp/pymp-"), run


INTERFACES = {"lo": "", "": "", "lo,": "", "ib0": "ib0", "^docker0,lo": "^docker0", "lo,ib0": "ib0", "=lo": "=lo"}
INTERFACES |= {"a-name-that-is-much-longer-than-any": "a-name-that", "lo,lo:9": "lo:9"}


@pytest.mark.parametrize("value", INTERFACES)
def test_interfaces(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """GLOO_SOCKET_IFNAME may name interfaces that have an address; the line names value, interface, and those there."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    if not (wrong := INTERFACES[value]):
        check_environment()
        return
    with pytest.raises(RefusedError) as refused:
        check_environment()
    text = str(refused.value)
    assert text.startswith(f"GLOO_SOCKET_IFNAME={value}: ") and f"no interface {wrong}" in text and " lo" in text
    assert "\n" not in text


# Modules that are imported: their names and files; below OTHER another project's; and what is refused.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "own": ({"plumbing": "plumbing/__init__.py", "common": "common/__init__.py"}, ""),
    "own, linked": ({"common": "linked/__init__.py"}, ""),
    "plumbing of another": ({"plumbing": "OTHER/plumbing/__init__.py"}, "plumbing is imported from"),
    "common of another": ({"common": "OTHER/common/__init__.py"}, "common is imported from"),
    "own_data of another": ({"own_data": "OTHER/own_data.py"}, "own_data is imported from"),
    "not of this project": ({"else_where": "OTHER/else_where.py"}, ""),
    "namespace": ({"own_data": None}, ""),
    "as of Python": ({"random": "OTHER/random.py"}, ""),
}


@pytest.mark.parametrize("case", OTHERS)
def test_modules_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """With PYTHONSAFEPATH and PYTHONPATH train.py would import what another project calls plumbing or common."""
    modules, says = OTHERS[case]
    folder = tmp_path / "project"
    for name in ("plumbing", "own_data", "common", "linked"):  # of this repository, by another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    packages = ("plumbing", "common", "linked")
    for name in ("train.py", "own_data.py", "random.py", *(f"{name}/__init__.py" for name in packages)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(folder / "train.py")))
    for name, file in modules.items():
        module = ModuleType(name)
        module.__file__ = file and str(folder / file.replace("OTHER", str(tmp_path / "other")))
        monkeypatch.setitem(sys.modules, name, module)
    if not says:
        check_environment()
        return
    with pytest.raises(RefusedError, match=f"{says} {tmp_path}/other/.*: unset PYTHONPATH and PYTHONSAFEPATH"):
        check_environment()


PRINT = """
import contextlib, os
from plumbing.processes import keep_printing
keep_printing()
for number in range(20000):
    print(number, "Übung", "\\udce4")
with contextlib.suppress(OSError):
    os.write(2, b"the end\\n")
"""
OUTPUTS = {  # what stands behind the command, variables, and what the one line on stderr says besides "the end"
    "full disk": (">/dev/full", {}, "cannot be written (No space left on device)"),
    "closed pipe": ("| head -1", {}, "cannot be written (Broken pipe)"),
    "limit on files": (">limited", {}, "cannot be written (File too large)"),
    "read-only": ("1</dev/null", {}, "cannot be written (Bad file descriptor)"),
    "both lost": (">/dev/full 2>&1", {}, None),
    "closed": (">&-", {}, ""),
    "ASCII": (">lines", {"PYTHONIOENCODING": "ascii"}, ""),
    "locale C": (">lines", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, ""),
    "unbuffered": (">lines", {"PYTHONUNBUFFERED": "1"}, ""),
    "a file": (">lines", {}, ""),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_lost_output(tmp_path: Path, case: str) -> None:
    """Where standard output takes no more lines, a line on stderr says so once, and the program goes on to its end."""
    words, variables, says = OUTPUTS[case]
    (tmp_path / "program.py").write_text(PRINT)
    command = f"ulimit -f 8; set -o pipefail; exec 3>status; (python program.py; echo $? >&3) {words}"
    command = command if case == "limit on files" else command.replace("ulimit -f 8; ", "")
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)} | variables
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "status").read_text() == "0\n", run.stderr
    if says is None:
        return
    said = [line for line in run.stderr.splitlines() if line != "the end"]
    assert len(said) == bool(says) and all(says in line and line.startswith("program.py: ") for line in said), (
        run.stderr
    )
    if (tmp_path / "lines").exists():
        assert len((tmp_path / "lines").read_bytes().splitlines()) == 20000


ODD = {"OMP_NUM_THREADS": "8,1", "SLURM_CPUS_PER_TASK": "", "HOME": "/nonexistent", "PYTHONOPTIMIZE": "1"}
ODD |= {
    "PYTHONIOENCODING": "ascii",
    "PYTHONWARNINGS": "error",
    "PYTHONSTARTUP": "/nonexistent",
    "GLOO_SOCKET_IFNAME": "",
}
ODD |= {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "x"}
ODD |= {"CUDA_VISIBLE_DEVICES": "abc,,7", "SLURM_CPUS_ON_NODE": "", "SLURM_GPUS_ON_NODE": ""}


@pytest.mark.runs("one")
@pytest.mark.only("ddp_spawn", "lightning", "torchrun_multinode")
def test_run_in_an_odd_shell(example: str, folder: Path) -> None:
    """All of this at once, and an output on a full disk: the run ends with status 0, and its files are complete."""
    from harness.launchers import LAUNCHERS

    words = " ".join(LAUNCHERS[example].command(2))
    run = Run(["bash", "-c", f"exec {words} --epochs 1 >/dev/full"], folder, ODD).wait()
    assert run.status == 0, run.stderr
    lost = [line for line in run.stderr.splitlines() if line.startswith("train.py: ")]
    assert lost == ["train.py: standard output cannot be written (No space left on device): the run goes on without it"]
    names = {path.name for path in (folder / "output").iterdir()}
    assert names >= {"checkpoint.pt", "metrics.csv", "model.pt", "run.json"}, names


@pytest.mark.runs("one")
@pytest.mark.only("ddp_spawn")
def test_refused_in_one_line(example: str, folder: Path) -> None:
    """A run whose GLOO_SOCKET_IFNAME names no interface ends with one line of its own, without a traceback."""
    run = Run(["python", "train.py", "--processes", "1"], folder, {"GLOO_SOCKET_IFNAME": "^docker0,lo"}).wait()
    lines = [line for line in run.stderr.splitlines() if not line.startswith("W")]
    assert run.status == 2 and len(lines) == 1 and "Traceback" not in run.stderr, run.stderr
    assert lines[0].startswith("train.py: error: GLOO_SOCKET_IFNAME=^docker0,lo: ")
