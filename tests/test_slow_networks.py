"""The recipes in docs/slow-networks.md, applied to a copy of torchrun_multinode as they stand: they train."""

import ast
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import ROOT
from harness.runs import Reference

pytestmark = pytest.mark.only("torchrun_multinode")
PAGE = ROOT / "docs" / "slow-networks.md"


def apply_recipe(folder: Path, word: str) -> None:
    """Apply the page's one diff that has this word to a copy of the example."""
    (text,) = (text for text in readme.fences(PAGE, "diff") if word in text)
    edits.apply_diff(folder / "train.py", text)


def test_recipes_fit(example: str, folder: Path) -> None:
    """Each line that the recipes replace is in train.py once, and what all of them make of it is Python."""
    diffs = readme.fences(PAGE, "diff")
    for text in diffs:
        edits.apply_diff(folder / "train.py", text)
    assert len(diffs) == 2
    ast.parse((folder / "train.py").read_text())


@pytest.mark.runs("weekly")
def test_bf16_exchange(example: str, folder: Path, reference: Reference) -> None:
    """Gradients that are sent with 16 bits are rounded: the run learns as much, and its weights differ a little."""
    import torch

    apply_recipe(folder, "bf16_compress_hook")
    runs.train(example, folder, 2)
    row, expected = (outputs.read_metrics(output)[-1] for output in (folder / "output", reference.output))
    assert row["test_accuracy"] > 0.95 and row["test_accuracy"] == pytest.approx(expected["test_accuracy"], abs=0.01)
    one, other = (
        torch.nn.utils.parameters_to_vector(outputs.read_model(output).values())
        for output in (folder / "output", reference.output)
    )
    assert 0 < (one - other).norm() / other.norm() < 0.15  # weights that have nothing in common are 1.4 apart


@pytest.mark.runs("weekly")
def test_local_sgd(example: str, folder: Path) -> None:
    """The processes' weights part, and are averaged before they are evaluated and saved; a resumed run does so, too."""
    import torch

    apply_recipe(folder, "average_weights")
    loop = "    for weight in model.parameters():\n"
    note = '    torch.save(model.state_dict(), f"before-{dist.get_rank()}.pt")\n'
    edits.edit(folder / "train.py", loop, note + loop)
    last = "    # Finish.\n"
    edits.edit(folder / "train.py", last, last + '    torch.save(model.state_dict(), f"after-{rank}.pt")\n')
    runs.train(example, folder, 2, "--epochs", 1)
    runs.train(example, folder, 2, "--epochs", 2, "--resume")
    before, after = (
        [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]
        for name in ("before", "after")
    )
    assert outputs.largest_difference(*before) > 1e-4  # at the last average, 6 steps after the one before
    mean = {name: (weight + before[1][name]) / 2 for name, weight in before[0].items()}
    for model in (after[0], after[1], outputs.read_model(folder / "output")):
        assert outputs.largest_difference(model, mean) == 0
    outputs.assert_exact_metrics(folder / "output")  # it is the average that was evaluated
    assert outputs.read_metrics(folder / "output")[-1]["test_accuracy"] > 0.85
