"""A checkpoint of many files: each process writes its own, and checkpoint.pt names the folder.

train.py calls these functions beside those of longrun.py; all processes call them together.
"""

import os
import shutil
import zipfile

import longrun


def save_checkpoint(args, stateful, progress, save):
    """Write a new folder by save(where, its name), and then checkpoint.pt, which names it.

    So a kill at any moment does no harm.
    """
    longrun.alive(None)  # a save may take longer than a step
    folder = args.output_dir / "checkpoint" / f"step{progress['step']}"
    if longrun.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while saving
    longrun.gather(None)
    try:
        save(folder.parent, folder.name)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        wrong = f"cannot write {folder} ({error})".partition("\n")[0]
        longrun.fail(f"{wrong}: is the disk full? Free some space, then --resume")
    os.sync()  # the files are on the disk before checkpoint.pt names them
    # Each process sees at least its own files: NFS shows those of other nodes later.
    names = longrun.gather([path.name for path in folder.iterdir() if path.is_file()])
    progress |= {"folder": folder.name, "files": sorted(set().union(*names)), "lr": args.lr}
    progress["divided"] = getattr(args, "divided", None)
    longrun.save_checkpoint(args, stateful, progress)
    if longrun.rank == 0:
        for old in set(folder.parent.glob("step*")) - {folder}:
            shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(args, progress):
    """Return where the folder is that checkpoint.pt names, and its name, after a test of its files.

    args.divided, if there is one, says how the state is divided: it has to be the same.
    """
    folder, error = args.output_dir / "checkpoint" / progress["folder"], None
    other = "or choose another --output-dir"
    try:
        for name in progress["files"][longrun.rank :: longrun.size]:  # each process tests some
            if changed := zipfile.ZipFile(folder / name).testzip():  # torch.load does not
                raise ValueError(f"{changed} has changed")
    except Exception as wrong:  # a damaged file can raise almost anything
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
