"""How long a training step takes on 1, 2, 4, ... 1,000 nodes: a model of it, which docs/scale-model.md explains.

    python -m studies.step_model                            # a table of efficiencies, for a cluster of assumed figures
    python -m studies.step_model --cluster ethernet --bandwidth 1.25e8 --nodes 1 2 4 8
    python -m studies.step_model --parts 7B                 # where the seconds of a step go, for one model
    torchrun --nproc-per-node=2 -m studies.step_model --measure here.json   # figures of this machine, or of a job's
    python -m studies.step_model --cluster here.json
    python -m studies.step_model --published                # the model beside a table that others have measured

The efficiency is the computing of a step as a share of all its seconds. Where it is 1, N processors (GPUs, or processes
on CPUs) do N times the work of one. Each has the same number of samples on any number of nodes: weak scaling.

All times are in seconds, sizes in bytes, bandwidths in bytes a second in each direction, and speeds in FLOP/s.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from benchmarks import report
from benchmarks.measure import positive as whole

BUCKET = 25 * 2**20  # bytes that DDP exchanges at once, its bucket_cap_mb
SAVED = 12  # bytes of a checkpoint for each weight: the weight and two moments of Adam, in fp32
STATES = 16  # bytes that training holds for each weight: Rajbhandari et al. 2020, section 3.1; fp32 has as many
TOO_LARGE, NO_PLAN, NOT_MEASURED = "does not fit", "no plan", "not measured"
SMALL = 1e8  # weights below which the speed of large models says nothing of a step, which has to be measured


@dataclass(frozen=True)
class Cluster:
    """The figures of a cluster; those of `CLUSTERS` are assumed, those of --measure measured."""

    processors: int  # of a node
    flops: float  # that a processor sustains in a large model, not its peak
    memory: float  # of a processor
    latency_inside: float  # of a message between two processors of a node
    bandwidth_inside: float  # of a processor, to the others of its node
    latency: float  # of a message between two nodes
    bandwidth: float  # of a node, with all its network cards
    storage_read: float  # of the shared file system, all nodes together
    storage_write: float
    scatter: float  # standard deviation of a step's computing, as a share of its mean
    fsdp_overlap: bool = True  # whether FSDP moves layers while it computes others, which on CPUs it does not; DDP does
    whole_scatter: bool = False  # whether a reduce-scatter moves as much as an all-reduce, as Gloo's does
    rings: bool = False  # whether each collective goes round a ring, as Gloo's do, also where other ways are faster
    steps: dict[str, float] = field(default_factory=dict)  # measured seconds of a step's computing, of some models


@dataclass(frozen=True)
class Model:
    """A model and its batch. `samples` are images or tokens that a processor takes in a step."""

    weights: float
    samples: int
    flops: float  # of a sample, forward and backward
    sample_bytes: float  # that are read for a sample
    bytes_per_weight: int  # in which weights and gradients are exchanged
    layers: int
    width: int = 0  # of a transformer, 0 for others
    recompute: bool = False  # whether the backward pass computes the forward pass again; `flops` has it

    @property
    def size(self) -> float:
        """The bytes of all weights, or of all gradients, as they are exchanged."""
        return self.weights * self.bytes_per_weight

    @property
    def forward(self) -> float:
        """The forward pass as a share of a step's computing: the backward pass takes twice as long."""
        return 1 / 4 if self.recompute else 1 / 3


@dataclass(frozen=True)
class Step:
    """Where the seconds of a step go. Exchange and reading are what is not hidden behind the computing."""

    computing: float
    exchange: float = 0
    waiting: float = 0
    reading: float = 0
    saving: float = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.exchange + self.waiting + self.reading + self.saving

    @property
    def efficiency(self) -> float:
        """The share that is computing."""
        return self.computing / self.seconds


def transformer(weights: float, layers: int, width: int, tokens: int, context: int) -> Model:
    """Return a language model in bf16: 6 FLOP for each weight and token, and those of attention.

    Narayanan et al. 2021, equation 3, without recomputation and the vocabulary.
    """
    flops = 6 * weights + 12 * layers * width * context
    return Model(weights, tokens, flops, 4, 2, layers, width)


