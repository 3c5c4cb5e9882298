"""Measure how fast the examples start and train, and how much memory they take. From the repository's root:

    python -m benchmarks.measure local    # each example here: weights, losses, start-up, samples/s
    python -m benchmarks.measure scaling  # over 1, 2, 4, ... nodes of a cluster, started by scaling.slurm

Each command writes NAME.csv and NAME.md, a table, to the folder --output. `local --help` and so on say more.

The environment needs the requirements of all examples that are measured (horovod_tensorflow is not). Speed is that of
all processes: the median of all epochs but the first. The start-up is the time from the command to the first step:
until metrics.csv has the first epoch, less its seconds there. Memory is the most that one process had resident.
"""

import argparse
import contextlib
import hashlib
import inspect
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.outputs import read_metrics

FIRST = "ddp_spawn"  # with which the others are compared
CONVNET = [name for name, launcher in LAUNCHERS.items() if launcher.convnet]
ALIKE = [name for name in CONVNET if LAUNCHERS[name].pytorch]  # those that start from the same weights
IMAGES, BATCH = 12_000, 64  # training images of the synthetic data set; samples per batch of each process


def speed(output: Path) -> float:
    """Return samples per second, over all processes: the median of all epochs but the first."""
    return statistics.median(row["samples_per_second"] for row in read_metrics(output)[1:])


