"""What each remedy for "out of memory" saves: `python -m studies.memory`, the table in docs/out-of-memory.md.

It trains one GPT for three steps in each of several ways, on the CPU, each in fresh processes of one thread, and prints
by how much a process grew at most. It writes memory.csv and memory.md. A step is the same 16 sequences in every way.
"""

import argparse
import csv
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from common.models import TinyGPT
from harness.launchers import ROOT
from harness.processes import clean_environment
from studies.adapters import with_adapters
from studies.sharding import growth, held

BATCH, STEPS = 16, 3  # sequences of a step, over all processes and micro-batches; steps
WARM_UP = {"width": 32, "layers": 1, "heads": 2, "context": 16}  # a model that is small beside the measured one


@dataclass(frozen=True)
class Rung:
    """A way to train; the default is the plain one."""

    processes: int = 1  # which share the sequences of a step
    micro_batches: int = 1  # of each process in a step; gradients are accumulated
    bf16: bool = False  # autocast: weights, gradients and Adam's state stay in fp32
    checkpointing: bool = False  # each block's activations are computed again in the backward pass
    sharded: bool = False  # FSDP2; else several processes train with DDP
    lora: int = 0  # rank of the adapters, which alone are trained; 0: all weights are


RUNGS = {
    "batch 16, fp32, AdamW": Rung(),
    "4 micro-batches of 4": Rung(micro_batches=4),
    "bf16 autocast": Rung(bf16=True),
    "activation checkpointing": Rung(checkpointing=True),
    "4 micro-batches and activation checkpointing": Rung(micro_batches=4, checkpointing=True),
    "DDP, 2 processes": Rung(processes=2),
    "FSDP2, 2 processes": Rung(processes=2, sharded=True),
    "FSDP2, 2 processes, 4 micro-batches and activation checkpointing": Rung(
        processes=2, micro_batches=4, checkpointing=True, sharded=True
    ),
    "LoRA of rank 8, base weights frozen": Rung(lora=8),
}


def build(rung: Rung, sizes: dict[str, int]) -> nn.Module:
    """Return the model as this way trains it; its first weights are the same in all ways, but for LoRA's adapters."""
    torch.manual_seed(0)
    model = TinyGPT(**sizes)
    if rung.lora:
        with_adapters(model, rung.lora)
    if rung.checkpointing:
        for block in model.blocks:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    if rung.sharded:
        mesh = init_device_mesh("cpu", (rung.processes,))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        return model
    return nn.parallel.DistributedDataParallel(model) if rung.processes > 1 else model


def train(rung: Rung, sizes: dict[str, int]) -> dict[str, float]:
    """Train for three steps, on the same random tokens each.

    Return the MB of weights, gradients and Adam's state that this process holds before the last update (`states`), the
    seconds of a step (`seconds`: the median without the first), and the last step's loss (`loss`), over all processes.
    """
    model = build(rung, sizes)
    optimizer = torch.optim.AdamW(model.parameters())  # it passes over frozen weights
    tokens = torch.randint(256, (BATCH, sizes["context"] + 1), generator=torch.Generator().manual_seed(1))
    if rung.processes > 1:
        tokens = tokens[dist.get_rank() :: rung.processes]
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in tokens.chunk(rung.micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=rung.bf16):
                logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()) / rung.micro_batches
            loss.backward()
            total += loss.detach()
        states = sum(held(optimizer).values())
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if rung.processes > 1:
        dist.all_reduce(total)
    return {"states": states, "seconds": statistics.median(seconds[1:]), "loss": total.item() / rung.processes}


def measure_here(rung: Rung, sizes: dict[str, int]) -> dict[str, float]:
    """Return what `train` returns and, as `peak`, by how many MB this process grew at most meanwhile.

    A tiny model is trained before, in the same way: what is loaded and allocated once is not the model's memory.
    """
    train(rung, WARM_UP)
    gc.collect()
    found = {}
    peak = growth(lambda: found.update(train(rung, sizes)))
    gc.collect()
    return {"peak": peak, **found}


