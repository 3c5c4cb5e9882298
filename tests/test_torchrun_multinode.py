"""What only torchrun_multinode promises: stopping at any step, restarts, accumulation."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from harness import edits, outputs, refusals, runs
from harness.processes import wait_until
from harness.runs import Reference

pytestmark = pytest.mark.only("torchrun_multinode")


def restarting(folder: Path, *arguments: str) -> runs.Run:
    """Start the example with 2 processes, as run.slurm does: torchrun starts them again, once, if one has died."""
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    return runs.Run([*launcher, *arguments], folder, variables)


def saved_step(output: Path) -> int:
    """Return after which step of the whole run the checkpoint was saved; 0 if there is none."""
    path = output / "checkpoint.pt"
    return torch.load(path, weights_only=True)["progress"]["step"] if path.exists() else 0


def stop(example: str, run: runs.Run) -> int:
    """Ask a run to stop after its next epoch; return after which step of the whole run all processes stopped."""
    run.read_until(" | train loss")
    step = runs.ask_to_stop(example, run)
    assert "finished" not in run.stdout and step == saved_step(run.folder / "output") > 0
    return step


def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; --resume continues there, to the same bits.

    First both processes see the request, then one alone, as on one of several nodes: it has to tell the other.
    """
    run = runs.start(example, folder, 2)
    step = stop(example, run)
    edits.edit(
        folder / "plumbing" / "stopping.py", "    return os.path.exists(", "    return rank() == 1 and os.path.exists("
    )
    again = runs.start(example, folder, 2, "--resume")
    again.read_until(f"continuing after epoch {step // 11} of 5, step {step % 11}")
    step = stop(example, again)
    runs.train(example, folder, 2, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.parametrize("every", ["1", pytest.param("0.001min", marks=pytest.mark.runs("weekly"))])
def test_worker_killed_and_started_again(example: str, folder: Path, reference: Reference, every: str) -> None:
    """SIGKILL to one worker in mid-epoch: torchrun starts the group again, which continues from that epoch's steps.

    They were saved every step, or whenever 0.06 s had passed on the clock of one process, which has to tell the other.
    """
    edits.edit(folder / "plumbing" / "stopping.py", "return int(seconds - ", "return int(rank() == 1 and seconds - ")
    run = restarting(folder, "--checkpoint-every", every, "--resume")
    run.read_epoch(1)
    wait_until(lambda: saved_step(folder / "output") >= 11 + 2, 300, "a checkpoint in mid-epoch")
    os.kill(max(run.workers()), signal.SIGKILL)
    run.wait()
    assert run.status == 0, run.stderr
    assert re.search(r"continuing after epoch [1-4] of 5, step \d+", run.stdout), run.stdout
    outputs.assert_same_run(folder / "output", reference.output)


def test_restart_is_no_permission(example: str, folder: Path, reference: Reference) -> None:
    """Started again by torchrun after it refused an earlier run's checkpoint, train.py refuses it again."""
    shutil.copytree(reference.output, folder / "output")
    before = (folder / "output" / "checkpoint.pt").read_bytes()
    run = restarting(folder, "--epochs", "6").wait()
    refusals.assert_refused(run, 1, "output/checkpoint.pt", "--resume", "--output-dir")
    assert (folder / "output" / "checkpoint.pt").read_bytes() == before


@pytest.mark.runs("weekly")
def test_saves_are_no_training_time(example: str, folder: Path) -> None:
    """Saves within an epoch are no part of its `seconds`, but of the run's time: so docs/how-often-to-save.md says."""
    line = "    write(first, save)\n"
    edits.edit(folder / "plumbing" / "checkpoints.py", line, f"    time.sleep(0.5)\n{line}")
    runs.train(example, folder, 2, "--epochs", 1, "--checkpoint-every", 1)
    record = json.loads((folder / "output" / "run.json").read_text())
    (row,) = outputs.read_metrics(folder / "output")
    assert record["stops"][-1]["time"] - record["starts"][0]["time"] > row["seconds"] + 11 * 0.5


@pytest.mark.runs("weekly")
def test_gradient_checkpointing(example: str, folder: Path, reference: Reference) -> None:
    """The README's edit, made to the model's first layer: what is computed again has the same bits."""
    line, models = "from torch.utils.checkpoint import checkpoint", folder / "common" / "models.py"
    assert line in (folder / "README.md").read_text()
    edits.edit(models, "self.conv1(images)", "checkpoint(self.conv1, images, use_reentrant=False)")
    models.write_text(f"{line}\n{models.read_text()}")
    runs.train(example, folder, 2)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")  # "disk full" in slurm/test_faults.py asks for the same line
def test_output_folder_removed(example: str, folder: Path) -> None:
    """A checkpoint that cannot be written ends the run with one clear line."""
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    shutil.rmtree(folder / "output")
    run.wait()
    errors = [line for line in run.stderr.splitlines() if line.startswith("train.py: error:")]
    assert len(errors) == 1 and "cannot write output/" in errors[0] and "--resume" in errors[0], run.stderr
    assert run.status == 1 and "finished" not in run.stdout


@pytest.mark.runs("weekly")
def test_checkpoint_that_cannot_be_made(example: str, folder: Path) -> None:
    """A state that cannot be pickled ends the run with its traceback: no night without a checkpoint."""
    line = 'state = state | {"settings": resume_settings(args)}'
    edits.edit(folder / "plumbing" / "checkpoints.py", line, f"{line} | {{'mine': lambda: 0}}")
    run = runs.start(example, folder, 2).wait()
    assert run.status == 1 and re.search("Error: Can't (pickle|get local)", run.stderr), run.stderr
    assert "finished" not in run.stdout


def test_without_torchrun(example: str, folder: Path) -> None:
    """Started as a plain script, it names the command."""
    run = runs.Run(["python", "train.py"], folder).wait()
    refusals.assert_refused(run, 2, "torchrun --standalone --nproc-per-node=2 train.py")


BAD_INTERVALS = ("0", "-1", "1.5", "10x", "0min", "0.0min", "1e3min", "nanmin", f"{10**30}min")


def test_bad_input(example: str, folder: Path) -> None:
    """Bad values of its own flags are refused with one clear line each."""
    texts = {
        "--gradient-accumulation-steps 0": ["--gradient-accumulation-steps", "1 or more"],
        **{f"--checkpoint-every {bad}": ["--checkpoint-every", "1 or more", bad] for bad in BAD_INTERVALS},
        "--max-grad-norm -1": ["--max-grad-norm", "0 or more"],
    }
    refusals.assert_arguments_refused(folder, texts)
    run = runs.start(example, folder, 2, "--batch-size", 100, "--gradient-accumulation-steps", 8).wait()
    refusals.assert_refused(run, 1, "--batch-size 100 times 8 (gradient accumulation) is above the 719 samples", "719")
