"""benchmarks/scaling.slurm on one and two nodes: it submits the example's own run.slurm, and draws what it measures."""

import argparse
import csv
import os
import re
import shutil
import subprocess
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
# On a cluster there may be no PyTorch in the environment that submits, and nothing else of this repository.
WITHOUT = "import runpy, sys; sys.modules |= dict.fromkeys(['common', 'lab', 'tests', 'torch']); "
ALONE = [sys.executable, "-c", WITHOUT + "runpy.run_module('benchmarks.measure', run_name='__main__')", "scaling"]


@pytest.mark.runs("weekly")
def test_scaling(example: str, source: Path, tmp_path: Path) -> None:
    """Weak scaling keeps the batch of a process, strong scaling that of all; what is measured is not measured again."""
    folder = tmp_path / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", folder)
    copy_example(source, tmp_path / "examples" / example)
    hand_over(tmp_path)  # the job writes its results there, too
    shared = on_this_machine_only(tmp_path, Path(sys.prefix))
    # One CPU is for scaling.slurm itself.
    with Lab(Wanted(nodes=2, cpus=5, name=f"scaling{os.getpid()}", share=shared)) as lab:
        words = ["sbatch", "--parsable", "scaling.slurm", "--nodes", "2", "1", "--rounds", "1", "--epochs", "2"]
        job = Job(lab, "scaling", folder, lab.run(words, cwd=folder, env=SETTINGS).stdout.strip())
        job.wait()
        logs = "".join(path.read_text() for path in tmp_path.glob("results/scaling/jobs/*.out"))
        assert job.shown["JobState"] == "COMPLETED", job.log + logs
    results = tmp_path / "results" / "scaling"
    with open(results / "scaling.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("scaling", "nodes", "processes", "batch_size")
    expected = [("weak", 1, 2, 64), ("strong", 1, 2, 64), ("weak", 2, 4, 64), ("strong", 2, 4, 32)]
    assert [tuple(row[name] for name in columns) for row in rows] == [tuple(map(str, row)) for row in expected]
    for row in rows:
        name = f"{example}-{row['nodes']}-nodes-batch-{row['batch_size']}-epochs-2-round-0-??????"
        (output,) = (results / "jobs").glob(name)
        speeds = [part["samples_per_second"] for part in outputs.read_metrics(output)]
        assert speeds[1] == float(row["samples_per_second"])
    for scaling in ("weak", "strong"):
        assert re.search(rf"\| {example} \| {scaling} \| fp32 \| 1 \| 2 \| \d+ \| 1\.00 \|", job.log), job.log
        assert re.search(rf"\| {example} \| {scaling} \| fp32 \| 2 \| 4 \| \d+ \| \d\.\d\d \|", job.log), job.log
    assert (results / "scaling.md").read_text() in job.log
    assert (results / "scaling.png").read_bytes().startswith(b"\x89PNG")

    again = [*ALONE, "--nodes", "1", "2", "--rounds", "1", "--epochs", "2"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=300)  # no job: no SLURM
    assert done.returncode == 0 and "efficiency" in done.stdout, done.stderr


SBATCH = """#!/bin/bash
printf "epoch,samples_per_second,world_size\\n1,1,2\\n2,$$,2\\n" >"$OUTPUT_DIR/metrics.csv"
touch "$OUTPUT_DIR/model.pt"
"""


def test_measured_anew(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of another run.slurm, or of other options of sbatch, are not taken for those of this one."""
    from benchmarks import measure

    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = tmp_path / "examples" / example / "run.slurm"
    script.parent.mkdir(parents=True)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    args = argparse.Namespace(batch_size=64, nodes=[1], epochs=2, output=tmp_path)
    speeds = []
    for text, options in (("a", []), ("a", []), ("b", []), ("b", ["--qos=long"])):
        script.write_text(text)
        args.sbatch = options
        speeds.append(measure.run_job(args, example, "weak", 1, 0))
    assert speeds[0] == speeds[1] and len(set(speeds)) == 3


def test_bad_numbers(example: str) -> None:
    """A batch that cannot be divided is refused with one line."""
    refused = subprocess.run([*ALONE, "--nodes", "1", "3"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "--batch-size 64 cannot be divided among 3 nodes" in refused.stderr
    assert "Traceback" not in refused.stderr
