"""What a process holds of a model before a step: tests copy this into an example's folder, where train.py calls it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

# Attributes of DeepSpeed's optimizers.
GRADIENTS = ("averaged_gradients", "offload_gradient_dict", "grad_partitions_flat_buffer")


def plant(folder: Path, step: str, call: str) -> None:
    """Have a copy of an example note, before the line with its step, how many MB each process holds."""
    from harness import edits

    shutil.copy(__file__, folder)
    indent = step[: -len(step.lstrip())]
    edits.edit(folder / "train.py", step, f"{indent}__import__('held_memory').{call}\n{step}")


def read(folder: Path, processes: int = 2) -> dict[str, float]:
    """Return the MB of each kind that the processes held before their last step: the most of any of them."""
    held = [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(processes)]
    return {kind: max(one[kind] for one in held) for kind in held[0]}


def tensors(tree: object) -> Iterator:
    """Yield all tensors in nested lists, tuples and dicts: of a sharded one, what this process has of it."""
    if hasattr(tree, "to_local"):
        yield tree.to_local()
    elif hasattr(tree, "untyped_storage"):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


def megabytes(*trees: object) -> float:
    """Return the memory of all tensors in these trees in MB, counting shared storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors(trees)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / 1e6


def note(weights: list, gradients: list, states: list) -> None:
    """Write the MB of each kind to memory-RANK.json in the current folder, in the place of what was there.

    The optimizer's state is there from the second step on.
    """
    import torch.distributed as dist

    held = {"parameters": megabytes(weights), "gradients": megabytes(gradients), "optimizer state": megabytes(states)}
    Path(f"memory-{dist.get_rank()}.json").write_text(json.dumps(held))


def note_optimizer(optimizer) -> None:
    """Note what an optimizer of PyTorch updates."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    note([weight.detach() for weight in weights], [weight.grad for weight in weights], list(optimizer.state.values()))


def note_engine(engine) -> None:
    """Note what DeepSpeed's engine holds; call it between `engine.backward` and `engine.step`."""
    weights = list(engine.parameters())
    parameters = [[weight.data, getattr(weight, "ds_tensor", None)] for weight in weights]
    gradients = [weight.grad for weight in weights]
    gradients += [getattr(engine.optimizer, name, None) for name in GRADIENTS]
    note(parameters, gradients, list(engine.basic_optimizer.state.values()))
