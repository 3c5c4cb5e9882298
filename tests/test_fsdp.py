"""What only fsdp promises: all meshes compute the same, a checkpoint fits any of them, each process holds its share."""

import copy
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common import data
from common.models import TinyGPT
from harness import edits, outputs, readme, refusals, runs, samples
from harness.launchers import LAUNCHERS
from harness.runs import Reference
from tests import held_memory

pytestmark = pytest.mark.only("fsdp")

# 23 steps of two micro-batches in an epoch, for any mesh; the gradients are clipped in most of them. Of the 21 test
# samples one of two groups has so few that it has to fill up its batches.
SMALL = "--tokens 6800 --context 32 --width 64 --gradient-accumulation-steps 2 --max-grad-norm 0.4"
MESHES = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (2, 2), "2x2": (4, 2)}  # groups x tensor parallel: their arguments


def arguments(mesh: str) -> tuple[int, list[str]]:
    """Return the number of processes of a mesh, and train.py's arguments for it: 8 samples in a step."""
    processes, tensor_parallel = MESHES[mesh]
    batch = 4 * tensor_parallel // processes
    return processes, [*SMALL.split(), "--tensor-parallel", str(tensor_parallel), "--batch-size", str(batch)]


def plain_training() -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train by plain PyTorch, in one process and in fp64, what fsdp trains in two epochs.

    Return the weights after the first one, and the mean training and test losses of both.
    """
    tokens, _ = data.markov_tokens(6800)
    train_set, test_set = data.Tokens(tokens[:-680], 32), data.Tokens(tokens[-680:], 32)
    torch.set_num_threads(1)
    model = TinyGPT(context=32, width=64).double()
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(number)
            if weight.dim() > 1:
                weight.copy_(torch.empty_like(weight).normal_(0, 0.02, generator=generator))
            else:
                weight.fill_(float(name.endswith("weight")))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    means, test_losses, clipped = [], [], 0
    assert len(test_set) == 21
    for epoch in range(2):
        losses = []
        for batch in samples.batches(len(train_set), 0, 1, 8, epoch):
            inputs, labels = train_set[batch]
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4).item() > 0.4
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            weights = copy.deepcopy(model.state_dict())
        means.append(sum(losses) / len(losses))
        inputs, labels = test_set[list(range(21))]
        with torch.no_grad():
            test_losses.append(F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item())
    assert len(losses) >= 20 and clipped >= 10, (losses, clipped)
    return weights, means, test_losses


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.runs("weekly")] * (mesh != "2x2"), id=mesh) for mesh in MESHES]
)
def test_mesh(example: str, folder: Path, mesh: str) -> None:
    """Every mesh takes the steps of plain PyTorch in one process, gradients clipped and accumulated, to 1e-9 in fp64.

    Then another mesh continues with the second epoch, and has plain PyTorch's loss, too. Dropout would differ by group,
    and be the same within one, whose processes have parts of the same layer. Each step has a seed of its own: a run
    that goes on within an epoch draws the same numbers.
    """
    processes, words = arguments(mesh)
    seed = '            torch.manual_seed(args.seed + progress["step"] * args.groups + group_rank)\n'
    edits.edit(folder / "train.py", seed, f"{seed}            print(f'seed {{torch.initial_seed()}}', flush=True)\n")
    first = runs.train(example, folder, processes, *words, "--epochs", 1, "--precision", "fp64")
    groups = processes // MESHES[mesh][1]
    assert f"{groups} data-parallel group" in first.stdout
    seeds = sorted(map(int, re.findall(r"seed (\d+)", first.stdout)))
    assert seeds == sorted([*range(23 * groups)] * MESHES[mesh][1])
    weights, losses, test_losses = plain_training()
    assert outputs.largest_difference(outputs.read_model(folder / "output"), weights) < 1e-9
    processes, words = arguments("1x1" if mesh == "2x2" else "2x2")
    run = runs.train(example, folder, processes, *words, "--precision", "fp64", "--epochs", 2, "--resume")
    assert re.search(
        r"continuing after epoch 1 of 2\n(.*\n)+the checkpoint was saved by \d data-parallel groups? of \d\n",
        run.stdout,
    )
    rows = outputs.read_metrics(folder / "output")
    assert [row["world_size"] for row in rows] == [MESHES[mesh][0], processes]
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert [row["test_loss"] for row in rows] == pytest.approx(test_losses, rel=1e-9)


@pytest.mark.runs("weekly")  # test_compile.py has the others
def test_compiled(example: str, folder: Path) -> None:
    """Compiled, it takes plain PyTorch's steps, too, to 1e-9 in fp64, and the names of the weights stay.

    Gradients are clipped and accumulated, and the last batch of the evaluation is smaller. See test_compile.py.
    """
    processes, words = arguments("2x1")
    runs.train(example, folder, processes, *words, "--epochs", 1, "--precision", "fp64", "--compile")
    weights, losses, test_losses = plain_training()
    assert outputs.largest_difference(outputs.read_model(folder / "output"), weights) < 1e-9
    (row,) = outputs.read_metrics(folder / "output")
    assert [row["train_loss"], row["test_loss"]] == pytest.approx([losses[0], test_losses[0]], rel=1e-9)


@pytest.mark.runs("weekly")
def test_vocabulary(example: str, folder: Path) -> None:
    """Of another vocabulary come random tokens; a resume with another one is refused."""
    words = ["--tokens", "4000", "--context", "32", "--width", "32", "--layers", "1", "--epochs", "1"]
    run = runs.train(example, folder, 2, *words, "--vocabulary", 5000)
    assert "entropy of the source: 8.5172 nats per token" in run.stdout
    assert json.loads((folder / "output" / "model.json").read_text())["vocab"] == 5000
    row = outputs.read_metrics(folder / "output")[-1]
    assert row["test_loss"] == pytest.approx(8.5172, abs=0.1)  # nothing can be learnt
    run = runs.start(example, folder, 2, *words, "--vocabulary", 5001, "--resume").wait()
    status = LAUNCHERS[example].status_after_bad_input
    refusals.assert_refused(run, status, "is from a run with vocabulary 5000")


@pytest.mark.runs("weekly")
def test_own_tokens(example: str, folder: Path) -> None:
    """With the README's recipe it learns tokens above 255."""
    for text in readme.fences(folder / "README.md", "diff"):
        edits.apply_diff(folder / "train.py", text)
    torch.save(torch.arange(4_000) % 50 + 50_000, folder / "tokens.pt")
    words = "--text-file tokens.pt --epochs 2 --tensor-parallel 2 --width 32 --layers 1 --lr 1e-2"
    runs.train(example, folder, 2, *words.split())
    rows = outputs.read_metrics(folder / "output")
    assert rows[1]["test_loss"] < rows[0]["test_loss"] - 1
    model = TinyGPT(**json.loads((folder / "output" / "model.json").read_text()))
    model.load_state_dict(outputs.read_model(folder / "output"))
    assert len(model.token.weight) == 50_304


