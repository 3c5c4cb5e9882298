"""Measure how fast the examples start and train, and how much memory they take. From the repository's root:

    python -m benchmarks.measure local       # each of them on this machine: weights, losses and costs
    python -m benchmarks.measure job         # as root: the same by each run.slurm, in the lab
    python -m benchmarks.measure throughput  # samples per second against a bare loop; 20 minutes
    python -m benchmarks.measure scaling     # over 1, 2, 4, ... nodes of a cluster, started by scaling.slurm

`local --help` and so on say more. Each of them writes NAME.csv, NAME.md (a table) and NAME.png to the folder --output.

The words mean the same everywhere, and come from metrics.csv and run.json. The start is the time from the command to
the first step: until metrics.csv has the first epoch, less the seconds that it says of it (the evaluation after it is
counted, too). Memory is the most that the largest of a run's processes has had resident. Speed is that of all
processes, the median of all epochs but the first.

They run in an environment with the requirements of the examples, of tests/ and of benchmarks/; scaling needs no more
than the folders benchmarks/ and examples/, and matplotlib.
"""

import argparse
import contextlib
import csv
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
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {path.parent.name: path.read_text() for path in sorted(ROOT.glob("examples/*/train.py"))}
EXAMPLES = [
    example for example, text in SCRIPTS.items() if 'default="digits"' in text
]  # those that train the same model
# Those that need one environment; the others are measured with --venv only.
ALIKE = [example for example in EXAMPLES if "import ConvNet" in SCRIPTS[example]]
FIRST = "ddp_spawn"  # what the others are compared with
IMAGES, BATCH = 12_000, 64  # of the synthetic data set; of each process, by default


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv, one for each epoch."""
    with open(output / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def speed(rows: list[dict[str, float]]) -> float:
    """Return samples per second, over all processes: the median of all epochs but the first."""
    return statistics.median(row["samples_per_second"] for row in rows[1:])


def follow(output: Path, ended: Callable[[], bool], processes: Callable[[], list[int]]) -> tuple[float, int]:
    """Follow a run that was just started to its end.

    Return the seconds until metrics.csv had its first epoch, nan if that never came, and the most memory that one of
    the run's processes has had resident, in MB.
    """
    from benchmarks.largest_batch import peak

    start, path, first, memory = time.time(), output / "metrics.csv", math.nan, 0
    while not ended():
        if math.isnan(first) and path.exists():
            first = path.stat().st_mtime - start
        memory = max(memory, peak(processes()))
        time.sleep(0.1)
    return first, memory


def code_lines(text: str) -> int:
    """Return how many lines of a Python file are neither blank nor comments nor its docstring."""
    code = re.sub(r'\A""".*?"""', "", text, flags=re.DOTALL)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in code.splitlines())


def machine() -> str:
    """Return this machine's processor, how many of its cores this process may use, and the release of PyTorch."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    model = found[1] if found else platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, torch {version('torch')}"


def compare(args: argparse.Namespace) -> None:
    """Train the ConvNet on the digits with ddp_spawn and the others, and compare weights, losses and costs.

    local: 2 processes each, started by the command of the example's README.
    job:   4 processes each, in the lab, whose SLURM runs the example's run.slurm, on 2 nodes where it can.

    The table in RESULTS.md is that of local.md. That the weights agree is not checked here but in the tests.
    """
    from harness import jobs, outputs, runs
    from harness.launchers import copy_example
    from harness.processes import seldom
    from lab import Lab, Wanted, why_not

    in_job = args.command == "job"
    if in_job and (reason := why_not()):
        args.error(reason)
    path = args.output / f"{args.command}.csv"
    found, weights = [], {}
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="measure-")))
        if in_job:
            shared = jobs.on_this_machine_only(temporary, Path(sys.prefix))
            lab = stack.enter_context(Lab(Wanted(jobs.NODES, jobs.CPUS, name="measure", share=shared)))
        for example in dict.fromkeys([FIRST, *args.examples]):
            folder = copy_example(ROOT / "examples" / example, temporary / example)
            if in_job:
                job = jobs.submit_four(lab, example, folder)
                output, ended = job.output, seldom(lambda job=job: job.ended)
                first, memory = follow(output, ended, job.processes)
                jobs.assert_completed(job, jobs.EPOCHS, processes=4)
            else:
                run, output = runs.start(example, folder, 2), folder / "output"
                first, memory = follow(output, lambda run=run: run.process.poll() is not None, run.pids)
                assert run.wait().status == 0, f"{example} ended with {run.status}:\n{run.stdout}{run.stderr}"
            rows, weights[example] = read_metrics(output), outputs.read_model(output)
            difference = outputs.largest_difference(weights[example], weights[FIRST])
            accuracy, start = rows[-1]["test_accuracy"], first - rows[0]["seconds"]
            lines = code_lines(SCRIPTS[example])
            losses = tuple(row["train_loss"] for row in rows)
            found.append(report.Run(example, difference, accuracy, start, speed(rows), memory, lines, losses))
            print(found[-1], flush=True)
            report.write_csv(found, path)
    report.draw_runs(found, path, machine())


