"""The recipes in docs/batch-size-and-learning-rate.md, applied to a copy of torchrun_multinode as they stand."""

import ast
import math
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT

pytestmark = pytest.mark.only("torchrun_multinode")
PAGE = ROOT / "docs" / "batch-size-and-learning-rate.md"
GROUPS, PLATEAU, SCHEDULER = range(3)  # the numbers of its diffs
STEPS = 1438 // 128  # of an epoch


def apply_recipes(folder: Path, *numbers: int) -> None:
    """Apply the page's diffs with these numbers to a copy of the example."""
    for number in numbers:
        edits.apply_diff(folder / "train.py", readme.fences(PAGE, "diff")[number])


RECIPES = {"plateau": (GROUPS, PLATEAU), "scheduler": (SCHEDULER,)}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit(example: str, folder: Path, name: str) -> None:
    """The lines of each recipe are in train.py once, and what comes out is Python."""
    apply_recipes(folder, *RECIPES[name])
    ast.parse((folder / "train.py").read_text())


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("name", RECIPES)
def test_schedule(example: str, folder: Path, name: str) -> None:
    """Each step has the rate of the schedule, the convolutions a tenth of it; a killed run ends with the same bits."""
    apply_recipes(folder, *RECIPES[name])
    edits.note_rates(folder, LAUNCHERS[example])
    factors, scales = [(1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)], (1,)
    if name == "plateau":  # with something that never gets better in the place of the loss
        edits.edit(folder / "train.py", 'losses = [row["test_loss"]', 'losses = [row["epoch"]')
        factors, scales = [1, 1, 0.5, 0.25], (1, 0.1)
    runs.train(example, folder, 2, "--epochs", 4, "--output-dir", "whole")
    noted = {tuple(map(float, line.split())) for line in (folder / "rates").read_text().splitlines()}
    expected = {(step + 1, factors[step // STEPS] * scale * 0.001) for step in range(4 * STEPS) for scale in scales}
    assert sorted(noted) == [pytest.approx(pair) for pair in sorted(expected)]
    run = runs.start(example, folder, 2, "--epochs", 4)
    run.read_epoch(2)
    run.kill()
    run.wait()
    runs.train(example, folder, 2, "--epochs", 4, "--resume")
    outputs.assert_same_run(folder / "output", folder / "whole")
