"""What a long run needs besides the training: checks, safe writes, checkpoints, a clean end.

All processes of a run call these functions together, except positive, alive, fail, seed, describe
and wish; rank 0 alone calls lock and find_checkpoint. Any launcher may have started the processes.
"""

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import hashlib
import json
import math
import os
import random
import signal
import sys
import time
import zipfile
import zlib

import numpy as np

torch = sys.modules.get("torch")  # None if train.py has not imported it (TensorFlow)
RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # rates that PyTorch keeps in a parameter group
GO_ON, SAVE, STOP = range(3)  # what `wish` answers after a step
rank, size = int(os.environ.get("RANK", 0)), 1  # this process's number; number of processes
gather_into, leave = (lambda values, value: values.__setitem__(0, value)), sys.exit  # alone
last_save = time.monotonic()


def positive(text, least=1):
    """Return a whole number, at least `least`; argparse turns ValueError into one line."""
    if int(text) < least:
        raise ValueError
    return int(text)


def prepare(args, my_rank, world_size, gather_all, leave_group):
    """Prepare this process for a long run; refuse to train on the CPU in a job that has GPUs.

    gather_all(values, value) fills the list with all ranks' values; end() calls leave_group().
    """
    global rank, size, gather_into, leave
    rank, size, gather_into, leave = my_rank, world_size, gather_all, leave_group
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.register(signal.SIGUSR2)  # prints the stacks of all threads, also in a hang
    alive(args.timeout)  # joining the others takes at most --timeout
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this process ends when its launcher ends
    # Keep freed memory for the next step: this makes steps on CPUs a fifth faster.
    libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; old glibc wants less
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    has_gpus = os.environ.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0")
    if torch and has_gpus and not torch.cuda.is_available() and os.environ.get("ALLOW_CPU") != "1":
        build = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}"
        fail(f"{build}, cannot use the GPUs of this job: see README.md, or set ALLOW_CPU=1")


def alive(seconds):
    """End this process and print its stacks unless it calls alive again in time; None: no limit."""
    faulthandler.cancel_dump_traceback_later()
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)


def seed(*numbers):
    """Seed Python, NumPy and PyTorch by a hash of numbers such as seed, step and rank."""
    value = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")
    random.seed(value)
    np.random.seed(value % 2**32)
    if torch:
        torch.manual_seed(value)


