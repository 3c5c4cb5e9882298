"""What lora promises with --shard: it computes the same, each process holds its part, and any number continues."""

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from harness import edits, outputs, refusals, runs
from tests import test_lora
from tests.test_lora import train  # noqa: F401 (a fixture)

pytestmark = pytest.mark.only("lora")

# A GPT-2 of which three processes hold parts of other sizes. Its LayerNorm computes in fp64, where that of Llama rounds
# to fp32, and embedding and output layer are one weight.
GPT2 = test_lora.GPT2 | {"n_embd": 40, "n_layer": 3, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def make_gpt2(folder: Path) -> list[str]:
    """Write a GPT-2 beside the model, with the same tokenizer; return the arguments that have train.py take it."""
    shutil.copytree(folder / "model", folder / "gpt2")
    test_lora.write_model(folder / "gpt2", "GPT2LMHeadModel", **GPT2)
    return ["--model-dir", "gpt2"]


CASES = {
    "GPT-2, full, fp64": "--model-dir gpt2 --full --precision fp64 --lr 1e-3 --gradient-accumulation-steps 2",
    "GPT-2, LoRA, fp64": "--model-dir gpt2 --precision fp64 --lora-dropout 0.1 --gradient-checkpointing",
    "Llama, full, fp32": "--full --lr 1e-3",
    "Llama, LoRA, fp32": "",
    "GPT-2, full, bf16": "--model-dir gpt2 --full --precision bf16 --lr 1e-3",
    "GPT-2, LoRA, bf16": "--model-dir gpt2 --precision bf16",
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.runs("weekly")] * ("full, fp64" not in case)) for case in CASES]
)
def test_as_without(example: str, folder: Path, case: str) -> None:
    """Two processes with --shard train what two without train: to 1e-9 in fp64, to 1e-6 in fp32, nearly so in bf16.

    With --full, `transformers` loads what was saved in several files, and its test loss is the one that was printed.
    """
    make_gpt2(folder)
    words = [*CASES[case].split(), "--epochs", 2]
    weights = {}
    for name, more in {"whole": [], "sharded": ["--shard"]}.items():
        run = runs.train(example, folder, 2, *words, *more, "--output-dir", name)
        weights[name] = outputs.read_model(folder / name)
    one, other = (outputs.read_metrics(folder / name)[-1]["test_loss"] for name in weights)
    if "bf16" in case:
        assert abs(one - other) < 0.02
        return
    assert one == pytest.approx(other, rel=1e-6)
    assert outputs.largest_difference(*weights.values()) < (1e-9 if "fp64" in case else 1e-6)
    assert "of all\n" in run.stdout
    if "full" in case:
        saved = sorted((folder / "sharded" / "model").glob("*.safetensors"))
        model = test_lora.load(folder / "sharded" / "model")
        layers = len(model.get_decoder().layers) if "Llama" in case else len(model.transformer.h)
        assert len(saved) > layers, "one for each layer, and others"
        found = test_lora.loss_of(model, test_lora.tokens_of(folder), 32)
        assert found == pytest.approx(other, rel=1e-6)
        assert f"test loss {found:.4f}" in run.stdout.splitlines()[-1]


@pytest.mark.runs("weekly")  # fsdp has an ordinary one
@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.runs("weekly"))])
@pytest.mark.parametrize("full", [pytest.param("--full --lr 1e-3", marks=pytest.mark.runs("weekly"), id="full"), ""])
def test_continued_by_others(example: str, folder: Path, before: int, after: int, full: str) -> None:
    """Another number of processes continues as if nothing had been: to 1e-9 in fp64, clipped, with uneven parts."""
    words = [*make_gpt2(folder), *full.split(), "--shard", "--precision", "fp64", "--global-batch", 12]
    words += ["--max-grad-norm", 0.05]
    runs.train(example, folder, before, *words, "--epochs", 2, "--output-dir", "whole")
    runs.train(example, folder, before, *words, "--epochs", 1)
    run = runs.train(example, folder, after, *words, "--epochs", 2, "--resume")
    assert "continuing after epoch 1 of 2" in run.stdout
    one, other = (outputs.read_metrics(folder / name)[1] for name in ("whole", "output"))
    for name in ("train_loss", "test_loss"):
        assert one[name] == pytest.approx(other[name], rel=1e-9)
    weights = (outputs.read_model(folder / name) for name in ("whole", "output"))
    assert outputs.largest_difference(*weights) < 1e-9


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("words", ["", "--full --lr 1e-3"])
def test_killed_and_resumed(example: str, folder: Path, source: Path, session_folder: Path, words: str) -> None:
    """Killed at random moments and resumed, a run with --shard ends with the same bits."""

    def make(folder: Path) -> list[runs.Reference]:
        runs.copy_example(source, folder)
        run = runs.train(example, folder, 2, "--shard", *words.split())
        return [runs.Reference(folder / "output", run.stdout, run.stderr)]

    reference = runs.references(session_folder / f"lora-sharded{len(words)}", make)[0]
    runs.kill_and_resume(example, folder, reference, [runs.kill_all, runs.kill_one], "--shard", *words.split())


