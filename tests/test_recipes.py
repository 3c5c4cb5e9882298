"""The recipes in each example's README, "Make it yours": own data and own model, applied to a copy as they stand."""

import ast
import runpy
from pathlib import Path

import pytest

from harness import outputs, readme, runs
from harness.edits import apply_diff
from harness.launchers import LAUNCHERS

OWN = ("own_data", "own_model")  # files of the examples that train the ConvNet


def make_it_yours(folder: Path) -> None:
    """Apply all recipes of an example's README to its copy, and write the data that own_data.py reads."""
    for text in readme.fences(folder / "README.md", "diff"):
        apply_diff(folder / "train.py", text)
    write_data(folder / "data")


def write_data(target: Path) -> None:
    """Write the digits in the form of own_data.py."""
    import numpy as np

    from common import data

    target.mkdir()
    for part, images in zip(("train", "test"), data.load("digits"), strict=True):
        arrays = {"images": images.images.squeeze(-1).numpy(), "labels": images.labels.numpy()}
        np.savez(target / f"{part}.npz", **arrays)


def test_recipes_fit(example: str, folder: Path) -> None:
    """Each line that the recipes name is in train.py once, and what they make of it is Python that uses our files."""
    diffs = readme.fences(folder / "README.md", "diff")
    for text in diffs:
        apply_diff(folder / "train.py", text)
    assert diffs
    tree = ast.parse((folder / "train.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    for name in OWN if LAUNCHERS[example].convnet else ():
        assert name in imported and (folder / f"{name}.py").exists()
    for text in readme.fences(folder / "README.md", "python"):
        ast.parse(text)


@pytest.mark.only("ddp_spawn")
def test_own_data_py(example: str, folder: Path) -> None:
    """own_data.py reads batches, also an empty one, as deepspeed asks for; without its file there is one clear line."""
    from common import data

    module = runpy.run_path(str(folder / "own_data.py"))
    with pytest.raises(data.DataError, match=r"own_data\.py: .*train\.npz"):
        module["load"]("digits", folder / "data")
    write_data(folder / "data")
    train_set, test_set = module["load"]("digits", folder / "data")
    assert (len(train_set), len(test_set)) == (1438, 359)
    images, labels = test_set[[3, 5]]
    assert images.shape == (2, 1, 28, 28) and 0 <= images.min() < images.max() <= 1
    assert labels.tolist() == data.load("digits")[1].labels[[3, 5]].tolist()
    assert [part.shape for part in test_set[[]]] == [(0, 1, 28, 28), (0,)]


@pytest.mark.runs("one")
@pytest.mark.only("convnet")
def test_own_data_and_own_model(example: str, folder: Path) -> None:
    """With both recipes the example learns: a model with BatchNorm and dropout, single samples, loader workers."""
    make_it_yours(folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    rows = outputs.read_metrics(folder / "output" / "whole")
    assert rows[-1]["test_accuracy"] > 0.8 and rows[-1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.runs("weekly")
@pytest.mark.only("convnet")
def test_recipes_resumed(example: str, folder: Path) -> None:
    """With both recipes, a run that was killed in its second epoch ends with the bits of an uninterrupted one."""
    make_it_yours(folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    run = runs.start(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed")
    run.read_epoch(1)
    run.kill()
    run.wait()
    run = runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed", "--resume")
    assert "continuing after epoch 1 of 2" in run.stdout
    outputs.assert_same_run(folder / "output" / "killed", folder / "output" / "whole")


def test_diff_that_does_not_apply(tmp_path: Path) -> None:
    """A recipe for lines that are not in train.py, or there twice, or that changes nothing, is noticed."""
    (tmp_path / "train.py").write_text("a\nb\na\n")
    for text in ("-c\n+d\n", "-a\n+d\n", " a\n+d\n", " b\n", "b\n+c\n", " a\n c\n+d\n"):
        with pytest.raises(AssertionError):
            apply_diff(tmp_path / "train.py", text)
    apply_diff(tmp_path / "train.py", "-b\n+d\n+e\n")
    assert (tmp_path / "train.py").read_text() == "a\nd\ne\na\n"
    apply_diff(tmp_path / "train.py", " d\n-e\n+f\n f\n+g\n")
    assert (tmp_path / "train.py").read_text() == "a\nd\nf\ng\na\n"