def fail(message, together=False):
    """Print one line and end with status 2; together: all processes call it, and rank 0 prints."""
    line = f"train.py: error: {message}"
    if rank > 0 and not together:
        time.sleep(2)  # rank 0 often fails, too: its one line is enough
    if rank == 0 or not together:
        print(line, file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints this file at the end
        with open(report, "w") as file:
            json.dump({"message": line, "timestamp": int(time.time())}, file)
    if together:
        gather(None)  # wait until rank 0 has printed: the first exit ends all processes
    os._exit(2)


def gather(value):
    """Return the values that all processes pass, as a list in the order of the ranks."""
    values = [None] * size
    gather_into(values, value)
    return values


def agree(error):
    """End all processes with one line if one of them gives an error message instead of None."""
    if found := next(filter(None, gather(error)), None):
        fail(found, together=True)


def lock(folder):
    """Lock the folder until this process ends; return an error message, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # the file must stay open
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another run is writing to --output-dir {folder}: wait, or choose another folder"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # no locks available
            return f"cannot write to --output-dir {folder} ({error.strerror}): choose another one"
    for unfinished in folder.glob(".*.unfinished"):  # a run was killed while it wrote this file
        unfinished.unlink(missing_ok=True)


def write(args, name, save):
    """Have rank 0 write a file by save(file), as a whole or not at all; the others wait for it."""
    alive(None)  # a save may take longer than a step
    path, temporary, error = args.output_dir / name, args.output_dir / f".{name}.unfinished", None
    try:
        if rank == 0:
            with open(temporary, "w+b") as file:
                save(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except (OSError, RuntimeError) as wrong:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        error = f"cannot write {path} ({wrong}): is the disk full? Free some space, then --resume"
    agree(error)


def describe(args, stateful, data_sets):
    """Return what must be the same when a run is resumed."""
    names = ("dataset", "seed", "precision", "global_batch")
    run = {f"--{n.replace('_', '-')}": getattr(args, n) for n in names if hasattr(args, n)}
    for name, part in zip(("training", "test"), data_sets, strict=True):
        labels, known = getattr(part, "labels", getattr(part, "targets", None)), 0
        with contextlib.suppress(Exception):  # only labels that are numbers in memory are compared
            labels[0] + 0  # an error, unless labels are numbers
            values = labels.cpu() if hasattr(labels, "cpu") else labels
            known = zlib.crc32(np.ascontiguousarray(values))  # a checksum
        size = len(part) if hasattr(part, "__len__") else "an unknown number of"
        run[f"{name} data of"] = f"{size} samples (labels {known:08x})"
    models = [part.state_dict() for part in stateful.values() if hasattr(part, "parameters")]
    shapes = [(n, tuple(getattr(w, "shape", ()))) for weights in models for n, w in weights.items()]
    run["a checkpoint of"] = ", ".join(stateful)
    run["a model of"] = f"{len(shapes)} tensors (shapes {zlib.crc32(repr(shapes).encode()):08x})"
    return run


def find_checkpoint(args, run):
    """Lock the folder, test its checkpoint; return content or None, and an error or "" or None."""
    path = args.output_dir / "checkpoint.pt"
    if error := lock(args.output_dir):
        return None, error
    other = "or choose another --output-dir"
    if path.is_symlink() and not path.exists():
        return None, f"{path} is a link to {os.readlink(path)}, which is gone: restore it, {other}"
    if not path.exists():
        alone = (args.output_dir / "model.pt").exists()
        return None, f"{args.output_dir} has a model.pt and no checkpoint: move it, {other}" * alone
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, {other}"
    try:
        if changed := zipfile.ZipFile(path).testzip():  # torch.load does not check checksums
            raise ValueError(f"{changed} has changed")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        before = checkpoint["progress"]["run"].items()
    except Exception as error:  # a damaged file can raise almost anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None, f"{path} is damaged, or cannot be read ({reason}): restore a copy, {other}"
    differ = [f"{name} {value}" for name, value in before if run.get(name, value) != value]
    if differ:
        return None, f"{path} is from a run with {', '.join(differ)}: use the same, {other}"
    return checkpoint, None


def load_checkpoint(args, stateful, progress):
    """Load a checkpoint into `stateful`; return its progress, or None if there is no checkpoint.

    Rank 0 tests the file before the others read it. Saved learning rates are scaled to --lr.
    """
    checkpoint, error = find_checkpoint(args, progress["run"]) if rank == 0 else (None, None)
    agree(error)
    if not gather(checkpoint is not None)[0]:  # [0]: what rank 0 has found
        return None
    if rank > 0:
        checkpoint = torch.load(args.output_dir / "checkpoint.pt", "cpu", weights_only=True)
    factor = args.lr / checkpoint["lr"] if checkpoint["lr"] else 1
    for name, part in stateful.items():
        part.load_state_dict(checkpoint[name])
        for group in getattr(part, "param_groups", []):  # of an optimizer
            group |= {name: group[name] * factor for name in RATES if name in group}
        if hasattr(part, "base_lrs"):  # a scheduler
            part.base_lrs = [rate * factor for rate in part.base_lrs]
    return checkpoint["progress"]


def check(trained, progress):
    """End the run if a loss or weight is not finite, or if trained tensors differ between ranks."""
    table = []  # for each tensor: the sum, and the sum of absolute values
    for weight in trained:
        weight = torch.view_as_real(weight) if weight.is_complex() else weight
        parts = (weight.detach(), weight.detach().abs())
        table.append([part.sum(dtype=torch.float64).item() for part in parts])
    last = progress["history"][-1] if progress["history"] else {}
    losses = [last.get("train_loss", 0), last.get("test_loss", 0), *progress.get("sums", [])]
    finite = all(map(math.isfinite, [*losses, *(total for _, total in table)]))
    wrong = f"loss or weights are not finite after step {progress['step']}: nothing is saved"
    agree(None if finite else f"{wrong}; lower --lr, or look at the data")
    tables = np.array(gather(table)).reshape(size, -1, 2)  # ptp: largest minus smallest value
    apart = np.ptp(tables, axis=0).max(1) > 1e-4 * tables[:, :, 1].max(0)  # more than rounding
    if apart.any() and os.environ.get("ALLOW_OTHER_WEIGHTS") != "1":
        wrong = f"weights of shape {tuple(trained[apart.argmax()].shape)} differ between the ranks"
        advice = "is a layer or a loss outside of DDP? To continue, set ALLOW_OTHER_WEIGHTS=1"
        fail(f"{wrong}: nothing is saved; {advice}", together=True)


def save_checkpoint(args, stateful, progress):
    """Write metrics.csv and checkpoint.pt, after a check; at the end of an epoch print its row."""
    global last_save
    groups = [group for part in stateful.values() for group in getattr(part, "param_groups", [])]
    check([weight for group in groups for weight in group["params"]], progress)
    state = {name: part.state_dict() for name, part in stateful.items()}
    state |= {"progress": progress, "lr": args.lr}
    for row in progress["history"]:  # numbers in NumPy or in tensors become Python numbers
        row |= {name: value.item() for name, value in row.items() if hasattr(value, "item")}
    if history := progress["history"]:
        names = list(dict.fromkeys(name for row in history for name in row))  # each once
        rows = [names, *([row.get(name, "nan") for name in names] for row in history)]
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        write(args, "metrics.csv", lambda file: file.write(text.encode()))
    write(args, "checkpoint.pt", lambda file: torch.save(state, file))
    if rank == 0 and history and not progress.get("epoch_step"):
        row = history[-1]
        said = f"epoch {row['epoch']:2}/{args.epochs} | train loss {row['train_loss']:.4f}"
        said += f" | test loss {row['test_loss']:.4f}" if "test_loss" in row else ""
        said += f" | test acc {row['test_accuracy']:7.2%}" if "test_accuracy" in row else ""
        print(f"{said} | {row['samples_per_second']:5.0f} samples/s | {row['seconds']:6.2f} s")
    last_save = time.monotonic()
    alive(args.timeout)


def record(args, what, **facts):
    """Add a start or a stop to run.json, which records how this run was made."""
    path = args.output_dir / "run.json"
    run = json.loads(path.read_text()) if rank == 0 and path.exists() else {}
    run |= {"command": sys.argv, "settings": vars(args), "torch": torch and torch.__version__}
    run[what] = [*run.get(what, []), {"time": time.time()} | facts]
    text = json.dumps(run, indent=1, default=str)
    write(args, "run.json", lambda file: file.write(text.encode()))


def start(args, what, where, data_sets, stateful, progress):
    """Load the checkpoint, if there is one; print a line about this run; return its progress."""
    progress["run"] = describe(args, stateful, data_sets)
    progress = load_checkpoint(args, stateful, progress) or progress
    hosts = gather(os.uname().nodename)
    record(args, "starts", step=progress["step"], hosts=hosts, commit=os.environ.get("COMMIT"))
    if rank == 0:
        nodes, threads = len(set(hosts)), sys.modules["torch"].get_num_threads()
        where = f"{len(hosts)} processes on {nodes} node{'s' * (nodes > 1)}, {where}"
        each = f"{threads} thread{'s' * (threads > 1)} each, global batch {args.global_batch}"
        print(f"{what}: {where}, {each}")
    if rank == 0 and progress["step"]:
        step = f", step {progress['epoch_step']}" if progress.get("epoch_step") else ""
        print(f"continuing after epoch {len(progress['history'])} of {args.epochs}{step}")
    return progress


def wish(args):
    """Return GO_ON, SAVE (--checkpoint-every) or STOP; only rank 0's answer counts."""
    if rank == 0 and (args.output_dir / "stop").exists():  # job.sh makes this file, and so can you
        return STOP
    minutes = getattr(args, "checkpoint_every", None)
    return SAVE if minutes and time.monotonic() - last_save >= 60 * minutes else GO_ON


def end(args, progress, how, model="model.pt"):
    """Note in run.json that this run is "finished" or "stopped", print it, and end this process."""
    message = f"finished: the model is in {args.output_dir / model}"
    if how == "stopped":
        epochs, step = len(progress["history"]), progress.get("epoch_step")
        where = f"step {step} of epoch {epochs + 1}" if step else f"epoch {epochs}"
        message = f"stopped after {where}: continue with --resume"
    record(args, "stops", step=progress["step"], reason=message)
    if rank == 0:
        print(message)
        stop = args.output_dir / "stop"
        if stop.exists():  # if SLURM asked, job.sh finds `stopped` and requeues the job
            stop.rename(args.output_dir / how)
    gather(None)  # no process ends before rank 0 is done
    leave()
    sys.stdout.flush()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)
