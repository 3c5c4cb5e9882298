"""What only deepspeed's run.slurm promises: ZeRO over two nodes, without ssh."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import outputs, readme
from harness.jobs import EPOCHS, submit
from harness.launchers import copy_example
from harness.runs import Reference
from lab import Lab
from tests.slurm.small import assert_completed, two_processes

pytestmark = [pytest.mark.slurm, pytest.mark.only("deepspeed")]


@pytest.mark.runs("full")
def test_stage_3_on_two_nodes(
    example: str,
    source: Path,
    lab: Lab,
    tmp_path: Path,
    shipped_job: Callable[[], Reference],
    two_process_job: Callable[[], Reference],
) -> None:
    """The README's job at stage 3, one process on each of 2 nodes: a shard of its own each, stage 0's bits, no ssh."""
    folder = copy_example(source, tmp_path / example)
    line = readme.command("examples/deepspeed/README.md", "sbatch run.slurm --zero-stage 3")
    job = submit(lab, example, folder, options=two_processes(source), line=line)
    assert_completed(job, EPOCHS, processes=2)
    names = {path.name for path in job.output.glob("checkpoint/step*/*optim_states.pt")}
    assert names == {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)}
    outputs.assert_same_run(job.output, two_process_job().output)
    where = {3: (job.output, job.log, 2), 0: (shipped_job().output, shipped_job().stdout, 4)}
    for stage, (output, log, processes) in where.items():
        assert f"ConvNet on digits: {processes} processes on 2 nodes, gloo on cpu" in log and "ssh" not in log
        assert outputs.read_run(output)["settings"]["zero_stage"] == stage


@pytest.mark.runs("full")
def test_stage_3_with_four_processes(
    example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]
) -> None:
    """Two processes on each node. The order of a sum counts then: the first epoch's loss is compared, not the bits."""
    job = submit(lab, example, copy_example(source, tmp_path / example), "--zero-stage", "3", "--epochs", "2")
    assert_completed(job, 2)
    assert len(list(job.output.glob("checkpoint/step*/*optim_states.pt"))) == 4
    losses = [outputs.read_metrics(output)[0]["train_loss"] for output in (job.output, shipped_job().output)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