MODELS = {
    "ConvNet": Model(1_199_882, 64, 3 * 2 * 12e6, 784, 4, 4),  # 12 million multiplications forward, most in conv2
    "TinyGPT": Model(445_952, 64 * 128, 6 * 429_568 + 12 * 2 * 128 * 128, 1, 4, 2, 128),
    "1B": transformer(1e9, 20, 2048, 16_384, 2048),
    "7B": transformer(7e9, 32, 4096, 16_384, 4096),
    "70B": transformer(70e9, 80, 8192, 8_192, 4096),
}
CLUSTERS = {
    # Eight H100 with NVLink (450 GB/s each way) and a card of 400 Gbit/s for each: data sheets, less a fifth. 400
    # TFLOP/s is what large models sustain of the 989 in bf16.
    "h100": Cluster(
        processors=8,
        flops=4e14,
        memory=80e9,
        latency_inside=5e-6,
        bandwidth_inside=3.6e11,
        latency=1e-5,
        bandwidth=3.2e11,
        storage_read=5e10,
        storage_write=2.5e10,
        scatter=0.02,
    ),
    # One process on a node, plain Ethernet of 10 Gbit/s, Gloo; the steps of the small models are those of one core.
    "ethernet": Cluster(
        processors=1,
        flops=1e12,
        memory=256e9,
        latency_inside=1e-6,
        bandwidth_inside=1e10,
        latency=5e-5,
        bandwidth=1.2e9,
        storage_read=5e9,
        storage_write=2e9,
        scatter=0.05,
        fsdp_overlap=False,
        whole_scatter=True,
        rings=True,
        steps={"ConvNet": 0.085, "TinyGPT": 0.39},
    ),
}


# Collective operations. n processes, each with `size` bytes before an all-reduce or a reduce-scatter, or after an
# all-gather.


def collective(kind: str, n: int, size: float, latency: float, bandwidth: float, algorithm: str = "best") -> float:
    """Return the seconds of an `all_reduce`, `all_gather` or `reduce_scatter`, without the additions.

    ring: n - 1 messages of size / n to the neighbour, twice for an all-reduce: no way sends fewer bytes (Patarasuk and
    Yuan 2009). halving: log2(n) messages of size / 2, size / 4, ...: as many bytes, fewer messages (recursive halving
    and doubling; Thakur, Rabenseifner and Gropp 2005; n rounded up to a power of 2). tree: all bytes log2(n) times up a
    binomial tree, and down again for an all-reduce (the same). best: the fastest of them.
    """
    if n == 1:
        return 0.0
    rounds, passes = math.ceil(math.log2(n)), 2 if kind == "all_reduce" else 1
    share = (n - 1) / n * size / bandwidth
    seconds = {
        "ring": passes * ((n - 1) * latency + share),
        "halving": passes * (rounds * latency + share),
        "tree": passes * rounds * (latency + size / bandwidth),
    }
    if kind != "all_reduce":  # gather to a root, then broadcast down the tree; or reduce up, then scatter
        seconds["tree"] += rounds * latency + share
    return min(seconds.values()) if algorithm == "best" else seconds[algorithm]


def exchange(kind: str, nodes: int, size: float, cluster: Cluster, pieces: int = 1) -> float:
    """Return the seconds of a collective operation over all processors of the nodes, in so many pieces.

    First inside, then between the nodes: the processors of a node have a part of the bytes each and share its cards.
    """
    if kind == "reduce_scatter" and cluster.whole_scatter:
        kind = "all_reduce"
    algorithm, size = "ring" if cluster.rings else "best", size / pieces
    inside = collective(kind, cluster.processors, size, cluster.latency_inside, cluster.bandwidth_inside, algorithm)
    return pieces * (inside + collective(kind, nodes, size, cluster.latency, cluster.bandwidth, algorithm))


