"""What only fsdp promises: all meshes compute the same, a checkpoint fits any of them, each process holds its share."""

import copy
import re
import signal
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DistributedSampler

from harness import edits, outputs, readme, runs
from harness.launchers import ROOT
from harness.runs import Reference
from tests import held_memory, refusals

pytestmark = pytest.mark.only("fsdp")

# 23 steps of two micro-batches in an epoch, for any mesh; the gradients are clipped in most of them. Of the 21 test
# samples one of two groups has a batch less than the other.
SMALL = "--tokens 6800 --context 32 --width 64 --gradient-accumulation-steps 2 --max-grad-norm 0.4 --global-batch 8"
MESHES = {  # processes, and the mesh
    "1x1": (1, ""),
    "2x1": (2, ""),
    "1x2": (2, "--tensor-parallel 2"),
    "2x2": (4, "--tensor-parallel 2"),
    "2 replicas": (4, "--replicas 2"),
    "2 replicas x2": (4, "--replicas 2 --tensor-parallel 2"),
}


def arguments(mesh: str, epochs: int) -> tuple[int, list[str]]:
    """Return the number of processes of a mesh, and train.py's arguments for it."""
    processes, words = MESHES[mesh]
    return processes, f"{SMALL} {words} --precision fp64 --epochs {epochs}".split()


def module(name: str) -> ModuleType:
    """Import a module of the example's folder."""
    return outputs.import_file(ROOT / "examples" / "fsdp" / f"{name}.py")


def plain_training() -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train by plain PyTorch, in one process and in fp64, what fsdp trains in two epochs.

    Return the weights after the first one, and the mean training and test losses of both.
    """
    train_set, test_set = module("token_data").load(None, 32, 256, 6800)
    torch.set_num_threads(1)
    model = module("tiny_gpt").TinyGPT(context=32, width=64).double()
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
    sampler = DistributedSampler(train_set, 1, 0, seed=0, drop_last=True)
    for epoch in range(2):
        losses = []
        sampler.set_epoch(epoch)
        for batch in BatchSampler(sampler, 8, drop_last=True):
            inputs, labels = train_set.__getitems__(batch)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            loss.backward()
            clipped += torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4).item() > 0.4
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            weights = copy.deepcopy(model.state_dict())
        means.append(sum(losses) / len(losses))
        inputs, labels = test_set.__getitems__(range(21))
        with torch.no_grad():
            test_losses.append(F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item())
    assert len(losses) >= 20 and clipped >= 10, (losses, clipped)
    return weights, means, test_losses


@pytest.mark.runs("full")
@pytest.mark.parametrize("mesh", MESHES)
def test_mesh(example: str, folder: Path, mesh: str) -> None:
    """Every mesh takes the steps of plain PyTorch in one process, gradients clipped and accumulated, to 1e-9 in fp64.

    It is stopped within the second epoch, and another mesh continues, with the losses of plain PyTorch.
    """
    weights, losses, test_losses = plain_training()
    processes, words = arguments(mesh, 1)
    runs.train(example, folder, processes, *words)
    assert outputs.largest_difference(outputs.read_model(folder / "output"), weights) < 1e-9
    (folder / "output" / "stop").touch()
    _, words = arguments(mesh, 2)
    run = runs.train(example, folder, processes, *words, "--resume")
    assert "stopped after step 1 of epoch 2" in run.stdout
    others, words = arguments("1x2" if mesh == "2x2" else "2x2", 2)
    run = runs.train(example, folder, others, *words, "--resume")
    assert "continuing after epoch 1 of 2, step 1\n" in run.stdout
    rows = outputs.read_metrics(folder / "output")
    assert [row["world_size"] for row in rows] == [processes, others]
    assert [row["train_loss"] for row in rows] == pytest.approx(losses, rel=1e-9)
    assert [row["test_loss"] for row in rows] == pytest.approx(test_losses, rel=1e-9)


@pytest.mark.parametrize("mesh", ["2x1", pytest.param("2x2", marks=pytest.mark.runs("full"))])
def test_share_of_memory(example: str, folder: Path, mesh: str) -> None:
    """Each process holds its share of weights, gradients and Adam's state before a step, to 5 %."""
    held_memory.plant(folder, "            optimizer.step()", "note_optimizer(optimizer)")
    processes, words = MESHES[mesh]
    runs.train(example, folder, processes, "--tokens", 4000, "--epochs", 1, *words.split())
    size = sum(weight.nbytes for weight in module("tiny_gpt").TinyGPT().parameters()) / 1e6
    expected = {"parameters": size, "gradients": size, "optimizer state": 2 * size}
    held = held_memory.read(folder, processes)
    assert {kind: megabytes * processes for kind, megabytes in held.items()} == pytest.approx(expected, rel=0.05)


def test_killed_while_saving(example: str, folder: Path, reference: Reference) -> None:
    """Killed with half a shard of epoch 2 written: --resume continues from what checkpoint.pt names, to the same bits.

    It also saves within epochs, and after their last steps. Then a damaged shard is refused, and left alone.
    """
    script, code = folder / "sharded.py", (folder / "sharded.py").read_text()
    line = "        save(folder.parent, folder.name)\n"
    planted = "        if longrun.rank == 1 and folder.name == 'step104':\n"
    planted += "            os.truncate(folder / '__1_0.distcp', 1000)\n"
    planted += f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    edits.edit(script, line, line + planted)
    run = runs.start(example, folder, 2, "--checkpoint-every", 1e-5).wait()  # after each step
    script.write_text(code)
    checkpoint = folder / "output" / "checkpoint"
    assert run.status != 0
    assert sorted(path.name for path in checkpoint.glob("step*")) == ["step104", "step104-within-epoch"]
    resumed = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch 1 of 5, step 52\n" in resumed.stdout
    outputs.assert_same_run(folder / "output", reference.output)
    assert [path.name for path in checkpoint.glob("step*")] == ["step260"]

    shard = checkpoint / "step260" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = sorted(path.name for path in (folder / "output").rglob("*"))
    refused = runs.start(example, folder, 2, "--resume", "--epochs", 6).wait()
    refusals.assert_refused(refused, 1, "output/checkpoint/step260", "damaged", "has changed")
    assert sorted(path.name for path in (folder / "output").rglob("*")) == before
    assert bytes(content) == shard.read_bytes()


