"""Every shipped run.slurm, unmodified, on a real SLURM: it completes, requeues, fails and ends as promised."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs
from launchers import LAUNCHERS
from slurm_jobs import NODES, Job, copy, header, submit

from lab import Lab

pytestmark = pytest.mark.slurm
EPOCHS = 5  # of a run with the default settings
KILLED = ("worker", "launcher")


def assert_completed(job: Job, epochs: int) -> None:
    """Check that a job ended well, where the README says, and that as many processes trained as it asked for."""
    job.wait()
    assert job.shown["JobState"] == "COMPLETED", f"{job.shown}\n{job.log}"
    rows = runs.read_metrics(job.output)
    assert [row["epoch"] for row in rows] == list(range(1, epochs + 1))
    assert {row["world_size"] for row in rows} == {LAUNCHERS[job.name].processes_in_job}
    assert "finished: test acc" in job.log
    assert runs.read_model(job.output)


def slowed(example: str, source: Path, folder: Path, seconds: int) -> Path:
    """Copy an example and let each of its epochs sleep first, so that the time limit counts and no core is busy."""
    train = copy(source, folder / example) / "train.py"
    line = "    model.train()\n"
    assert train.read_text().count(line) == 1
    train.write_text(train.read_text().replace(line, f"    time.sleep({seconds})\n{line}"))
    return train.parent


@dataclass(frozen=True)
class Jobs:
    """Jobs that run side by side from the start of these tests on."""

    plain: Job  # sbatch run.slurm
    gpus: Job  # sbatch --gpus-per-node=2 run.slurm --epochs 2: in the same folder, on the same node or nodes
    longer: Job  # needs 60 s at least, with a time limit of which SLURM leaves at most 59 s
    fruitless: Job  # can never finish an epoch within its time limit


@pytest.fixture(scope="module")
def jobs(example: str, source: Path, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Submit them. The first gets both its starts on an idle machine: a busy one would use up its time."""
    folder = tmp_path_factory.mktemp(example)
    limit = LAUNCHERS[example].short_limit
    longer = submit(lab, example, slowed(example, source, folder / "longer", 10), options=limit)
    longer.wait_for_line("continuing after epoch", seconds=240)
    fruitless = submit(lab, example, slowed(example, source, folder / "fruitless", 600), options=("--time=1",))
    shared = copy(source, folder / "shared" / example)
    nodes = f"--nodelist=node[1-{header(shared, 'nodes')}]"
    plain = submit(lab, example, shared, options=(nodes,))
    gpus = submit(lab, example, shared, "--epochs", "2", options=(nodes, "--gpus-per-node=2"))
    yield Jobs(plain, gpus, longer, fruitless)
    for job in (plain, gpus, longer, fruitless):
        job.cancel()


def test_two_jobs_at_once(example: str, jobs: Jobs) -> None:
    """Two jobs in one folder and on the same nodes both complete; asking for GPUs is all that it takes.

    The lab's GPUs are stand-ins: CUDA finds none, and the job trains on CPU.
    """
    assert_completed(jobs.plain, EPOCHS)
    assert_completed(jobs.gpus, 2)
    assert jobs.plain.shown["NodeList"] == jobs.gpus.shown["NodeList"]
    assert "gpu:2" in jobs.gpus.shown["TresPerNode"] and " on cpu, " in jobs.gpus.log
    assert runs.read_metrics(jobs.plain.output)[-1]["test_accuracy"] >= 0.95


def test_requeued(example: str, source: Path, lab: Lab, jobs: Jobs, tmp_path: Path) -> None:
    """Preempted in mid-run, a job starts again by itself, continues, and ends with the same bits; its log goes on."""
    job = submit(lab, example, copy(source, tmp_path / example))
    job.wait_for_line("epoch  1/")
    lab.requeue(job.id)
    assert_completed(job, EPOCHS)
    assert job.shown["Restarts"] == "1"
    assert job.log.count("ConvNet on digits") == 2 and "continuing after epoch" in job.log
    runs.assert_same_run(job.output, jobs.plain.output)


