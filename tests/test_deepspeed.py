"""What only deepspeed promises: equal stages, sharded memory, its own settings file, checkpoints of several files."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs, readme, runs
from harness.runs import Reference
from tests import held_memory, refusals

pytestmark = pytest.mark.only("deepspeed")


def note_memory(folder: Path) -> None:
    """Make a copy of the example write down, before each step, how many MB each process holds."""
    held_memory.plant(folder, "        engine.step()", "note_engine(engine)")


WEIGHTS = 1_199_882 * 4 / 1e6  # MB of the ConvNet's weights in fp32; Adam's state is twice that


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, Any]:
    """An environment without compiler and ninja, and without ops that were built before."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "torchrun").symlink_to(Path(sys.prefix, "bin", "torchrun"))
    return {"PATH": str(programs), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


@pytest.mark.runs("full")
def test_stage_1_and_its_own_launcher(example: str, folder: Path, reference: Reference) -> None:
    """The README's `deepspeed` command, at stage 1: the bits of stage 0, half of Adam's state on each process."""
    note_memory(folder)
    line = readme.command("examples/deepspeed/README.md", "OMP_NUM_THREADS=1 deepspeed ...", {" own": " output"})
    readme.run_block([f"{line} --zero-stage 1"], folder)
    outputs.assert_same_run(folder / "output", reference.output)
    held = held_memory.read(folder)
    assert held["optimizer state"] == pytest.approx(WEIGHTS, rel=0.01)
    assert held["parameters"] == pytest.approx(WEIGHTS, rel=0.01)


@pytest.mark.runs("full")  # a job of it is an ordinary test
def test_stage_3_without_a_compiler(example: str, folder: Path, reference: Reference, bare: dict[str, Any]) -> None:
    """Stage 3 on a node without ninja and compiler: the bits of stage 0, half of everything on each process."""
    note_memory(folder)
    runs.train(example, folder, 2, "--zero-stage", 3, **bare)
    outputs.assert_same_run(folder / "output", reference.output)
    held = held_memory.read(folder)
    for kind, whole in (("parameters", WEIGHTS), ("gradients", WEIGHTS), ("optimizer state", 2 * WEIGHTS)):
        assert held[kind] == pytest.approx(whole / 2, rel=0.02), kind
    assert not list(Path(bare["TORCH_EXTENSIONS_DIR"]).glob("**/*.so"))


@pytest.mark.runs("full")  # .ci/run: fsdp
def test_killed_while_saving(example: str, folder: Path, reference: Reference) -> None:
    """Killed with half a shard of epoch 2 written: --resume continues from epoch 1, which checkpoint.pt names.

    Then a damaged or lost shard, another stage and another number of processes are refused, and nothing is changed.
    """
    script, code = folder / "sharded.py", (folder / "sharded.py").read_text()
    line = "        save(folder.parent, folder.name)\n"
    planted = "        if longrun.rank == 1 and folder.name == 'step22':\n"
    planted += "            os.truncate(next(folder.glob('zero_pp_rank_1_*')), 1000)\n"
    planted += f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    edits.edit(script, line, line + planted)
    run = runs.start(example, folder, 2, "--zero-stage", 2).wait()
    script.write_text(code)
    checkpoint = folder / "output" / "checkpoint"
    assert run.status != 0 and sorted(path.name for path in checkpoint.glob("step*")) == ["step11", "step22"]

    resumed = runs.train(example, folder, 2, "--zero-stage", 2, "--resume")
    assert "continuing after epoch 1 of 5" in resumed.stdout
    outputs.assert_same_run(folder / "output", reference.output)
    assert sorted(path.name for path in checkpoint.glob("step*")) == ["step55"]

    for name in ("changed", "lost"):
        shutil.copytree(folder / "output", folder / name)
    shard = "checkpoint/step55/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray((folder / "changed" / shard).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "changed" / shard).write_bytes(content)
    (folder / "lost" / shard).unlink()
    texts = {
        "--output-dir changed": ["changed/checkpoint/step55", "damaged", "has changed"],
        "--output-dir lost": ["lost/checkpoint/step55", "damaged", "No such file"],
        "--zero-stage 1": ["output/checkpoint/step55", "2 processes at ZeRO stage 2", "2 processes at ZeRO stage 1"],
    }
    texts["--global-batch 128"] = ["output/checkpoint/step55", "2 processes at ZeRO stage 2", "1 processes at"]
    for words, expected in texts.items():
        number = 1 if words == "--global-batch 128" else 2
        refused = runs.start(example, folder, number, *f"--zero-stage 2 --resume {words}".split()).wait()
        refusals.assert_refused(refused, 1, *expected)
    assert bytes(content) == (folder / "changed" / shard).read_bytes()
    assert sorted(os.listdir(folder / "output" / "checkpoint")) == [
        "latest", "step55", "zero_to_fp32.py", "zero_to_torch.py",
    ]  # fmt: skip


SETTINGS = {  # name: content, and what the line must say
    "none.json": (None, ["none.json", "No such file"]),
    "comma.json": ('{"zero_optimization": {"stage": 1},}', ["comma.json", "JSONDecodeError", "line 1"]),
    "list.json": ("[]", ["list.json", "TypeError"]),
    "nested.json": ({"zero_optimization": {"stagee": 2}}, ["nested.json", "stagee"]),
    "removed.json": ({"amp": {"enabled": True}}, ["removed.json", "AMP", "removed"]),
    "batch.json": ({"train_batch_size": 100}, ["batch.json", "100 != 64 * 1 * 1"]),
    "no_optimizer.json": ({"optimizer": {}}, ["no_optimizer.json", "params"]),
}


def test_bad_settings(example: str, folder: Path) -> None:
    """Each kind of bad settings file has one line, most often DeepSpeed's own, that names the key."""
    good = json.loads((folder / "ds_config.json").read_text())
    for name, (content, _) in SETTINGS.items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(good | content))
    call = "train.main(train.parse_args())"
    calls = {(call, f"--deepspeed_config {name}"): texts for name, (_, texts) in SETTINGS.items()}
    calls[call, "--precision fp64"] = ["--precision", "'fp64'", "bf16"]
    calls["os.environ.pop('LOCAL_RANK'); train.parse_args()", ""] = [
        "torchrun --standalone --nproc-per-node=2 train.py"
    ]
    refusals.assert_calls_refused(folder, calls)


