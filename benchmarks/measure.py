"""Measure how fast the examples start and train, and how much memory they take. From the repository's root:

    python -m benchmarks.measure local       # each example here: weights, losses, start-up, samples/s
    python -m benchmarks.measure job         # as root: the same by each run.slurm, in the lab
    python -m benchmarks.measure throughput  # samples/s beside a bare loop, on an idle machine
    python -m benchmarks.measure scaling     # over 1, 2, 4, ... nodes of a cluster, started by scaling.slurm

Each command writes NAME.csv and NAME.md, a table, to the folder --output. `local --help` and so on say more.

The environment needs the requirements of all examples that are measured (horovod_tensorflow is not). Speed is that of
all processes: the median of all epochs but the first. The start-up is the time from the command to the first step:
until metrics.csv has the first epoch, less its seconds there. Memory is the most that one process had resident.
"""

import argparse
import contextlib
import ctypes
import hashlib
import inspect
import math
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
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


def code_lines(path: Path) -> int:
    """Return how many lines of a Python file are neither blank nor a comment nor its docstring."""
    code = re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def limited(args: argparse.Namespace) -> list[str]:
    """Return the flag of train.py that makes a run short, if this was asked for."""
    return [f"--limit-steps={args.limit_steps}"] if args.limit_steps else []


def compare(args: argparse.Namespace) -> None:
    """Train the ConvNet on the digits with ddp_spawn and the others, and compare weights, losses and costs.

    local: 2 processes each, started by the command of the example's README.
    job:   4 processes each, started by the example's run.slurm in the lab, on 2 nodes where it can.

    "weights" and "losses" are the largest differences from those of ddp_spawn. The tests check that they are none.
    """
    from harness import jobs, outputs, runs
    from lab import Lab, Wanted, why_not

    in_job = args.command == "job"
    if in_job and (reason := why_not()):
        args.error(reason)
    rows: list[dict[str, Any]] = []
    weights, losses = {}, {}
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="measure-")))
        if in_job:
            shared = jobs.on_this_machine_only(temporary, Path(sys.prefix))
            lab = stack.enter_context(Lab(Wanted(jobs.NODES, jobs.CPUS, name="measure", share=shared)))
        for name in dict.fromkeys([FIRST, *args.examples]):
            folder = copy_example(ROOT / "examples" / name, temporary / name)
            if in_job:
                words = ["--processes", "4"] * (name == FIRST)  # which starts them itself, on one node
                options = ("--cpus-per-task=8",) * (name == FIRST)
                job = jobs.submit(lab, name, folder, *words, *limited(args), options=options)
                first, memory = follow(job.output, lambda job=job: not job.processes() and job.ended, job.processes)
                output = job.output
                assert job.shown["JobState"] == "COMPLETED", f"{name} failed:\n{job.log}"
            else:
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
                    "code lines": code_lines(folder / "train.py"),
                }
            )
            print(rows[-1], flush=True)
            report.write(rows, args.output / f"{args.command}.csv", machine())
    print(report.table(rows))