def note_shards(folder: Path, seconds: float = 0) -> None:
    """Have each process say when its shards are written, and wait so long before run.json names them."""
    line = "    shared = gather(files, group)"
    note = f"    print('shards of', folder.name, flush=True)\n    __import__('time').sleep({seconds})\n"
    edits.edit(folder / "plumbing" / "shards.py", line, note + line)


@pytest.mark.runs("weekly")  # torchrun_multinode has ordinary tests of the same functions
def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; resumed, the same bits.

    Until then it saves every 20th step. The resumed run computes its activations twice, which changes no bit either.
    """
    note_shards(folder)
    run = runs.start(example, folder, 2, "--checkpoint-every", 20)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    written = re.findall(r"shards of (\S+)", run.stdout)[::2]  # both processes say so
    assert written[:3] == ["epoch0-step20", "epoch0-step40", "epoch1-step0"], run.stdout
    runs.train(example, folder, 2, "--resume", "--gradient-checkpointing")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)
    assert [path.name for path in (folder / "output" / "checkpoint").glob("epoch*")] == ["epoch5-step0"]


def test_metrics_and_sample(example: str, folder: Path, reference: Reference) -> None:
    """The test loss in metrics.csv is that of model.pt, computed here; sample.py writes what the model has learnt."""
    shape = json.loads((reference.output / "model.json").read_text())
    model = TinyGPT(**shape)
    model.load_state_dict(outputs.read_model(reference.output))
    tokens, entropy = data.markov_tokens(60_000)
    test_set = data.Tokens(tokens[54_000:], 64)
    inputs, labels = test_set[list(range(len(test_set)))]
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).flatten(0, 1).double(), labels.flatten()).item()
    assert outputs.read_metrics(reference.output)[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert f"entropy of the source: {entropy:.4f} nats" in reference.stdout

    line = readme.command("examples/fsdp/README.md", "python sample.py")
    run = readme.run_block([f"{line} --output-dir {reference.output} --length 600"], folder)
    assert len(run.stdout) == 601 and run.stdout.count("?") < 30, run.stdout + run.stderr
    written = torch.tensor([ord(letter) - 64 for letter in run.stdout.strip("\n").replace("?", "")])
    pairs = torch.bincount(tokens[:-1].long() * 32 + tokens[1:].long(), minlength=32 * 32).view(32, 32) + 0.5
    likelihood = (pairs / pairs.sum(1, keepdim=True)).log()[written[:-1], written[1:]].mean().item()
    assert -likelihood < entropy + 0.3, "the sample does not look like the source"
    refused = runs.Run([*line.split(), "--output-dir", "nowhere"], folder).wait()
    assert refused.status == 2 and "there is no nowhere/model.json" in refused.stderr


@pytest.mark.runs("weekly")
def test_stopped_and_continued_on_another_mesh(example: str, folder: Path) -> None:
    """Stopped in mid-epoch on 2x2, continued on 1x2: plain PyTorch's losses; tokens and operations count once."""
    processes, words = arguments("2x2")
    run = runs.start(example, folder, processes, *words, "--precision", "fp64", "--epochs", 2)
    run.read_until("entropy of the source")
    step = runs.ask_to_stop(example, run)
    assert "of epoch 1: use --resume" in run.stdout
    processes, words = arguments("1x2")
    words += ["--precision", "fp64", "--epochs", "2", "--resume", "--peak-tflops", "0.001"]
    run = runs.train(example, folder, processes, *words)
    runs.assert_continued(folder / "output", step)
    assert "the checkpoint was saved by 2 data-parallel groups of 2\n" in run.stdout
    rows = outputs.read_metrics(folder / "output")
    _, losses, test_losses = plain_training()
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert [row["test_loss"] for row in rows] == pytest.approx(test_losses, rel=1e-9)
    speed = rows[1]["tokens_per_second"]
    assert rows[1]["samples_per_second"] * rows[1]["seconds"] == pytest.approx(23 * 8)
    assert speed == pytest.approx(32 * rows[1]["samples_per_second"])
    products = sum(weight.numel() for weight in TinyGPT(context=32, width=64).parameters()) - 32 * 64
    operations = 6 * products + 12 * 2 * 64 * 32  # per token; two layers, width 64, context 32
    share = speed * operations / 2 / 0.001e12
    assert f"{speed:6.0f} tokens/s, {share:.1%} of peak | " in run.stdout, run.stdout


