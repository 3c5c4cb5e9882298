"""What a run has written, metrics.csv, run.json and the model: read it, compute it again, compare it."""

import csv
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

from harness.launchers import ROOT

if TYPE_CHECKING:  # it takes seconds, and reading a run needs it only for the model
    import torch

TIMES = ("samples_per_second", "tokens_per_second", "tflops_per_process", "seconds")  # they differ from run to run


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv in an output folder."""
    with open(output / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def read_run(output: Path) -> dict[str, Any]:
    """Return run.json in an output folder: the settings, each start and stop, and what was used."""
    return json.loads((output / "run.json").read_text())


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the columns that a clock has filled."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def keras_model(output: Path) -> Any:
    """Return horovod_tensorflow's model, in which PyTorch computes."""
    with mock.patch.dict(os.environ, {"KERAS_BACKEND": "torch"}):  # not for what is started later
        import keras
    return keras.saving.load_model(output / "model.keras")


def read_model(output: Path) -> dict[str, "torch.Tensor"]:
    """Return the weights of model.pt, of model.keras, or of lora's safetensors."""
    import torch

    if (output / "model.pt").exists():
        return torch.load(output / "model.pt", weights_only=True)
    if (output / "model.keras").exists():
        return {weight.path: weight.value.detach() for weight in keras_model(output).weights}
    from safetensors.torch import load_file  # comes with transformers

    files = sorted([*output.glob("adapter/adapter_model.safetensors"), *output.glob("model/model*.safetensors")])
    return {name: weight for file in files for name, weight in load_file(file).items()}


def import_file(path: Path) -> ModuleType:
    """Import a module by its file, and what it imports from its folder: the examples are not installed anywhere."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module


def largest_difference(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> float:
    """Return the largest absolute difference between two models' weights; raise AssertionError if shapes differ."""
    shapes = [{name: (weight.shape, weight.dtype) for name, weight in weights.items()} for weights in (one, other)]
    assert shapes[0] == shapes[1]
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def recomputed(output: Path, dataset: str, data_dir: str) -> tuple[float, float]:
    """Return test loss and accuracy of the model, computed here by PyTorch, in one process."""
    import torch
    from torch.nn import functional as F

    from common import data
    from common.models import ConvNet

    if (output / "model.keras").exists():
        data = import_file(ROOT / "examples" / "horovod_tensorflow" / "common" / "data.py")
        model = keras_model(output)
    else:
        weights = read_model(output)
        model = ConvNet().to(weights["fc2.bias"].dtype)
        model.load_state_dict(weights)
    test_set = data.load(dataset, data_dir)[1]
    read: Any = getattr(test_set, "__getitems__", test_set.__getitem__)
    images, labels = map(torch.as_tensor, read(list(range(len(test_set)))))
    with torch.no_grad():
        logits = model(images.to(next(model.parameters()).dtype))
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).double().mean().item()


def assert_exact_metrics(output: Path, dataset: str = "digits", data_dir: str = "data") -> None:
    """Check that the last row of metrics.csv counts each test sample once, over all processes."""
    loss, accuracy = recomputed(output, dataset, data_dir)
    row = read_metrics(output)[-1]
    assert math.isclose(row["test_accuracy"], accuracy, rel_tol=0, abs_tol=1e-12)
    assert math.isclose(row["test_loss"], loss, rel_tol=1e-6)


def assert_same_run(output: Path, reference: Path) -> None:
    """Check that two runs ended the same: the model bit for bit, metrics.csv in all but the times."""
    assert without_times(read_metrics(output)) == without_times(read_metrics(reference))
    assert_same_weights(read_model(output), read_model(reference))


def assert_same_weights(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> None:
    """Check that two models have the same weights, bit for bit."""
    import torch

    assert largest_difference(one, other) == 0
    for name in one:  # flat, since a number alone cannot be seen as bytes
        assert torch.equal(*(weights[name].reshape(-1).view(torch.uint8) for weights in (one, other)))
