"""What only torchrun_multinode promises: stopping at any step, restarts, accumulation."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness import edits, outputs, refusals, runs
from tests.harness.launchers import LAUNCHERS
from tests.harness.processes import wait_until
from tests.harness.runs import Reference

pytestmark = pytest.mark.only("torchrun_multinode")


def restarting(folder: Path, *arguments: str) -> runs.Run:
    """Start the example with 2 processes, as run.slurm does: torchrun starts them again, once, if one has died."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    return runs.Run([*launcher, *arguments], folder, variables)


def position(output: Path) -> tuple[int, int]:
    """Return in which epoch, from 1, and after how many of its steps the checkpoint was saved."""
    path = output / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True) if path.exists() else {"history": [], "position": {"step": 0}}
    return len(checkpoint["history"]) + 1, checkpoint["position"]["step"]


def stop(run: runs.Run, number: signal.Signals, pid: Callable[[], int]) -> tuple[int, int]:
    """Send a signal after the next epoch, and return in which epoch, after how many steps, all processes stopped."""
    run.read_until(" | train loss")
    os.kill(pid(), number)
    run.wait(60)
    stops = re.findall(r"stopped by a signal after step (\d+) of epoch (\d+): use --resume", run.stdout)
    assert len(stops) == 1 and "finished" not in run.stdout, run.stdout
    step, epoch = map(int, stops[0])
    assert (epoch, step) == position(run.folder / "output") and step > 0
    return epoch, step


def test_same_bits_as_ddp_spawn(example: str, tmp_path: Path, reference: Reference) -> None:
    """The same seed and data, 2 processes, fp32: started by multiprocessing, it ends with the same bits and metrics."""
    outputs.assert_same_run(reference.output, runs.train_ddp_spawn(tmp_path))


def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """A signal in mid-epoch: all processes stop after the same step; --resume continues there, to the same bits.

    SIGTERM goes to torchrun, which passes it on; SIGUSR1 to a single process, which has to tell the others.
    """
    run = runs.start(example, folder, 2)
    epoch, step = stop(run, signal.SIGTERM, lambda: run.process.pid)
    assert run.status == 1  # torchrun's own
    again = runs.start(example, folder, 2, "--resume")
    assert f"continuing after epoch {epoch - 1} of 5, step {step}" in again.read_until("continuing")
    epoch, step = stop(again, signal.SIGUSR1, lambda: max(again.workers()))
    assert again.status == 0
    last = runs.train(example, folder, 2, "--resume")
    assert f"continuing after epoch {epoch - 1} of 5, step {step}" in last.stdout
    outputs.assert_same_run(folder / "output", reference.output)