@pytest.mark.runs("weekly")
def test_one_of_four_hangs(example: str, folder: Path) -> None:
    """On a mesh with groups of its own, too, the others give up after --timeout."""
    run = runs.start(example, folder, 4, "--tensor-parallel", 2, "--timeout", 20)
    run.read_epoch(1)
    os.kill(max(run.workers()), signal.SIGSTOP)
    run.wait(20 + 60, leaves=60)
    assert run.status > 0 and "finished" not in run.stdout


@pytest.mark.runs("weekly")
def test_disk_full(example: str, folder: Path) -> None:
    """Shards that cannot be written end the run with one line."""
    command = ["bash", "-c", 'ulimit -f 400; exec "$@"', "bash", *LAUNCHERS[example].command(2)]
    run = runs.Run(command, folder).wait()
    refusals.assert_refused(run, 1, "cannot write output/checkpoint", "is the disk full")
    assert not (folder / "output" / "checkpoint" / "run.json").exists()


@pytest.mark.runs("weekly")
def test_damaged_run_json(example: str, folder: Path, reference: Reference) -> None:
    """Any changed bit of run.json is noticed, unless it says the same all the same (in the last digit of a number)."""
    program = (
        "import argparse, json, pathlib\n"
        "from plumbing import checks, shards\n"
        "checks.look_at_model = lambda *_: None\n"
        "args = argparse.Namespace(output_dir=pathlib.Path('output'), resume=True, epochs=5, scale_lr=None)\n"
        "path = args.output_dir / 'checkpoint' / 'run.json'\n"
        "content = path.read_bytes()\n"
        "vars(args).update(json.loads(content)['settings'])\n"
        "assert shards.read_checkpoint(args, None)['tag'] == 'epoch5-step0'\n"
        "for place in range(0, len(content), 7):\n"
        "    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])\n"
        "    found = shards.read_checkpoint(args, None)\n"
        "    if isinstance(found, str) or json.loads(path.read_bytes()) != json.loads(content):\n"
        "        print(found)\n"
    )
    shutil.copytree(reference.output, folder / "output")
    run = runs.Run(["python", "-c", program], folder).wait()
    lines = run.stdout.splitlines()
    assert run.status == 0 and len(lines) > 100, run.stderr
    says = "output/checkpoint/run.json is damaged or cannot be read ("
    assert all(says in line and "move it away" in line for line in lines), lines


