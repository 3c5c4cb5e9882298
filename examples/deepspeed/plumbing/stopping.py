"""How a run stops after any step, saved, when its job has to end: all processes at the same one."""

import os
from datetime import timedelta

from . import checks
from .launchers import fail, gather, rank, wait_for_unfinished
from .records import finish
from .settings import position


def stop_requested():
    """Return whether this job has to stop: its task has then made a file, see job.sh."""
    return os.path.exists(os.environ.get("STOP_FILE", ""))


def requested(args, progress, seconds):
    """Return what this process asks for after this step: 0 go on, 1 save, 2 save and stop.

    `seconds` is the time since the epoch began.
    """
    if stop_requested():
        return 2
    if isinstance(args.checkpoint_every, timedelta):  # since the last save, or since training began
        return int(seconds - progress["seconds"] >= args.checkpoint_every.total_seconds())
    if args.checkpoint_every:
        return int((progress["step"] + 1) % args.checkpoint_every == 0)
    return 0


def stop(args, progress):
    """End this process, which was asked to stop and has saved; the file `stopped` tells job.sh."""
    wait_for_unfinished()
    if rank() == 0:
        (args.output_dir / "stopped").touch()
    epochs, step = position(args, progress)
    reason = f"stopped by a signal after step {step} of epoch {epochs + 1}"
    finish(args, progress, f"{reason}: use --resume")


def until_stopped(args, progress, test_loader, save, *parts):
    """Yield the batches of an evaluation; if the job has to stop meanwhile, save and end.

    What is saved already is not saved again: requeue.sh would take that for progress. Each process
    looks before as many batches as all have, since some may have one more.
    `save` is save_checkpoint, and `parts` is what it gets between args and progress.
    """
    import torch
    import torch.distributed as dist

    if type(test_loader).__module__.startswith("accelerate."):
        wrong = "accelerator.prepare() would divide the samples of test_loader once more"
        fail(f"{wrong}, and test only a part of them: do not give it this loader")
    common = min(gather(len(test_loader)))
    for number, batch in enumerate(test_loader):
        if number < common:
            request = torch.tensor([int(stop_requested())])
            dist.all_reduce(request, dist.ReduceOp.MAX)
            if request.item():
                if checks.last_saved["step"] != progress["step"]:
                    save(args, *parts, progress)
                stop(args, progress)
        yield batch
