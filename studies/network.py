"""What a slow network costs, and what helps: `python -m studies.network`, from the repository's root, as root.

Two processes of one thread each, on two nodes of a lab, whose link is limited to each of --rates in turn. They train

ConvNet    the images' model, batch 64 per process, synthetic images
GPT        a TinyGPT larger than its default (width 256, 4 layers, 3.3 million parameters), 8 sequences of 128 tokens
GPT, LoRA  the same with frozen weights, and adapters of rank 8 beside each linear layer of its blocks

with AdamW, and exchange what the rows of WAYS say. Each round measures all of it once at each rate, so that what else
happens on the machine meets all alike. It writes network.csv and network.md (a table) to the folder --output, in which
a batch is one of each process, and prints the table. It needs the requirements of an example of PyTorch and of tests/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.measure import keep_memory, machine, positive
from common import data
from common.models import ConvNet, TinyGPT
from lab import Lab, Wanted, faults, why_not
from lab.base import LabError
from studies.adapters import with_adapters

ROOT = Path(__file__).resolve().parent.parent
NO_LIMIT = "none"
IMAGES, SEQUENCES, CONTEXT = 64, 8, 128  # images or sequences in a batch of each process; tokens in a sequence
END = "end of the round\n"


@dataclass(frozen=True)
class Way:
    """When the processes exchange what."""

    gradients: bool = True  # whether they exchange gradients at all
    accumulation: int = 1  # batches in a step of the optimizer
    bf16: bool = False  # gradients go over the network as 16-bit numbers
    period: int = 0  # batches from one average of the weights to the next; 0: they are not averaged

    @property
    def batches(self) -> int:
        """How many batches are measured at once: as many for all but those that need more for one exchange."""
        return max(4, self.period)

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes to be summed over all processes, per batch and trained parameter."""
        weights = 4 / self.period if self.period else 0
        return weights + self.gradients * (2 if self.bf16 else 4) / self.accumulation


ALONE, PLAIN = "none: computes only", "gradients, each batch (DDP)"
WAYS = {
    ALONE: Way(gradients=False),
    PLAIN: Way(),
    "gradients, each 4 batches (accumulation)": Way(accumulation=4),
    "gradients in 16 bits, each batch": Way(bf16=True),
    "weights, each 8 batches (local SGD)": Way(gradients=False, period=8),
}
MODELS = {"ConvNet": list(WAYS), "GPT": list(WAYS), "GPT, LoRA": [ALONE, PLAIN]}


