"""The checkpoint of many files: what makes it survive a kill at any moment, and notice damage.

Each save has a folder of its own in checkpoint/, into which all processes write their shards.
checkpoint/run.json is replaced when they have: it names the last complete folder, with the
checksums of its files and how far the run was.
"""

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import threading
import warnings
import zipfile
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from . import checkpoints
from .checkpoints import accept, damaged, resume_settings
from .files import write, write_metrics
from .launchers import UNFINISHED, fail, gather, others_waiting, patient_group, print_errors
from .settings import position

CHECKPOINT = "checkpoint/run.json"  # in --output-dir
# Of a save in the background: the process group that its thread uses, and that thread.
BACKGROUND = {"group": None, "thread": None}


def ignore_warnings():
    """Silence what FSDP2 and its checkpoints say, and what says nothing about train.py."""
    # The logits are not changed in place here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    # torch.distributed.checkpoint itself uses it.
    warnings.filterwarnings("ignore", ".*TypedStorage is deprecated")
    # It says that gathering takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def read_checkpoint(args, model):
    """Lock the output folder; return its run.json, None without one, or an error message."""
    return checkpoints.read_checkpoint(args, model, CHECKPOINT)


def check(args, checkpoint):
    """Have each process read a part of the files; return their folder, if none is damaged."""
    folder = args.output_dir / "checkpoint" / checkpoint["tag"]
    files, errors = checkpoint["files"], []
    for name in list(files)[dist.get_rank() :: args.world_size]:
        try:
            if checksum_of(folder / name) != files[name]:
                errors.append(damaged(folder.parent, f"{name} has changed"))
        except Exception as error:  # a damaged archive can raise almost anything
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            where = f"{name}: {reason} on {os.uname().nodename}"
            errors.append(damaged(folder.parent, where))
    accept(next(iter(sum(gather(errors), [])), None))
    return folder


def checksum_of(path):
    """Return the CRC-32 of a file's content; None if it is an archive that has its own, unharmed.

    Raises ValueError if a part of an archive is damaged.
    """
    if path.suffix == ".pt":
        changed = zipfile.ZipFile(path).testzip()
        if changed:
            raise ValueError(f"{changed} has changed")
        return None
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def begin(args, progress):
    """Write metrics.csv; return the empty folder for a new checkpoint's shards. All call this.

    An earlier save in the background is waited for.
    """
    wait_for_save()
    epochs, step = position(args, progress)
    folder = args.output_dir / "checkpoint" / f"epoch{epochs}-step{step}"
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads((folder.parent / "run.json").read_text())["tag"] == folder.name:
                folder = folder.with_name(f"{folder.name}-again")  # that one is needed until then
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while saving
        with write_errors(folder):
            folder.parent.mkdir(exist_ok=True)  # no parents: a removed --output-dir is an error
        write_metrics(args, progress)
    name, *_ = gather(folder.name)  # waits: rank 0 has made room
    return folder.with_name(name)


class Writer(dcp.FileSystemWriter):
    """What writes copies on the CPU, and asks no GPU for anything.

    PyTorch's own way asks for a GPU's stream in its thread, to which the first GPU belongs: each
    process would take memory there.
    """

    def stage(self, state):
        """Return a copy of a state dict, which the thread writes."""
        self.per_thread_copy_ahead = 0
        return torch.utils._pytree.tree_map(copy_of, state)


def copy_of(value):
    """Return a copy of a tensor on the CPU, or what is no tensor as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def save_in_background(args, state, progress, folder):
    """Copy the shards of a state dict; have a thread write the copies and complete the checkpoint.

    All processes call this.
    """
    if not BACKGROUND["group"]:
        # Collectives of two threads would meet in one group. No step waits for these.
        BACKGROUND["group"] = patient_group()
        UNFINISHED.append(wait_for_save)
    group = BACKGROUND["group"]
    saving = dcp.async_save(state, storage_writer=Writer(folder), process_group=group)
    progress = copy.deepcopy(progress)  # training goes on

    @print_errors
    def wait_and_complete():
        with write_errors(folder):
            saving.result()
        complete(args, progress, folder, group)

    BACKGROUND["thread"] = threading.Thread(target=wait_and_complete, daemon=True)
    BACKGROUND["thread"].start()


def wait_for_save():
    """Wait until a save in the background is complete."""
    if BACKGROUND["thread"]:
        BACKGROUND["thread"].join()


def complete(args, progress, folder, group=None):
    """Write run.json, which names the shards: a resume takes these from now on. All call this."""
    rank = dist.get_rank()
    files = {}
    with write_errors(folder):
        for file in folder.iterdir():
            if file.name.startswith(f"__{rank}_") or f"_rank_{rank}_" in file.name:
                files[file.name] = finished_file(file)
    shared = gather(files, group)  # waits: all shards are written
    if rank > 0:
        return
    files = {name: checksum for part in shared for name, checksum in part.items()}
    with write_errors(folder):
        for file in sorted(folder.iterdir()):
            if file.name not in files:  # of no process in particular
                files[file.name] = finished_file(file)
    run = {"tag": folder.name, "progress": progress, "settings": resume_settings(args)}
    run["files"] = files
    run["checksum"] = zlib.crc32(json.dumps(run).encode())
    write(folder.parent / "run.json", lambda file: file.write(json.dumps(run).encode()))
    for old in set(folder.parent.glob("epoch*")) - {folder}:
        shutil.rmtree(old, ignore_errors=True)


def finished_file(path):
    """Flush a file to the disk; return its CRC-32, or None for an archive, which has its own."""
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    return None if path.suffix == ".pt" else checksum_of(path)


def write_model(args, weights):
    """On rank 0, write the state dict of the whole model, and its sizes; return the path."""
    with others_waiting():
        if dist.get_rank() == 0:
            write_weights(args, weights)
    return args.output_dir / "model.pt"


def write_weights(args, weights):
    """Write the state dict of a whole TinyGPT, and its sizes."""
    # A model of your own may have another name for it.
    sizes = {"vocab": len(weights["token.weight"])} if "token.weight" in weights else {}
    sizes |= {name: getattr(args, name) for name in ("context", "width", "heads", "layers")}
    text = json.dumps(sizes)
    write(args.output_dir / "model.json", lambda file: file.write(text.encode()))
    write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))


@contextlib.contextmanager
def write_errors(folder):
    """End this process with one line if what is done in this context fails because of the disk."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        cause = error
        if isinstance(error, CheckpointException):  # it has the errors of all processes
            cause = next(iter(error.failures.values()))[0]
        other = isinstance(cause, (dist.DistError, torch.OutOfMemoryError))
        other = other or re.search("CUDA error|gloo", str(cause))
        if other or not isinstance(cause, (OSError, RuntimeError)):
            raise
        wrong = f"cannot write {folder} ({cause}): is the disk full, or your quota?"
        fail(f"{wrong} Free some space, then use --resume")
