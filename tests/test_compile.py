"""With --compile a run computes the same to a rounding, and its files are those of a run without it.

All are long: each process compiles for half a minute.
"""

import re
from pathlib import Path

import pytest

from harness import edits, outputs, runs

pytestmark = [
    pytest.mark.only("torchrun_vision", "fsdp", "lora"),
    pytest.mark.runs("full"),
    pytest.mark.timeout(1800),
]
SMALL = {  # little to train, in two epochs
    "fsdp": "--tokens 6800 --context 32 --width 64 --layers 3",
    "lora": "",
    "torchrun_vision": "--workers 1",
}
WAYS = {
    "default": "",
    "parts": "--gradient-accumulation-steps 2 --max-grad-norm 0.5",
    "twice": "--gradient-checkpointing --gradient-accumulation-steps 2",
    "tensor": "--tensor-parallel 2",
}
WHOSE = {"tensor": ("fsdp",), "twice": ("fsdp", "lora")}
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def words_of(example: str, way: str = "default") -> list[str]:
    """Return the arguments of a run of two epochs, in fp64 where the example's model can be."""
    precision = "fp32" if example == "lora" else "fp64"
    return f"{SMALL[example]} {WAYS[way]} --epochs 2 --precision {precision}".split()


def assert_same(example: str, output: Path, other: Path) -> None:
    """Check that two runs ended with weights of the same names, and the same but for a rounding, and their metrics.

    lora's are computed in fp32, and so differ by more.
    """
    bound = 1e-3 if example == "lora" else 1e-9
    one, two = map(outputs.read_model, (output, other))
    assert not [name for name in one if "_orig_mod" in name]
    assert outputs.largest_difference(one, two) < bound  # found: at most 1e-13
    for row, expected in zip(*map(outputs.read_metrics, (output, other)), strict=True):
        for name in ("train_loss", "test_loss"):
            assert row[name] == pytest.approx(expected[name], rel=bound)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.only(*WHOSE[way])] if way in WHOSE else []) for way in WAYS]
)
def test_same_training(example: str, folder: Path, way: str) -> None:
    """Weights, their names and the metrics are those of a run without it. The model is not compiled again."""
    words = words_of(example, way)
    runs.train(example, folder, 2, *words, "--output-dir", "plain")
    run = runs.train(
        example, folder, 2, *words, "--compile", "--output-dir", "compiled", seconds=600, TORCH_LOGS="recompiles"
    )
    again = set(re.findall(r"Recompiling function (\w+) in ", run.stderr))
    # What lora's Trainer compiles around the model: context managers of DDP, a hook of checkpointing.
    around = {"helper", "__init__", "make_inputs_require_grads"} if example == "lora" else set()
    assert again <= around and "_limit" not in run.stderr, run.stderr
    assert_same(example, folder / "compiled", folder / "plain")


def test_switched_on_and_off(example: str, folder: Path) -> None:
    """A checkpoint written with it is continued without it, and the other way round."""
    words, cache = words_of(example), {CACHE: str(folder / "cache")}
    if example == "torchrun_vision":
        edits.edit(folder / "train.py", "math.pi * step", "0 * step")  # the rate depends on --epochs
    runs.train(example, folder, 2, *words, "--output-dir", "plain")
    for first, second in (("--compile",), ()), ((), ("--compile",)):
        output = folder / ("on" if first else "off")
        own = [*words, "--output-dir", output.name]
        runs.train(example, folder, 2, *own, *first, "--epochs", 1, seconds=600, **cache)
        run = runs.train(example, folder, 2, *own, *second, "--resume", seconds=600, **cache)
        assert "continuing after epoch 1 of 2" in run.stdout
        assert_same(example, output, folder / "plain")
