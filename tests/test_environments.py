"""The recipe of docs/environments.md for a cluster without the internet."""

import shutil
from pathlib import Path

import pytest

from harness import outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT
from harness.processes import clean_environment

PAGE = ROOT / "docs" / "environments.md"
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}


@pytest.mark.runs("weekly")
@pytest.mark.timeout(2400)
@pytest.mark.only("ddp_spawn", "deepspeed")  # deepspeed: PyPI has its source only, of which a wheel is to be made
def test_without_internet(example: str, folder: Path, tmp_path: Path) -> None:
    """Wheels are collected in one folder, and copied to another, where they are installed without an index."""
    block = next(block for block in readme.blocks(PAGE) if any("--wheel-dir" in line for line in block))
    collect, *install = block
    other = shutil.copytree(folder, tmp_path / "other machine")
    download = runs.Run(["bash", "-ec", collect], other).wait(900)
    assert download.status == 0, download.stderr
    shutil.move(other / "wheels", folder / "wheels")
    done = runs.Run(["bash", "-ec", "\n".join(install)], folder, OFFLINE).wait(900)
    assert done.status == 0, done.stderr
    environment = {"PATH": f"{folder}/.venv/bin:{clean_environment()['PATH']}"}
    run = runs.train(example, folder, 2, "--epochs", 1, **environment)
    assert LAUNCHERS[example].metric in run.stdout and outputs.read_model(folder / "output")