TEXT = "वह हर सुबह नदी के किनारे टहलती है और पानी की आवाज़ सुनती है। "


@pytest.mark.runs("weekly")
def test_text(example: str, folder: Path) -> None:
    """A text in any script is learnt byte by byte; the sample goes on in it, from a prompt."""
    (folder / "text").write_text(TEXT * 120, encoding="utf-8")
    words = "--text-file text --epochs 4 --batch-size 4 --tensor-parallel 2 --precision bf16"
    run = runs.train(example, folder, 2, *words.split())
    assert "TinyGPT on text: 2 processes" in run.stdout and "entropy" not in run.stdout
    assert outputs.read_metrics(folder / "output")[-1]["test_loss"] < 0.5
    assert all(weight.dtype == torch.float32 for weight in outputs.read_model(folder / "output").values())
    command = ["python", "sample.py", "--prompt", "वह हर ", "--temperature", "0", "--length", "60"]
    assert runs.Run(command, folder).wait().stdout.startswith("वह हर सुबह नदी")


@pytest.mark.runs("weekly")
def test_killed_while_saving(example: str, folder: Path, reference: Reference) -> None:
    """Killed while a checkpoint is being written: the one before is resumed, to the same bits."""
    note_shards(folder, seconds=5)
    run = runs.start(example, folder, 2)
    run.read_until("shards of epoch2-step0")
    runs.kill_all(example, run)
    assert {path.name for path in (folder / "output" / "checkpoint").glob("epoch*")} == {"epoch1-step0", "epoch2-step0"}
    last = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch 1 of 5" in last.stdout
    outputs.assert_same_run(folder / "output", reference.output)


# In the place of a slow disk: the second checkpoint is complete only when there is a file.
HOLD = """
    while "epoch2" in str(folder) and not os.path.exists("go"):
        threading.Event().wait(0.05)
"""


@pytest.mark.runs("weekly")
def test_async_save(example: str, folder: Path, reference: Reference) -> None:
    """With --async-save training goes on while a checkpoint is written, to the same bits.

    Killed meanwhile, the one before is resumed. The final weights are those that are written afterwards.
    """
    first = "    rank = dist.get_rank()\n    files = {}\n"
    edits.edit(folder / "plumbing" / "shards.py", first, HOLD.lstrip("\n") + first)
    run = runs.start(example, folder, 2, "--async-save")
    run.read_epoch(2)  # although the checkpoint of epoch 2 is not complete
    runs.kill_all(example, run)
    (folder / "go").touch()
    last = runs.train(example, folder, 2, "--async-save", "--keep-sharded", "--resume")
    assert "continuing after epoch 1 of 5" in last.stdout and not (folder / "output" / "model.pt").exists()
    line = re.search(r"`(python sharded_model\.py output)` writes model\.pt", last.stdout)[1]
    runs.Run(line.split(), folder).wait()
    outputs.assert_same_run(folder / "output", reference.output)
    refused = runs.Run(["python", "sharded_model.py", "nowhere"], folder).wait()
    assert refused.status == 2 and "there is no nowhere/checkpoint/run.json" in refused.stderr


