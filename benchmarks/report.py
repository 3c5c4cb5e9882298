"""What the modules beside it have measured, as CSV, as a Markdown table and as a picture. It needs matplotlib only."""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """What one example's run was like: a row of local.csv or job.csv."""

    example: str
    largest_difference: float  # of a weight, from the first example's
    test_accuracy: float  # 0 to 1
    seconds_to_first_step: float  # from the command on
    samples_per_second: float  # of all processes
    peak_mb_per_process: float  # of the largest process
    lines_to_read: int  # of code in train.py
    train_losses: tuple[float, ...]  # of each epoch


@dataclass(frozen=True)
class Speed:
    """How fast one run was: a row of throughput.csv or scaling.csv."""

    name: str  # an example, or "bare"
    scaling: str  # "weak" or "strong"; only in scaling.csv
    nodes: int
    processes: int  # of all nodes
    batch_size: int  # of each process
    precision: str
    round: int
    samples_per_second: float  # of all processes


@dataclass(frozen=True)
class PeerRun:
    """How fast one run of a public script, or of an example beside it, was: a row of peers.csv."""

    name: str
    precision: str
    round: int
    unit: str  # "images" or "tokens"
    per_second: float  # of all processes
    peak_mb: float  # of the largest process


def write_csv(rows: Sequence[Run | Speed | PeerRun], path: Path) -> None:
    """Write rows to a CSV file, with the names of their fields in its first line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(rows[0]))
        for row in rows:
            writer.writerow(" ".join(map(repr, cell)) if isinstance(cell, tuple) else cell for cell in astuple(row))


def read_runs(path: Path) -> list[Run]:
    """Read what `write_csv` has written of runs; raises OSError, KeyError or ValueError if it is something else."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = get_type_hints(Run) | {"train_losses": lambda text: tuple(map(float, text.split()))}
    return [Run(**{name: kind(row[name]) for name, kind in kinds.items()}) for row in rows]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of cells by the titles of their columns as a Markdown table, without columns that are all empty."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [titles, *([row[title] for title in titles] for row in rows)]
    heading, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    return f"{heading}{'|---' * len(titles)}|\n{''.join(others)}"


def run_cells(run: Run, first: str) -> dict[str, str]:
    """Return a run's row of the table; `first` is the example whose weights its own were compared with."""
    bits = f"differ by {run.largest_difference:.1e}" if run.largest_difference else f"{first}'s, bit for bit"
    return {
        "example": run.example,
        "weights": bits,
        "test accuracy": f"{run.test_accuracy:.2%}",
        "s to the first step": f"{run.seconds_to_first_step:.1f}",
        "samples/s": f"{run.samples_per_second:.0f}",
        "MB per process": f"{run.peak_mb_per_process:.0f}",
        "code lines to read": f"{run.lines_to_read}",
    }


