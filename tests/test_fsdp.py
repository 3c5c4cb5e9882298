"""What only fsdp promises: all meshes compute the same, a checkpoint fits any of them, each process holds its share."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from common import data, models
from harness import edits, outputs, readme, refusals, runs, samples
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
    model = models.TinyGPT(context=32, width=64).double()
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
    model = models.TinyGPT(**shape)
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
    products = sum(weight.numel() for weight in models.TinyGPT(context=32, width=64).parameters()) - 32 * 64
    operations = 6 * products + 12 * 2 * 64 * 32  # per token; two layers, width 64, context 32
    share = speed * operations / 2 / 0.001e12
    assert f"{speed:6.0f} tokens/s, {share:.1%} of peak | " in run.stdout, run.stdout


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


@pytest.mark.runs("weekly")
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


@pytest.mark.runs("weekly")
def test_share_of_memory(example: str, folder: Path) -> None:
    """Each process holds its share of weights, gradients and Adam's state, to 5 %, on each mesh."""
    held_memory.plant(folder, "        optimizer.step()", "note_optimizer(optimizer)")
    words = ["--tokens", 4000, "--epochs", 1]
    size = sum(weight.nbytes for weight in models.TinyGPT(context=64).parameters()) / 1e6
    for processes, tensor_parallel in MESHES.values():
        output = f"{processes}-{tensor_parallel}"
        runs.train(example, folder, processes, *words, "--tensor-parallel", tensor_parallel, "--output-dir", output)
        held = held_memory.read(folder, processes)
        expected = {"parameters": size, "gradients": size, "optimizer state": 2 * size}
        whole = {kind: megabytes * processes for kind, megabytes in held.items()}
        assert whole == pytest.approx(expected, rel=0.05), output
