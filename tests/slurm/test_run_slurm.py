"""What run.slurm itself promises, shown with a train.py that only waits: no torch is imported, so these are quick."""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import edits, outputs
from harness.jobs import (
    CPUS,
    GPUS,
    NODES,
    STUB,
    Job,
    all_nodes,
    array_of_three,
    by_torchrun,
    hand_over,
    header,
    on_this_machine_only,
    stub,
    stubs,
    submit,
    wait_for_start,
)
from harness.launchers import HOROVOD, LAUNCHERS, ROOT, copy_example
from harness.processes import wait_until
from lab import Lab, Wanted, faults, why_not

pytestmark = pytest.mark.slurm


@pytest.mark.runs("one")
def test_job_array(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """In an array of 3 one task is requeued near its time limit: the finished and the running one are left alone."""
    array_of_three(lab, stub(source, tmp_path / example))


@pytest.mark.runs("one")
def test_help(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """`sbatch run.slurm --help` prints the flags and ends: nobody has asked it to stop, so it is not requeued."""
    job = submit(lab, example, copy_example(source, tmp_path / example), "--help").wait()
    assert job.shown["JobState"] == "COMPLETED" and job.shown["Restarts"] == "0", job.log
    assert "--warmup-steps" in job.log and "requeue" not in job.log, job.log


@pytest.mark.runs("one")
def test_failed_requeue(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Where neither a requeue nor another job may follow the log says so; a job that has stopped for it has failed."""
    folder = stub(source, tmp_path / example)
    job = submit(lab, example, folder, options=("--no-requeue",), SUCCESSORS="0")
    wait_for_start(folder, job.id)
    faults.timelimit(lab, job.id)
    job.wait_for_line("run.slurm: error: the requeue failed, see above")
    assert "run.slurm: error: no further job after 0, since SUCCESSORS is 0" in job.log
    if not LAUNCHERS[example].job_recovers:  # it trains for the rest of its time
        assert job.shown["JobState"] == "RUNNING"
        (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == ("FAILED" if LAUNCHERS[example].job_recovers else "COMPLETED")


USAGE = ROOT / "runs" / "usage.py"
SMI = {
    "nvidia-smi": """#!/bin/sh
for id in $(echo "$2" | tr , ' '); do echo "$id, 90, 30000, 300.00, 1700, 0x0000000000000004"; done
""",
    "rocm-smi": """#!/bin/sh
echo 'device,GPU use (%),VRAM Total Memory (B),VRAM Total Used Memory (B),Average Graphics Package Power (W)'
echo 'card0,80,68702699520,1073741824,250.0'
echo 'card1,70,68702699520,1073741824,200.0'
""",
}


def wait_for_samples(paths: list[Path]) -> None:
    """Wait until each of these logs has had three more samples."""

    def count(path: Path) -> int:
        return path.read_text().count("\n\n") if path.exists() else 0

    before = [count(path) for path in paths]
    wait_until(lambda: all(count(path) > old + 2 for path, old in zip(paths, before, strict=True)), 300, f"{paths}")


@pytest.mark.runs("one")
@pytest.mark.only("gpus")
def test_log_of_gpus(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """On each node the GPUs of a job are logged until it ends or is cancelled; LOG_EVERY=0 switches that off.

    `nvidia-smi` and `rocm-smi` are stand-ins. No process is left: see Job.wait().
    """
    folder = stub(source, tmp_path / example)
    edits.edit(folder / "run.slurm", "\nprepare ", '\nexport PATH="$PWD/bin/$MAKER:$PATH"\nprepare ')
    for name, text in SMI.items():
        (folder / "bin" / name).mkdir(parents=True)
        (folder / "bin" / name / name).write_text(text)
        (folder / "bin" / name / name).chmod(0o755)
    options = (all_nodes(source), "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")
    logs: dict[str, list[Path]] = {}
    jobs = {name: submit(lab, example, folder, options=options, LOG_EVERY="0.2", MAKER=name) for name in SMI}
    for name, job in jobs.items():
        job.wait_for_line("started [")
        logs[name] = [job.output / f"usage-node{number}.txt" for number in range(1, header(folder, "nodes") + 1)]
        wait_for_samples(logs[name])
    ends, cancelled = jobs.values()
    cancelled.cancel()
    wait_for_samples(logs["nvidia-smi"])  # it goes on
    (ends.output / "finish").touch()
    assert ends.wait().shown["JobState"] == "COMPLETED" and cancelled.shown["JobState"] == "CANCELLED", ends.log
    gpus = {name: {} for name in SMI}
    for name, job in jobs.items():
        for node, device in outputs.import_file(USAGE).samples(job.output):
            if device.startswith("gpu"):  # not the processors of this machine
                gpus[name].setdefault(node, set()).add(device)
    assert all(len(logs[name]) == len(gpus[name]) for name in SMI)
    assert all(found in ({"gpu0"}, {"gpu1"}) for found in gpus["nvidia-smi"].values()), "only the GPU that the job has"
    assert all(found == {"gpu0", "gpu1"} for found in gpus["rocm-smi"].values()), "all of the node"
    off = submit(lab, example, folder, options=options, LOG_EVERY="0", MAKER="nvidia-smi")
    off.wait_for_line("started [")
    (off.output / "finish").touch()
    assert off.wait().shown["JobState"] == "COMPLETED" and not [*off.output.glob("usage-*")], off.log


@pytest.fixture(scope="module")
def strict_lab(session_folder: Path) -> Iterator[Lab]:
    """A lab whose site takes --requeue off each job, as a plugin of some sites does: `scontrol requeue` is refused."""
    if reason := why_not():
        pytest.skip(reason)
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    with Lab(Wanted(NODES, CPUS, 2 * GPUS, name=f"strict{os.getpid()}", share=shared)) as lab:
        (lab.folder / "job_submit.lua").write_text(NEVER_REQUEUE)
        with open(lab.folder / "slurm.conf", "a") as conf:  # not before the script is there: slurmctld would not start
            conf.write("JobSubmitPlugins=lua\n")
        lab.run(["scontrol", "reconfigure"], user="root", check=True)
        yield lab


NEVER_REQUEUE = """
function slurm_job_submit(job, partitions, user) job.requeue = 0; return slurm.SUCCESS end
function slurm_job_modify(job, record, partitions, user) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def next_job(lab: Lab, folder: Path, job: str, log: Path) -> str:
    """Have a job come near its time limit where it cannot be requeued, and end; return the job that goes on."""
    said = re.compile(rf"SLURM refuses to requeue job {job}: job (\d+) will continue it, in {log}\n")
    starts = log.read_text().count("started [")
    faults.timelimit(lab, job)
    wait_until(lambda: said.search(log.read_text()), 300, f"the successor of job {job}")
    successor = said.search(log.read_text())[1]
    if not LAUNCHERS[folder.name].job_recovers:  # it trains to the very end of its time
        shown = lab.job(successor)
        assert shown["JobState"] == "PENDING" and shown["Dependency"].startswith(f"afterany:{job}("), shown
        lab.run(["scancel", job], check=True)
    assert lab.wait_for_job(job)["JobState"] == ("COMPLETED" if LAUNCHERS[folder.name].job_recovers else "CANCELLED")
    wait_until(lambda: log.read_text().count("started [") == 2 * starts, 300, f"the start of job {successor}")
    return successor


@pytest.mark.runs("one")
def test_successors(strict_lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """Where SLURM never requeues a job submits another one near its time limit, as often in a row as SUCCESSORS says.

    That has the same arguments, options, log and output folder. The other task of an array is left alone.
    """
    folder = stub(source, tmp_path / "my project" / example)
    options = ("--array=3-4", "--cpus-per-task=1", "--time=90", "--mem=2G", "--job-name=other", all_nodes(source))
    options += ("--gres=gpu:2",) * LAUNCHERS[example].gpus
    words = ("--epochs", "7", "--text", "two words")
    array = submit(strict_lab, example, folder, *words, options=options, SUCCESSORS="1").id
    first, other = f"{array}_3", f"{array}_4"
    log = folder / f"other-{strict_lab.wait_for_job(first, 'RUNNING')['JobId']}.out"
    wait_until(lambda: log.exists() and log.read_text().count("started [") == stubs(folder), 300, "the start")
    before = strict_lab.job(first)
    second = f"{next_job(strict_lab, folder, first, log)}_3"
    after = strict_lab.job(second)
    same = ["TimeLimit", "NumNodes", "NodeList", "NumTasks", "CPUs/Task", "MinMemoryNode", "JobName", "ArrayTaskId"]
    same += ["TresPerNode"] * LAUNCHERS[example].gpus
    assert [after[name] for name in same] == [before[name] for name in same] and after["Requeue"] == "0"
    started = [line for line in log.read_text().splitlines() if line.startswith("started [")]
    assert len({*started}) == 1 and "'--epochs', '7', '--text', 'two words'" in started[0], started
    assert f"'--output-dir', 'output/{first}'" in started[0] and strict_lab.job(other)["JobState"] == "RUNNING"

    faults.timelimit(strict_lab, second)
    line = "run.slurm: error: no further job after 1, since SUCCESSORS is 1"
    wait_until(lambda: line in log.read_text(), 300, "the end of the chain")
    for task in (first, other):
        (folder / "output" / task / "finish").touch()
    ends = [strict_lab.wait_for_job(task)["JobState"] for task in (second, other)]
    assert ends == ["FAILED" if LAUNCHERS[example].job_recovers else "COMPLETED", "COMPLETED"], log.read_text()


@pytest.mark.runs("weekly")
def test_successor_without_progress(strict_lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """A chain of jobs ends when one of them has saved nothing, as requeues do."""
    folder = stub(source, tmp_path / example, STUB.replace("touch", "exists", 1))
    job = submit(strict_lab, example, folder)
    wait_for_start(folder, job.id)
    if not LAUNCHERS[example].stops_at_a_step:  # it waits for a save until 20 s before its end; as will the next job
        job.limit_time(100)
    second = next_job(strict_lab, folder, job.id, log := folder / f"{example}-{job.id}.out")
    faults.timelimit(strict_lab, second)
    wait_until(lambda: "no new checkpoint since the last restart" in log.read_text(), 300, "the end of the chain")
    (job.output / "finish").touch()
    strict_lab.wait_for_job(second)
    assert log.read_text().count("will continue it") == 1, log.read_text()  # the first job's, by the second
    assert not strict_lab.run(["squeue", "--noheader"]).stdout


@pytest.mark.only(*[name for name, row in LAUNCHERS.items() if not row.job_recovers])
@pytest.mark.runs("weekly")
def test_successor_not_needed(strict_lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """A job that finishes in the last minute of its time takes the one that would have continued it back."""
    folder = stub(source, tmp_path / example)
    job = submit(strict_lab, example, folder)
    wait_for_start(folder, job.id)
    faults.timelimit(strict_lab, job.id)
    job.wait_for_line("will continue it")
    successor = re.search(r"job (\d+) will continue it", job.log)[1]
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED"
    assert strict_lab.wait_for_job(successor)["JobState"] == "CANCELLED"


@pytest.mark.runs("one")
def test_program_of_its_start(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A requeued job runs what it was submitted with, though each file is edited; a new one what is there then.

    Beside the copy all is found that is beside train.py, and paths are relative to the folder as ever. An editor's lock
    is left out. A job that finds a folder of its id, here made before it, is refused.
    """
    folder = stub(source, tmp_path / example, USES_OTHERS + STUB)
    files = [folder / name for name in ("extra.py", "settings.json", "package/__init__.py", "package/part.py")]
    (folder / "package").mkdir()
    (folder / "large").mkdir()
    (folder / "large" / "file").write_text("large")
    (folder / "package" / ".#part.py").symlink_to("me@login1.4242:1700000000")
    for file in files:
        file.write_text("VALUE = 1" if file.suffix == ".py" else "1")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in ("init --quiet", "add --all", "commit --quiet --message=first"):
        subprocess.run([*git, *words.split()], check=True, timeout=300)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, timeout=300, capture_output=True, text=True).stdout
    (folder / "package" / "part.py").write_text("VALUE = 1  # not committed")
    job = submit(lab, example, folder)
    wait_for_start(folder, job.id)
    for file in files:
        file.write_text("VALUE = 2" if file.suffix == ".py" else "2")
    edits.edit(folder / "train.py", "import os, sys, time", "sys.exit('the edited program')")
    faults.requeue(lab, job.id)
    wait_for_start(folder, job.id, starts=2)
    code = f"output/{job.id}/code-{job.id}"
    (line,) = re.findall(
        rf"^run.slurm: running {code}, as it first started; changed since.*:(.*)$", job.log, re.MULTILINE
    )
    assert {*line.split()} == {"train.py", *(str(file.relative_to(folder)) for file in files)}
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    commit = (folder / code / ".commit").read_text()
    assert commit in (f"{head.strip()}-dirty\n", "")  # "": git refuses a folder that another user owns

    later = submit(lab, example, folder, OUTPUT_DIR=f"output/{job.id}").wait()
    assert later.shown["JobState"] == "FAILED" and "AssertionError" in later.log, later.log

    again = folder / "output" / str(int(later.id) + 1)
    shutil.copytree(job.output, again, symlinks=True)
    refused = submit(lab, example, folder).wait()
    assert again == refused.output and refused.shown["JobState"] == "FAILED", refused.log
    assert f"run.slurm: error: output/{refused.id} is of another run with the id {refused.id}: move" in refused.log
    assert "started" not in refused.log


USES_OTHERS = """
import json
from pathlib import Path

import extra, package
from package import part

values = [extra.VALUE, package.VALUE, part.VALUE, json.loads((Path(__file__).parent / "settings.json").read_text())]
assert values == [1] * 4, values
assert (Path(__file__).parent / "large" / "file").read_text() == Path("large/file").read_text() == "large"
"""


@pytest.mark.runs("one")
def test_other_script(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """`SCRIPT=other.py sbatch run.slurm` runs that file in the place of train.py, with the same arguments."""
    folder = stub(source, tmp_path / example)
    (folder / "train.py").rename(folder / "other.py")
    job = submit(lab, example, folder, "--epochs", "7", SCRIPT="other.py")
    wait_for_start(folder, job.id)
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    assert "'--epochs', '7'" in job.log and "--output-dir', 'output/" in job.log, job.log


REFUSED = {  # what is changed in run.slurm, options of sbatch, variables, what the line says
    "cores by GPU": ((r"^#SBATCH --cpus-per-task=.*\n", ""), (), {}, ["--cpus-per-task", "--cpus-per-gpu"]),
    "no environment": (("^$", ""), (), {"VENV": "no-such-folder"}, ["no-such-folder/bin/python", "set VENV"]),
    "empty environment": (("^$", ""), (), {"VENV": "../../empty"}, ["/empty cannot run train.py (", "README.md"]),
    "no apptainer": (
        (r"(type -P|\|\| echo) (apptainer|singularity)", r"\1 no-\2"),
        (),
        {"IMAGE": "a.sif"},
        ["a.sif cannot run train.py (", "exec: no-apptainer: not found", "container.def"],
    ),
    "no pyxis": (("^$", ""), (), {"IMAGE": "pyxis:a.sqsh"}, ["srun has no --container-image", "no pyxis"]),
    "two nodes": (("^$", ""), ("--nodes=2",), {}, ["2 tasks on 2 nodes", "--nodes=1 --ntasks-per-node=1"]),
    "two tasks": (("^$", ""), ("--ntasks-per-node=2",), {}, ["4 tasks on 2 nodes", "#SBATCH --ntasks-per-node=1"]),
    "launcher": (("^$", ""), (), {"LAUNCH": "ssh"}, ["no LAUNCH=ssh", "mpi, the default, or gloo"]),
    "other tasks": (("^$", ""), ("--ntasks=3",), {"LAUNCH": "gloo"}, ["equally many tasks", "--ntasks-per-node"]),
    "no server": (("RendezvousServer", "NoServer"), (), {"LAUNCH": "gloo"}, ["rendezvous server does not start"]),
    "GPUs in all": (("^$", ""), ("--gpus=2",), {}, ["--gpus-per-node", "--gpus may differ"]),
    "slices of GPUs": (
        ("^prepare ", r"export CUDA_VISIBLE_DEVICES=MIG-1,MIG-2\nprepare "),
        ("--gpus-per-node=2",),
        {},
        ["slices of GPUs (MIG) cannot train", "one slice with --nodes=1"],
    ),
}


def test_refused(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A job that cannot work as it was submitted ends at once with one line, before any process starts."""
    jobs: dict[str, tuple[Job, list[str]]] = {}
    venv.create(tmp_path / "empty")
    for number, (fault, ((old, new), options, variables, texts)) in enumerate(REFUSED.items()):
        if fault == "two nodes" and header(source, "nodes") > 1:
            continue
        if fault == "two tasks" and not by_torchrun(source):  # it is torchrun that starts a node's processes
            continue
        if fault == "GPUs in all" and (header(source, "nodes") == 1 or not LAUNCHERS[example].gpus):
            continue
        if fault == "slices of GPUs" and not LAUNCHERS[example].gpus:
            continue
        if "LAUNCH" in variables and example not in HOROVOD:
            continue
        folder = stub(source, tmp_path / str(number) / example)
        for script in [folder / "run.slurm", *folder.glob("plumbing/*.sh")]:
            script.write_text(re.sub(old, new, script.read_text(), flags=re.MULTILINE))
        jobs[fault] = submit(lab, example, folder, options=options, **variables), texts
    for fault, (job, texts) in jobs.items():
        assert job.wait().shown["JobState"] == "FAILED", fault
        errors = [line for line in job.log.splitlines() if "error" in line]
        assert len(errors) == 1 and errors[0].startswith("run.slurm: error:"), job.log
        assert all(text in errors[0] for text in texts) and "started" not in job.log, job.log


@pytest.mark.runs("one")
def test_from_another_folder(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Submitted from a folder that has no plumbing/, the job ends with a line that names it, and the cause."""
    script = hand_over(stub(source, tmp_path / example)) / "run.slurm"
    (tmp_path / "elsewhere").mkdir()
    done = lab.run(["sbatch", "--parsable", str(script)], cwd=hand_over(tmp_path / "elsewhere"))
    job = Job(lab, example, tmp_path / "elsewhere", done.stdout.strip()).wait()
    assert job.shown["JobState"] == "FAILED"
    missing, line = job.log.splitlines()
    assert missing.endswith("plumbing/job.sh: No such file or directory"), job.log
    assert line == "run.slurm: error: submit it from its own folder", job.log


@pytest.mark.runs("one")
def test_other_sites(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """SLURM_EXPORT_ENV=NONE, a conda environment without bin/activate, a folder with a space in its name: all work.

    So does a SLURM before 21.08, which does not tell the number of GPUs: only the list of them. So does a job with
    memory by the node that was submitted inside another one, a task of an array with memory by the core and a GPU.
    """
    folder = stub(source, tmp_path / "my project" / example)
    (tmp_path / "conda" / "bin").mkdir(parents=True)
    for program in ("python", "torchrun"):
        link = tmp_path / "conda" / "bin" / program
        link.write_text(f'#!/bin/sh\nexec "{sys.prefix}/bin/{program}" "$@"\n')
        link.chmod(0o755)
    gpus = LAUNCHERS[example].gpus
    if gpus:
        edits.edit(folder / "run.slurm", "\nprepare ", "\nunset SLURM_GPUS_ON_NODE\nprepare ")
    nodes, tasks = header(folder, "nodes"), header(folder, "ntasks-per-node")
    options = ("--mem=500", "--export=ALL,SLURM_EXPORT_ENV=NONE", *["--gpus-per-node=2"] * gpus)
    variables = {"VENV": "../../conda", "SLURM_MEM_PER_CPU": "100", "SLURM_GPUS": "1"}
    variables |= {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "2"}
    job = submit(lab, example, folder, "--epochs", "7", options=options, **variables)
    job.wait_for_line("started [")
    wait_for_start(folder, job.id)
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    count = nodes * tasks * (2 if by_torchrun(folder) else 1)
    assert job.log.count("started [") == count and "'--epochs', '7'" in job.log
    if "--processes" in (folder / "run.slurm").read_text():  # train.py starts them
        assert "'--processes', '2'" in job.log
