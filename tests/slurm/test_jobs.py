"""Every shipped run.slurm, unmodified, on a real SLURM: it completes, requeues, fails and ends as promised."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.jobs import (
    EPOCHS,
    Job,
    all_nodes,
    assert_completed,
    assert_failed,
    header,
    kill_worker,
    slowed,
    starters,
    submit,
    submit_four,
    two_processes,
)
from harness.launchers import EXAMPLES, HOROVOD, LAUNCHERS, ROOT, copy_example
from harness.processes import ASK_SLURM, wait_until
from harness.runs import Reference
from lab import Lab, faults

pytestmark = pytest.mark.slurm
HEADERS = {
    name: {option: header(ROOT / "examples" / name, option) for option in ("nodes", "ntasks-per-node")}
    for name in EXAMPLES
}
# The one task of a node starts the workers. With more tasks srun itself starts each worker.
WITH_STARTERS = [name for name in EXAMPLES if HEADERS[name]["ntasks-per-node"] == 1]


def test_shipped_job(example: str, shipped_job: Callable[[], Reference]) -> None:
    """Unmodified, run.slurm completes, on all nodes that it may use, and the model has learnt."""
    assert LAUNCHERS[example].has_learnt(outputs.read_metrics(shipped_job().output)[-1], tolerance=0.01)


@pytest.mark.only(*HOROVOD)
def test_mpi_on_two_nodes(example: str, shipped_job: Callable[[], Reference]) -> None:
    """The shipped script: 4 ranks on 2 nodes over MPI, with the cores that SLURM has given to each."""
    log = shipped_job().stdout
    assert "ConvNet on digits: 4 processes on 2 nodes, mpi on cpu, 2 threads each, global batch 256" in log


@pytest.mark.runs("weekly")
def test_no_progress(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A job that gets no epoch done before its time limit comes near is requeued once only, and says what to do."""
    folder = copy_example(source, tmp_path / example)
    (folder / "train.py").write_text("import time\n\nprint('no progress', flush=True)\ntime.sleep(600)\n")
    job = submit(lab, example, folder)
    job.wait_for_line("no progress")
    job.limit_time(40)
    # The notice, as SLURM would give it at some moment: a save is waited for until 20 s are left.
    faults.timelimit(lab, job.id)
    wait_until(lambda: job.shown["Restarts"] == "1", 300, "the requeue", ASK_SLURM)
    job.limit_time(3600)
    before = len(job.log)
    wait_until(lambda: "no progress" in job.log[before:], 300, "the second start")
    job.limit_time(40)
    faults.timelimit(lab, job.id)
    job.wait_for_line("raise --time")
    assert job.shown["JobState"] == "RUNNING" and job.shown["Restarts"] == "1"  # for the rest of its time
    job.cancel()
    assert job.log.count("run.slurm: error:") == 1 and not (job.output / LAUNCHERS[example].model).exists()


@pytest.mark.runs("weekly")
def test_time_limit(example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]) -> None:
    """A run that reaches its time limit requeues itself, continues, and ends with the same bits."""
    sleep = "20 * ('SLURM_RESTART_COUNT' not in os.environ)"  # until it is requeued
    job = submit(lab, example, slowed(source, tmp_path / example, sleep), options=(all_nodes(source),))
    job.wait_for_epoch(1)
    job.limit_time(60)
    wait_until(lambda: job.shown["Restarts"] == "1", 300, "the requeue near the time limit", ASK_SLURM)
    job.limit_time(3600)
    assert_completed(job, EPOCHS)
    assert job.shown["Restarts"] == "1"
    assert f"requeueing job {job.id}" in job.log and "continuing after epoch" in job.log
    outputs.assert_same_run(job.output, shipped_job().output)


@pytest.mark.runs("weekly")  # test_three_processes compares with one process on this machine
def test_as_one_process(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """4 processes, where there can be on 2 nodes, take the steps of one process on this machine: 1e-9 apart in fp64.

    Where there is no fp64, only the first epoch's loss is compared: Adam makes much of differences in the last bit.
    """
    launcher = LAUNCHERS[example]
    precision = "fp64" if launcher.fp64 else "fp32"
    words = f"--precision {precision} --epochs 2 --batch-size".split()
    job = submit_four(lab, example, copy_example(source, tmp_path / "job" / example), *words, "24")
    folder = copy_example(source, tmp_path / "one" / example)
    runs.train(example, folder, 1, *words, 96, seconds=400)  # fp64 in one process is slow
    assert_completed(job, 2, processes=4)
    (ours, *_), (theirs, *_) = (outputs.read_metrics(output) for output in (job.output, folder / "output"))
    assert (ours["world_size"], theirs["world_size"]) == (4, 1)
    if launcher.fp64:
        assert outputs.largest_difference(outputs.read_model(job.output), outputs.read_model(folder / "output")) < 1e-9
    assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9 if launcher.fp64 else 1e-3)


