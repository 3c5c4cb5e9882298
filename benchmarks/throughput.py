"""Measure images per second of the examples against a bare loop and a classic script, in one run, on CPU.

    nox -s bench                         # every example, 1 and 2 processes, fp32; 20 minutes
    python benchmarks/throughput.py --rounds 5 --examples ddp_spawn torchrun_multinode

Run it in an environment with the examples' requirements.txt and Pillow (torchvision brings it), on an idle
machine. Each figure is of the second epoch: synthetic 28x28 images, the ConvNet, batch 64 per process, AdamW.

bare     N independent processes with one thread each: same model, data and batches, no process group
NAME     examples/NAME/train.py with N processes, started by its local command
classic  what the published guides do: PIL images and per-image transforms in 4 loader workers per process, default
         threads, DistributedDataParallel over Gloo

All but classic compute with one thread a process, so that N processes can be compared with one. In the folder --output:
throughput.csv has each single figure, throughput.png the medians, start.csv the seconds and MB of a start.
"""

import argparse
import csv
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import astuple, dataclass, fields
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from common import data  # noqa: E402
from common.models import ConvNet  # noqa: E402
from tests.harness.launchers import LAUNCHERS  # noqa: E402

BATCH = 64


@dataclass(frozen=True)
class Figure:
    """One measurement: a row of throughput.csv."""

    machine: str
    processes: int
    precision: str
    round: int
    name: str
    images_per_second: float


@dataclass(frozen=True)
class Start:
    """What a start of an example's default run costs, beside `import torch` alone: a row of start.csv."""

    example: str
    seconds_to_first_line: float
    seconds_in_all: float
    mb_per_process: float
    import_torch_seconds: float
    import_torch_mb: float


def train_two_epochs(model: torch.nn.Module, loader: DataLoader, bf16: bool, barrier: Barrier) -> float:
    """Return the images per second of this process in the second epoch; all processes start it together."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        barrier.wait()
        start, images_seen = time.perf_counter(), 0
        for images, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            images_seen += len(labels)
    return images_seen / (time.perf_counter() - start)


def bare(rank: int, args: argparse.Namespace, bf16: bool, barrier: Barrier, results: Queue) -> None:
    """Train alone on this process's part of the data, held in memory, with one thread."""
    torch.set_num_threads(1)
    train_set, _ = data.load("synthetic", size=args.images)
    sampler = DistributedSampler(train_set, args.processes, rank, drop_last=True)
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, BATCH, drop_last=True), batch_size=None)
    results.put(train_two_epochs(ConvNet(), loader, bf16, barrier))


class PerImage(Dataset):
    """The same images as PIL objects, transformed one by one."""

    def __init__(self, images: data.Images) -> None:
        from torchvision import transforms

        self.images = images
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.images.images[index, :, :, 0].numpy(), mode="L")
        return self.transform(image), int(self.images.labels[index])


def classic(rank: int, args: argparse.Namespace, bf16: bool, barrier: Barrier, results: Queue) -> None:
    """Train as the published guides do."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=args.processes)
    train_set = PerImage(data.load("synthetic", size=args.images)[0])
    sampler = DistributedSampler(train_set, args.processes, rank, drop_last=True)
    loader = DataLoader(train_set, BATCH, sampler=sampler, num_workers=4, drop_last=True)
    results.put(train_two_epochs(DistributedDataParallel(ConvNet()), loader, bf16, barrier))
    dist.destroy_process_group()


def together(function, args: argparse.Namespace, bf16: bool) -> float:
    """Run `function` in args.processes processes at once and return the sum of their images per second."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(args.processes), spawn.Queue()
    ranks = range(args.processes)
    processes = [spawn.Process(target=function, args=(rank, args, bf16, barrier, results)) for rank in ranks]
    for process in processes:
        process.start()
    rates = [results.get(timeout=1800) for _ in processes]
    for process in processes:
        process.join()
    return sum(rates)


def started(example: str, args: argparse.Namespace, output: str, *words: str) -> subprocess.Popen[str]:
    """Start an example as its users do, on CPU, with one core and so one thread for each process."""
    return subprocess.Popen(
        [*LAUNCHERS[example].command(args.processes), "--output-dir", output, *words],
        cwd=ROOT / "examples" / example,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.processes]),
    )


def trained(example: str, args: argparse.Namespace, bf16: bool) -> float:
    """Run an example and return the images per second of its second epoch, from metrics.csv."""
    with tempfile.TemporaryDirectory() as output:
        words = ["--dataset", "synthetic", "--epochs", "2", "--precision", "bf16" if bf16 else "fp32"]
        run = started(example, args, output, *words)
        printed = run.communicate()[0]
        if run.returncode or " 1 thread each" not in printed:
            sys.exit(f"throughput.py: error: {example} ended with {run.returncode}:\n{printed}")
        with open(Path(output, "metrics.csv"), newline="") as file:
            return float(list(csv.DictReader(file))[1]["samples_per_second"])


