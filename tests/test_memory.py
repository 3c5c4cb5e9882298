"""benchmarks/memory.py, where the table in docs/out-of-memory.md comes from: what arithmetic says of a tiny model."""

import sys

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import RUNGS
from common.models import TinyGPT
from tests.harness.launchers import ROOT

pytestmark = pytest.mark.only("deepspeed", "fsdp", "lora")
SIZES = {"width": 64, "layers": 2, "heads": 4, "context": 32}
TENSORS = sum(1 for _ in TinyGPT(**SIZES).parameters())
WEIGHTS = sum(weight.numel() for weight in TinyGPT(**SIZES).parameters()) / 1e6  # in millions: MB, at a byte for each
ADAPTERS = 72 * SIZES["width"] * SIZES["layers"] / 1e6  # rank 4 x (inputs + outputs) of the six layers of each block


def near(megabytes: float, relative: float = 1e-9) -> object:
    """Return what equals a number of MB, but for rounding, or `relative`."""
    return pytest.approx(megabytes, rel=relative, abs=1e-9)


def check_fsdp(found: dict[str, dict[str, float]]) -> None:
    """Without sharding 4 bytes for a weight, its gradient and its buffer, 8 for Adam's state; half with FSDP."""
    plain, halved, bf16, checkpointing, bucket_view, fsdp = found.values()
    for row in (plain, halved, bf16, checkpointing, bucket_view):
        assert row["weights"] == near(4 * WEIGHTS) and row["Adam's state"] == near(8 * WEIGHTS + 4e-6 * TENSORS)
        assert row["buffers"] == near(0 if row is bucket_view else 4 * WEIGHTS)
        assert row["gradients"] == near(4 * WEIGHTS) or row is plain
    assert fsdp["weights"] == near(2 * WEIGHTS) == fsdp["gradients"]
    assert fsdp["Adam's state"] == near(4 * WEIGHTS + 4e-6 * TENSORS)
    assert halved["activations"] == near(plain["activations"] / 2, 0.05)
    assert bf16["activations"] > checkpointing["activations"] == near(bucket_view["activations"], 0.05)
    peaks = [row["peak"] for row in found.values()]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 6


def check_deepspeed(found: dict[str, dict[str, float]]) -> None:
    """2 bytes for a weight, at stage 3 halved; half of the fp32 copy and of Adam's state; buffers as they are set."""
    as_shipped, *stages, offload = found.values()
    for row in found.values():
        assert row["weights"] == near(WEIGHTS if row is stages[2] else 2 * WEIGHTS, 0.02)
        assert row["fp32 copy"] == near(2 * WEIGHTS, 0.02) and row["Adam's state"] == near(4 * WEIGHTS, 0.02)
    assert as_shipped["peak"] - stages[0]["peak"] == near(2 * (500 - 5)) and stages[0]["buffers"] >= 2 * 5
    assert offload["offloaded"] >= 6 * WEIGHTS and offload["peak"] < stages[1]["peak"] - 4 * WEIGHTS


def check_lora(found: dict[str, dict[str, float]]) -> None:
    """2 bytes for a frozen weight; 4 for one of an adapter, its gradient and its buffer, and 8 for its Adam's state."""
    (row,) = found.values()
    assert row["weights"] == near(2 * WEIGHTS + 4 * ADAPTERS)
    assert row["gradients"] == near(4 * ADAPTERS) == row["buffers"]
    assert row["Adam's state"] == near(8 * ADAPTERS, 0.01)


def test_ladder(example: str) -> None:
    """Each rung holds what arithmetic says, and the kinds add up to the peak."""
    found = memory.measure(example, **SIZES)
    assert list(found) == [rung.name for rung in RUNGS if rung.example == example]
    for row in found.values():
        assert tuple(row) == memory.TITLES and min(row.values()) >= 0
        parts = sum(row[title] for title in memory.TITLES[:6])
        assert parts == near(row["peak"] + row["offloaded"])
    {"fsdp": check_fsdp, "deepspeed": check_deepspeed, "lora": check_lora}[example](found)


@pytest.mark.only("fsdp")
def test_tracker(example: str) -> None:
    """A view counts once, what is freed or emptied no longer, and the peak is the most that was there at once."""
    with memory.Tracker() as tracker:
        one = torch.zeros(1000)  # 4,000 bytes
        view = one.view(10, 100)
        two = view + 1
        assert sum(tracker.sizes().values()) == tracker.peak == 8000
        del one, view
        assert sum(tracker.sizes().values()) == 4000
        tracker.parts, tracker.peak = (lambda: {"named": [two]}), 0
        three = two.double()
        assert tracker.peak == 12000 and {tracker.at_peak[one] for one in tracker.named["named"]} == {4000}
        two.untyped_storage().resize_(0)
        assert sum(tracker.sizes().values()) == 8000 == three.untyped_storage().nbytes()


@pytest.mark.only("fsdp")
def test_page(example: str) -> None:
    """The page's table has the columns and rows of this program, in its order; without a rung it would differ."""
    page = (ROOT / "docs" / "out-of-memory.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.endswith(" |")]
    table = {row[0].removeprefix("| "): row for row in rows if len(row) == len(memory.TITLES) + 2}
    heading, *rungs = table.values()
    assert heading[1:-1] == list(memory.TITLES)
    assert [(row[0].removeprefix("| "), row[-1].removesuffix(" |").strip()) for row in rungs] == [
        (rung.name, rung.flags) for rung in RUNGS
    ]
    for row in rungs:
        values = [float(cell.replace(",", "")) for cell in row[1:-1]]
        assert sum(values[:6]) == pytest.approx(values[6] + values[7], abs=0.4), row


@pytest.mark.only("fsdp")
@pytest.mark.parametrize(
    "words",
    ["--width 0: 1 or more", "--layers -1: 1 or more", "--width 66: multiple of 4", "--examples lora: no peft here"],
)
def test_refused(example: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes that no model can have, and an environment that lacks what a rung needs, are refused with one line."""
    arguments, _, message = words.partition(": ")
    monkeypatch.setattr(sys, "argv", ["memory.py", *arguments.split()])
    monkeypatch.setattr(memory, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as ended:
        memory.main()
    *_, last = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "error: " in last and message in last
