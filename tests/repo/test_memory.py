"""studies/memory.py on a small model: each way holds what the arithmetic says, and those that promise it agree."""

import re
import sys

import pytest

from common.models import TinyGPT
from harness.launchers import ROOT
from studies import memory
from studies.memory import RUNGS

# Large enough that all matrices are blocks that glibc gives back when they are freed, 64 KB or more.
SIZES = {"width": 128, "layers": 4, "heads": 4, "context": 64}
PLAIN = next(iter(RUNGS))
PAGE = (ROOT / "docs" / "out-of-memory.md").read_text()


@pytest.mark.runs("weekly")
def test_each_way() -> None:
    """Weights, gradients and Adam's state follow from the numbers of weights; what saves activations has lower peaks.

    All ways that differ in rounding only have the same loss in the third step; LoRA, which trains less, has another.
    bf16 is left out: where a CPU only emulates it, it takes longer than all others together.
    """
    ways = {name: rung for name, rung in RUNGS.items() if not rung.bf16}
    found = memory.measure(list(ways), SIZES)
    weights = sum(weight.numel() for weight in TinyGPT(**SIZES).parameters())
    adapters = 8 * 18 * SIZES["width"] * SIZES["layers"]  # rank x inputs and outputs of a block's six layers
    plain = found[PLAIN]
    for name, rung in ways.items():
        expected = 4 * weights + 16 * adapters if rung.lora else 16 * weights
        expected /= rung.processes if rung.sharded else 1
        assert found[name]["states"] * 1e6 == pytest.approx(expected, rel=0.01), name
        # Less than all of them, as small blocks that the way before has freed in this process are used again.
        assert found[name]["peak"] > 0.7 * found[name]["states"] and found[name]["seconds"] > 0, name
        difference = abs(found[name]["loss"] - plain["loss"])
        assert difference > 1e-3 if rung.lora else difference < 1e-4, (name, difference)
        if rung.checkpointing or rung.micro_batches > 1:
            assert found[name]["peak"] < 0.7 * plain["peak"], name


def test_table() -> None:
    """The cells are the medians of the rounds, and times are relative to the first way in the same round."""
    rounds = [
        {
            PLAIN: {"peak": peak, "states": 40.0, "seconds": 2.0},
            "other": {"peak": 50.0, "states": 20.0, "seconds": time},
        }
        for peak, time in ((100.0, 2.0), (300.0, 6.0), (110.0, 3.0))
    ]
    assert [list(row.values()) for row in memory.cells(rounds)] == [
        [PLAIN, "110", "40", "70", "1.00"],
        ["other", "50", "20", "30", "1.50"],
    ]


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--width", "100", "--heads", "6"], ["--layers", "-1"]])
def test_refused(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Numbers that make no model, or no round, are refused with one line."""
    monkeypatch.setattr(sys, "argv", ["memory.py", *words])
    with pytest.raises(SystemExit) as error:
        memory.main()
    assert error.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("1 or more, and --width a multiple of --heads")


def test_page() -> None:
    """The page has a row for each way, and the examples that it names beside a flag have that flag."""
    assert [name for name in RUNGS if f"\n| {name} |" not in PAGE] == []
    checked = 0
    for part in re.split(r"[;|\n]", PAGE):
        flags = re.findall(r"`(--[a-z_-]+)", part)
        for example in re.findall(r"\]\(\.\./examples/(\w+)", part):
            text = (ROOT / "examples" / example / "train.py").read_text()
            assert [flag for flag in flags if f'"{flag}"' not in text] == [], (example, part)
            checked += len(flags)
    assert checked > 10
