"""What lora promises with --shard: it computes the same, each process holds its part, and any number continues."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import outputs, runs
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


@pytest.mark.runs("weekly")
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


# In this process, which is the only one of its group


@pytest.fixture
def alone() -> Iterator[None]:
    """Have this process be a process group by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