@pytest.mark.runs("weekly")
def test_async_save_stopped(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, a run with --async-save ends when that checkpoint is complete."""
    run = runs.start(example, folder, 2, "--async-save")
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    runs.train(example, folder, 2, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
def test_async_save_fails(example: str, folder: Path) -> None:
    """Shards that cannot be written in the background end the run with one line, too."""
    command = ["bash", "-c", 'ulimit -f 400; exec "$@"', "bash", *LAUNCHERS[example].command(2), "--async-save"]
    run = runs.Run(command, folder).wait()
    refusals.assert_refused(run, 1, "cannot write output/checkpoint", "is the disk full")
    assert not (folder / "output" / "checkpoint" / "run.json").exists()


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_replicas(example: str, folder: Path, tensor_parallel: int) -> None:
    """Two replicas take plain PyTorch's steps to 1e-9 in fp64; each process holds half of the model.

    Then two processes without replicas continue.
    """
    words = [*SMALL.split(), "--tensor-parallel", tensor_parallel, "--batch-size", tensor_parallel]
    run = runs.train(example, folder, 4, *words, "--epochs", 1, "--precision", "fp64", "--replicas", 2)
    groups = f"{4 // tensor_parallel} data-parallel groups of {tensor_parallel} in 2 replicas"
    whole, own = map(int, re.search(rf"{groups}; of (\d+) parameters this process holds (\d+)", run.stdout).groups())
    assert own < 0.55 * whole
    weights, losses, test_losses = plain_training()
    assert outputs.largest_difference(outputs.read_model(folder / "output"), weights) < 1e-9
    processes, words = arguments("2x1")
    run = runs.train(example, folder, processes, *words, "--precision", "fp64", "--epochs", 2, "--resume")
    assert f"the checkpoint was saved by {groups}\n" in run.stdout
    rows = outputs.read_metrics(folder / "output")
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert [row["test_loss"] for row in rows] == pytest.approx(test_losses, rel=1e-9)


def test_refused(example: str, folder: Path) -> None:
    """Each argument that does not fit the others, and each text that cannot be used, is refused with one line."""
    texts = {
        "--width 100 --heads 3": ["--width 100", "multiple of --heads 3"],
        "--vocabulary 3": ["--vocabulary must be 4 or more, not 3"],
        "--vocabulary 50304 --text-file train.py": [
            "256 kinds of tokens",
            "--vocabulary 50304",
            "leave one of the two",
        ],
        "--tensor-parallel 3": ["--heads 4", "multiple of --tensor-parallel 3"],
        "--tensor-parallel 2": ["3 processes", "--tensor-parallel 2"],
        "--replicas 2": ["--replicas must divide the 3 data-parallel groups", "2 does not"],
        "--max-grad-norm -1": ["--max-grad-norm", "0 or more"],
        "--peak-tflops -1": ["--peak-tflops", "0 or more"],
        "--cpu-offload": ["--cpu-offload needs GPUs"],
        "--layers 0": ["--layers", "1 or more"],
        "--text-file a.JSONL": ["a.JSONL would be learnt as it stands", "tokenize_text.py"],
        "--text-file a.csv": ["a.csv would be learnt as it stands"],
    }
    started = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}
    refusals.assert_arguments_refused(folder, texts, **started)
    (folder / "empty").touch()
    texts = {
        "--text-file missing": ["missing", "No such file"],
        "--text-file empty": ["empty is empty"],
        "--tokens 100": ["too few for one window of 64", "longer text"],
    }
    refusals.assert_arguments_refused(folder, texts, "train.load_data(train.parse_args())", **started)
    words = "--tokens 1200 --batch-size 5 --gradient-accumulation-steps 2"
    run = runs.start(example, folder, 2, *words.split()).wait(300)
    text = "--batch-size 5 times 2 (gradient accumulation) is above the 8 samples of each process"
    refusals.assert_refused(run, 1, text)


OWN_MODELS = """
import os, sys
import torch, train, sharded_model, tensor_parallel
from torch import nn
from torch.nn import functional as F
from common import models

class Seen(models.Block):
    def forward(self, x):
        layers, size, normed = (self.query, self.key, self.value), (-1, self.head_width), self.norm1(x)
        query, key, value = (layer(normed).unflatten(2, size).transpose(1, 2) for layer in layers)
        mask = self.mask[: x.shape[1], : x.shape[1]].bool() if hasattr(self, "mask") else None
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))

