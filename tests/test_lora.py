"""What only lora promises: an exact perplexity, TRL's formats, a divided model, and one line for bad input."""

import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from harness import edits, outputs, readme, runs
from harness.launchers import ROOT
from harness.runs import Reference
from tests import refusals
from tests.test_contract import ask_to_stop

pytestmark = pytest.mark.only("lora")
PAGE = ROOT / "docs" / "using-the-model.md"


@torch.no_grad()
def loss_of(folder: Path, output: Path, samples: list[tuple[list[int], int]]) -> float:
    """Return the mean loss of the adapters' model for each token of samples, after so many tokens of each one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(model, output / "adapter").eval()
    total, count = 0.0, 0
    for ids, first in samples:
        logits = model(input_ids=torch.tensor([ids])).logits[0, first - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(ids[first:]), reduction="sum").item()
        count += len(ids) - first
    return total / count


def tokenizer_of(folder: Path):  # noqa: ANN201
    """Return the model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")


def test_perplexity(example: str, folder: Path, reference: Reference) -> None:
    """It counts each token of the end of the text once, whatever the batches and processes; the base model is left."""
    tokenizer, text = tokenizer_of(folder), (folder / "text.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text, "the tokenizer loses something"
    blocks = [(tokens[start : start + 32], 1) for start in range(0, len(tokens) - 1, 31)]
    tests = blocks[-(len(blocks) // 10) :]
    assert sum(len(ids) - 1 for ids, _ in tests) == len(tokens) - 1 - 31 * (len(blocks) - len(tests))
    row = outputs.read_metrics(reference.output)[-1]
    assert row["test_loss"] == pytest.approx(loss_of(folder, reference.output, tests), rel=1e-5)
    assert row["perplexity"] == math.exp(row["test_loss"])
    weights = outputs.read_model(reference.output)
    assert all("lora_" in name for name in weights) and sum(w.numel() for w in weights.values()) < 100_000


def write(path: Path, kind: str) -> list[dict]:
    """Write JSON lines with answers of one word to four; return them."""
    rows = []
    for number in range(60):
        prompt, answer = f"count {number}:", " one two three four"[: 4 + 5 * (number % 4)]
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows.append({"prompt": prompt, "completion": answer} if kind == "prompts" else {"messages": chat})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return rows


@pytest.mark.runs("full")
@pytest.mark.parametrize("kind", ["prompts", "messages"])
def test_formats(example: str, folder: Path, kind: str) -> None:
    """One process and two, which accumulate, train the same. Of prompts the completions alone are counted."""
    rows = write(folder / "lines.jsonl", kind)
    words = ["--text-file", "lines.jsonl", "--context", 64, "--epochs", 2, "--global-batch", 12]
    runs.train(example, folder, 1, *words, "--output-dir", "one")
    runs.train(example, folder, 2, *words, "--gradient-accumulation-steps", 3, "--output-dir", "two")
    one, two = (outputs.read_metrics(folder / name) for name in ("one", "two"))
    for before, after in zip(one, two, strict=True):
        for column in ("train_loss", "test_loss"):
            assert after[column] == pytest.approx(before[column], rel=1e-5)
    assert two[-1]["test_loss"] < two[0]["test_loss"]
    if kind == "prompts":
        tokenizer, samples = tokenizer_of(folder), []
        random.Random(0).shuffle(rows)
        for row in rows[-6:]:
            whole = tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id]
            samples.append((whole, len(tokenizer(row["prompt"])["input_ids"])))
        assert two[-1]["test_loss"] == pytest.approx(loss_of(folder, folder / "two", samples), rel=1e-5)


@pytest.mark.runs("full")
def test_stopped_with_dropout(example: str, folder: Path, tmp_path: Path) -> None:
    """Stopped within an epoch and resumed, chats with dropout end with the same bits. Each rank drops others."""
    write(folder / "lines.jsonl", "messages")
    words = ["--text-file", "lines.jsonl", "--context", 64, "--lora-dropout", 0.2, "--epochs", 3]
    runs.train(example, folder, 2, *words)
    whole = (folder / "output").rename(tmp_path / "whole")
    run = runs.start(example, folder, 2, *words)
    run.read_until("epoch  1/")
    step = ask_to_stop(run)
    runs.train(example, folder, 2, *words, "--resume")
    assert outputs.read_run(folder / "output")["starts"][-1]["step"] == step
    outputs.assert_same_run(folder / "output", whole)


FORWARD = "        loss = super().training_step(*args)\n"
COUNT = """
        parts = [getattr(weight, "to_local", lambda: weight)() for weight in self.model.parameters()]
        open(f"weights-{longrun.rank}", "w").write(str(sum(part.numel() for part in parts)))
"""


@pytest.mark.runs("full")
def test_shard(example: str, folder: Path) -> None:
    """With --shard the training is the same, also resumed, and each of two processes keeps half of the weights."""
    edits.edit(folder / "train.py", FORWARD, COUNT + FORWARD)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "whole")
    before = [int((folder / f"weights-{rank}").read_text()) for rank in range(2)]
    runs.train(example, folder, 2, "--epochs", 1, "--shard")
    after = [int((folder / f"weights-{rank}").read_text()) for rank in range(2)]
    assert max(after) < 0.55 * min(before)
    runs.train(example, folder, 2, "--epochs", 2, "--shard", "--resume")
    rows = [outputs.read_metrics(folder / name) for name in ("whole", "output")]
    for one, other in zip(*rows, strict=True):
        assert one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-5)
    assert outputs.largest_difference(*(outputs.read_model(folder / name) for name in ("whole", "output"))) < 1e-4