class Training:
    """A model in training, one way; all processes have to make the same ones in the same order."""

    def __init__(self, name: str, way: str, images: data.Images) -> None:
        self.name, self.way, self.images = name, way, images
        torch.manual_seed(0)
        model = ConvNet() if name == "ConvNet" else TinyGPT(context=CONTEXT, width=256, layers=4)
        self.ddp_model = DistributedDataParallel(with_adapters(model) if name.endswith("LoRA") else model)
        if WAYS[way].bf16:
            self.ddp_model.register_comm_hook(None, bf16_compress_hook)
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, fused=True)
        self.batch_size = IMAGES if name == "ConvNet" else SEQUENCES

    def loss(self) -> torch.Tensor:
        """Return the mean loss of a random batch."""
        if self.name == "ConvNet":
            images, labels = self.images[torch.randint(len(self.images), (IMAGES,)).tolist()]
            return F.cross_entropy(self.ddp_model(images), labels)
        tokens = torch.randint(256, (SEQUENCES, CONTEXT + 1))
        return F.cross_entropy(self.ddp_model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def train(self, batches: int) -> None:
        """Train on so many batches of each process."""
        way = WAYS[self.way]
        for number in range(1, batches + 1):
            steps = number % way.accumulation == 0
            self.ddp_model.require_backward_grad_sync = steps and way.gradients
            (self.loss() / way.accumulation).backward()
            if steps:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if way.period and number % way.period == 0:
                average(self.trained)

    def measure(self) -> dict[str, str | float]:
        """Return the name and the way, samples/s of all processes, seconds and megabytes per batch of each process.

        `mb` is what has to be summed, `sent_mb` what has left this node, headers and acknowledgements included.
        """
        self.train(1)  # after another model, and another rate of the link
        self.optimizer.zero_grad()
        batches = WAYS[self.way].batches
        dist.barrier()
        sent, start = sent_bytes(), time.perf_counter()
        self.train(batches)
        dist.barrier()
        seconds = (time.perf_counter() - start) / batches
        parameters = sum(weight.numel() for weight in self.trained)
        return {
            "model": self.name,
            "way": self.way,
            "mb": parameters * WAYS[self.way].bytes_per_parameter / 1e6,
            "sent_mb": (sent_bytes() - sent) / batches / 1e6,
            "seconds": seconds,
            "samples_per_second": self.batch_size * dist.get_world_size() / seconds,
        }


@torch.no_grad()
def average(weights: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give all processes of a group, or of all, the mean of their weights."""
    for weight in weights:
        dist.all_reduce(weight, group=group)
        weight /= dist.get_world_size(group)


def sent_bytes() -> int:
    """Return how many bytes this node has sent over its link, eth0."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
    return int(counters[8])


def take_part(models: Sequence[str]) -> None:
    """Be one of the processes: measure a round for each line that rank 0 reads, and print what it found as JSON."""
    keep_memory()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Grad strides")  # of conv1: with one channel, both memory layouts are equal
    rank = int(os.environ["SLURM_PROCID"])
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["SLURM_NTASKS"]))
    images = data.load("synthetic")[0]
    trainings = [Training(name, way, images) for name in models for way in MODELS[name]]
    torch.manual_seed(rank)
    for training in trainings:
        training.train(2 * WAYS[training.way].accumulation)  # DDP arranges its buckets anew after the first step
    while True:
        go_on = torch.tensor(float(rank == 0 and sys.stdin.readline() != ""))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        for training in trainings:
            found = training.measure()
            if rank == 0:
                print(json.dumps(found), flush=True)
        if rank == 0:
            print(END, end="", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


def limit(lab: Lab, rate: str) -> None:
    """Limit the link between the two nodes, or remove the limit; raises LabError for a rate that is none."""
    if rate == NO_LIMIT:
        faults.heal(lab, lab.nodes[1])
    else:
        faults.slow(lab, lab.nodes[1], rate)


def ask(job: subprocess.Popen, rate: str, number: int) -> list[report.Phase]:
    """Have the processes measure one round, and return what they found; end with one line if they have died."""
    assert job.stdin and job.stdout
    with suppress(BrokenPipeError):  # then nothing comes back, either
        os.write(job.stdin.fileno(), b"\n")
    found = []
    for line in job.stdout:
        if line == END:
            return found
        found.append(report.Phase(rate, number, **json.loads(line)))
        print(found[-1], file=sys.stderr, flush=True)
    sys.exit("network.py: error: the processes in the lab have ended: see above")


def cells(phases: Sequence[report.Phase]) -> list[dict[str, str]]:
    """Return the table's rows of cells, by the titles of their columns: samples/s, and ms per batch, at each rate.

    All are medians of the rounds; what was sent is that of all rates, too.
    """
    rates = list(dict.fromkeys(phase.rate for phase in phases))
    rows = []
    for model, way in dict.fromkeys((phase.model, phase.way) for phase in phases):
        mine = [phase for phase in phases if (phase.model, phase.way) == (model, way)]
        sent = statistics.median(phase.sent_mb for phase in mine)
        row = {"model": model, "exchanged": way, "MB to sum, per batch": f"{mine[0].mb:.2f}"}
        row["MB sent, per batch"] = f"{sent:.2f}"
        for rate in rates:
            rounds = [phase for phase in mine if phase.rate == rate]
            speed = statistics.median(phase.samples_per_second for phase in rounds)
            milliseconds = 1000 * statistics.median(phase.seconds for phase in rounds)
            row["no limit" if rate == NO_LIMIT else rate] = f"{speed:.3g} ({milliseconds:.0f} ms)"
        rows.append(row)
    return rows


def measure(args: argparse.Namespace) -> list[report.Phase]:
    """Start a lab, and two processes in it; return what they measure at each rate, in each round."""
    from harness.jobs import on_this_machine_only

    shared = on_this_machine_only(ROOT, Path(sys.prefix))
    phases: list[report.Phase] = []
    with ExitStack() as stack:
        # As root: the user whom a lab makes up may not see this Python, or this folder.
        lab = stack.enter_context(Lab(Wanted(nodes=2, cpus=1, name=f"network{os.getpid()}", share=shared, user="root")))
        for rate in [*args.rates, NO_LIMIT]:  # refuses a wrong rate before anything is measured
            limit(lab, rate)
        words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--input=0", "--kill-on-bad-exit=1"]
        words += [sys.executable, "-m", "studies.network", "--take-part", "--models", *args.models]
        variables = {"MASTER_ADDR": lab.nodes[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        command = lab.command(words, cwd=ROOT, env=variables | {"OMP_NUM_THREADS": "1"})
        pipe = subprocess.PIPE
        job = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        for number in range(args.rounds):
            for rate in args.rates:
                limit(lab, rate)
                phases += ask(job, rate, number)
                report.write_csv(phases, args.output / "network.csv")
    return phases


def main() -> None:
    """Read the command line; measure, or be one of the processes that the measurement starts."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.network", description=__doc__, formatter_class=layout)
    rates = [NO_LIMIT, "10gbit", "1gbit", "100mbit"]
    parser.add_argument("--rates", nargs="+", default=rates, help="of the link, both ways; none: no limit")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    parser.add_argument("--take-part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.take_part:
        take_part(args.models)
    if reason := why_not():
        parser.error(reason)
    try:
        phases = measure(args)
    except LabError as error:
        parser.error(str(error))
    report.finish(cells(phases), None, args.output / "network.csv", machine())


if __name__ == "__main__":
    main()
