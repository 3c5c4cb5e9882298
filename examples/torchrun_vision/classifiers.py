"""Image classifiers of torchvision, for any classes.

Their weights may come from a file, BatchNorm's statistics are averaged over all processes, and
activations may be computed again instead of being kept.
"""

import contextlib
import functools
import re

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision import models

import image_files
import plumbing
from common.data import DataError

NAMES = models.list_models(module=models)


def check_args(parser, args):
    """Refuse what PyTorch cannot do."""
    if args.sync_batchnorm and not torch.cuda.is_available():
        advice = "PyTorch has no SyncBatchNorm for CPUs. Use a larger --batch-size"
        parser.error(f"--sync-batchnorm needs GPUs: {advice}")
    # The second computation of a block leaves its statistics alone, which is not compiled.
    if args.compile and args.gradient_checkpointing:
        wrong = "--compile cannot compile what --gradient-checkpointing computes twice"
        parser.error(f"{wrong}: leave one of the two out")


def make(name, classes, image_size):
    """Return a classifier with random weights.

    It maps images (B, 3, image_size, image_size) to logits (B, classes). Images that are too small
    for it raise DataError.
    """
    options = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # it has one output, as the others
        # Their weights were trained with other pixels than MEAN and STD make; this makes those.
        options["transform_input"] = True
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    try:
        model = models.get_model(name, num_classes=classes, **options)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        wrong = f"--model {name} cannot take images of --image-size {image_size} ({reason})"
        raise DataError(f"{wrong}: try 224") from None
    return model.train()


def load_weights(model, name, path, other=None):
    """Load the weights in a file, a state dict such as torchvision's, into the model of this name.

    With `other`, the same model for another number of classes, the layer in which these two differ
    keeps its own weights: it starts anew. A file that cannot be read, or does not fit, raises
    DataError.
    """
    if name == "efficientnet_v2_l" and image_files.MEAN[0] != 0.5:
        wrong = "torchvision's weights of efficientnet_v2_l were trained with other pixels"
        raise DataError(f"--weights: {wrong}: set MEAN = STD = (0.5, 0.5, 0.5) in image_files.py")
    own = model.state_dict()
    head = different_shapes(own, other.state_dict()) if other else []
    weights = adapt_names(read_weights(path, name), own)
    text = compare(own, weights)
    if text:
        wrong = f"--weights {path} is not of {name}: {text}"
        raise DataError(f"{wrong}. Choose the --model that it is of")
    different = different_shapes(own, weights)
    if different and not other:
        last = different[-1]
        wrong = f"is for {len(weights[last])} classes, and --data-dir has {len(own[last])}"
        raise DataError(f"--weights {path} {wrong}: with --new-head the last layer starts anew")
    bad = [key for key, weight in weights.items() if not weight.isfinite().all()]
    if bad:
        wrong = f"--weights {path} has numbers that are not finite, in {bad[0]}"
        raise DataError(f"{wrong}: of a run that went wrong")
    kept = {key: weight for key, weight in weights.items() if key not in {*different, *head}}
    model.load_state_dict(kept, strict=False)


def read_weights(path, name):
    """Return the state dict in a file: the file itself, or part of a checkpoint such as ours."""
    try:
        with open(path, "rb") as file:
            start = file.read(99)
        reason = image_files.what_it_is(start)
        if start[8:9] == b"{":  # a header in JSON stands after its length
            advice = "torch.save(safetensors.torch.load_file(FILE), path) writes it anew"
            reason = f"it is of safetensors: {advice}"
        content = None if reason else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no state dict makes torch.load raise almost anything
        reason = " ".join(str(error).split())[:100]
        # PyTorch's own text says how to run any code that the file has.
        if re.search("Unsupported global|TorchScript", str(error)):
            advice = "load it where it was made, and save only model.state_dict()"
            reason = f"it has more than weights: {advice}"
        elif "Weights only" in str(error):
            reason = "it is no file of torch.save"
    names = ("state_dict", "model", "model_state_dict", "model_state")
    while not reason and isinstance(content, dict) and not is_state_dict(content):
        content = next((content[key] for key in names if isinstance(content.get(key), dict)), None)
    if reason or not content or not isinstance(content, dict):
        reason = reason or "there are no weights in it, as far as can be seen"
        wrong = f"--weights {path} cannot be read ({reason})"
        raise DataError(f"{wrong}: it must be a state dict of {name}")
    return content


def is_state_dict(content):
    """Return whether a dict has tensors only, by name."""
    return all(isinstance(key, str) and torch.is_tensor(value) for key, value in content.items())


