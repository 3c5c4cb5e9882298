"""Measure images per second of the examples against a bare loop and a classic script, in one run, on CPU.

    python benchmarks/throughput.py --rounds 5 --examples ddp_spawn torchrun_multinode

Run it in an environment with the examples' requirements.txt and Pillow (torchvision brings it), on an idle
machine. Each figure is of the second epoch: synthetic 28x28 images, the ConvNet, batch 64 per process, AdamW.

bare     N independent processes with one thread each: same model, data and batches, no process group
NAME     examples/NAME/train.py with N processes, started by its local command
classic  what the published guides do: PIL images and per-image transforms in 4 loader workers per process, default
         threads, DistributedDataParallel over Gloo
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
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from launchers import LAUNCHERS  # noqa: E402

from common import data  # noqa: E402
from common.models import ConvNet  # noqa: E402

BATCH = 64


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


def command(example: str, args: argparse.Namespace, output: str) -> list[str]:
    """Return the command that starts an example as its users do."""
    return [*LAUNCHERS[example].command(args.processes), "--output-dir", output]


def trained(example: str, args: argparse.Namespace, bf16: bool) -> float:
    """Run an example and return the images per second of its second epoch, from metrics.csv."""
    with tempfile.TemporaryDirectory() as output:
        words = [*command(example, args, output), "--dataset", "synthetic", "--epochs", "2"]
        words += ["--precision", "bf16" if bf16 else "fp32"]
        on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        folder = ROOT / "examples" / example
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=on_cpu)
        with open(Path(output, "metrics.csv"), newline="") as file:
            return float(list(csv.DictReader(file))[1]["samples_per_second"])


def resident(pid: int | str) -> float:
    """Return the resident memory of a process in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def descendants(pid: int | str) -> list[str]:
    """Return the ids of the processes that a process has started, theirs included."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children + [grandchild for child in children for grandchild in descendants(child)]


def start_and_memory(example: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Return the seconds of a default run on digits, and the MB of its largest process and of `import torch` alone."""
    alone = "import re, torch; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    baseline = int(subprocess.run([sys.executable, "-c", alone], check=True, capture_output=True).stdout) / 1024
    with tempfile.TemporaryDirectory() as output:
        start = time.perf_counter()
        words, folder = command(example, args, output), ROOT / "examples" / example
        run = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        largest = 0.0
        for line in run.stdout:
            if "epoch  4" in line:
                started = descendants(run.pid)
                largest = max(resident(pid) for pid in started if not descendants(pid))  # those that train
        run.wait()
        return time.perf_counter() - start, largest, baseline


def main() -> None:
    """Print one line per round, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--examples", nargs="+", choices=LAUNCHERS, default=["ddp_spawn"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-classic", action="store_true", help="leave out the classic script, which takes minutes")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--port", type=int, default=19_471, help="for the classic script")
    args = parser.parse_args()
    args.images = 12_000  # what train.py's synthetic data set has
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"{name[1] if name else platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")
    medians = {}
    for precision in args.precisions:
        bf16, rows = precision == "bf16", []
        for _ in range(args.rounds):
            rows.append({"bare": together(bare, args, bf16)})
            rows[-1] |= {example: trained(example, args, bf16) for example in args.examples}
            figures = "  ".join(f"{name} {rate:.0f}" for name, rate in rows[-1].items())
            print(f"{precision}  {figures} images/s", flush=True)
        for example in args.examples:
            medians[precision, example] = statistics.median(row[example] for row in rows)
            ratios = [row[example] / row["bare"] for row in rows]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            median = f"{medians[precision, example]:.0f}"
            print(f"{precision}  {example}: median {median} images/s; median of its ratio to bare {ratio}", flush=True)
    if not args.no_classic:
        guide = together(classic, args, bf16=False)
        print(f"classic, fp32: {guide:.0f} images/s", flush=True)
        for (precision, example), rate in medians.items():
            print(f"{example} in {precision}: {rate / guide:.1f} times the classic script")
    for example in args.examples:
        seconds, largest, baseline = start_and_memory(example, args)
        print(f"{example}: default run on digits {seconds:.1f} s", end="; ")
        print(f"a training process {largest:.0f} MB, `import torch` {baseline:.0f} MB")


if __name__ == "__main__":
    main()
