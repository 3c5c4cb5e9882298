"""What a run has written, metrics.csv, run.json and the model: read it, compute it again, compare it."""

import csv
import importlib.util
import io
import json
import math
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.launchers import ROOT

if TYPE_CHECKING:  # it takes seconds, and reading a run needs it only for the model
    import torch

# The columns of metrics.csv that differ from run to run.
TIMES = ("samples_per_second", "tokens_per_second", "tflops_per_process", "seconds")


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


def read_model(output: Path) -> dict[str, "torch.Tensor"]:
    """Return the weights in model.pt, those of lora's safetensors or, as Keras names and lays them out, model.keras."""
    import torch

    if (output / "model.pt").exists():
        return torch.load(output / "model.pt", weights_only=True)
    for path in (output / "adapter" / "adapter_model.safetensors", output / "model" / "model.safetensors"):
        if path.exists():
            from safetensors.torch import load_file  # comes with transformers

            return load_file(path)
    files = sorted((output / "model").glob("model-*-of-*.safetensors"))
    if files:
        from safetensors.torch import load_file

        return {name: weight for file in files for name, weight in load_file(file).items()}
    import h5py  # comes with Keras

    with zipfile.ZipFile(output / "model.keras") as archive:
        content = archive.read("model.weights.h5")
    weights: dict[str, torch.Tensor] = {}

    def keep(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            weights[name] = torch.from_numpy(item[()])

    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(keep)
    return weights


def as_convnet(weights: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Return the state dict of the ConvNet that computes what horovod_tensorflow's Keras model computes.

    Keras has the channels last, in images and so in what the first linear layer sees of them: (12, 12, 64).
    """
    converted = {}
    for ours, theirs in {"conv1": "conv2d", "conv2": "conv2d_1", "fc1": "dense", "fc2": "dense_1"}.items():
        kernel, bias = (weights[f"layers/{theirs}/vars/{number}"] for number in (0, 1))
        if ours == "fc1":
            kernel = kernel.view(12, 12, 64, 128)
        order = (3, 2, 0, 1) if kernel.dim() == 4 else (1, 0)
        converted |= {f"{ours}.weight": kernel.permute(order).flatten(1) if ours == "fc1" else kernel.permute(order)}
        converted |= {f"{ours}.bias": bias}
    return converted


def import_file(path: Path) -> ModuleType:
    """Import a module by its file, and what it imports from its folder: the examples are not installed anywhere."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def numpy_test_set(dataset: str, data_dir: str) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return the test images and labels as horovod_tensorflow reads them."""
    import torch

    module = import_file(ROOT / "examples" / "horovod_tensorflow" / "common" / "data.py")
    test_set = module.load(dataset, data_dir)[1]
    images, labels = test_set[list(range(len(test_set)))]
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)


def largest_difference(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> float:
    """Return the largest absolute difference between two models' weights; raise AssertionError if shapes differ."""
    assert {name: (w.shape, w.dtype) for name, w in one.items()} == {
        name: (w.shape, w.dtype) for name, w in other.items()
    }
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def recomputed(output: Path, dataset: str, data_dir: str) -> tuple[float, float]:
    """Return test loss and accuracy of the model, computed here by PyTorch, in one process."""
    import torch
    from torch.nn import functional as F

    from common import data
    from common.models import ConvNet

    weights = read_model(output)
    if "fc2.bias" in weights:
        test_set = data.load(dataset, data_dir)[1]
        read = getattr(test_set, "__getitems__", None) or getattr(test_set, "__getitem__")  # noqa: B009
        images, labels = read(list(range(len(test_set))))
    else:
        weights = as_convnet(weights)
        images, labels = numpy_test_set(dataset, data_dir)
    model = ConvNet().to(weights["fc2.bias"].dtype)
    model.load_state_dict(weights)
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
    """Check that two runs ended the same: the model bit for bit, metrics.csv in all but the times."""
    assert without_times(read_metrics(output)) == without_times(read_metrics(reference))
    assert_same_weights(read_model(output), read_model(reference))


def assert_same_weights(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> None:
    """Check that two models have the same weights, bit for bit."""
    import torch

    assert largest_difference(one, other) == 0
    for name in one:  # flat, since a number alone cannot be seen as bytes
        assert torch.equal(*(weights[name].reshape(-1).view(torch.uint8) for weights in (one, other)))


def assert_recorded(output: Path) -> None:
    """Check that run.json says what a run was that has ended well: its command, settings, versions, start and end."""
    run = read_run(output)
    assert run["command"][0].endswith("train.py") and run["settings"]["seed"] == 0
    assert run["torch"] or run["starts"][0]["tensorflow"]
    ((start,), (stop,)) = run["starts"], run["stops"]
    assert start["step"] == 0 and start["time"] > 1.7e9
    assert stop["reason"].startswith("finished") and stop["step"] > 0 and stop["time"] > start["time"]
