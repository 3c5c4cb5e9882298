"""The GPU lines are executed, though no GPU is here: each example that uses GPUs trains on two that are none.

See harness/gpus.py for what these are, and what they cannot stand for.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness import gpu_lines, gpus, outputs, runs
from harness.launchers import LAUNCHERS, MINIMAL, ROOT
from harness.processes import finish
from harness.refusals import assert_refused
from harness.runs import Reference
from tests.test_minimal import command

pytestmark = [pytest.mark.only("gpus"), pytest.mark.skipif(bool(gpus.why_not()), reason=gpus.why_not())]
SHARE = 0.95  # of the pieces of a GPU's code that must be executed


def counts(record: Path) -> Counter[str]:
    """Return how often all processes together did what the stand-in counts."""
    return sum((Counter(one["counts"]) for one in gpus.records(record)), Counter())


def assert_clean(example: str, record: Path, run: runs.Run) -> None:
    """Check what every run on two GPUs must have done: each process on its own, over NCCL, with no copy that waits."""
    assert "2 processes on 1 node, nccl on cuda" in run.stdout, run.stdout
    assert re.search(r"^used: \d+ MB of memory and [1-9]\d* MB of GPU memory", run.stdout, re.MULTILINE), run.stdout
    assert "Warning" not in run.stderr, run.stderr
    own = [one["own"] for one in gpus.records(record) if one["calls"].get("max_memory_allocated")]
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


@pytest.mark.runs("weekly", "accelerate", "deepspeed", "lightning")  # what is of the launcher runs on the CPU, too
def test_trains(example: str, folder: Path, reference: Reference, built: Path, tmp_path: Path) -> None:
    """It trains in mixed precision as on the CPU, and nearly all that only a GPU's run reaches is executed.

    What belongs to one mode, such as --cpu-offload, is in this run, too, where that can be.
    """
    words, record = gpu_lines.ARGUMENTS.get(example, gpu_lines.USUAL).split(), tmp_path / "record"
    variables = gpus.environment(built, record, lines=True)
    run = runs.train(example, folder, 2, *words, **variables)
    gpu_lines.run_extra(example, folder, variables)
    assert_clean(example, record, run)
    did = counts(record)
    half = "Half" if "fp16" in words else "BFloat16"
    assert did[f"product {half}"] > 2 * did["product Float"], "autocast: products of another type"
    (row,) = outputs.read_metrics(folder / "output")
    if words == gpu_lines.USUAL.split():
        assert row["train_loss"] == pytest.approx(outputs.read_metrics(reference.output)[0]["train_loss"], rel=0.01)
    pieces = [piece for piece in gpu_lines.pieces(folder) if piece.file != "minimal.py"]  # see test_minimal
    found = gpu_lines.reached(pieces, [record])
    missing = [f"{piece.file}:{piece.start[0]} {piece.text}" for piece, was in found.items() if not was]
    refusal = [text for text in missing if "start one for each" in text]  # see test_refuses_too_few
    assert len(missing) - len(refusal) <= (1 - SHARE) * len(found), missing


@pytest.mark.only(*MINIMAL)
@pytest.mark.runs("weekly")
def test_minimal(example: str, folder: Path, built: Path, tmp_path: Path) -> None:
    """minimal.py trains on GPUs, too: each process on its own, and all that only a GPU's run reaches is executed."""
    record = tmp_path / "record"
    run = runs.Run(command(folder), folder, gpus.environment(built, record, lines=True)).wait()
    assert run.status == 0 and "epoch 5: " in run.stdout, run.stderr
    assert {one["own"] for one in gpus.records(record) if one["own"] is not None} == {0, 1}
    assert any(what.startswith("nccl") for what in counts(record)), counts(record)
    pieces = [piece for piece in gpu_lines.pieces(folder) if piece.file == "minimal.py"]
    assert pieces and all(gpu_lines.reached(pieces, [record]).values())


@pytest.mark.runs("weekly")
def test_resumed(example: str, folder: Path, built: Path, tmp_path: Path) -> None:
    """A checkpoint is read by each process for its own GPU."""
    variables = gpus.environment(built, tmp_path / "record")
    runs.train(example, folder, 2, "--epochs", 1, **variables)
    run = runs.train(example, folder, 2, "--epochs", 2, "--resume", **variables)
    assert "continuing after epoch 1 of 2" in run.stdout
    assert_clean(example, tmp_path / "record", run)


@pytest.mark.only("accelerate", "ddp_spawn", "torchrun_multinode", "lightning", "deepspeed")
@pytest.mark.runs("weekly")
def test_same_as_on_the_cpu(example: str, folder: Path, reference: Reference, built: Path, tmp_path: Path) -> None:
    """In fp32 the default run ends with the CPU's losses, killed and resumed after an epoch, too."""
    variables = gpus.environment(built, tmp_path / "record")
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


