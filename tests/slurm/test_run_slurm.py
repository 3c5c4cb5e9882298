"""What run.slurm and job.sh promise, shown with a train.py that only waits: it is quick, since it imports no torch."""

import json
import os
import re
import signal
import time
import venv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from harness import edits
from harness.jobs import SETTINGS, Job, hand_over, submit
from harness.launchers import LAUNCHERS, copy_example
from harness.processes import ASK_SLURM, command_lines, find_processes, wait_until
from lab import Lab, faults
from tests.conftest import ci_with
from tests.slurm.small import assert_refused

pytestmark = pytest.mark.slurm
# It saves a checkpoint under each example's name again and again, until there is a file `finish` in its output folder,
# or it is asked to stop. It writes no model.
STUB = r"""
import contextlib, os, sys, time
from pathlib import Path

output = Path(sys.argv[sys.argv.index("--output-dir") + 1])
(output / "checkpoint").mkdir(exist_ok=True)
os.write(1, f"started {sys.argv[1:]}\n".encode())  # in one piece, beside other processes
while not (output / "finish").exists():
    for name in ("checkpoint.pt", "checkpoint.npz", "checkpoint/run.json"):
        (output / name).touch()
    time.sleep(0.1)
    with contextlib.suppress(FileNotFoundError):  # there is none, or another process was faster
        if (output / "stop").stat().st_size:  # else it is just being written
            (output / "stop").rename(output / "stopped")
    if (output / "stopped").exists():
        break
"""


def stub(source: Path, folder: Path, text: str = STUB) -> Path:
    """Copy an example and put another program in the place of its train.py."""
    copy_example(source, folder)
    (folder / "train.py").write_text(text)
    return folder


def wait_for_stubs(job: Job, number: int) -> None:
    """Wait until so many stubs have said in a job's log that they run."""
    job.wait_for_line("started [", number)
    assert job.log.count("started [") == number, job.log


def array_of_three(lab: Lab, folder: Path, **variables: str) -> None:
    """In an array of 3 one task is requeued near its time limit: the finished and the running one are left alone.

    The stub is in the place of train.py.
    """
    array = submit(lab, folder.name, folder, options=("--array=1-3", "--cpus-per-task=1"), **variables)
    tasks = [f"{array.id}_{number}" for number in (1, 2, 3)]
    ids = [lab.wait_for_job(task, "RUNNING")["JobId"] for task in tasks]
    jobs = [Job(lab, folder.name, folder, job) for job in ids]
    # ddp_spawn's train.py would start its processes itself.
    stubs = 1 if folder.name == "ddp_spawn" else LAUNCHERS[folder.name].processes_in_job
    for job in jobs:
        wait_for_stubs(job, stubs)
    asked = ids.index(array.id)  # one task has the array's own id: `scontrol requeue` of that id means all of them
    finished, other = (asked + 1) % 3, (asked + 2) % 3
    (folder / "output" / tasks[finished] / "finish").touch()
    lab.wait_for_job(tasks[finished])
    faults.timelimit(lab, tasks[asked])
    wait_for_stubs(jobs[asked], 2 * stubs)
    assert "error: the job failed" not in jobs[asked].log
    shown = [lab.job(task) for task in tasks]
    assert [job["Restarts"] for job in shown] == [str(int(number == asked)) for number in range(3)]
    states = {asked: "RUNNING", finished: "COMPLETED", other: "RUNNING"}
    assert {number: job["JobState"] for number, job in enumerate(shown)} == states
    for number in (asked, other):
        (folder / "output" / tasks[number] / "finish").touch()
        assert lab.wait_for_job(tasks[number])["JobState"] == "COMPLETED"


