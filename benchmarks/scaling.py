"""Measure images per second of the examples over 1, 2, 4, ... nodes of a cluster, weak and strong scaling.

    sbatch scaling.slurm --nodes 1 2 4 8 --examples torchrun_multinode lightning

It submits the examples' own run.slurm, one job at a time, on nodes that it shares with no other user: the ConvNet,
synthetic 28x28 images, the median of all epochs but the first. Weak scaling: --batch-size per process on any number of
nodes. Strong scaling: the global batch of the fewest nodes stays the same and is shared out over all processes. An
epoch has 12,000 images, so --batch-size times the number of processes may be 2,400 at most.

In the folder --output: scaling.csv has the figures of this call, scaling.png their medians. Each job's own files stay
there, in jobs/, with its log; started again, it measures only what is not there yet.
"""

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/run.slurm") if path.parent.name != "ddp_spawn")
IMAGES = 12_000  # of the synthetic data set


@dataclass(frozen=True)
class Figure:
    """One measurement: a row of scaling.csv."""

    example: str
    scaling: str  # "weak" or "strong"
    nodes: int
    processes: int
    batch_size: int  # of each process
    round: int
    images_per_second: float  # of all processes


def positive(text: str) -> int:
    """Return a whole number above 0; raise ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more: {text}")
    return int(text)


def parse_args() -> argparse.Namespace:
    """Read the command line; end with status 2 and one line if the numbers do not go together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, nargs="+", default=[1, 2, 4], help="numbers of nodes")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=["torchrun_multinode"])
    parser.add_argument("--batch-size", type=positive, default=64, help="per process, on the fewest nodes")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--epochs", type=positive, default=4, help="of each job, 2 or more")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="such as --sbatch=--qos=long")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "scaling")
    args = parser.parse_args()
    args.nodes, args.output = sorted(set(args.nodes)), args.output.resolve()
    if not shutil.which("sbatch"):
        parser.error("there is no sbatch here: run this on a login node of a SLURM cluster")
    if args.epochs < 2:
        parser.error("--epochs 1: the first epoch does not count, so there must be a second")
    for nodes in args.nodes:
        if args.batch_size * args.nodes[0] % nodes:
            parser.error(
                f"--batch-size {args.batch_size} cannot be shared out over {nodes} nodes: take a multiple of {nodes}"
            )
    return args


def measure(args: argparse.Namespace, example: str, scaling: str, nodes: int, number: int) -> Figure:
    """Run one job, unless its results are there, and return its figure; end with one line if it fails."""
    batch_size = args.batch_size if scaling == "weak" else args.batch_size * args.nodes[0] // nodes
    name = f"{example}-{nodes}-nodes-batch-{batch_size}-epochs-{args.epochs}-round-{number}"
    output, log = args.output / "jobs" / name, args.output / "jobs" / f"{name}.out"
    if not (output / "model.pt").exists():
        output.mkdir(parents=True, exist_ok=True)
        # What SLURM has set for the job that this runs in is not for the new one.
        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or "SLURM" not in name}
        options = [f"--nodes={nodes}", "--exclusive=user", f"--output={log}", *args.sbatch]
        options += [f"--job-name={name}", "--dependency=singleton"]  # waits for that of an earlier call, if it runs on
        words = ["--dataset", "synthetic", "--epochs", args.epochs, "--batch-size", batch_size]
        command = ["sbatch", "--wait", *options, "run.slurm", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT / "examples" / example, env=kept | {"OUTPUT_DIR": str(output)})
        if done.returncode or not (output / "model.pt").exists():
            sys.exit(f"scaling.py: error: {example} on {nodes} nodes failed: see above, and {log}")
    with open(output / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    processes = int(rows[-1]["world_size"])
    most = processes * args.nodes[-1] // nodes
    if scaling == "weak" and IMAGES // (batch_size * most) < 5:
        sys.exit(f"scaling.py: error: {most} processes would have under 5 steps an epoch: take a smaller --batch-size")
    rate = statistics.median(float(row["samples_per_second"]) for row in rows[1:])
    return Figure(example, scaling, nodes, processes, batch_size, number, rate)


def save(figures: list[Figure], path: Path) -> None:
    """Write the figures to a CSV file."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Figure))
        writer.writerows(map(astuple, figures))


def medians(figures: list[Figure]) -> dict[tuple[str, str], dict[int, float]]:
    """Return for each kind of scaling and each example the median images per second by the number of nodes."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for scaling, example, nodes in dict.fromkeys((f.scaling, f.example, f.nodes) for f in figures):
        rates = [f.images_per_second for f in figures if (f.scaling, f.example, f.nodes) == (scaling, example, nodes)]
        found.setdefault((scaling, example), {})[nodes] = statistics.median(rates)
    return found


def draw(curves: dict[tuple[str, str], dict[int, float]], path: Path) -> None:
    """Draw images per second over nodes, both axes logarithmic; dashed: as many times the first as nodes."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    ticks = sorted({nodes for rates in curves.values() for nodes in rates})
    for axis, scaling in zip(axes, ("weak", "strong"), strict=True):
        for (kind, example), rates in curves.items():
            if kind == scaling:
                first = min(rates)
                (line,) = axis.plot(list(rates), list(rates.values()), marker="o", label=example)
                ideal = [rates[first] * nodes / first for nodes in rates]
                axis.plot(list(rates), ideal, linestyle="--", color=line.get_color(), alpha=0.5)
        axis.set(xscale="log", yscale="log", title=f"{scaling} scaling", xlabel="nodes", ylabel="images/s")
        axis.set_xticks(ticks, [str(nodes) for nodes in ticks])
        axis.minorticks_off()
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Run all jobs, one after the other; print the medians with their efficiency, and write the files."""
    args = parse_args()
    figures: list[Figure] = []
    for number in range(args.rounds):
        for example in args.examples:
            for nodes in args.nodes:
                for scaling in ("weak", "strong"):  # on the fewest nodes the same job is both
                    figures.append(measure(args, example, scaling, nodes, number))
                    print(figures[-1], flush=True)
                    save(figures, args.output / "scaling.csv")
    curves = medians(figures)
    for (scaling, example), rates in curves.items():
        first = min(rates)
        for nodes, rate in rates.items():
            efficiency = rate / rates[first] * first / nodes
            print(f"{example}, {scaling} scaling, {nodes} nodes: {rate:.0f} images/s, efficiency {efficiency:.2f}")
    draw(curves, args.output / "scaling.png")
    print(f"{args.output}: scaling.csv, scaling.png")


if __name__ == "__main__":
    main()
