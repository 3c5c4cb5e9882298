"""Measure what each remedy for "CUDA out of memory" saves: the table in docs/out-of-memory.md. About ten minutes:

    python -m benchmarks.memory

Two processes over Gloo, on CPU, train a GPT of 25 million parameters for three steps on each rung of the ladder. Of the
third step it reports the peak: the largest sum of all tensors that a process holds at once, and what they are. The sum
is taken after each operation of PyTorch, of the bytes of every storage that is alive, each counted once; on a GPU it
would be what torch.cuda.max_memory_allocated() counts. What is not seen: what an operation needs while it computes,
copies that Gloo makes, Python itself and libraries. Time is not measured.

All that goes before the last micro-batch of the third step only makes gradients, optimizer state and buffers, whose
sizes do not depend on the samples. So it has one token each: a processor without AVX512-BF16 takes long for bf16.

It needs the requirements of the examples fsdp, deepspeed and lora; --examples measures the rungs of some of them.
"""

import argparse
import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recompute

from benchmarks import sharding, zero_memory
from common.models import TinyGPT
from tests.harness.launchers import ROOT
from tests.harness.outputs import import_file

PROCESSES, SAMPLES, HEADS = 2, 8, 4  # SAMPLES: of each process, in one optimizer step, on every rung
# The first four are those of zero_memory.parts and sharding.parts; "exchange": the buffers of DeepSpeed's all-reduce.
KINDS = ("parameters", "master copy", "gradients", "optimizer state", "exchange")
TITLES = ("weights", "fp32 copy", "gradients", "Adam's state", "buffers", "activations", "peak", "offloaded")


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder: how a step is computed. Those with `+` keep what the rungs above them do."""

    name: str
    flags: str  # those of our examples that do it
    example: str = "fsdp"  # whose requirements it needs; for plain DDP nothing but PyTorch
    way: str = "ddp"  # the function below that builds it: ddp, fsdp, zero or lora
    micro_batches: int = 2  # into which the step's samples are divided
    bf16: bool = True
    checkpointing: bool = True
    bucket_view: bool = False  # DDP: whether gradients lie in the buffers through which they are exchanged
    zero: dict[str, Any] = field(default_factory=dict)  # "zero_optimization" of DeepSpeed's config file


def zero_settings(file: str, **others: Any) -> dict[str, Any]:
    """Return "zero_optimization" of one of the config files in examples/deepspeed, with other values in it."""
    return json.loads((ROOT / "examples" / "deepspeed" / file).read_text())["zero_optimization"] | others


STAGE, OFFLOAD = "ds_config.json", "ds_config_offload.json"
SMALL = {"reduce_bucket_size": 5_000_000}
RUNGS = [
    Rung("DDP in fp32, batch 8", "", micro_batches=1, bf16=False, checkpointing=False),
    Rung(
        "+ half the batch, two micro-batches in a step",
        "`--batch-size 4 --gradient-accumulation-steps 2`",
        bf16=False,
        checkpointing=False,
    ),
    Rung("+ bf16 autocast", "`--precision bf16`", checkpointing=False),
    Rung("+ activation checkpointing", "fsdp: `--activation-checkpointing`; lora: `--gradient-checkpointing`"),
    Rung("+ gradients in DDP's buffers", "torchrun_multinode: the recipe in its README", bucket_view=True),
    Rung("or FSDP", "fsdp, its default", way="fsdp"),
    Rung("or ZeRO stage 1", "deepspeed: `--zero-stage 1`", "deepspeed", "zero", zero=zero_settings(STAGE, stage=1)),
    Rung(
        "ZeRO stage 1, small buffers",
        'deepspeed: also `"reduce_bucket_size": 5000000`',
        "deepspeed",
        "zero",
        zero=zero_settings(STAGE, stage=1, **SMALL),
    ),
    Rung(
        "ZeRO stage 2, small buffers",
        "deepspeed: `--zero-stage 2`",
        "deepspeed",
        "zero",
        zero=zero_settings(STAGE, stage=2, **SMALL),
    ),
    Rung(
        "ZeRO stage 3, small buffers",
        "deepspeed: `--zero-stage 3`",
        "deepspeed",
        "zero",
        zero=zero_settings(STAGE, stage=3, **SMALL),
    ),
    Rung(
        "ZeRO stage 2, small buffers, offload",
        "deepspeed: `--deepspeed_config ds_config_offload.json`",
        "deepspeed",
        "zero",
        zero=zero_settings(OFFLOAD, **SMALL),
    ),
    Rung("or LoRA", "lora, its default", "lora", "lora"),
]
EXAMPLES = list(dict.fromkeys(rung.example for rung in RUNGS))


class Tracker(TorchDispatchMode):
    """While it is active, follow all tensors of this process: what they hold together, and the most they ever held."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, weakref.ref] = {}  # storages by their address
        self.peak = 0  # bytes, since it was last set to 0
        self.at_peak: dict[int, int] = {}  # the storages that were alive then, and their bytes
        self.parts: Callable[[], dict[str, object]] = dict  # what is named at the peak
        self.named: dict[str, set[int]] = {}  # the addresses of what had a name then, by kind

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operation, remember what it reads and returns, and add up what is alive."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor first: it calls operations on the tensors that this process has
        result = function(*args, **kwargs or {})
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, DTensor)]
        storages = [storage for storage in storages if storage.device.type != "meta"]
        if not storages:
            return result  # DTensor tries out on the meta device, without memory, which shape a result will have
        for storage in storages:
            address = storage._cdata
            if address not in self.alive:
                self.alive[address] = weakref.ref(storage, functools.partial(self.forget, address))
        sizes = self.sizes()
        if sum(sizes.values()) > self.peak:
            self.peak, self.at_peak, self.named = sum(sizes.values()), sizes, self.names()
        return result

    def forget(self, address: int, _: object) -> None:
        """Strike out a storage that is freed."""
        self.alive.pop(address, None)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of all storages that are alive now; FSDP empties some of them without freeing them."""
        found = {address: reference() for address, reference in list(self.alive.items())}
        return {address: storage.nbytes() for address, storage in found.items() if storage is not None}

    def names(self) -> dict[str, set[int]]:
        """Return the addresses of what has a name now, by kind."""
        with torch.no_grad():
            parts = self.parts()
        return {
            kind: {tensor.untyped_storage()._cdata for tensor in zero_memory.tensors(parts[kind])} for kind in parts
        }


def megabytes(sizes: dict[int, int], named: dict[str, set[int]]) -> dict[str, float]:
    """Return how many MB of these storages have each name, and how many have none of those in KINDS ("rest")."""
    found = {kind: sum(sizes.get(address, 0) for address in named[kind]) / 1e6 for kind in named}
    return found | {"rest": sum(sizes.values()) / 1e6 - sum(found[kind] for kind in KINDS)}


@dataclass(frozen=True)
class Training:
    """A model, and what one step of its training consists of."""

    forward: Callable[[torch.Tensor], torch.Tensor]  # tokens to logits
    backward: Callable[[torch.Tensor, bool], object]  # of a micro-batch's loss; whether it completes the step
    step: Callable[[], object]  # updates the weights and frees the gradients
    parts: Callable[[], dict[str, object]]  # the tensors of each of KINDS that this process has now, and offloaded ones


def with_checkpoints(model: torch.nn.Module, rung: Rung) -> torch.nn.Module:
    """Let each block compute its activations again in the backward pass, if the rung says so, as fsdp does."""
    for block in model.blocks if rung.checkpointing else ():
        block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    return model


def ordinary(model: torch.nn.Module, rung: Rung) -> Training:
    """Return the training of a model that computes with autocast, with PyTorch's AdamW for what is to be trained."""
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if rung.bf16 and rung.way != "fsdp" else nullcontext():
            return model(tokens)

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        model.require_backward_grad_sync = is_last  # DDP: accumulates locally, as our examples do
        (loss / rung.micro_batches).backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=not rung.bucket_view)

    def parts() -> dict[str, object]:
        frozen = [weight for weight in model.parameters() if not weight.requires_grad]
        found = sharding.parts(optimizer)
        return found | {"parameters": [found["parameters"], frozen], "exchange": [], "offloaded": []}

    return Training(forward, backward, step, parts)


