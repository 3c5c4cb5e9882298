"""On the GPUs of this machine, over NCCL: each example that uses GPUs keeps its promises there. For `nox -s gpu`."""

import importlib
import json
import os
import shutil
import subprocess
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
GIVEN = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(COUNT)))  # a job may have names of slices
VISIBLE = {"CUDA_VISIBLE_DEVICES": GIVEN}  # by default the tests hide them


def train(example: str, folder: Path, *arguments: object, **environment: str) -> Reference:
    """Train on all GPUs and print the figures of the run; return it."""
    run = runs.train(example, folder, COUNT, *arguments, seconds=600, **VISIBLE, **environment)
    assert "nccl on cuda" in run.stdout, run.stdout
    used = outputs.read_run(folder / "output")["stops"][-1].get("used", [])  # those with plumbing/ record it
    assert all(process["gpu_mb"] > 0 for process in used)
    import torch

    name = torch.cuda.get_device_name(0)
    print(f"{example} {' '.join(map(str, arguments))}: {name} x {COUNT}")
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

    GPUs round differently, also from run to run, and Adam makes much of that: on an H200, whose convolutions compute in
    TF32, the weights ended within 0.1 (fsdp, torchrun_vision), 0.12 (ConvNet) and 0.54 (LoRA) of their own length from
    the CPU's; on a CPU bf16 and fp32 end 0.15 and 0.69 apart. Unrelated weights are 1.4 apart. The losses say more: on
    two cards the last one was up to 5.1 % (deepspeed) and 6.7 % (torchrun_vision) from the CPU's, the first below 2 %.
    """
    launcher = LAUNCHERS[example]
    runs.train(example, folder, COUNT, seconds=600)  # on the CPU
    rows, others = (outputs.read_metrics(output) for output in (on_gpus.output, folder / "output"))
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in others]
    assert rows[-1]["world_size"] == COUNT
    assert launcher.has_learnt(rows[-1], tolerance=0.01)
    assert rows[0]["train_loss"] == pytest.approx(others[0]["train_loss"], rel=0.02)
    assert rows[-1]["train_loss"] == pytest.approx(others[-1]["train_loss"], rel=0.1)
    weights, expected = (outputs.read_model(output) for output in (on_gpus.output, folder / "output"))
    outputs.largest_difference(weights, expected)  # the same names, shapes and types
    distance = sum((weights[name].double() - expected[name].double()).square().sum().item() for name in weights)
    size = sum(weight.double().square().sum().item() for weight in expected.values())
    assert (distance / size) ** 0.5 < (0.2 if launcher.convnet else 0.8)
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


MODES = {  # and whose they are
    "--tensor-parallel 2": "fsdp",
    "--cpu-offload": "fsdp",
    "--cpu-offload --tensor-parallel 2": "fsdp",
    "--async-save": "fsdp",
    "--shard": "lora",
    "--sync-batchnorm": "torchrun_vision",
    "--sync-batchnorm --precision fp16 --max-grad-norm 1": "torchrun_vision",
}


@pytest.mark.parametrize("words", [pytest.param(words, marks=pytest.mark.only(name)) for words, name in MODES.items()])
def test_mode(example: str, folder: Path, words: str) -> None:
    """What is not in the default run learns as much as that, within a tolerance."""
    if "tensor-parallel" in words and COUNT % 2:
        pytest.skip("needs a GPU: two, or another even number")
    run = train(example, folder, *words.split())
    assert LAUNCHERS[example].has_learnt(outputs.read_metrics(run.output)[-1], tolerance=0.1)


@pytest.mark.skipif(COUNT < 2, reason="needs a GPU: two of them")
def test_dead_rank(example: str, folder: Path) -> None:
    """A process that is killed ends the run within a minute, also where the others wait in NCCL: --timeout."""
    run = runs.start(example, folder, COUNT, "--timeout", 30, "--epochs", 100, **VISIBLE)
    run.read_epoch(1)
    runs.kill_one(example, run)


@pytest.mark.skipif(COUNT < 2, reason="needs a GPU: two of them")
def test_no_context_on_another_gpu(example: str, folder: Path) -> None:
    """Each process uses one GPU: a context on another one takes some 400 MB there, and none in exclusive mode.

    It is asked for in the middle of the run, when checkpoints have been written, too, by a thread where there is one.
    """
    words = ["--async-save"] if example == "fsdp" else []
    run = runs.start(example, folder, COUNT, "--epochs", 100, *words, **VISIBLE)
    run.read_epoch(1)
    run.read_epoch(2)
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    runs.kill_all(example, run)
    assert_one_gpu_each(listed)


def assert_one_gpu_each(listed: str) -> None:
    """Check what nvidia-smi lists: lines with the id of a process and of a GPU."""
    pairs = [tuple(line.split(", ")) for line in listed.splitlines()]
    assert len({pid for pid, _ in pairs}) == len(set(pairs)), f"a process uses several GPUs:\n{listed}"