class Buffer(Seen):
    def __init__(self, width, heads, kind=torch.float32):
        super().__init__(width, heads)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).to(kind), persistent=False)

class Bool(Buffer):
    def __init__(self, width, heads):
        super().__init__(width, heads, torch.bool)

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.gamma)

class Gamma(models.Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.norm2 = Norm(width)

class Statistics(models.Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.count = nn.BatchNorm1d(width)

class Unused(models.Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.other = nn.Linear(width, width)

class Place(models.Block):
    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.register_buffer("place", torch.tensor(0))

class Average(models.Block):
    def forward(self, x):
        return super().forward(x + x.mean(1, keepdim=True))

def make(block):
    class Own(models.TinyGPT):
        def __init__(self, vocab, context, width, heads, layers):
            super().__init__(vocab, context, width, heads, layers)
            self.blocks = nn.Sequential(*[block(width, heads) for _ in range(layers)])
    return Own

def leave(status):
    raise SystemExit(status)

def set_buffers(model):
    for buffer in model.buffers():
        buffer.copy_(torch.tril(torch.ones(64, 64)) if buffer.dim() else 0)

os._exit = leave
args = train.parse_args()
args.entropy = None
device, mesh = train.setup(args)
kinds = (models.Block, Seen, Buffer, Bool, Gamma, Statistics, Unused, Average, Place)
cases = {kind.__name__: kind for kind in kinds} | {"set": Buffer, "set0": Place}
for name, kind in cases.items():
    train.TinyGPT = make(kind)
    print("case", name, flush=True)
    model = train.build_model(args, mesh, device)
    if "set" in name:
        set_buffers(model)
    args.parameters = sum(weight.numel() for weight in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    train.initialise(args, model)
    try:
        sharded_model.print_mesh(args, model, {"step": 0})
    except SystemExit:
        continue
    tokens, losses = torch.arange(32)[None] % 7, []
    for _ in range(5):
        loss = F.cross_entropy(model.train()(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        tensor_parallel.clip_grad_norm(model, 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("trained" if losses[-1] < losses[0] else losses, flush=True)
    _, saved = train.state_dict.get_state_dict(model, optimizer)
    assert saved["state"].keys() == dict(model.named_parameters()).keys(), "a resume would miss some"
"""
# What each of these models must print, beside the line on the mesh; a refused one is not trained.
OWN_PRINT = {
    "Block": "trained",
    "Seen": "train.py: error: the model is not causal, its outputs depend on later tokens",
    "Buffer": "train.py: error: the model's buffer blocks.0.mask has no values: make it in forward",
    "Bool": "train.py: error: the model's buffer blocks.0.mask has no values: make it in forward",
    "Gamma": "note: all values of blocks.0.norm2.gamma, blocks.1.norm2.gamma are 0",
    "Statistics": "train.py: error: the model's buffer blocks.0.count.running_mean has no values",
    "Unused": "trained",
    "Average": "train.py: error: the model is not causal, its outputs depend on later tokens",
    "Place": "train.py: error: the model's buffer blocks.0.place has no values: make it in forward",
    "set": "trained",
    "set0": "trained",
}


def test_own_models(example: str, folder: Path) -> None:
    """An own model that sees later tokens, or whose buffers have no values, is refused; others are trained.

    Blocks may be in an nn.Sequential, and may have weights that take no part, of which a resume finds the state; a
    weight that is 0 is named, and a number of a buffer may be 0.
    """
    (folder / "own.py").write_text("import sys\nsys.argv[0] = 'train.py'\nsys.stderr = sys.stdout\n" + OWN_MODELS)
    started = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    started |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = runs.Run(["python", "own.py", "--context", "32", "--width", "32"], folder, started).wait()
    assert run.status == 0, run.stdout + run.stderr
    printed = dict(re.findall(r"case (\w+)\n((?:(?!case ).*\n)*)", run.stdout))
    for name, text in OWN_PRINT.items():
        assert text in printed[name] and ("trained" in printed[name]) == ("error" not in text), (name, printed)


def write_tiny(folder: Path, value: float | None = None, **sizes: int) -> None:
    """Write a small TinyGPT with random weights, of which one may have another value, as train.py does."""
    shape = {"vocab": 256, "context": 32, "width": 32, "heads": 4, "layers": 2} | sizes
    model = TinyGPT(**shape)
    if value is not None:
        model.norm.weight.data[3] = value
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
    (folder / "model.json").write_text(json.dumps(shape))


SAMPLES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "not finished": (lambda folder: (folder / "model.json").unlink(), [], "there is no output/model.json: train.py"),
    "no weights": (lambda folder: (folder / "model.pt").unlink(), [], "there is no output/model.pt: train.py"),
    "jobs": (
        lambda folder: folder.rename(folder.parent / "output2"),
        ["--output-dir", "."],
        "give --output-dir output2",
    ),
    "another width": (
        lambda folder: write_tiny(folder / "other", width=64) or shutil.copy(folder / "other/model.json", folder),
        [],
        "has no model that can be read (Error(s) in loading",
    ),
    "more layers": (
        lambda folder: write_tiny(folder / "other", layers=3) or shutil.copy(folder / "other/model.pt", folder),
        [],
        "has no model that can be read",
    ),
    "damaged": (lambda folder: os.truncate(folder / "model.pt", 999), [], "has no model that can be read"),
    "nan": (lambda folder: write_tiny(folder, float("nan")), [], "norm.weight has values that are no numbers"),
    "tokens": (lambda folder: write_tiny(folder, vocab=300), [], "has a model of 300 tokens"),
    "few tokens": (lambda folder: write_tiny(folder, vocab=64), [], "has a model of 64 tokens"),
    "empty": (lambda folder: None, ["--prompt", ""], "--prompt must have a letter"),
    "surrogate": (lambda folder: None, ["--prompt", "caf\udce9"], "in UTF-8"),
    "length": (lambda folder: None, ["--length", "-1"], "--length must be 1 or more"),
    "hot": (lambda folder: None, ["--temperature", "inf"], "--temperature must be 0, or 0.01 or more"),
    "small": (lambda folder: None, ["--temperature", "1e-42"], "--temperature must be 0, or 0.01 or more"),
    "no number": (lambda folder: None, ["--temperature", "nan"], "--temperature must be 0, or 0.01 or more"),
    "seed": (lambda folder: None, ["--seed", str(2**70)], "--seed must be from 0 to"),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_sample_refuses(
    example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """sample.py refuses arguments that cannot work, and a model that is not whole or not of bytes, in one line."""
    change, words, text = SAMPLES[case]
    write_tiny(folder / "output")
    change(folder / "output")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["sample.py", *words])
    with pytest.raises(SystemExit, match="2"):
        outputs.import_file(folder / "sample.py").main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("sample.py: error: ") and text in line


GPT2 = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "gelu"}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": ({"layer_norm_epsilon": 1e-6}, "have other outputs"),
    "scaled by layer": ({"scale_attn_by_inverse_layer_idx": True}, "have other outputs"),
    "not scaled": ({"scale_attn_weights": False}, "have other outputs"),
    "output layer of its own": ({"tie_word_embeddings": False}, "have other outputs"),
    "narrow": ({"n_inner": 64}, "exact gelu"),
    "OpenAI's": ({"activation_function": "gelu_new"}, "exact gelu"),
    "layer missing": ({"n_layer": 3}, "has no weights for transformer.h.2"),
    "layer left out": ({"n_layer": 1}, "weights of further layers, such as transformer.h.1"),
    "nan": ({}, "its outputs are no numbers"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_gpt2(example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A GPT-2 that computes something else than a TinyGPT with its weights is refused, and so is half a one."""
    import transformers

    changed, text = OTHERS[case]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program = outputs.import_file(folder / "hugging_face.py")
    half = "layer" in case and "n_layer" in changed
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | ({} if half else changed)))
    if case == "nan":
        model.transformer.ln_f.weight.data[3] = float("nan")
    model.save_pretrained(folder / "gpt")
    if half:
        config = json.loads((folder / "gpt/config.json").read_text()) | changed
        (folder / "gpt/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=text):
        program.import_model(folder / "gpt", folder / "imported")
    assert not (folder / "imported").exists()
    write_tiny(folder / "output", float("inf"))
    with pytest.raises(ValueError, match="its outputs are no numbers"):
        program.export_model(folder / "output", folder / "exported")


@pytest.mark.runs("weekly")
def test_share_of_memory(example: str, folder: Path) -> None:
    """Each process holds its share of weights, gradients and Adam's state, to 5 %, on each mesh."""
    held_memory.plant(folder, "        optimizer.step()", "note_optimizer(optimizer)")
    words = ["--tokens", 4000, "--epochs", 1]
    size = sum(weight.nbytes for weight in TinyGPT(context=64).parameters()) / 1e6
    for processes, tensor_parallel in MESHES.values():
        output = f"{processes}-{tensor_parallel}"
        runs.train(example, folder, processes, *words, "--tensor-parallel", tensor_parallel, "--output-dir", output)
        held = held_memory.read(folder, processes)
        expected = {"parameters": size, "gradients": size, "optimizer state": 2 * size}
        whole = {kind: megabytes * processes for kind, megabytes in held.items()}
        assert whole == pytest.approx(expected, rel=0.05), output


@pytest.mark.runs("weekly")
def test_hugging_face(example: str, folder: Path, reference: Reference) -> None:
    """The page's commands: `transformers` loads what they write, with the same logits; the way back keeps the bits."""
    shutil.copytree(reference.output, folder / "output")
    run = readme.run_block(readme.block("docs/using-the-model.md", "python hugging_face.py export ..."), folder)
    assert run.stdout == "imported is gpt in the other format\n"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = json.loads((folder / "output" / "model.json").read_text())
    ours = TinyGPT(**shape).eval()
    ours.load_state_dict(outputs.read_model(folder / "output"))
    theirs = AutoModelForCausalLM.from_pretrained(folder / "gpt", local_files_only=True).eval()
    tokens = torch.randint(256, (4, shape["context"]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = ours(tokens), theirs(tokens).logits
    assert (one - other).abs().max() < 1e-4 < 1 < one.std()
    assert json.loads((folder / "imported" / "model.json").read_text()) == shape
    one, other = (outputs.read_model(folder / name) for name in ("imported", "output"))
    assert outputs.largest_difference(one, other) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt", local_files_only=True)
    text = "a Ä\n नदी \x00\x7f"
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text

    config = folder / "gpt" / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"gelu_new"'))
    refusals_of = {"export --output-dir none --folder x": "none"}
    refusals_of |= {"export --output-dir output --folder gpt": "gpt is there"}
    refusals_of |= {"import --output-dir x --folder gpt": "exact gelu", "import --output-dir x --folder none": "none"}
    for words, text in refusals_of.items():
        refused = runs.Run(["python", "hugging_face.py", *words.split()], folder).wait()
        (line,) = [line for line in refused.stderr.splitlines() if "error:" in line]
        assert refused.status == 2 and line.startswith("hugging_face.py: error: ") and text in line, refused.stderr
    assert not (folder / "x").exists()
