"""The recipes in docs/validation.md, applied to a copy of torchrun_multinode as they stand."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT

pytestmark = pytest.mark.only("torchrun_multinode")
PAGE = ROOT / "docs" / "validation.md"
# Small batches, so that an epoch has many steps, and a high rate, so that the validation loss soon rises again.
STOPPING = ("--epochs", 25, "--batch-size", 32, "--lr", 0.004, "--keep-epochs", 1)


def apply_recipes(folder: Path, *numbers: int) -> None:
    """Apply the page's diffs with these numbers, counted from 0, to a copy of the example."""
    diffs = readme.fences(PAGE, "diff")
    for number in numbers:
        edits.apply_diff(folder / "train.py", diffs[number])


def test_recipes_fit(example: str, folder: Path) -> None:
    """Each recipe has fewer than 12 lines, its lines are in train.py once, and what all make of it is Python."""
    diffs = readme.fences(PAGE, "diff")
    assert len(diffs) == 4 and all(len(text.splitlines()) < 12 for text in diffs)
    apply_recipes(folder, 0, 1, 2, 3)
    ast.parse((folder / "train.py").read_text())


def test_folds(example: str) -> None:
    """The page's folds have each sample once, tear no group, and are those of any process."""
    import numpy as np

    (text,) = readme.fences(PAGE, "python")
    names: dict[str, Any] = {"np": np}
    exec(text, names)
    groups = np.array([f"patient {number}" for number in np.random.default_rng(1).integers(23, size=400)])
    tests = np.stack([names["in_test_set"](groups, fold) for fold in range(names["FOLDS"])])
    assert (tests.sum(0) == 1).all() and tests.any(1).all()
    assert all(len(set(groups[~test]) & set(groups[test])) == 0 for test in tests)
    assert (tests[0] == names["in_test_set"](groups.tolist(), 0)).all()


@pytest.mark.runs("weekly")
def test_validation_set(example: str, folder: Path) -> None:
    """No validation sample is trained with or in the test set; its loss is that of the model on exactly these."""
    import torch
    from torch.nn import functional as F

    from common import data
    from common.models import ConvNet

    apply_recipes(folder, 0)
    edits.note_use(folder, LAUNCHERS[example])
    runs.train(example, folder, 2, "--epochs", 2, "--batch-size", 32, NUMBER="1")
    noted = [line.split() for path in folder.glob("used-1-*") for line in path.read_text().splitlines()]
    train_set, test_set = data.load("digits")
    held_out = list(range(0, len(train_set), 10))
    kept = [index for index in range(len(train_set)) if index not in set(held_out)]
    used = {kept[int(index)] for epoch, *indices in noted for index in indices}
    assert len(used) > 0.95 * len(kept) and not used & set(held_out)
    images = {image.numpy().tobytes() for image in test_set.images}
    assert not images & {train_set.images[index].numpy().tobytes() for index in held_out}
    model = ConvNet()
    model.load_state_dict(outputs.read_model(folder / "output"))
    inputs, labels = train_set[held_out]
    with torch.no_grad():
        logits = model(inputs)
    row = outputs.read_metrics(folder / "output")[-1]
    assert row["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert row["val_accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=1e-12)
    outputs.assert_exact_metrics(folder / "output")


def stops_after(losses: list[float]) -> int:
    """Return after how many epochs a run has to stop whose validation losses these are; 0 if it has to go on."""
    best, waited = float("inf"), 0
    for epoch, loss in enumerate(losses, 1):
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == 3:
            return epoch
    return 0


