"""What run.slurm promises where srun starts each process: wrong tasks are refused, one process's end ends all."""

import re
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import Job, submit, two_processes
from harness.launchers import copy_example
from lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.only("lightning", "srun_multinode")]


def assert_wrong_tasks(job: Job, text: str) -> None:
    """Check that a job has ended with one line, which says this and names the line of the header to change."""
    assert job.shown["JobState"] == "FAILED", job.log
    errors = set(re.findall(r"^(?:train\.py|run\.slurm): error: (?!the job failed).*", job.log, re.MULTILINE))
    assert len(errors) == 1 and text in min(errors) and "#SBATCH --ntasks-per-node" in min(errors), job.log
    assert "Traceback" not in job.log


def test_wrong_tasks(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """One task for two GPUs, and --ntasks without a number for each node: the job ends and says so, none hangs."""
    options = ("--ntasks-per-node=1", "--gpus-per-node=2")
    job = submit(lab, example, copy_example(source, tmp_path / "gpus" / example), options=options)
    assert_wrong_tasks(job.wait(), "equal to --gpus-per-node")
    folder = copy_example(source, tmp_path / "number" / example)
    edits.edit(folder / "run.slurm", "#SBATCH --ntasks-per-node=2 ", "#SBATCH --ntasks=4 ")
    assert_wrong_tasks(submit(lab, example, folder).wait(), "--ntasks will not do")


def test_exception_in_one_process(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """An exception on rank 1 alone: its traceback is in the log, and the whole job ends within 60 s."""
    folder = copy_example(source, tmp_path / example)
    edits.plant(folder, "if torch.distributed.get_rank() == 1:\n    raise ArithmeticError('planted')\n")
    job = submit(lab, example, folder, options=two_processes(source))
    job.wait_for_line("ArithmeticError: planted")
    job.wait(60)
    assert job.shown["JobState"] == "FAILED", job.log
    assert not (job.output / "model.pt").exists()
