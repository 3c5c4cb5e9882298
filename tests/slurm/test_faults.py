"""The fault matrix: each fault on each job ends as docs/faults.md says; resumed, the job has the same bits."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import (
    CPUS,
    EPOCHS,
    GPUS,
    NODES,
    Job,
    all_nodes,
    assert_completed,
    assert_failed,
    assert_no_step_lost,
    hand_over,
    header,
    kill_worker,
    on_this_machine_only,
    slowed,
    submit,
    two_processes,
)
from harness.launchers import LAUNCHERS
from harness.processes import ASK_SLURM, wait_until, with_framework
from harness.runs import Reference
from lab import Lab, Wanted, faults, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.only("plumbing")]


@pytest.fixture(scope="module")
def disk(session_folder: Path) -> Iterator[Path]:
    """A file system of its own, of 512 MB, which a test may fill; a checkpoint of resnet18 has 128 MB."""
    if reason := why_not():
        pytest.skip(reason)
    path = session_folder / f"disk{os.getpid()}"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", path], check=True, timeout=300)
    # It waits for the end of its input, and so of this process, however that ends; Ctrl-C is for this one alone.
    unmount = ["sh", "-c", 'cat; umount --lazy "$0"', str(path)]
    with subprocess.Popen(unmount, stdin=subprocess.PIPE, cwd="/", start_new_session=True) as after:
        yield path
    assert after.returncode == 0


@pytest.fixture(scope="module")
def fragile(disk: Path, session_folder: Path) -> Iterator[Lab]:
    """A lab of this module's own, since its nodes are cut off and stopped; all of them see the small disk."""
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    with Lab(Wanted(NODES, CPUS, GPUS, name=f"fragile{os.getpid()}", share=shared)) as lab:
        yield lab


def last_node(job: Job) -> str:
    """Return the last of the nodes that a job asks for."""
    return f"node{header(job.folder, 'nodes')}"


def interrupted(job: Job) -> None:
    """Wait until SLURM has taken the job off its nodes: 20 s without an answer here, 300 s by default."""
    wait_until(lambda: job.shown["JobState"] != "RUNNING", 300, "the end of the job that lost a node", ASK_SLURM)


def kill_all(job: Job) -> None:
    """Send SIGKILL to every process of the job that has a framework loaded."""
    for pid in with_framework(job.processes()):
        os.kill(pid, signal.SIGKILL)


def fill(job: Job) -> None:
    """Fill the disk that the job writes to."""
    words = ["dd", "if=/dev/zero", f"of={job.output.parent / 'full'}", "bs=64k"]
    done = subprocess.run(words, capture_output=True, timeout=300)
    assert b"No space left" in done.stderr


def make_room(job: Job) -> None:
    """Remove what fills the disk."""
    (job.output.parent / "full").unlink()


def remove_output(job: Job) -> None:
    """Remove the folder that the job writes to."""
    shutil.rmtree(job.output)


