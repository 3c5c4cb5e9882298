"""Image classifiers of torchvision: any classes, weights from a file, BatchNorm over processes, checkpointing."""

import contextlib
import functools
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

from common.data import DataError

NAMES = models.list_models(module=models)


def make(name, classes, image_size):
    """Return a classifier, with random weights. Raises DataError if the images are too small for it.

    It maps images (B, 3, image_size, image_size) to logits (B, classes).
    """
    options = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # one output, as the others have
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    try:
        model = models.get_model(name, num_classes=classes, **options)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"--model {name} cannot take images of --image-size {image_size} ({reason}): try 224") from None
    return model.train()


def load_weights(model, name, path, new_head):
    """Load the weights in a file, a state dict such as torchvision's, into the model of this name.

    With `new_head` the last layer keeps its weights if the file has other classes. Raises DataError if the file cannot
    be read or does not fit.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        # Of torchvision's files some are older than its modules: other names in DenseNet, outputs that are left out
        # here, and no count of batches in BatchNorm.
        old_name = r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"
        weights = {re.sub(old_name, r"\1\2", key): w for key, w in weights.items() if not key.lower().startswith("aux")}
        own = model.state_dict()
        different = [key for key in own if key in weights and weights[key].shape != own[key].shape]
        missing = sorted(key for key in own.keys() ^ weights.keys() if not key.endswith("num_batches_tracked"))
    except Exception as error:  # what is no state dict makes torch.load raise almost anything
        reason = " ".join(str(error).split())[:100]
        raise DataError(f"--weights {path} cannot be read ({reason}): it must be a state dict of {name}") from None
    head = list(own)[-1].rpartition(".")[0]  # the name of the last layer
    other = [*missing, *[key for key in different if not key.startswith(f"{head}.")]]
    if other:
        raise DataError(f"--weights {path} is not of {name}, see {other[0]}: choose the --model that it is of")
    if different and not new_head:
        theirs, ours = (len(tensors[different[-1]]) for tensors in (weights, own))
        raise DataError(
            f"--weights {path} is for {theirs} classes, and --data-dir has {ours}: with --new-head the last layer "
            "starts anew"
        )
    kept = {key: weight for key, weight in weights.items() if key not in different}
    model.load_state_dict(kept, strict=False)


def average_statistics(model):
    """Average BatchNorm's running statistics, with which a model is evaluated, over all processes."""
    running = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if running and dist.get_world_size() > 1:
        flat = torch.cat([buffer.flatten() for buffer in running])  # one message instead of dozens
        dist.all_reduce(flat)
        means = (flat / dist.get_world_size()).split([buffer.numel() for buffer in running])
        for buffer, mean in zip(running, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def compute_blocks_twice(model):
    """Switch on gradient checkpointing: a block's activations are not kept, but computed again in the backward pass.

    A block is what stands in a nn.Sequential and has modules of its own, such as a residual block or a transformer's
    layer. Raises DataError if the model has none. Training computes the same, to the bit. Chen et al. 2016,
    arXiv:1604.06174.
    """
    blocks = list(find_blocks(model))
    if not blocks:
        raise DataError("--gradient-checkpointing: this model has no blocks that could be computed twice: leave it out")
    for block in blocks:
        contexts = functools.partial(first_and_second, block)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def find_blocks(module):
    """Yield the outermost blocks in a module."""
    for child in module.children():
        if isinstance(module, nn.Sequential) and not isinstance(child, nn.Sequential) and [*child.children()]:
            yield child
        else:
            yield from find_blocks(child)


def first_and_second(block):
    """Return a context for each computation of a block: in the second BatchNorm's statistics are not updated again."""
    return contextlib.nullcontext(), without_statistics(block)


@contextlib.contextmanager
def without_statistics(block):
    """Leave the running statistics of a block's BatchNorm layers as they are."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.training]
    for norm, _, count in before:
        norm.momentum, norm.num_batches_tracked = 0.0, count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
