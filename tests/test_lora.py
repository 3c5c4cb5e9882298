"""What only lora promises: little is exchanged, the adapters are the model, dropout resumed, any script, messages."""

import json
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
from harness import edits, outputs, refusals, runs
from harness.launchers import ROOT, copy_example
from harness.readme import fences
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


def bytes_in_a_step(output: Path, printed: str) -> float:
    """Return how many bytes each process has exchanged in a step, and check that the run's second line says so."""
    optimizer = torch.load(output / "checkpoint.pt", weights_only=True)["optimizer"]
    steps = optimizer["state"][0]["step"].item()
    numbers = list(map(int, (output.parent / "exchanged").read_text().split()))
    said = float(re.search(r"a step exchanges ([\d.]+) MB", printed)[1])
    assert sum(numbers) / steps / 2 == pytest.approx(said * 1e6, abs=500)
    return sum(numbers) / steps / 2


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


def test_bytes_exchanged(example: str, folder: Path, with_dropout: Reference) -> None:
    """DDP exchanges below 3 % of what it exchanges with --full, and a run's second line says how much."""
    write_hindi(folder)
    count_bytes(folder)
    run = runs.train(example, folder, 2, "--full", "--text-file", "hindi.txt", "--epochs", 1)
    full = bytes_in_a_step(folder / "output", run.stdout)
    lora = bytes_in_a_step(with_dropout.output, with_dropout.stdout)
    print(f"exchanged in a step: {lora:.0f} of {full:.0f} bytes, {lora / full:.2%}")
    assert 0 < lora < 0.03 * full


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
    "folder of texts": (lambda folder: None, {"text_file": Path("common")}, ["--text-file", "no tokens.json"]),
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