def together(computing: float, moving: float, pieces: int, overlap: bool = True) -> float:
    """Return the seconds of computing and moving in so many equal pieces, of which each pair has an order.

    Piece k is moved when it is computed (gradients), or computed when it is there (weights); meanwhile the other goes
    on. Then either all of one and the last piece of the other take longest, or the other way round.
    """
    if not overlap:
        return computing + moving
    return max(computing + moving / pieces, computing / pieces + moving)


# Waiting for the slowest.


@cache
def expected_maximum(n: int) -> float:
    """Return the mean of the largest of n independent samples of the standard normal distribution."""
    cdf, width = statistics.NormalDist().cdf, 0.005
    grid = [width * (k + 0.5) for k in range(int(9 / width))]
    return width * math.fsum(1 - cdf(x) ** n - (1 - cdf(x)) ** n for x in grid)


def waiting(computing: float, scatter: float, n: int, steps: int = 1) -> float:
    """Return how much longer than the mean the slowest of n takes, per step, if they meet after so many steps.

    Steps are taken as independent of each other: then the sums of many scatter less. A node that is always slow is
    not covered by it.
    """
    return computing * scatter * expected_maximum(n) / math.sqrt(steps)


# Ways to train.


def computing_of(model: Model, name: str, cluster: Cluster) -> float:
    """Return the seconds that a processor computes in a step: as measured, or by its speed."""
    return cluster.steps.get(name) or model.samples * model.flops / cluster.flops


def ddp(model: Model, computing: float, nodes: int, cluster: Cluster, bucket: float = BUCKET) -> Step:
    """DDP: an all-reduce of the gradients, in buckets, while the backward pass goes on."""
    pieces = math.ceil(model.size / bucket)
    moved, backward = exchange("all_reduce", nodes, model.size, cluster, pieces), (1 - model.forward) * computing
    return Step(
        computing,
        together(backward, moved, pieces) - backward,
        waiting(computing, cluster.scatter, nodes * cluster.processors),
    )


def local_sgd(model: Model, computing: float, nodes: int, cluster: Cluster, period: int = 32) -> Step:
    """Local SGD (Stich 2019): an all-reduce of the weights every `period` steps, with nothing to hide it."""
    moved = exchange("all_reduce", nodes, model.size, cluster)
    return Step(computing, moved / period, waiting(computing, cluster.scatter, nodes * cluster.processors, period))


def fsdp(model: Model, computing: float, nodes: int, cluster: Cluster) -> Step:
    """FSDP, ZeRO stage 3: weights are gathered in both passes, gradients reduced and scattered, layer by layer.

    That is 1.5 times DDP's bytes (Rajbhandari et al. 2020, section 7).
    """
    gather = exchange("all_gather", nodes, model.size, cluster, model.layers)
    reduce = exchange("reduce_scatter", nodes, model.size, cluster, model.layers)
    forward, backward = model.forward * computing, (1 - model.forward) * computing
    seconds = together(forward, gather, model.layers, cluster.fsdp_overlap)
    seconds += together(backward, gather + reduce, model.layers, cluster.fsdp_overlap)
    return Step(computing, seconds - computing, waiting(computing, cluster.scatter, nodes * cluster.processors))


def fsdp_tp(model: Model, computing: float, nodes: int, cluster: Cluster) -> Step:
    """FSDP between the nodes, tensor parallelism in them (Shoeybi et al. 2019).

    The processors of a node divide each layer and the samples of all of them. Each layer has two all-reduces of its
    activations in each pass (in 2 bytes), for which the next layer waits.
    """
    t = cluster.processors
    step = fsdp(model, computing, nodes, replace(cluster, processors=1))
    activations = t * model.samples * model.width * 2
    inside = collective("all_reduce", t, activations, cluster.latency_inside, cluster.bandwidth_inside)
    moved = step.exchange + (3 if model.recompute else 2) * 2 * model.layers * inside
    return Step(computing, moved, waiting(computing, cluster.scatter, nodes * t))


WAYS = {"DDP": ddp, "local SGD, 32 steps": local_sgd, "FSDP": fsdp, "FSDP, tensor parallel": fsdp_tp}


