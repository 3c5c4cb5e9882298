"""What only lora promises: little is exchanged, the adapters are the model, dropout resumed, any script, messages."""

import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
    for name in ("checks", "plumbing", "model_files"):  # those of another test's folder
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = outputs.import_file(folder / "train.py")
    monkeypatch.setattr(module.plumbing, "rank", lambda: 0)
    return module


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
    others = {"precision": "fp32", "gradient_checkpointing": False, "resume": True, "epochs": 5, "scale_lr": None}
    return Namespace(**paths | numbers | lora | others | changed)


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


BROKEN: dict[str, tuple[Callable[[Path], object], dict[str, object], list[str]]] = {
    "no model": (
        lambda folder: shutil.rmtree(folder / "model"),
        {},
        ["no config.json", "make_model.py", "hf download"],
    ),
    "no tokenizer": (lambda folder: (folder / "model/tokenizer.json").unlink(), {}, ["its tokenizer cannot be loaded"]),
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
    "empty text": (lambda folder: (folder / "text.txt").write_text(""), {}, ["--text-file", "has 0 tokens"]),
    "not UTF-8": (lambda folder: (folder / "text.txt").write_bytes(b"caf\xe9 " * 999), {}, ["is not UTF-8", "iconv"]),
    "too short": (lambda folder: (folder / "text.txt").write_text("river " * 9), {}, ["--text-file", "more than 64"]),
    "too few samples": (lambda folder: None, {"batch_size": 100}, ["--batch-size 100 is above", "of each process"]),
    "too long a context": (lambda folder: None, {"context": 300, "batch_size": 1}, ["--context 300", "the 256 tokens"]),
    "unknown layers": (lambda folder: None, {"target_modules": "q_proj,query"}, ["--target-modules query", "v_proj"]),
    "another tokenizer": (
        with_another_token,
        {},
        ["its tokenizer has token", "its model only 320"],
    ),
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
        _, train_set, test_set = train.load_data(args)
        train.plumbing.count_steps(args, len(train_set) // args.world_size, train_set, test_set)
        train.load_model(args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("train.py: error: ") and all(text in line for text in texts), line


@pytest.mark.runs("weekly")  # test_bad_checkpoint shows that a process which refuses something ends the run
def test_two_processes_refuse(example: str, folder: Path) -> None:
    """On two processes, too, too few samples, or a missing model, is one line, and the run ends."""
    run = runs.start(example, folder, 2, "--gradient-accumulation-steps", 100).wait(120)
    refusals.assert_refused(run, 1, "--batch-size 4 times 100 (gradient accumulation) is above")
    shutil.rmtree(folder / "model")
    run = runs.start(example, folder, 2).wait()
    refusals.assert_refused(run, 1, "--model-dir model", "python make_model.py")


def test_another_base_model(
    example: str, folder: Path, train: ModuleType, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of adapters is refused with a base model in which one bit differs, or another text or rank."""
    shutil.copytree(reference.output, folder / "output")
    args = arguments(folder)
    train.load_data(args)
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
def test_generate(example: str, folder: Path, reference: Reference) -> None:
    """generate.py takes adapters beside their base model, and says in one line what cannot be loaded."""
    words = ["python", "generate.py", "--prompt", "The river", "--adapter"]
    written = [runs.Run([*words, str(reference.output / "adapter")], folder).wait() for _ in range(2)]
    assert written[0].stdout == written[1].stdout and written[0].stdout.startswith("The river"), written[0].stderr
    refused = runs.Run([*words, "none"], folder).wait()
    assert refused.status == 2 and "generate.py: error: cannot load none: " in refused.stderr


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
    """What the README proposes: a folder of texts, a cosine, another scale of the adapters; and fewer of them."""
    for text in fences(folder / "README.md", "diff"):
        edits.apply_diff(folder / "train.py", text)
    (folder / "texts").mkdir()
    shutil.copy(folder / "text.txt", folder / "texts" / "one.txt")
    shutil.copy(folder / write_hindi(folder), folder / "texts" / "two.txt")
    words = ["--text-file", "texts", "--epochs", 2, "--target-modules", "q_proj,down_proj"]
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
