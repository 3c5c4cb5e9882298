"""What torchrun_vision alone promises of a job: a tar on the disk of each node, predictions on two nodes."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import readme
from harness.jobs import submit
from harness.launchers import copy_example
from lab import Lab
from tests.slurm.small import two_processes

pytestmark = [pytest.mark.slurm, pytest.mark.only("torchrun_vision")]


@pytest.mark.runs("full")
def test_tar_and_predictions(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """TAR is unpacked on each node, and removed; minimal.slurm runs predict.py, which has each image once."""
    folder = copy_example(source, tmp_path / example)
    shutil.copytree(folder / "images" / "val", folder / "new")
    subprocess.run(["tar", "-cf", "images.tar", "images"], cwd=folder, check=True, timeout=300)
    shutil.rmtree(folder / "images")
    (folder / ".venv").symlink_to(sys.prefix)  # minimal.slurm does not read VENV
    page = f"examples/{example}/README.md"
    line = readme.command(page, "TAR=images.tar sbatch run.slurm")
    job = submit(lab, example, folder, "--epochs", "1", options=two_processes(source), line=line).wait()
    assert job.shown["JobState"] == "COMPLETED" and "2 processes on 2 nodes" in job.log, job.log
    for node in lab.nodes:
        assert "tmp." not in lab.run(["ls", "/tmp"], node=node).stdout
    line = f"sbatch minimal.slurm predict.py --images new --model-of output/{job.id}"
    job = submit(lab, example, folder, line=line).wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    with open(folder / "predictions.csv", newline="") as file:
        rows = [row["path"] for row in csv.DictReader(file)]
    images = folder / "new"
    assert rows == sorted(os.path.relpath(path, images) for path in images.glob("*/*.png")) and len(rows) == 150
