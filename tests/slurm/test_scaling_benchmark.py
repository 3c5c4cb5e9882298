"""benchmarks/scaling.slurm on one and two nodes: it submits the example's own run.slurm, and tells what it measures."""

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import SETTINGS, Job, hand_over, on_this_machine_only
from harness.launchers import ROOT, copy_example
from lab import Lab, Wanted, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]


@pytest.mark.runs("full")
def test_scaling(example: str, tmp_path: Path) -> None:
    """Weak scaling keeps the batch of a process, strong scaling that of all; the figures are those of metrics.csv."""
    for name in ("benchmarks", "harness"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for source in (ROOT / "examples").glob("*/train.py"):
        copy_example(source.parent, tmp_path / "examples" / source.parent.name)
    hand_over(tmp_path)  # the job writes its results there, too
    shared = on_this_machine_only(tmp_path, Path(sys.prefix))
    # One CPU is for scaling.slurm itself.
    with Lab(Wanted(nodes=2, cpus=5, name=f"scaling{os.getpid()}", share=shared)) as lab:
        words = ["sbatch", "--parsable", "scaling.slurm", "--nodes", "2", "1", "--rounds", "1", "--epochs", "2"]
        folder = tmp_path / "benchmarks"
        job = Job(lab, "scaling", folder, lab.run(words, cwd=folder, env=SETTINGS).stdout.strip())
        job.wait()
        logs = "".join(path.read_text() for path in tmp_path.glob("results/scaling/jobs/*.out"))
        assert job.shown["JobState"] == "COMPLETED", job.log + logs
    results = tmp_path / "results" / "scaling"
    with open(results / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("scaling", "nodes", "processes", "batch")
    expected = [("weak", 1, 2, 64), ("strong", 1, 2, 64), ("weak", 2, 4, 64), ("strong", 2, 4, 32)]
    assert [tuple(row[name] for name in columns) for row in rows] == [tuple(map(str, row)) for row in expected]
    for row in rows:
        name = f"{example}-{row['nodes']}-nodes-batch-{row['batch']}-epochs-2-round-0-??????"
        (output,) = (results / "jobs").glob(name)
        assert outputs.read_metrics(output)[1]["samples_per_second"] == float(row["samples/s"])
    assert (results / "scaling.md").read_text() in job.log
