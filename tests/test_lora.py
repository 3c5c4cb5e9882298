"""What only lora promises: little is exchanged, the adapters are the model, dropout resumed, any script, messages."""

import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from common import data
from harness import edits, outputs, runs
from harness.launchers import ROOT, copy_example
from harness.runs import Reference

pytestmark = pytest.mark.only("lora")
PAGE = ROOT / "docs" / "using-the-model.md"


@pytest.fixture
def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's train.py as a module; where it would end its process, SystemExit is raised."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if re.match(r"(plumbing|model_files|sharded_model|text_data)\b", name)]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    return outputs.import_file(folder / "train.py")


def tokens_of(folder: Path, text_file: str = "text.txt") -> torch.Tensor:
    """Return the tokens of a text, by the model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    text = (folder / text_file).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text, "the tokenizer loses something"
    return torch.tensor(ids)


@torch.no_grad()
def loss_of(model: torch.nn.Module, tokens: torch.Tensor, context: int, processes: int = 2, size: int = 4) -> float:
    """Return the mean test loss that so many processes compute: each over its own windows, then the sum of all."""
    model.eval()
    count = (len(tokens) - 1) // context
    test_set = data.Tokens(tokens[(count - max(1, count // 10)) * context :], context)
    sums = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the runs: with more, the same sums are made in another order
    for rank in range(processes):
        own, total = list(range(rank, len(test_set), processes)), torch.zeros((), dtype=torch.float64)
        for start in range(0, len(own), size):
            inputs, targets = test_set[own[start : start + size]]
            logits = model(inputs, use_cache=False).logits
            total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").double().sum()
        sums.append(total)
    torch.set_num_threads(threads)
    return (sum(sums) / (len(test_set) * context)).item()


def load(path: Path) -> torch.nn.Module:
    """Return the language model in a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, local_files_only=True)


def test_adapters(example: str, folder: Path, reference: Reference) -> None:
    """With the saved adapters the base model has the test loss of metrics.csv, to the bit; without, a higher one."""
    from peft import PeftModel

    tokens = tokens_of(folder)
    before = loss_of(load(folder / "model"), tokens, 32)
    row = outputs.read_metrics(reference.output)[-1]
    model = PeftModel.from_pretrained(load(folder / "model"), reference.output / "adapter")
    assert loss_of(model, tokens, 32) == row["test_loss"] < before - 1
    assert row["perplexity"] == pytest.approx(2.718281828459045 ** row["test_loss"], rel=1e-12)
    assert row["tokens_per_second"] == pytest.approx(32 * row["samples_per_second"])
    saved = {path.name: path.stat() for path in (reference.output / "adapter").iterdir()}
    checkpoint = torch.load(reference.output / "checkpoint.pt", weights_only=True)
    assert set(saved) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert all(status.st_mode & 0o444 == 0o444 & ~os.umask(os.umask(0o022)) for status in saved.values())
    assert all("lora_" in name for name in checkpoint["model"])  # of the base model nothing is in there
    frozen = (folder / "model" / "model.safetensors").stat().st_size
    assert (reference.output / "checkpoint.pt").stat().st_size < 0.1 * frozen


def write_hindi(folder: Path) -> str:
    """Write those paragraphs of text.txt that are in Devanagari to a file; return its name."""
    paragraphs = (folder / "text.txt").read_text(encoding="utf-8").split("\n\n")
    hindi = [text for text in paragraphs if re.match("[\u0900-\u097f]", text)]
    assert len(hindi) == 5 and not re.search("[a-z]", "".join(hindi))
    (folder / "hindi.txt").write_text("\n\n".join(hindi), encoding="utf-8")
    return "hindi.txt"


COUNTING = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

def hook(group, bucket):
    with open("exchanged", "a") as file:
        print(bucket.buffer().nbytes, file=file)
    return default_hooks.allreduce_hook(group, bucket)