@pytest.mark.runs("weekly")
def test_early_stopping(example: str, folder: Path) -> None:
    """It stops after the third epoch without a better one, with the best model; killed at any time, after the same one.

    A run is killed in an epoch in the middle, and once more when the last epoch is saved; both processes end together.
    """
    import torch

    apply_recipes(folder, 0, 1)
    run = runs.train(example, folder, 2, *STOPPING, "--output-dir", "whole")
    rows = outputs.read_metrics(folder / "whole")
    losses = [row["val_loss"] for row in rows]
    assert len(rows) == stops_after(losses) < 25, losses
    best = rows[losses.index(min(losses))]
    assert len(rows) - best["epoch"] == 3
    assert re.search(rf"^finished: test acc {best['test_accuracy']:.2%},", run.stdout, re.MULTILINE), run.stdout
    saved = torch.load(folder / "whole" / "checkpoint-best.pt", weights_only=True)
    assert len(saved["progress"]["history"]) == best["epoch"]
    assert outputs.largest_difference(outputs.read_model(folder / "whole"), saved["model"]) == 0
    assert outputs.largest_difference(outputs.read_model(folder / "whole"), _last(folder / "whole")) > 0

    for epoch in (len(rows) // 2, len(rows)):
        run = runs.start(example, folder, 2, *STOPPING, "--resume")
        run.read_epoch(epoch)
        run.kill()
        run.wait()
    run = runs.train(example, folder, 2, *STOPPING, "--resume")
    assert f"continuing after epoch {len(rows)} of 25" in run.stdout
    outputs.assert_same_run(folder / "output", folder / "whole")


def _last(output: Path) -> dict[str, object]:
    """Return the weights of a run's last checkpoint."""
    import torch

    return torch.load(output / "checkpoint.pt", weights_only=True)["model"]


NOTE_WEIGHTS = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

noted = []

def note(optimizer, args, kwargs):
    noted.append([weight.detach().clone() for weight in optimizer.param_groups[0]["params"]])
    torch.save(noted, "weights.pt")

register_optimizer_step_post_hook(note)
"""


@pytest.mark.runs("weekly")
def test_average_of_weights(example: str, folder: Path) -> None:
    """What is evaluated, saved and in model.pt is the average of the weights after each step, also after a resume."""
    import torch

    apply_recipes(folder, 2)
    words = ("--epochs", 1, "--batch-size", 32)
    data = folder / "common" / "data.py"
    shipped = data.read_text()
    data.write_text(shipped + NOTE_WEIGHTS)
    runs.train(example, folder, 2, *words, "--output-dir", "whole")
    first, *others = torch.load(folder / "weights.pt", weights_only=True)
    assert len(others) == 1438 // 64 - 1
    for weights in others:
        torch._foreach_lerp_(first, weights, 0.01)
    model = outputs.read_model(folder / "whole")
    assert max((one - other).abs().max() for one, other in zip(model.values(), first, strict=True)) < 1e-6
    assert max((one - other).abs().max() for one, other in zip(model.values(), weights, strict=True)) > 1e-3
    outputs.assert_exact_metrics(folder / "whole")
    checkpoint = torch.load(folder / "whole" / "checkpoint.pt", weights_only=True)
    averages = checkpoint["progress"]["ema"]
    assert outputs.largest_difference(model, {name: averages[f"module.{name}"] for name in model}) == 0

    data.write_text(shipped)
    run = runs.start(example, folder, 2, *words)
    run.read_until(LAUNCHERS[example].first_line)
    step = runs.ask_to_stop(example, run)
    runs.train(example, folder, 2, *words, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", folder / "whole")


@pytest.mark.runs("weekly")
def test_all_together(example: str, folder: Path) -> None:
    """With all recipes the best average is in model.pt, and it is what was evaluated in that epoch."""
    import torch

    apply_recipes(folder, 0, 1, 2, 3)
    runs.train(example, folder, 2, "--epochs", 5, "--keep-epochs", 1)
    best = torch.load(folder / "output" / "checkpoint-best.pt", weights_only=True)["progress"]
    model = outputs.read_model(folder / "output")
    assert outputs.largest_difference(model, {name: best["ema"][f"module.{name}"] for name in model}) == 0
    _, accuracy = outputs.recomputed(folder / "output", "digits", "data")
    assert best["history"][-1]["test_accuracy"] == pytest.approx(accuracy, abs=1e-12)
