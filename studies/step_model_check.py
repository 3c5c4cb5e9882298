"""The model of step_model.py beside what nodes of the lab measure: `python -m studies.step_model_check`, as root.

One process on each of eight nodes of a lab, whose links are limited to each of --rates in turn. 1, 2, 4 and 8 of them
train a model of 1.2 million weights (4.8 MB) with each of WAYS, by DDP and FSDP themselves, over Gloo. The machine has
fewer cores than nodes, so computing is imitated: each layer waits until its time is over, 400 ms in all, which is drawn
anew for each step and process with a standard deviation of 10 %. What moves over the links is real.

Each round measures all of it once at each rate, and before it latency and bandwidth of a link, by messages between two
nodes. It writes step_model_check.csv to the folder --output: medians of the rounds, and what the model is given.
It needs the requirements of an example of PyTorch and of tests/.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import get_type_hints

from benchmarks import report
from benchmarks.measure import machine, positive
from lab import Lab, Wanted, faults, why_not
from lab.base import LabError
from studies.step_model import CLUSTERS, Model, Step, ddp, fsdp, link, local_sgd

ROOT = Path(__file__).resolve().parent.parent
NODES = (1, 2, 4, 8)
LAYERS, WIDTH, GROUPS = 12, 316, 4  # square layers; groups of them are DDP's buckets, and FSDP's units
COMPUTING, SCATTER = 0.4, 0.1  # seconds of a step, and their standard deviation as a share
PERIOD = 8  # steps between two averages of local SGD
WEIGHTS = LAYERS * (WIDTH**2 + WIDTH)
ALONE = "none: computes only"
WAYS = {ALONE: PERIOD, "DDP": 3, "local SGD": PERIOD, "FSDP": 2}  # steps that are measured at once
END = "end of the round\n"


@dataclass(frozen=True)
class Row:
    """The median of the rounds for one rate, way and number of nodes: a row of step_model_check.csv."""

    rate: str
    way: str
    nodes: int
    seconds: float  # of a step
    sent_mb: float  # by the first node, per step
    computing: float  # mean seconds of a step on one node, this way
    scatter: float  # the standard deviation of these, as a share
    latency: float  # of a link at this rate
    bandwidth: float  # bytes a second


def predicted(row: Row) -> Step:
    """Return the step that the model predicts for a row, from what was measured without any exchange of all."""
    cluster = replace(CLUSTERS["ethernet"], latency=row.latency, bandwidth=row.bandwidth, scatter=row.scatter)
    model = Model(WEIGHTS, 1, 1, 0, 4, GROUPS)
    if row.way == "DDP":
        return ddp(model, row.computing, row.nodes, cluster, bucket=model.size / GROUPS)
    if row.way == "FSDP":
        return fsdp(model, row.computing, row.nodes, cluster)
    return local_sgd(model, row.computing, row.nodes, cluster, PERIOD)


def sent_bytes() -> int:
    """Return how many bytes this node has sent over its link, eth0."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(counters[8])


