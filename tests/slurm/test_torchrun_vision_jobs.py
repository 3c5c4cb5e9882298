"""What torchrun_vision alone promises of a job: predictions on two nodes."""

import csv
import os
from pathlib import Path

import pytest

from harness.jobs import hand_over, submit
from harness.launchers import copy_example
from lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.only("torchrun_vision")]


@pytest.mark.runs("weekly")
def test_predictions(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """`SCRIPT=predict.py sbatch run.slurm` classifies each image once, by four processes on two nodes."""
    folder = copy_example(source, tmp_path / example)
    hand_over(tmp_path)
    trained = submit(lab, example, folder, "--epochs", "1").wait()
    assert trained.shown["JobState"] == "COMPLETED", trained.log
    words = ["--images", "images/val", "--model-of", f"output/{trained.id}", "--part", "16"]
    job = submit(lab, example, folder, *words, SCRIPT="predict.py").wait()
    assert job.shown["JobState"] == "COMPLETED" and "4 processes on 2 nodes" in job.log, job.log
    with open(folder / "output" / job.id / "predictions.csv", newline="") as file:
        rows = [row["path"] for row in csv.DictReader(file)]
    images = folder / "images" / "val"
    assert rows == sorted(os.path.relpath(path, images) for path in images.glob("*/*.png")) and len(rows) == 150