def truncate(job: Job) -> None:
    """End the job, cut its checkpoint in half, and start it again."""
    since = time.time()
    kill_all(job)
    assert_failed(job, since)
    for path in job.output.glob(LAUNCHERS[job.name].checkpoint):
        os.truncate(path, path.stat().st_size // 2)
    faults.requeue(job.lab, job.id)
    wait_until(lambda: not job.ended, 300, "the job's return to the queue", ASK_SLURM)


def move_away(job: Job) -> None:
    """Move the checkpoint away, as the message says."""
    name = LAUNCHERS[job.name].checkpoint.partition("/")[0]
    (job.output / name).rename(job.output / "moved-away")


def cut(job: Job) -> None:
    """Take the job's last node off the network until SLURM has noticed."""
    faults.cut(job.lab, last_node(job))
    interrupted(job)
    faults.heal(job.lab, last_node(job))


def stop_slurmd(job: Job) -> None:
    """End slurmd on the job's last node until SLURM has noticed."""
    faults.stop_slurmd(job.lab, last_node(job))
    interrupted(job)
    faults.start_slurmd(job.lab, last_node(job))


class Outcome(Enum):
    """How a job ends after a fault, without help; the values are the words of docs/faults.md."""

    RECOVERS = "recovers"
    FAILS = "fails, resumable"  # it continues when it is requeued
    EITHER = "depends on timeouts"


@dataclass(frozen=True)
class Fault:
    """One row of the matrix."""

    inflict: Callable[[Job], None]
    says: str = ""  # what the log says, if the job ends
    repair: Callable[[Job], None] = lambda job: None
    outcome: Outcome = Outcome.FAILS
    retried: bool = False  # whether it recovers where dead processes are started again
    asked: bool = False  # whether SLURM asks the job to stop, so that one which listens loses no step
    restarts: bool = False  # whether the job has to start over, since the fault took its checkpoint
    sleep: int = 2  # seconds that each epoch of the job's first start takes longer
    elsewhere: bool = False  # whether other tests do nearly the same with 2 processes


FAULTS = {
    "SIGKILL to one process": Fault(kill_worker, "(SIGKILL|Killed)", retried=True, elsewhere=True),
    "SIGKILL to all processes": Fault(kill_all, "(SIGKILL|Killed)", elsewhere=True),
    "time limit": Fault(
        lambda job: faults.timelimit(job.lab, job.id), outcome=Outcome.RECOVERS, asked=True, elsewhere=True
    ),
    "preempted": Fault(
        lambda job: faults.requeue(job.lab, job.id), outcome=Outcome.RECOVERS, asked=True, elsewhere=True
    ),
    "network of a node lost": Fault(cut, outcome=Outcome.EITHER, sleep=30),
    "`slurmd` of a node stopped": Fault(stop_slurmd, outcome=Outcome.RECOVERS, sleep=30),
    "disk full": Fault(fill, "cannot write .*No space left", make_room),
    "checkpoint truncated": Fault(truncate, "is damaged", move_away, restarts=True),
    "output folder removed": Fault(remove_output, "cannot write .*No such file", restarts=True),
}


def expected(fault: str, example: str) -> Outcome:
    """How an example's job ends after a fault."""
    row = FAULTS[fault]
    return Outcome.RECOVERS if row.retried and LAUNCHERS[example].job_recovers else row.outcome


def loses_no_step(fault: str, example: str) -> bool:
    """Whether an example's processes hear of a fault in time to save after their current step."""
    return FAULTS[fault].asked and LAUNCHERS[example].stops_at_a_step


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(
    fragile: Lab,
    disk: Path,
    example: str,
    source: Path,
    tmp_path: Path,
    fault: str,
    shipped_job: Callable[[], Reference],
    two_process_job: Callable[[], Reference],
) -> None:
    """After its first epoch a job meets a fault: it recovers by itself, or fails in time with a clear line.

    In the second case the fault is repaired and the job requeued. In both it ends with an undisturbed job's bits.
    Where other tests do nearly the same with 2 processes, this one takes the shipped job.
    """
    row = FAULTS[fault]
    options = (all_nodes(source),) if row.elsewhere else two_processes(source)
    folder = slowed(source, tmp_path / example, f"{row.sleep} * ('SLURM_RESTART_COUNT' not in os.environ)")
    if fault == "disk full":
        (disk / example).mkdir()
        hand_over(disk / example)
        (folder / "output").symlink_to(disk / example)
    job = submit(fragile, example, folder, "--timeout", str(20 + row.sleep), options=options)
    job.wait_for_epoch(1)
    saved, shards = LAUNCHERS[example].checkpoint.split("/")[0], "/" in LAUNCHERS[example].checkpoint
    saved += "/run.json" * shards  # which is there when all shards are
    wait_until(lambda: [*job.output.glob(saved)], 300, "the checkpoint")
    since, before = time.time(), len(job.log)
    row.inflict(job)
    outcome = expected(fault, example)
    going_on = outcome is Outcome.RECOVERS
    if outcome is Outcome.EITHER:
        running = ("RUNNING", "COMPLETING")
        wait_until(lambda: job.shown["JobState"] not in running, 300, "what SLURM makes of it", ASK_SLURM)
        going_on = not job.ended
    if not going_on:
        again = LAUNCHERS[example].job_recovers or fault == "checkpoint truncated"
        assert_failed(job, since, 300 if again else 60)  # how long another start takes is no promise
        assert re.search(row.says, job.log[before:]), job.log
        row.repair(job)
        faults.requeue(fragile, job.id)
    assert_completed(job, EPOCHS, processes=None if row.elsewhere else 2)
    assert job.log.count(LAUNCHERS[example].first_line) >= 2 and ("continuing after epoch" in job.log) != row.restarts
    if loses_no_step(fault, example):
        assert_no_step_lost(job)
    outputs.assert_same_run(job.output, (shipped_job if row.elsewhere else two_process_job)().output)