VISION = "--workers 1 --image-size 32"
WAYS = {  # with what they train, and which examples
    "--precision fp64": ("ddp_spawn", "lightning"),
    "--full": ("lora",),
    "--tokens 4000": ("fsdp",),
    "--tokens 4000 --tensor-parallel 2": ("fsdp",),
    "--tokens 4000 --cpu-offload --tensor-parallel 2 --gradient-checkpointing --max-grad-norm 1": ("fsdp",),
    VISION: ("torchrun_vision",),
    f"{VISION} --precision bf16": ("torchrun_vision",),
    f"{VISION} --profile": ("torchrun_vision",),
}


@pytest.mark.parametrize("words", [pytest.param(key, marks=pytest.mark.only(*names)) for key, names in WAYS.items()])
@pytest.mark.runs("weekly")
def test_ways(example: str, folder: Path, built: Path, tmp_path: Path, words: str) -> None:
    """Other precisions and modes train, and are resumed, on the same GPUs."""
    variables = gpus.environment(built, tmp_path / "record")
    run = runs.train(example, folder, 2, "--epochs", 1, *words.split(), **variables)
    assert_clean(example, tmp_path / "record", run)
    again = runs.train(example, folder, 2, "--epochs", 2, "--resume", *words.split(), **variables)
    assert "continuing after epoch 1 of 2" in again.stdout


@pytest.mark.only("ddp_spawn", "lightning")
@pytest.mark.runs("weekly", "lightning")
def test_refuses_too_few(example: str, folder: Path, built: Path, tmp_path: Path) -> None:
    """More processes than GPUs are refused with one line."""
    run = runs.start(example, folder, 2, **gpus.environment(built, tmp_path / "record", 1)).wait()
    assert_refused(run, LAUNCHERS[example].status_after_bad_input, "2 processes on", "which has 1 GPUs")


@pytest.mark.only("accelerate", "ddp_spawn", "lightning", "torchrun_multinode")
@pytest.mark.runs("weekly")
@pytest.mark.parametrize("visible", ["1", "MIG-0f0f0f0f-0000-0000-0000-000000000000", "0"])
def test_one_visible(example: str, folder: Path, built: Path, tmp_path: Path, visible: str) -> None:
    """A process that sees one GPU, whichever it is, or a slice of one, uses that."""
    variables = gpus.environment(built, tmp_path / "record") | {"CUDA_VISIBLE_DEVICES": visible}
    run = runs.train(example, folder, 1, "--epochs", 1, **variables)
    assert "1 process on 1 node, nccl on cuda" in run.stdout.replace("1 processes", "1 process")
    assert {one["own"] for one in gpus.records(tmp_path / "record")} == {0}


@pytest.mark.runs("weekly")
@pytest.mark.timeout(3000)
def test_tests_of_real_gpus(example: str, built: Path, shipped: Path) -> None:
    """What test_gpu.py asks of real GPUs holds here, too, as far as it can: so those tests themselves work."""
    words = ["-m", "pytest", "-q", "-m", "gpu", f"--example={example}", f"--folder={shipped}", "tests/test_gpu.py"]
    environment = os.environ | {"STAND_IN": str(built.parent)}
    words = [sys.executable, *words, "-p", "no:xdist"]
    done = finish(words, 2900, cwd=ROOT, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


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
    """The stand-in refuses what a GPU would refuse, and what costs memory on another process's GPU."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "refused.json").write_text(json.dumps(REFUSED))
    run = runs.Run(["python", "script.py"], tmp_path, gpus.environment(built, tmp_path / "record")).wait()
    assert run.status == 0, run.stderr
    for name, (_, error) in REFUSED.items():
        assert error in (tmp_path / name).read_text(), (name, (tmp_path / name).read_text())


@pytest.mark.runs("one")
def test_refuses_another_pytorch(built: Path, example: str, tmp_path: Path) -> None:
    """It says in one line which PyTorch it knows."""
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.write_text("__version__ = '2.9.1'\n")
    variables = gpus.environment(built, tmp_path / "record")
    variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    run = runs.Run(["python", "-c", "import torch"], tmp_path, variables).wait()
    assert run.status == 1
    assert run.stderr == f"stand-in for CUDA: it knows PyTorch {gpus.KNOWN}, built for CUDA, not 2.9.1\n"


@pytest.mark.runs("one")
def test_off_without_its_variable(built: Path, example: str, tmp_path: Path) -> None:
    """Without the variable nothing of it is imported, even where its folder is on Python's path."""
    script = "import sys, torch; sys.exit(bool({'stand_in', 'gpus', 'trace_lines'} & sys.modules.keys()))"
    run = runs.Run(["python", "-c", script], tmp_path, {"PYTHONPATH": str(built)}).wait()
    assert run.status == 0, run.stderr


@pytest.mark.runs("one")
def test_no_example_mentions_it(example: str, shipped: Path) -> None:
    """No file of an example names the stand-in or its variables."""
    for path in shipped.parent.rglob("*") if shipped.name == example else shipped.rglob("*"):
        if path.is_file() and path.suffix in (".py", ".sh", ".slurm", ".md", ".def", ".txt"):
            assert not re.search("fake.cuda|stand_in|TRACE_LINES", path.read_text(), re.IGNORECASE), path
