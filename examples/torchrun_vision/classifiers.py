"""Image classifiers of torchvision: any classes, weights from a file, BatchNorm over processes, checkpointing."""

import contextlib
import functools
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

import plumbing
from common.data import DataError
from image_files import what_it_is

NAMES = models.list_models(module=models)


def check_args(parser, args):
    """Refuse what PyTorch cannot do."""
    if args.sync_batchnorm and not torch.cuda.is_available():
        parser.error("--sync-batchnorm needs GPUs: PyTorch has no SyncBatchNorm for CPUs. Use a larger --batch-size")
    if args.compile and args.gradient_checkpointing:  # the second computation of a block leaves its statistics alone
        parser.error("--compile cannot compile what --gradient-checkpointing computes twice: leave one of the two out")


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
    own = model.state_dict()
    weights = adapt_names(read_weights(path, name), own)
    if text := compare(own, weights):
        raise DataError(f"--weights {path} is not of {name}: {text}. Choose the --model that it is of")
    different = [key for key in own if key in weights and weights[key].shape != own[key].shape]
    if different and not new_head:
        theirs, ours = (len(tensors[different[-1]]) for tensors in (weights, own))
        raise DataError(
            f"--weights {path} is for {theirs} classes, and --data-dir has {ours}: with --new-head the last layer "
            "starts anew"
        )
    if bad := [key for key, weight in weights.items() if not weight.isfinite().all()]:
        raise DataError(f"--weights {path} has numbers that are not finite, in {bad[0]}: of a run that went wrong")
    kept = {key: weight for key, weight in weights.items() if key not in different}
    model.load_state_dict(kept, strict=False)


def read_weights(path, name):
    """Return the state dict in a file: one of its own, or that in a checkpoint, such as our checkpoint.pt."""
    try:
        with open(path, "rb") as file:
            start = file.read(99)
        reason = what_it_is(start)
        if start[8:9] == b"{":  # after the length of a header in JSON
            reason = "it is of safetensors: torch.save(safetensors.torch.load_file(FILE), path) writes it anew"
        content = None if reason else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no state dict makes torch.load raise almost anything
        reason = " ".join(str(error).split())[:100]
        if re.search("Unsupported global|TorchScript", str(error)):  # its own text is how to run any code in the file
            reason = "it has more than weights: load it where it was made, and save only model.state_dict()"
        elif "Weights only" in str(error):
            reason = "it is no file of torch.save"
    names = ("state_dict", "model", "model_state_dict", "model_state")
    while not reason and isinstance(content, dict) and not is_state_dict(content):
        content = next((content[key] for key in names if isinstance(content.get(key), dict)), None)
    if reason or not content or not isinstance(content, dict):
        reason = reason or "there are no weights in it, as far as can be seen"
        raise DataError(f"--weights {path} cannot be read ({reason}): it must be a state dict of {name}")
    return content


def is_state_dict(content):
    """Return whether a dict has tensors only, by name."""
    return all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items())


def adapt_names(weights, own):
    """Return the weights in a file by the names of `own`, where these differ in a way that is known."""
    # Of torchvision's files some are older than its modules: other names in DenseNet, outputs that are left out here,
    # and no count of batches in BatchNorm.
    old_name = r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"
    weights = {re.sub(old_name, r"\1\2", key): w for key, w in weights.items() if not key.lower().startswith("aux")}
    weights = {key.replace("_orig_mod.", ""): weight for key, weight in weights.items()}  # of torch.compile
    for prefix in ("module.", "model.", "module."):  # of DistributedDataParallel, of Lightning and others
        if all(key.startswith(prefix) for key in weights) and not any(key.startswith(prefix) for key in own):
            weights = {key.removeprefix(prefix): weight for key, weight in weights.items()}
    return weights


def compare(own, weights):
    """Return how a model's state dict and that of a file differ, as text, or None: other classes are no difference.

    Other classes mean that one layer has another number of outputs. A count of batches may be missing.
    """
    sides = []
    for who, part, rest in (("the model", own, weights), ("the file", weights, own)):
        alone = [key for key in part if key not in rest and not key.endswith("num_batches_tracked")]
        sides += [f"{who} has {alone[0]} {tuple(part[alone[0]].shape)}, the other has not"] if alone else []
    if sides:
        return "; ".join(sides)
    for key in own:
        if key in weights and own[key].is_floating_point() != weights[key].is_floating_point():
            return f"{key} is {own[key].dtype} in the model, {weights[key].dtype} in the file"
    different = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    layers = {key.rpartition(".")[0] for key in different}
    if len(layers) > 1 or any(own[key].shape[1:] != weights[key].shape[1:] for key in different):
        key = different[0]
        return f"{key} is {tuple(own[key].shape)} in the model, {tuple(weights[key].shape)} in the file"
    return None


def average_statistics(model):
    """Make the buffers with which a model is evaluated the same in all processes, if they are no whole numbers.

    Running statistics, of BatchNorm or InstanceNorm, become their mean over all processes. Any other buffer, such as a
    mask, becomes that of rank 0, as DDP itself would do it: what is no statistics has no mean that makes sense.
    """
    if dist.get_world_size() == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    running = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    known = {id(buffer) for buffer in running}
    others = [buffer for buffer in model.buffers() if buffer.is_floating_point() and id(buffer) not in known]
    if running:
        flat = torch.cat([buffer.flatten() for buffer in running])  # one message instead of dozens
        dist.all_reduce(flat)
        fill(running, flat / dist.get_world_size())
    if others:
        flat = torch.cat([buffer.flatten() for buffer in others])
        dist.broadcast(flat, 0)
        fill(others, flat)


def fill(buffers, flat):
    """Copy the numbers in `flat` into the buffers, one after the other."""
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


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
    """Return a context for each computation of a block: in the second, no statistics are updated again."""
    return contextlib.nullcontext(), without_statistics(block)


@contextlib.contextmanager
def without_statistics(block):
    """Leave the running statistics of a block, of BatchNorm or InstanceNorm, as they are."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    norms = [norm for norm in norms if norm.training and norm.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum, norm.num_batches_tracked = 0.0, count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


def write_best(args, model, progress):
    """Write best.pt at the end of an epoch that is more accurate than all before. All call this."""
    epochs, step = plumbing.position(args, progress)
    accuracies = [row["test_accuracy"] for row in progress["history"]]
    if epochs and not step and accuracies[-1] > max(accuracies[:-1], default=-1):
        write_weights(args.output_dir / "best.pt", model)


def write_weights(path, model):
    """On rank 0 write the weights of a model, on the CPU and in the default memory layout."""
    if dist.get_rank() == 0:
        weights = {name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}
        plumbing.write(path, lambda file: torch.save(weights, file))
