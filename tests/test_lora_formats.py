"""What lora promises of JSON lines: what counts, on any number of processes; what is saved; what is refused."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from harness import outputs, refusals, runs
from harness.launchers import copy_example
from tests import test_lora
from tests.test_lora import train  # noqa: F401 (a fixture)
from tests.test_lora_sharded import alone  # noqa: F401 (a fixture)

pytestmark = pytest.mark.only("lora")
WORDS = ("river", "the bell", "a map of the rivers", "boat", "नदी", "who carries the lamp")
Rows = list[dict[str, object]]


def prompts() -> Rows:
    """Return 60 prompts with completions of very different lengths."""
    words = [f" {WORDS[i % 6]}" * (1 + 3 * (i % 5 == 0)) for i in range(60)]
    return [{"prompt": f"{i}: {WORDS[i % 4]}", "completion": word} for i, word in enumerate(words)]


def texts() -> Rows:
    """Return 60 texts of different lengths with one of three labels, which their last letter tells.

    In some the token that also pads a batch stands within the text.
    """
    between = [("", "<|end|>")[i % 7 == 0] for i in range(60)]
    words = [f"{WORDS[i % 5]}{between[i]} {'abc'[i % 3]}" for i in range(60)]
    return [{"text": word, "label": ("low", "middle", "top")[i % 3]} for i, word in enumerate(words)]


KINDS: dict[str, Callable[[], Rows]] = {"prompts": prompts, "labels": texts}


def write(path: Path, rows: Rows) -> Path:
    """Write objects as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def arguments(folder: Path, rows: Rows, **changed: object) -> Namespace:
    """Return arguments of train.py for one process, which reads these lines."""
    others = {"text_file": write(folder / "lines.jsonl", rows), "context": 64, "world_size": 1, "max_grad_norm": None}
    others |= {"lr": 0.01, "warmup_steps": 0, "checkpoint_every": None}
    return test_lora.arguments(folder, **others | changed)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Have these small models computed by one thread: several would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_gpt2(folder: Path) -> None:
    """Write a GPT-2 without dropout, which computes in fp64 throughout, in the place of a folder's model."""
    sizes = test_lora.GPT2 | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    test_lora.write_model(folder / "model", "GPT2LMHeadModel", **sizes)


def test_targets(example: str, folder: Path, train: ModuleType) -> None:  # noqa: F811
    """The targets are the completion's tokens and the one that ends it, and padding has no part in the outputs.

    The tokenizer has no other token to pad with: the one that ends a completion counts all the same, else the model
    would never stop (huggingface/trl 976, huggingface/transformers 22794). Where a token of the whole has letters of
    both, the prompt has its tokens alone, and all of the completion counts (ohdearquant/lattice 1545).
    """
    pairs = {"Say: t": "he river, the bell", "A long prompt about the river.\n": "Yes"}
    rows: Rows = [{"prompt": prompt, "completion": word} for prompt, word in pairs.items()]
    args = arguments(folder, rows * 2)
    tokenizer, train_set, test_set = test_lora.load_data(train, args)
    assert tokenizer.pad_token_id is None and args.padding == tokenizer.eos_token_id
    seam, alone_ = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Say: the", "Say: t"))
    assert seam[: len(alone_)] != alone_, "no token has letters of both"
    inputs, targets = train_set[[0, 1, 2]]
    assert len(test_set) == 1 and inputs.shape == targets.shape and inputs.shape[1] % 8 == 0
    assert args.targets == (targets != -100).sum().item() / 3
    model = test_lora.load(folder / "model").eval()
    for tokens, target in zip(inputs, targets, strict=True):
        begin, *_, last = (target != -100).nonzero().flatten().tolist()
        assert (target[begin : last + 1] != -100).all() and target[last] == tokenizer.eos_token_id
        assert target[begin:last].equal(tokens[begin + 1 : last + 1])
        prompt, completion = tokenizer.decode(tokens[: begin + 1]), tokenizer.decode(target[begin:last])
        assert pairs[prompt] == completion
        assert tokens[: begin + 1].tolist() == train.text_data.prompt_tokens(tokenizer, prompt)
        with torch.no_grad():
            padded, bare = model(tokens[None]).logits[0, : last + 1], model(tokens[None, : last + 1]).logits[0]
        assert torch.allclose(padded, bare, atol=1e-5)