def loop(rank: int, options: Mapping[str, Any], barrier: Barrier, results: Queue) -> None:
    """Train on this process's part of the images; put its samples per second in the second epoch into `results`."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, DistributedSampler

    from common import data
    from common.models import ConvNet

    libc = ctypes.CDLL(None)  # keep freed memory, as longrun.py does
    libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)
    libc.mallopt(-1, 2**31 - 1)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    on_gpu = options["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    train_set, model = data.load("synthetic", size=IMAGES)[0], ConvNet().to(device)
    sampler = DistributedSampler(train_set, options["processes"], rank, drop_last=True)
    extra = {"sampler": sampler, "drop_last": True, "collate_fn": data.collate, "pin_memory": on_gpu}
    loader = DataLoader(train_set, options["batch"], **extra)
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu)
    for _ in range(2):
        barrier.wait()
        start, samples = time.perf_counter(), 0
        for images, labels in islice(loader, options["limit"]):
            images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            with torch.autocast(device.type, torch.bfloat16, options["precision"] == "bf16"):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            samples += len(labels)
        loss.item()  # waits for a GPU
    results.put(samples / (time.perf_counter() - start))


def bare(processes: int, precision: str, device: str = "cpu", batch: int = BATCH, limit: int | None = None) -> float:
    """Run `loop` in several processes at once and return the sum of their samples per second."""
    options = {"processes": processes, "precision": precision, "device": device, "batch": batch, "limit": limit}
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(processes), spawn.Queue()
    started = [spawn.Process(target=loop, args=(rank, options, barrier, results)) for rank in range(processes)]
    for process in started:
        process.start()
    rates = [results.get(timeout=1800) for _ in started]
    for process in started:
        process.join()
    return sum(rates)


def throughput(args: argparse.Namespace) -> None:
    """Measure samples per second of the examples beside a bare loop, on CPUs; let nothing else run meanwhile.

    Synthetic 28x28 images, the ConvNet, batch 64 per process, AdamW, two epochs, of which the second counts.

    bare     N independent processes with one thread each: same model, data, batches and settings of malloc, no DDP
    NAME     examples/NAME/train.py with N processes of one thread
    """
    from harness import runs

    all_cores, rows = sorted(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory(prefix="measure-") as temporary:
        folders = {name: copy_example(ROOT / "examples" / name, Path(temporary, name)) for name in args.examples}
        for processes in sorted(set(args.processes)):
            for precision in args.precisions:
                for number in range(args.rounds):
                    rates = {"bare": bare(processes, precision, limit=args.limit_steps)}
                    for name, folder in folders.items():
                        output = folder / f"output-{processes}-{precision}-{number}"
                        words = ["--dataset=synthetic", "--epochs=2", f"--precision={precision}"]
                        words += [f"--output-dir={output}", *limited(args)]
                        os.sched_setaffinity(0, all_cores[:processes])  # one core for each process of the run
                        run = runs.train(name, folder, processes, *words, seconds=1800)
                        os.sched_setaffinity(0, all_cores)
                        assert " 1 thread each" in run.stdout, run.stdout
                        rates[name] = speed(output)
                    for name, rate in rates.items():
                        row = {"name": name, "precision": precision, "processes": processes, "round": number}
                        rows.append(row | {"samples/s": rate, "to bare": rate / rates["bare"]})
                        print(rows[-1], flush=True)
                    report.write(rows, args.output / "throughput.csv", machine(), medians(rows))
    print(report.table(medians(rows)))


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for all rounds of a measurement: the median speed, and the ratios within the rounds."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ("name", "precision", "processes")), []).append(row)
    return [
        {
            "name": name,
            "precision": precision,
            "processes": processes,
            "samples/s": statistics.median(row["samples/s"] for row in rounds),
            "to bare": report.spread([row["to bare"] for row in rounds]),
        }
        for (name, precision, processes), rounds in found.items()
    ]


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
    for name, measure in {"local": compare, "job": compare, "throughput": throughput, "scaling": scaling}.items():
        command = commands.add_parser(name, description=inspect.getdoc(measure), formatter_class=layout)
        command.set_defaults(measure=measure, error=command.error)
        if measure is scaling:
            several = [example for example in CONVNET if example != FIRST]  # those that train on several nodes
            command.add_argument("--examples", nargs="+", choices=several, default=["torchrun_multinode"])
            command.add_argument("--nodes", type=positive, nargs="+", default=[1, 2, 4], help="numbers of nodes")
            command.add_argument("--batch-size", type=positive, default=BATCH, help="per process, on the fewest nodes")
            command.add_argument("--epochs", type=lambda text: positive(text, 2), default=4, help="2 or more")
            command.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="--sbatch=--qos=long")
        else:
            command.add_argument("--examples", nargs="+", choices=ALIKE, default=ALIKE)
            command.add_argument("--limit-steps", type=positive, help="of an epoch: to try the program")
        if measure is throughput:
            command.add_argument("--processes", type=positive, nargs="+", default=[1, 2])
            command.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
        if measure is not compare:
            command.add_argument("--rounds", type=positive, default=3)
        folder = ROOT / "results" / ("scaling" if measure is scaling else "")
        command.add_argument("--output", type=Path, default=folder, help="folder for what is written")
    args = parser.parse_args()
    use_this_python()
    args.measure(args)


if __name__ == "__main__":
    main()