def ddp(rung: Rung, sizes: dict[str, int]) -> Training:
    """DistributedDataParallel, as in most examples."""
    model = with_checkpoints(TinyGPT(**sizes), rung)
    return ordinary(DistributedDataParallel(model, gradient_as_bucket_view=rung.bucket_view), rung)


def lora(rung: Rung, sizes: dict[str, int]) -> Training:
    """Adapters as those of the example lora by default, on a model whose frozen weights are in bf16."""
    import peft

    model = with_checkpoints(TinyGPT(**sizes).bfloat16(), rung)
    targets = ["query", "key", "value", "proj", "mlp.0", "mlp.2"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    return ordinary(DistributedDataParallel(model), rung)


def fsdp(rung: Rung, sizes: dict[str, int]) -> Training:
    """The model of examples/fsdp/train.py, by its own functions and flags."""
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--activation-checkpointing"] * rung.checkpointing + ["--precision", "bf16"] * rung.bf16
    sys.argv = ["train.py", *words]
    train = import_file(ROOT / "examples" / "fsdp" / "train.py")
    args, device = train.parse_args(), torch.device("cpu")
    model = train.build_model(args, train.make_mesh(args, device), device)
    train.initialise(model, args.seed)
    return ordinary(model, rung)


def zero(rung: Rung, sizes: dict[str, int]) -> Training:
    """DeepSpeed's engine with the settings of examples/deepspeed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile an op for inference
    config = json.loads((ROOT / "examples" / "deepspeed" / STAGE).read_text()) | {"zero_optimization": rung.zero}
    config["zero_force_ds_cpu_optimizer"] = False  # offload: PyTorch's AdamW, so that nothing is compiled
    config |= {"train_micro_batch_size_per_gpu": SAMPLES // rung.micro_batches, "bf16": {"enabled": rung.bf16}}
    config["gradient_accumulation_steps"] = rung.micro_batches
    model = with_checkpoints(TinyGPT(**sizes), rung)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def backward(loss: torch.Tensor, is_last: bool) -> None:
        engine.backward(loss)  # divides it by the number of micro-batches
        if not is_last:
            engine.step()  # counts the micro-batch

    def parts() -> dict[str, object]:
        found = zero_memory.parts(engine)
        found["parameters"] = [getattr(weight, "ds_tensor", weight.data) for weight in engine.parameters()]
        masters = list(zero_memory.tensors(found["master copy"]))
        gradients = zero_memory.tensors([found["gradients"], [master.grad for master in masters]])
        buckets = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        exchange = {tensor.untyped_storage()._cdata for tensor in zero_memory.tensors(buckets)}
        # At stage 2 some gradients lie within these buffers
        found["gradients"] = [one for one in gradients if one.untyped_storage()._cdata not in exchange]
        found["exchange"] = buckets
        kept = [found["master copy"], found["optimizer state"], [master.grad for master in masters]]
        kept.append(getattr(engine.optimizer, "temp_grad_buffer_for_cpu_offload", None))
        return found | {"offloaded": kept if "offload_optimizer" in rung.zero else []}

    return Training(engine, backward, engine.step, parts)


def measure_rung(rung: Rung, sizes: dict[str, int]) -> dict[str, float]:
    """Train for three steps as one of the processes; return the MB of each of TITLES at the peak of the third."""
    torch.manual_seed(0)
    with Tracker() as tracker:
        training = {"ddp": ddp, "fsdp": fsdp, "zero": zero, "lora": lora}[rung.way](rung, sizes)
        for step in range(1, 4):
            tracker.parts, tracker.peak = training.parts, 0
            before = megabytes(tracker.sizes(), tracker.names())
            for number in range(1, rung.micro_batches + 1):
                is_last = number == rung.micro_batches
                measured = step == 3 and is_last
                batch, context = (SAMPLES // rung.micro_batches, sizes["context"]) if measured else (1, 1)
                tokens = torch.randint(256, (batch, context + 1))
                logits = training.forward(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                del logits
                training.backward(loss, is_last)
                del loss
            training.step()
        found = megabytes(tracker.at_peak, tracker.named)
    between = before["rest"]  # what is there between steps, too, such as the buffers of DDP's all-reduce
    buffers, activations = found["exchange"] + between, found["rest"] - between
    values = [found[kind] for kind in KINDS[:4]]
    values += [buffers, activations, tracker.peak / 1e6 - found["offloaded"], found["offloaded"]]
    return dict(zip(TITLES, values, strict=True))


def worker(example: str, folder: Path, sizes: dict[str, int]) -> None:
    """Measure the rungs of one example as one of the processes; rank 0 writes found.json, of the larger process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    found = {}
    for rung in RUNGS:
        if rung.example == example:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, measure_rung(rung, sizes))
            found[rung.name] = max(every, key=lambda one: one["peak"])
            if dist.get_rank() == 0:
                print(f"{rung.name}: {found[rung.name]['peak']:.1f} MB", flush=True)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


