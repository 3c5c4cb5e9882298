"""Save and load checkpoint.npz, a NumPy file of all variables; longrun.py does it for PyTorch.

All processes of a run call start and save together.
"""

import json
import math
import os
import tempfile
import zlib
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import longrun


def gather(values, value):
    """Fill the list with the values of all ranks, for longrun.py."""
    values[:] = hvd.allgather_object(value, name="gather")  # horovod: all must use the same name


def find(args, run):
    """Lock the folder and test its checkpoint; return the content or None, and an error or None."""
    path = args.output_dir / "checkpoint.npz"
    if error := longrun.lock(args.output_dir):
        return None, error
    other = "or choose another --output-dir"
    if path.is_symlink() and not path.exists():
        return None, f"{path} is a link to {os.readlink(path)}, which is gone: restore it, {other}"
    if not path.exists():
        alone = (args.output_dir / "model.keras").exists()
        return None, f"{args.output_dir} has a model and no checkpoint: move it, {other}" * alone
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, {other}"
    try:
        with np.load(path) as file:  # NumPy checks the checksums
            found = dict(file)
        progress = json.loads(str(found["progress"]))
        before = progress["run"].items()
    except Exception as error:  # a damaged file can raise almost anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        return None, f"{path} is damaged, or cannot be read ({reason}): restore a copy, {other}"
    differ = [f"{name} {value}" for name, value in before if run.get(name, value) != value]
    if differ:
        return None, f"{path} is from a run with {', '.join(differ)}: use the same, {other}"
    return found | {"progress": progress}, None


def start(args, name, data_sets, variables, progress):
    """Load the checkpoint, if there is one; print a line about this run; return its progress."""
    shapes = zlib.crc32(repr([tuple(variable.shape) for variable in variables]).encode())
    progress["run"] = longrun.describe(args, {}, data_sets)
    progress["run"]["a model of"] = f"{len(variables)} variables (shapes {shapes:08x})"
    found, error = find(args, progress["run"]) if hvd.rank() == 0 else (None, None)
    longrun.agree(error)
    # horovod: rank 0 has read the file, and sends its progress to all processes
    progress = hvd.broadcast_object(found["progress"] if found else progress, name="progress")
    for number, variable in enumerate(variables if found else []):
        variable.assign(found[f"{number:04}"])  # train.py sends them to the other processes
    hosts = longrun.gather(os.uname().nodename)
    facts = {"tensorflow": tf.__version__, "commit": os.environ.get("COMMIT")}
    longrun.record(args, "starts", step=progress["step"], hosts=hosts, **facts)
    if hvd.rank() == 0:
        nodes, threads = len(set(hosts)), tf.config.threading.get_intra_op_parallelism_threads()
        backend = "mpi on cpu" if hvd.mpi_enabled() else "gloo on cpu"
        where = f"{len(hosts)} processes on {nodes} node{'s' * (nodes > 1)}, {backend}"
        each = f"{threads} thread{'s' * (threads > 1)} each"
        print(f"{name} on {args.dataset}: {where}, {each}, global batch {args.global_batch}")
        if found:
            print(f"continuing after epoch {len(progress['history'])} of {args.epochs}")
    return progress


def save(args, variables, progress):
    """Write metrics.csv and checkpoint.npz, after a check; print the row of the last epoch."""
    arrays = {f"{number:04}": variable.numpy() for number, variable in enumerate(variables)}
    last = progress["history"][-1]
    table = [[np.sum(part, dtype=float) for part in (a, np.abs(a))] for a in arrays.values()]
    losses = [last["train_loss"], last["test_loss"], *np.ravel(table)]
    wrong = f"loss or weights are not finite after step {progress['step']}: nothing is saved"
    longrun.agree(None if all(map(math.isfinite, losses)) else f"{wrong}; lower --lr")
    tables = np.array(longrun.gather(table))  # ptp: largest minus smallest value
    if (np.ptp(tables, axis=0).max(1) > 1e-4 * tables[:, :, 1].max(0)).any():
        longrun.fail("weights differ between the ranks: nothing is saved", together=True)
    rows = [list(last), *(row.values() for row in progress["history"])]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    longrun.write(args, "metrics.csv", lambda file: file.write(text.encode()))
    arrays["progress"] = np.array(json.dumps(progress))
    longrun.write(args, "checkpoint.npz", lambda file: np.savez(file, **arrays))
    if hvd.rank() == 0:
        losses = f"train loss {last['train_loss']:.4f} | test loss {last['test_loss']:.4f}"
        speed = f"{last['samples_per_second']:5.0f} samples/s | {last['seconds']:6.2f} s"
        said = f"{losses} | test acc {last['test_accuracy']:7.2%} | {speed}"
        print(f"epoch {last['epoch']:2}/{args.epochs} | {said}")
    longrun.alive(args.timeout)


def save_model(model, file):
    """Write a model as Keras does, for keras.models.load_model, to an open file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")  # Keras accepts only this ending
        keras.saving.save_model(model, path)
        file.write(path.read_bytes())