def trained(train: ModuleType, args: Namespace, train_set: Any, size: int, parts: int) -> tuple[float, Any]:  # noqa: F811
    """Train an epoch in this process; return its loss and the trained weights."""
    args.batch_size, args.gradient_accumulation_steps = size, parts
    model = train.load_model(args)
    weights = train.trained_weights(model)
    optimizer = torch.optim.AdamW(weights.values(), args.lr)
    loader = DataLoader(train_set, sampler=BatchSampler(range(48), size, drop_last=True), batch_size=None)
    progress = {"step": 0, "history": [], "seconds": 0.0, "sums": torch.zeros(2, dtype=torch.float64)}
    ddp_model = DistributedDataParallel(model)
    loss, targets, _ = train.train_one_epoch(args, ddp_model, loader, optimizer, torch.device("cpu"), progress)
    _, labels = train_set[list(range(48))]
    assert targets == pytest.approx((labels != -100).sum().item(), rel=1e-12)
    return loss, {name: weight.detach().clone() for name, weight in weights.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("alone")
def test_accumulated(example: str, folder: Path, train: ModuleType, kind: str) -> None:  # noqa: F811
    """12 samples in one batch, in 2 or in 6 are the same training, though each batch has other numbers of targets.

    So it is with that many processes, whose gradients are averaged as well. A mean over each batch's own targets is
    another training (huggingface/transformers 24725, ml-explore/mlx-lm 1413). The loss is the mean over all targets.
    """
    write_gpt2(folder)
    args = arguments(folder, KINDS[kind](), precision="fp64", lora_dropout=0.0)
    _, train_set, _ = test_lora.load_data(train, args)
    loss, weights = trained(train, args, train_set, 12, 1)
    for size, parts in ((6, 2), (2, 6)):
        other, others = trained(train, args, train_set, size, parts)
        assert other == pytest.approx(loss, rel=1e-9)
        assert outputs.largest_difference(weights, others) < 1e-9
    args.lr = 0.0
    loss, weights = trained(train, args, train_set, 6, 1)
    inputs, labels = train_set[list(range(48))]
    model = train.load_model(args)
    with torch.no_grad():
        logits = model.eval()(inputs, use_cache=False).logits
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, -2), labels.flatten()).item(), rel=1e-9)


