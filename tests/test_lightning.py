"""What only the lightning example promises: no srun no SLURM, its loggers, callbacks that users add."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs, runs
from harness.runs import Reference

pytestmark = pytest.mark.only("lightning")
# What salloc's shell, or a batch script on the first of two nodes, has in its environment.
ALLOCATION: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}
ALLOCATION |= {"SLURM_NODELIST": "node[1-2]", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
ALLOCATION |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_in_an_allocation(example: str, folder: Path, reference: Reference) -> None:
    """With SLURM's variables but without srun it trains on this node alone, and resumes to the same bits.

    Lightning's loggers, asked for, log what metrics.csv has. Lightning itself reads the checkpoint.
    """
    run = runs.train(example, folder, 2, "--epochs", 2, "--logger", "CSVLogger", **ALLOCATION)
    assert "2 processes on 1 node, gloo on cpu" in run.stdout
    logs = folder / "output" / "lightning_logs"
    with open(logs / "version_0" / "metrics.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    for name in ("train_loss", "test_loss", "test_accuracy"):
        values = [float(row[name]) for row in logged if row[name]]
        assert values == pytest.approx([row[name] for row in outputs.read_metrics(folder / "output")], rel=1e-6), name
    runs.train(example, folder, 2, "--resume", "--logger", "TensorBoardLogger", **ALLOCATION)
    assert list(logs.glob("version_1/events.out.tfevents.*"))
    outputs.assert_same_run(folder / "output", reference.output)
    files = {path.name for path in reference.output.iterdir()}
    assert files == {".lock", "metrics.csv", "run.json", "checkpoint.pt", "model.pt"}


@pytest.mark.runs("full")
def test_callbacks(example: str, folder: Path) -> None:
    """The page's diff: the best epoch has a file of its own, and the run ends early; so does a resume."""
    page = (Path(__file__).parents[1] / "docs" / "lightning.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.MULTILINE):
        old, new = (re.sub("^.", "", part, flags=re.MULTILINE) for part in (old, new))
        edits.edit(folder / "train.py", old, new)
    words = ["--epochs", "9", "--lr", "0", "--limit-steps", "2"]
    runs.train(example, folder, 2, *words)
    assert len(outputs.read_metrics(folder / "output")) == 4  # the first one, and three that were not better
    assert [path.name for path in (folder / "output" / "best").iterdir()] == ["best.ckpt"]
    runs.train(example, folder, 2, *words, "--resume")
    assert len(outputs.read_metrics(folder / "output")) <= 5
