"""What the modules beside it have measured, as CSV, as a Markdown table and as a picture. It needs matplotlib only."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

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
    code_lines: int  # of train.py


@dataclass(frozen=True)
class Speed:
    """How fast one run was: a row of throughput.csv, scaling.csv or peers.csv."""

    name: str  # an example, "bare", "classic", or a public script
    scaling: str  # "weak" or "strong"; only in scaling.csv
    nodes: int
    processes: int  # of all nodes
    batch_size: int  # of each process
    precision: str
    round: int
    samples_per_second: float  # of all processes


def write_csv(rows: Sequence[Run | Speed], path: Path) -> None:
    """Write rows to a CSV file, with the names of their fields in its first line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(rows[0]))
        writer.writerows(map(astuple, rows))


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
        "code lines": str(run.code_lines),
    }


def draw_runs(runs: Sequence[Run], losses: Mapping[str, Sequence[float]], path: Path, caption: str) -> None:
    """Write the table and the picture beside the CSV file `path`; `losses` are those of each epoch, by example."""
    rows = [run_cells(run, runs[0].example) for run in runs]
    figure = Figure(figsize=(16, 4))
    curves, *bars = figure.subplots(1, 4)
    for width, (example, values) in zip(range(2 * len(losses), 0, -2), losses.items(), strict=True):
        curves.plot(range(1, len(values) + 1), values, linewidth=width, label=example)  # thin ones on top of thick ones
    curves.set(title="training loss", xlabel="epoch")
    curves.legend()
    for axis, title in zip(bars, ("s to the first step", "samples/s", "MB per process"), strict=True):
        axis.barh(list(losses), [float(row[title]) for row in rows])
        axis.invert_yaxis()
        axis.set_title(title)
    finish(rows, figure, path, caption)


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
    figure = Figure(figsize=(5.5 * len(panels), 4))
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
    """Write the table, and the picture if there is one, beside the CSV file `path`, and print the table."""
    path.with_suffix(".md").write_text(f"{caption}\n\n{table(rows)}".lstrip())
    if figure:
        figure.tight_layout()
        figure.savefig(path.with_suffix(".png"), dpi=100)
    print(f"\n{table(rows)}\n{path.parent}: {path.stem}.csv, {path.stem}.md{f', {path.stem}.png' * bool(figure)}")