@pytest.mark.parametrize("case", ["Llama", "GPT-2", "Llama, bf16"])
@pytest.mark.usefixtures("alone")
def test_classifier(example: str, folder: Path, train: ModuleType, case: str) -> None:  # noqa: F811
    """The adapters have the trained head, and with them, or merged, transformers computes the same (peft 310, 577).

    The answer is that at the last token that is no padding (transformers 35352). The head is fp32, also in bf16.
    """
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    if case == "GPT-2":
        write_gpt2(folder)
    args = arguments(folder, texts(), precision="bf16" if "bf16" in case else "fp32", merge=True)
    tokenizer, train_set, test_set = test_lora.load_data(train, args)
    assert args.classes == ["low", "middle", "top"] and len(train_set) == 54 and len(test_set) == 6
    model = train.load_model(args)
    weights = train.trained_weights(model)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    (head,) = (name for name in weights if "lora_" not in name)
    before = weights[head].detach().clone()
    optimizer = torch.optim.AdamW(weights.values(), 0.01)
    inputs, labels = train_set[list(range(32))]
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16, "bf16" in case):
            logits = model.train()(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        assert all(weight.grad is not None for weight in weights.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and not weights[head].equal(before)
    (folder / "output").mkdir()
    with torch.no_grad():
        found = model.float().eval()(inputs, use_cache=False).logits
    train.model_files.save(args, model, tokenizer, folder / "output" / "adapter")
    place = folder / "output" / "adapter"
    config = AutoConfig.from_pretrained(place)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder / "model", config=config)
    loaded = PeftModel.from_pretrained(loaded, place).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "output" / "merged").eval().float()
    words = [tokenizer.decode(train_set.texts[i]) for i in range(32)]
    again = AutoTokenizer.from_pretrained(place)(words, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        assert torch.allclose(loaded(**again).logits, found, atol=0.2 if "bf16" in case else 1e-4)
        assert torch.allclose(merged(**again).logits, found, atol=0.2 if "bf16" in case else 1e-4)
    assert list(merged.config.id2label.values()) == args.classes


GOOD = '{"prompt": "1 + 1 =", "completion": " 2"}\n'
LABEL = '{"text": "a river", "label": "water"}\n'
BAD: dict[str, tuple[str | bytes, list[str]]] = {
    "no JSON": (f"{GOOD}\nprompt: 3\n", ["line 3: it is no JSON", "one object in each line"]),
    "a list": (f"[{GOOD.strip()}]\n", ["line 1: it is a list: have one object in each line", "jq -c"]),
    "a number alone": ("5\n", ["line 1: it is no JSON object"]),
    "no completion": (GOOD + '{"prompt": "x", "answer": "y"}\n', ['line 2: it has no "completion" but "prompt", "ans']),
    "messages": ('{"messages": []}\n', ['line 1: it has no "text" but "messages"', "turns chats into prompts"]),
    "texts alone": ('{"text": "a"}\n' * 9, ['line 1: it has no "label"', "tokenize_text.py takes texts alone"]),
    "all keys": ('{"prompt": "x", "completion": "y", "text": "x", "label": "y"}', ["line 1: it has the keys of both"]),
    "both kinds": (GOOD + LABEL, ['line 2: it has no "prompt" but "text", "label"']),
    "a number": (GOOD + '{"prompt": 1, "completion": "2"}', ['line 2: its "prompt" is 1, and has to be a text']),
    "nothing": (GOOD + '{"prompt": "x", "completion": ""}', ['line 2: its "completion" is empty']),
    "null": (GOOD + '{"prompt": "x", "completion": null}', ['line 2: its "completion" is null']),
    "no prompt": (GOOD + '{"prompt": "", "completion": "x"}', ["line 2: its prompt has no token"]),
    "a float": (LABEL + '{"text": "x", "label": 0.5}', ['its "label" is 0.5, and has to be a text or a whole number']),
    "a truth": (LABEL + '{"text": "x", "label": true}', ['line 2: its "label" is true']),
    "surrogate": (GOOD + '{"prompt": "\\ud800", "completion": "x"}', ["line 2", "half of a surrogate pair"]),
    "not UTF-8": (GOOD.encode() + b'{"prompt": "caf\xe9", "completion": "x"}', ["line 2: it is not UTF-8", "iconv"]),
    "one line": (GOOD, ["has 1 line, and needs one to train on and one to test with"]),
    "empty": ("\n\n", ["has 0 lines"]),
    "one label": (LABEL * 9, ["has the label water alone", "nothing to learn"]),
    "padding": (LABEL + '{"text": "<|end|>", "label": "end"}', ["line 2: its text has no token"]),
    "no room": (
        GOOD * 4 + json.dumps({"prompt": "river " * 40, "completion": "x"}) + "\n",
        ["the prompt of 1 line, such as line 5, leaves no room", "--context 64: --context 1"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_line(
    example: str,
    folder: Path,
    train: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    """A line that cannot be used ends the run with one line, which has its number and says what is wrong."""
    content, expected = BAD[case]
    args = arguments(folder, [])
    args.text_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match="2"):
        test_lora.load_data(train, args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("train.py: error: --text-file ") and all(text in line for text in expected), line


def lines_for_gpt2(folder: Path, kind: str) -> list[object]:
    """Write a GPT-2 and the lines of a kind; return arguments that take both."""
    write_gpt2(folder)
    write(folder / "lines.jsonl", KINDS[kind]())
    return ["--text-file", "lines.jsonl", "--context", 64, "--precision", "fp64", "--epochs", 2, "--lr", 0.01]


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_processes(example: str, folder: Path, kind: str) -> None:
    """One, two and four processes with the same global batch train the same: losses and weights to 1e-9 in fp64."""
    words = [*lines_for_gpt2(folder, kind), "--global-batch", 12]
    layouts = {"one": (1, 12), "two": (2, 6), "accumulated": (2, 2), "four": (4, 3)}
    for name, (processes, size) in layouts.items():
        run = runs.train(example, folder, processes, *words, "--batch-size", size, "--output-dir", name)
        row = outputs.read_metrics(folder / name)[-1]
        metric = "perplexity" if kind == "prompts" else "test_accuracy"
        assert metric in row and ("tokens_per_second" in row) == (kind == "prompts")
        said = f"perplexity {row[metric]:.2f}" if kind == "prompts" else f"test acc {row[metric]:.2%}"
        assert f"finished: test loss {row['test_loss']:.4f}, {said}, adapter in" in run.stdout
        one = outputs.read_metrics(folder / "one")
        for before, after in zip(one, outputs.read_metrics(folder / name), strict=True):
            for column in ("train_loss", "test_loss", metric):
                assert after[column] == pytest.approx(before[column], rel=1e-9)
        weights = (outputs.read_model(folder / part) for part in ("one", name))
        assert outputs.largest_difference(*weights) < 1e-9


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed(example: str, folder: Path, source: Path, tmp_path: Path, kind: str) -> None:
    """Stopped in mid-epoch and resumed, a run has the same bits; it is refused with a changed line, or another kind."""
    whole = copy_example(source, tmp_path / "whole")
    for place in (folder, whole):
        write(place / "lines.jsonl", KINDS[kind]())
    words = ["--text-file", "lines.jsonl", "--context", 64, "--lora-dropout", 0.1, "--epochs", 4]
    runs.train(example, whole, 2, *words)
    run = runs.start(example, folder, 2, *words)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    (other,) = set(KINDS) - {kind}
    rows = KINDS[kind]()
    for changed in ([*rows[1:], rows[0]], KINDS[other]()):
        write(folder / "lines.jsonl", changed)
        refused = runs.start(example, folder, 2, *words, "--resume").wait()
        refusals.assert_refused(refused, 1, "checkpoint.pt is from a run with text ", "of 60 lines")
    write(folder / "lines.jsonl", rows)
    runs.train(example, folder, 2, *words, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", whole / "output")