def test_metrics_and_sample(example: str, folder: Path, reference: Reference) -> None:
    """The test loss in metrics.csv is that of model.pt, computed here; sample.py writes what the model has learnt."""
    data, model = module("token_data"), module("tiny_gpt").TinyGPT()
    model.load_state_dict(outputs.read_model(reference.output))
    test_set = data.load()[1]
    inputs, labels = test_set.__getitems__(range(len(test_set)))
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).flatten(0, 1).double(), labels.flatten()).item()
    assert outputs.read_metrics(reference.output)[-1]["test_loss"] == pytest.approx(loss, rel=1e-5)

    tokens = torch.from_numpy(data.random_tokens(10**6, 256)).long()
    pairs = torch.bincount(tokens[:-1] * 32 + tokens[1:], minlength=32 * 32).view(32, 32).double()
    chances = (pairs / pairs.sum(1, keepdim=True)).clamp(min=1e-9).log()
    assert -chances[tokens[:-1], tokens[1:]].mean().item() == pytest.approx(data.ENTROPY, abs=0.005)
    line = readme.command("examples/fsdp/README.md", "python sample.py")
    run = readme.run_block([f"{line} --output-dir {reference.output} --length 600"], folder)
    written = torch.tensor([ord(letter) - 64 for letter in run.stdout.strip("\n")])
    assert len(written) == 600 and -chances[written[:-1], written[1:]].mean() < data.ENTROPY + 0.5, run.stdout


TEXT = (
    "वह हर सुबह नदी के किनारे टहलती है।\r\n"
    "每天早晨，她沿着河边散步。 تمشي كل صباح 👩‍👩‍👧‍👦\n<|endoftext|> Once upon a time\n"
)


@pytest.mark.runs("full")
def test_tokens_of_a_text(example: str, folder: Path) -> None:
    """tokenize_text.py writes any script as tokens, with each kind of tokenizer; train.py and sample.py read them.

    A file of llm.c has the same tokens after its header. What cannot be used is refused in one line.
    """
    from tokenizers import Tokenizer

    (folder / "book.txt").write_text(TEXT * 200, encoding="utf-8", newline="")
    line = readme.command("examples/fsdp/README.md", "python tokenize_text.py ...")
    ways = {"data": "", "trained": " --vocabulary 300", "given": " --tokenizer trained/tokenizer.json"}
    for name, words in ways.items():
        run = readme.run_block([f"{line}{words} --data-dir {name}"], folder)
        tokens = np.concatenate([np.fromfile(folder / name / part, np.uint16) for part in ("train.bin", "val.bin")])
        if words:
            tokenizer = Tokenizer.from_file(str(folder / name / "tokenizer.json"))
            assert tokenizer.decode(tokens.tolist()) == TEXT * 200
            assert f"--data-dir {name} --vocabulary {tokenizer.get_vocab_size()}\n" in run.stdout
        else:
            assert bytes(tokens.tolist()).decode() == TEXT * 200
    assert (folder / "given" / "train.bin").read_bytes() == (folder / "trained" / "train.bin").read_bytes()

    flags = re.search("--data-dir.*", run.stdout)[0].split()
    short = ["--context", "32", "--width", "32", "--layers", "1", "--epochs", "1"]
    runs.train(example, folder, 2, *short, *flags, "--output-dir", "flat")
    path = folder / "given" / "train.bin"
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, path.stat().st_size // 2
    path.write_bytes(header.tobytes() + path.read_bytes())
    run = runs.train(example, folder, 2, *short, *flags, "--output-dir", "llm_c")
    assert "TinyGPT on given: 2 processes" in run.stdout
    outputs.assert_same_run(folder / "flat", folder / "llm_c")
    sample = runs.Run([sys.executable, "sample.py", "--output-dir", "flat", "--prompt", "वह हर"], folder).wait()
    assert sample.status == 0 and sample.stdout.startswith("वह हर"), sample.stderr

    (folder / "odd").mkdir()
    (folder / "odd" / "train.bin").write_bytes(b"abc")
    calls = {("train.main(train.parse_args())", f"--data-dir {name}"): [] for name in ("trained", "odd")}
    calls = dict(zip(calls, (["there is a token", "--vocabulary"], ["odd/train.bin", "multiple"]), strict=True))
    refusals.assert_calls_refused(folder, calls)
    before = {path.name: path.read_bytes() for path in (folder / "data").iterdir()}
    (folder / "book.txt").write_bytes(TEXT.encode("utf-16"))
    refused = runs.Run([sys.executable, "tokenize_text.py", "book.txt"], folder).wait()
    assert refused.status == 2 and "error: 'utf-8' codec" in refused.stderr.splitlines()[-1]
    left = {path.name: path.read_bytes() for path in (folder / "data").iterdir() if path.name != ".unfinished"}
    assert left == before
