"""The settings in docs/debugging.md: ssh and JSON take them as meant. tests/slurm/test_debugging.py does the rest."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import readme
from harness.launchers import ROOT

PAGE = ROOT / "docs" / "debugging.md"
PROGRAM = ROOT / "jupyter" / "owner_only.py"


@pytest.mark.skipif(not shutil.which("ssh"), reason="not installed: ssh")
def test_ssh_settings(tmp_path: Path) -> None:
    """`ssh -G` takes a compute node through the login node, and the login node directly."""
    file = tmp_path / "config"
    file.write_text(readme.indented(PAGE, "Host login"))
    found = {}
    for host in ("node1", "login"):
        words = ["ssh", "-G", "-F", str(file), host]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        found[host] = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    names = ("hostname", "user", "proxyjump")
    assert [found["node1"].get(name) for name in names] == ["node1", "student", "login"]
    assert [found["login"].get(name) for name in names] == ["login.cluster.example", "student", None]


def test_json() -> None:
    """The JSON is valid, and launch.json attaches to the port of the ssh command."""
    (configuration,) = json.loads(readme.indented(PAGE, '{\n  "version"'))["configurations"]
    _, local, _ = readme.tunnel(readme.indented(PAGE, "the debugger waits"))
    assert configuration["connect"] == {"host": "127.0.0.1", "port": local}
    assert (configuration["type"], configuration["request"]) == ("debugpy", "attach")
    assert json.loads(readme.indented(PAGE, '{\n  "remote.SSH'))["remote.SSH.remoteServerListenOnSocket"] is True


def test_bad_input(tmp_path: Path) -> None:
    """No train.py in this folder, and a package that is missing, are one line each."""
    python = [sys.executable, "-S", str(PROGRAM)]  # -S: without installed packages
    cases = {"there is no": python, "has no debugpy": python, "has no tensorboard": [*python, "tensorboard"]}
    for text, words in cases.items():
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("owner_only.py: error: ") and text in done.stderr
        (tmp_path / "train.py").touch()


def test_rank(tmp_path: Path) -> None:
    """Only the rank that DEBUG_RANK names waits for an editor; the others run train.py as it is."""
    (tmp_path / "train.py").write_text("import sys\nprint('trains', __name__, sys.path[0], *sys.argv[1:])\n")
    words = [sys.executable, "-S", str(PROGRAM), "--epochs", "1"]  # without debugpy, which the named rank would import
    for rank, name in (("0", "RANK"), ("1", "RANK"), ("1", "SLURM_PROCID")):
        settings = {"DEBUG_RANK": "1", name: rank}
        done = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
        wanted = (0, f"trains __main__ {tmp_path} --epochs 1\n") if rank == "0" else (2, "")
        assert (done.returncode, done.stdout) == wanted, done.stderr
