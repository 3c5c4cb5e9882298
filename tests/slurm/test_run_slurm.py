"""What run.slurm itself promises, shown with a train.py that only waits: no torch is imported, so these are quick."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import (
    STUB,
    Job,
    array_of_three,
    by_torchrun,
    header,
    stub,
    submit,
    wait_for_start,
)
from harness.launchers import HOROVOD, LAUNCHERS
from lab import Lab, faults

pytestmark = [pytest.mark.slurm, pytest.mark.only("plumbing"), pytest.mark.runs("one")]


def test_job_array(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """In an array of 3 one task is requeued near its time limit: the finished and the running one are left alone."""
    array_of_three(lab, stub(source, tmp_path / example))


@pytest.mark.runs("weekly")
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


@pytest.mark.runs("weekly")
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