def worker(names: list[str], sizes: dict[str, int], path: Path) -> None:
    """Measure some ways, one after the other, as one of their processes.

    Rank 0 writes a JSON file, of each figure the most of any process.
    """
    torch.set_num_threads(1)
    several = "RANK" in os.environ
    if several:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    own = {name: measure_here(RUNGS[name], sizes) for name in names}
    every = [own]
    if several:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
    if not several or dist.get_rank() == 0:
        most = {name: {kind: max(one[name][kind] for one in every) for kind in own[name]} for name in names}
        path.write_text(json.dumps(most))
    if several:
        dist.barrier()
        os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


def measure(names: list[str], sizes: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return what each of these ways holds and takes, see `train` and `measure_here`, all in the same processes.

    Raises CalledProcessError if they fail.
    """
    processes = max(RUNGS[name].processes for name in names)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] * (processes > 1)
    # glibc: freed memory is given back at once. The examples keep it, which is faster, but a process would only grow
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        task = json.dumps([names, sizes, str(path)])
        command = [sys.executable, *launcher, "-m", "studies.memory", "--worker", task]
        subprocess.run(command, cwd=ROOT, env=clean_environment() | malloc | {"OMP_NUM_THREADS": "1"}, check=True)
        return json.loads(path.read_text())


def cells(rounds: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, str]]:
    """Return the rows of the table: medians of the rounds; times are relative to the first way in the same round."""
    plain = [one[next(iter(one))]["seconds"] for one in rounds]
    rows = []
    for name in rounds[0]:
        peak, states = (statistics.median(one[name][kind] for one in rounds) for kind in ("peak", "states"))
        slower = [one[name]["seconds"] / first for one, first in zip(rounds, plain, strict=True)]
        rows.append(
            {
                "a process of": name,
                "peak, MB": f"{peak:.0f}",
                "weights, gradients, Adam's state, MB": f"{states:.0f}",
                "the rest, MB": f"{peak - states:.0f}",
                "time of a step": f"{statistics.median(slower):.2f}",
            }
        )
    return rows


def parse_args() -> argparse.Namespace:
    """Return the arguments; those that make no model end the program with one line."""
    parser = argparse.ArgumentParser(
        "python -m studies.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    for name, default in {"width": 384, "layers": 6, "heads": 6, "context": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"of the model (default: {default})")
    parser.add_argument("--output", type=Path, default="results", help="folder for the results")
    args = parser.parse_args()
    if min(args.rounds, args.width, args.layers, args.heads, args.context) < 1 or args.width % args.heads:
        parser.error("all numbers must be 1 or more, and --width a multiple of --heads")
    return args


def main() -> None:
    """Measure every way in turn, as often as --rounds says, and write the medians."""
    if sys.argv[1:2] == ["--worker"]:
        names, sizes, path = json.loads(sys.argv[2])
        return worker(names, sizes, Path(path))
    args = parse_args()
    from benchmarks import report  # it imports matplotlib, which has no place in the measured processes

    sizes = {name: getattr(args, name) for name in WARM_UP}
    args.output.mkdir(parents=True, exist_ok=True)
    path, rounds = args.output / "memory.csv", []
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["way", "round", "peak", "states", "seconds", "loss"])
        writer.writeheader()
        for number in range(args.rounds):
            rounds.append({})
            for name in RUNGS:
                rounds[-1][name] = measure([name], sizes)[name]
                writer.writerow({"way": name, "round": number, **rounds[-1][name]})
                file.flush()  # what has been measured stays, should this be stopped
    plain = statistics.median(one[next(iter(RUNGS))]["seconds"] for one in rounds)
    weights = sum(weight.numel() for weight in TinyGPT(**sizes).parameters())
    caption = f"TinyGPT of {weights / 1e6:.1f} million weights, {BATCH} sequences of {args.context} tokens in a step, "
    caption += f"median of {args.rounds}. The first row's step takes {plain:.1f} s, which the others are relative to."
    report.finish(cells(rounds), None, path, caption)


if __name__ == "__main__":
    main()
