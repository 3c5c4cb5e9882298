"""Train a ConvNet with TensorFlow and Keras 3 on CPU nodes, where Horovod averages the gradients, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import ctypes
import errno
import faulthandler
import fcntl
import json
import os
import resource
import sys
import time
import zipfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors, no notes on the processor
os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever ~/.keras/keras.json says
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import numpy_data as data

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}  # Keras's names


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the processes, or their root")
    parser.add_argument("--warmup-steps", type=int, default=0, help="first steps of the whole run, in which --lr rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=POLICIES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    args = parser.parse_args()
    check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, set the number of threads and the precision."""
    tasks = prepare_process(args)
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    if args.world_size == 1 and tasks > 1:
        fail(ALONE.format(tasks))
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # horovod: share the cores of the node
    if tasks == args.world_size:  # started by srun, which gives each process its own cores
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))
    # By default each process would use all cores: slower.
    args.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores)
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_dtype_policy(POLICIES[args.precision])
    keras.utils.set_random_seed(args.seed)
    tf.config.experimental.enable_op_determinism()  # the same bits in each run


def make_steps(model, optimizer):
    """Return the functions that take a training step and that evaluate a batch, compiled to graphs."""
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        """Return (loss times samples, samples) of this process's batch."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model(images, training=True), labels))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Average)  # horovod: wrap
        gradients = tape.gradient(loss, weights)  # horovod: averages the gradients over all processes
        optimizer.apply(gradients, model.trainable_variables)
        samples = tf.cast(len(labels), tf.float64)
        return tf.stack([tf.cast(loss, tf.float64) * samples, samples])

    @tf.function(reduce_retracing=True)
    def test_step(images, labels):
        """Return (sum of the losses, correct predictions, samples) of this process's batch."""
        logits = model(images, training=False)
        correct = tf.argmax(logits, axis=1) == labels
        sums = [tf.reduce_sum(losses(logits, labels)), tf.math.count_nonzero(correct), len(labels)]
        return tf.stack([tf.cast(value, tf.float64) for value in sums])

    return train_step, test_step


def train_one_epoch(args, train_step, train_set, optimizer, epoch):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    start = time.perf_counter()
    order = np.random.default_rng([args.seed, epoch]).permutation(len(train_set))  # another one in each epoch
    # horovod: shards of equal length, so that all processes take the same number of steps
    steps = len(train_set) // args.world_size // args.batch_size
    shard = order[hvd.rank() :: args.world_size][: steps * args.batch_size]
    sums = tf.zeros(2, tf.float64)  # loss, samples
    for step, indices in enumerate(shard.reshape(steps, args.batch_size), epoch * steps):
        optimizer.learning_rate.assign(learning_rate(args, step))
        sums += train_step(*train_set[indices])
        restart_watchdog(args)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, samples = sums.numpy().tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def evaluate(args, test_step, test_set, shard):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    sums = tf.zeros(3, tf.float64)  # loss, correct, samples
    for first in range(0, len(shard), args.batch_size):
        sums += test_step(*test_set[shard[first : first + args.batch_size]])
        restart_watchdog(args)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, correct, samples = sums.numpy().tolist()
    return loss_sum / samples, correct / samples


