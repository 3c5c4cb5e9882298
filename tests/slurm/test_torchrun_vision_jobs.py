"""What torchrun_vision alone promises of a job: predictions on two nodes, also in several starts."""

import csv
import os
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import hand_over, submit
from harness.launchers import copy_example
from harness.processes import wait_until
from lab import Lab, faults

pytestmark = [pytest.mark.slurm, pytest.mark.only("torchrun_vision")]


@pytest.mark.runs("weekly")
def test_predictions(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """`SCRIPT=predict.py sbatch run.slurm` classifies each image once, by four processes on two nodes.

    It is stopped twice near its time limit, in its second of three rounds and in the one after that, and goes on.
    """
    folder = copy_example(source, tmp_path / example)
    line = "        vote = torch.tensor([int(plumbing.stop_requested())])\n"
    wait = '        while progress["step"] == 1 and not plumbing.stop_requested(): __import__("time").sleep(0.1)\n'
    edits.edit(folder / "predict.py", line, wait + line)
    hand_over(tmp_path)
    trained = submit(lab, example, folder, "--epochs", "1").wait()
    assert trained.shown["JobState"] == "COMPLETED", trained.log
    words = ["--images", "images/val", "--model-of", f"output/{trained.id}", "--part", "16"]
    job = submit(lab, example, folder, *words, SCRIPT="predict.py")
    for parts in (4, 8):
        wait_until(lambda parts=parts: len([*job.output.glob("parts/0*.csv")]) == parts, 300, f"{parts} parts")
        faults.timelimit(lab, job.id)
    job.wait()
    assert job.shown["Restarts"] == "2" and "8 of them done before" in job.log, job.log
    assert job.shown["JobState"] == "COMPLETED" and "4 processes on 2 nodes" in job.log, job.log
    with open(folder / "output" / job.id / "predictions.csv", newline="") as file:
        rows = [row["path"] for row in csv.DictReader(file)]
    images = folder / "images" / "val"
    assert rows == sorted(os.path.relpath(path, images) for path in images.glob("*/*.png")) and len(rows) == 150