def held(model: Model, way: str, processors: int) -> float:
    """Return the bytes that a processor holds of weights, gradients and Adam's state; activations come on top.

    With FSDP a part of them, and of two layers all weights and gradients, for a moment.
    """
    states = STATES * model.weights
    return states / processors + 4 * model.size / model.layers if way.startswith("FSDP") else states


def step(
    name: str, way: str, nodes: int, cluster: Cluster, save_every: float = 1800, model: Model | None = None
) -> Step | str:
    """Return a step of a model (`MODELS[name]` if none is given), or in words why there is none.

    What is read has to be there when the step before ends; a checkpoint is written every `save_every` seconds.
    """
    model, n = model or MODELS[name], nodes * cluster.processors
    if WAYS[way] is fsdp_tp and (cluster.processors == 1 or not model.width):
        return NO_PLAN
    if held(model, way, n) > cluster.memory:
        return TOO_LARGE
    if model.weights < SMALL and name not in cluster.steps:
        return NOT_MEASURED
    found = WAYS[way](model, computing_of(model, name, cluster), nodes, cluster)
    read = n * model.samples * model.sample_bytes / cluster.storage_read
    found = replace(found, reading=max(0.0, read - found.seconds))
    # With DDP one process writes, over its node's link.
    write = cluster.storage_write if way.startswith("FSDP") else min(cluster.storage_write, cluster.bandwidth)
    return replace(found, saving=found.seconds * SAVED * model.weights / write / save_every)


def efficiencies(nodes: list[int], cluster: Cluster, save_every: float) -> list[dict[str, str]]:
    """Return the table's rows of cells: the efficiency of each model and way on each number of nodes."""
    rows = []
    for name in MODELS:
        for way in WAYS:
            found = [step(name, way, number, cluster, save_every) for number in nodes]
            if {NO_PLAN, NOT_MEASURED}.isdisjoint(found):
                shown = [one if isinstance(one, str) else f"{one.efficiency:.2f}" for one in found]
                rows.append({"model": name, "way": way} | dict(zip(map("{:,}".format, nodes), shown, strict=True)))
    return rows


def parts(name: str, nodes: list[int], cluster: Cluster, save_every: float) -> list[dict[str, str]]:
    """Return the rows of a model's table: where the milliseconds of a step go."""
    rows = []
    for way in WAYS:
        for number in nodes:
            found = step(name, way, number, cluster, save_every)
            if isinstance(found, Step):
                cells = {"way": way, "nodes": f"{number:,}", "a step, ms": f"{1000 * found.seconds:.1f}"}
                cells |= {key: f"{1000 * value:.1f}" for key, value in asdict(found).items()}
                rows.append(cells | {"efficiency": f"{found.efficiency:.2f}"})
    return rows


# A published table: Narayanan et al. 2021 (arXiv:2104.04473), table 2, "ZeRO-3 without model parallelism".


@dataclass(frozen=True)
class Published:
    """A row of it; all models have sequences of 2,048 tokens and a vocabulary of 51,200."""

    weights: float
    layers: int
    width: int
    gpus: int
    batch: int  # sequences of all GPUs
    teraflops: float  # per GPU


ZERO_3 = (
    Published(174.6e9, 96, 12_288, 384, 1536, 144),
    Published(174.6e9, 96, 12_288, 768, 1536, 88),
    Published(174.6e9, 96, 12_288, 1536, 1536, 44),
    Published(529.6e9, 105, 20_480, 640, 2560, 138),
    Published(529.6e9, 105, 20_480, 1120, 2240, 98),
    Published(529.6e9, 105, 20_480, 2240, 2240, 48),
)
# Two figures are fitted to the first and the third row: what a GPU sustains, and the bytes a second that reach it (two
# thirds of one of its node's cards of 200 Gbit/s). GPUs are in one ring, so that each counts as a node here.
SELENE = replace(CLUSTERS["h100"], processors=1, flops=1.505e14, latency=0, bandwidth=1.567e10, scatter=0)


