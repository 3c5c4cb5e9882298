"""What only lightning's run.slurm promises: where there is no srun, it is as if there was no SLURM."""

import re
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import SETTINGS, Job, hand_over, submit
from harness.launchers import copy_example
from lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.only("lightning")]


def test_other_devices(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """With other --devices than there are tasks a job ends with one line, which names the line of the header."""
    options = ("--ntasks-per-node=1",)
    job = submit(lab, example, copy_example(source, tmp_path / example), "--devices", "2", options=options)
    assert job.wait().shown["JobState"] == "FAILED", job.log
    errors = set(re.findall(r"^(?:train\.py|run\.slurm): error: (?!the job failed).*", job.log, re.MULTILINE))
    assert len(errors) == 1 and "2 tasks on 2 nodes, not 2 on each" in min(errors), job.log
    assert "#SBATCH --ntasks-per-node" in min(errors) and "Traceback" not in job.log, job.log


@pytest.mark.runs("weekly")  # ordinary on this machine: tests/test_lightning.py
def test_in_an_allocation(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """`python train.py` without srun, in salloc and in a batch script, trains on its node alone; with srun on all."""
    folder = hand_over(copy_example(source, tmp_path / example))
    python = f"{SETTINGS['VENV']}/bin/python train.py --epochs 1"
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"]
    script = f"{python} --output-dir alone && srun --cpus-per-task=2 {python} --output-dir together"
    done = lab.run(["salloc", *options, "bash", "-c", script], cwd=folder, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes on 1 node, gloo on cpu" in done.stdout
    assert "4 processes on 2 nodes, gloo on cpu, 2 threads each" in done.stdout
    assert [outputs.read_metrics(folder / name)[0]["world_size"] for name in ("alone", "together")] == [2, 4]

    words = ["sbatch", "--parsable", *options, f"--job-name={example}", "--output=%x-%j.out", "--wrap", python]
    job = Job(lab, example, folder, lab.run(words, cwd=folder).stdout.strip()).wait()
    assert job.shown["JobState"] == "COMPLETED" and "2 processes on 1 node, gloo on cpu" in job.log, job.log