def test_stopped_in_the_warmup(example: str, folder: Path) -> None:
    """Stopped in mid-epoch in its warm-up and resumed, with two batches a step: the same rates, and the same bits."""
    edits.note_rates(folder, LAUNCHERS[example])
    words = "--epochs 1 --batch-size 16 --gradient-accumulation-steps 2 --warmup-steps 15 --scale-lr sqrt"
    run = runs.start(example, folder, 2, *words.split())
    run.read_until("ranks: ")
    step, _ = runs.ask_to_stop(example, run)
    last = runs.train(example, folder, 2, *words.split(), "--resume")
    assert f"continuing after epoch 0 of 1, step {step}" in last.stdout and step < 15
    expected = [0.001 * 2**0.5 * min(1, (step + 1) / 16) for step in range(1438 // 64)]
    assert edits.noted_rates(folder) == expected
    runs.train(example, folder, 2, *words.split(), "--output-dir", "whole")
    assert edits.noted_rates(folder) == expected
    outputs.assert_same_run(folder / "output", folder / "whole")


def test_worker_killed_and_started_again(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to one worker in mid-epoch: torchrun starts the group again, which continues from that epoch's steps."""
    run = restarting(folder, "--checkpoint-every", "1", "--resume")
    run.read_until("epoch  1/")
    wait_until(lambda: position(folder / "output") >= (2, 2), 60, "a checkpoint in mid-epoch")
    os.kill(max(run.workers()), signal.SIGKILL)
    run.wait(120)
    assert run.status == 0, run.stderr
    assert re.search(r"continuing after epoch [1-4] of 5, step \d+", run.stdout), run.stdout
    outputs.assert_same_run(folder / "output", reference.output)


def test_restart_is_no_permission(example: str, folder: Path, reference: Reference) -> None:
    """Started again by torchrun after it refused an earlier run's checkpoint, train.py refuses it again."""
    shutil.copytree(reference.output, folder / "output")
    before = (folder / "output" / "checkpoint.pt").read_bytes()
    run = restarting(folder, "--epochs", "6").wait(90)
    refusals.assert_refused(run, 1, "output/checkpoint.pt", "--resume", "--output-dir")
    assert (folder / "output" / "checkpoint.pt").read_bytes() == before


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


def test_gradient_accumulation(example: str, folder: Path) -> None:
    """2 batches of 16 per step take the steps of batch 32, clipping included, and exchange as many gradients."""
    (folder / "counting.py").write_text(COUNTING)
    line = "    print_header(args, device, checkpoint)\n"
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


@pytest.mark.faults
def test_gradient_checkpointing(example: str, folder: Path, reference: Reference) -> None:
    """The README's edit, made to the model's first layer: what is computed again has the same bits."""
    line, models = "from torch.utils.checkpoint import checkpoint", folder / "common" / "models.py"
    assert line in (folder / "README.md").read_text()
    edits.edit(models, "self.conv1(images)", "checkpoint(self.conv1, images, use_reentrant=False)")
    models.write_text(f"{line}\n{models.read_text()}")
    runs.train(example, folder, 2)
    outputs.assert_same_run(folder / "output", reference.output)


def test_torchrun_killed(example: str, folder: Path) -> None:
    """SIGKILL to torchrun alone: its processes end with it."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_until("epoch  1/")
    os.kill(run.process.pid, signal.SIGKILL)
    wait_until(lambda: not run.pids(), 10, "the end of the processes that have lost torchrun")
    run.wait(10)


@pytest.mark.faults  # "disk full" in slurm/test_faults.py asks for the same line
def test_output_folder_removed(example: str, folder: Path) -> None:
    """A checkpoint that cannot be written ends the run with one clear line."""
    run = runs.start(example, folder, 2)
    run.read_until("epoch  1/")
    shutil.rmtree(folder / "output")
    run.wait(60)
    errors = [line for line in run.stderr.splitlines() if line.startswith("train.py: error:")]
    assert len(errors) == 1 and "cannot write output/" in errors[0] and "--resume" in errors[0], run.stderr
    assert run.status == 1 and "finished" not in run.stdout


@pytest.mark.faults
def test_checkpoint_that_cannot_be_made(example: str, folder: Path) -> None:
    """A state that cannot be pickled ends the run with its traceback: no night without a checkpoint."""
    line = '"settings": resume_settings(args)}'
    edits.edit(folder / "train.py", line, f"{line} | {{'mine': lambda: 0}}")
    run = runs.start(example, folder, 2).wait(120)
    assert run.status == 1 and re.search("Error: Can't (pickle|get local)", run.stderr), run.stderr
    assert "finished" not in run.stdout


def test_without_torchrun(example: str, folder: Path) -> None:
    """Started as a plain script, it names the command."""
    run = runs.Run(["python", "train.py"], folder).wait(120)
    refusals.assert_refused(run, 2, "torchrun --standalone --nproc-per-node=2 train.py")


def test_more_processes_than_gpus(example: str, folder: Path) -> None:
    """On a node with fewer GPUs (played here) than processes, all of them refuse before they meet."""
    edits.play_one_gpu(folder)
    run = runs.start(example, folder, 2).wait(120)
    refusals.assert_refused(run, 1, "--nproc-per-node=2", "1 GPU")


def test_bad_input(example: str, folder: Path) -> None:
    """Bad values of its own flags are refused with one clear line each."""
    texts = {
        "--gradient-accumulation-steps 0": ["--gradient-accumulation-steps", "1 or more"],
        "--checkpoint-every 0": ["--checkpoint-every", "1 or more"],
        "--max-grad-norm 0": ["--max-grad-norm", "above 0"],
    }
    refusals.assert_arguments_refused(folder, texts)
    run = runs.start(example, folder, 2, "--batch-size", 100, "--gradient-accumulation-steps", 8).wait(120)
    refusals.assert_refused(run, 1, "--batch-size 100 times --gradient-accumulation-steps 8", "719")