def test_killed_process(example: str, source: Path, lab: Lab, jobs: Jobs, tmp_path: Path) -> None:
    """SIGKILL to a worker, or to what started it: the job fails within 60 s, says so, and leaves no process.

    Requeued, it ends with the same bits. A launcher that starts a dead worker again completes the job by itself.
    """
    victims = {victim: submit(lab, example, slowed(example, source, tmp_path / victim, 2)) for victim in KILLED}
    killed = {}
    for victim, job in victims.items():
        job.wait_for_line("epoch  1/")
        workers = runs.workers(job.processes())
        launchers = set(runs.with_torch(job.processes())) - set(workers)
        os.kill(max(workers) if victim == "worker" else min(launchers or workers), signal.SIGKILL)
        killed[victim] = time.monotonic()
    for victim, job in victims.items():
        if victim == "worker" and LAUNCHERS[example].job_recovers:
            assert_completed(job, EPOCHS)
            assert job.shown["Restarts"] == "0" and "exitcode: -9" in job.log
            assert job.log.count("ConvNet on digits") == 2 and "continuing after epoch" in job.log
            runs.assert_same_run(job.output, jobs.plain.output)
            continue
        job.wait(60)
        assert time.monotonic() - killed[victim] < 60
        assert job.shown["JobState"] == "FAILED", f"{victim}: {job.shown}"
        assert "SIGKILL" in job.log or "Killed" in job.log, job.log
        assert job.processes() == []
        lab.requeue(job.id)
        assert_completed(job, EPOCHS)
        runs.assert_same_run(job.output, jobs.plain.output)


BROKEN = {
    "sbatch ignores the header": ("^#SBATCH", "# SBATCH"),
    "a file that is not there": (r"\btrain\.py", "trian.py"),
    "too many tasks": (r"--ntasks-per-node=\d+", "--ntasks-per-node=3"),
}


def test_broken_scripts(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """These tests can fail: each broken copy of run.slurm is noticed."""
    jobs = {}
    for number, (fault, (old, new)) in enumerate(BROKEN.items()):
        folder = copy(source, tmp_path / str(number) / example)
        script = (folder / "run.slurm").read_text()
        broken = re.sub(old, new, script, flags=re.MULTILINE)
        assert broken != script
        (folder / "run.slurm").write_text(broken)
        options = ("--cpus-per-task=2",) if fault == "too many tasks" else ()
        jobs[fault] = submit(lab, example, folder, "--epochs", "1", options=options)
    for job in jobs.values():
        with pytest.raises(AssertionError):
            assert_completed(job, 1)


def test_time_limit(jobs: Jobs) -> None:
    """A run that needs more than its time limit requeues itself, continues, and ends with the same bits."""
    assert_completed(jobs.longer, EPOCHS)
    assert int(jobs.longer.shown["Restarts"]) >= 1
    assert f"requeueing job {jobs.longer.id}" in jobs.longer.log and "continuing after epoch" in jobs.longer.log
    runs.assert_same_run(jobs.longer.output, jobs.plain.output)


def test_no_progress(jobs: Jobs) -> None:
    """A job that cannot finish an epoch within its time limit restarts once, then stops, and says what to do."""
    job = jobs.fruitless.wait(300)
    assert job.shown["JobState"] == "TIMEOUT" and job.shown["Restarts"] == "1"
    errors = [line for line in job.log.splitlines() if line.startswith("run.slurm: error:")]
    assert len(errors) == 1 and "raise --time" in errors[0]
    assert not (job.output / "model.pt").exists()


def test_nodes(lab: Lab, example: str, source: Path) -> None:
    """The lab has as many nodes as the header asks for."""
    assert header(source, "nodes") <= NODES