def loop(rank: int, processes: int, bf16: bool, barrier: Barrier, results: Queue) -> None:
    """Train on this process's part of the images; put its samples per second in the second epoch into `results`."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

    sys.path.insert(0, str(ROOT / "plumbing"))  # which has the common/ of most examples
    from plumbing.processes import keep_memory

    from common import data
    from common.models import ConvNet

    train_set, model = data.load("synthetic", size=IMAGES)[0], ConvNet()
    sampler = DistributedSampler(train_set, processes, rank, drop_last=True)
    keep_memory()
    torch.set_num_threads(1)
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, BATCH, drop_last=True), batch_size=None)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        barrier.wait()
        start, samples = time.perf_counter(), 0
        for images, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
    results.put(samples / (time.perf_counter() - start))


def together(processes: int, bf16: bool) -> float:
    """Run `loop` in several processes at once and return the sum of their samples per second."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(processes), spawn.Queue()
    words = (processes, bf16, barrier, results)
    started = [spawn.Process(target=loop, args=(rank, *words)) for rank in range(processes)]
    for process in started:
        process.start()
    rates = [results.get(timeout=1800) for _ in started]
    for process in started:
        process.join()
    return sum(rates)


def throughput(args: argparse.Namespace) -> None:
    """Measure samples per second of the examples against a bare loop, on CPU; let nothing else run meanwhile.

    Synthetic 28x28 images, the ConvNet, batch 64 per process, AdamW, two epochs, of which the second counts:

    bare     N independent processes with one thread each: same model, data, batches and settings of malloc, no process
             group
    NAME     examples/NAME/train.py with N processes of one thread, started by the command of its README; in another
             environment, made as that README says, with --venv NAME=FOLDER
    """
    from harness import runs
    from harness.launchers import copy_example

    cores, caption = sorted(os.sched_getaffinity(0)), machine()
    print(caption, flush=True)
    speeds: list[report.Speed] = []
    with tempfile.TemporaryDirectory(prefix="measure-") as temporary:
        folders = {name: copy_example(ROOT / "examples" / name, Path(temporary, name)) for name in args.examples}

        def add(name: str, processes: int, precision: str, number: int, rate: float) -> None:
            speeds.append(report.Speed(name, "", 1, processes, BATCH, precision, number, rate))
            print(speeds[-1], flush=True)
            report.write_csv(speeds, args.output / "throughput.csv")

        for processes in sorted(set(args.processes)):
            for precision in args.precisions:
                for number in range(args.rounds):
                    add("bare", processes, precision, number, together(processes, precision == "bf16"))
                    for name, folder in folders.items():
                        output = folder / f"output-{processes}-{precision}-{number}"
                        words = ["--dataset=synthetic", "--epochs=2", f"--precision={precision}"]
                        words += [f"--output-dir={output}"]
                        os.sched_setaffinity(0, cores[:processes])  # what is started now has one core for each process
                        venv = args.venv.get(name)
                        variables = {"PATH": f"{venv.resolve()}/bin:{os.environ['PATH']}"} if venv else {}
                        run = runs.train(name, folder, processes, *words, seconds=1800, **variables)
                        os.sched_setaffinity(0, cores)
                        assert " 1 thread each" in run.stdout, run.stdout
                        add(name, processes, precision, number, speed(read_metrics(output)))
    report.draw_speeds(speeds, args.output / "throughput.csv", caption)


def run_job(args: argparse.Namespace, example: str, scaling: str, nodes: int, number: int) -> report.Speed:
    """Run one job, unless its results are there, and return its speed; end with one line if it fails."""
    batch_size = args.batch_size if scaling == "weak" else args.batch_size * args.nodes[0] // nodes
    asked = [(ROOT / "examples" / example / "run.slurm").read_text(), *args.sbatch]  # by which speeds differ, too
    name = f"{example}-{nodes}-nodes-batch-{batch_size}-epochs-{args.epochs}-round-{number}"
    name += f"-{hashlib.sha256(repr(asked).encode()).hexdigest()[:6]}"
    output, log = args.output / "jobs" / name, args.output / "jobs" / f"{name}.out"
    if not any(output.glob("model.*")):
        output.mkdir(parents=True, exist_ok=True)
        # What SLURM has set for the job that this runs in is not for the new one.
        kept = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or "SLURM" not in name}
        options = [f"--nodes={nodes}", "--exclusive=user", f"--output={log}", *args.sbatch]
        options += [f"--job-name={name}", "--dependency=singleton"]  # waits for that of an earlier call, if it runs on
        words = ["--dataset", "synthetic", "--epochs", args.epochs, "--batch-size", batch_size]
        command = ["sbatch", "--wait", *options, "run.slurm", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT / "examples" / example, env=kept | {"OUTPUT_DIR": str(output)})
        if done.returncode or not any(output.glob("model.*")):
            sys.exit(f"measure.py: error: {example} on {nodes} nodes failed: see above, and {log}")
    rows = read_metrics(output)
    processes = int(rows[-1]["world_size"])
    most = processes * args.nodes[-1] // nodes
    if scaling == "weak" and IMAGES // (batch_size * most) < 5:
        sys.exit(f"measure.py: error: {most} processes would have under 5 steps an epoch: take a smaller --batch-size")
    return report.Speed(example, scaling, nodes, processes, batch_size, "fp32", number, speed(rows))


