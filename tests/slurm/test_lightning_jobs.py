"""What only lightning's run.slurm promises: tasks that do not fit are refused; without srun there is no SLURM."""

import re
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import SETTINGS, hand_over, submit
from harness.launchers import copy_example
from lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.only("lightning")]


def test_other_devices(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """A job that says --ntasks alone ends with one line, which names the line of the header."""
    folder = copy_example(source, tmp_path / example)
    header = (folder / "run.slurm").read_text()
    (folder / "run.slurm").write_text(header.replace("#SBATCH --ntasks-per-node=2 ", "#SBATCH --ntasks=4"))
    job = submit(lab, example, folder).wait()
    assert job.shown["JobState"] == "FAILED", job.log
    errors = re.findall(r"^(?:train\.py|run\.slurm): error: (?!the job failed).*", job.log, re.MULTILINE)
    assert len(errors) == 1 and "use --ntasks-per-node" in errors[0] and "Traceback" not in job.log, job.log


@pytest.mark.runs("full")  # ordinary on this machine: tests/test_lightning.py
def test_in_an_allocation(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """`python train.py` without srun, in salloc, trains on its node alone; with srun and --nodes on all."""
    folder = hand_over(copy_example(source, tmp_path / example))
    python = f"{SETTINGS['VENV']}/bin/python train.py --epochs 1"
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"]
    script = f"{python} --output-dir alone && srun --cpus-per-task=2 {python} --nodes 2 --output-dir together"
    done = lab.run(["salloc", *options, "bash", "-c", script], cwd=folder, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes on 1 node, gloo on cpu" in done.stdout
    assert "4 processes on 2 nodes, gloo on cpu" in done.stdout
    assert [outputs.read_metrics(folder / name)[0]["world_size"] for name in ("alone", "together")] == [2, 4]
