"""`python -m studies.scale`, which docs/scale.md cites: two nodes, one rate, one round."""

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
    command = [sys.executable, "-m", "studies.scale", *words]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


def test_scale(example: str, tmp_path: Path) -> None:
    """Each way moves as many bytes as the model says, no step is shorter than its computing, and the link is found."""
    from studies.scale import COMPUTING, WEIGHTS, read

    done = measure("--rates", "50mbit", "--nodes", "1", "2", "--rounds", "1", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row.way, row.nodes): row for row in read(tmp_path / "scale.csv")}
    assert set(rows) == {(way, nodes) for way in ("DDP", "FSDP", "local SGD") for nodes in (1, 2)}
    for (way, nodes), row in rows.items():
        passes = {"DDP": 2, "FSDP": 4, "local SGD": 2 / 8}[way]
        assert row.sent_mb == pytest.approx(passes * (nodes - 1) / nodes * 4 * WEIGHTS / 1e6, rel=0.1, abs=0.01)
        assert row.seconds > 0.8 * COMPUTING and row.scatter > 0
        assert 0 < row.latency < 1 and row.bandwidth < 50e6 / 8
    assert (tmp_path / "scale.md").read_text().partition("\n\n")[2] in done.stdout


def test_bad_input(example: str, tmp_path: Path) -> None:
    """Without one node, or a rate, nothing is measured, and one line says why."""
    for words, message in (
        (("--nodes", "2", "4"), "--nodes: must be 1, for a step without an exchange, and some that are more"),
        (("--rates", "fast", "--nodes", "1", "2"), "slow: fast: must be a rate such as 100mbit"),
    ):
        refused = measure(*words, "--output", tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("error:") == 1 and message in refused.stderr
    assert not list(tmp_path.iterdir())
