"""What is refused before a sharded model trains, and what is printed of how it is divided.

train.py calls this. It is no part of the lesson. `python sharded_model.py output` writes model.pt
of a run with --keep-sharded, from its last checkpoint, on any machine that can hold the weights.
"""

import argparse
import functools
import math
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.checkpoint import checkpoint as recompute

import tokenize_text
from common import data
from common.models import TinyGPT
from plumbing import fail, load_checkpoint, plural, rank, shards, uncompiled


def check_sizes(parser, args):
    """Refuse sizes that cannot be divided, and --cpu-offload without GPUs."""
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    parts = f"--tensor-parallel {args.tensor_parallel}"
    if args.heads % args.tensor_parallel:
        parser.error(f"--heads {args.heads} must be a multiple of {parts}")
    if args.world_size % args.tensor_parallel:
        parser.error(f"{args.world_size} processes are no multiple of {parts}")
    groups = args.world_size // args.tensor_parallel
    if groups % args.replicas:
        whole = f"--replicas must divide the {plural(groups, 'data-parallel group')}"
        parser.error(f"{whole} of this run, and {args.replicas} does not")
    if args.vocabulary < 4:
        parser.error(f"--vocabulary must be 4 or more, not {args.vocabulary}")
    folder = args.text_file and args.text_file.is_dir()
    if args.vocabulary != 256 and args.text_file:
        has = "256 kinds of tokens, its bytes"
        if folder:
            has = f"the vocabulary of its {tokenize_text.INDEX}"
        advice = "leave one of the two out, or see README.md on own tokens"
        parser.error(f"--text-file has {has}, not --vocabulary {args.vocabulary}: {advice}")
    if args.separate_documents and not folder:
        advice = "give --text-file a folder that tokenize_text.py has written"
        parser.error(f"--separate-documents needs tokens that end documents: {advice}")
    endings = tokenize_text.LINES + tokenize_text.TABLES
    name = args.text_file.name.lower().removesuffix(".gz") if args.text_file else ""
    if name.endswith(endings) and not folder:
        wrong = f"--text-file {args.text_file} would be learnt as it stands, byte by byte"
        parser.error(f"{wrong}: write tokens with tokenize_text.py")
    if args.cpu_offload and not torch.cuda.is_available():
        parser.error("--cpu-offload needs GPUs: without, everything is in CPU memory anyway")


def read_tokens(args):
    """Return the tokens in the folder --text-file, and note in `args` what they are.

    Refuse a folder that tokenize_text.py has not written, or not as a whole.
    """
    try:
        index = tokenize_text.read_index(args.text_file)
    except tokenize_text.WrongInput as error:
        fail(f"--text-file: {error}")
    args.vocabulary = index["vocabulary"]
    args.text = tokenize_text.description(index, args.separate_documents)
    if args.separate_documents:
        args.end = index["end"]
    return data.Shards([data.mapped_tokens(path, index["dtype"]) for path in index["paths"]])


def note_tokens(args, tokens):
    """Note in `args` what the tokens are, unless read_tokens has done so, for --resume."""
    if not hasattr(args, "text"):
        args.text = f"of {len(tokens)} tokens with checksum {zlib.crc32(tokens.numpy())}"


def change_block(args, block):
    """Compile a block, and have the backward pass compute it again, if the flags ask for it."""
    if args.compile:
        block.forward = torch.compile(block.forward)  # and not the gathering of weights around it
    if args.gradient_checkpointing:
        # Its activations are not kept until the backward pass.
        block.forward = functools.partial(recompute, block.forward, use_reentrant=False)


def without_values(model, device):
    """Return the model with memory for its shards; its buffers are unset, see check_values."""
    if hasattr(model, "set_reduce_scatter_unused_params"):  # older releases of PyTorch have not
        # Weights that a batch does not use, such as an expert's, get gradients of 0. Otherwise
        # processes that use others would end, and no resume would find the state of unused ones.
        model.set_reduce_scatter_unused_params(True)
    model = model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.fill_(no_value(buffer))
    return model


def no_value(buffer):
    """Return what all elements of a buffer are that has no values yet."""
    if buffer.is_floating_point() or buffer.is_complex():
        return float("nan")
    return False if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max


def mesh_sizes(args):
    """Return the number of groups, that of their processes and, if there are several, of replicas.

    A checkpoint of an older train.py has only the first two.
    """
    sizes = [args.groups, args.tensor_parallel]
    return sizes if args.replicas == 1 else [*sizes, args.replicas]


def describe_mesh(sizes):
    """Return the sizes of a mesh in words."""
    groups, processes, *replicas = sizes
    text = f"{plural(groups, 'data-parallel group')} of {processes}"
    return f"{text} in {replicas[0]} replicas" if replicas else text