def test_tokens_of_the_file(example: str, folder: Path, train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are those of tokenizer.json, also where transformers' class has other rules: transformers 45488."""
    from tokenizers import Tokenizer

    text, path = "cafe\u0301 1234", folder / "model" / "tokenizer_config.json"
    expected = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    shipped = json.loads(path.read_text())
    for name in (shipped["tokenizer_class"], "Qwen2Tokenizer"):
        path.write_text(json.dumps(shipped | {"tokenizer_class": name}))
        tokenizer = train.model_files.load_tokenizer(arguments(folder))
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
        assert tokenizer.eos_token == "<|end|>" and ("note: " in capsys.readouterr().err) == ("Qwen2" in name)


SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 256}
NO_TOKENS = {f"{name}_token_id": 0 for name in ("bos", "eos", "pad")}
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
T5 = {"vocab_size": 320, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": 320, "d_model": 32, "decoder_start_token_id": 0, "forced_eos_token_id": 0} | NO_TOKENS
BART |= {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
XLNET = {"vocab_size": 320, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
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


def change_config(path: Path, **changed: object) -> None:
    """Change what a model's config.json says."""
    config = json.loads((path / "config.json").read_text()) | changed
    (path / "config.json").write_text(json.dumps(config))


def write_adapters(folder: Path, target: Path) -> None:
    """Write adapters for a folder's model into another one."""
    import peft

    model = peft.get_peft_model(load(folder / "model"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(target)


def instead_of_weights(folder: Path, name: str, content: bytes) -> None:
    """Have another file in a folder in the place of its model's weights."""
    (folder / "model/model.safetensors").unlink()
    (folder / "model" / name).write_bytes(content)


def into_parts(path: Path) -> None:
    """Divide a model's weights into several files, of which one is missing."""
    model = load(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="4MB")
    next(path.glob("model-00002*")).unlink()


def with_nan(path: Path) -> None:
    """Write the model in fp16, with one value that is no number."""
    model = load(path).half()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(path)


def without_config(folder: Path, name: str) -> None:
    """Move a folder's model so that there is no config.json at its place."""
    (folder / "model").rename(folder / "moved")
    (folder / "model").mkdir()
    (folder / "moved").rename(folder / "model" / name)


# What people have given as --model-dir instead of a causal model; see the reports in the comments.
INSTEAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    # huggingface/transformers 25215
    "adapters alone": (
        lambda folder: (
            write_adapters(folder, folder / "x"),
            shutil.rmtree(folder / "model"),
            (folder / "x").rename(folder / "model"),
        ),
        ["it has adapters alone", "their base model"],
    ),
    "adapters beside": (lambda folder: write_adapters(folder, folder / "model"), ["adapters beside a model", "merge"]),
    "hub name": (lambda folder: shutil.rmtree(folder / "model"), ["and no such folder", "hf download"]),
    "file": (
        lambda folder: (shutil.rmtree(folder / "model"), (folder / "model").write_bytes(b"GGUF")),
        ["it is a file", "config.json"],
    ),
    "GGUF": (lambda folder: instead_of_weights(folder, "m.Q4_K_M.gguf", b"GGUF"), ["m.Q4_K_M.gguf, of llama.cpp"]),
    "Meta's format": (
        lambda folder: (
            without_config(folder, "x"),
            shutil.rmtree(folder / "model/x"),
            (folder / "model/consolidated.00.pth").touch(),
        ),
        ["Meta's or Mistral's own format"],
    ),
    "folder of the hub": (lambda folder: without_config(folder, "snapshots"), ["model/snapshots: give that folder"]),
    # huggingface/diffusers 13559
    "Git LFS": (
        lambda folder: instead_of_weights(
            folder, "model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"
        ),
        ["model.safetensors only points to a file of Git LFS", "git lfs pull"],
    ),
    # sgl-project/sglang 32279
    "part missing": (lambda folder: into_parts(folder / "model"), ["files of weights 1 are missing", "model-00002-of"]),
    "T5": (
        lambda folder: write_model(folder / "model", "T5ForConditionalGeneration", **T5),
        ["T5ForCond", "no causal"],
    ),
    "BART": (lambda folder: write_model(folder / "model", "BartForConditionalGeneration", **BART), ["is no causal"]),
    "images": (lambda folder: write_model(folder / "model", "ViTForImageClassification", **VISION), ["is no causal"]),
    "ModernBERT": (
        lambda folder: write_model(
            folder / "model", "ModernBertForMaskedLM", **SIZES | NO_TOKENS | {"cls_token_id": 0, "sep_token_id": 0}
        ),
        ["ModernBertForMaskedLM, which is no causal"],
    ),
    "classifier": (
        lambda folder: write_model(folder / "model", "LlamaForSequenceClassification", **SIZES),
        ["no weights for lm_head.weight", "take a causal one"],
    ),
    "GPTQ": (
        lambda folder: change_config(folder / "model", quantization_config={"quant_method": "gptq", "bits": 4}),
        ["a quantised model (gptq)"],
    ),
    "FP8": (
        lambda folder: change_config(folder / "model", quantization_config={"quant_method": "fp8"}),
        ["a quantised model (fp8)"],
    ),
    "own code": (
        lambda folder: change_config(folder / "model", model_type="own", auto_map={"AutoConfig": "own.Config"}),
        ["needs code that transformers", "take another model"],
    ),
    "newer": (lambda folder: change_config(folder / "model", model_type="llama9"), ["needs code that transformers"]),
    "wider": (lambda folder: change_config(folder / "model", hidden_size=512), ["shape is another one", "config.json"]),
    "more layers": (
        lambda folder: change_config(folder / "model", num_hidden_layers=5),
        ["has no weights for", "copy"],
    ),
    "fewer layers": (
        lambda folder: change_config(folder / "model", num_hidden_layers=3),
        ["weights of further layers, such as model.layers.3."],
    ),
    "nan": (lambda folder: with_nan(folder / "model"), ["1 of its weights", "layers.1.mlp.up_proj.weight"]),
    # huggingface/transformers 13818, 12704, 48745: models of a class "ForCausalLM" that see later tokens
    "BERT": (
        lambda folder: write_model(folder / "model", "BertForMaskedLM", **SIZES),
        ["BertLMHeadModel is not causal"],
    ),
    "RoBERTa": (lambda folder: write_model(folder / "model", "RobertaForMaskedLM", **SIZES), ["is not causal"]),
    "ELECTRA": (lambda folder: write_model(folder / "model", "ElectraForMaskedLM", **SIZES), ["is not causal"]),
    "RoFormer": (lambda folder: write_model(folder / "model", "RoFormerForMaskedLM", **SIZES), ["is not causal"]),
    "XLNet": (lambda folder: write_model(folder / "model", "XLNetLMHeadModel", **XLNET), ["is not causal"]),
}


@pytest.mark.parametrize("case", INSTEAD)
def test_no_causal_model(
    example: str, folder: Path, train: ModuleType, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """A folder of anything but a causal model in fp32, fp16 or bf16 is one line, which says what is in there."""
    change, texts = INSTEAD[case]
    change(folder)
    args = arguments(folder)
    with pytest.raises(SystemExit, match="2"):
        load_data(train, args)
        train.load_model(args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("train.py: error: --model-dir ") and all(text in line for text in texts), line


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


def test_target_modules(example: str, folder: Path, train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """--target-modules may have spaces; nothing, a pattern, and an output layer that cannot be merged are refused."""
    args = arguments(folder)
    load_data(train, args)
    model = train.model_files.load_model(args, torch.float32)

    def chosen(names: str, merge: bool = False) -> object:
        return train.model_files.target_modules(
            Namespace(**vars(args) | {"target_modules": names, "merge": merge}), model
        )

    assert chosen("v_proj, q_proj") == ["q_proj", "v_proj"] and chosen("all-linear") == "all-linear"
    assert chosen("lm_head") == ["lm_head"]
    for names in ("", ".*", "q_proj,embed_tokens", "q_proj v_proj", "Linear"):
        with pytest.raises(SystemExit, match="2"):
            chosen(names)
        assert "--target-modules" in (line := capsys.readouterr().err) and "q_proj, up_proj" in line
    with pytest.raises(SystemExit, match="2"):  # peft 2972: the merged model would be another one
        chosen("lm_head,q_proj", merge=True)
    assert "whose weight is also the embedding's" in capsys.readouterr().err


def test_left_out_targets(example: str, folder: Path, train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets of -100, which have no loss, do not count: the test loss is that of the others."""
    monkeypatch.setattr(train.dist, "all_reduce", lambda sums: None)
    model, device = load(folder / "model"), torch.device("cpu")
    tokens = torch.arange(64).reshape(2, 32)
    targets = (tokens + 1).clone()
    targets[:, :24] = -100
    found = train.evaluate(arguments(folder), model, [(tokens, targets)], device)
    with torch.no_grad():
        logits = model.eval()(tokens).logits[:, 24:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 24:].flatten()).item()
    assert found["test_loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(2.718281828459045**loss, rel=1e-6)
    with torch.no_grad():
        model.model.norm.weight.fill_(1e6)
    assert train.evaluate(arguments(folder), model, [(tokens, targets)], device)["perplexity"] == float("inf")


def wrong_adapters(folder: Path) -> None:
    """Write adapters of a model that has one layer more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder / "model", num_hidden_layers=5)
    (folder / "other").mkdir()
    LlamaForCausalLM(config).save_pretrained(folder / "other/model")
    write_adapters(folder / "other", folder / "adapter")


GENERATE: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "empty": (lambda folder: None, ["--prompt", ""], "--prompt must have a letter"),  # transformers 3678, 13774
    "surrogate": (lambda folder: None, ["--prompt", "caf\udce9"], "in UTF-8"),
    "no tokens": (lambda folder: None, ["--max-new-tokens", "0"], "must be 1 or more, not 0"),
    "negative": (lambda folder: None, ["--max-new-tokens", "-3"], "must be 1 or more, not -3"),
    "long": (lambda folder: None, ["--prompt", "x" * 999], "the model can take 256 with those that it writes"),
    "too many": (lambda folder: None, ["--max-new-tokens", "900"], "use --max-new-tokens 253 or fewer"),
    "cold": (lambda folder: None, ["--temperature", "-1"], "--temperature must be 0, or 0.01 or more"),
    "nan": (lambda folder: None, ["--temperature", "nan"], "--temperature must be 0, or 0.01 or more"),
    "hot": (lambda folder: None, ["--temperature", "inf"], "--temperature must be 0, or 0.01 or more"),
    "seed": (lambda folder: None, ["--seed", str(2**64)], "--seed must be from 0 to"),
    "no folder": (lambda folder: None, ["--model-dir", "none"], "and no such folder"),
    "no adapters": (lambda folder: None, ["--adapter", "none"], "cannot load none: "),
    "no finished run": (lambda folder: (folder / "adapter").mkdir(), ["--adapter", "adapter"], "cannot load adapter: "),
    "another model": (wrong_adapters, ["--adapter", "adapter"], "are of a model with other layers"),
    "missing weight": (
        lambda folder: without_a_weight(folder / "model/model.safetensors"),
        [],
        "has no weights for model.layers.1.self_attn.q_proj.weight",
    ),
    "BERT": (lambda folder: write_model(folder / "model", "BertForMaskedLM", **SIZES), [], "is not causal"),
    "weights": (lambda folder: with_nan(folder / "model"), [], "outputs are no numbers"),
    "tokenizer": (with_another_token, ["--prompt", "a river"], "its tokenizer has token"),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate_refuses(
    example: str,
    folder: Path,
    train: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    """generate.py refuses arguments that cannot work, and the models that train.py refuses, in one line."""
    change, words, text = GENERATE[case]
    change(folder)
    monkeypatch.chdir(folder)
    prompt = [] if "--prompt" in words else ["--prompt", "aaa"]
    monkeypatch.setattr("sys.argv", ["generate.py", *prompt, *words])
    with pytest.raises(SystemExit, match="2"):
        outputs.import_file(folder / "generate.py").main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("generate.py: error: ") and text in line


def test_likeliest_tokens(
    example: str, folder: Path, train: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At --temperature 0 each token is the likeliest, whatever the model's generation_config.json asks for."""
    program, path = outputs.import_file(folder / "generate.py"), folder / "model" / "generation_config.json"
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["generate.py", "--prompt", "The river", "--max-new-tokens", "8"])
    written = []
    for others in ({}, {"repetition_penalty": 9.0, "do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.6}):
        path.write_text(json.dumps(json.loads(path.read_text()) | others))
        program.main()
        written.append(capsys.readouterr())
    assert written[0].out == written[1].out and "top_" not in written[1].err


@pytest.mark.parametrize("words", ["--vocabulary 256", "--vocabulary -1", f"--vocabulary {2**70}", "--seed -1",
                                   f"--seed {2**64}", "--text-file none", "--text-file common"])  # fmt: skip
def test_make_model_refuses(
    example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """make_model.py refuses sizes that cannot work, and what is no text, in one line, and writes nothing."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("sys.argv", ["make_model.py", "--folder", "new", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        outputs.import_file(folder / "make_model.py").main()
    assert f"make_model.py: error: {words.split()[0]}" in capsys.readouterr().err
    assert not (folder / "new").exists()


def test_another_base_model(
    example: str, folder: Path, train: ModuleType, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of adapters is refused with a base model in which one bit differs, or another text or rank."""
    shutil.copytree(reference.output, folder / "output")
    args = arguments(folder)
    load_data(train, args)
    model = train.model_files.load_model(args, torch.float32)
    monkeypatch.setattr(train.plumbing.checks, "look_at_model", lambda *_: None)  # it has no adapters here
    assert isinstance(train.plumbing.read_checkpoint(args, model), dict)
    with torch.no_grad():
        model.model.norm.weight[0] *= 1 + 2**-20
    for name, value in (("base", train.model_files.checksum(model.parameters())), ("text", "1"), ("lora_rank", 8)):
        error = train.plumbing.read_checkpoint(Namespace(**vars(args) | {name: value}), model)
        assert f"is from a run with {name} {vars(args)[name]}: use the same settings" in error


def test_bad_arguments(example: str, folder: Path) -> None:
    """Bad values of its own flags are refused with one clear line each, and so is a missing package."""
    texts = {
        "--full --merge": ["--merge", "--full"],
        "--lora-rank 0": ["--lora-rank", "1 or more"],
        "--lora-alpha 0": ["--lora-alpha", "above 0"],
        "--lora-dropout 1": ["--lora-dropout", "from 0 to below 1"],
        "--context 0": ["--context", "1 or more"],
        "--max-grad-norm -1": ["--max-grad-norm", "0 or more"],
    }
    refusals.assert_arguments_refused(folder, texts)
    run = runs.Run(["python", "-c", "import sys; sys.modules['peft'] = None; import train"], folder).wait()
    assert run.status == 2 and "Traceback" not in run.stderr
    assert run.stderr.startswith("train.py: error: ") and "pip install -r requirements.txt" in run.stderr


def test_half_a_folder(example: str, folder: Path, train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that could not be written completely does not take the place of a good one; a complete one does."""

    def part(text: str, error: type[Exception] | None) -> Namespace:
        def save(path: Path) -> None:
            (path / "templates").mkdir(parents=True)  # as of a tokenizer with several
            (path / "weights").write_text(text)
            (path / "templates" / "one").write_text(text)
            if error:
                raise error("No space left on device")

        return Namespace(save_pretrained=save)

    target, write_folder = folder / "adapter", train.model_files.write_folder
    write_folder(target, part("first", None))
    for error in (OSError, RuntimeError, train.model_files.SafetensorError):
        with pytest.raises(SystemExit, match="2"):
            write_folder(target, part("half", error))
        assert "cannot write" in capsys.readouterr().err and (target / "weights").read_text() == "first"
    for name in ("adapter.77.tmp", "adapter.77.old"):  # as a process leaves them that is killed here
        (folder / name).mkdir()
    write_folder(target, part("second", None))
    assert (target / "templates" / "one").read_text() == "second"
    assert (target / "weights").read_text() == "second" and [*folder.glob("adapter*")] == [target]


def test_make_model(
    example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """make_model.py leaves a folder that is there as it is."""
    before = {path: path.stat().st_mtime_ns for path in (folder / "model").iterdir()}
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["make_model.py"])
    outputs.import_file(folder / "make_model.py").main()
    assert "model is there already: nothing was written" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "model").iterdir()}


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
def test_bf16(example: str, folder: Path, reference: Reference) -> None:
    """In bf16 the frozen weights are bf16, the adapters fp32, and the loss ends near that of fp32, after two epochs."""
    edits.edit(
        folder / "train.py",
        "    # Train.\n",
        "    print('types', sorted({(str(w.dtype), w.requires_grad) for w in model.parameters()}))\n    # Train.\n",
    )
    run = runs.train(example, folder, 2, "--precision", "bf16", "--epochs", 2, seconds=600)
    assert run.stdout.count("types [('torch.bfloat16', False), ('torch.float32', True)]") == 2
    assert {weight.dtype for weight in outputs.read_model(folder / "output").values()} == {torch.float32}
    bf16, fp32 = (outputs.read_metrics(output)[1]["test_loss"] for output in (folder / "output", reference.output))
    assert abs(bf16 - fp32) < 0.1


@pytest.mark.runs("weekly")
def test_own_data(example: str, folder: Path) -> None:
    """What the README proposes: several texts in one file, a cosine, another scale of adapters; and fewer of them."""
    for text in fences(folder / "README.md", "diff"):
        edits.apply_diff(folder / "train.py", text)
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("text.txt", write_hindi(folder))]
    (folder / "all.txt").write_text("".join(texts), encoding="utf-8")
    words = ["--text-file", "all.txt", "--epochs", 2, "--target-modules", "q_proj,down_proj"]
    runs.train(example, folder, 2, *words)
    rows = outputs.read_metrics(folder / "output")
    assert rows[1]["test_loss"] < rows[0]["test_loss"]
    assert '"use_rslora": true' in (folder / "output" / "adapter" / "adapter_config.json").read_text()
    assert {name.split(".")[-3] for name in outputs.read_model(folder / "output")} == {"q_proj", "down_proj"}


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
