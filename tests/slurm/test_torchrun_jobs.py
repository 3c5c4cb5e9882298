"""What run.slurm promises where train.py looks in each step: it stops at a step, and no step is lost."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import edits, outputs
from harness.jobs import (
    CPUS,
    GPUS,
    NODES,
    Job,
    assert_no_step_lost,
    hand_over,
    on_this_machine_only,
    slowed,
    stop_twice,
    submit,
    two_processes,
)
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference
from lab import Lab, Wanted, faults

pytestmark = pytest.mark.slurm
PARTITIONS = [
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60",
    "PartitionName=high Nodes=ALL PriorityTier=9",
]


@pytest.fixture
def other_lab(lab: Lab, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab of this test's own, made with the keyword arguments that the test gives as its parameter."""
    shared = on_this_machine_only(tmp_path.parent, Path(sys.prefix))
    settings = {"nodes": NODES, "cpus": CPUS, "gpus": GPUS} | getattr(request, "param", {})
    with Lab(Wanted(name=f"other{os.getpid()}", share=shared, **settings)) as other:
        yield other


def assert_stopped_once(job: Job) -> None:
    """Check that a job has stopped after one agreed step, requeued itself and gone on from that step."""
    job.wait()
    assert job.shown["JobState"] == "COMPLETED" and job.shown["Restarts"] == "1", f"{job.shown}\n{job.log}"
    assert job.log.count(f"run.slurm: requeueing job {job.id}") == 1
    assert_no_step_lost(job)


LAYOUTS = [{"nodes": 1}, {"nodes": 2, "tracking": "linuxproc"}, {"nodes": 3}]


@pytest.mark.runs("weekly")
@pytest.mark.only(*[name for name, row in LAUNCHERS.items() if row.stops_at_a_step])
@pytest.mark.parametrize("other_lab", LAYOUTS, ids=str, indirect=True)
def test_asked_to_stop(other_lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """USR1, as before the time limit, and SIGTERM, as when preempted: no step is lost, on any number of nodes.

    Nor is one where signals reach all processes of a step, and not only its tasks.
    """
    nodes = len(other_lab.nodes)
    options = (f"--nodes={nodes}", f"--gpus-per-node={2 if nodes == 1 else 1}", "--cpus-per-task=2")
    alone = submit(other_lab, example, copy_example(source, tmp_path / "alone" / example), options=options)
    alone.wait()
    job = stop_twice(other_lab, source, tmp_path / example, options)
    outputs.assert_same_run(job.output, alone.output)


@pytest.mark.runs("weekly")
@pytest.mark.only("accelerate")
@pytest.mark.parametrize("other_lab", [{"conf": PARTITIONS}], indirect=True)
def test_preempted(
    other_lab: Lab, example: str, source: Path, two_process_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """SLURM preempts the job for a more important one: SIGTERM, an agreed step, requeue, continuation, the same bits.

    A job that its user cancels stops in the same way, and stays cancelled.
    """
    low = ("--partition=low", *two_processes(source))
    job = submit(other_lab, example, copy_example(source, tmp_path / "job" / example), options=low)
    job.wait_for_epoch(1)
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 5"]
    (tmp_path / "urgent").mkdir()
    urgent = other_lab.run(words, cwd=hand_over(tmp_path / "urgent")).stdout.strip()
    assert_stopped_once(job)
    assert other_lab.job(urgent)["JobState"] == "COMPLETED"
    outputs.assert_same_run(job.output, two_process_job().output)

    cancelled = submit(other_lab, example, copy_example(source, tmp_path / "cancelled" / example), options=low)
    cancelled.wait_for_epoch(1)
    cancelled.cancel()
    assert cancelled.shown["JobState"] == "CANCELLED" and "requeueing" not in cancelled.log


stops_at_a_step = pytest.mark.only(*[name for name, row in LAUNCHERS.items() if row.stops_at_a_step])
FIRST_START = "(os.environ.get('SLURM_RESTART_COUNT', '0') == '0')"


@pytest.mark.runs("weekly")
@stops_at_a_step
@pytest.mark.only("plumbing")
def test_long_save(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A save of 70 s, for which there is time before the limit, is waited for: no step is lost."""
    folder = slowed(source, tmp_path / example, f"2 * {FIRST_START}")
    asked = f"os.path.exists(os.environ.get('STOP_FILE', '')) and 'checkpoint' in str(path) and {FIRST_START}"
    line = "    temporary = path.with_name("
    edits.edit(folder / "plumbing" / "files.py", line, f"    __import__('time').sleep(70 * ({asked}))\n{line}")
    job = submit(lab, example, folder, options=(*two_processes(source), "--signal=B:USR1@180"))
    job.wait_for_epoch(1)
    job.limit_time(180)
    faults.timelimit(lab, job.id)  # the notice, which SLURM would give at some moment of the next minute
    job.wait_for_line("stopped by a signal after")
    job.limit_time(3600)  # of the next start, too
    assert_stopped_once(job)
