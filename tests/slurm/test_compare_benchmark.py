"""`measure job`, from which a table of RESULTS.md comes, with two examples of one environment and few steps."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import ROOT
from harness.processes import clean_environment
from lab import why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.runs("full"),
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]


def test_compare(example: str, tmp_path: Path) -> None:
    """In the lab both end with the same bits and losses, at plausible costs."""
    words = [sys.executable, "-m", "benchmarks.measure", "job", "--examples", example, "--limit-steps", "3"]
    words += ["--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "job.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["example"] for row in rows] == ["ddp_spawn", example]
    for row in rows:
        assert float(row["weights"]) == 0 and float(row["losses"]) < 1e-12
        assert float(row["s to the first step"]) > 1 and 200 < float(row["MB per process"]) < 4000
    assert f"| {example} | 0 |" in (tmp_path / "job.md").read_text()
