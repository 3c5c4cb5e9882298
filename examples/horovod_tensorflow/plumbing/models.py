"""What is done to a model of PyTorch before it is trained."""

import functools
import re
import traceback
from pathlib import Path

from . import checks, hangs
from .launchers import fail


def fix_summation_order(ddp_model, zeros):
    """Do one backward pass, in which DDP chooses the order of its sums for the rest of the run.

    A resumed run then sums in the same order as one that was not interrupted, so that its results
    have the same bits.
    """
    import torch

    ddp_model.eval()  # leaves the statistics of BatchNorm layers unchanged
    for layer in ddp_model.modules():
        if isinstance(layer, torch.nn.RNNBase):
            layer.train()  # GPUs: cuDNN computes no gradients of an LSTM or a GRU in eval mode
    try:
        output = ddp_model(zeros)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        other = isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError))
        if other or re.search("CUDA|gloo", message):
            raise  # the shape of the input is not the reason
        frames = [*traceback.extract_stack(), *traceback.extract_tb(error.__traceback__)]
        where = f"{last_own_line(frames)}: {type(error).__name__}: {message:.200}"
        is_tensor = isinstance(zeros, torch.Tensor)
        given = f"{tuple(zeros.shape)}, {zeros.dtype}" if is_tensor else type(zeros).__name__
        wrong = f"the model does not take what train.py gives fix_summation_order, {given}"
        fail(f"{wrong} ({where}): edit that line, so that it is as your model's input")
    output = getattr(output, "logits", output)  # models of transformers return an object
    check_output(output)
    # Models for segmentation, for instance, return several tensors in a dict.
    parts, _ = torch.utils._pytree.tree_flatten(output)
    tensors = [part for part in parts if getattr(part, "requires_grad", False)]
    torch.autograd.backward([tensor.sum() for tensor in tensors])
    trained = [weight for weight in ddp_model.parameters() if weight.requires_grad]
    unused = [weight for weight in trained if weight.grad is None]
    if unused and not getattr(ddp_model, "find_unused_parameters", False):
        # DDP waits for the gradients of all weights, also of those that are used in training alone.
        torch.autograd.backward([weight.reshape(-1)[:0].abs().sum() for weight in unused])
    ddp_model.zero_grad()
    ddp_model.train()


def check_output(output):
    """Refuse a model whose output does not fit the labels and the loss."""
    message = checks.wrong_output(output)
    if message:
        fail(message)


def last_own_line(frames):
    """Return the last file and line of a stack that is of the example, and not of plumbing."""
    places = []
    for frame in frames:
        path = Path(frame.filename).resolve()
        if hangs.is_own(path) and not path.is_relative_to(hangs.PLUMBING):
            places.append(f"{path.relative_to(hangs.FOLDER)}, line {frame.lineno}")
    return places[-1] if places else "no line of this folder"


def compile_in_place(args, model):
    """Have a model compiled in its first training step.

    DDP has PyTorch compile one part for each message, so that it sends gradients while others are
    computed. Blocks that are computed twice cannot be divided so, and alone there is nothing to
    send: then the model is one part.
    """
    from torch._dynamo import config  # here, since its import takes seconds

    computed_twice = getattr(args, "gradient_checkpointing", False)
    config.optimize_ddp = args.world_size > 1 and not computed_twice
    model.compile()


def uncompiled(function):
    """Have models compute as they are written in a function, also those compiled for training."""

    @functools.wraps(function)
    def call(*arguments):
        import torch

        with torch.compiler.set_stance("force_eager"):
            return function(*arguments)

    return call