SIZES = {"hidden_size=256": "hidden_size=1024", "intermediate_size=768": "intermediate_size=4096"}
SIZES |= {"num_hidden_layers=4": "num_hidden_layers=12"}
PEAK = """
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    Path(f"before-{rank}").write_text(str(peak))
"""


@pytest.mark.runs("weekly")
@pytest.mark.timeout(1800)
def test_memory(example: str, folder: Path) -> None:
    """Of a model of 201 million weights in fp32, each of two processes needs less than 0.65 of what it needs whole.

    With LoRA that is so of what is added after the imports, which are most of the rest.
    """
    for old, new in SIZES.items():
        edits.edit(folder / "make_model.py", old, new)
    made = runs.Run(["python", "make_model.py", "--folder", "large"], folder).wait()
    assert made.status == 0 and "201" in made.stdout, made.stderr
    line = "    rank = dist.get_rank()\n"
    edits.edit(folder / "train.py", line, line + PEAK)
    text = (folder / "text.txt").read_text(encoding="utf-8")
    (folder / "short.txt").write_text(text[:200], encoding="utf-8")
    words = ["--model-dir", "large", "--text-file", "short.txt", "--context", 16, "--batch-size", 1, "--epochs", 1]
    peaks, added = {}, {}
    for kind in ("", "--full"):
        for shard in ("", "--shard"):
            name = f"output{kind}{shard}"
            runs.train(example, folder, 2, *words, *kind.split(), *shard.split(), "--output-dir", name, seconds=900)
            used = outputs.read_run(folder / name)["stops"][-1]["used"]
            before = [int((folder / f"before-{rank}").read_text()) for rank in range(2)]
            peaks[kind + shard] = max(process["mb"] for process in used)
            added[kind + shard] = max(process["mb"] - mb for process, mb in zip(used, before, strict=True))
            shutil.rmtree(folder / name / "model", ignore_errors=True)
    print("peak, MB:", peaks, "added after the imports:", added)
    assert peaks["--full--shard"] < 0.65 * peaks["--full"]
    assert added["--shard"] < 0.65 * added[""]


# In this process, which is the only one of its group


@pytest.fixture
def alone() -> Iterator[None]:
    """Have this process be a process group by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arguments(folder: Path, **changed: object) -> Namespace:
    """Return arguments of train.py for one process with --shard."""
    return test_lora.arguments(folder, **{"shard": True, "world_size": 1} | changed)


def with_bin(folder: Path) -> None:
    """Have the weights of a folder in the older format."""
    weights = test_lora.load(folder / "model").state_dict()
    torch.save(weights, folder / "model" / "pytorch_model.bin")
    (folder / "model" / "model.safetensors").unlink()


def with_two_embeddings(folder: Path) -> None:
    """Have an output layer in the file that differs from the embedding, whose weight it should be."""
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, path, {"format": "pt"})


def of_experts(folder: Path) -> None:
    """Write a mixture of experts, of which a file has each expert by itself."""
    _, sizes, _ = test_lora.CAUSAL["experts"]
    test_lora.write_model(folder / "model", "MixtralForCausalLM", **sizes)


def of_images(folder: Path) -> None:
    """Write a model that also takes images."""
    test_lora.write_model(folder / "model", "Gemma3ForConditionalGeneration", **test_lora.GEMMA3)


OTHERS = (
    *("no weights", "damaged weights", "missing weight", "too long a context", "another tokenizer"),
    *("part missing", "classifier", "wider", "more layers", "fewer layers", "nan", "BERT"),
)
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, object], list[str]]] = {
    **{name: test_lora.BROKEN[name] for name in OTHERS if name in test_lora.BROKEN},
    **{name: (made, {}, texts) for name, (made, texts) in test_lora.INSTEAD.items() if name in OTHERS},
    "no layers": (
        lambda folder: test_lora.write_model(folder / "model", "XLNetLMHeadModel", **test_lora.XLNET),
        {},
        ["transformers does not say what its layers are: leave --shard out"],
    ),
    "bin": (with_bin, {}, ["--shard reads model.safetensors", ".save_pretrained(FOLDER) makes them of *.bin"]),
    "two embeddings": (with_two_embeddings, {}, ["lm_head.weight and model.embed_tokens.weight differ"]),
    "experts": (of_experts, {}, ["--shard cannot read model.layers.0.", "save_original_format=False"]),
    "images": (of_images, {}, ["takes no part in reading text: leave --shard out"]),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("alone")
def test_refused(
    example: str,
    folder: Path,
    train: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    case: str,
) -> None:
    """What is refused without --shard is refused with it, by the same line; so is what cannot be shared out."""
    change, changed, texts = REFUSED[case]
    change(folder)
    args = arguments(folder, **changed)
    with pytest.raises(SystemExit, match="2"):
        test_lora.load_data(train, args)
        train.load_model(args)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("train.py: error: ") and all(text in line for text in texts), line


def into_files(folder: Path) -> None:
    """Divide the model's weights into several files, which an index names."""
    model = test_lora.load(folder / "model")
    (folder / "model" / "model.safetensors").unlink()
    model.save_pretrained(folder / "model", max_shard_size="4MB")
    assert len(list((folder / "model").glob("model-*"))) > 2


