"""Measure how many MB a process holds of a model: plain DDP, DeepSpeed's ZeRO stage 3 and FSDP2 on each mesh.

    python -m studies.sharding

It trains a GPT of 25 million parameters for two steps and adds up the tensors that a process holds between the backward
pass and the step; then it saves and loads a checkpoint, and reports by how much the process grew at most meanwhile. It
needs the requirements of examples/fsdp and examples/deepspeed.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F

from harness.launchers import ROOT
from harness.processes import clean_environment
from studies import zero_memory
from studies.zero_memory import megabytes

CONTEXT, BATCH = 64, 2
LAYOUTS = [("ddp", 2, 1), ("deepspeed", 2, 1), ("fsdp", 1, 1), ("fsdp", 2, 1), ("fsdp", 1, 2), ("fsdp", 2, 2)]


def status(name: str) -> float:
    """Return what /proc says of this process's memory, in MB: VmRSS (now) or VmHWM (the peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def growth(function: Callable[[], object]) -> float:
    """Return by how many MB this process grew at most while a function ran."""
    Path("/proc/self/clear_refs").write_text("5\n")  # sets the peak to what it is now
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch of random tokens."""
    tokens = torch.randint(256, (BATCH, CONTEXT + 1))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the MB of weights, gradients and optimizer state that this process holds, between backward and step."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [value for weight in weights for value in optimizer.state[weight].values() if torch.is_tensor(value)]
    return {
        "parameters": megabytes([local(weight.detach()) for weight in weights]),
        "gradients": megabytes([local(weight.grad) for weight in weights]),
        "master copy": 0.0,
        "optimizer state": megabytes([local(state) for state in states]),
    }


def measure_fsdp(folder: Path, shape: list[str]) -> dict[str, float]:
    """Train, save and load with the functions of examples/fsdp/train.py.

    It does not call keep_memory(), or a peak would not show what reuses memory, see measure().
    """
    sys.argv = ["train.py", *shape, "--output-dir", str(folder), "--context", str(CONTEXT), "--batch-size", str(BATCH)]
    sys.argv += ["--resume"]
    sys.path.append(str(ROOT / "examples" / "fsdp"))  # where it finds what it imports
    train = importlib.import_module("train")
    args = train.parse_args()
    args.text, args.steps_per_epoch = "random", 2
    device, mesh = train.setup(args)
    model = train.build_model(args, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    progress = train.resume(args, model, optimizer, device)  # without a checkpoint it draws the weights
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model).backward()
        found = held(optimizer)
        optimizer.step()
    optimizer.zero_grad()

    found["peak, saving"] = growth(lambda: train.save_checkpoint(args, model, optimizer, progress))
    dist.barrier()  # rank 0 may still be writing run.json
    found["peak, loading"] = growth(lambda: train.resume(args, model, optimizer, device))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found["peak, model.pt"] = growth(lambda: get_model_state_dict(model, options=options))
    return found


def measure_ddp(folder: Path, shape: list[str]) -> dict[str, float]:
    """Train with DistributedDataParallel; save and load as examples/torchrun_multinode does, where rank 0 reads."""
    from common.models import TinyGPT

    dist.init_process_group("gloo")
    model = TinyGPT(**sizes(shape))
    ddp_model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(ddp_model).backward()
        found = held(optimizer)
        optimizer.step()
    optimizer.zero_grad()
    path, first = folder / "checkpoint.pt", dist.get_rank() == 0

    def save() -> None:
        if first:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()

    def load() -> None:
        state = [torch.load(path, weights_only=True) if first else None]
        dist.broadcast_object_list(state)
        model.load_state_dict(state[0]["model"])
        optimizer.load_state_dict(state[0]["optimizer"])

    return found | {"peak, saving": growth(save), "peak, loading": growth(load), "peak, model.pt": 0.0}


def measure_deepspeed(folder: Path, shape: list[str]) -> dict[str, float]:
    """Train, save and load with DeepSpeed's ZeRO stage 3 in fp32."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    from common.models import TinyGPT

    dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile an op for inference
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    model = TinyGPT(**sizes(shape))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        engine.backward(loss_of(engine))
        found = zero_memory.held(engine)
        engine.step()
    found["peak, saving"] = growth(lambda: engine.save_checkpoint(folder, "saved"))
    found["peak, loading"] = growth(lambda: engine.load_checkpoint(folder, "saved"))
    return found | {"peak, model.pt": 0.0}


def sizes(shape: list[str]) -> dict[str, int]:
    """Return the model's width and so on, of train.py's arguments."""
    named = dict(zip(shape[::2], shape[1::2], strict=True))
    return {name: int(named[f"--{name}"]) for name in ("width", "layers", "heads")} | {"context": CONTEXT}


def worker(layout: str, folder: Path, shape: list[str]) -> None:
    """Measure one layout as one of its processes; rank 0 writes found.json: of each kind, the most of any process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(0)
    measures = {"ddp": measure_ddp, "deepspeed": measure_deepspeed, "fsdp": measure_fsdp}
    found: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    own = measures[layout](folder, shape)
    dist.all_gather_object(found, own)
    if dist.get_rank() == 0:
        most = {kind: max(one[kind] for one in found) for kind in own}
        (folder / "found.json").write_text(json.dumps(most))
    dist.barrier()
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


def measure(layout: str, groups: int, tensor_parallel: int, width: int = 512, layers: int = 8) -> dict[str, float]:
    """Return what a process of this layout holds, in MB, by kind, and by how much it grows while saving and loading.

    `groups` times `tensor_parallel` processes train a GPT of this width and number of layers, with 4 heads. Raises
    CalledProcessError, with their output, if they fail.
    """
    shape = ["--width", str(width), "--layers", str(layers), "--heads", "4"]
    if layout == "fsdp":
        shape += ["--tensor-parallel", str(tensor_parallel)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={groups * tensor_parallel}", "-m", "studies.sharding"]
        command += ["--worker", layout, folder, *shape]
        # glibc: freed memory is given back at once, or a peak would not show what reuses it
        environment = clean_environment() | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    """Print a Markdown table with a row for each layout."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    lines = []
    for layout, groups, tensor_parallel in LAYOUTS:
        found = measure(layout, groups, tensor_parallel, args.width, args.layers)
        if not lines:
            lines = ["| layout | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
        name = f"{layout} {groups}x{tensor_parallel}" if layout == "fsdp" else f"{layout}, {groups} processes"
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in found.values()) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
