"""Jobs with fake GPUs: run.slurm and SLURM give each process its own, on two nodes."""

import shutil
from pathlib import Path

import pytest

import fake_gpus
from harness.jobs import Job, all_nodes, assert_completed, submit, two_processes
from harness.launchers import copy_example
from lab import Lab

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.only("gpus"),
    pytest.mark.only("plumbing"),
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
) -> Job:
    """Run an epoch in a job, and check that each process has used a GPU of its own, as SLURM has given it."""
    folder = copy_example(source, tmp_path / example)
    shared = Path(shutil.copytree(built, tmp_path / "fake_gpus"))  # in what the nodes share, and users can read
    variables = fake_gpus.environment(shared, folder / "record")
    del variables["CUDA_VISIBLE_DEVICES"]  # which SLURM sets
    variables["FAKE_GPUS_RECORD"] = "record"  # in the job's folder
    job = submit(lab, example, folder, "--epochs", "1", options=(all_nodes(source), *options), **variables)
    assert_completed(job, 1, processes=nodes * each)
    assert f"{nodes * each} processes on {nodes} node" in job.log and "nccl on cuda" in job.log, job.log
    records = [one for one in fake_gpus.records(folder / "record") if one["calls"].get("max_memory_allocated")]
    assert [one["own"] for one in records] == sorted(nodes * list(range(each))), records
    return job


@pytest.mark.runs("one")
def test_two_nodes(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path) -> None:
    """On two nodes with one GPU each, a process takes the first of its node, whatever its rank."""
    train(lab, example, source, built, tmp_path, *two_processes(source)[1:], nodes=2, each=1)


@pytest.mark.runs("weekly")
def test_shipped(lab: Lab, example: str, source: Path, built: Path, tmp_path: Path) -> None:
    """With two GPUs on each of its nodes run.slurm starts one process for each of them."""
    train(lab, example, source, built, tmp_path, "--gpus-per-node=2", nodes=2, each=2)