def agreeing(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that end with the first one's weights, to the bit, and had its losses; the first is one of them.

    Losses are the same if they differ by a rounding: Lightning adds up the same numbers in another order.
    """

    def same(run: Run) -> bool:
        pairs = zip(run.train_losses, runs[0].train_losses, strict=True)
        return run.largest_difference == 0 and all(math.isclose(*pair, rel_tol=1e-12) for pair in pairs)

    return [run for run in runs if same(run)]


def runs_figure(runs: Sequence[Run]) -> Figure:
    """Return the picture of the runs: the training loss, once for all that agree, and bars of what each costs."""
    # Narrow, so that its words can be read on a phone
    figure = Figure(figsize=(5.6, 7), dpi=200, facecolor="white", layout="constrained")
    places = figure.add_gridspec(3, 2, height_ratios=(0.8, 1, 1))
    curves = figure.add_subplot(places[0, :])
    bars = [figure.add_subplot(places[row, column]) for row in (1, 2) for column in (0, 1)]
    alike = agreeing(runs)
    number = f"all {len(runs)}" if len(alike) == len(runs) else f"{len(alike)} of {len(runs)}"
    curves.set(title=f"training loss; the weights of\n{number} agree to the bit", xlabel="epoch")
    for run in [runs[0], *(run for run in runs if run not in alike)]:
        epochs = range(1, len(run.train_losses) + 1)
        label = run.example if run is not runs[0] else f"{number} examples"
        curves.plot(epochs, run.train_losses, "o-", markersize=4, label=label)
    curves.set(xticks=list(epochs), ylim=(0, None))
    if len(alike) < len(runs):
        curves.legend()
    columns: dict[str, Sequence[float]] = {
        "s to the first step\n(less is better)": [run.seconds_to_first_step for run in runs],
        "samples/s\n(more is better)": [run.samples_per_second for run in runs],
        "MB per process\n(less is better)": [run.peak_mb_per_process for run in runs],
        "code lines to read\n(train.py)": [run.lines_to_read for run in runs],
    }
    names = [run.example for run in runs]
    for axis, (title, values) in zip(bars, columns.items(), strict=True):
        drawn = axis.barh(names, values, color="tab:blue")
        axis.bar_label(drawn, [f"{value:.0f}" for value in values], padding=3)
        axis.set(title=title, xticks=[], xlim=(0, 1.3 * max(values)), ylim=(len(runs) - 0.5, -0.5))
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False, labelleft=axis in (bars[0], bars[2]))
    for axis in figure.axes:
        axis.title.set_fontsize(10)
    return figure


def draw_runs(runs: Sequence[Run], path: Path, caption: str) -> None:
    """Write the table and the picture beside the CSV file `path`."""
    finish([run_cells(run, runs[0].example) for run in runs], runs_figure(runs), path, caption)


def by_processes(speeds: Sequence[Speed]) -> dict[tuple[str, str, str], dict[int, list[Speed]]]:
    """Return for each name, scaling and precision all rounds by the number of processes, in ascending order."""
    found: dict[tuple[str, str, str], dict[int, list[Speed]]] = {}
    for speed in sorted(speeds, key=lambda speed: speed.processes):
        curve = found.setdefault((speed.name, speed.scaling, speed.precision), {})
        curve.setdefault(speed.processes, []).append(speed)
    return found


def median(rounds: Sequence[Speed]) -> float:
    """Return the median samples per second."""
    return statistics.median(speed.samples_per_second for speed in rounds)


def spread(ratios: Sequence[float]) -> str:
    """Return the median of some ratios, and the smallest and the largest, as a cell."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def speed_cells(speeds: Sequence[Speed]) -> list[dict[str, str]]:
    """Return the rows of the table: medians, how well they scale, and the ratios to the bare loop of the same round."""
    bare = {(one.precision, one.processes, one.round): one.samples_per_second for one in speeds if one.name == "bare"}
    rows = []
    for (name, scaling, precision), curve in by_processes(speeds).items():
        fewest, *_ = curve
        for processes, rounds in curve.items():
            pairs = [(one.samples_per_second, bare.get((precision, processes, one.round))) for one in rounds]
            ratios = [rate / other for rate, other in pairs if other]
            cells = {
                "name": name,
                "scaling": scaling,
                "precision": precision,
                "nodes": f"{rounds[0].nodes}",
                "processes": f"{processes}",
                "samples/s": f"{median(rounds):.0f}",
                "efficiency": f"{median(rounds) / median(curve[fewest]) * fewest / processes:.2f}",
                "to bare": "",
            }
            if ratios:
                cells["to bare"] = spread(ratios)
            rows.append(cells)
    return rows


def draw_speeds(speeds: Sequence[Speed], path: Path, caption: str = "") -> None:
    """Write the table and the picture of the medians beside the CSV file `path`.

    Both axes of the picture are logarithmic. Dashed: what the fewest processes reach, times the number of processes.
    """
    curves = by_processes(speeds)
    panels = list(dict.fromkeys((scaling, precision) for _, scaling, precision in curves))
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="tight")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    ticks = sorted({speed.processes for speed in speeds})
    for axis, (scaling, precision) in zip(axes[0], panels, strict=True):
        for (label, *panel), curve in curves.items():
            if panel == [scaling, precision]:
                rates = [median(rounds) for rounds in curve.values()]
                (line,) = axis.plot(list(curve), rates, marker="o", label=label)
                ideal = [rates[0] * processes / min(curve) for processes in curve]
                axis.plot(list(curve), ideal, linestyle="--", color=line.get_color(), alpha=0.5)
        title = f"{scaling} scaling, {precision}" if scaling else precision
        axis.set(xscale="log", yscale="log", title=title, xlabel="processes", ylabel="samples/s")
        axis.set_xticks(ticks, [str(processes) for processes in ticks])
        axis.set_xticks([], minor=True)
        axis.legend()
    finish(speed_cells(speeds), figure, path, caption)


def finish(rows: Sequence[Mapping[str, str]], figure: Figure | None, path: Path, caption: str) -> None:
    """Write the table, and the picture if there is one, beside the CSV file `path`, and print the table.

    The picture has the text of that file as its description.
    """
    path.with_suffix(".md").write_text(f"{caption}\n\n{table(rows)}".lstrip())
    if figure:
        figure.savefig(path.with_suffix(".png"), metadata={"Description": path.read_text()})
    print(f"\n{table(rows)}\n{path.parent}: {path.stem}.csv, {path.stem}.md{f', {path.stem}.png' * bool(figure)}")
