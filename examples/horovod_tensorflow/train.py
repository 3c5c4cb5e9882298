"""Train a ConvNet with TensorFlow and Keras 3 on CPU nodes, where Horovod averages the gradients, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need. What else a long job on a
cluster needs, such as checkpoints that survive a kill and errors that say what to do, is in plumbing.py.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors; the note on oneDNN comes before this is read
os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever ~/.keras/keras.json says
sys.dont_write_bytecode = True  # AutoGraph would leave dozens of files in /tmp/__pycache__
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import numpy_data as data
import plumbing

CHECKPOINT = "checkpoint.npz"  # in --output-dir
POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}  # Keras's names


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, shared by all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=POLICIES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, and set the number of threads, the precision and the seed."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # horovod: the processes of a node share its cores
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each process its own
    # By default each process would use all cores: slower.
    args.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores)
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_dtype_policy(POLICIES[args.precision])
    keras.utils.set_random_seed(args.seed)
    tf.config.experimental.enable_op_determinism()  # the same bits in each run


def train_one_epoch(args, train_step, train_set, optimizer, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    start = time.perf_counter()
    epoch = len(progress["history"])
    order = np.random.default_rng([args.seed, epoch]).permutation(len(train_set))  # another one in each epoch
    # horovod: shards of equal length, so that all processes take the same number of steps
    shard = order[hvd.rank() :: args.world_size][: args.steps_per_epoch * args.batch_size]
    sums = tf.zeros(2, tf.float64)  # loss, samples
    for indices in shard.reshape(args.steps_per_epoch, args.batch_size):
        plumbing.restart_watchdog(args)
        optimizer.learning_rate.assign(learning_rate(args, progress["step"]))
        sums += train_step(*train_set[indices])
        plumbing.note_loss(shard.reshape(-1, args.batch_size), sums[0])  # see `check_results`
        progress["step"] += 1
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, samples = sums.numpy().tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


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


def losses(logits, labels):
    """Return the cross-entropy of each sample (B,), in fp32, or in fp64 if the logits are."""
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def evaluate(args, test_step, test_set, shard):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    sums = tf.zeros(3, tf.float64)  # loss, correct, samples
    for first in range(0, len(shard), args.batch_size):
        plumbing.restart_watchdog(args)
        sums += test_step(*test_set[shard[first : first + args.batch_size]])
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
        ],
        name="ConvNet",
    )


def named_variables(model, optimizer):
    """Return the variables of model and optimizer by their names in the checkpoint."""
    variables = enumerate([*model.variables, *optimizer.variables])
    return {f"{number:03}-{variable.path.replace('/', '-')}": variable for number, variable in variables}


def save_checkpoint(args, model, optimizer, progress):
    """Save model, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    if hvd.rank() == 0:  # horovod: all processes have the same weights; one writes them
        arrays = {name: variable.numpy() for name, variable in named_variables(model, optimizer).items()}
        plumbing.write_arrays(args, CHECKPOINT, arrays | {"progress": progress})


def resume(args, model, optimizer):
    """Load the checkpoint, if there is one, and give all processes the state of rank 0; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; one row of metrics.csv for each complete epoch
    found = plumbing.read_checkpoint(args, model, CHECKPOINT) if hvd.rank() == 0 else None
    answer = found["progress"] if isinstance(found, dict) else found  # else None, or an error message
    answer = plumbing.accept(hvd.broadcast_object(answer, name="progress"))  # horovod: rank 0 tells all processes
    variables = named_variables(model, optimizer)
    if answer:
        progress = answer
        for name, variable in variables.items() if hvd.rank() == 0 else ():
            variable.assign(found[name.partition("-")[0]])
    # horovod: send rank 0's weights and state to all; a Keras variable holds the one of TensorFlow in `value`
    hvd.broadcast_variables([variable.value for variable in variables.values()], root_rank=0)
    return progress


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    plumbing.prepare_process(args)
    setup(args)
    rank = hvd.rank()

    # Data: a batch is read by indexing the data set with a list of indices.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    args.steps_per_epoch = plumbing.count_steps(args, len(train_set) // args.world_size, train_set, test_set)
    # horovod: each test sample exactly once
    shard = range(rank, len(test_set), args.world_size)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = make_model()
    optimizer = keras.optimizers.AdamW(weight_decay=0.01, epsilon=1e-8)  # PyTorch's defaults
    optimizer.build(model.trainable_variables)
    progress = resume(args, model, optimizer)
    train_step, test_step = make_steps(model, optimizer)

    # Train.
    plumbing.print_header(args, f"{model.name} on {args.data_name}", "cpu", progress)
    for epoch in range(len(progress["history"]), args.epochs):
        train_loss, samples, seconds = train_one_epoch(args, train_step, train_set, optimizer, progress)
        test_loss, test_accuracy = evaluate(args, test_step, test_set, shard)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.keras", lambda file: keras.saving.save_model(model, file.name))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.keras'}")


if __name__ == "__main__":
    main(parse_args())
