"""Measure how many MB each process holds with DeepSpeed at each ZeRO stage: the table in examples/deepspeed/README.md.

    torchrun --standalone --nproc-per-node=2 -m studies.zero_memory

It trains for two steps at each stage and adds up the tensors that DeepSpeed's engine holds between the backward pass
and the step. It needs the requirements of examples/deepspeed.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

GRADIENTS = ("averaged_gradients", "offload_gradient_dict", "grad_partitions_flat_buffer")  # attributes of DeepSpeed's
MASTER_COPY = ("fp32_groups", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # optimizers


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and dicts."""
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


def megabytes(*trees: object) -> float:
    """Return the memory of all tensors in these trees in MB, counting shared storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors(trees)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / 1e6


def held(engine) -> dict[str, float]:
    """Return the MB that this process holds by kind; call it between `engine.backward` and `engine.step`.

    Optimizer state is there from the second step on.
    """
    parameters = list(engine.parameters())
    optimizer = engine.optimizer
    return {
        "parameters": megabytes([[weight.data, getattr(weight, "ds_tensor", None)] for weight in parameters]),
        "gradients": megabytes(
            [weight.grad for weight in parameters], [getattr(optimizer, name, None) for name in GRADIENTS]
        ),
        "master copy": megabytes([getattr(optimizer, name, None) for name in MASTER_COPY]),
        "optimizer state": megabytes(list(engine.basic_optimizer.state.values())),
    }


def note(engine) -> None:
    """Write what this process holds to memory-RANK.json in the current folder, in place of what was there."""
    Path(f"memory-{dist.get_rank()}.json").write_text(json.dumps(held(engine)))


def measure(stage: int, precision: str) -> dict[str, float]:
    """Train TinyGPT for two steps and return what the process that holds most holds, by kind, in MB."""
    import deepspeed

    from common.models import TinyGPT

    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    model = TinyGPT()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(256, (8, 129), device=engine.device)
    for _ in range(2):
        logits = engine(tokens[:, :-1])
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()))
        found = held(engine)
        engine.step()
    most = torch.tensor(list(found.values()), device=engine.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist(), strict=True))


def main() -> None:
    """Print one row of a Markdown table for each precision and stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    import deepspeed

    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile an op for inference
    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        print("| precision | stage | parameters | gradients | fp32 copy | optimizer state |\n|---|---|---|---|---|---|")
    for precision in args.precisions:
        for stage in args.stages:
            cells = " | ".join(f"{value:.2f}" for value in measure(stage, precision).values())
            if dist.get_rank() == 0:
                print(f"| {precision} | {stage} | {cells} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    main()
