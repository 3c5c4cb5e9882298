"""What training changes and a checkpoint does not have is named, once; what stays as it is, or is saved, is not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plumbing import forgotten


class OwnAverage:
    """An average of weights as many write it: no module, and new tensors in each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self.views = [torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))]
        self.views += [torch.arange(6).view(2, 3)[:, 2], torch.tensor(0.5).expand(3)]

    def update(self, model: torch.nn.Module) -> None:
        self.shadow = {name: self.shadow[name].lerp(weight.detach(), 0.1) for name, weight in model.named_parameters()}


class OwnSamples(torch.utils.data.Dataset):
    """A data set that keeps what it has read."""

    def __init__(self) -> None:
        self.cache: list[torch.Tensor] = []


def parts() -> dict[str, Any]:
    """Return a model with its optimizer, and others that training changes, or not."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    found = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "own": OwnAverage(model)}
    found["average"] = torch.optim.swa_utils.AveragedModel(model)
    found["teacher"], found["samples"] = copy.deepcopy(model).eval(), OwnSamples()
    return found


def train(found: dict[str, Any]) -> None:
    """Take one step with all of them."""
    images = torch.randn(8, 4)
    (found["model"](images) - found["teacher"](images)).square().sum().backward()
    found["optimizer"].step()
    found["average"].update_parameters(found["model"])
    found["own"].update(found["model"])
    found["samples"].cache.append(images)
    found["late"] = copy.deepcopy(found["teacher"])  # such as a network of a metric


ALL = ("model", "optimizer", "average", "own")
CASES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], object], str]] = {
    "all is saved": (ALL, lambda found: None, ""),
    "the optimizer": (("model", "average", "own"), lambda found: None, "(AdamW)"),
    "an average": (("model", "optimizer", "own"), lambda found: None, "(AveragedModel, BatchNorm1d, Linear)"),
    "an average of another class": (("model", "optimizer", "average"), lambda found: None, "(OwnAverage)"),
    "a teacher that is in training": (ALL, lambda found: found["teacher"].train(), "(BatchNorm1d)"),
    "another stage": (ALL, lambda found: found["model"][0].requires_grad_(False), "2 tensors, are frozen now"),
}


@pytest.mark.parametrize(("saved", "change", "says"), CASES.values(), ids=CASES)
def test_first_checkpoint(saved: tuple[str, ...], change: Callable[[dict[str, Any]], object], says: str) -> None:
    """The line of the first checkpoint names the classes; there is none for a second one, or if nothing is wrong."""
    found = parts()
    if "frozen" in says:
        train(found)
        found["optimizer"].zero_grad()
    change(found)
    forgotten.note()
    if "frozen" not in says:
        train(found)
    state = {name: found[name].shadow if name == "own" else found[name].state_dict() for name in saved}
    lines = forgotten.lines(state)
    assert len(lines) == bool(says) and all(says in line and "docs/more-state.md" in line for line in lines), lines
    assert forgotten.lines({}) == []
