"""A job with fake GPUs: run.slurm starts one process for each GPU, on two nodes."""

import shutil
from pathlib import Path

import pytest

from harness.jobs import submit
from harness.launchers import ROOT, copy_example
from lab import Lab
from tests.slurm.small import all_nodes, assert_completed
from tests.test_fake_gpus import fake_gpus, training

pytestmark = [pytest.mark.slurm, pytest.mark.only("torchrun_multinode")]


@pytest.mark.runs("full")
def test_one_process_for_each(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """With two GPUs on each of its nodes there are four processes, and each uses its own GPU."""
    folder = copy_example(source, tmp_path / example)
    shared = Path(shutil.copytree(ROOT / "fake_gpus", tmp_path / "fake_gpus"))  # users of the lab can read it
    variables = fake_gpus(folder / "logs", folder=shared)
    del variables["CUDA_VISIBLE_DEVICES"]  # which SLURM sets
    options = (all_nodes(source), "--gpus-per-node=2")
    job = submit(lab, example, folder, "--epochs", "1", "--limit-steps", "2", options=options, **variables)
    assert_completed(job, 1, processes=4)
    assert "4 processes on 2 nodes, nccl on cuda" in job.log, job.log
    assert [gpus for gpus, _ in training(folder / "logs")] == 2 * [["cuda:0"]] + 2 * [["cuda:1"]]