@ci_with("ddp_spawn", "horovod_cpu", "lightning", "torchrun_multinode")  # one of each way to start processes
def test_job_array(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A task of a job array is requeued near its time limit, alone."""
    array_of_three(lab, stub(source, tmp_path / example))


def stubs(job: Job) -> list[int]:
    """Return the ids of the processes of a job that are the stub, and not one that starts them."""
    lines = {pid: "".join(command_lines([pid])) for pid in job.processes()}
    return [pid for pid, line in lines.items() if re.match(r"\S*python\S* (-u )?output/\S*/train\.py ", line)]


SAVES_NOTHING, changes = re.subn(r"    for name in .*\n.*touch\(\)\n|.*mkdir\(.*\n", "", STUB)
assert changes == 2, STUB


@pytest.mark.only("ddp_spawn")
def test_not_requeued(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A cancelled job is not requeued, nor is one that has saved nothing, nor one that a site does not requeue.

    The last two do not end with status 0, and one line says what to do.
    """
    cancelled = submit(lab, example, stub(source, tmp_path / "cancelled" / example))
    folder = stub(source, tmp_path / "nothing" / example, SAVES_NOTHING)
    (folder / "output" / "old").mkdir(parents=True)
    (folder / "output" / "old" / "checkpoint.pt").touch()  # of an earlier job
    nothing = submit(lab, example, folder, "--output-dir=output/old")
    refused = submit(lab, example, stub(source, tmp_path / "refused" / example), options=("--no-requeue",))
    for job in cancelled, nothing, refused:
        wait_for_stubs(job, 1)
    cancelled.cancel()
    for job in nothing, refused:
        faults.timelimit(lab, job.id)
    assert cancelled.shown["JobState"] == "CANCELLED", cancelled.shown
    assert_refused(nothing, "no new checkpoint, so the job is not requeued: raise --time")
    assert_refused(refused, f"to continue: sbatch run.slurm --output-dir output/{refused.id}")
    assert [job.shown["Restarts"] for job in (cancelled, nothing, refused)] == ["0"] * 3
    assert "requeueing" not in cancelled.log + nothing.log and "error: the job failed" not in cancelled.log


# Asked to stop, it saves for as long as there is no file `saved`. Continued, it ends at once.
SLOW = """
import os, sys
if "SLURM_RESTART_COUNT" in os.environ:
    sys.exit(print("continued"))
"""
RENAME = '            (output / "stop").rename('
assert STUB.count(RENAME) == 1, STUB
SLOW += STUB.replace(
    RENAME,
    f"""            while not (output / "saved").exists():
                time.sleep(0.1)
{RENAME}""",
)


@pytest.mark.waits
@pytest.mark.only("lora")  # whose other tests take as long
def test_whole_notice(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """SLURM's own signal comes before the time limit. The time until 20 s before the end is for a save, all of it.

    One that needs most of it is waited for. With one that does not end the job is requeued then, and not before.
    """
    options = ("--time=2", "--signal=B:USR1@120")
    folders = [stub(source, tmp_path / name / example, SLOW) for name in ("slow", "endless")]
    slow, endless = jobs = [submit(lab, example, folder, options=options) for folder in folders]
    for job in jobs:
        wait_until((job.output / "stop").exists, 150, "SLURM's signal", ASK_SLURM)
    ends = {job.id: datetime.fromisoformat(job.shown["EndTime"]).timestamp() for job in jobs}
    wait_until(lambda: time.time() > ends[slow.id] - 45, 120, "45 s before the end")
    assert slow.shown["Restarts"] == "0" and "requeueing" not in slow.log
    (slow.output / "saved").touch()
    slow.wait_for_line("requeueing")
    endless.wait_for_line("requeueing")
    assert time.time() >= ends[endless.id] - 21
    for job in jobs:
        shown = job.wait().shown
        assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), f"{shown}\n{job.log}"
        assert job.log.count("requeueing") == 1 and "continued" in job.log, job.log


def assert_failed(job: Job, since: float) -> None:
    """Check that a job fails within a minute after `since`, says how to continue, and leaves no process.

    SLURM has noted when the job began and ended: how long this test took to notice its end does not count.
    """
    shown = job.wait().shown
    assert shown["JobState"] == "FAILED", shown
    began, ended = (datetime.fromisoformat(shown[name]).timestamp() for name in ("StartTime", "EndTime"))
    took = ended - max(since, began)
    assert took <= 60, f"job {job.id} failed after {took:.0f} s:\n{job.log}"
    last = job.log.splitlines()[-1]
    assert last.startswith("run.slurm: error:") and f"sbatch run.slurm --output-dir output/{job.id}" in last, job.log


def kill_on_second_node(job: Job) -> None:
    """Kill a stub of a job on its second node, always there: each node's torchrun counts its own restarts."""
    os.kill(next(pid for pid in stubs(job) if pid in find_processes("SLURM_NODEID=1")), signal.SIGKILL)


@pytest.mark.only("torchrun_multinode")
def test_killed(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """If one of run.slurm's processes is killed, torchrun starts all again, once per node; with srun.slurm nobody does.

    Then the job fails within a minute. Before that, srun.slurm's job is stopped near its time limit and requeued.
    """
    job = submit(lab, example, stub(source, tmp_path / "torchrun" / example))
    by_srun = submit(lab, example, stub(source, tmp_path / "srun" / example), line="sbatch srun.slurm")
    wait_for_stubs(by_srun, 4)
    faults.timelimit(lab, by_srun.id)
    wait_for_stubs(job, 4)
    kill_on_second_node(job)
    wait_for_stubs(job, 8)
    wait_for_stubs(by_srun, 8)
    for one in job, by_srun:
        assert len(stubs(one)) == 4
        since = time.time()
        kill_on_second_node(one)
        assert_failed(one, since)
    assert (job.shown["Restarts"], by_srun.shown["Restarts"]) == ("0", "1")


# The variables of another job, in whose shell one may be submitted, and a site's defaults.
FOREIGN: dict[str, Any] = {
    "SLURM_ARRAY_JOB_ID": "1",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
}
FOREIGN |= {"SLURM_CPU_BIND_LIST": "0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_GPUS": "7"}
FOREIGN |= {"SLURM_GPUS_PER_NODE": "7", "SLURM_GPUS_ON_NODE": "7", "SLURM_GRES": "gpu:7", "SLURM_TIMELIMIT": "1"}
FOREIGN |= {"SLURM_MEM_PER_CPU": "10", "SLURM_MEM_PER_NODE": "20", "SRUN_EXPORT_ENV": "NONE", "code": "output/code-1"}
SHOW = """
import json, os, sys
from pathlib import Path

import models.net
from package import part

settings = json.loads((Path(__file__).parent / "settings.json").read_text())
shown = {"values": [models.net.VALUE, part.VALUE, settings], "variables": dict(os.environ)}
name = "-".join(os.environ.get(name, "0") for name in ("SLURM_RESTART_COUNT", "RANK"))
Path(sys.argv[sys.argv.index("--output-dir") + 1], f"{name}.json").write_text(json.dumps(shown))
"""


@pytest.mark.only("torchrun_multinode")
def test_surroundings(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """What another job has left in the environment has no effect, and a user's OMP_NUM_THREADS has.

    Requeued, the job runs its copy of the program: scripts, packages, folders without __init__.py and settings, from a
    folder whose name has a space. A node with GPUs of which the job uses none is named in one line.
    """
    folder = stub(source, tmp_path / "my projét" / example, SHOW + STUB)
    files = [folder / name for name in ("models/net.py", "package/__init__.py", "package/part.py", "settings.json")]
    for value in ("1", "2"):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"VALUE = {value}\n" if file.suffix == ".py" else value)
        if value == "1":
            (folder / "package" / ".#part.py").symlink_to("me@login1.4242:1700000000")  # an editor's lock
            (tmp_path / "nvidia0").touch()
            edits.edit(folder / "job.sh", "-e /dev/nvidia0", f"-e {tmp_path}/nvidia0")
            job = submit(lab, example, folder, **{"OMP_NUM_THREADS": "3"} | FOREIGN)  # type: ignore[arg-type]
            wait_for_stubs(job, 4)
    faults.requeue(lab, job.id)
    wait_for_stubs(job, 8)
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    shown = [json.loads(file.read_text()) for file in job.output.glob("*.json")]
    assert [one["values"] for one in shown] == [[1, 1, 1]] * 8
    for variables in (one["variables"] for one in shown):
        assert variables["OMP_NUM_THREADS"] == "3"
        assert not [name for name, value in FOREIGN.items() if variables.get(name) == value], variables
    assert job.log.count("run.slurm: this node has GPUs and the job uses none") == 2, job.log


REFUSED = {  # the example, its script, what is changed in it, options of sbatch, variables, what the line says
    "cores": ("ddp_spawn", "run", (r"^#SBATCH --cpus-per-task=.*\n", ""), (), {}, ["--cpus-per-task"]),
    "no environment": ("ddp_spawn", "run", ("^$", ""), (), {"VENV": "no-folder"}, ["no-folder/bin/python", "set VENV"]),
    "link": (
        "ddp_spawn",
        "run",
        ("^$", ""),
        (),
        {"VENV": "../../link"},
        ["/link/bin/python", "which is a link to /gone/python3"],
    ),
    "empty": ("ddp_spawn", "run", ("^$", ""), (), {"VENV": "../../empty"}, ["cannot run train.py (it has no torch)"]),
    "two nodes": ("ddp_spawn", "run", ("^$", ""), ("--nodes=2",), {}, ["--nodes=1 --ntasks-per-node=1"]),
    "parts": ("ddp_spawn", "run", ("^$", ""), ("--nodes=1", ":", "--nodes=1"), {}, ["a heterogeneous job"]),
    "two tasks": ("torchrun_multinode", "run", ("^$", ""), ("--ntasks-per-node=2",), {}, ["--ntasks-per-node=1"]),
    "other GPUs": (
        "torchrun_multinode",
        "srun",
        ("^$", ""),
        ("--gpus-per-node=1",),
        {},
        ["each node has 1 GPUs: set --ntasks-per-node=1, too"],
    ),
}


@ci_with("ddp_spawn", "lightning", "torchrun_multinode")
def test_refused(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A job that cannot work as it was submitted ends at once with one line, before any process starts."""
    jobs: list[tuple[Job, Sequence[str]]] = []
    venv.create(tmp_path / "empty")
    (tmp_path / "link" / "bin").mkdir(parents=True)
    (tmp_path / "link" / "bin" / "python").symlink_to("/gone/python3")
    for fault, (name, script, (old, new), options, variables, texts) in REFUSED.items():
        if name == example:
            folder = stub(source, tmp_path / fault / example)
            path = folder / f"{script}.slurm"
            path.write_text(re.sub(old, new, path.read_text(), flags=re.MULTILINE))
            line = f"sbatch {script}.slurm"
            jobs.append((submit(lab, example, folder, options=options, line=line, **variables), texts))
    for job, texts in jobs:
        assert_refused(job, *texts)
        assert "started" not in job.log and job.log.count("error") == 1, job.log
    folder = hand_over(stub(source, tmp_path / "login" / example))
    line = "run.slurm: error: submit it from its folder: sbatch run.slurm\n"
    for words in ["bash"], ["srun", "bash"]:  # a shell on the login node; a step, which could start no steps in itself
        done = lab.run(["salloc", "--nodes=1", "--cpus-per-task=4", *words, "run.slurm"], cwd=folder, env=SETTINGS)
        assert done.returncode != 0 and line in done.stderr and done.stderr.count("run.slurm: error") == 1, done.stderr
    (tmp_path / "elsewhere").mkdir()
    words = ["sbatch", "--parsable", str(folder / "run.slurm")]
    done = lab.run(words, cwd=hand_over(tmp_path / "elsewhere"))
    assert_refused(Job(lab, example, tmp_path / "elsewhere", done.stdout.strip()), "submit it from its own folder")
