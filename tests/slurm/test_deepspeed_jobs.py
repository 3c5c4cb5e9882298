"""What only deepspeed's run.slurm promises: ZeRO over two nodes without ssh, and no start in a wrong shape."""

from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from runs import Reference
from slurm_jobs import copy, submit

from lab import Lab

pytestmark = pytest.mark.slurm


def test_stage_3_on_two_nodes(
    example: str, source: Path, lab: Lab, tmp_path: Path, undisturbed: Callable[[], Reference]
) -> None:
    """The shipped script at stage 3 and at stage 0: 4 processes on 2 nodes, the same shares of the work, no ssh.

    With 4 processes the order of a sum counts: the first epoch's loss is compared, not the bits.
    """
    job = submit(lab, example, copy(source, tmp_path / example), "--zero-stage", "3", "--epochs", "2").wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    names = {path.name for path in (job.output / "checkpoint" / "epoch2").glob("*optim_states.pt")}
    assert names == {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(4)}
    plain = undisturbed()
    for stage, log in ((3, job.log), (0, plain.stdout)):
        assert "ConvNet on digits: 4 processes on 2 nodes, gloo on cpu, 2 threads each, global batch 256" in log
        assert f"ds_config.json: ZeRO stage {stage}, fp32" in log and "ssh" not in log
    losses = [runs.read_metrics(output)[0]["train_loss"] for output in (job.output, plain.output)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_wrong_number_of_tasks(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """With --ntasks-per-node=2 the job ends at once, and one line names the option to change."""
    job = submit(lab, example, copy(source, tmp_path / example), options=("--ntasks-per-node=2",)).wait(30)
    errors = [line for line in job.log.splitlines() if line.startswith("run.slurm: error:")]
    assert job.shown["JobState"] == "FAILED" and len(errors) == 1
    assert "4 tasks on 2 nodes" in errors[0] and "#SBATCH --ntasks-per-node=1" in errors[0]
