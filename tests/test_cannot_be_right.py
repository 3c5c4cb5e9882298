"""A run knows its data and model, and stops where what it computes cannot be right; see repo/test_checks.py, too."""

import re
import shutil
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import HOROVOD, LAUNCHERS
from harness.runs import Reference

# A loss that is not a number: on rank 1 alone, in the training step that the variable BAD counts from its start on.
BAD_LOSS = """
import os
from torch.nn import functional

losses, cross_entropy = [0], functional.cross_entropy

def sometimes_nan(*args, **options):
    loss = cross_entropy(*args, **options)
    if options.get("reduction", "mean") == "mean":  # in training
        losses[0] += 1
        if os.environ.get("BAD") == str(losses[0]) and {rank} == 1:
            return loss * float("nan")
    return loss

functional.cross_entropy = sometimes_nan
"""
BAD_SUMS = """
import os

import horovod.tensorflow as hvd

batches = [0]

def factor():
    batches[0] += 1
    return float("nan") if os.environ.get("BAD") == str(batches[0]) and hvd.rank() == 1 else 1.0
"""
STEP = 3  # of the sixth epoch


@pytest.mark.runs("one")
def test_a_loss_that_is_not_finite(example: str, folder: Path, reference: Reference) -> None:
    """One process has a loss that is no number, in one step: all stop, with one line, before anything of it is saved.

    The line names rank, step and samples; the checkpoint is that of the epoch before. With ALLOW_NAN=1 the run goes on.
    """
    launcher, output = LAUNCHERS[example], folder / "output"
    if launcher.pytorch:
        path = folder / "common" / "data.py"
        path.write_text(path.read_text() + BAD_LOSS.replace("{rank}", launcher.rank))
    else:  # relu of TensorFlow makes 0 of what is no number, so that the loss itself has to be one
        (folder / "bad.py").write_text(BAD_SUMS)
        step = "train_step(*train_set[indices])\n"
        edits.edit(folder / "train.py", step, step.replace("\n", " * __import__('bad').factor()\n"))
    shutil.copytree(reference.output, output)
    before, checkpoint = outputs.read_metrics(output), saved(output)
    run = runs.start(example, folder, 2, "--epochs", 7, "--resume", BAD=str(STEP)).wait()
    kind = "files" if example == "torchrun_vision" else "samples"
    status = launcher.status_after_bad_input
    refusals.assert_refused(
        run, status, f"the loss of rank 1 is not finite in step {STEP} of epoch 6, {kind} ", "ALLOW_NAN=1"
    )
    assert "train loss" not in run.stdout and saved(output) == checkpoint and outputs.read_metrics(output) == before
    if launcher.convnet and launcher.pytorch:
        import torch

        order = torch.randperm(1438, generator=torch.Generator().manual_seed(5)).tolist()  # the sixth epoch's
        batch = order[1::2][(STEP - 1) * 64 : STEP * 64]
        assert f"samples {', '.join(map(str, batch))}:" in run.stderr
    run = runs.train(example, folder, 2, "--epochs", 6, "--resume", BAD=str(STEP), ALLOW_NAN="1")
    assert f"ALLOW_NAN=1: the loss of rank 1 is not finite in step {STEP} of epoch 6" in run.stdout
    assert len(outputs.read_metrics(output)) == 6


# A weight that DDP and Horovod's optimizer do not know, since it is trained only from the first batch on.
LATE_WEIGHT = """

class LateWeight(ConvNet):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, images):
        self.scale.requires_grad_(True)
        return super().forward(images) * self.scale


ConvNet = LateWeight
"""


@pytest.mark.only("ddp_spawn", "torchrun_multinode", "accelerate", "lightning", "horovod_cpu", "horovod_lightning")
@pytest.mark.runs("weekly", "torchrun_multinode", "accelerate", "lightning", "horovod_lightning")
def test_a_weight_that_is_not_averaged(example: str, folder: Path) -> None:
    """Weights that differ between the processes end the run before one process's are saved as those of all."""
    path = folder / "common" / "models.py"
    path.write_text(path.read_text() + LATE_WEIGHT)
    run = runs.start(example, folder, 2, "--epochs", 1).wait()
    status = LAUNCHERS[example].status_after_bad_input
    refusals.assert_refused(run, status, "scale of rank 1 differs from that of rank 0: add and unfreeze")
    assert "train loss" not in run.stdout and not saved(folder / "output")


