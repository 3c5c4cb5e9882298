"""The GPU lines are executed, though no GPU is here: each example that uses GPUs trains on two fake GPUs.

fake_gpus/__init__.py says what these are, and what they cannot show.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

import fake_gpus
from harness import outputs, runs
from harness.launchers import MINIMAL, OLD_FORM
from harness.runs import Reference
from tests.test_minimal import command

pytestmark = [pytest.mark.only("gpus"), pytest.mark.skipif(bool(fake_gpus.why_not()), reason=fake_gpus.why_not())]
USUAL = "--epochs 1 --precision bf16"
ARGUMENTS = {  # of test_trains, where others reach more of what only a GPU's run reaches
    "fsdp": "--epochs 1 --tokens 4000 --precision bf16 --cpu-offload --max-grad-norm 1",
    "torchrun_vision": "--epochs 1 --image-size 16 --batch-size 75 --precision fp16 --sync-batchnorm --max-grad-norm 1",
}
# What is executed besides.
EXTRA = {
    "lora": """
import runpy
import sys

sys.argv = ["generate.py", "--prompt", "The river", "--max-new-tokens", "2"]
runpy.run_path("generate.py", run_name="__main__")
""",
}


def counts(record: Path) -> Counter[str]:
    """Return how often all processes together did what the fake GPUs count."""
    return sum((Counter(one["counts"]) for one in fake_gpus.records(record)), Counter())


def assert_clean(example: str, record: Path, run: runs.Run) -> None:
    """Check what every run on two GPUs must have done: each process on its own, over NCCL, with no copy that waits."""
    assert "2 processes on 1 node, nccl on cuda" in run.stdout, run.stdout
    if example in OLD_FORM:
        assert re.search(r"^used: \d+ MB of memory and [1-9]\d* MB of GPU memory", run.stdout, re.MULTILINE), run.stdout
    assert "Warning" not in run.stderr, run.stderr
    own = [one["own"] for one in fake_gpus.records(record) if one["own"] is not None]
    assert sorted(set(own)) == [0, 1] and own.count(0) == own.count(1), "each process uses its own GPU"
    did = counts(record)
    copies = {"blocking": 0, "non_blocking": 0}
    for what, number in did.items():
        match = re.fullmatch(r"copy cpu to cuda pinned (\w+) (\w+)", what)
        # With --cpu-offload FSDP copies weights, too, as it likes: data are integers.
        if match and (match[2] == "Long" or "--cpu-offload" not in run.command):
            copies[match[1]] += number
    assert copies["non_blocking"] >= 8 and not copies["blocking"], f"each step waits for its data: {did}"
    assert any(did[f"nccl {what} cuda:{number}"] for what in ("allreduce", "reduce_scatter") for number in {*own}), did


# What is of the launcher runs on the CPU, too; slurm/test_fake_gpus_jobs.py has torchrun_multinode's ordinary test.
@pytest.mark.runs("weekly", "accelerate", "deepspeed", "lightning", "lora", "torchrun_multinode")
def test_trains(example: str, folder: Path, reference: Reference, built: Path, tmp_path: Path) -> None:
    """It trains in mixed precision as on the CPU."""
    words, record = ARGUMENTS.get(example, USUAL).split(), tmp_path / "record"
    variables = fake_gpus.environment(built, record)
    run = runs.train(example, folder, 2, *words, **variables)
    assert_clean(example, record, run)
    did = counts(record)
    half = "Half" if "fp16" in words else "BFloat16"
    assert did[f"product {half}"] > 2 * did["product Float"], "autocast: products of another type"
    (row,) = outputs.read_metrics(folder / "output")
    if words == USUAL.split():
        assert row["train_loss"] == pytest.approx(outputs.read_metrics(reference.output)[0]["train_loss"], rel=0.01)
    if example in EXTRA:
        extra = runs.Run(["python", "-c", EXTRA[example]], folder, variables).wait()
        assert extra.status == 0, extra.stderr


@pytest.mark.only(*MINIMAL)
@pytest.mark.runs("weekly")
def test_minimal(example: str, folder: Path, built: Path, tmp_path: Path) -> None:
    """minimal.py trains on GPUs, too: each process on its own."""
    record = tmp_path / "record"
    run = runs.Run(command(folder), folder, fake_gpus.environment(built, record)).wait()
    assert run.status == 0 and "epoch 5: " in run.stdout, run.stderr
    assert {one["own"] for one in fake_gpus.records(record) if one["own"] is not None} == {0, 1}
    assert any(what.startswith("nccl") for what in counts(record)), counts(record)


@pytest.mark.only("accelerate", "ddp_spawn", "torchrun_multinode", "lightning", "deepspeed")
@pytest.mark.runs("weekly")
def test_same_as_on_the_cpu(example: str, folder: Path, reference: Reference, built: Path, tmp_path: Path) -> None:
    """In fp32 the default run ends with the CPU's losses, killed and resumed after an epoch, too."""
    variables = fake_gpus.environment(built, tmp_path / "record")
    run = runs.start(example, folder, 2, **variables)
    run.read_epoch(1)
    run.read_epoch(2)
    runs.kill_all(example, run)
    run = runs.train(example, folder, 2, "--resume", **variables)
    assert "continuing after " in run.stdout
    rows, others = (outputs.read_metrics(output) for output in (folder / "output", reference.output))
    for row, other in zip(rows, others, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
    weights, expected = map(outputs.read_model, (folder / "output", reference.output))
    assert outputs.largest_difference(weights, expected) < 1e-2


REFUSED = {
    "a tensor of the CPU": ("dist.all_reduce(torch.ones(1))", "No backend type associated with device type cpu"),
    "a tensor of the CPU beside one of a GPU": ("torch.ones(2, device='cuda') + torch.ones(2)", "on the same device"),
    "sums on the CPU": ("torch.zeros(2)[0].add_(torch.ones((), device='cuda'))", "on the same device"),
    "a GPU that is not there": ("torch.ones(1, device='cuda:2')", "invalid device ordinal"),
    "set_device after the first use": ("torch.ones(1, device='cuda'); torch.cuda.set_device(1)", "uses GPU 0"),
    "another process's GPU": ("torch.ones(1, device='cuda'); torch.ones(1, device='cuda:1')", "uses GPU 0"),
    "a fork after the first use": ("torch.cuda.is_available(); os.fork() or torch.ones(1).cuda()", "Cannot re-init"),
    "a wrong name": ("torch.cuda.max_memory_alocated()", "AttributeError"),
    "clipping what is scaled": (
        "w = torch.ones(1, device='cuda', requires_grad=True)\ntorch.amp.GradScaler('cuda').scale(w.sum()).backward()\n"
        "torch.nn.utils.clip_grad_norm_([w], 1)",
        "clipped before GradScaler.unscale_",
    ),
}
# Each is tried in a process of its own, a fork of one that has imported PyTorch and has not touched CUDA.
SCRIPT = """
import json, os, sys, traceback
import torch
import torch.distributed as dist
for name, (statement, _) in json.load(open("refused.json")).items():
    if not (child := os.fork()):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 2)
        try:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            exec(statement)
        except Exception:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.runs("one")
def test_refuses(built: Path, example: str, tmp_path: Path) -> None:
    """The fake GPUs refuse what a GPU would refuse, and what costs memory on another process's GPU."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "refused.json").write_text(json.dumps(REFUSED))
    run = runs.Run(["python", "script.py"], tmp_path, fake_gpus.environment(built, tmp_path / "record")).wait()
    assert run.status == 0, run.stderr
    for name, (_, error) in REFUSED.items():
        assert error in (tmp_path / name).read_text(), (name, (tmp_path / name).read_text())


@pytest.mark.runs("one")
def test_refuses_another_pytorch(built: Path, example: str, tmp_path: Path) -> None:
    """They say in one line which PyTorch they know."""
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.write_text("__version__ = '2.9.1'\n")
    variables = fake_gpus.environment(built, tmp_path / "record")
    variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    run = runs.Run(["python", "-c", "import torch"], tmp_path, variables).wait()
    assert run.status == 1
    assert run.stderr == f"fake GPUs: they know PyTorch {fake_gpus.KNOWN}, built for CUDA, not 2.9.1\n"


@pytest.mark.runs("one")
def test_off_without_its_variable(built: Path, example: str, tmp_path: Path) -> None:
    """Without the variable nothing of them is imported, even where their folder is on Python's path."""
    script = "import sys, torch; sys.exit(bool({'fake_driver', 'gpus'} & sys.modules.keys()))"
    run = runs.Run(["python", "-c", script], tmp_path, {"PYTHONPATH": str(built)}).wait()
    assert run.status == 0, run.stderr
