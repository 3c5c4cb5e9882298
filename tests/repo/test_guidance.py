"""studies/guidance.py with few samples, and the page that shows what it has measured."""

import dataclasses
import math
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from harness.launchers import ROOT
from studies import guidance
from studies.guidance import Result, Setting

PAGE, MEASURED = ROOT / "docs" / "batch-size-and-learning-rate.md", ROOT / "studies" / "guidance.csv"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of a few steps, in this process, of the digits only."""
    pair = ("digits", "AdamW")
    monkeypatch.setattr(guidance, "SAMPLES", {"digits": 256})
    monkeypatch.setattr(guidance, "BATCH", {"digits": 16})
    monkeypatch.setattr(guidance, "EXPONENTS", {pair: range(-20, -1, 9)})
    monkeypatch.setattr(guidance, "PROCESSES", (1, 2))
    monkeypatch.setattr(guidance, "POOL", ThreadPool)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Call the study's main() as `python -m studies.guidance` would."""
    monkeypatch.setattr(sys, "argv", ["guidance.py", *map(str, words)])
    guidance.main()


def test_grid(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It finds the best rate, runs each rule from there, and after an interruption only what is missing."""
    words = ["--models", "digits", "--seeds", 1, "--at-once", 1, "--output", tmp_path]
    call(monkeypatch, *words)
    path = tmp_path / "guidance.csv"
    found = guidance.read(path)
    assert len(found) == 3 + 6  # the run of the best rate with one process counts for both
    assert {one.rate for one in found.values() if one.processes == 2} == {2.0**-11}
    kept, scaled = (found[Setting("digits", "AdamW", 2, rule, 0.0, 0, 2.0**-11)] for rule in ("kept", "linear"))
    assert all(0 < one.test_accuracy <= 1 for one in found.values()) and kept.test_loss != scaled.test_loss
    table = (tmp_path / "guidance.md").read_text()
    assert table in capsys.readouterr().out and f"| {kept.test_loss:.3f} |" in table
    assert (tmp_path / "guidance.png").read_bytes()[:4] == b"\x89PNG"

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    call(monkeypatch, *words)
    assert "\n2 of 2, " in capsys.readouterr().out
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines), "the same runs have the same losses"
    assert (tmp_path / "guidance.md").read_text() == table


def test_same_rate_same_run(short: None) -> None:
    """A rule is a rate: with 4 processes, `sqrt` is `kept` with twice the rate; a warm-up makes another run."""
    root = Setting("digits", "SGD", 4, "sqrt", 0.0, 0, 2.0**-7)
    kept = dataclasses.replace(root, rule="kept", rate=2.0**-6)
    assert guidance.train(root).test_loss == guidance.train(kept).test_loss
    assert guidance.train(dataclasses.replace(root, warmup=0.5)).test_loss != guidance.train(root).test_loss
    assert guidance.train(dataclasses.replace(root, rate=1e30)).test_loss == math.inf


def test_refused(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A best rate at the end of those tried, and a file of something else, are refused with one line."""
    results = {
        one: Result(**dataclasses.asdict(one), test_loss=one.rate, test_accuracy=0.5)
        for one in guidance.candidates(["digits"])
    }
    with pytest.raises(ValueError, match="at the end of EXPONENTS"):
        guidance.best_rates(results, ["digits"])
    (tmp_path / "guidance.csv").write_text("name,rate\nddp_spawn,1\n")
    with pytest.raises(SystemExit) as error:
        call(monkeypatch, "--models", "digits", "--output", tmp_path)
    assert "if this file is not one of this study, delete it" in error.value.code


def test_page() -> None:
    """The page's tables and picture are those of the committed measurements."""
    found = guidance.read(MEASURED)
    models = list(guidance.BATCH)
    settings = guidance.grid(guidance.best_rates(found, models), seeds=3)
    page = PAGE.read_text()
    assert guidance.tables([found[setting] for setting in settings]) in page, "write the tables anew"
    assert "](../studies/guidance.png)" in page and MEASURED.with_suffix(".png").exists()
