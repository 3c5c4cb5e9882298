"""The checkpoint, from which --resume continues: when it is refused, who reads and writes it."""

import contextlib
import json
import math
import pickle
import time
import zipfile
import zlib

from . import checks, forgotten
from .files import link, lock, write, write_metrics
from .launchers import fail, gather, refuse
from .settings import position

CHECKPOINT = "checkpoint.pt"  # in --output-dir
# What a resumed run must share with the run that it continues, where the example has it.
SHARED = (
    *("dataset", "data", "text", "base", "model", "image_size", "sync_batchnorm", "context"),
    *("width", "layers", "heads", "full", "lora_rank", "lora_alpha", "lora_dropout"),
    *("target_modules", "vocabulary", "optimizer", "has_scheduler", "zero_stage"),
    *("fp16_allreduce", "seed", "precision", "global_batch"),
)


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    settings = {name: value for name, value in vars(args).items() if name in SHARED}
    if args.scale_lr:  # with the same --lr, other processes would go on with another learning rate
        number = getattr(args, "groups", args.world_size)
        settings["--scale-lr, whose number of processes was"] = number
    if hasattr(args, "zero_stage"):
        settings["one file of DeepSpeed for each process, whose number was"] = args.world_size
    return settings | {"fingerprint": checks.facts}


def read_checkpoint(args, model, name=CHECKPOINT):
    """Lock the output folder; return its checkpoint, None without one, or an error message.

    It changes nothing in the folder. `name` is that of the checkpoint's file.
    """
    checks.look_at_model(args, model)
    path = args.output_dir / name
    settings = resume_settings(args)
    error = lock(args.output_dir)
    if error:
        return error
    if not path.exists():
        return earlier_run(args, path)
    if not args.resume:
        advice = "add --resume to continue it, or choose another --output-dir"
        return f"{path} is from an earlier run: {advice}"
    try:
        checkpoint = load_checkpoint(path)
        epochs = len(checkpoint["progress"]["history"])
        before = dict(checkpoint["settings"])
        facts = before.pop("fingerprint", None)
        changed = [
            f"{name} {old}" for name, old in before.items() if settings.get(name, old) != old
        ]
        changed += checks.differences(facts, path)
    except Exception as error:  # a damaged file can raise almost anything
        return damaged(path, repr(error))
    if changed:
        wrong = f"{path} is from a run with {', '.join(changed)}"
        return f"{wrong}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        advice = f"use --epochs {epochs} or more, not {args.epochs}"
        return f"{path} already contains {epochs} epochs: {advice}"
    return checkpoint


def earlier_run(args, path):
    """Return an error message if a run has left something else than this checkpoint, or None."""
    names = ["model.pt", "model.keras", "adapter", "model"]
    if not args.resume:  # one killed at its first save may have left these, and begins anew
        names.append("checkpoint-*.pt")
    for name in names:
        for found in args.output_dir.glob(name):
            missing = path.relative_to(args.output_dir)
            wrong = f"{args.output_dir} has {found.name} of an earlier run, and no {missing}"
            return f"{wrong}: choose another --output-dir"
    return None


def damaged(path, reason):
    """Return the error message for a checkpoint that cannot be read."""
    advice = "restore a good copy, or move it away to start over"
    return f"{path} is damaged or cannot be read ({reason}): {advice}"


def load_checkpoint(path):
    """Return a checkpoint's content, by the kind of its file.

    Raises ValueError if it has changed or is of another program, and what else a damaged file
    raises.
    """
    if path.suffix == ".json":
        return load_json(path)
    changed = zipfile.ZipFile(path).testzip()  # torch.load does not notice that
    if changed:
        raise ValueError(f"{changed} has changed")
    if path.suffix == ".npz":
        return load_arrays(path)
    import torch

    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        reason = "it has more than tensors and numbers, so it is of another program"
        raise ValueError(reason) from None
    if not isinstance(checkpoint, dict) or not {"progress", "settings"} <= checkpoint.keys():
        raise ValueError("it has no progress and settings, so it is of another program")
    return checkpoint


def load_json(path):
    """Return what run.json says, of a checkpoint of many files: see shards.py."""
    checkpoint = json.loads(path.read_text())
    if "checksum" not in checkpoint:
        raise ValueError("it was made by an older train.py, which wrote no checksum")
    if checkpoint.pop("checksum") != zlib.crc32(json.dumps(checkpoint).encode()):
        raise ValueError("it has changed")
    return checkpoint