def predicted(row: Published) -> float:
    """Return the teraFLOP/s per GPU that the model gives for a row; FLOP by the paper's equation 3."""
    width, layers, tokens, vocabulary = row.width, row.layers, 2048, 51_200
    flops = 96 * layers * width**2 * (1 + tokens / (6 * width) + vocabulary / (16 * layers * width))
    samples = row.batch * tokens // row.gpus
    model = Model(row.weights, samples, flops, 0, 2, layers, width, recompute=True)
    found = fsdp(model, computing_of(model, "", SELENE), row.gpus, SELENE)
    return samples * flops / found.seconds / 1e12


def published_rows() -> list[dict[str, str]]:
    """Return the table's rows of cells."""
    rows = []
    for row in ZERO_3:
        cells = {"weights": f"{row.weights / 1e9:.1f} billion", "GPUs": f"{row.gpus:,}", "batch": f"{row.batch:,}"}
        cells |= {"TFLOP/s per GPU, measured": f"{row.teraflops:.0f}", "the model": f"{predicted(row):.0f}"}
        rows.append(cells | {"difference": f"{predicted(row) / row.teraflops - 1:+.0%}"})
    return rows


# Figures of one's own.


def link(peer: int, device: str, rank: int, groups: tuple) -> tuple[float, float]:
    """Return latency and bandwidth between rank 0 and `peer`, which send each other 8 bytes, and 4 MB, at a time.

    `groups` are two of all processes, one for each direction: within a group, both of Gloo's share one connection.
    """
    import torch
    import torch.distributed as dist

    found, first = [], rank == 0
    for numbers, rounds in ((2, 51), (2**20, 7)):
        mine, other = torch.zeros(2, numbers, device=device)
        seconds = []
        for _ in range(rounds if rank in (0, peer) else 0):
            start = time.perf_counter()
            to = dist.isend(mine, peer, groups[0]) if first else dist.irecv(other, 0, groups[0])
            fro = dist.irecv(other, peer, groups[1]) if first else dist.isend(mine, 0, groups[1])
            to.wait()
            fro.wait()
            other.sum().item()  # on a GPU, wait
            seconds.append(time.perf_counter() - start)
        found.append(statistics.median(seconds[1:]) if seconds else math.nan)
    return found[0], 2**22 / (found[1] - found[0])


