"""A checkpoint of many files: each process writes its own, and checkpoint.pt names the folder.

train.py calls these functions beside those of longrun.py; all processes call them together.
"""

import os
import shutil
import zlib

from torch.distributed.checkpoint import CheckpointException

import longrun


def checksum(path):
    """Return the CRC-32 of a file's content."""
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**22):
            value = zlib.crc32(part, value)
    return value


def save_checkpoint(args, stateful, progress, save):
    """Write a new folder by save(where, its name), and then checkpoint.pt, which names it.

    So a kill at any moment leaves a whole checkpoint: the old one, or the new one.
    """
    longrun.alive(None)  # a save may take longer than a step
    # The last step of an epoch may be saved twice: within the epoch, and at its end.
    within = "-within-epoch" if progress.get("epoch_step") else ""
    folder = args.output_dir / "checkpoint" / f"step{progress['step']}{within}"
    if longrun.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while saving
    longrun.gather(None)
    try:
        save(folder.parent, folder.name)
    except (OSError, RuntimeError, CheckpointException) as error:  # RuntimeError: from torch.save
        failures = getattr(error, "failures", {0: (error,)})  # the errors of all processes
        cause = str(next(iter(failures.values()))[0]).partition("\n")[0]
        wrong = f"cannot write {folder} ({cause})"
        longrun.fail(f"{wrong}: is the disk full? Free some space, then --resume")
    os.sync()  # the files are on the disk before checkpoint.pt names them
    # Each process sees at least its own files: NFS shows the files of other nodes later.
    seen = [path.name for path in folder.iterdir() if path.is_file()]
    names = sorted(set().union(*longrun.gather(seen)))
    # Each process reads the files that it has written, by the rank in the name; rank 0 the others.
    ranks = [next((r for r in range(longrun.size) if f"_{r}_" in name), 0) for name in names]
    mine = [name for name, rank in zip(names, ranks, strict=True) if rank == longrun.rank]
    files = longrun.gather({name: checksum(folder / name) for name in mine})
    progress |= {"folder": folder.name, "lr": args.lr}
    progress["files"] = {name: value for part in files for name, value in part.items()}
    progress["divided"] = getattr(args, "divided", None)
    longrun.save_checkpoint(args, stateful, progress)
    if longrun.rank == 0:
        for old in set(folder.parent.glob("step*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(args, progress):
    """Check the files of the folder that checkpoint.pt names; return its parent and its name.

    args.divided, if there is one, says how the state is divided. It must be the same as before.
    """
    folder, error = args.output_dir / "checkpoint" / progress["folder"], None
    other = "or choose another --output-dir"
    try:
        for name in sorted(progress["files"])[longrun.rank :: longrun.size]:  # a part of them
            if checksum(folder / name) != progress["files"][name]:  # PyTorch does not check this
                raise ValueError(f"{name} has changed")
    except (OSError, ValueError) as wrong:
        error = f"{folder} is damaged, or cannot be read ({wrong!r}): restore a copy, {other}"
    before, now = progress["divided"], getattr(args, "divided", None)
    if before != now:
        error = f"{folder} is from {before}, and now there are {now}: use the same, {other}"
    longrun.agree(error)
    return folder.parent, folder.name


def scale_rates(args, progress, optimizer, scheduler):
    """After a load, scale the learning rates, so that a resume with another --lr takes effect."""
    factor = args.lr / progress["lr"] if progress["lr"] else 1
    for group in optimizer.param_groups:
        group |= {name: group[name] * factor for name in longrun.RATES if name in group}
    if hasattr(scheduler, "base_lrs"):  # a scheduler of PyTorch
        scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]
