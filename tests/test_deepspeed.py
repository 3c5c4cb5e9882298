"""What only deepspeed promises: equal stages, sharded memory, its own settings file, checkpoints of several files."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs, readme, refusals, runs
from harness.runs import Reference
from tests import held_memory

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


@pytest.mark.runs("weekly")
def test_stage_1_and_its_own_launcher(example: str, folder: Path, reference: Reference) -> None:
    """The README's `deepspeed` command, at stage 1: the bits of stage 0, half of Adam's state on each process."""
    note_memory(folder)
    line = readme.command("examples/deepspeed/README.md", "deepspeed ...", {"output/own": "output"})
    readme.run_block([f"{line} --zero-stage 1"], folder)
    outputs.assert_same_run(folder / "output", reference.output)
    held = held_memory.read(folder)
    assert held["optimizer state"] == pytest.approx(WEIGHTS, rel=0.01)
    assert held["parameters"] == pytest.approx(WEIGHTS, rel=0.01)


@pytest.mark.runs("weekly")  # a job of it is an ordinary test
def test_stage_3_without_a_compiler(example: str, folder: Path, reference: Reference, bare: dict[str, Any]) -> None:
    """Stage 3 on a node without ninja and compiler: the bits of stage 0, half of everything on each process."""
    note_memory(folder)
    runs.train(example, folder, 2, "--zero-stage", 3, **bare)
    outputs.assert_same_run(folder / "output", reference.output)
    held = held_memory.read(folder)
    for kind, whole in (("parameters", WEIGHTS), ("gradients", WEIGHTS), ("optimizer state", 2 * WEIGHTS)):
        assert held[kind] == pytest.approx(whole / 2, rel=0.02), kind
    assert not list(Path(bare["TORCH_EXTENSIONS_DIR"]).glob("**/*.so"))


@pytest.mark.runs("weekly")  # the contract kills it at other moments
def test_killed_while_saving(example: str, folder: Path, reference: Reference) -> None:
    """Killed with half a shard of epoch 2 written: the run continues from epoch 1, which run.json names."""
    script, code = folder / "train.py", (folder / "train.py").read_text()
    line = "        engine.save_checkpoint(folder.parent, folder.name)  # deepspeed: each writes its shards\n"
    planted = "        if dist.get_rank() == 1 and folder.name == 'epoch2-step0':\n"
    planted += "            os.truncate(next(folder.glob('zero_pp_rank_1_*')), 1000)\n"
    planted += f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    edits.edit(script, line, line + planted)
    run = runs.start(example, folder, 2, "--zero-stage", 2).wait()
    script.write_text(code)
    checkpoint = folder / "output" / "checkpoint"
    assert run.status != 0 and (checkpoint / "epoch2-step0").exists()
    assert json.loads((checkpoint / "run.json").read_text())["tag"] == "epoch1-step0"

    resumed = runs.train(example, folder, 2, "--zero-stage", 2, "--resume")
    assert "continuing after epoch 1 of 5" in resumed.stdout
    outputs.assert_same_run(folder / "output", reference.output)
    assert sorted(path.name for path in checkpoint.glob("epoch*")) == ["epoch5-step0"]


FILES = {  # name: content, and what the line must say
    "none.json": (None, ["none.json", "No such file"]),
    "comma.json": ('{"zero_optimization": {"stage": 1},}', ["comma.json", "not valid JSON", "line 1"]),
    "list.json": ("[]", ["list.json", "must be an object"]),
    "nested.json": ({"zero_optimization": {"stagee": 2}}, ["nested.json", "stagee"]),
    "stage.json": ({"zero_optimization": {"stage": 4}}, ["stage.json", "stage"]),
    "removed.json": ({"amp": {"enabled": True}}, ["removed.json", "AMP", "removed"]),
    "batch.json": ({"train_batch_size": 100}, ["batch.json", "remove train_batch_size", "--batch-size"]),
    "own_optimizer.json": ({"optimizer": {"type": "Addam"}}, ["own_optimizer.json", "Addam"]),
    "none_at_all.json": ({"optimizer": {}}, ["none_at_all.json", "optimizer has no type"]),
}


def test_bad_settings(example: str, folder: Path) -> None:
    """Each kind of bad settings file has one clear line that names the key; in a run all processes print it."""
    good = json.loads((folder / "ds_config.json").read_text())
    for name, (content, _) in FILES.items():
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(good | content))
    (folder / "each.py").write_text(
        "import os, sys, train\n"
        "def fail(message):\n"
        "    print(message)\n"
        "    raise SystemExit\n"
        "for module in vars(train.plumbing).values():\n"
        "    if hasattr(module, 'fail'):\n"
        "        module.fail = fail\n"
        "train.setup(train.parse_args())\n"
        f"for name in {[*FILES, 'ds_config.json']}:\n"
        "    sys.argv = ['train.py', '--deepspeed_config', name]\n"
        "    try:\n"
        "        train.create_engine(train.parse_args())\n"
        "        print(name, 'is good')\n"
        "    except SystemExit:\n"
        "        pass\n"
        "model = train.torch.nn.Linear(1, 1)\n"
        "train.shards.gather_weights(model)\n"
        "print('and experts')\n"
        "model.weight.group_name = 'ep_size_2'  # as DeepSpeed names experts of which each process has others\n"
        "train.shards.gather_weights(model)\n"
    )
    run = runs.Run(["torchrun", "--standalone", "--nproc-per-node=1", "each.py"], folder).wait()
    _, after = run.stdout.split("and experts\n")
    assert after.startswith("note: model.pt has the experts of rank 0 alone") and run.stdout.count("note: ") == 1
    expected = [texts for _, texts in FILES.values()] + [["ds_config.json is good"]]
    lines = [line for line in run.stdout.splitlines() if ".json" in line and not line.startswith("[")]
    for line, texts in zip(lines, expected, strict=True):
        assert all(text in line for text in texts), (line, texts)
    assert run.status == 0 and "Traceback" not in run.stderr, run.stderr

    run = runs.start(example, folder, 2, "--deepspeed_config", "nested.json").wait()
    refusals.assert_refused(run, 1, "nested.json", "stagee")


@pytest.mark.runs("weekly")
def test_without_a_launcher(example: str, folder: Path) -> None:
    """Started as a plain script, it names the command, and looks for no MPI; fp64 and no such stage are refused."""
    run = runs.Run(["python", "train.py"], folder).wait()
    refusals.assert_refused(run, 2, "torchrun --standalone --nproc-per-node=2 train.py")
    assert "mpi" not in run.stderr.lower() + run.stdout.lower()
    texts = {"--precision fp64": ["--precision", "'fp64'", "bf16"], "--zero-stage 4": ["--zero-stage"]}
    refusals.assert_arguments_refused(folder, texts)


def test_bf16_with_accumulation(example: str, folder: Path) -> None:
    """Stage 3 in bf16 by the config file, two batches a step: it learns, and model.pt has all weights in fp32.

    One is frozen, which the optimizer has not. Rank 0 has 180 of the test samples, two batches; rank 1 has 179, one
    batch, and must gather weights for the second.
    """
    note_memory(folder)
    line = "    model = ConvNet()\n"
    edits.edit(folder / "train.py", line, f"{line}    model.conv2.weight.requires_grad_(False)\n")
    settings = json.loads((folder / "ds_config.json").read_text())
    settings |= {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    (folder / "own.json").write_text(json.dumps(settings))
    arguments = "--zero-stage 3 --deepspeed_config own.json --epochs 3 --batch-size 179 --lr 0.004"
    run = runs.train(example, folder, 2, *arguments.split())
    assert "own.json: ZeRO stage 3, bf16" in run.stdout and "global batch 716" in run.stdout
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_loss"] < 2 < rows[0]["train_loss"]
    held = held_memory.read(folder)
    assert held["parameters"] == pytest.approx(WEIGHTS / 4, rel=0.02)  # half of them, in 2 bytes instead of 4
    assert held["optimizer state"] == pytest.approx(WEIGHTS, rel=0.02)  # half of it, in fp32
    weights = outputs.read_model(folder / "output")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    assert sum(weight.numel() for weight in weights.values()) == 1_199_882


@pytest.mark.runs("weekly")
def test_offload_without_a_compiler(example: str, folder: Path, bare: dict[str, Any]) -> None:
    """Where the op cannot be compiled, one line says what to install or to build before."""
    run = runs.start(example, folder, 2, "--deepspeed_config", "ds_config_offload.json", **bare).wait()
    refusals.assert_refused(
        run, 1, "ds_config_offload.json", "cpu_adam", "install ninja and g++", "DS_BUILD_CPU_ADAM=1"
    )
