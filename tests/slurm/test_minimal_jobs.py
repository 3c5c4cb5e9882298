"""minimal.slurm, unmodified, on a real SLURM: it starts as many processes as it says, and these train one model."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import outputs, readme
from harness.jobs import submit
from harness.launchers import LAUNCHERS, MINIMAL, copy_example
from harness.runs import Reference
from lab import Lab

pytestmark = pytest.mark.slurm


@pytest.mark.only(*MINIMAL)
@pytest.mark.runs("one")
def test_minimal_job(
    example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]
) -> None:
    """It trains as run.slurm does, with as many processes, and one of them prints and writes the model."""
    folder = copy_example(source, tmp_path / example)
    (folder / ".venv").symlink_to(sys.prefix)  # it does not read VENV
    line = readme.command(f"examples/{example}/README.md", "sbatch minimal.slurm")
    job = submit(lab, example, folder, line=line).wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    line = r"epoch (\d+): train loss ([\d.]+)(?:, test loss [\d.]+)?(?:, test acc [\d.]+%)?$"
    printed = re.findall(line, job.log, re.MULTILINE)
    rows = outputs.read_metrics(shipped_job().output)
    assert [int(epoch) for epoch, _ in printed] == [row["epoch"] for row in rows], job.log
    for row, (_, train_loss) in zip(rows, printed, strict=True):  # as many processes make as large a global batch
        assert float(train_loss) == pytest.approx(row["train_loss"], rel=0.01)
    assert rows[0]["world_size"] == LAUNCHERS[example].processes_in_job
    weights = outputs.read_model(folder), outputs.read_model(shipped_job().output)
    assert outputs.largest_difference(*weights) < 0.1  # of the same start; the order of sums may be another