def load_arrays(path):
    """Return the content of a checkpoint of NumPy's arrays: these by their numbers, and the run."""
    import numpy as np

    with np.load(path) as file:
        # Behind a number stands where the array belongs, as Keras has named the model's parts.
        checkpoint = {name.partition("-")[0]: array for name, array in file.items()}
    return checkpoint | json.loads(str(checkpoint.pop("run")))


def accept(answer):
    """Return what read_checkpoint has returned; end this process if that is an error message."""
    if isinstance(answer, str):
        fail(answer)
    return answer


def share_checkpoint(args, found):
    """Return, in each process, the checkpoint that rank 0 has found; end it at an error message.

    Each process reads the file by itself. Sent by rank 0, one of many GB would take minutes and, in
    each process, three times its size of memory. Only where the file lies on rank 0's own disk it
    has to be sent.
    """
    import torch.distributed as dist

    path = args.output_dir / CHECKPOINT
    answer = [{"content": content_of(path)} if isinstance(found, dict) else found]
    dist.broadcast_object_list(answer)
    if not accept(answer[0]):
        return None
    for _ in range(20):  # a network file system may show it to some nodes a little later
        if all(gather(content_of(path) == answer[0]["content"])):
            return found or load_checkpoint(path)
        time.sleep(1)
    shared = [found]
    dist.broadcast_object_list(shared)
    return shared[0]


def content_of(path):
    """Return what tells a checkpoint from another, without reading it all; None without a file."""
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        parts = [(part.filename, part.CRC) for part in zipfile.ZipFile(path).infolist()]
        return zlib.crc32(repr(parts).encode())


def check_results(args, model, progress):
    """Before a checkpoint is written, end the run if what it has computed cannot be right.

    All processes call this.
    """
    reports = gather(checks.own_report(args, model))
    place = position(args, progress)
    message, switch = checks.judge(args, progress, place, reports)
    if not message and len({report["checksum"] for report in reports}) > 1:
        message, switch = checks.judge_weights(gather(checks.extremes(model)))
    checks.note_saved(progress)
    if place[1] == 0:
        checks.forget_losses()
    if message:
        refuse(message, switch)


def write_checkpoint(args, state):
    """Write metrics.csv, and the checkpoint, to which the settings are added; rank 0 calls this.

    At an epoch's end the checkpoint also gets the names that --keep-epochs asks for.
    """
    import torch

    for line in forgotten.lines(state):
        print(line)
    write_metrics(args, state["progress"])
    state = state | {"settings": resume_settings(args)}
    names = [*kept_names(args, state["progress"]), CHECKPOINT]
    first, *others = [args.output_dir / name for name in names]

    def save(file):
        torch.save(state, file)
        file.seek(0)
        if objects := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            wrong = f"{first} cannot have {', '.join(objects)}: --resume reads no objects"
            advice = "turn a number of NumPy into one of Python by float(), and leave out others"
            fail(f"{wrong}. In what you have added to the checkpoint, {advice}")

    write(first, save)
    # The newest is last: a run that is killed before repeats the epoch, and its names.
    for path in others:
        link(first, path)


def write_arrays(args, name, state):
    """Write metrics.csv, and a checkpoint of NumPy's arrays, to which the settings are added."""
    import numpy as np

    write_metrics(args, state["progress"])
    run = {"progress": state.pop("progress"), "settings": resume_settings(args)}
    write(args.output_dir / name, lambda file: np.savez(file, **state, run=json.dumps(run)))


def kept_names(args, progress):
    """Return further names that --keep-epochs gives this checkpoint, and remove older ones.

    At the end of an epoch that is one with its number and, if no test loss was lower, another for
    the best one.
    """
    epochs, step = position(args, progress)
    kept = getattr(args, "keep_epochs", None)
    if not kept or step:
        return []
    for path in args.output_dir.glob("checkpoint-epoch-*.pt"):
        number = path.stem.removeprefix("checkpoint-epoch-")
        if number.isdecimal() and epochs - int(number) >= kept:
            path.unlink()
    names = [f"checkpoint-epoch-{epochs}.pt"]
    best = min(progress["history"], key=loss_of)
    if best is progress["history"][-1]:
        names.append("checkpoint-best.pt")
    return names


def loss_of(row):
    """Return the validation loss of a row, or the test loss; infinity if that is no number."""
    loss = row.get("val_loss", row["test_loss"])
    return math.inf if math.isnan(loss) else loss