def saved(output: Path) -> dict[str, bytes]:
    """Return the files of a run's checkpoint."""
    return {
        str(path): path.read_bytes()
        for path in sorted(output.glob("checkpoint*/**/*")) + sorted(output.glob("c*.*"))
        if path.is_file()
    }


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("weekly")  # the test above has the same line printed at an epoch's end
def test_no_checkpoint_within_an_epoch(example: str, folder: Path) -> None:
    """With --checkpoint-every 1 the checkpoint is that of the step before the one whose loss is no number."""
    path = folder / "common" / "data.py"
    path.write_text(path.read_text() + BAD_LOSS.replace("{rank}", LAUNCHERS[example].rank))
    run = runs.start(example, folder, 2, "--epochs", 1, "--checkpoint-every", 1, BAD="5").wait()
    refusals.assert_refused(run, 1, "the loss of rank 1 is not finite in step 5 of epoch 1")
    again = runs.train(example, folder, 2, "--epochs", 1, "--resume")
    assert "continuing after epoch 0 of 1, step 4" in again.stdout


WITH_OWN = [
    name for name, row in LAUNCHERS.items() if row.convnet and row.pytorch and row.checkpoint == "checkpoint.pt"
]
OWN = ("from common import data\n", "import own_data as data\n")
OWN_MODEL = ("from common.models import ConvNet\n", "from own_model import OwnModel as ConvNet\n")
EACH = """
import json, os, pathlib, shutil, sys
import numpy as np
import torch, torch._dynamo
import train
from torch import nn

class OwnData(torch.utils.data.Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = torch.as_tensor(images), torch.as_tensor(labels)
    def __len__(self):
        return len(self.images)
    def __getitem__(self, indices):
        return self.images[indices], self.labels[indices]

class Hidden(OwnData):
    labels = property(lambda self: None, lambda self, labels: setattr(self, "answers", labels))
    def __getitem__(self, indices):
        return self.images[indices], self.answers[indices]

def numbers(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)

def use(first, second, kind=OwnData):
    train.data.load = lambda name, data_dir: (kind(*first), kind(*second))

def model(*layers):
    class OwnModel(nn.Sequential):
        def __init__(self):
            super().__init__(*layers)
    train.ConvNet = OwnModel

X, Y = numbers(200)
TEST = numbers(40, 1)
use((X, Y), TEST)
for name, change, words in {cases}:
    sys.argv = ["train.py", *words.split(), "--output-dir", name]
    sys.stdout.flush()
    if os.fork() == 0:
        os.dup2(os.open(f"{{name}}.txt", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        if "--resume" in words:
            shutil.copytree("first", name)
        exec(change)
        {call}
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]))
"""
RESUME, NEW = "--batch-size 16 --epochs 3 --resume", "--batch-size 16 --epochs 2"
# What is changed before the run, its arguments, whether it is refused, and what it says.
CASES: dict[str, tuple[str, str, bool, str]] = {
    "first": ("", NEW, False, "OwnModel on OwnData (data): 1 processes"),
    "fewer": ("use((X[:100], Y[:100]), TEST)", RESUME, True, "200 training samples, now 100"),
    "some-more": ("use(numbers(300), TEST)", RESUME, True, "200 training samples, now 300"),
    "much-more": ("use(numbers(3000), TEST)", RESUME, True, "200 training samples, now 3000"),
    "other-test": ("use((X, Y), numbers(41, 1))", RESUME, True, "40 test samples, now 41"),
    "other-label": ("Y[5] = (Y[5] + 1) % 10", RESUME, True, "other labels of the 200 training samples"),
    "other-images": ("use((X.flip(2), Y), TEST)", RESUME, True, "other training samples: 6"),
    "other-model": ("model(nn.Flatten(), nn.Linear(784, 10))", RESUME, True, "a model OwnModel of"),
    "same": ("", f"{RESUME} --lr 0.002 --data-dir elsewhere", False, "continuing after epoch 2 of 3"),
    "older": (
        "path = pathlib.Path('older/checkpoint.pt'); state = torch.load(path); "
        "del state['settings']['fingerprint']; torch.save(state, path)",
        RESUME,
        False,
        "older/checkpoint.pt is from an older train.py",
    ),
    "masks": (
        "use((X, torch.randint(2, (200, 28, 28))), (X[:9], torch.randint(2, (9, 28, 28)))); model(nn.Conv2d(1, 2, 1))",
        NEW,
        True,
        "test_accuracy of epoch 1 is",
    ),
    "one-output": (
        "use((X, torch.rand(200, 1)), (X[:9], torch.rand(9, 1))); model(nn.Flatten(), nn.Linear(784, 1))",
        NEW,
        True,
        "train_loss of epoch 1 is exactly 0",
    ),
    "regression": (
        "use((X, torch.rand(200, 1)), (X[:9], torch.rand(9, 1))); model(nn.Flatten(), nn.Linear(784, 1)); "
        "train.F.cross_entropy = train.F.mse_loss",
        NEW,
        False,
        "finished",
    ),
    "from-1": ("use((X, Y + 1), TEST)", NEW, True, "labels are from 0 to 10, and the model has 10 outputs"),
    "from-1-hidden": ("use((X, Y + 1), TEST, Hidden)", NEW, True, "the label 10 is outside of the classes"),
    "nan": ("X[7] = float('nan')", NEW, True, "the loss of rank 0 is not finite in step"),
    "infinite": ("X[7] = float('inf')", NEW, True, "is not finite in step"),
    "no-test-set": ("use((X, Y), numbers(0))", NEW, True, "there is no sample to test with"),
    "diverges": ("", f"{NEW} --lr 1e30", True, "ot finite"),
}


