"""How often to save: `python -m studies.saving`, the tables in docs/how-often-to-save.md, in a few seconds.

A run saves after so many seconds of work. A failure costs what was done since the last save, and a restart. Young's and
Daly's formulas say which interval loses least; a simulation that draws failures looks for the best one without them,
and says what is lost at theirs. It writes a row for each setting to saving.csv in the folder --output, and the page's
tables to saving.md.

An interval is the work between two saves, without the time of a save. All times are in seconds.
"""

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import get_type_hints

import numpy as np

from benchmarks import report
from benchmarks.measure import positive

ROOT = Path(__file__).resolve().parent.parent
MINUTE, HOUR, DAY = 60, 3600, 86400
MTBF = (HOUR, 4 * HOUR, 12 * HOUR, DAY, 7 * DAY, 30 * DAY)  # of a job
SAVES = (1, 10, MINUTE, 5 * MINUTE)
RESTART = 5 * MINUTE
NODE_RATE = 6.50 / 1000 / DAY  # failures of a node, of the cluster RSC-1 in arXiv:2410.21680
NODES = (1, 8, 64, 512, 2048)
FACTORS = 2.0 ** np.arange(-4, 4.01, 0.125)  # the intervals that are tried, relative to Young's
SHAPES = {"independent": 1.0, "in clusters": 0.7}  # of the Weibull distribution of the times; 1 is the exponential


def young(save: float, mtbf: float) -> float:
    """Return Young's interval."""
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Return Daly's interval of higher order, which holds for a save of less than twice the mean time to a failure."""
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def lost(interval: float, save: float, mtbf: float, restart: float = 0) -> float:
    """Return which share of the time is not work that is kept, by Daly's model of the whole run."""
    return 1 - interval / mtbf * math.exp(-restart / mtbf) / math.expm1((interval + save) / mtbf)


def simulate(interval: float, save: float, restart: float, times: np.ndarray) -> float:
    """Return which share of the time is lost in a run that fails after each of these times, counted from one another.

    Each time begins with a restart. What follows is work and save by turns; a failure in either loses the work since
    the last complete save, and one in the restart all of its time.
    """
    saves = np.floor(np.maximum(times - restart, 0) / (interval + save))
    return 1 - interval * saves.sum() / times.sum()


def draw(mtbf: float, shape: float, failures: int, seed: int) -> np.ndarray:
    """Return times between failures of this mean, from a Weibull distribution."""
    return np.random.default_rng(seed).weibull(shape, failures) * mtbf / math.gamma(1 + 1 / shape)


@dataclass(frozen=True)
class Row:
    """What was simulated for one setting: a row of saving.csv."""

    failures: str  # a key of SHAPES
    mtbf: float
    save: float
    restart: float
    young: float  # the intervals
    daly: float
    best: float  # of those that were tried
    lost_young: float  # shares of the time, 0 to 1, in the simulation
    lost_daly: float
    lost_best: float
    lost_half: float  # at half of Daly's interval
    lost_twice: float
    formula: float  # what lost() says of Daly's interval


def measure(failures: str, mtbf: float, save: float, restart: float, number: int, seed: int) -> Row:
    """Simulate one setting with so many failures, the same at each interval."""
    times = draw(mtbf, SHAPES[failures], number, seed)
    first, higher = young(save, mtbf), daly(save, mtbf)
    tried = [float(first * factor) for factor in FACTORS]
    best = min(tried, key=lambda interval: simulate(interval, save, restart, times))
    intervals = (first, higher, best, higher / 2, higher * 2)
    shares = [float(simulate(interval, save, restart, times)) for interval in intervals]
    formula = lost(higher, save, mtbf, restart)
    return Row(failures, mtbf, save, restart, first, higher, best, *shares, formula=formula)


def measure_all(number: int, seed: int) -> list[Row]:
    """Simulate all settings."""
    return [measure(kind, mtbf, save, RESTART, number, seed) for kind in SHAPES for mtbf in MTBF for save in SAVES]


def words(seconds: float) -> str:
    """Return a time as people say it."""
    least = {"days": 1.5 * DAY, "h": HOUR, "min": 1.5 * MINUTE, "s": 0}  # from which on a unit is used
    unit = next(unit for unit, length in least.items() if seconds >= length)
    return f"{figures(seconds / {'days': DAY, 'h': HOUR, 'min': MINUTE, 's': 1}[unit])} {unit}"


def figures(number: float) -> str:
    """Return a number with a digit after the point if it is small, and has one."""
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"


def advice(save: float, mtbf: float) -> str:
    """Return a cell of the page's tables: the minutes for --checkpoint-every, and which share of the time is lost.

    The flag counts from the beginning of a save to that of the next.
    """
    interval = daly(save, mtbf)
    return f"{figures((interval + save) / MINUTE)} min, {lost(interval, save, mtbf):.1%}"


def table_of_intervals() -> str:
    """Return the page's first table: for each mean time between failures, and each time that a save takes."""
    rows = []
    for mtbf in MTBF:
        cells = {"a failure of the job each": words(mtbf)}
        cells |= {f"a save takes {words(save)}": advice(save, mtbf) for save in SAVES}
        cells[f"restarts of {words(RESTART)} add"] = f"{-math.expm1(-RESTART / mtbf):.2%}"
        rows.append(cells)
    return report.table(rows)


def table_of_nodes() -> str:
    """Return the page's second table: for a number of nodes, at the rate of failures of a real cluster."""
    rows = []
    for nodes in NODES:
        mtbf = 1 / NODE_RATE / nodes
        cells = {"nodes": f"{nodes}", "a failure of the job each": words(mtbf)}
        cells |= {f"a save takes {words(save)}": advice(save, mtbf) for save in (10, MINUTE, 5 * MINUTE)}
        rows.append(cells)
    return report.table(rows)


def table_of_simulation(found: Sequence[Row]) -> str:
    """Return the page's third table: what was simulated, of some of the settings."""
    rows = []
    for row in found:
        if (row.mtbf, row.save) not in ((HOUR, 5 * MINUTE), (4 * HOUR, MINUTE), (DAY, MINUTE), (7 * DAY, 10)):
            continue
        cells = {"failures": row.failures, "each": words(row.mtbf), "a save takes": words(row.save)}
        cells |= {"Young": words(row.young), "Daly": words(row.daly), "best": words(row.best)}
        cells |= {"lost with Young's": f"{row.lost_young:.2%}", "Daly's": f"{row.lost_daly:.2%}"}
        cells |= {"half of Daly's": f"{row.lost_half:.2%}", "twice Daly's": f"{row.lost_twice:.2%}"}
        cells |= {"the best": f"{row.lost_best:.2%}", "by the formula, Daly's": f"{row.formula:.2%}"}
        rows.append(cells)
    return report.table(rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        kinds = get_type_hints(Row).items()
        return [Row(**{name: kind(row[name]) for name, kind in kinds}) for row in csv.DictReader(file)]


def main() -> None:
    """Simulate all settings, and write the rows and the tables."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.saving", description=__doc__, formatter_class=layout)
    parser.add_argument("--failures", type=positive, default=200_000, help="that are drawn for each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    rows = measure_all(args.failures, args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    with open(args.output / "saving.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        writer.writerows(map(astuple, rows))
    text = "\n".join([table_of_intervals(), table_of_nodes(), table_of_simulation(rows)])
    (args.output / "saving.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
