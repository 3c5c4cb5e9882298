"""What FSDP2 and tensor parallelism need besides the training."""

import ctypes
import logging
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import longrun

# With tensor parallelism PyTorch warns about views and two-step sums. Both are correct here.
warnings.filterwarnings("ignore", "FSDP2-wrapped module")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
libc = ctypes.CDLL(None)


class State(Stateful):
    """What a distributed checkpoint has, in shards. Add all else that your training shards."""

    def __init__(self, model, optimizer):
        self.parts = model, optimizer

    def state_dict(self):
        weights, state = state_dict.get_state_dict(*self.parts)
        return {"model": weights, "optimizer": state}

    def load_state_dict(self, saved):
        weights, state = saved["model"], saved["optimizer"]
        state_dict.set_state_dict(*self.parts, model_state_dict=weights, optim_state_dict=state)


def split_layers(model, mesh):
    """Split each layer over the processes of a group, which then share the work of each sample."""
    # A column-wise layer splits its outputs, such as the heads. A row-wise layer follows: each
    # process gives it such a part as its input, and all processes add up their results.
    column, row = ColwiseParallel, RowwiseParallel
    attention = {"query": column(), "key": column(), "value": column(), "proj": row()}
    plan = attention | {"mlp.0": column(), "mlp.2": row()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    whole = column(output_layouts=Replicate())
    outside = {"token": row(input_layouts=Replicate()), "position": whole, "head": whole}
    parallelize_module(model, mesh, outside)
    model.head.weight = model.token.weight  # the split has replaced both; tie them again


def clip_grad_norm(model, limit):
    """Scale the gradients so that their norm, over the shards of all processes, is at most `limit`.

    PyTorch's own function needs all weights in one mesh; here some are split over two dimensions.
    """
    groups = {}
    for weight in model.parameters():
        groups.setdefault(weight.device_mesh, []).append(weight)
    gradients = [[w.grad for w in group if w.grad is not None] for group in groups.values()]
    norms = [get_total_norm(group).full_tensor() for group in gradients if group]
    for group in groups.values():
        clip_grads_with_norm_(group, limit, torch.stack(norms).norm())


@torch.no_grad()
def size_of(model):
    """Return the sum of the absolute values of all weights, over all processes."""
    model.reshard()  # weights outside the blocks stay gathered after a forward pass
    size = sum(weight.to_local().abs().sum(dtype=torch.float64) for weight in model.parameters())
    dist.all_reduce(size)
    return size


def whole_weights(model):
    """Return on rank 0 the state dict of the whole model, in CPU memory; all processes call it."""
    longrun.alive(None)  # a large model may take longer than a step
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_dict.get_model_state_dict(model, options=options)