def test_bf16_with_accumulation(example: str, folder: Path) -> None:
    """Stage 3 in bf16 by the settings, two batches a step: it learns, and model.pt has all weights in fp32.

    One is frozen, which the optimizer has not. Rank 0 has 180 of the test samples, two batches; rank 1 has 179, one
    batch, and must gather weights for the second. The scheduler is that of the settings.
    """
    note_memory(folder)
    line = "    model = ConvNet()\n"
    edits.edit(folder / "train.py", line, f"{line}    model.conv2.weight.requires_grad_(False)\n")
    settings = json.loads((folder / "ds_config.json").read_text())
    settings |= {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.004, "warmup_num_steps": 2}}
    (folder / "own.json").write_text(json.dumps(settings))
    arguments = "--zero-stage 3 --deepspeed_config own.json --epochs 3 --batch-size 179"
    run = runs.train(example, folder, 2, *arguments.split())
    assert "global batch 716" in run.stdout
    recorded = outputs.read_run(folder / "output")["settings"]
    assert (recorded["precision"], recorded["zero_stage"]) == ("bf16", 3)
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_loss"] < 2 < rows[0]["train_loss"]
    held = held_memory.read(folder)
    assert held["parameters"] == pytest.approx(WEIGHTS / 4, rel=0.02)  # half of them, in 2 bytes instead of 4
    assert held["optimizer state"] == pytest.approx(WEIGHTS, rel=0.02)  # half of it, in fp32
    weights = outputs.read_model(folder / "output")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    assert sum(weight.numel() for weight in weights.values()) == 1_199_882