LOAD, END = "    tokenizer, model, shapes =", "    longrun.end("
NOTE = """    now = __import__("resource").getrusage(0).ru_maxrss / 1000
    print(now, file=open(f"peak-{longrun.rank}", "a"))
"""


@pytest.mark.runs("full")
def test_memory_of_shard(example: str, folder: Path) -> None:
    """With --shard no process ever holds the model, of 1.3 GB: not to read, train, test or save it."""
    for line in (LOAD, END):
        edits.edit(folder / "train.py", line, NOTE + line)
    for name, small, large in (("hidden_size", 256, 1024), ("intermediate_size", 768, 3072), ("layers", 4, 24)):
        edits.edit(folder / "make_model.py", f"{name}={small}", f"{name}={large}")
    assert runs.Run([sys.executable, "make_model.py"], folder).wait().status == 0
    runs.train(example, folder, 2, "--shard", "--epochs", 1, "--limit-steps", 2, "--batch-size", 1)
    size = (folder / "model" / "model.safetensors").stat().st_size / 1e6
    for rank in range(2):
        before, peak = map(float, (folder / f"peak-{rank}").read_text().split())
        assert peak - before < size, (before, peak, size)


def without_a_weight(path: Path) -> None:
    """Leave one weight out of a file of safetensors."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def test_bad_input(example: str, folder: Path, reference: Reference) -> None:
    """A model, a text or a checkpoint that cannot be used ends the run with one line and status 2."""
    for name in ("pointer", "partial", "cut", "silent"):
        shutil.copytree(folder / "model", folder / name)
    (folder / "pointer" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    without_a_weight(folder / "partial" / "model.safetensors")
    (folder / "cut" / "model.safetensors").write_bytes((folder / "model/model.safetensors").read_bytes()[:99_999])
    (folder / "silent" / "chat_template.jinja").unlink()
    good = '{"prompt": "x", "completion": "y"}\n'
    texts = {"empty": "", "broken": good + '{"prompt": "x", ', "other": good + '{"question": "x"}', "one": good}
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 999)
    write(folder / "chats.jsonl", "messages")
    shutil.copytree(reference.output, folder / "output")
    (weights,) = (folder / "output").glob("checkpoint-*/adapter_model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    cases = {
        "--model-dir pointer": ["pointer/model.safetensors is a pointer of git LFS"],
        "--model-dir partial": ["--model-dir partial", "layers.1.self_attn.q_proj"],
        "--model-dir cut": ["--model-dir cut cannot be loaded"],
        "--text-file none.txt": ["--text-file none.txt", "No such file"],
        "--text-file latin.txt": ["--text-file latin.txt", "utf-8"],
        "--text-file empty.jsonl": ["--text-file empty.jsonl: 0 samples are too few"],
        "--text-file one.jsonl": ["--text-file one.jsonl: 1 samples are too few"],
        "--text-file broken.jsonl": ["--text-file broken.jsonl: line 2: Expecting"],
        "--text-file other.jsonl": ["--text-file other.jsonl: line 2: wrong keys", "question"],
        "--text-file chats.jsonl --model-dir silent": ["--text-file chats.jsonl", "chat template"],
        "--full --shard": ["--shard divides a frozen model"],
    }
    call = "train.main(train.parse_args())"
    refusals.assert_calls_refused(
        folder,
        {(call, f"{words} --output-dir new"): says for words, says in cases.items()},
    )
    run = runs.start(example, folder, 2, "--resume").wait()
    refusals.assert_refused(run, 1, f"{weights.parent.relative_to(folder)} is damaged")


def test_using_the_model(example: str, folder: Path, reference: Reference) -> None:
    """The page's program adds the adapters to the model, which then writes without peft."""
    shutil.copytree(reference.output, folder / "output")
    (program,) = (text for text in readme.fences(PAGE, "python") if "output/merged" in text)
    run = runs.Run(["python", "-c", program], folder).wait()
    assert run.status == 0 and "The river" in run.stdout, run.stderr
