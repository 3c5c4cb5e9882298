"""`measure local` and `measure job`, where the README's table comes from, with two examples of one environment."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from lab import why_not
from tests.harness.launchers import ROOT
from tests.harness.processes import clean_environment

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.only("torchrun_multinode")]
IN_LAB = pytest.param("job", marks=pytest.mark.skipif(bool(why_not()), reason=str(why_not())))


@pytest.mark.parametrize("name", ["local", IN_LAB])
def test_compare(example: str, tmp_path: Path, name: str) -> None:
    """On this machine and in the lab: the same bits, five losses in a picture, plausible costs in a table."""
    words = [sys.executable, "-m", "benchmarks.measure", name, "--examples", example, "--output", tmp_path]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["example"] for row in rows] == ["ddp_spawn", example]
    for row in rows:
        assert float(row["largest_difference"]) == 0 and float(row["test_accuracy"]) > 0.95
        assert float(row["seconds_to_first_step"]) > 1 and float(row["samples_per_second"]) > 10
        assert 200 < float(row["peak_mb_per_process"]) < 4000 and 100 < int(row["code_lines"]) < 500
    assert f"| {example} | ddp_spawn's, bit for bit |" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
