"""noxfile.py installs an example with both of nox's backends, on a machine that has no uv of its own."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.launchers import ROOT
from harness.processes import clean_environment

SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOXFILE = """
import importlib.util
from pathlib import Path

import nox

spec = importlib.util.spec_from_file_location("noxfile", {noxfile!r})
noxfile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(noxfile)


@nox.session
def installs(session):
    noxfile.install(session, Path({folder!r}))
    session.run("python", "-c", "import sys, {package}; print('installed into', sys.prefix, {package}.__file__)")
"""
# In the place of an example: one small package, which the tests have had from the same index.
PACKAGE = "iniconfig"


def path_without(program: str, folder: Path) -> str:
    """Return a PATH with what the system's folders hold, but for one program: links to all the others."""
    folder.mkdir()
    for source in reversed(SYSTEM.split(":")):
        for file in Path(source).glob("*"):
            if file.name != program:
                (folder / file.name).unlink(missing_ok=True)
                (folder / file.name).symlink_to(file)
    return str(folder)


@pytest.mark.parametrize("backend", ["uv", "virtualenv"])
def test_without_uv_on_the_path(tmp_path: Path, backend: str) -> None:
    """The only uv is the one that is installed beside nox: a machine may have one for everybody, and hide its lack.

    That the examples' own requirements can be installed, each session of nox shows.
    """
    path = path_without("uv", tmp_path / "path")
    assert not shutil.which("uv", path=path)
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "requirements.txt").write_text(f"{PACKAGE}=={version(PACKAGE)}\n")
    (folder / "install.sh").write_text("set -e\ncommand -v python\npython -m pip --version\necho done here\n")
    text = NOXFILE.format(noxfile=str(ROOT / "noxfile.py"), folder=str(folder), package=PACKAGE)
    (tmp_path / "noxfile.py").write_text(text)
    environment = clean_environment() | {"PATH": path}
    command = [sys.executable, "-m", "nox", "--default-venv-backend", backend, "--envdir", str(tmp_path / "nox")]
    command += ["-f", str(tmp_path / "noxfile.py"), "-s", "installs"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = tmp_path / "nox" / "installs"
    assert f"installed into {ours} {ours}/lib/" in done.stdout, done.stdout
    # As install.sh has it: the environment's Python, with a pip of its own.
    assert f"{ours}/bin/python\npip " in done.stdout and f"from {ours}/lib/" in done.stdout, done.stdout
    assert "done here" in done.stdout