"""
DROPOUT = ["--text-file", "hindi.txt", "--context", "16", "--lora-dropout", "0.2", "--epochs", "3"]


def count_bytes(folder: Path) -> None:
    """Have both processes note how many bytes DDP exchanges, in the file `exchanged`."""
    (folder / "counting.py").write_text(COUNTING)
    line = "    # Train.\n"
    edits.edit(
        folder / "train.py", line, f"    ddp_model.register_comm_hook(None, __import__('counting').hook)\n{line}"
    )


@pytest.fixture
def with_dropout(example: str, source: Path, session_folder: Path) -> Reference:
    """Return what an undisturbed run with dropout on a text in Devanagari leaves, beside a count of its bytes."""

    def make(folder: Path) -> list[Reference]:
        copy_example(source, folder)
        write_hindi(folder)
        count_bytes(folder)
        run = runs.train(example, folder, 2, *DROPOUT)
        return [Reference(folder / "output", run.stdout, run.stderr)]

    return runs.references(session_folder / "lora-with-dropout", make)[0]


@pytest.mark.runs("weekly")  # torchrun_multinode has ordinary tests of the same functions
def test_stopped_and_resumed(example: str, folder: Path, with_dropout: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; resumed, with dropout: the same bits.

    The text is in Devanagari. The resumed run computes its activations twice, and also saves the merged model, which
    computes the same without peft, but for rounding.
    """
    write_hindi(folder)
    run = runs.start(example, folder, 2, *DROPOUT)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    assert not (folder / "output" / "adapter").exists()
    last = runs.train(example, folder, 2, *DROPOUT, "--resume", "--merge", "--gradient-checkpointing")
    runs.assert_continued(folder / "output", step)
    assert "LlamaForCausalLM in model on hindi.txt: " in last.stdout
    outputs.assert_same_run(folder / "output", with_dropout.output)
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    found = loss_of(load(folder / "output" / "merged"), tokens_of(folder, "hindi.txt"), 16)
    assert found == pytest.approx(rows[-1]["test_loss"], abs=1e-4)


def arguments(folder: Path, **changed: object) -> Namespace:
    """Return arguments of train.py as they are by default, for one process."""
    paths = {"model_dir": folder / "model", "text_file": folder / "text.txt", "output_dir": folder / "output"}
    numbers = {"context": 32, "batch_size": 4, "gradient_accumulation_steps": 1, "world_size": 2, "seed": 0}
    lora = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear", "full": False}
    lora |= {"merge": False, "separate_documents": False, "end": None, "shard": False}
    lora |= {"classes": None, "cut_off": None, "compile": False}
    others = {"precision": "fp32", "gradient_checkpointing": False, "resume": True, "epochs": 5, "scale_lr": None}
    return Namespace(**paths | numbers | lora | others | changed)


def load_data(train: ModuleType, args: Namespace) -> tuple[Any, Any, Any]:
    """Return tokenizer, training set and test set, as main() of train.py reads them."""
    tokenizer = train.model_files.load_tokenizer(args)
    return tokenizer, *train.text_data.load(args, tokenizer)


