"""What run.slurm itself promises, shown with a train.py that only waits: no torch is imported, so these are quick."""

import re
import sys
import venv
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import Job, all_nodes, array_of_three, by_torchrun, hand_over, header, stub, submit, wait_for_start
from harness.launchers import LAUNCHERS, copy_example
from harness.processes import wait_until
from lab import Lab

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
    """Where SLURM refuses the requeue the log says so, and a job that has stopped for it is not COMPLETED."""
    folder = stub(source, tmp_path / example)
    job = submit(lab, example, folder, options=("--no-requeue",))
    wait_for_start(folder, job.id)
    lab.timelimit(job.id)
    job.wait_for_line("run.slurm: error: the requeue failed, see above")
    if not LAUNCHERS[example].job_recovers:  # it trains for the rest of its time
        assert job.shown["JobState"] == "RUNNING"
        (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == ("FAILED" if LAUNCHERS[example].job_recovers else "COMPLETED")


SMI = {
    "nvidia-smi": """#!/bin/sh
for id in $(echo "${1#--id=}" | tr , ' '); do echo "$id, 90, 30000, 300.00, 1700, 0x0000000000000004"; done
""",
    "rocm-smi": """#!/bin/sh
echo 'device,GPU use (%),VRAM Total Memory (B),VRAM Total Used Memory (B),Average Graphics Package Power (W)'
echo 'card0,80,68702699520,1073741824,250.0'
echo 'card1,70,68702699520,1073741824,200.0'
""",
}


def wait_for_samples(paths: list[Path]) -> None:
    """Wait until each of these logs has had three more samples of a GPU."""

    def rows(path: Path) -> int:
        return path.read_text().count("\n") if path.exists() else 0

    before = [rows(path) for path in paths]
    wait_until(lambda: all(rows(path) > old + 6 for path, old in zip(paths, before, strict=True)), 60, f"{paths}")


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
        logs[name] = [job.output / f"usage-node{number}.csv" for number in range(1, header(folder, "nodes") + 1)]
        wait_for_samples(logs[name])
    ends, cancelled = jobs.values()
    cancelled.cancel()
    wait_for_samples(logs["nvidia-smi"])  # it goes on
    (ends.output / "finish").touch()
    assert ends.wait().shown["JobState"] == "COMPLETED" and cancelled.shown["JobState"] == "CANCELLED", ends.log
    devices = {
        name: [{line.split(",")[1] for line in path.read_text().splitlines()[1:]} for path in paths]
        for name, paths in logs.items()
    }
    assert all(found in ({"gpu0"}, {"gpu1"}) for found in devices["nvidia-smi"]), "only the GPU that the job has"
    assert all(found == {"gpu0", "gpu1"} for found in devices["rocm-smi"]), "all of the node"
    off = submit(lab, example, folder, options=options, LOG_EVERY="0", MAKER="nvidia-smi")
    off.wait_for_line("started [")
    (off.output / "finish").touch()
    assert off.wait().shown["JobState"] == "COMPLETED" and not [*off.output.glob("usage-*")], off.log


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
    "two nodes": (("^$", ""), ("--nodes=2",), {}, ["2 tasks on 2 nodes", "--nodes=1 --ntasks-per-node=1"]),
    "two tasks": (("^$", ""), ("--ntasks-per-node=2",), {}, ["4 tasks on 2 nodes", "#SBATCH --ntasks-per-node=1"]),
    "GPUs in all": (("^$", ""), ("--gpus=2",), {}, ["--gpus-per-node", "--gpus may differ"]),
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
        folder = stub(source, tmp_path / str(number) / example)
        for script in (folder / "run.slurm", folder / "plumbing.sh"):
            script.write_text(re.sub(old, new, script.read_text(), flags=re.MULTILINE))
        jobs[fault] = submit(lab, example, folder, options=options, **variables), texts
    for fault, (job, texts) in jobs.items():
        assert job.wait().shown["JobState"] == "FAILED", fault
        errors = [line for line in job.log.splitlines() if "error" in line]
        assert len(errors) == 1 and errors[0].startswith("run.slurm: error:"), job.log
        assert all(text in errors[0] for text in texts) and "started" not in job.log, job.log


@pytest.mark.runs("one")
def test_from_another_folder(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Submitted from a folder that has no plumbing.sh, the job ends with one line that says from where to submit."""
    script = hand_over(stub(source, tmp_path / example)) / "run.slurm"
    (tmp_path / "elsewhere").mkdir()
    done = lab.run(["sbatch", "--parsable", str(script)], cwd=hand_over(tmp_path / "elsewhere"))
    job = Job(lab, example, tmp_path / "elsewhere", done.stdout.strip()).wait()
    assert job.shown["JobState"] == "FAILED"
    (line,) = job.log.splitlines()
    assert line.startswith(f"run.slurm: error: there is no plumbing.sh in {tmp_path}/elsewhere: submit from"), job.log


@pytest.mark.runs("one")
def test_other_sites(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """SLURM_EXPORT_ENV=NONE, a conda environment without bin/activate, a folder with a space in its name: all work.

    So does a SLURM before 21.08, which does not tell the number of GPUs: only the list of them.
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
    options = ("--export=ALL,SLURM_EXPORT_ENV=NONE", *["--gpus-per-node=2"] * gpus)
    job = submit(lab, example, folder, "--epochs", "7", options=options, VENV="../../conda")
    job.wait_for_line("started [")
    wait_for_start(folder, job.id)
    (job.output / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log
    count = nodes * tasks * (2 if by_torchrun(folder) else 1)
    assert job.log.count("started [") == count and "'--epochs', '7'" in job.log
    if "--processes" in (folder / "run.slurm").read_text():  # train.py starts them
        assert "'--processes', '2'" in job.log
