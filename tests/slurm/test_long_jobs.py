"""Jobs with longrun.py and job.sh that train: stopped, preempted, killed, cut off, continued, always at the same bits.

A file lets each of them wait where an epoch begins, so that nothing depends on how long an epoch takes.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import (
    EPOCHS,
    Job,
    assert_failed,
    held,
    hold,
    kill_worker,
    submit,
    two_processes,
)
from harness.launchers import LAUNCHERS, ROOT
from harness.processes import seldom, wait_until
from harness.runs import Reference
from lab import Lab, faults

pytestmark = [pytest.mark.slurm, pytest.mark.only("longrun")]
EDITED = "echo 'the edited program'\nexit 3\n"


def edit_all(folder: Path) -> None:
    """Change each file of a folder's program. Of job.sh stay the first lines, which hand over to the job's copy."""
    for file in [*folder.glob("*.py"), *folder.glob("common/*.py")]:
        file.write_text("raise SystemExit('the edited program')\n")
    for file in folder.glob("*.slurm"):
        file.write_text(f"#!/bin/bash\n{EDITED}")
    first, end, _ = (folder / "job.sh").read_text().partition("        return\n    fi\nfi\n")
    assert end, "job.sh does not hand over"
    (folder / "job.sh").write_text(f"{first}{end}{EDITED}")


def wait_for_start(job: Job, number: int) -> None:
    """Wait until a job has said for the nth time what it trains; raise AssertionError if it ends before."""
    first_line, ended = LAUNCHERS[job.name].first_line, seldom(lambda: job.ended)
    wait_until(lambda: job.log.count(first_line) >= number or ended(), 300, f"start {number} of job {job.id}")
    assert job.log.count(first_line) == number, f"{job.shown}\n{job.log}"


def continue_by_hand(job: Job, *options: str) -> Job:
    """Continue a job in a new one, as README.md and the log say, where sbatch passes no environment on."""
    if not (job.folder / ".venv").exists():
        (job.folder / ".venv").symlink_to(sys.prefix)
    line = f"sbatch run.slurm --output-dir output/{job.id}"
    assert line.replace(job.id, "1234") in (ROOT / "examples" / job.name / "README.md").read_text()
    return submit(job.lab, job.name, job.folder, options=options, line=line, SBATCH_EXPORT="NONE")


def test_stopped_and_killed(
    example: str, source: Path, lab: Lab, tmp_path: Path, two_process_job: Callable[[], Reference]
) -> None:
    """A job is stopped near its time limit and preempted; it goes on after the step at which it has stopped.

    It runs the program that was submitted. Then a user makes the file `stop`: the job ends well, and is not requeued.
    Another job continues it, and loses a worker: where torchrun starts it, all go on from the checkpoint, and elsewhere
    the job fails within a minute and is continued once more. The end has the bits of an undisturbed job.
    """
    recovers, at_a_step = LAUNCHERS[example].job_recovers, LAUNCHERS[example].stops_at_a_step
    folder = held(source, tmp_path / example, epoch=1)
    program = {path: path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".sh", ".slurm")}
    job = submit(lab, example, folder, options=two_processes(source))
    job.wait_for_epoch(1)
    edit_all(folder)
    faults.timelimit(lab, job.id)
    job.wait_for_line(f"run.slurm: requeueing job {job.id}")
    hold(folder, 2)
    wait_for_start(job, 2)
    if at_a_step:
        job.wait_for_epoch(2)
    faults.requeue(lab, job.id)
    wait_until(lambda: job.log.count("stopped by a signal") == 2, 300, "the stop of a preempted job")
    hold(folder, 3)
    wait_for_start(job, 3)
    if at_a_step:
        job.wait_for_epoch(3)
    (job.output / "stop").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    assert job.shown["Restarts"] == "2" and job.log.count("requeueing") == 1, job.log
    assert "the edited program" not in job.log and "error: the job failed" not in job.log, job.log

    for path, text in program.items():
        path.write_text(text)
    hold(folder, 4)
    again = continue_by_hand(job, "--nodes=1", "--cpus-per-task=2")
    again.wait_for_line(f"continuing after epoch {3 if at_a_step else 4} of {EPOCHS}")
    if at_a_step:
        wait_until(lambda: "epoch  4/" in again.log, 300, "the end of epoch 4")
    since = time.time()
    kill_worker(again)
    if recovers:
        wait_for_start(again, 2)
    else:
        assert_failed(again, since, output=job.output.name)
    hold(folder, None)
    if not recovers:
        again = continue_by_hand(job, "--cpus-per-task=2")
    assert again.wait().shown["JobState"] == "COMPLETED", again.log
    outputs.assert_same_run(job.output, two_process_job().output)

    run = outputs.read_run(job.output)
    each = run["stops"][-1]["step"] // EPOCHS  # steps of an epoch
    stops = [each + 1, 2 * each + 1, 3 * each + 1] if at_a_step else [2 * each, 3 * each, 4 * each]
    assert [stop["step"] for stop in run["stops"]] == [*stops, EPOCHS * each], run["stops"]
    assert [start["step"] for start in run["starts"]] == [0, *stops, 4 * each], run[
        "starts"
    ]  # the last: after the kill
