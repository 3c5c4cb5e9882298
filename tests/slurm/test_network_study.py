"""`python -m studies.network`, which docs/slow-networks.md cites: one model, one round, a fast and a slow link."""

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
    pytest.mark.runs("weekly"),
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]


def measure(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the study in the repository."""
    command = [sys.executable, "-m", "studies.network", *words]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


def test_network(example: str, tmp_path: Path) -> None:
    """Each way sends what it says that it sends, and at 50 Mbit/s those that send less than DDP are faster."""
    from studies.network import ALONE, PLAIN, WAYS

    done = measure("--rates", "none", "50mbit", "--models", "ConvNet", "--rounds", "1", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "network.csv", newline="") as file:
        rows = {(row["rate"], row["way"]): row for row in csv.DictReader(file)}
    assert list(rows) == [(rate, way) for rate in ("none", "50mbit") for way in WAYS]
    for row in rows.values():
        assert float(row["sent_mb"]) == pytest.approx(float(row["mb"]), rel=0.05, abs=0.01)
        assert row["model"] == "ConvNet" and 0 < float(row["seconds"]) < 10
    seconds = {way: float(rows["50mbit", way]["seconds"]) for way in WAYS}
    for way in set(WAYS) - {PLAIN}:
        assert seconds[way] < seconds[PLAIN] / 1.2, seconds
    assert float(rows["none", ALONE]["mb"]) == 0
    table = (tmp_path / "network.md").read_text()
    assert table.count("| ConvNet |") == len(WAYS) and "| 50mbit |" in table and table.partition("\n")[2] in done.stdout


def test_wrong_rate(example: str, tmp_path: Path) -> None:
    """A word that is not a rate is refused with one line, before anything is measured."""
    refused = measure("--rates", "none", "fast", "--output", tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("error:") == 1
    assert refused.stderr.splitlines()[-1].endswith(
        "slow: fast: must be a rate such as 100mbit, from 1kbit to 1000gbit"
    )
    assert not list(tmp_path.iterdir())
