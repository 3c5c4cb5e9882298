"""Jobs with fake GPUs: run.slurm and SLURM give each process its own, on two nodes."""

import shutil
from pathlib import Path

import pytest

import fake_gpus
from harness import edits, outputs
from harness.jobs import Job, all_nodes, assert_completed, submit, two_processes
from harness.launchers import copy_example
from lab import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.only("gpus"),
    pytest.mark.skipif(bool(fake_gpus.why_not()), reason=fake_gpus.why_not()),
]


def train(
    lab: Lab,
    example: str,
    source: Path,
    built: Path,
    tmp_path: Path,
    *options: str,
    nodes: int,
    each: int,
    name: str = "",
) -> Job:
    """Run an epoch in a job, and check that each process has used a GPU of its own, as SLURM has given it.

    With a name, SLURM gives that in the place of numbers.
    """
    folder = copy_example(source, tmp_path / example)
    shared = Path(shutil.copytree(built, tmp_path / "fake_gpus"))  # in what the nodes share, and users can read
    variables = fake_gpus.environment(shared, folder / "record")
    if name:
        edits.edit(folder / "run.slurm", "\nprepare ", f"\nexport CUDA_VISIBLE_DEVICES={name}\nprepare ")
        (prolog := folder / "prolog").write_text(f"#!/bin/sh\necho export CUDA_VISIBLE_DEVICES={name}\n")
        prolog.chmod(0o755)
        variables["SLURM_TASK_PROLOG"] = str(prolog)  # for srun, whose tasks would have the numbers again
    del variables["CUDA_VISIBLE_DEVICES"]  # which SLURM sets
    variables["FAKE_GPUS_RECORD"] = "record"  # in the job's folder
    job = submit(lab, example, folder, "--epochs", "1", options=(all_nodes(source), *options), **variables)
    assert_completed(job, 1, processes=nodes * each)
    assert f"{nodes * each} processes on {nodes} node" in job.log and "nccl on cuda" in job.log, job.log
    records = [one for one in fake_gpus.records(folder / "record") if one["calls"].get("max_memory_allocated")]
    assert [one["own"] for one in records] == sorted(nodes * list(range(each))), records
    return job


ON_NODES = ("accelerate", "torchrun_multinode", "lightning", "deepspeed", "torchrun_vision", "fsdp", "lora")


@pytest.mark.only("srun_multinode", *ON_NODES)
@pytest.mark.runs("one")
def test_two_nodes(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path) -> None:
    """On two nodes with one GPU each, a process takes the first of its node, whatever its rank."""
    train(lab, example, source, built, tmp_path, *two_processes(source)[1:], nodes=2, each=1)


@pytest.mark.runs("weekly")
def test_shipped(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path) -> None:
    """With two GPUs on each of its nodes run.slurm starts one process for each of them."""
    nodes = 1 if example == "ddp_spawn" else 2
    train(lab, example, source, built, tmp_path, "--gpus-per-node=2", nodes=nodes, each=2)


@pytest.mark.only("torchrun_multinode", "lightning", "srun_multinode")
@pytest.mark.runs("weekly")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param("--gpus-per-task=2", marks=pytest.mark.only("torchrun_multinode")),
        pytest.param("--gres=gpu:2", marks=pytest.mark.only("torchrun_multinode")),
        pytest.param("--gpus-per-task=1", marks=pytest.mark.only("lightning", "srun_multinode")),
        pytest.param("--gpus-per-node=2 --gpu-bind=single:1", marks=pytest.mark.only("lightning", "srun_multinode")),
    ],
)
def test_other_ways_to_ask(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path, options: str) -> None:
    """However GPUs are asked for, and where SLURM shows each task one alone, each process has its own."""
    train(lab, example, source, built, tmp_path, *options.split(), nodes=2, each=2)


@pytest.mark.only("ddp_spawn", "srun_multinode", "torchrun_multinode")
@pytest.mark.runs("weekly")
def test_slice(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path) -> None:
    """A job that has one slice of a GPU (MIG) ends with the bits of one that has a GPU. Two: test_run_slurm.py."""
    options = ("--nodes=1", "--nodelist=node1", "--ntasks-per-node=1", "--gpus-per-node=1")
    names = {"gpu": "", "slice": "MIG-0f0f0f0f-0000-0000-0000-000000000000"}
    jobs = []
    for folder, name in names.items():
        (tmp_path / folder).mkdir()
        jobs.append(train(lab, example, source, built, tmp_path / folder, *options, nodes=1, each=1, name=name))
    outputs.assert_same_run(jobs[1].output, jobs[0].output)