def cut(path: Path) -> None:
    """Cut a file in half."""
    os.truncate(path, path.stat().st_size // 2)


def without_a_weight(path: Path) -> None:
    """Leave one weight out of a file of safetensors."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def with_another_token(folder: Path) -> None:
    """Add a token to the tokenizer that the model does not know, and the text has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    tokenizer.add_tokens(["river"])
    tokenizer.save_pretrained(folder / "model")


def only_unknown(path: Path) -> None:
    """Leave of a tokenizer one token, which stands for each word that it does not know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path.parent)


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, object], list[str]]] = {
    "no model": (
        lambda folder: shutil.rmtree(folder / "model"),
        {},
        ["no config.json", "make_model.py", "hf download"],
    ),
    "no tokenizer": (lambda folder: (folder / "model/tokenizer.json").unlink(), {}, ["its tokenizer cannot be loaded"]),
    "tokenizer.model": (
        lambda folder: (folder / "model/tokenizer.json").rename(folder / "model/tokenizer.model"),
        {},
        ["its tokenizer cannot be loaded", "pip install sentencepiece"],
    ),
    "damaged tokenizer": (lambda folder: cut(folder / "model/tokenizer.json"), {}, ["its tokenizer cannot be loaded"]),
    "damaged config": (lambda folder: cut(folder / "model/config.json"), {}, ["cannot be loaded"]),
    "no weights": (lambda folder: (folder / "model/model.safetensors").unlink(), {}, ["its model cannot be loaded"]),
    "damaged weights": (lambda folder: cut(folder / "model/model.safetensors"), {}, ["its model cannot be loaded"]),
    "missing weight": (
        lambda folder: without_a_weight(folder / "model/model.safetensors"),
        {},
        ["has no weights for", "layers.1.self_attn.q_proj"],
    ),
    "no text": (lambda folder: (folder / "text.txt").unlink(), {}, ["--text-file", "No such file"]),
    "empty text": (lambda folder: (folder / "text.txt").write_text(""), {}, ["--text-file", "is empty"]),
    "folder of texts": (lambda folder: None, {"text_file": Path("tests")}, ["--text-file", "no tokens.json"]),
    "three bytes": (lambda folder: (folder / "text.txt").write_text("abc"), {}, ["3 tokens", "or --context 1"]),
    "UTF-16": (
        lambda folder: (folder / "text.txt").write_text("river " * 99, encoding="utf-16-le"),
        {},
        ["594 of the 1188 bytes are 0, as in UTF-16"],
    ),
    "unknown script": (
        lambda folder: only_unknown(folder / "model/tokenizer.json"),
        {},
        ["tokens of", "are <unk>", "knows this script"],
    ),
    "not UTF-8": (lambda folder: (folder / "text.txt").write_bytes(b"caf\xe9 " * 999), {}, ["is not UTF-8", "iconv"]),
    "too short": (lambda folder: (folder / "text.txt").write_text("river " * 9), {}, ["--text-file", "more than 64"]),
    "too few samples": (lambda folder: None, {"batch_size": 100}, ["--batch-size 100 is above", "of each process"]),
    "too long a context": (lambda folder: None, {"context": 300, "batch_size": 1}, ["--context 300", "the 256 tokens"]),
    "unknown layers": (lambda folder: None, {"target_modules": "q_proj,query"}, ["--target-modules query", "v_proj"]),
    "another tokenizer": (with_another_token, {}, ["its tokenizer has token", "its model only 320"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_input(
    example: str, folder: Path, train: ModuleType, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """A model or a text that cannot be used is refused with status 2 and one line, which says what is wrong."""
    change, changed, texts = BROKEN[case]
    change(folder)
    args = arguments(folder, **changed)
    with pytest.raises(SystemExit, match="2"):
        _, train_set, test_set = load_data(train, args)
        train.plumbing.count_steps(args, len(train_set) // args.world_size, train_set, test_set)
        train.load_model(args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("train.py: error: ") and all(text in line for text in texts), line


SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 256}
NO_TOKENS = {f"{name}_token_id": 0 for name in ("bos", "eos", "pad")}
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
GEMMA = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
JAMBA = {"num_key_value_heads": 2, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
GEMMA3: dict[str, Any] = {"text_config": GEMMA, "vision_config": VISION | {"image_size": 28, "patch_size": 14}}
GEMMA3 |= {"mm_tokens_per_image": 1, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}


def write_model(path: Path, name: str, **sizes: object) -> None:
    """Write a model with random weights, of a class of transformers, in the place of the weights in a folder."""
    import transformers

    model = getattr(transformers, name)
    torch.manual_seed(0)
    (path / "model.safetensors").unlink(missing_ok=True)
    model(model.config_class(**sizes)).save_pretrained(path)


# A model of each kind that people bring: its layers with adapters are all that are used for text.
CAUSAL: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT2, {"c_attn", "c_proj", "c_fc"}),  # Conv1D, and tied embeddings
    "Qwen3": ("Qwen3ForCausalLM", GEMMA, {f"{name}_proj" for name in ("q", "k", "v", "o", "up", "gate", "down")}),
    "experts": ("MixtralForCausalLM", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4}, {"q_proj"}),
    "images": ("Gemma3ForConditionalGeneration", GEMMA3, {"q_proj", "down_proj"}),  # axolotl 3500, FAI-RL 105
    "Mamba": ("MambaForCausalLM", {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}, {"in_proj"}),
    "Jamba": ("JambaForCausalLM", SIZES | JAMBA, {"in_proj", "q_proj"}),
    "decoder": ("BertLMHeadModel", SIZES | {"is_decoder": True}, {"query", "dense"}),
    "RoFormer": ("RoFormerForCausalLM", SIZES | {"is_decoder": True}, {"query", "dense"}),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_causal_model(
    example: str, folder: Path, train: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A causal model of any kind is trained: all adapters get gradients, and what is saved has the same logits."""
    name, sizes, layers = CAUSAL[case]
    write_model(folder / "model", name, **sizes)
    monkeypatch.delitem(sys.modules, "generate", raising=False)
    generate = outputs.import_file(folder / "generate.py")
    args = arguments(folder, merge=True)
    _, train_set, _ = load_data(train, args)
    model = train.load_model(args)
    optimizer = torch.optim.AdamW(train.trained_weights(model).values(), 0.01)
    tokens, targets = train_set[[0, 1]]
    losses = []
    for _ in range(3):
        logits = model.train()(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(loss.item())
        assert all(weight.grad is not None for weight in train.trained_weights(model).values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in train.trained_weights(model)} >= layers
    train.model_files.write_folder(folder / "adapter", model)
    with torch.no_grad():
        found = model.eval()(tokens, use_cache=False).logits
        loaded = generate.load_adapters(load(folder / "model"), folder / "adapter").eval()
        assert torch.allclose(loaded(tokens, use_cache=False).logits, found, atol=1e-4)
        train.model_files.write_folder(folder / "merged", model.merge_and_unload())
        assert torch.allclose(load(folder / "merged").eval()(tokens, use_cache=False).logits, found, atol=1e-4)


@pytest.mark.runs("weekly")
def test_full(example: str, folder: Path) -> None:
    """--full trains, saves and resumes the model itself, which loads without peft; generate.py continues with it."""
    runs.train(example, folder, 2, "--full", "--epochs", 1, "--lr", 1e-3)
    run = runs.train(example, folder, 2, "--full", "--epochs", 2, "--lr", 1e-3, "--resume")
    assert "continuing after epoch 1 of 2" in run.stdout and "3,492,096 are trained" in run.stdout
    rows = outputs.read_metrics(folder / "output")
    assert rows[1]["test_loss"] < rows[0]["test_loss"] < 5
    assert not (folder / "output" / "adapter").exists()
    assert loss_of(load(folder / "output" / "model"), tokens_of(folder), 32) == rows[-1]["test_loss"]
    words = ["python", "generate.py", "--prompt", "नदी ", "--model-dir", "output/model", "--max-new-tokens", "8"]
    written = runs.Run(words, folder).wait()
    assert written.status == 0 and written.stdout.startswith("नदी ") and len(written.stdout) > 6, written.stderr


@pytest.mark.runs("weekly")
def test_two_processes_as_one(example: str, folder: Path) -> None:
    """2 x 4 samples a step are 1 x 8, and 2 x 2 x 2: the same adapters, to 1e-9 in fp64, after two epochs."""
    layouts = {"two": (2, 4, 1), "one": (1, 8, 1), "accumulated": (2, 2, 2)}
    for name, (processes, size, steps) in layouts.items():
        words = f"--precision fp64 --epochs 2 --batch-size {size} --gradient-accumulation-steps {steps}"
        runs.train(example, folder, processes, *words.split(), "--output-dir", f"output/{name}")
    weights = {name: outputs.read_model(folder / "output" / name) for name in layouts}
    assert {weight.dtype for weight in weights["one"].values()} == {torch.float64}
    for name in ("two", "accumulated"):
        assert outputs.largest_difference(weights[name], weights["one"]) < 1e-9


@pytest.mark.runs("weekly")
def test_merged(example: str, folder: Path, source: Path) -> None:
    """The merged model, loaded by `transformers` alone, has the logits of model and adapters; it can be trained on."""
    from peft import PeftModel

    words = ('"output/adapter")', '"output/merged")', "--model-dir output/merged")
    assert all(word in PAGE.read_text() for word in words)
    runs.train(example, folder, 2, "--epochs", 2, "--merge")
    with_adapters = PeftModel.from_pretrained(load(folder / "model"), folder / "output" / "adapter").eval()
    merged, base = load(folder / "output" / "merged").eval(), load(source / "model").eval()
    tokens = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other, before = (model(tokens).logits for model in (with_adapters, merged, base))
    assert (one - other).abs().max() < 1e-3 < 0.1 < (one - before).abs().max()
    words = ["--model-dir", "output/merged", "--output-dir", "further"]
    runs.train(example, folder, 2, *words, "--epochs", 1)
    rows = outputs.read_metrics(folder / "output") + outputs.read_metrics(folder / "further")
    assert rows[2]["test_loss"] < rows[1]["test_loss"] < rows[0]["test_loss"]