def take_part(nodes: Sequence[int]) -> None:
    """Be one of the processes: measure a round for each line that rank 0 reads, and print what it found as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    class Wait(torch.autograd.Function):
        """Pass on its input when a time is over, and twice that time in the backward pass."""

        @staticmethod
        def forward(ctx, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            threading.Event().wait(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            threading.Event().wait(2 * ctx.seconds)
            return gradient, None

    class Layer(nn.Linear):
        """A layer that takes its share of a step's time."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Wait.apply(x, step_seconds[0] / 3 / LAYERS))

    class Training:
        """A model in training, one way, on the first nodes; all processes have to make the same ones in turn."""

        def __init__(self, way: str, number: int) -> None:
            self.way, self.group = way, dist.new_group(range(number))
            if rank >= number:
                return
            torch.manual_seed(0)
            each = LAYERS // GROUPS
            units = [nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(each))) for _ in range(GROUPS)]
            self.plain = self.model = nn.Sequential(*units)
            if way == "DDP":
                # A bucket is closed by the layer that makes it larger than this.
                size = (each - 0.5) * 4 * (WIDTH**2 + WIDTH) / 2**20
                words = {"process_group": self.group, "bucket_cap_mb": size}
                self.model = DistributedDataParallel(self.plain, **words)
            if way == "FSDP":
                mesh = DeviceMesh.from_group(self.group, "cpu")
                for unit in units:
                    fully_shard(unit, mesh=mesh)
                fully_shard(self.model, mesh=mesh)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

        def train(self, steps: int) -> list[float]:
            """Train, and return the seconds of each step."""
            found = []
            for number in range(1, steps + 1):
                start = time.perf_counter()
                step_seconds[0] = COMPUTING * max(0.1, 1 + SCATTER * torch.randn((), generator=drawn).item())
                self.model(torch.ones(1, WIDTH)).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.way == "local SGD" and number % PERIOD == 0:
                    with torch.no_grad():
                        for weight in self.plain.parameters():
                            dist.all_reduce(weight, group=self.group)
                            weight /= dist.get_world_size(self.group)
                found.append(time.perf_counter() - start)
            return found

    torch.set_num_threads(1)
    rank = int(os.environ["SLURM_PROCID"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
    step_seconds, drawn, rounds = [0.001], torch.Generator(), 0
    links = dist.new_group(), dist.new_group()
    both = (nodes[0], nodes[-1])  # alone on one, and all at the same time
    trainings = {
        (way, number): Training(way, number) for number in nodes for way in WAYS if way != ALONE or number in both
    }
    for (_, number), training in trainings.items():
        if rank < number:
            training.train(2)  # DDP arranges its buckets anew after the first step
    while True:
        go_on = torch.tensor(float(rank == 0 and sys.stdin.readline() != ""))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        latency, bandwidth = link(1, "cpu", rank, links)
        rounds += 1
        for (way, number), training in trainings.items():
            dist.barrier()
            if rank >= number:
                continue
            training.train(1)
            drawn.manual_seed(1000 * rounds + rank)  # the same times of computing for all ways
            dist.barrier(training.group)
            sent, start = sent_bytes(), time.perf_counter()
            each = training.train(WAYS[way])
            own: list = [None] * number
            dist.barrier(training.group)
            seconds = (time.perf_counter() - start) / WAYS[way]
            sent = (sent_bytes() - sent) / WAYS[way] / 1e6
            dist.all_gather_object(own, each, training.group)
            if rank == 0:
                found = {"way": way, "nodes": number, "seconds": seconds, "latency": latency, "bandwidth": bandwidth}
                found |= {"sent_mb": sent, "each": own}
                print(json.dumps(found), flush=True)
        dist.barrier()
        if rank == 0:
            print(END, end="", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


def ask(job: subprocess.Popen, rate: str) -> list[dict]:
    """Have the processes measure one round, and return what they found; end with one line if they have died."""
    assert job.stdin and job.stdout
    with suppress(BrokenPipeError):  # then nothing comes back, either
        os.write(job.stdin.fileno(), b"\n")
    found = []
    for line in job.stdout:
        if line == END:
            return found
        found.append({"rate": rate, **json.loads(line)})
        print({key: value for key, value in found[-1].items() if key != "each"}, file=sys.stderr, flush=True)
    sys.exit("step_model_check.py: error: the processes in the lab have ended: see above")


def medians(found: Sequence[dict], nodes: Sequence[int]) -> list[Row]:
    """Return the rows: medians of the rounds.

    Computing and scatter are those of all nodes, of all rounds, without an exchange. What a way takes longer on one
    node, with the same times of computing, is its own work, and counts as computing.
    """
    alone = [one for one in found if one["way"] == ALONE]
    steps = [value for one in alone if one["nodes"] == nodes[-1] for mine in one["each"] for value in mine]
    scatter = statistics.pstdev(steps) / statistics.fmean(steps)
    computing = {}
    for way, number in WAYS.items():
        # In pairs: what was measured in one round at one rate.
        first = [
            [sum(one["each"][0][:number]) for one in found if (one["way"], one["nodes"]) == (name, nodes[0])]
            for name in (way, ALONE)
        ]
        own = statistics.median((mine - other) / number for mine, other in zip(*first, strict=True))
        computing[way] = statistics.fmean(steps) + own
    rows = []
    for rate, way, number in dict.fromkeys((one["rate"], one["way"], one["nodes"]) for one in found):
        mine = [one for one in found if (one["rate"], one["way"], one["nodes"]) == (rate, way, number)]
        seconds, sent, latency, bandwidth = (
            statistics.median(one[key] for one in mine) for key in ("seconds", "sent_mb", "latency", "bandwidth")
        )
        if way != ALONE:
            rows.append(Row(rate, way, number, seconds, sent, computing[way], scatter, latency, bandwidth))
    return rows


def measure(args: argparse.Namespace) -> list[Row]:
    """Start a lab, and a process on each of its nodes; return the medians of what they measure."""
    from harness.jobs import on_this_machine_only

    shared = on_this_machine_only(ROOT, Path(sys.prefix))
    found: list[dict] = []
    with ExitStack() as stack:
        # As root: the user whom a lab makes up may not see this Python, or this folder.
        name = f"scale{os.getpid()}"
        lab = stack.enter_context(Lab(Wanted(nodes=args.nodes[-1], cpus=1, name=name, share=shared, user="root")))
        words = ["srun", f"--nodes={args.nodes[-1]}", "--ntasks-per-node=1", "--input=0", "--kill-on-bad-exit=1"]
        words += [sys.executable, "-m", "studies.step_model_check", "--take-part", "--nodes", *map(str, args.nodes)]
        variables = {"MASTER_ADDR": lab.nodes[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        command = lab.command(words, cwd=ROOT, env=variables | {"OMP_NUM_THREADS": "1"})
        pipe = subprocess.PIPE
        job = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        for _ in range(args.rounds):
            for rate in args.rates:
                for node in lab.nodes:
                    faults.slow(lab, node, rate)  # refuses a wrong rate
                found += ask(job, rate)
                write(medians(found, args.nodes), args.output / "step_model_check.csv")
    return medians(found, args.nodes)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows to a CSV file, with the names of their fields in its first line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(part.name for part in fields(Row))
        writer.writerows([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in astuple(row)] for row in rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        kinds = get_type_hints(Row).items()
        return [Row(**{name: kind(row[name]) for name, kind in kinds}) for row in csv.DictReader(file)]


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the table's rows of cells: milliseconds of a step at each rate, measured and predicted."""
    found = []
    for way, nodes in dict.fromkeys((row.way, row.nodes) for row in rows):
        cell = {"way": way, "nodes": f"{nodes}"}
        for row in rows:
            if (row.way, row.nodes) == (way, nodes):
                guess = predicted(row).seconds
                text = f"{1000 * row.seconds:.0f}, {1000 * guess:.0f} ({guess / row.seconds - 1:+.0%})"
                cell[f"{row.rate}: measured, model"] = text
        found.append(cell)
    return found


def main() -> None:
    """Read the command line; measure, or be one of the processes that the measurement starts."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.step_model_check", description=__doc__, formatter_class=layout)
    parser.add_argument("--rates", nargs="+", default=["50mbit", "75mbit", "100mbit"], help="of the links, both ways")
    parser.add_argument("--nodes", nargs="+", type=positive, default=NODES, help="rising; the last: nodes of the lab")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    parser.add_argument("--take-part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.nodes = sorted(set(args.nodes))
    if args.take_part:
        take_part(args.nodes)
    if args.nodes[0] != 1 or args.nodes[-1] < 2:
        parser.error("--nodes: must be 1, for a step without an exchange, and some that are more")
    if reason := why_not():
        parser.error(reason)
    try:
        rows = measure(args)
    except LabError as error:
        parser.error(str(error))
    report.finish(cells(rows), None, args.output / "step_model_check.csv", machine())


if __name__ == "__main__":
    main()