def of_kind(name: str, **more: object) -> Callable[[Path], None]:
    """Return a function that writes a model of a kind in CAUSAL."""
    kind, sizes, _ = test_lora.CAUSAL[name]
    return lambda folder: test_lora.write_model(folder / "model", kind, **sizes, **more)


def fused_experts(folder: Path) -> None:
    """Write a mixture of experts as the refusal of one advises."""
    of_experts(folder)
    model = test_lora.load(folder / "model")
    model.save_pretrained(folder / "model", save_original_format=False)


MODELS: dict[str, Callable[[Path], None]] = {
    "several files": into_files,
    "GPT-2": of_kind("GPT-2"),
    "Qwen3": of_kind("Qwen3"),
    "Qwen3, untied": of_kind("Qwen3", tie_word_embeddings=False),
    "experts": fused_experts,
    "Mamba": of_kind("Mamba"),
    "decoder": of_kind("decoder"),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.usefixtures("alone")
def test_models(example: str, folder: Path, train: ModuleType, case: str, full: bool) -> None:  # noqa: F811
    """A model of each kind computes with --shard what it computes without, and what is saved computes that, too.

    Buffers that no file has, such as the frequencies of rotary embeddings, and tied weights included.
    """
    MODELS[case](folder)
    found = {}
    for shard in (False, True):
        args = arguments(folder, full=full, shard=shard)
        _, train_set, _ = test_lora.load_data(train, args)
        model = train.load_model(args).eval()
        optimizer = torch.optim.AdamW(train.trained_weights(model).values(), 0.01)
        tokens, _ = train_set[[0, 1]]
        for _ in range(2):
            logits = model(tokens, use_cache=False).logits
            logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found[shard] = model(tokens, use_cache=False).logits
    assert torch.allclose(found[True], found[False], atol=1e-5)
    tokenizer = train.model_files.load_tokenizer(args)
    train.sharded_model.save(args, model, tokenizer, folder / "saved")
    saved = test_lora.load(folder / ("saved" if full else "model"))
    if not full:
        import peft

        saved = peft.PeftModel.from_pretrained(saved, folder / "saved")
    with torch.no_grad():
        assert torch.allclose(saved.eval()(tokens, use_cache=False).logits, found[True], atol=1e-5)


def test_other_checkpoint(example: str, folder: Path, train: ModuleType) -> None:  # noqa: F811
    """A checkpoint of a run without --shard is refused with it, on two processes, and the other way round."""
    (folder / "output" / "checkpoint").mkdir(parents=True)
    (folder / "output" / "checkpoint" / "run.json").touch()
    error = train.sharded_model.other_checkpoint(arguments(folder, shard=False))
    assert "checkpoint/run.json is from a run with --shard: add --shard" in error
    (folder / "output" / "checkpoint.pt").touch()
    run = runs.start(example, folder, 2, "--shard", "--resume").wait()
    refusals.assert_refused(run, 1, "checkpoint.pt is from a run without --shard: leave --shard out", "--output-dir")


def test_arguments(example: str, folder: Path) -> None:
    """What does not go with --shard is refused in one line, which says what to do."""
    texts = {"--shard --merge": ["--merge needs", "merge_and_unload()"], "--shard --compile": ["--compile", "--shard"]}
    refusals.assert_arguments_refused(folder, texts)
