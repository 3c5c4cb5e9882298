"""What only lightning's run.slurm promises: wrong tasks are refused, no srun no SLURM, one process's end ends all."""

import re
from pathlib import Path

import pytest

from harness import edits, outputs
from harness.jobs import SETTINGS, Job, hand_over, submit, two_processes
from harness.launchers import copy_example
from lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.only("lightning")]
WRONG = {  # options of sbatch, arguments of train.py, what the line says
    "one task for two GPUs": (("--ntasks-per-node=1", "--gpus-per-node=2"), (), "equal to --gpus-per-node"),
    "--ntasks instead": ((), (), "--ntasks will not do"),
    "other --devices": (("--ntasks-per-node=1",), ("--devices", "2"), "2 tasks on 2 nodes, not 2 on each"),
}


def test_wrong_tasks(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """Each such job ends and says which line of the header to change, none hangs."""
    for number, (fault, (options, arguments, text)) in enumerate(WRONG.items()):
        folder = copy_example(source, tmp_path / str(number) / example)
        script = (folder / "run.slurm").read_text()
        if fault == "--ntasks instead":
            assert "#SBATCH --ntasks-per-node=2 " in script
            (folder / "run.slurm").write_text(script.replace("#SBATCH --ntasks-per-node=2 ", "#SBATCH --ntasks=4 "))
        job = submit(lab, example, folder, *arguments, options=options).wait()
        assert job.shown["JobState"] == "FAILED", fault
        errors = set(re.findall(r"^(?:train\.py|run\.slurm): error: (?!the job failed).*", job.log, re.MULTILINE))
        assert len(errors) == 1 and text in min(errors) and "#SBATCH --ntasks-per-node" in min(errors), job.log
        assert "Traceback" not in job.log


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


def test_exception_in_one_process(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """An exception on rank 1 alone: its traceback is in the log, and the whole job ends within 60 s."""
    folder = copy_example(source, tmp_path / example)
    edits.plant(folder, "if torch.distributed.get_rank() == 1:\n    raise ArithmeticError('planted')\n")
    job = submit(lab, example, folder, options=two_processes(source))
    job.wait_for_line("ArithmeticError: planted")
    job.wait(60)
    assert job.shown["JobState"] == "FAILED", job.log
    assert not (job.output / "model.pt").exists()