def adapt_names(weights, own):
    """Return a file's weights by the names of `own`, where they differ in a way that is known."""
    # Some of torchvision's files are older than its modules. DenseNet has other names there, some
    # models have outputs that are left out here, and BatchNorm has no count of batches.
    old_name = r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"
    adapted = {}
    for key, weight in weights.items():
        if not key.lower().startswith("aux"):
            # torch.compile puts _orig_mod in front of a name.
            adapted[re.sub(old_name, r"\1\2", key).replace("_orig_mod.", "")] = weight
    # DistributedDataParallel, Lightning and others put these in front of all names.
    for prefix in ("module.", "model.", "module."):
        in_file = all(key.startswith(prefix) for key in adapted)
        if in_file and not any(key.startswith(prefix) for key in own):
            adapted = {key.removeprefix(prefix): weight for key, weight in adapted.items()}
    return adapted


def different_shapes(own, weights):
    """Return the names under which a model and a file have weights of different shapes."""
    return [key for key in own if key in weights and own[key].shape != weights[key].shape]


def compare(own, weights):
    """Return how a model's state dict and that of a file differ, as text, or None.

    Other classes are no difference: they mean that one layer has another number of outputs. A count
    of batches may be missing.
    """
    sides = []
    for who, part, rest in (("the model", own, weights), ("the file", weights, own)):
        for key, weight in part.items():
            if key not in rest and not key.endswith("num_batches_tracked"):
                sides.append(f"{who} has {key} {tuple(weight.shape)}, the other has not")
                break
    if sides:
        return "; ".join(sides)
    for key in own:
        if key in weights and own[key].is_floating_point() != weights[key].is_floating_point():
            return f"{key} is {own[key].dtype} in the model, {weights[key].dtype} in the file"
    different = different_shapes(own, weights)
    layers = {key.rpartition(".")[0] for key in different}
    if len(layers) > 1 or any(own[key].shape[1:] != weights[key].shape[1:] for key in different):
        key = different[0]
        shape = tuple(own[key].shape)
        return f"{key} is {shape} in the model, {tuple(weights[key].shape)} in the file"
    return None


def norms_of(module):
    """Return a module's layers that may have running statistics: BatchNorm and InstanceNorm."""
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase)]


def average_statistics(model):
    """Make the buffers with which a model is evaluated the same in all processes.

    Running statistics become their mean over all processes. Any other buffer, such as a mask,
    becomes that of rank 0, as DDP itself would do it: it has no mean that makes sense. Whole
    numbers stay as they are.
    """
    if dist.get_world_size() == 1:
        return
    running = []
    for norm in norms_of(model):
        running += [part for part in (norm.running_mean, norm.running_var) if part is not None]
    known = {id(buffer) for buffer in running}
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    others = [buffer for buffer in floating if id(buffer) not in known]
    if running:
        # One message instead of dozens has all of them.
        flat = torch.cat([buffer.flatten() for buffer in running])
        dist.all_reduce(flat)
        fill(running, flat / dist.get_world_size())
    if others:
        flat = torch.cat([buffer.flatten() for buffer in others])
        dist.broadcast(flat, 0)
        fill(others, flat)


def fill(buffers, flat):
    """Copy the numbers in `flat` into the buffers, one after the other."""
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


def compute_blocks_twice(model):
    """Switch on gradient checkpointing: a block's activations are computed again, not kept.

    A block is what stands in a nn.Sequential and has modules of its own, such as a residual block
    or a transformer's layer. A model without one raises DataError. Training computes the same, to
    the bit. Chen et al. 2016, arXiv:1604.06174, describe it.
    """
    blocks = list(find_blocks(model))
    if not blocks:
        wrong = "--gradient-checkpointing: this model has no blocks that could be computed twice"
        raise DataError(f"{wrong}: leave it out")
    for block in blocks:
        how = {"use_reentrant": False, "context_fn": functools.partial(first_and_second, block)}
        block.forward = functools.partial(checkpoint, block.forward, **how)


def find_blocks(module):
    """Yield the outermost blocks in a module."""
    for child in module.children():
        in_sequence = isinstance(module, nn.Sequential) and not isinstance(child, nn.Sequential)
        if in_sequence and [*child.children()]:
            yield child
        else:
            yield from find_blocks(child)


def first_and_second(block):
    """Return a context for each computation of a block: only the first updates its statistics."""
    return contextlib.nullcontext(), without_statistics(block)


@contextlib.contextmanager
def without_statistics(block):
    """Leave the running statistics of a block as they are."""
    norms = [norm for norm in norms_of(block) if norm.training and norm.track_running_stats]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum = 0.0
        norm.num_batches_tracked = count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked = count


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
