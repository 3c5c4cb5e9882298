"""The checkpoint of many files: what makes it survive a kill at any moment, and notice damage.

Each save has a folder of its own in checkpoint/, into which all processes write their shards. checkpoint/run.json is
replaced when they have: it names the last complete folder, with the checksums of its files and how far the run was.
"""

import contextlib
import functools
import json
import os
import shutil
import zlib
from datetime import timedelta

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


# own: run.json, which has a checksum; check() reads the files that it names
def load_checkpoint(path):
    """Return what run.json says; if it is damaged, raise an exception."""
    checkpoint = json.loads(path.read_text())
    if checkpoint.pop("checksum") != zlib.crc32(json.dumps(checkpoint).encode()):
        raise ValueError("it has changed")
    return checkpoint


def damaged(path, why):
    """Return the error message for a checkpoint that cannot be read."""
    return f"{path} is damaged or cannot be read ({why}): restore a good copy, or move it away to start over"


def check(args, checkpoint):
    """Have each process read a part of the files; return their folder, or end all processes if a file is damaged."""
    path, errors = args.output_dir / "checkpoint", []
    for name, checksum in list(checkpoint["files"].items())[dist.get_rank() :: args.world_size]:
        try:
            if checksum_of(path / checkpoint["tag"] / name) != checksum:
                errors.append(damaged(path, f"{name} has changed"))
        except OSError as error:
            errors.append(damaged(path, f"{name}: {error.strerror} on {os.uname().nodename}"))
    accept(next(iter(sum(gather(errors), [])), None))
    return path / checkpoint["tag"]


def checksum_of(path):
    """Return the CRC-32 of a file's content."""
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            checksum = zlib.crc32(part, checksum)
    return checksum


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


# own: with a checksum of each file, and the mesh
def complete(args, progress, folder):
    """Write run.json, which names the shards: a resume takes these from now on; all processes call this."""
    own = {file.name: checksum_of(file) for file in folder.glob(f"__{dist.get_rank()}_*")}
    files = functools.reduce(dict.__or__, gather(own))  # waits: all shards are written
    if dist.get_rank() > 0:
        return
    run = {"tag": folder.name, "progress": progress | {"mesh": [args.groups, args.tensor_parallel]}}
    run |= {"settings": resume_settings(args), "files": files}
    run["files"][".metadata"] = checksum_of(folder / ".metadata")
    run["checksum"] = zlib.crc32(json.dumps(run).encode())
    write(folder.parent / "run.json", lambda file: file.write(json.dumps(run).encode()))
    for old in set(folder.parent.glob("epoch*")) - {folder}:
        shutil.rmtree(old, ignore_errors=True)


def write_model(args, weights):
    """On rank 0, write the state dict of the whole model, and the sizes of the TinyGPT that it belongs to.

    The others wait for that. It may take longer than --timeout, which is for what all do together.
    """
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    if dist.get_rank() == 0:
        # A model of your own may have another name for it.
        sizes = {"vocab": len(weights["token.weight"])} if "token.weight" in weights else {}
        sizes |= {name: getattr(args, name) for name in ("context", "width", "heads", "layers")}
        write(args.output_dir / "model.json", lambda file: file.write(json.dumps(sizes).encode()))
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
    dist.barrier(patient)


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
