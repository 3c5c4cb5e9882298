"""Draw the two pictures on the repository's front page. It needs matplotlib only. From the repository's root:

    python -m benchmarks.pictures

launch.png shows who starts the training processes in each launch pattern, as its run.slurm says. compare.png is drawn
from compare.csv, a local.csv of `nox -s compare` on an idle machine. After another such run:
`cp results/local.csv benchmarks/compare.csv`, and then this command, which also prints the README's table.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text

from benchmarks import report
from harness.launchers import LAUNCHERS, ROOT

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pattern:
    """Who starts whom in a launch pattern's run.slurm, as it is shipped, on nodes without GPUs."""

    example: str
    nodes: int
    tasks: int  # on each node; srun starts them
    launcher: str  # the program in each task that starts the processes; empty: a task is a training process itself
    processes: int  # on each node
    meet: str  # where the processes learn of each other


def read_pattern(example: str, text: str) -> Pattern:
    """Return the pattern of an example whose run.slurm has this text."""
    nodes, tasks = (int(re.search(rf"^#SBATCH --{name}=(\d+)", text, re.MULTILINE)[1]) for name in HEADER)
    _, _, *launcher = re.search(r"^# Who starts the processes: (.*)$", text, re.MULTILINE)[1].split(" -> ")
    row = LAUNCHERS[example]
    program = re.match(r"[\w.]+\w", launcher[0])[0] if launcher else ""
    return Pattern(example, nodes, tasks, program, row.processes_in_job // nodes, row.meets)


HEADER = ("nodes", "ntasks-per-node")  # options of sbatch
PATTERNS = [
    read_pattern(example, (ROOT / "examples" / example / "run.slurm").read_text())
    for example, row in LAUNCHERS.items()
    if row.pattern
]
PATTERNS.sort(key=lambda pattern: (pattern.nodes, not pattern.launcher))
# The fill of a box, and of its text.
ROLES = {
    "batch script": ("#E69F00", "black"),
    "srun": ("#56B4E9", "black"),
    "launcher": ("#E3B5D0", "black"),
    "training process": ("#00694D", "white"),
}


def box(axis: Axes, role: str, x: float, y: float, text: str, width: float = 2.6) -> None:
    """Draw a box of a role around a point, with its text."""
    fill, color = ROLES[role]
    shape = FancyBboxPatch(
        (x - width / 2, y - 0.4),
        width,
        0.8,
        boxstyle="round,pad=0,rounding_size=0.15",
        facecolor=fill,
        edgecolor="black",
    )
    axis.add_patch(shape)
    axis.text(x, y, text, color=color, ha="center", va="center", fontsize=11)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from the lower edge of one box to the upper edge of another: the first starts the second."""
    points = (start[0], start[1] - 0.4), (end[0], end[1] + 0.4)
    axis.add_patch(FancyArrowPatch(*points, arrowstyle="-|>", mutation_scale=12, color="#444444", shrinkA=0, shrinkB=0))


def draw_pattern(axis: Axes, pattern: Pattern) -> None:
    """Draw the nodes of a pattern, what runs on each, and who has started it."""
    axis.text(5, 10.3, pattern.example, ha="center", fontsize=14, weight="bold")
    left = 5 - 2.5 * pattern.nodes  # of the first node, which is 5 wide
    script, srun = (left + 2.5, 7.8), (left + 2.5, 6.2)
    for node in range(pattern.nodes):
        x = left + 5 * node
        axis.add_patch(Rectangle((x + 0.15, 0.6), 4.7, 8.6, facecolor="#F2F2F2", edgecolor="#888888"))
        axis.text(x + 0.35, 8.6, f"node {node + 1}", fontsize=10, color="#444444")
        every = [(x + 2.5 + 2.3 * (i - (pattern.processes - 1) / 2), 1.5) for i in range(pattern.processes)]
        tasks = [(x + 2.5, 4)] if pattern.launcher else every[: pattern.tasks]
        for task in tasks:
            arrow(axis, srun, task)
        for number, process in enumerate(every):
            if pattern.launcher:
                arrow(axis, tasks[0], process)
            box(axis, "training process", *process, f"rank {node * pattern.processes + number}", width=2)
        if pattern.launcher:
            box(axis, "launcher", *tasks[0], text=pattern.launcher)
    arrow(axis, script, srun)
    box(axis, "batch script", *script, "run.slurm")
    box(axis, "srun", *srun, "srun")
    axis.text(5, -0.3, f"they meet {pattern.meet}", ha="center", fontsize=10)


def launch_figure() -> Figure:
    """Return the picture of all PATTERNS, with a legend."""
    figure = Figure(figsize=(12, 7.4), dpi=150, facecolor="white", layout="tight")
    *panels, legend = figure.subplots(-(-(len(PATTERNS) + 1) // 3), 3).flat
    for axis in (*panels, legend):
        axis.set(xlim=(-0.1, 10.1), ylim=(-0.8, 11))
        axis.axis("off")
    for axis, pattern in zip(panels, PATTERNS, strict=True):
        draw_pattern(axis, pattern)
    for row, role in enumerate(ROLES):
        box(legend, role, 1.9, 8.2 - 1.3 * row, "")
        legend.text(3.4, 8.2 - 1.3 * row, role, va="center", fontsize=12)
    arrow(legend, (1.9, 3.4), (1.9, 1.6))
    legend.text(3.4, 2.5, "starts", va="center", fontsize=12)
    legend.text(0.6, 0.9, "as shipped, on nodes without GPUs;\nwith GPUs one process for each", va="top", fontsize=11)
    return figure


def content(figure: Figure) -> dict[str, list]:
    """Return what a picture says: its texts, the points of its curves, and the lengths of its bars."""
    figure.draw_without_rendering()  # else its axes have no labels yet
    texts = [text.get_text() for text in figure.findobj(Text)]
    return {
        "texts": sorted(text for text in texts if text),
        "curves": [line.get_xydata().tolist() for axis in figure.axes for line in axis.lines],
        "bars": [float(patch.get_width()) for axis in figure.axes for bars in axis.containers for patch in bars],
    }


def main() -> None:
    """Write launch.png and compare.png, each with its `content` as the description in the file."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.pictures", description=__doc__, formatter_class=layout)
    parser.add_argument("--csv", type=Path, default=FOLDER / "compare.csv", help="a local.csv of nox -s compare")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for what is written")
    args = parser.parse_args()
    try:
        runs = report.read_runs(args.csv)
    except (OSError, KeyError, TypeError, ValueError) as error:
        parser.error(f"--csv {args.csv} cannot be read as a local.csv of nox -s compare: {error!r}")
    if not runs:
        parser.error(f"--csv {args.csv} has no rows")
    args.output.mkdir(parents=True, exist_ok=True)
    for name, figure in (("launch", launch_figure()), ("compare", report.runs_figure(runs))):
        figure.savefig(args.output / f"{name}.png", metadata={"Description": json.dumps(content(figure))})
    sys.stdout.write(report.table([report.run_cells(run, runs[0].example) for run in runs]))


if __name__ == "__main__":
    main()