def make_model():
    """Return the ConvNet of the other examples, with Keras's initial weights: (B, 28, 28, 1) to logits (B, 10)."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def losses(logits, labels):
    """Return the cross-entropy of each sample (B,), in fp32, or in fp64 if the logits are."""
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def distribute(args, model, optimizer, checkpoint):
    """Give all processes the weights and the state of rank 0; `checkpoint` is None on the others."""
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    if checkpoint:
        for variable, name in zip(variables, state_names(variables), strict=True):
            variable.assign(checkpoint[name])
    # horovod: send rank 0's weights and state to all; a Keras variable holds the one of TensorFlow in `value`
    hvd.broadcast_variables([variable.value for variable in variables], root_rank=0)


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    setup(args)
    rank = hvd.rank()
    train_set, test_set = load_data(args)
    checkpoint, history = find_checkpoint(args)  # the checkpoint on rank 0 only
    # horovod: each test sample exactly once
    shard = range(rank, len(test_set), args.world_size)

    # Model, optimizer, and their state if the run is resumed.
    model = make_model()
    optimizer = keras.optimizers.AdamW(weight_decay=0.01, epsilon=1e-8)  # PyTorch's defaults
    distribute(args, model, optimizer, checkpoint)
    train_step, test_step = make_steps(model, optimizer)

    # Train
    print_header(args, f"ConvNet on {args.dataset}", history)
    for epoch in range(len(history) + 1, args.epochs + 1):
        train_loss, count, seconds = train_one_epoch(args, train_step, train_set, optimizer, epoch - 1)
        test_loss, test_accuracy = evaluate(args, test_step, test_set, shard)
        row = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        history.append(row | {"samples_per_second": count / seconds, "seconds": seconds, "world_size": args.world_size})
        save_checkpoint(args, model, optimizer, history)  # horovod: rank 0 writes; all have the same weights
        print_epoch(args, history[-1])

    # Finish
    print_usage(history)
    if rank == 0:
        write(args.output_dir / "model.keras", lambda file: keras.saving.save_model(model, file.name))
        print(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.keras'}")
    shut_down(args)


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----

LAUNCHED = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # every launcher sets one of these
ALONE = "srun started {} tasks that are not connected: use srun --mpi=pmix (srun --mpi=list shows the types)"


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def fail_together(message):
    """Like fail(), for an error that all processes have seen: disconnect first, so that none reports a lost peer."""
    hvd.shutdown()
    fail(message)


def restart_watchdog(args):
    """Make this process end, and print where it hung, unless this function is called again within --timeout.

    It is needed because MPI waits forever for a process that hangs.
    """
    faulthandler.dump_traceback_later(args.timeout, exit=True)


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    for name, value in vars(args).items():
        least = int(name not in ("seed", "warmup_steps"))
        if type(value) is int and value < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")


def prepare_process(args):
    """Set what must be set before Horovod starts; return the number of tasks that srun started, or 1."""
    keep_memory()
    sys.stdout.reconfigure(line_buffering=True)
    restart_watchdog(args)
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if not any(name in os.environ for name in LAUNCHED):
        if tasks > 1:
            fail(ALONE.format(tasks))
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    # With tensor fusion the summation order depends on timing: 3 or more processes would not reproduce the same bits.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms between checks for gradients to send; measured
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(args.timeout)
    return tasks


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def load_data(args):
    """Return the training and the test set; fail if they are missing, or too small for --batch-size."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail_together(error)
    if args.batch_size > (share := len(train_set) // args.world_size):
        fail_together(f"--batch-size {args.batch_size} is above the {share} samples of each process")
    return train_set, test_set


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    names = ("world_size", "dataset", "batch_size", "seed", "precision")
    return {name: getattr(args, name) for name in names}


def lock(folder):
    """Lock the folder until this process exits or is killed; return an error message or None."""
    try:  # the file stays open on purpose: closing it would release the lock
        folder.mkdir(parents=True, exist_ok=True)
        fcntl.lockf(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another run is writing to --output-dir {folder}: wait for its end, or choose another folder"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # without locks there, continue
            return f"cannot write to --output-dir {folder} ({error.strerror}): choose another folder"


def read_checkpoint(args):
    """Lock the output folder; return (checkpoint or None, error message or None). Never modifies a checkpoint."""
    path = args.output_dir / "checkpoint.npz"
    if error := lock(args.output_dir):
        return None, error
    if not path.exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        damage = zipfile.ZipFile(path).testzip()
        with np.load(path) as file:
            checkpoint = dict(file)
        checkpoint |= json.loads(str(checkpoint.pop("run")))
        epochs, settings = len(checkpoint["history"]), resume_settings(args)
        changed = [f"{name} {old}" for name, old in checkpoint["settings"].items() if old != settings[name]]
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): correct that, then continue with --resume"
    except Exception as error:  # a damaged file makes these raise almost anything
        damage = repr(error)
    if damage:
        return None, f"{path} is damaged ({damage}): move it away to start over, or restore a good copy"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return None, f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint, None


def find_checkpoint(args):
    """Return (checkpoint, history). Only rank 0 gets the checkpoint, if there is one; all get its history."""
    restart_watchdog(args)
    checkpoint, error = read_checkpoint(args) if hvd.rank() == 0 else (None, None)
    history, error = hvd.broadcast_object((checkpoint["history"] if checkpoint else [], error))
    if error:
        fail_together(error)
    return checkpoint, history


def write(path, save):
    """Write a file atomically: save(file) writes a temporary file, which is then renamed to `path`."""
    temporary = path.with_name(f"tmp.{os.getpid()}.{path.name}")  # Keras wants the suffix .keras
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")


def state_names(variables):
    """Return the names under which the checkpoint holds the variables of the model and the optimizer."""
    return [f"{number:03}-{variable.path.replace('/', '-')}" for number, variable in enumerate(variables)]


def save_checkpoint(args, model, optimizer, history):
    """Write metrics.csv, then the checkpoint; a kill between the two leaves a row too many, which a resume rewrites."""
    restart_watchdog(args)
    if hvd.rank() > 0:
        return
    rows = [history[0].keys(), *(row.values() for row in history)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    variables = [*model.variables, *optimizer.variables]
    state = dict(zip(state_names(variables), [variable.numpy() for variable in variables], strict=True))
    state["run"] = json.dumps({"history": history, "settings": resume_settings(args)})
    write(args.output_dir / "checkpoint.npz", lambda file: np.savez(file, **state))


def print_header(args, what, history):
    """Print what this run is and, if it is resumed, where it continues."""
    restart_watchdog(args)
    if hvd.rank() > 0:
        return
    threads = f"{args.threads} thread{'s' if args.threads > 1 else ''} each"
    nodes, backend = hvd.cross_size(), "mpi" if hvd.mpi_enabled() else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on cpu"
    batch = args.world_size * args.batch_size
    print(f"{what}: {where}, {threads}, global batch {batch}")
    if history:
        print(f"continuing after epoch {len(history)} of {args.epochs}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if hvd.rank() > 0:
        return
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['samples_per_second']:5.0f} samples/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | test acc {row['test_accuracy']:7.2%} | {speed}")


def print_usage(history):
    """Print on rank 0 what all processes together have used: what `seff` says, which not every cluster has."""
    busy = sum(os.times()[:4])  # time of a core, in seconds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    used = hvd.allgather_object((busy, memory), name="usage")  # by default the name is the type of the object
    if hvd.rank() > 0:
        return
    busy, memory = zip(*used, strict=True)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * int(os.environ.get("SLURM_NTASKS", 1))
    cores = cores or len(os.sched_getaffinity(0))
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    text = f"used: {seconds:.0f} s, {sum(busy) / seconds / cores:.0%} of {cores} cores, {max(memory):.0f} MB a process"
    if history:
        samples = sum(row["samples_per_second"] * row["seconds"] for row in history)
        text += f", {samples / sum(row['seconds'] for row in history):.0f} samples/s"
    print(text)


def shut_down(args):
    """Wait for all processes, which may be waiting for rank 0, and disconnect."""
    restart_watchdog(args)
    # horovod: rank 0 may still be writing; srun --wait ends it some time after the others. Here is no hvd.barrier.
    hvd.allreduce(tf.zeros(()), name="barrier")
    hvd.shutdown()  # horovod: disconnect


if __name__ == "__main__":
    main(parse_args())
