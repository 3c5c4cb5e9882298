"""Jobs with longrun.py and job.sh that train: stopped, preempted, killed, cut off, continued, always at the same bits.

Each of them waits after some epochs, as a file says, so that nothing depends on how long an epoch takes.
"""

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import edits, outputs
from harness.jobs import CPUS, EPOCHS, GPUS, NODES, SETTINGS, Job, hand_over, on_this_machine_only, submit
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT, copy_example
from harness.processes import ASK_SLURM, wait_until, workers
from lab import Lab, Wanted, faults
from tests.conftest import ci_with
from tests.slurm.small import assert_completed, assert_refused, header, held, two_processes

pytestmark = pytest.mark.slurm
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
    job.wait_for_line(LAUNCHERS[job.name].first_line, number)


FEW = ("--limit-steps", "2")  # in each epoch


# The jobs of these start and stop as torchrun_multinode's, and as horovod_cpu's.
@pytest.mark.only(*(name for name in EXAMPLES if name not in ("horovod_lightning", "torchrun_vision")))
@ci_with("horovod_cpu", "torchrun_multinode")  # verify stops most of the others
def test_stopped_and_continued(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A job is stopped near its time limit and preempted; it goes on after the step at which it has stopped.

    It runs the program that was submitted. Then a user makes the file `stop`: the job ends well, and is not requeued.
    Another job continues it, as README.md says, where sbatch passes no environment on. With torchrun it loses a worker:
    all start once more, from the checkpoint. The end has the bits of an undisturbed job.
    """
    any_step = LAUNCHERS[example].any_step
    options = two_processes(source)
    undisturbed = submit(lab, example, copy_example(source, tmp_path / "other" / example), *FEW, options=options)
    folder = held(source, tmp_path / example, 1)
    program = {path: path.read_text() for path in folder.rglob("*") if path.suffix in (".py", ".sh", ".slurm")}
    job = submit(lab, example, folder, *FEW, options=options)
    job.wait_for_hold(1)
    edit_all(folder)
    faults.timelimit(lab, job.id)
    job.wait_for_line(f"run.slurm: requeueing job {job.id}")
    edits.hold(folder, 2)
    wait_for_start(job, 2)
    job.wait_for_hold(2)
    faults.requeue(lab, job.id)
    job.wait_for_line("stopped after", 2)
    edits.hold(folder, 3)
    wait_for_start(job, 3)
    job.wait_for_hold(3)
    (job.output / "stop").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    assert job.shown["Restarts"] == "2" and job.log.count("requeueing") == 1, job.log
    assert "the edited program" not in job.log and "error: the job failed" not in job.log, job.log

    for path, text in program.items():
        path.write_text(text)
    edits.hold(folder, 4 if any_step else edits.GO_ON)
    line = f"sbatch run.slurm --output-dir output/{job.id}"
    assert line.replace(job.id, "1234") in (ROOT / "examples" / example / "README.md").read_text()
    (folder / ".venv").symlink_to(sys.prefix)
    options = ("--nodes=1", f"--cpus-per-task={2 // header(source, 'ntasks-per-node')}")
    again = submit(lab, example, folder, *FEW, options=options, line=line, SBATCH_EXPORT="NONE")
    if any_step:
        again.wait_for_hold(4)
        os.kill(max(workers(again.processes())), signal.SIGKILL)
        wait_for_start(again, 2)
        edits.hold(folder, edits.GO_ON)
    assert again.wait().shown["JobState"] == "COMPLETED", again.log
    assert undisturbed.wait().shown["JobState"] == "COMPLETED", undisturbed.log
    outputs.assert_same_run(job.output, undisturbed.output)

    run = outputs.read_run(job.output)
    # Two steps an epoch: it stops after the step that follows; lora's also looks for `stop` when an epoch ends.
    stops = [3, 5, 7] if any_step and example != "lora" else [2, 4, 6]
    assert [stop["step"] for stop in run["stops"]] == [*stops, 2 * EPOCHS], run["stops"]
    assert [start["step"] for start in run["starts"]] == [0, *stops, *[8] * any_step], run["starts"]


@pytest.mark.runs("full")
@pytest.mark.only("torchrun_multinode")
def test_chain(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Where a site refuses requeues, the jobs of README.md's chain train one run, one after the other."""
    folder = hand_over(held(source, tmp_path / example, 1), lab)
    page = (ROOT / "docs" / "when-it-breaks.md").read_text()
    (line,) = {*re.findall("^ +(for i in .* done)", page + (source / "README.md").read_text(), re.MULTILINE)}
    options = shlex.join(["--parsable", "--no-requeue", *two_processes(source)])
    line = line.replace("sbatch", f"sbatch {options}").replace("run.slurm", shlex.join(["run.slurm", *FEW]))
    submitted = lab.run(["bash", "-c", line], cwd=folder, env=SETTINGS, check=True).stdout.split()
    first, second, third = (Job(lab, "long", folder, number) for number in submitted)
    for epochs, job in enumerate((first, second), 1):
        job.wait_for_hold(epochs)
        assert third.shown["JobState"] == "PENDING"
        faults.timelimit(lab, job.id)
        assert_refused(job, "to continue: sbatch run.slurm --output-dir output/long")
        edits.hold(folder, 2 if job is first else edits.GO_ON)
    assert third.wait().shown["JobState"] == "COMPLETED", third.log
    output = folder / "output" / "long"
    assert [row["epoch"] for row in outputs.read_metrics(output)] == list(range(1, EPOCHS + 1))
    run = outputs.read_run(output)
    assert [start["step"] for start in run["starts"]] == [0, *(stop["step"] for stop in run["stops"][:2])], run


PARTITIONS = [
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=120",
    "PartitionName=high Nodes=ALL PriorityTier=9",
]


@pytest.fixture
def badly_named(tmp_path: Path) -> Iterator[Lab]:
    """A lab of its own, with preemption, and with nodes that resolve their own name to a loopback address."""
    hosts = {f"node{number}": {f"node{number}": "127.0.1.1"} for number in range(1, NODES + 1)}
    shared = on_this_machine_only(tmp_path.parent, Path(sys.prefix))
    wanted = Wanted(NODES, CPUS, GPUS, name=f"names{os.getpid()}", share=shared, hosts=hosts, conf=PARTITIONS)
    with Lab(wanted) as lab:
        assert lab.run(["getent", "ahostsv4", "node2"], node="node2").stdout.startswith("127.0.1.1")
        yield lab


@pytest.mark.waits
@pytest.mark.only("torchrun_multinode")
def test_preempted_and_cut_off(badly_named: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """SLURM preempts a job for a more important one: SIGTERM, an agreed step, the job's own requeue, continuation.

    Then a node is cut off the network: SLURM requeues the job, which continues when the node is back. The names of the
    nodes are loopback addresses on these first, and are not known anywhere at the end.
    """
    lab = badly_named
    folder = held(source, tmp_path / example, 1)
    job = submit(lab, example, folder, *FEW, options=("--partition=low", *two_processes(source)))
    job.wait_for_hold(1)
    words = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true"]
    (tmp_path / "urgent").mkdir()
    urgent = lab.run(words, cwd=hand_over(tmp_path / "urgent")).stdout.strip()
    job.wait_for_line(f"run.slurm: requeueing job {job.id}")
    edits.hold(folder, 2)
    wait_for_start(job, 2)
    assert lab.job(urgent)["JobState"] == "COMPLETED" and job.shown["Restarts"] == "1"
    job.wait_for_hold(2)

    faults.cut(lab, "node2")
    wait_until(lambda: job.shown["JobState"] != "RUNNING", 300, "the end of the job that lost a node", ASK_SLURM)
    assert not job.ended, f"{job.shown}\n{job.log}"
    for node in lab.nodes:
        faults.unresolve(lab, node)
    assert lab.run(["getent", "ahostsv4", "node1"], node="node1").returncode != 0
    edits.hold(folder, edits.GO_ON)
    faults.heal(lab, "node2")
    assert_completed(job, EPOCHS, processes=2)
    assert job.shown["Restarts"] == "2" and job.log.count("requeueing") == 1, job.log
    # Told to stop like a preempted job, it may take one more step when the node is back: soon enough to save it.
    first, preempted, lost = (start["step"] for start in outputs.read_run(job.output)["starts"])
    assert (first, preempted) == (0, 3) and lost in (4, 5)
