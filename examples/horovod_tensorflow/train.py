"""Train a ConvNet with TensorFlow and Keras 3 on CPU nodes, where Horovod averages the gradients.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, and a stop after any epoch.
Comments that begin with "horovod:" mark what a single process would not need.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # print errors only, and one note
os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever ~/.keras/keras.json says
sys.dont_write_bytecode = True  # AutoGraph would leave dozens of files in /tmp/__pycache__
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import checkpoint
import longrun
from common import data
from common.models import ConvNet

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}  # Keras's names


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--dataset", choices=data.NAMES, default=data.NAMES[0])
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=64, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by world size, or its root")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--precision", choices=tuple(POLICIES), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    return parser.parse_args()


def setup(args):
    """Join the other processes; return this process's rank and the world size."""
    # horovod: sends each gradient alone; with fusion the order of a sum depends on the timing
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms between two rounds of sending gradients
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(10 * args.timeout)
    longrun.alive(args.timeout)  # joining the others takes at most --timeout
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()
    longrun.prepare(args, rank, world_size, checkpoint.gather, sys.exit)  # so AutoGraph cleans up
    if world_size == 1 and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        longrun.fail("srun's tasks do not know of each other: use srun --mpi=pmix, see README.md")
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())  # share the cores
    threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()  # the same bits in each run
    keras.config.set_dtype_policy(POLICIES[args.precision])
    args.global_batch = args.global_batch or args.batch_size * world_size
    args.batch_size, rest = divmod(args.global_batch, world_size)
    if rest or not args.batch_size:
        longrun.fail(f"--global-batch {args.global_batch} must be a multiple of {world_size}")
    args.lr *= {"linear": world_size, "sqrt": world_size**0.5, None: 1}[args.scale_lr]
    longrun.alive(None)  # the first step has no time limit: it is compiled
    return rank, world_size


def losses(logits, labels):
    """Return the cross-entropy of each sample (B,), in fp32, or in fp64 if the logits are."""
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def make_steps(model, optimizer):
    """Return the functions that train with a batch and evaluate one, compiled to graphs."""
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        """Take a step; return (loss times samples, samples) of this process's batch."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model(images, training=True), labels))
            # Your layers may add losses, such as kernel_regularizer="l2".
            total = loss + sum(tf.cast(part, loss.dtype) for part in model.losses)
        tape = hvd.DistributedGradientTape(tape)  # horovod: replaces gradient()
        gradients = tape.gradient(total, weights)  # horovod: averages them over all processes
        optimizer.apply(gradients, model.trainable_variables)
        samples = tf.cast(tf.size(labels), tf.float64)
        return tf.stack([tf.cast(loss, tf.float64) * samples, samples])

    @tf.function(reduce_retracing=True)
    def test_step(images, labels):
        """Return (sum of the losses, correct predictions, labels) of this process's batch."""
        logits = model(images, training=False)
        correct = tf.math.count_nonzero(tf.argmax(logits, axis=1) == labels)
        sums = [tf.reduce_sum(losses(logits, labels)), correct, tf.size(labels)]
        return tf.stack([tf.cast(value, tf.float64) for value in sums])

    return train_step, test_step


def train_one_epoch(args, train_step, train_set, batches, progress):
    """Train with batches of indices; return the mean loss over the samples of all processes."""
    sums = tf.zeros(2, tf.float64)  # loss, labels
    for indices in batches:
        sums += train_step(*train_set[indices])
        progress["step"] += 1
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    sums = hvd.allreduce(sums, op=hvd.Sum).numpy()  # horovod: sum over all; each process calls this
    return (sums[0] / sums[1]).item()


def evaluate(args, model, test_step, test_set, part):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    # horovod: use rank 0's BatchNorm statistics: they differ by process
    hvd.broadcast_variables([each.value for each in model.non_trainable_variables], root_rank=0)
    sums = tf.zeros(3, tf.float64)  # loss, correct, labels
    for first in range(0, len(part), args.batch_size)[: args.limit_steps]:
        sums += test_step(*test_set[part[first : first + args.batch_size]])
        longrun.alive(args.timeout)
    sums = hvd.allreduce(sums, op=hvd.Sum).numpy()  # horovod: sum over all; each process calls this
    return (sums[:2] / sums[2]).tolist()


def save_checkpoint(args, variables, progress):
    """Save what --resume continues from, and stop if asked to; all processes call this."""
    checkpoint.save(args, variables, progress)
    # horovod: rank 0 decides whether all stop
    answer = hvd.broadcast_object(longrun.wish(args), root_rank=0, name="wish")
    if answer == longrun.STOP and len(progress["history"]) < args.epochs:
        longrun.end(args, progress, "stopped")  # job.sh requeues the job


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    rank, world_size = setup(args)
    # Data: replace these lines with your data sets. A list of indices reads a whole batch.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # horovod: parts of equal length; a process with one more step would hang
    samples = len(train_set) // world_size
    steps = min(samples // args.batch_size, args.limit_steps or samples)
    if not steps:
        longrun.fail(f"the {samples} samples of each process are too few for one step")
    test_part = range(rank, len(test_set), world_size)  # horovod: each test sample once

    # Model: replace it with yours.
    keras.utils.set_random_seed(args.seed)
    model = ConvNet()
    model(train_set[[0]][0])  # some models make their weights in their first call
    # The learning rate rises during the warm-up; put another Keras schedule here.
    warmup, decay = args.warmup_steps, keras.optimizers.schedules.PolynomialDecay
    schedule = decay(args.lr / (warmup + 1), max(1, warmup), args.lr)
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, epsilon=1e-8)
    optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]  # what a checkpoint contains
    progress = {"step": 0, "history": []}  # optimizer steps of the run, and rows of metrics.csv
    progress = checkpoint.start(args, model.name, (train_set, test_set), variables, progress)
    # horovod: sends rank 0's variables to all; `value` is TensorFlow's variable in Keras's
    hvd.broadcast_variables([variable.value for variable in variables], root_rank=0)
    train_step, test_step = make_steps(model, optimizer)

    for epoch in range(len(progress["history"]), args.epochs):
        # horovod: another order in each epoch, the same in all processes; each takes its part
        order = np.random.default_rng([args.seed, epoch]).permutation(len(train_set))
        part = order[rank::world_size][: steps * args.batch_size]
        # horovod: each process and epoch gets its own random numbers (dropout)
        draws = np.random.default_rng([args.seed, epoch, rank])
        for variable in model.non_trainable_variables:
            if "seed_generator" in variable.path:
                variable.assign(draws.integers(2**31, size=2))
        batches, start = part.reshape(steps, args.batch_size), time.perf_counter()
        train_loss = train_one_epoch(args, train_step, train_set, batches, progress)
        seconds = time.perf_counter() - start
        test_loss, accuracy = evaluate(args, model, test_step, test_set, test_part)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = steps * args.global_batch / seconds
        row |= {"test_accuracy": accuracy, "samples_per_second": speed, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        save_checkpoint(args, variables, progress)
    longrun.write(args, "model.keras", lambda file: checkpoint.save_model(model, file))
    longrun.end(args, progress, "finished", "model.keras")


if __name__ == "__main__":
    main(parse_args())
