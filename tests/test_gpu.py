"""On the GPUs of this machine, over NCCL: each example that uses GPUs keeps its promises there. For `nox -s gpu`."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from harness import outputs, runs
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference

# As PyTorch counts them, for whose import there is no reason where there are none.
COUNT = importlib.import_module("torch").cuda.device_count() if shutil.which("nvidia-smi") else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.only("gpus"),
    pytest.mark.skipif(not COUNT, reason="needs a GPU: CUDA and NCCL are not tested here"),
]
VISIBLE = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(COUNT)))}  # by default the tests hide them


def train(example: str, folder: Path, *arguments: object, **environment: str) -> Reference:
    """Train on all GPUs and print the figures of the run; return it."""
    run = runs.train(example, folder, COUNT, *arguments, seconds=600, **VISIBLE, **environment)
    assert "nccl on cuda" in run.stdout, run.stdout
    used = outputs.read_run(folder / "output")["stops"][-1]["used"]
    assert all(process["gpu_mb"] > 0 for process in used)
    import torch

    print(f"{example} {' '.join(map(str, arguments))}: {torch.cuda.get_device_name(0)} x {COUNT}")
    print(*used, outputs.read_metrics(folder / "output")[-1], sep="\n")
    return Reference(folder / "output", run.stdout)


@pytest.fixture(scope="module")
def on_gpus(example: str, source: Path, session_folder: Path) -> Reference:
    """The default run on all GPUs."""

    def make(folder: Path) -> list[Reference]:
        return [train(example, copy_example(source, folder))]

    return runs.references(session_folder / f"gpus-{example}", make)[0]


def test_trains(example: str, folder: Path, on_gpus: Reference) -> None:
    """It learns as much as as many processes do on the CPU, from the same start, and its model can be read there.

    GPUs round differently, also from run to run, and Adam makes much of that: weights are compared as a whole.
    """
    launcher = LAUNCHERS[example]
    runs.train(example, folder, COUNT, seconds=600)  # on the CPU
    rows, others = (outputs.read_metrics(output) for output in (on_gpus.output, folder / "output"))
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in others]
    assert rows[-1]["world_size"] == COUNT
    assert launcher.has_learnt(rows[-1], tolerance=0.01)
    assert rows[0]["train_loss"] == pytest.approx(others[0]["train_loss"], rel=0.02)
    weights, expected = (outputs.read_model(output) for output in (on_gpus.output, folder / "output"))
    outputs.largest_difference(weights, expected)  # the same names, shapes and types
    distance = sum((weights[name].double() - expected[name].double()).square().sum().item() for name in weights)
    size = sum(weight.double().square().sum().item() for weight in expected.values())
    assert (distance / size) ** 0.5 < 0.1
    if launcher.convnet:
        loss, accuracy = outputs.recomputed(on_gpus.output, "digits", "data")
        assert rows[-1]["test_loss"] == pytest.approx(loss, rel=0.01)
        assert rows[-1]["test_accuracy"] == pytest.approx(accuracy, abs=0.005)


def test_killed_and_resumed(example: str, folder: Path, on_gpus: Reference) -> None:
    """Killed after an epoch and started with --resume, it continues and ends as well as an undisturbed run."""
    run = runs.start(example, folder, COUNT, **VISIBLE)
    run.read_epoch(1)
    run.read_epoch(2)
    runs.kill_all(example, run)
    resumed = train(example, folder, "--resume")
    assert "continuing after " in resumed.stdout
    rows, others = (outputs.read_metrics(output) for output in (resumed.output, on_gpus.output))
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in others]
    assert LAUNCHERS[example].has_learnt(rows[-1], tolerance=0.01)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.only("fp16"))])
def test_precision(example: str, folder: Path, precision: str) -> None:
    """It learns in mixed precision, too: fp16 is an argument or, with DeepSpeed, in the configuration file."""
    arguments, config = ["--precision", precision], folder / "ds_config.json"
    if precision == "fp16" and config.exists():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"fp16": {"enabled": True}}))
        arguments = []
    run = train(example, folder, *arguments)
    assert LAUNCHERS[example].has_learnt(outputs.read_metrics(run.output)[-1], tolerance=0.02)


@pytest.mark.only("torchrun_vision")
def test_profile(example: str, folder: Path) -> None:
    """--profile reports the shares of a step, and each process's trace has the GPU's kernels."""
    run = train(example, folder, "--profile")
    print(outputs.read_run(run.output)["profile"])
    traces = sorted((run.output / "profile").iterdir())
    assert len(traces) == COUNT
    for trace in traces:
        kinds = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "kernel" in kinds, kinds
