"""Tensor parallelism: the processes of a group share the work of each layer, not the samples.

train.py calls this. It is the part of the lesson for models of which not even one block fits into a
process.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def split_layers(model, mesh):
    """Split each layer over the processes of a group, which then share the work of each sample."""
    # A column-wise layer splits its outputs, such as the heads. A row-wise one follows it: it takes
    # such a part as its input, and the processes sum up what they have computed.
    column = ColwiseParallel
    row = RowwiseParallel
    attention = {"query": column(), "key": column(), "value": column(), "proj": row()}
    plan = attention | {"mlp.0": column(), "mlp.2": row()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    whole = column(output_layouts=Replicate())
    outside = {"token": row(input_layouts=Replicate()), "position": whole, "head": whole}
    parallelize_module(model, mesh, outside)
    model.head.weight = model.token.weight  # the split has replaced both, which are one weight


@torch.no_grad()
def clip_grad_norm(model, limit):
    """Scale the gradients so that their norm, over the shards of all processes, is at most `limit`.

    PyTorch's own function cannot add up norms of which some are of weights that are split over both
    dimensions of the mesh, and some of weights that are split over one.
    """
    squares = 0
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    for weight in weights:
        split = zip(weight.device_mesh.shape, weight.placements, strict=True)
        shards = math.prod(size for size, placement in split if not placement.is_replicate())
        # Otherwise what several processes hold, such as a LayerNorm with tensor parallelism, would
        # count several times.
        squares += weight.grad.to_local().square().sum() * shards / dist.get_world_size()
    dist.all_reduce(squares)
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1)
    for weight in weights:
        weight.grad.to_local().mul_(factor)