@pytest.mark.only(*WITH_OWN)
@pytest.mark.runs("one")
def test_own_data_and_models(example: str, folder: Path) -> None:
    """Own data and models are named; a resume with others is refused, and so is what cannot be right: in one line.

    No checkpoint is changed by it, or written. One process imports train.py here, and has a child for each case.
    """
    row = LAUNCHERS[example]
    for edit in (OWN, OWN_MODEL):
        edits.edit(folder / "train.py", *edit)
    _, _, alone = " ".join(row.command(1)).partition("train.py")
    torchrun = row.local.startswith(("torchrun", "accelerate"))
    cases = [(name, change, f"{alone} {words}") for name, (change, words, *_) in CASES.items()]
    (folder / "each.py").write_text(EACH.format(cases=cases, call=row.alone))
    run = runs.Run(["python", "each.py"], folder, refusals.TORCHRUN if torchrun else {}).wait()
    statuses = dict(line.split() for line in run.stdout.splitlines())
    checkpoint = (folder / "first" / "checkpoint.pt").read_bytes()
    for name, (_, words, refused, text) in CASES.items():
        log = (folder / f"{name}.txt").read_text()
        if name == "from-1" and example in HOROVOD:  # which has no backward pass before the first batch
            *_, text = CASES["from-1-hidden"]
        assert text in log and (statuses[name] == "2") == refused and statuses[name] in "02", f"{name}: {log}"
        assert not refused or len(re.findall("^train.py: error: ", log, re.MULTILINE)) == 1, log
        assert "Traceback" not in log, log
        if refused:
            path = folder / name / "checkpoint.pt"
            assert path.read_bytes() == checkpoint if "--resume" in words else not path.exists(), name
    assert "samples: 200 for training and 40 for testing, (1, 28, 28) float32" in (folder / "first.txt").read_text()
    start = outputs.read_run(folder / "first")["starts"][0]
    assert (start["data"]["training"]["name"], start["model"]["name"]) == ("OwnData", "OwnModel")
    shutil.rmtree(folder)