def resident(pid: int | str) -> float:
    """Return the resident memory of a process in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def descendants(pid: int | str) -> list[str]:
    """Return the ids of the processes that a process has started, theirs included."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children + [grandchild for child in children for grandchild in descendants(child)]


def start(example: str, args: argparse.Namespace) -> Start:
    """Run an example with its defaults, on the digits, and return what its start costs."""
    begin = time.perf_counter()
    alone = "import re, torch; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    baseline = int(subprocess.run([sys.executable, "-c", alone], check=True, capture_output=True).stdout) / 1024
    imported = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as output:
        begin, first, largest = time.perf_counter(), 0.0, 0.0
        run = started(example, args, output)
        for line in run.stdout:
            if "ConvNet on" in line:
                first = time.perf_counter() - begin
            if "epoch  4" in line:
                pids = descendants(run.pid)
                largest = max(resident(pid) for pid in pids if not descendants(pid))  # those that train
        run.wait()
        return Start(example, first, time.perf_counter() - begin, largest, imported, baseline)


def summary(figures: list[Figure]) -> dict[tuple[int, str, str], float]:
    """Print each median, its ratio to the bare loop's and its scaling efficiency; return the medians."""
    rates = {(figure.processes, figure.precision, figure.round, figure.name): figure for figure in figures}
    medians: dict[tuple[int, str, str], float] = {}
    for processes, precision, name in dict.fromkeys((f.processes, f.precision, f.name) for f in figures):
        rounds = [f for f in figures if (f.processes, f.precision, f.name) == (processes, precision, name)]
        median = medians[processes, precision, name] = statistics.median(f.images_per_second for f in rounds)
        bare = [rates[processes, precision, f.round, "bare"].images_per_second for f in rounds]
        ratios = [f.images_per_second / b for f, b in zip(rounds, bare, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        line = f"{processes} x {name}, {precision}: median {median:.0f} images/s; to bare {spread}"
        fewest = min(f.processes for f in figures)
        if processes > fewest:
            efficiency = median / medians[fewest, precision, name] * fewest / processes
            line += f"; {efficiency:.2f} of {fewest}'s, times {processes / fewest:g}"
        print(line, flush=True)
    return medians


def save(folder: Path, name: str, rows: list[Figure] | list[Start]) -> None:
    """Write rows to a CSV file."""
    with open(folder / name, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(rows[0]))
        writer.writerows(map(astuple, rows))


def draw(medians: dict[tuple[int, str, str], float], folder: Path) -> None:
    """Draw the medians, one group of bars for each number of processes and precision."""
    groups = list(dict.fromkeys((processes, precision) for processes, precision, _ in medians))
    names = list(dict.fromkeys(name for *_, name in medians))
    figure, axis = pyplot.subplots(figsize=(8, 4))
    for place, name in enumerate(names):
        where = [group + (place - len(names) / 2) / (len(names) + 1) for group in range(len(groups))]
        axis.bar(where, [medians[*group, name] for group in groups], 1 / (len(names) + 1), align="edge", label=name)
    axis.set_xticks(range(len(groups)), [f"{n} process{'es' * (n > 1)}, {precision}" for n, precision in groups])
    axis.set_ylabel("images/s, all processes")
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "throughput.png", dpi=100)


def main() -> None:
    """Print one line per round, then the medians; write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--examples", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="in ascending order")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--classic", action="store_true", help="also the classic script, which takes minutes")
    parser.add_argument("--port", type=int, default=19_471, help="for the classic script")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for the three files")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    args.images = 12_000  # what train.py's synthetic data set has
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    machine += f", torch {torch.__version__}"
    print(machine, flush=True)
    figures, counts = [], args.processes
    for args.processes in counts:
        for precision in args.precisions:
            for number in range(args.rounds):
                rates = {"bare": together(bare, args, precision == "bf16")}
                rates |= {example: trained(example, args, precision == "bf16") for example in args.examples}
                words = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                print(f"{args.processes} x {precision}  {words} images/s", flush=True)
                figures += [Figure(machine, args.processes, precision, number, *item) for item in rates.items()]
                save(args.output, "throughput.csv", figures)
    medians = summary(figures)
    draw(medians, args.output)
    if args.classic:
        guide = together(classic, args, bf16=False)
        print(f"classic, {args.processes} processes, fp32: {guide:.0f} images/s", flush=True)
    starts = [start(example, args) for example in args.examples]
    for row in starts:
        print(row, flush=True)
    save(args.output, "start.csv", starts)


if __name__ == "__main__":
    main()
