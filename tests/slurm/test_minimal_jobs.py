"""minimal.slurm, unmodified, on a real SLURM: it starts as many processes as it says, and these train one model."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import SETTINGS, Job, hand_over
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.runs import Reference
from lab import Lab

pytestmark = pytest.mark.slurm
WITH_MINIMAL = sorted(path.parent.name for path in ROOT.glob("examples/*/minimal.slurm"))


@pytest.mark.only(*WITH_MINIMAL)
@pytest.mark.runs("one")
def test_minimal_job(
    example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]
) -> None:
    """It trains as run.slurm does, with as many processes, and one of them prints and writes the model."""
    folder = copy_example(source, tmp_path / example)
    (folder / ".venv").symlink_to(sys.prefix)
    done = lab.run(["sbatch", "--parsable", "minimal.slurm"], cwd=hand_over(folder, lab), env=without_venv())
    assert done.returncode == 0, done.stderr
    job = Job(lab, example, folder, done.stdout.strip()).wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    printed = re.findall(r"epoch (\d+): train loss ([\d.]+), test (?:acc|loss) [\d.]+%?$", job.log, re.MULTILINE)
    rows = outputs.read_metrics(shipped_job().output)
    assert [int(epoch) for epoch, _ in printed] == [row["epoch"] for row in rows], job.log
    for row, (_, train_loss) in zip(rows, printed, strict=True):  # as many processes make as large a global batch
        assert float(train_loss) == pytest.approx(row["train_loss"], rel=0.01)
    assert rows[0]["world_size"] == LAUNCHERS[example].processes_in_job
    weights = outputs.read_model(folder), outputs.read_model(shipped_job().output)
    assert outputs.largest_difference(*weights) < 0.1  # of the same start; the order of sums may be another


def without_venv() -> dict[str, str]:
    """Return the tests' settings of a job, but for the environment, which minimal.slurm finds in its folder."""
    return {name: value for name, value in SETTINGS.items() if name != "VENV"}