def print_mesh(args, model, progress):
    """Check the model; print how it is divided and the lowest loss that a random source allows."""
    check_values(model, progress)
    check_causal(args, model)
    args.parameters = sum(weight.numel() for weight in model.parameters())  # of all processes
    if rank() > 0:
        return
    own = sum(weight.to_local().numel() for weight in model.parameters())
    groups = describe_mesh(mesh_sizes(args))
    print(f"mesh: {groups}; of {args.parameters} parameters this process holds {own}")
    saved = progress.get("mesh", mesh_sizes(args))
    if saved != mesh_sizes(args):
        print(f"the checkpoint was saved by {describe_mesh(saved)}")
    if args.entropy:
        lowest = f"{args.entropy:.4f} nats per token"
        print(f"entropy of the source: {lowest}; no model can have a lower loss")


def check_values(model, progress):
    """Refuse a model of which a buffer has no first value; name weights that are all 0."""
    for name, buffer in model.named_buffers():
        value = no_value(buffer)
        if (buffer.isnan() if math.isnan(value) else buffer == value).all():
            advice = "make it in forward, or give it its values at the end of build_model"
            fail(f"the model's buffer {name} has no values: {advice}")
    weights = {}
    for name, weight in model.named_parameters():
        if not name.endswith("bias"):
            weights[name] = weight.to_local().count_nonzero()
    values = torch.stack(list(weights.values()))
    dist.all_reduce(values)
    zero = [name for name, value in zip(weights, values.tolist(), strict=True) if value == 0]
    if zero and rank() == 0 and not progress["step"]:
        names = ", ".join(zero[:5])
        advice = "initialise() gives weights others by their names"
        print(f"note: all values of {names} are 0: {advice}")


@torch.no_grad()
@uncompiled
def check_causal(args, model):
    """Refuse a model that sees the tokens which it has to predict, or computes no numbers."""
    length = min(4, args.context)
    if length == 1:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.eval()
    start = [1, 2, 3][: length - 1]
    one = model(torch.tensor([[*start, 0]], device=device))
    other = model(torch.tensor([[*start, 1]], device=device))
    # Otherwise weights that are in no block would stay gathered until the first step.
    model.reshard()
    if not one.isfinite().all():
        advice = "look at the first values in initialise()"
        fail(f"the model's outputs are no numbers before the first step: {advice}")
    # Both are computed in the same way, unless tokens share a matrix product, such as in a mixture
    # of experts. GPUs round that to TF32.
    rounding = 1e-4 if device == "cpu" and args.precision != "bf16" else 0.02
    if (one - other)[:, :-1].abs().max() > rounding * one.abs().max():
        wrong = "its outputs depend on later tokens, which it has to predict"
        fail(f"the model is not causal, {wrong}: is there no mask?")


def share_of_peak(args, progress):
    """Return which share of --peak-tflops the last epoch has computed, from 0 to 1, or None.

    The operations that a token takes in training are those of Chowdhery et al. (2022), appendix B.
    """
    if not args.peak_tflops:
        return None
    products = args.parameters - args.context * args.width  # positions are not multiplied
    operations = 6 * products + 12 * args.layers * args.width * args.context
    speed = progress["history"][-1]["tokens_per_second"]
    return speed * operations / args.world_size / (args.peak_tflops * 1e12)


def main():
    """Write model.pt and model.json from the last checkpoint in an output folder."""
    parser = argparse.ArgumentParser(description="Write model.pt from the last checkpoint.")
    parser.add_argument("output_dir", type=Path, help="--output-dir of train.py")
    args = parser.parse_args()
    path = args.output_dir / shards.CHECKPOINT
    try:
        run = load_checkpoint(path)
        for name, value in run["settings"].items():
            setattr(args, name, value)
        # EDIT: your model, if it is another one.
        model = TinyGPT(args.vocabulary, args.context, args.width, args.heads, args.layers)
        if args.precision == "fp64":
            model = model.double()
        weights = model.state_dict()
        warnings.filterwarnings("ignore", "torch.distributed is")  # one process is what is meant
        dcp.load({"model": weights}, checkpoint_id=path.parent / run["tag"])
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}: give the --output-dir of a run that has saved")
    except Exception as error:  # a damaged file can raise almost anything
        line, _, _ = str(error).strip().partition("\n")
        parser.error(f"{path.parent} cannot be read ({line or repr(error)}): restore a good copy")
    shards.write_weights(args, weights)
    print(f"wrote {args.output_dir / 'model.pt'}, of step {run['progress']['step']}")


if __name__ == "__main__":
    main()
