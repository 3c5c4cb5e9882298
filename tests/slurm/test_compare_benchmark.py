"""`measure local` and `measure job`, where the table of RESULTS.md comes from, with two examples of one environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import ROOT
from harness.processes import clean_environment
from lab import why_not

pytestmark = [pytest.mark.slurm, pytest.mark.runs("weekly"), pytest.mark.only("torchrun_multinode")]
IN_LAB = pytest.param("job", marks=pytest.mark.skipif(bool(why_not()), reason=str(why_not())))


@pytest.mark.parametrize("name", ["local", IN_LAB])
def test_compare(example: str, tmp_path: Path, name: str) -> None:
    """On this machine and in the lab: the same bits and losses, plausible costs in a table, a picture."""
    from benchmarks import report  # here, since it imports matplotlib

    words = [sys.executable, "-m", "benchmarks.measure", name, "--examples", example, "--output", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = report.read_runs(tmp_path / f"{name}.csv")
    assert [run.example for run in runs] == ["ddp_spawn", example] and report.agreeing(runs) == runs
    for run in runs:
        assert run.test_accuracy > 0.95 and len(run.train_losses) == 5
        assert run.seconds_to_first_step > 1 and run.samples_per_second > 10
        assert 200 < run.peak_mb_per_process < 4000 and 100 < run.lines_to_read < 260
    assert f"| {example} | ddp_spawn's, bit for bit |" in (tmp_path / f"{name}.md").read_text()
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