def measure(example: str, **sizes: int) -> dict[str, dict[str, float]]:
    """Return for the name of each rung of an example the MB of each of TITLES, with a model of these sizes.

    `sizes`: width, layers, heads and context of TinyGPT. Raises CalledProcessError, with their output, if they fail.
    """
    return sharding.run_workers("benchmarks.memory", PROCESSES, example, [json.dumps(sizes)])


def table(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; a column that is 0 everywhere is left out."""
    titles = [title for title in TITLES if any(f"{row[title]:.1f}" != "0.0" for row in found.values())]
    yield f"| | {' | '.join(titles)} | by |"
    yield "|---" * (len(titles) + 2) + "|"
    for rung in RUNGS:
        if rung.name in found:
            cells = [f"{found[rung.name][title]:.1f}" for title in titles]
            yield f"| {rung.name} | {' | '.join(cells)} | {rung.flags} |"


def main() -> None:
    """Print a Markdown table with a row for each rung."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=__doc__, formatter_class=layout)
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES, help="whose rungs to measure")
    args = parser.parse_args()
    sizes = {"width": args.width, "layers": args.layers, "context": args.context}
    for name, value in sizes.items():
        if value < 1:
            parser.error(f"--{name} must be 1 or more, not {value}")
    if args.width % HEADS:
        parser.error(f"--width must be a multiple of {HEADS}, the number of heads, not {args.width}")
    for example, package in (("deepspeed", "deepspeed"), ("lora", "peft")):
        if example in args.examples and not find_spec(package):
            parser.error(f"there is no {package} here: pip install -r examples/{example}/requirements.txt")
    found: dict[str, dict[str, float]] = {}
    for example in dict.fromkeys(args.examples):
        found |= measure(example, **sizes, heads=HEADS)
    print(*table(found), sep="\n")


if __name__ == "__main__":
    main()
