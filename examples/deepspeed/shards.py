"""The checkpoint of many files: what makes it survive a kill at any moment, and notice damage.

Each save has a folder of its own in checkpoint/, into which all processes write their shards. checkpoint/run.json is
replaced when they have: it names the last complete folder, its files, and how far the run was.
"""

import contextlib
import json
import os
import shutil
import zipfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import checks
from plumbing import accept, fail, gather, lock, position, resume_settings, write, write_metrics

CHECKPOINT = "checkpoint/run.json"  # in --output-dir


def read_checkpoint(args, model):
    """Lock the output folder; return its checkpoint, None without one, or an error message. It changes nothing."""
    checks.look_at_model(args, model)
    path, settings = args.output_dir / CHECKPOINT, resume_settings(args)
    if error := lock(args.output_dir):
        return error
    if not path.exists():
        return None
    if not args.resume:
        return f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = load_checkpoint(path)
        epochs = len(checkpoint["progress"]["history"])
        had = {name: old for name, old in checkpoint["settings"].items() if name != "fingerprint"}
        changed = [f"{name} {old}" for name, old in had.items() if settings.get(name, old) != old]
        changed += checks.differences(checkpoint["settings"].get("fingerprint"), path)
    except Exception as error:  # a damaged file can raise almost anything
        return f"{path} is damaged or cannot be read ({error!r}): restore a good copy, or move it away to start over"
    if changed:
        return f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint


# own: run.json alone; check() reads the files that it names
def load_checkpoint(path):
    """Return what run.json says; if it is damaged, raise an exception."""
    return json.loads(path.read_text())


def damaged(path, why):
    """Return the error message for a checkpoint that cannot be read."""
    return f"{path} is damaged or cannot be read ({why}): restore a good copy, or move it away to start over"


# own: the files are archives of PyTorch, with checksums of their own
def check(args, checkpoint):
    """Have each process read a part of the files; return their folder, or end all processes if a file is damaged."""
    path, errors = args.output_dir / "checkpoint", []
    for name in checkpoint["files"][dist.get_rank() :: args.world_size]:
        try:
            if changed := zipfile.ZipFile(path / name).testzip():
                errors.append(damaged(path, f"{name}: {changed} has changed"))
        except Exception as error:  # a damaged file can raise almost anything
            errors.append(damaged(path, f"{name}: {error!r} on {os.uname().nodename}"))
    accept(next(iter(sum(gather(errors), [])), None))
    return path / checkpoint["tag"]


def begin(args, progress):
    """Write metrics.csv; return the folder for the shards of a new checkpoint, which is empty. All call this."""
    epochs, step = position(args, progress)
    folder = args.output_dir / "checkpoint" / f"epoch{epochs}-step{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # may be there from a run that was killed while saving
        with write_errors(folder):
            folder.parent.mkdir(exist_ok=True)  # without its parents: that --output-dir was removed is an error
        write_metrics(args, progress)
    dist.barrier()
    return folder


def complete(args, progress, folder):
    """Write run.json, which names the shards: a resume takes these from now on; all processes call this."""
    rank, path = dist.get_rank(), folder.parent
    with write_errors(folder):
        for file in folder.glob("*.pt"):
            if rank == 0 or f"_rank_{rank}_" in file.name:
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
    dist.barrier()  # now all shards are on the disk
    if rank > 0:
        return
    files = sorted(str(file.relative_to(path)) for file in folder.glob("*.pt"))
    run = {"tag": folder.name, "files": files, "progress": progress, "settings": resume_settings(args)}
    write(path / "run.json", lambda file: file.write(json.dumps(run).encode()))
    for old in set(path.glob("epoch*")) - {folder}:
        shutil.rmtree(old, ignore_errors=True)


def gather_weights(model):
    """Return the state dict in fp32, gathered from the shards of all processes, on each of them."""
    from deepspeed.utils import safe_get_full_fp32_param  # here: train.py has to choose the accelerator before

    weights = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        gathered = safe_get_full_fp32_param(weight)  # all processes call it; None if it is no shard
        weight = (weight if gathered is None else gathered).detach().cpu()
        weights[name] = weight.float() if weight.is_floating_point() else weight
    return weights


@contextlib.contextmanager
def write_errors(folder):
    """End this process with one line if what is done in this context fails because of the disk."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        cause = error
        if isinstance(error, CheckpointException):  # has the errors of all processes, with tracebacks
            cause = next(iter(error.failures.values()))[0]
        other = isinstance(cause, (dist.DistError, torch.OutOfMemoryError)) or "gloo" in str(cause)
        if other or not isinstance(cause, (OSError, RuntimeError)):
            raise
        fail(f"cannot write {folder} ({cause}): is the disk full, or your quota? Free some space, then use --resume")
