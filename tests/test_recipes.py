"""The recipes in each example's README, "Make it yours": own data and own model, applied to a copy as they stand."""

import ast
from pathlib import Path

import numpy as np
import pytest

from common import data
from tests.harness import outputs, readme, runs
from tests.harness.edits import apply_diff


def make_it_yours(folder: Path) -> None:
    """Apply all recipes of an example's README to its copy, and write the data that they read."""
    for text in readme.fences(folder / "README.md", "python"):
        name = text.partition("\n")[0].removeprefix("# ")
        if name in ("my_data.py", "my_model.py"):
            (folder / name).write_text(text)
    assert (folder / "my_data.py").exists() and (folder / "my_model.py").exists()
    for text in readme.fences(folder / "README.md", "diff"):
        apply_diff(folder / "train.py", text)
    (folder / "data").mkdir()
    for part, images in zip(("train", "test"), data.load("digits"), strict=True):
        arrays = {"images": images.images.squeeze(-1).numpy(), "labels": images.labels.numpy()}
        np.savez(folder / "data" / f"{part}.npz", **arrays)


def test_recipes_fit(example: str, folder: Path) -> None:
    """Each line that the recipes replace is in train.py once, and what they make of it is Python."""
    diffs = readme.fences(folder / "README.md", "diff")
    for text in diffs:
        apply_diff(folder / "train.py", text)
    assert diffs
    ast.parse((folder / "train.py").read_text())
    for text in readme.fences(folder / "README.md", "python"):
        ast.parse(text)


@pytest.mark.thorough
@pytest.mark.clause("convnet")
def test_own_data_and_own_model(example: str, folder: Path) -> None:
    """With both recipes the example learns: a model with BatchNorm and dropout, single samples, loader workers."""
    make_it_yours(folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    rows = outputs.read_metrics(folder / "output" / "whole")
    assert rows[-1]["test_accuracy"] > 0.8 and rows[-1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.faults
@pytest.mark.clause("convnet")
def test_recipes_resumed(example: str, folder: Path) -> None:
    """With both recipes, a run that was killed in its second epoch ends with the bits of an uninterrupted one."""
    make_it_yours(folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    run = runs.start(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed")
    run.read_until("epoch  1/")
    run.kill()
    run.wait(30)
    run = runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed", "--resume")
    assert "continuing after epoch 1 of 2" in run.stdout
    outputs.assert_same_run(folder / "output" / "killed", folder / "output" / "whole")


def test_diff_that_does_not_apply(tmp_path: Path) -> None:
    """A recipe for lines that are not in train.py, or there twice, is noticed."""
    (tmp_path / "train.py").write_text("a\nb\na\n")
    for text in ("-c\n+d\n", "-a\n+d\n"):
        with pytest.raises(AssertionError):
            apply_diff(tmp_path / "train.py", text)
    apply_diff(tmp_path / "train.py", "-b\n+d\n+e\n")
    assert (tmp_path / "train.py").read_text() == "a\nd\ne\na\n"
