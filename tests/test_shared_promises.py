"""What few examples share: accumulation, a stop in the warm-up, a killed launcher or parent, too few GPUs."""

import os
import signal
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import LAUNCHERS
from harness.processes import wait_until

COUNTING = """
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

def hook(group, bucket):
    with open("exchanges", "a") as file:
        file.write(".")
    return default_hooks.allreduce_hook(group, bucket)

def note_norm(optimizer, args, kwargs):
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    with open("norms", "a") as file:
        print(torch.nn.utils.get_total_norm(gradients).item(), file=file)

register_optimizer_step_pre_hook(note_norm)
"""


@pytest.mark.only("accelerate", "srun_multinode", "torchrun_multinode")
@pytest.mark.runs("weekly", "accelerate")
def test_gradient_accumulation(example: str, folder: Path) -> None:
    """2 batches of 16 per step take the steps of batch 32, clipping included, and exchange as many gradients."""
    (folder / "counting.py").write_text(COUNTING)
    line = "    # Train.\n"
    count = "    ddp_model.register_comm_hook(None, __import__('counting').hook)\n"
    edits.edit(folder / "train.py", line, count + line)
    models, exchanges, norms = {}, {}, {}
    arguments = {"accumulated": "--batch-size 16 --gradient-accumulation-steps 2", "whole": "--batch-size 32"}
    for name, words in arguments.items():
        common = ["--max-grad-norm", 0.5, "--precision", "fp64", "--epochs", 1, "--output-dir", name]
        run = runs.train(example, folder, 2, *words.split(), *common)
        assert "global batch 64" in run.stdout
        models[name] = outputs.read_model(folder / name)
        exchanges[name] = (folder / "exchanges").stat().st_size
        norms[name] = sorted(map(float, (folder / "norms").read_text().split()))
        (folder / "exchanges").unlink()
        (folder / "norms").unlink()
    assert outputs.largest_difference(models["accumulated"], models["whole"]) < 1e-9
    assert exchanges["accumulated"] == exchanges["whole"] > 0
    assert norms["accumulated"] == pytest.approx(norms["whole"], rel=1e-9)
    assert len(norms["whole"]) == 2 * (1438 // 64)  # both processes have noted each of their steps
    assert norms["whole"] == pytest.approx([0.5] * len(norms["whole"]), rel=1e-4)  # each was above the limit before


@pytest.mark.only("accelerate", "srun_multinode", "torchrun_multinode")
@pytest.mark.runs("weekly")
def test_stopped_in_the_warmup(example: str, folder: Path) -> None:
    """Stopped in mid-epoch in its warm-up and resumed, with two batches a step: the same rates, and the same bits."""
    edits.note_rates(folder, LAUNCHERS[example])
    words = "--epochs 1 --batch-size 16 --gradient-accumulation-steps 2 --warmup-steps 15 --scale-lr sqrt"
    run = runs.start(example, folder, 2, *words.split())
    run.read_until(LAUNCHERS[example].first_line)
    step = runs.ask_to_stop(example, run)
    runs.train(example, folder, 2, *words.split(), "--resume")
    runs.assert_continued(folder / "output", step)
    assert step < 15
    expected = [0.001 * 2**0.5 * min(1, (step + 1) / 16) for step in range(1438 // 64)]
    assert edits.noted_rates(folder) == expected
    runs.train(example, folder, 2, *words.split(), "--output-dir", "whole")
    assert edits.noted_rates(folder) == expected
    outputs.assert_same_run(folder / "output", folder / "whole")


@pytest.mark.only("accelerate", "deepspeed", "torchrun_multinode")
@pytest.mark.runs("weekly", "accelerate", "deepspeed")
def test_launcher_killed(example: str, folder: Path) -> None:
    """SIGKILL to torchrun, or `accelerate launch`, alone: its processes end with it."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_epoch(1)
    os.kill(run.process.pid, signal.SIGKILL)
    wait_until(lambda: not run.pids(), 60, "the end of the processes that have lost their launcher")
    run.wait()


@pytest.mark.only("ddp_spawn", "lightning")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_parent_killed(example: str, folder: Path, number: signal.Signals) -> None:
    """A signal to the parent alone: its processes end by themselves, none outlives it; no traceback."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_epoch(1)
    os.kill(run.process.pid, number)
    left = run.pids if example == "lightning" else run.workers
    wait_until(lambda: not left(), 60, "the end of the processes that have lost their parent")
    run.wait()
    assert run.status == -number if example == "lightning" else run.status != 0
    assert "Traceback" not in run.stderr


@pytest.mark.only("ddp_spawn", "srun_multinode", "torchrun_multinode")
def test_more_processes_than_gpus(example: str, folder: Path) -> None:
    """On a node with fewer GPUs (played here) than processes they refuse before they meet, or before they start."""
    edits.play_one_gpu(folder)
    run = runs.start(example, folder, 2).wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, "2 processes on", "1 GPUs")


@pytest.mark.only("convnet")
@pytest.mark.runs("weekly")
def test_fewer_test_samples_than_processes(example: str, folder: Path) -> None:
    """With one test sample a process has none: both train, and the accuracy is that of the one sample."""
    edits.leave_digits(folder, 1, "test")
    runs.train(example, folder, 2, "--epochs", 1)
    (row,) = outputs.read_metrics(folder / "output")
    assert row["test_accuracy"] in (0, 1) and row["test_loss"] > 0