def scaling(args: argparse.Namespace) -> None:
    """Measure samples per second over 1, 2, 4, ... nodes of a cluster, weak and strong scaling. In benchmarks/:

        sbatch scaling.slurm --nodes 1 2 4 8 --examples torchrun_multinode lightning

    It submits the examples' own run.slurm, one job at a time, on nodes that it shares with no other user: the ConvNet,
    synthetic 28x28 images. Weak scaling: --batch-size per process on any number of nodes. Strong scaling: the global
    batch of the fewest nodes stays the same and is divided among all processes. An epoch has 12,000 images, so
    --batch-size times the number of processes may be 2,400 at most.

    The files in --output have the figures of this call. Each job's own files stay there, in jobs/, with its log;
    started again, it measures only what is not there yet with this run.slurm and these options of sbatch.
    """
    args.nodes, args.output = sorted(set(args.nodes)), args.output.resolve()
    if not shutil.which("sbatch"):
        args.error("there is no sbatch here: run this on a login node of a SLURM cluster")
    if args.epochs < 2:
        args.error("--epochs 1: the first epoch does not count, so there must be a second")
    for nodes in args.nodes:
        if args.batch_size * args.nodes[0] % nodes:
            args.error(
                f"--batch-size {args.batch_size} cannot be divided among {nodes} nodes: take a multiple of {nodes}"
            )
    speeds: list[report.Speed] = []
    for number in range(args.rounds):
        for example in args.examples:
            for nodes in args.nodes:
                for kind in ("weak", "strong"):  # on the fewest nodes the same job is both
                    speeds.append(run_job(args, example, kind, nodes, number))
                    print(speeds[-1], flush=True)
                    report.write_csv(speeds, args.output / "scaling.csv")
    report.draw_speeds(speeds, args.output / "scaling.csv")


def positive(text: str) -> int:
    """Return a whole number above 0; raise ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more: {text}")
    return int(text)


def environment(text: str) -> tuple[str, Path]:
    """Return the name of an example and the folder of its environment; raise ArgumentTypeError for anything else."""
    name, _, folder = text.partition("=")
    if name not in EXAMPLES or not Path(folder, "bin", "python").exists():
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, an example and the environment made for it: {text}")
    return name, Path(folder)


def main() -> None:
    """Read the command line and measure what it names."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.measure", description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, measure in {"local": compare, "job": compare, "throughput": throughput, "scaling": scaling}.items():
        command = commands.add_parser(name, description=inspect.getdoc(measure), formatter_class=layout)
        command.set_defaults(measure=measure, error=command.error)
        if measure is scaling:
            several = [example for example in EXAMPLES if example != FIRST]  # those that train on several nodes
            command.add_argument("--examples", nargs="+", choices=several, default=["torchrun_multinode"])
            command.add_argument("--nodes", type=positive, nargs="+", default=[1, 2, 4], help="numbers of nodes")
            command.add_argument("--batch-size", type=positive, default=BATCH, help="per process, on the fewest nodes")
            command.add_argument("--epochs", type=positive, default=4, help="of each job, 2 or more")
            command.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="--sbatch=--qos=long")
        else:
            choices = EXAMPLES if measure is throughput else ALIKE
            command.add_argument("--examples", nargs="+", choices=choices, default=ALIKE)
        if measure is throughput:
            command.add_argument("--venv", type=environment, action="append", default=[], metavar="NAME=FOLDER")
            command.add_argument("--processes", type=positive, nargs="+", default=[1, 2])
            command.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
        if measure is not compare:
            command.add_argument("--rounds", type=positive, default=3)
        folder = ROOT / "results" / ("scaling" if measure is scaling else "")
        command.add_argument("--output", type=Path, default=folder, help="folder for what is written")
    args = parser.parse_args()
    if args.command == "throughput":
        args.venv = dict(args.venv)
        if other := set(args.examples).difference(ALIKE, args.venv):
            args.error(f"{min(other)} needs an environment of its own: --venv {min(other)}=FOLDER, see its README")
    args.measure(args)


if __name__ == "__main__":
    main()