def training(name: str, device: str):
    """Return a function that takes a step of a model of common/, without an exchange, and ends when it is done."""
    import torch
    from torch.nn import functional as F

    from common.models import ConvNet, TinyGPT

    torch.manual_seed(0)
    if name == "ConvNet":
        model, inputs = ConvNet(), torch.randn(MODELS[name].samples, 1, 28, 28)
        labels = torch.randint(10, (len(inputs),))
    else:
        model, tokens = TinyGPT(), torch.randint(256, (MODELS[name].samples // 128, 129))
        inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def take_step() -> None:
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return take_step


def sustained(device: str) -> float:
    """Return the FLOP/s of a transformer's block, forward and backward: in bf16 on a GPU, in fp32 on a CPU."""
    import torch

    from common.models import Block

    on_gpu = device != "cpu"
    width, tokens = (4096, 8192) if on_gpu else (512, 512)
    block = Block(width, width // 128).to(device, torch.bfloat16 if on_gpu else torch.float32)
    x = torch.randn(tokens // 512, 512, width, device=device, dtype=block.proj.weight.dtype)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        block(x).sum().backward()
        block.proj.weight.grad.sum().item()
        seconds.append(time.perf_counter() - start)
    return 6 * sum(weight.numel() for weight in block.parameters()) * tokens / statistics.median(seconds[1:])


def measure(path: Path, rounds: int = 20) -> None:
    """Measure this machine or job, and write the figures as JSON; all processes call it, started by torchrun."""
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, processors = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // processors
    steps, scatter = {}, []
    for name in ("ConvNet", "TinyGPT"):
        take_step, seconds = training(name, device), []
        for _ in range(3 + rounds):
            dist.barrier()  # so that all compute at the same time, as in training
            start = time.perf_counter()
            take_step()
            seconds.append(time.perf_counter() - start)
        everybody: list = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, seconds[3:])
        every = [value for mine in everybody for value in mine]
        steps[name] = statistics.fmean(every)
        scatter.append(statistics.pstdev(every) / steps[name])
    flops = sustained(device)
    ends = {"inside": 1 if processors > 1 else 0, "": processors if nodes > 1 else 0}
    groups = dist.new_group(), dist.new_group()
    links = {key: link(peer, device, rank, groups) for key, peer in ends.items() if peer}
    if rank == 0:
        preset = CLUSTERS["h100" if device != "cpu" else "ethernet"]
        memory = torch.cuda.get_device_properties(local).total_memory if device != "cpu" else preset.memory
        found = replace(preset, processors=processors, flops=flops, memory=memory, scatter=max(scatter), steps=steps)
        if "inside" in links:
            found = replace(found, latency_inside=links["inside"][0], bandwidth_inside=links["inside"][1])
        if "" in links:
            found = replace(found, latency=links[""][0], bandwidth=links[""][1])
        if device == "cpu":
            found = replace(found, fsdp_overlap=False, whole_scatter=True, rings=True)
        path.write_text(json.dumps(asdict(found), indent=1) + "\n")
        assumed = ["storage_read", "storage_write", *([] if "" in links else ["latency", "bandwidth"])]
        print(f"{path}: measured on {nodes} node(s); assumed: {', '.join(assumed)}")
    dist.destroy_process_group()


def read_cluster(text: str) -> Cluster:
    """Return a cluster by its name, or from a JSON file of its figures; raises ArgumentTypeError."""
    if text in CLUSTERS:
        return CLUSTERS[text]
    try:
        figures = json.loads(Path(text).read_text())
        return Cluster(**{"steps": {}, **figures})
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; or take one of {', '.join(CLUSTERS)}") from None
    except (TypeError, ValueError):
        names = " ".join(part.name for part in fields(Cluster))
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object with the figures {names}") from None


def number(text: str) -> float:
    """Return a number that is not below 0; raise ArgumentTypeError for anything else."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, not below 0: {text}")
    return found


def positive(text: str) -> float:
    """Return a number above 0; raise ArgumentTypeError for anything else."""
    if not (found := number(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return found


def main() -> None:
    """Read the command line and print a table, or measure."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.step_model", description=__doc__, formatter_class=layout)
    parser.add_argument("--cluster", type=read_cluster, default="h100", help=f"{', '.join(CLUSTERS)}, or a JSON file")
    parser.add_argument("--nodes", type=whole, nargs="+", default=[1, 2, 8, 64, 256, 1000])
    parser.add_argument("--save-every", type=positive, default=1800, help="seconds between two checkpoints")
    parser.add_argument("--parts", choices=MODELS, help="print where the time of a step goes, for one model")
    parser.add_argument("--published", action="store_true", help="print the model beside a published table")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure, under torchrun, and write a JSON file")
    figures = parser.add_argument_group("figures", "of the cluster, in the place of those of --cluster")
    names = [part.name for part in fields(Cluster) if part.name != "steps"]
    kinds: dict[str, Callable[[str], float]] = {"processors": whole, "scatter": number}
    kinds |= {"latency": number, "latency_inside": number}
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        if name in ("fsdp_overlap", "whole_scatter", "rings"):
            figures.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            figures.add_argument(flag, type=kinds.get(name, positive))
    args = parser.parse_args()
    if args.measure:
        if "LOCAL_RANK" not in os.environ:
            parser.error("--measure: start it with torchrun --nproc-per-node=2 -m studies.step_model --measure FILE")
        return measure(args.measure)
    if args.published:
        return print(report.table(published_rows()), end="")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    cluster = replace(args.cluster, **given)
    words = args.parts, args.nodes, cluster, args.save_every
    rows = parts(*words) if args.parts else efficiencies(*words[1:])
    without = [name for name in MODELS if step(name, "DDP", 1, cluster) == NOT_MEASURED]
    if without:
        print(f"step_model.py: no step of {' and '.join(without)}: measure it, see --measure", file=sys.stderr)
    if not rows:
        parser.error(f"--parts {args.parts}: there is nothing to show: measure, or take more nodes")
    return print(report.table(rows), end="")


if __name__ == "__main__":
    sys.exit(main())
