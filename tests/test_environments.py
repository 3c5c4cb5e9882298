"""The recipes of docs/install.md for a cluster without the internet, and for a lock file."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import readme, runs
from harness.launchers import EXAMPLES, HOROVOD, LAUNCHERS, ROOT
from harness.processes import clean_environment

PAGE = ROOT / "docs" / "install.md"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}


@pytest.mark.only(*(name for name in EXAMPLES if name not in HOROVOD[1:]))  # these build Horovod in the same way
@pytest.mark.runs("full")
@pytest.mark.timeout(3600)
def test_without_internet(example: str, folder: Path, tmp_path: Path) -> None:
    """Wheels are collected in one folder, and copied to another, where they are installed without an index.

    Horovod is compiled there, without MPI, from its source. That wheel is then taken as a file, too.
    """
    blocks = [readme.block("docs/install.md", "pip wheel ...")]
    if example in HOROVOD:
        blocks.append(readme.block("docs/install.md", "pip download ..."))
    other = shutil.copytree(folder, tmp_path / "other machine")
    for collect, *_ in blocks:
        download = runs.Run(["bash", "-ec", collect], other).wait(900)
        assert download.status == 0, download.stderr
    shutil.move(other / "wheels", folder / "wheels")
    caches = OFFLINE | {"HOROVOD_WITHOUT_MPI": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    install = [line for _, *lines in blocks for line in lines]
    if example in HOROVOD:
        install.append("bash install.sh $XDG_CACHE_HOME/horovod-wheels/*-gloo-only/*.whl")
    done = runs.Run(["bash", "-ec", "\n".join(install)], folder, caches).wait(2400)
    assert done.status == 0, done.stderr
    if example in HOROVOD:
        assert done.stdout.count("building") == 1 and done.stdout.count("have added up") == 2, done.stdout
    environment: dict[str, Any] = {"PATH": f"{folder}/.venv/bin:{clean_environment()['PATH']}"}
    run = runs.train(example, folder, 2, "--epochs", 1, **environment)
    assert "train loss" in run.stdout and (folder / "output" / LAUNCHERS[example].model).stat().st_size


@pytest.mark.only(*HOROVOD)
def test_versions(example: str, source: Path) -> None:
    """What the page downloads for install.sh are the versions that install.sh asks for."""
    (command,) = (line for block in readme.blocks(PAGE) for line in block if line.startswith("pip download"))
    script = (source / "install.sh").read_text()
    pins = re.findall(r"(\w+)==([\d.]+)", command)
    assert [name for name, _ in pins] == ["horovod", "setuptools", "wheel"]
    for name, version in pins:
        assert (f"\nversion={version}\n" if name == "horovod" else f"'{name}=={version}'") in script, name


@pytest.mark.runs("full")
def test_lock(example: str, folder: Path) -> None:
    """The page's lock file has a checksum of each package that the example needs, and can be installed as it says.

    Only ddp_spawn's is installed, which takes what other tests have downloaded. Of a dry run uv says what it would do.
    """
    write = readme.command("docs/install.md", "uv pip compile requirements.txt ...")
    install = readme.command("docs/install.md", "uv pip install --require-hashes -r requirements.lock")
    python = {"VIRTUAL_ENV": str(folder / ".venv")}
    for line in ("python3 -m venv --without-pip .venv", write):
        done = runs.Run(["bash", "-ec", line], folder, python).wait(600)
        assert done.status == 0, done.stderr
    lock = (folder / "requirements.lock").read_text()
    packages = re.findall(r"^\S+==\S+ .*\\$", lock, re.MULTILINE)
    pins = re.findall(r"^\S+==\S+", (folder / "requirements.txt").read_text(), re.MULTILINE)
    assert {*pins} < {line.split()[0] for line in packages} and len(packages) == len(re.findall("==", lock)), lock
    if example != "ddp_spawn":
        install = install.replace("uv pip install", "uv pip install --dry-run")
    done = runs.Run(["bash", "-ec", install], folder, python).wait(900)
    assert done.status == 0 and re.search(f"[Ii]nstall(ed)? {len(packages)} packages", done.stderr), done.stderr
    if example == "ddp_spawn":
        run = runs.Run([f"{folder}/.venv/bin/python", "train.py", "--help"], folder).wait()
        assert run.status == 0, run.stderr
