"""Train the ConvNet on the digits with every example, and compare weights, losses and costs.

    nox -s compare                       # or, in an environment with all examples' requirements:
    python benchmarks/compare.py --output results
    python benchmarks/compare.py --slurm  # as root

2 processes each, on this machine. With --slurm 4 processes: the lab's SLURM runs the shipped run.slurm of each, on
2 nodes where it can. It writes compare.csv, compare.md (a table) and compare.png (with --slurm: slurm.csv, ...), and
ends with 1 unless all have the same bits; with --slurm those in OTHER_ORDER need the first epoch's loss only, to 0.1 %.
"""

import argparse
import contextlib
import csv
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from lab import Lab, why_not  # noqa: E402
from tests.harness import jobs, outputs, runs  # noqa: E402
from tests.harness.launchers import LAUNCHERS, copy_example  # noqa: E402
from tests.harness.processes import workers  # noqa: E402

FIRST = "ddp_spawn"  # what the others are compared with
# With more than 2 processes the order counts in which an all-reduce adds gradients, and these do not add them as
# DistributedDataParallel does: DeepSpeed sends one block instead of several buckets, Horovod sends through MPI.
OTHER_ORDER = ("deepspeed", "horovod_cpu")


@dataclass
class Row:
    """What one example's run was like."""

    example: str
    largest_difference: float  # of a weight, from ddp_spawn's
    test_accuracy: float
    seconds_to_first_step: float  # from the command on; the evaluation after the first epoch is counted, too
    samples_per_second: float  # of all processes, median of the epochs but the first
    peak_mb_per_process: float
    lines: int  # of train.py, without blank ones and comments
    losses: list[float] = field(repr=False)  # training loss of each epoch
    weights: dict[str, torch.Tensor] = field(repr=False)

    def cells(self) -> dict[str, object]:
        """Return what the table shows."""
        return {name: value for name, value in vars(self).items() if name not in ("losses", "weights")}


def code_lines(path: Path) -> int:
    """Return how many lines of a Python file are neither blank nor comments nor its docstring."""
    code = re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def peak_memory(pid: int) -> float:
    """Return the most memory that a process has had resident so far, in MB; 0 if it has ended."""
    try:
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024
    except (OSError, TypeError):
        return 0.0


def train(example: str, temporary: Path) -> Row:
    """Run an example's local command in a copy of its folder, and return what it was like."""
    folder = copy_example(ROOT / "examples" / example, temporary / example)
    run = runs.start(example, folder, 2)
    first, memory = watch(run.read_until, run.workers)
    run.wait(60)
    if run.status:
        sys.exit(f"compare.py: error: {example} ended with {run.status}:\n{run.stdout}{run.stderr}")
    return read_row(example, folder, folder / "output", first, memory)


def train_in_job(example: str, temporary: Path, lab: Lab) -> Row:
    """Submit an example's run.slurm, with 4 processes of 2 threads, and return what the job was like."""
    folder = copy_example(ROOT / "examples" / example, temporary / example)
    job = jobs.submit_four(lab, example, folder)
    first, memory = watch(job.wait_for_line, lambda: workers(job.processes()))
    jobs.assert_completed(job, jobs.EPOCHS, processes=4)
    return read_row(example, folder, job.output, first, memory)


def watch(read_until: Callable[[str], object], workers: Callable[[], list[int]]) -> tuple[float, float]:
    """Follow a run of 5 epochs; return the seconds until the first is done, and the MB of its largest process."""
    start, memory = time.perf_counter(), 0.0
    for epoch in range(1, 6):
        read_until(f"epoch  {epoch}/5")
        if epoch == 1:
            first = time.perf_counter() - start
        memory = max(memory, *map(peak_memory, workers() or [0]))
    return first, memory


def read_row(example: str, folder: Path, output: Path, first: float, memory: float) -> Row:
    """Return what a run was like, from what it has written and what `watch` has seen."""
    rows = outputs.read_metrics(output)
    return Row(
        example,
        largest_difference=0.0,
        test_accuracy=rows[-1]["test_accuracy"],
        seconds_to_first_step=first - rows[0]["seconds"],
        samples_per_second=statistics.median(row["samples_per_second"] for row in rows[1:]),
        peak_mb_per_process=memory,
        lines=code_lines(folder / "train.py"),
        losses=[row["train_loss"] for row in rows],
        weights=outputs.read_model(output),
    )


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| example | weights | test accuracy | s to the first step | samples/s | MB per process | lines of train.py |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bits = f"differ by {row.largest_difference:.1e}" if row.largest_difference else f"{FIRST}'s, bit for bit"
        costs = f"{row.seconds_to_first_step:.1f} | {row.samples_per_second:.0f} | {row.peak_mb_per_process:.0f}"
        lines.append(f"| {row.example} | {bits} | {row.test_accuracy:.2%} | {costs} | {row.lines} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Draw the losses over each other, and the costs side by side."""
    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4))
    for width, row in zip(range(2 * len(rows), 0, -2), rows, strict=True):  # the thin ones on top of the thick ones
        axes[0].plot(range(1, len(row.losses) + 1), row.losses, linewidth=width, label=row.example)
    axes[0].set(title="training loss", xlabel="epoch")
    axes[0].legend()
    titles = {
        "seconds_to_first_step": "s to the first step",
        "samples_per_second": "samples/s",
        "peak_mb_per_process": "MB per process",
    }
    for axis, (name, title) in zip(axes[1:], titles.items(), strict=True):
        axis.barh([row.example for row in rows], [getattr(row, name) for row in rows])
        axis.invert_yaxis()
        axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def same(row: Row, first: Row, slurm: bool) -> bool:
    """Return whether a run ended as it should: with the bits of the first one, or at least with its first loss."""
    if slurm and row.example in OTHER_ORDER:
        return math.isclose(row.losses[0], first.losses[0], rel_tol=1e-3)
    return row.largest_difference == 0


def main() -> None:
    """Train with each example, then write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for the three files")
    parser.add_argument("--slurm", action="store_true", help="run.slurm in the lab, 4 processes (needs root)")
    parser.add_argument("--examples", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help=f"beside {FIRST}")
    args = parser.parse_args()
    if args.slurm and (reason := why_not()):
        parser.error(reason)
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-")))
        if args.slurm:
            shared = jobs.on_this_machine_only(temporary, Path(sys.prefix))
            lab = stack.enter_context(Lab(jobs.NODES, jobs.CPUS, name="compare", share=shared))
        for example in [FIRST, *(name for name in LAUNCHERS if name in args.examples and name != FIRST)]:
            rows.append(train_in_job(example, temporary, lab) if args.slurm else train(example, temporary))
            rows[-1].largest_difference = outputs.largest_difference(rows[-1].weights, rows[0].weights)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    name = "slurm" if args.slurm else "compare"
    with open(args.output / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0].cells()))
        writer.writeheader()
        writer.writerows(row.cells() for row in rows)
    (args.output / f"{name}.md").write_text(table(rows))
    draw(rows, args.output / f"{name}.png")
    print(f"\n{table(rows)}\n{os.path.relpath(args.output)}: {name}.csv, {name}.md, {name}.png")
    sys.exit(not all(same(row, rows[0], args.slurm) for row in rows))


if __name__ == "__main__":
    main()
