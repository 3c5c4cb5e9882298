"""studies/saving.py with few failures, and the page that shows what it has computed."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.launchers import ROOT
from studies import saving
from studies.saving import DAY, HOUR, MINUTE, MTBF, RESTART, SAVES

PAGE, SIMULATED = (ROOT / "docs" / "how-often-to-save.md").read_text(), ROOT / "studies" / "saving.csv"


def walk(interval: float, save: float, restart: float, failures: np.ndarray) -> float:
    """Simulate a run as it goes: from one event to the next, with the moments of the failures on one clock."""
    clock, kept, state, failures = 0.0, 0.0, "restart", np.cumsum(failures)
    for failure in failures:
        while True:
            length = {"restart": restart, "work": interval, "save": save}[state]
            if clock + length > failure:  # it is cut off
                clock, state = failure, "restart"
                break
            clock += length
            kept += interval * (state == "save")
            state = {"restart": "work", "work": "save", "save": "work"}[state]
    return 1 - kept / clock


def test_simulation_is_that_of_a_clock() -> None:
    """The sums are what a walk from event to event finds, with failures in work, saves and restarts."""
    for kind, shape in saving.SHAPES.items():
        times = saving.draw(HOUR, shape, 500, seed=1)
        for interval, save, restart in ((600.0, 60.0, 300.0), (5000.0, 1000.0, 2000.0), (1000.0, 10.0, 0.0)):
            assert saving.simulate(interval, save, restart, times) == pytest.approx(
                walk(interval, save, restart, times), abs=1e-9
            ), kind
    assert times.mean() == pytest.approx(HOUR, rel=0.2)


@pytest.mark.parametrize("kind", saving.SHAPES)
def test_formulas_and_simulation(kind: str) -> None:
    """Daly's interval loses at most 2 % more than the best that is found without it; the formula says how much it is.

    Young's does so, too, while a save is short. Failures in clusters, which the formulas do not know, change little.
    """
    for mtbf in (HOUR, DAY):
        for save in (10, 5 * MINUTE):
            row = saving.measure(kind, mtbf, save, RESTART, number=20_000, seed=3)
            assert 0.99 * row.lost_best < row.lost_daly < 1.02 * row.lost_best, row  # the best of those that were tried
            assert row.lost_young < (1.02 if save < mtbf / 20 else 1.05) * row.lost_best, row
            assert row.lost_best < row.lost_half < 1.3 * row.lost_best, row
            assert row.lost_best < row.lost_twice < 1.3 * row.lost_best, row
            if kind == "independent":
                assert row.formula == pytest.approx(row.lost_daly, rel=0.03), row
                assert 0.7 < row.daly / row.best < 1.4, row


def test_formulas() -> None:
    """The limits: both agree for a short save, Daly's ends at the mean time; a restart moves the best interval nowhere.

    The formula's own minimum, looked for among many intervals, is at Daly's.
    """
    assert saving.young(10, DAY) == pytest.approx(1314.5, abs=0.1)
    assert saving.daly(1e-3, DAY) == pytest.approx(saving.young(1e-3, DAY), rel=1e-3)
    assert saving.daly(2 * HOUR, HOUR) == saving.daly(9 * HOUR, HOUR) == HOUR
    assert saving.daly(2 * HOUR - 1e-6, HOUR) == pytest.approx(HOUR * 2 * (1 + 1 / 3 + 1 / 9) - 2 * HOUR, rel=1e-6)
    for mtbf in MTBF:
        for save in SAVES:
            tried = saving.daly(save, mtbf) * np.geomspace(0.5, 2, 401)
            for restart in (0, 600):
                best = min(tried, key=lambda interval: saving.lost(interval, save, mtbf, restart))  # noqa: B023
                assert best == pytest.approx(saving.daly(save, mtbf), rel=0.01)


def test_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The command writes a row for each setting and prints the tables; the same seed gives the same rows."""
    found = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        words = ["saving.py", "--failures", "200", "--seed", str(seed), "--output", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", words)
        saving.main()
        found.append(saving.read(tmp_path / name / "saving.csv"))
        assert capsys.readouterr().out.strip() == (tmp_path / name / "saving.md").read_text().strip()
    assert found[0] == found[1] != found[2] and len(found[0]) == len(saving.SHAPES) * len(MTBF) * len(SAVES)


def test_page() -> None:
    """The page's tables are those of the formulas and of the committed rows, which the formulas agree with."""
    found = saving.read(SIMULATED)
    for table in (saving.table_of_intervals(), saving.table_of_nodes(), saving.table_of_simulation(found)):
        assert table in PAGE, f"write it anew:\n{table}"
    for row in found:
        exact = {"young": saving.young(row.save, row.mtbf), "daly": saving.daly(row.save, row.mtbf)}
        exact["formula"] = saving.lost(exact["daly"], row.save, row.mtbf, row.restart)
        assert dataclasses.asdict(row) == pytest.approx(dataclasses.asdict(row) | exact)
        assert row.lost_daly < 1.01 * row.lost_best and max(row.lost_half, row.lost_twice) < 1.255 * row.lost_best, row
    assert "| 154 days |" in PAGE and "| 264 days |" in PAGE  # of a node: 1,000 / 6.50, and 54 days x 2,048 / 419