@pytest.mark.runs("one")
@pytest.mark.only("plumbing")
def test_preempted_and_killed(
    example: str, source: Path, lab: Lab, tmp_path: Path, two_process_job: Callable[[], Reference]
) -> None:
    """A preempted job starts again by itself, continues, and appends to its log. SIGKILL to a worker: the job fails.

    Requeued, it continues, and ends with the same bits. A launcher that starts a dead worker again needs no requeue.
    What is edited in the folder in between is not used.
    """
    job = submit(lab, example, slowed(source, tmp_path / example, "2"), options=two_processes(source))
    preempt_and_kill(job)
    outputs.assert_same_run(job.output, two_process_job().output)


def preempt_and_kill(job: Job) -> None:
    """Requeue a job after its first epoch, its program edited, kill a worker after another, and see it complete."""
    recovers = LAUNCHERS[job.name].job_recovers
    job.wait_for_epoch(1)
    for pattern in ("*.py", "*.json", "common/*.py", "plumbing/*.py"):
        for file in job.folder.glob(pattern):
            file.write_text("raise SystemExit('the edited program')\n")
    edits.end_after_handing_over(job.folder)
    faults.requeue(job.lab, job.id)
    wait_for_progress(job, starts=2)
    assert job.shown["Restarts"] == "1"
    since = time.time()
    kill_worker(job)
    if not recovers:
        assert_failed(job, since)
        faults.requeue(job.lab, job.id)
    wait_for_progress(job, starts=3)
    assert job.shown["Restarts"] == str(1 + (not recovers))
    assert any(words in job.log for words in (["exitcode: -9"] if recovers else ["SIGKILL", "Killed"]))
    assert_completed(job, EPOCHS, processes=2)
    assert job.log.count(LAUNCHERS[job.name].first_line) == 3


@pytest.mark.only(*HOROVOD)
@pytest.mark.runs("weekly")  # a run over Gloo is an ordinary test of each example of Horovod
def test_gloo_instead_of_mpi(
    example: str, source: Path, lab: Lab, tmp_path: Path, two_process_job: Callable[[], Reference]
) -> None:
    """LAUNCH=gloo on two nodes, preempted, killed and requeued: the bits of the same processes with MPI.

    Neither mpirun nor ssh is called: where run.slurm would find them, there are programs that fail and leave a file.
    """
    folder = slowed(source, tmp_path / example, "2")
    for program in ("mpirun", "orted", "prted", "ssh"):
        path = folder / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\ntouch "{folder}/$0-was-called"\nexit 1\n')
        path.chmod(0o755)
    edits.edit(folder / "run.slurm", "\nchoose_launcher ", '\nPATH="$PWD/bin:$PATH"\nchoose_launcher ')
    line = readme.command(f"examples/{example}/README.md", "LAUNCH=gloo sbatch run.slurm")
    job = submit(lab, example, folder, options=two_processes(source), line=line)
    preempt_and_kill(job)
    assert job.log.count("2 processes on 2 nodes, gloo on cpu, 1 thread each") == 3, job.log
    assert not list(folder.rglob("*was-called"))
    outputs.assert_same_run(job.output, two_process_job().output)


@pytest.mark.runs("weekly")
@pytest.mark.only(*WITH_STARTERS)
def test_launcher_killed(
    example: str, source: Path, lab: Lab, tmp_path: Path, two_process_job: Callable[[], Reference]
) -> None:
    """SIGKILL to the process that started the workers: the job fails; requeued, it ends with the same bits."""
    job = submit(lab, example, slowed(source, tmp_path / example, "2"), options=two_processes(source))
    job.wait_for_epoch(1)
    since = time.time()
    os.kill(starters(job)[0], signal.SIGKILL)
    assert_failed(job, since)
    faults.requeue(lab, job.id)
    assert_completed(job, EPOCHS, processes=2)
    assert job.log.count(LAUNCHERS[example].first_line) == 2
    outputs.assert_same_run(job.output, two_process_job().output)


def wait_for_progress(job: Job, starts: int) -> None:
    """Wait until a job has started so many times, has continued, and done an epoch since."""
    since = "continuing after epoch"
    try:
        wait_until(lambda: job.log.count(since) == starts - 1, 300, f"start {starts} of job {job.id}")
        wait_until(lambda: "train loss" in job.log.rpartition(since)[2], 300, "an epoch after it")
    except AssertionError as error:
        raise AssertionError(f"{error}: {job.shown['JobState']}\n{job.log}") from None


@pytest.mark.runs("weekly")
@pytest.mark.only("accelerate", "lightning", "torchrun_multinode")
def test_same_bits_as_ddp_spawn_with_four_processes(
    example: str, shipped_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """4 processes on 2 nodes end with the bits of ddp_spawn's 4 processes on one machine: DDP sums in the same order.

    DeepSpeed and Horovod sum the gradients of more than 2 processes in another order.
    """
    folder = copy_example(ROOT / "examples" / "ddp_spawn", tmp_path / "ddp_spawn")
    runs.train("ddp_spawn", folder, 4, SLURM_CPUS_PER_TASK="8")  # 2 threads each, as in the job
    weights, others = (outputs.read_model(path) for path in (shipped_job().output, folder / "output"))
    assert outputs.largest_difference(weights, others) == 0
