"""The lines for GPUs are executed, though no GPU is here: each example that fake GPUs reach trains on two of them.

fake_gpus/README.md says what these are, what they cannot show, and which examples they do not reach.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from harness import runs
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from tests.test_minimal import command

REACHED = ("accelerate", "ddp_spawn", "deepspeed", "lightning", "torchrun_multinode", "torchrun_vision")
NOT_REACHED = {
    "fsdp": "FSDP2 makes and gathers its weights below the functions that are replaced",
    "minimal.py of deepspeed": "ZeRO stage 2 takes memory on the GPU during the backward pass",
    "lora": "TRL computes its loss by a Triton kernel, which needs a GPU",
}
TRAIN = ["--epochs", "2", "--limit-steps", "2", "--precision", "bf16"]
ARGUMENTS = {"torchrun_vision": [*TRAIN[:-1], "fp16", "--max-grad-norm", "1", "--image-size", "16"]}
EVERY = ["copied from pinned memory to {0}", "all_reduce by nccl on {0}", "init_process_group", "set_device to {0}"]


def fake_gpus(logs: Path, folder: Path = ROOT / "fake_gpus") -> dict[str, Any]:
    """Return the variables with which a process finds two fake GPUs, and leaves a log in the folder `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    return {"PYTHONPATH": str(folder), "FAKE_GPUS": str(logs), "CUDA_VISIBLE_DEVICES": "0,1"}


def training(logs: Path) -> list[tuple[list[str], str]]:
    """Return, for each process that trained, the GPUs that it used, and its log; in the order of the GPUs."""
    found = [path.read_text() for path in logs.glob("*.log")]
    return sorted((sorted(set(re.findall(r"cuda:\d+", text))), text) for text in found if "pinned memory" in text)


def test_reached() -> None:
    """Each example that uses GPUs is executed below, or the README says why it is not."""
    page = " ".join((ROOT / "fake_gpus" / "README.md").read_text().split())
    assert {*REACHED, *NOT_REACHED} - {"minimal.py of deepspeed"} == {name for name in EXAMPLES if LAUNCHERS[name].gpus}
    assert all(f"**{name}**: {reason}" in page for name, reason in NOT_REACHED.items())


def assert_used(logs: Path, wanted: list[str]) -> None:
    """Check that each of two processes used a GPU of its own, and that its log has these lines."""
    found = training(logs)
    assert [gpus for gpus, _ in found] == [["cuda:0"], ["cuda:1"]], found
    for (own,), log in found:
        assert all(f"{line.format(own)}" in log for line in wanted), log


@pytest.mark.only(*REACHED)
@pytest.mark.runs("full")
def test_trains(example: str, folder: Path, tmp_path: Path) -> None:
    """train.py trains two epochs: GPUs, NCCL, pinned memory, autocast, and where it has them, fused AdamW and fp16."""
    arguments = ARGUMENTS.get(example, TRAIN)
    run = runs.train(example, folder, 2, *arguments, **fake_gpus(tmp_path / "logs"))
    assert "2 processes on 1 node, nccl on cuda" in run.stdout and len(re.findall("^epoch", run.stdout, re.M)) == 2
    text = (folder / "train.py").read_text()
    wanted = ["DistributedDataParallel by nccl on {0}"] * (example != "deepspeed")  # whose weights have its dtype
    wanted += [f"autocast to torch.{'float16' if 'fp16' in arguments else 'bfloat16'}"] * (example != "deepspeed")
    wanted += ["_fused_adamw_ on {0}"] * ("fused=" in text)
    wanted += ["_amp_update_scale_ on {0}"] * ("fp16" in arguments)
    assert_used(tmp_path / "logs", EVERY + wanted)


@pytest.mark.only(*(name for name in REACHED if f"minimal.py of {name}" not in NOT_REACHED))
@pytest.mark.runs("full")
def test_minimal(example: str, folder: Path, tmp_path: Path) -> None:
    """minimal.py trains on GPUs."""
    run = runs.Run(command(folder), folder, fake_gpus(tmp_path / "logs")).wait()
    assert run.status == 0 and "\nepoch 2: " in run.stdout, run.stderr
    assert_used(tmp_path / "logs", EVERY)


DEVICE = 'torch.device("cuda", local_rank)'
MISTAKES = {  # in minimal.py: what stands there, what somebody wrote instead, and the error; the first three in checks
    "a wrong name": ("torch.cuda.set_device(", "torch.cuda.set_devcie(", "no attribute 'set_devcie'"),
    "a GPU for two processes": (DEVICE, 'torch.device("cuda", 0)', "Duplicate GPU detected"),
    "a batch left on the CPU": ("images.to(device), ", "images, ", "Expected all tensors to be on the same device"),
    "sums left on the CPU": (", device=device)  # loss, samples", ")  # loss, samples", "on the same device"),
    "a number sent from the CPU": (
        "dist.all_reduce(sums)",
        "dist.all_reduce(sums.cpu())",
        "associated with device type",
    ),
    "a GPU that is not there": (DEVICE, 'torch.device("cuda", local_rank + 1)', "invalid device ordinal: cuda:2"),
}


@pytest.mark.only("torchrun_multinode")
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=[pytest.mark.runs("full")] * (number > 2)) for number, name in enumerate(MISTAKES)],
)
def test_finds(example: str, folder: Path, tmp_path: Path, mistake: str) -> None:
    """A mistake in a line for GPUs, which no run on CPUs shows, is found."""
    right, wrong, error = MISTAKES[mistake]
    text = (folder / "minimal.py").read_text()
    assert right in text
    (folder / "minimal.py").write_text(text.replace(right, wrong))
    run = runs.Run(command(folder), folder, fake_gpus(tmp_path / "logs")).wait(leaves=30)
    assert run.status and error in run.stderr and "epoch 2: " not in run.stdout, run.stderr