def machine() -> str:
    """Return the date, this machine's processor, its cores that this process may use, and the release of PyTorch."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    model = found[1] if found else platform.machine()
    return f"{time.strftime('%d %B %Y')}, {model}, {cores()} cores, torch {version('torch')}, commit {commit()}"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def commit() -> str:
    """Return the commit of this repository, with a mark if files differ from it; "unknown" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def use_this_python() -> None:
    """Have the runs use the environment of this Python, also where it is not activated."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def follow(output: Path, ended: Callable[[], bool], processes: Callable[[], list[int]]) -> tuple[float, int]:
    """Follow a run to its end; return the seconds until its first epoch is in metrics.csv, and the MB of memory."""
    start, path, first, largest = time.time(), output / "metrics.csv", math.nan, 0
    while not ended():
        if math.isnan(first) and path.exists():
            first = path.stat().st_mtime - start
        for pid in processes():
            with contextlib.suppress(OSError):  # the process has ended
                status = Path(f"/proc/{pid}/status").read_text(errors="replace")
                largest = max([largest, *map(int, re.findall(r"VmHWM:\s*(\d+)", status))])
        time.sleep(0.1)
    return first, largest >> 10


def limited(args: argparse.Namespace) -> list[str]:
    """Return the flag of train.py that makes a run short, if this was asked for."""
    return [f"--limit-steps={args.limit_steps}"] if args.limit_steps else []


def compare(args: argparse.Namespace) -> None:
    """Train the ConvNet on the digits with ddp_spawn and the others, and compare weights, losses and costs.

    Each has 2 processes, started by the command of the example's README. "weights" and "losses" are the largest
    differences from those of ddp_spawn. The tests check that they are none.
    """
    from harness import outputs, runs

    rows: list[dict[str, Any]] = []
    weights, losses = {}, {}
    with tempfile.TemporaryDirectory(prefix="measure-") as temporary:
        for name in dict.fromkeys([FIRST, *args.examples]):
            folder = copy_example(ROOT / "examples" / name, Path(temporary, name))
            run, output = runs.start(name, folder, 2, *limited(args)), folder / "output"
            first, memory = follow(output, lambda run=run: run.process.poll() is not None, run.pids)
            assert run.wait().status == 0, f"{name} ended with {run.status}:\n{run.stdout}{run.stderr}"
            history, weights[name] = read_metrics(output), outputs.read_model(output)
            losses[name] = [row["train_loss"] for row in history]
            pairs = zip(losses[name], losses[FIRST], strict=True)
            rows.append(
                {
                    "example": name,
                    "weights": outputs.largest_difference(weights[name], weights[FIRST]),
                    "losses": max(abs(one - other) for one, other in pairs),
                    "test accuracy": f"{history[-1]['test_accuracy']:.2%}",
                    "s to the first step": first - history[0]["seconds"],
                    "samples/s": speed(output),
                    "MB per process": memory,
                }
            )
            print(rows[-1], flush=True)
            report.write(rows, args.output / f"{args.command}.csv", machine())
    print(report.table(rows))


def run_job(args: argparse.Namespace, example: str, batch: int, nodes: int, number: int) -> tuple[int, float]:
    """Run one job, unless its results are there; return its number of processes, and its speed."""
    script = (ROOT / "examples" / example / "run.slurm").read_text()
    asked = hashlib.sha256(repr([script, *args.sbatch]).encode()).hexdigest()[:6]  # other jobs have other names
    name = f"{example}-{nodes}-nodes-batch-{batch}-epochs-{args.epochs}-round-{number}-{asked}"
    output, log = args.output / "jobs" / name, args.output / "jobs" / f"{name}.out"
    if not any(output.glob("model.*")):
        output.mkdir(parents=True, exist_ok=True)
        # What SLURM has set for the job that this runs in is not for the new one.
        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or "SLURM" not in name}
        options = [f"--nodes={nodes}", "--exclusive=user", f"--output={log}", *args.sbatch]
        options += [f"--job-name={name}", "--dependency=singleton"]  # waits for the job of an earlier call
        words = ["--dataset", "synthetic", "--epochs", str(args.epochs), "--batch-size", str(batch)]
        command = ["sbatch", "--wait", *options, "run.slurm", *words]
        done = subprocess.run(command, cwd=ROOT / "examples" / example, env=kept | {"OUTPUT_DIR": str(output)})
        if done.returncode or not any(output.glob("model.*")):
            sys.exit(f"measure.py: error: {example} on {nodes} nodes failed: see above, and {log}")
    processes = int(read_metrics(output)[-1]["world_size"])
    if IMAGES // (batch * processes) < 5:
        sys.exit(f"measure.py: error: {processes} processes have under 5 steps an epoch: take a smaller --batch-size")
    return processes, speed(output)


def scaling(args: argparse.Namespace) -> None:
    """Measure samples per second over 1, 2, 4, ... nodes of a cluster, weak and strong scaling. In benchmarks/:

        sbatch scaling.slurm --nodes 1 2 4 8 --examples torchrun_multinode lightning

    It submits the examples' own run.slurm, one job at a time, on nodes that it shares with no other user: the ConvNet,
    12,000 synthetic images. Weak scaling: --batch-size per process on any number of nodes. Strong scaling: the global
    batch of the fewest nodes stays the same and is divided among all processes.

    Each job's files stay in jobs/ of the folder --output. Started again, it measures only what is not there yet with
    this run.slurm and these options of sbatch.
    """
    args.nodes, args.output = sorted(set(args.nodes)), args.output.resolve()
    if not shutil.which("sbatch"):
        args.error("there is no sbatch here: run this on a login node of a SLURM cluster")
    for nodes in args.nodes:
        if args.batch_size * args.nodes[0] % nodes:
            args.error(f"--batch-size {args.batch_size} cannot be divided among {nodes} nodes: take a multiple")
    rows: list[dict[str, Any]] = []
    alone: dict[tuple[str, int], tuple[int, float]] = {}  # on the fewest nodes, where one job is both kinds
    for number in range(args.rounds):
        for example in args.examples:
            for nodes in args.nodes:
                for kind in ("weak", "strong"):
                    batch = args.batch_size if kind == "weak" else args.batch_size * args.nodes[0] // nodes
                    processes, rate = run_job(args, example, batch, nodes, number)
                    fewest, base = alone.setdefault((example, number), (processes, rate))
                    row = {"example": example, "scaling": kind, "nodes": nodes, "processes": processes, "batch": batch}
                    efficiency = f"{rate / base * fewest / processes:.2f}"
                    rows.append(row | {"round": number, "samples/s": rate, "efficiency": efficiency})
                    print(rows[-1], flush=True)
                    report.write(rows, args.output / "scaling.csv")
    print(report.table(rows))


def positive(text: str, least: int = 1) -> int:
    """Return a whole number; argparse turns ValueError into one line."""
    if int(text) < least:
        raise ValueError
    return int(text)


def main() -> None:
    """Read the command line and measure what it names."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.measure", description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, measure in {"local": compare, "scaling": scaling}.items():
        command = commands.add_parser(name, description=inspect.getdoc(measure), formatter_class=layout)
        command.set_defaults(measure=measure, error=command.error)
        if measure is scaling:
            several = [example for example in CONVNET if example != FIRST]  # those that train on several nodes
            command.add_argument("--examples", nargs="+", choices=several, default=["torchrun_multinode"])
            command.add_argument("--nodes", type=positive, nargs="+", default=[1, 2, 4], help="numbers of nodes")
            command.add_argument("--batch-size", type=positive, default=BATCH, help="per process, on the fewest nodes")
            command.add_argument("--epochs", type=lambda text: positive(text, 2), default=4, help="2 or more")
            command.add_argument("--rounds", type=positive, default=3)
            command.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="--sbatch=--qos=long")
        else:
            command.add_argument("--examples", nargs="+", choices=ALIKE, default=ALIKE)
            command.add_argument("--limit-steps", type=positive, help="of an epoch: to try the program")
        folder = ROOT / "results" / ("scaling" if measure is scaling else "")
        command.add_argument("--output", type=Path, default=folder, help="folder for what is written")
    args = parser.parse_args()
    use_this_python()
    args.measure(args)


if __name__ == "__main__":
    main()
