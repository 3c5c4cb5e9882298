"""What a run has written, metrics.csv and model.pt: read it, compute it again, compare it."""

import csv
import math
from pathlib import Path

import torch
from torch.nn import functional as F

from common import data
from common.models import ConvNet

TIMES = ("samples_per_second", "seconds")  # the columns of metrics.csv that differ from run to run


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv in an output folder."""
    with open(output / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the columns that a clock has filled."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def read_model(output: Path) -> dict[str, torch.Tensor]:
    """Return the weights in model.pt."""
    return torch.load(output / "model.pt", weights_only=True)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two models' weights; raise AssertionError if shapes differ."""
    assert {name: (w.shape, w.dtype) for name, w in one.items()} == {
        name: (w.shape, w.dtype) for name, w in other.items()
    }
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def recomputed(output: Path, dataset: str, data_dir: str) -> tuple[float, float]:
    """Return test loss and accuracy of model.pt, computed here, by one process."""
    weights = read_model(output)
    model = ConvNet().to(weights["fc2.bias"].dtype)
    model.load_state_dict(weights)
    test_set = data.load(dataset, data_dir)[1]
    images, labels = test_set[list(range(len(test_set)))]
    with torch.no_grad():
        logits = model(images.to(weights["fc2.bias"].dtype))
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def assert_exact_metrics(output: Path, dataset: str = "digits", data_dir: str = "data") -> None:
    """Check that the last row of metrics.csv counts each test sample once, over all processes."""
    loss, accuracy = recomputed(output, dataset, data_dir)
    row = read_metrics(output)[-1]
    assert math.isclose(row["test_accuracy"], accuracy, rel_tol=0, abs_tol=1e-12)
    assert math.isclose(row["test_loss"], loss, rel_tol=1e-6)


def assert_same_run(output: Path, reference: Path) -> None:
    """Check that two runs ended the same: model.pt bit for bit, metrics.csv in all but the times."""
    assert without_times(read_metrics(output)) == without_times(read_metrics(reference))
    one, other = read_model(output), read_model(reference)
    assert largest_difference(one, other) == 0
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
