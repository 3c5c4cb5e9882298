"""Train a ConvNet with TensorFlow and Keras 3 on CPU nodes, where Horovod averages the gradients.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with a tag, such as "horovod:", mark what a single process would not need. The
functions of plumbing keep the job alive: checkpoints that survive a kill, and clear errors.
"""

import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors, and a note that comes before
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
    parser = plumbing.arguments(__doc__, POLICIES)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, and set the number of threads, the precision and the seed."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # the processes of a node share these
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each its own
    # More threads than cores are slower.
    args.threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores)
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_dtype_policy(POLICIES[args.precision])
    keras.utils.set_random_seed(args.seed)
    tf.config.experimental.enable_op_determinism()  # the same bits in each run


def train_one_epoch(args, train_step, train_set, optimizer, progress):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    # horovod: random numbers (augmentation, dropout) differ in each process and epoch
    seed = args.seed + progress["step"] * args.world_size + hvd.rank()
    keras.utils.set_random_seed(seed % 2**32)
    start = time.perf_counter()
    epoch = len(progress["history"])
    sums = tf.zeros(2, tf.float64)  # loss, samples
    # Another order in each epoch, which is the same in all processes.
    order = np.random.default_rng([args.seed, epoch]).permutation(len(train_set))
    # horovod: parts of equal length: who had more steps would wait for the others forever
    shard = order[hvd.rank() :: args.world_size][: args.steps_per_epoch * args.batch_size]
    batches = shard.reshape(args.steps_per_epoch, args.batch_size)
    for indices in batches:
        plumbing.restart_watchdog(args)  # MPI would wait forever for a process that hangs
        # A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        sums += train_step(*train_set[indices])
        plumbing.note_loss(batches, sums[0])  # if it is not finite, the next save ends the run
        progress["step"] += 1
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, samples = sums.numpy().tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def make_steps(model, optimizer):
    """Return the functions that train with a batch and evaluate one, compiled to graphs."""
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        """Return (loss times samples, samples) of this process's batch."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(model(images, training=True), labels))
            # What layers of yours add, such as kernel_regularizer="l2".
            total = loss + sum(tf.cast(part, loss.dtype) for part in model.losses)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Average)  # horovod: changes gradient()
        gradients = tape.gradient(total, weights)  # horovod: averages them over all processes
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


def evaluate(args, test_step, test_set, shard):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    sums = tf.zeros(3, tf.float64)  # loss, correct, samples
    for first in range(0, len(shard), args.batch_size):
        plumbing.restart_watchdog(args)
        sums += test_step(*test_set[shard[first : first + args.batch_size]])
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, correct, samples = sums.numpy().tolist()
    return loss_sum / samples, correct / samples


def make_model():
    """Return the ConvNet of the other examples: images (B, 28, 28, 1) to logits (B, 10)."""
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
    return {f"{number:03}-{each.path.replace('/', '-')}": each for number, each in variables}


def save_checkpoint(args, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    if hvd.rank() == 0:  # horovod: all processes have the same weights; one writes them
        variables = named_variables(model, optimizer)
        arrays = {name: variable.numpy() for name, variable in variables.items()}
        plumbing.write_arrays(args, CHECKPOINT, arrays | {"progress": progress})


def resume(args, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    # This is the checkpoint, or None where there is none, or an error message.
    found = plumbing.read_checkpoint(args, model, CHECKPOINT) if hvd.rank() == 0 else None
    answer = found["progress"] if isinstance(found, dict) else found
    answer = hvd.broadcast_object(answer, name="progress")  # horovod: rank 0 tells all processes
    variables = named_variables(model, optimizer)
    if plumbing.accept(answer):  # it ends each process here if rank 0 has found an error
        progress = answer
        if hvd.rank() == 0:
            for name, variable in variables.items():
                variable.assign(found[name.partition("-")[0]])
    # A variable of Keras holds that of TensorFlow, which Horovod knows, in `value`.
    values = [variable.value for variable in variables.values()]
    hvd.broadcast_variables(values, root_rank=0)  # horovod: rank 0's weights and state to all
    return progress


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    plumbing.prepare_process(args)
    setup(args)
    rank = hvd.rank()

    # Data (yours: see README.md). A list of indices reads a whole batch at once.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    samples = len(train_set) // args.world_size  # of each process
    args.steps_per_epoch = plumbing.count_steps(args, samples, train_set, test_set)
    # horovod: each test sample exactly once
    shard = range(rank, len(test_set), args.world_size)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = make_model()
    # A model of yours may only now make its weights.
    plumbing.check_output(model(train_set[np.array([0])][0]))
    # PyTorch's defaults.
    optimizer = keras.optimizers.AdamW(args.lr, weight_decay=0.01, epsilon=1e-8)
    optimizer.build(model.trainable_variables)
    progress = resume(args, model, optimizer)
    train_step, test_step = make_steps(model, optimizer)

    # Train.
    plumbing.print_header(args, f"{model.name} on {args.data_name}", "cpu", progress)
    for epoch in range(len(progress["history"]), args.epochs):
        train_loss, samples, seconds = train_one_epoch(
            args, train_step, train_set, optimizer, progress
        )
        test_loss, accuracy = evaluate(args, test_step, test_set, shard)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.keras"
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: keras.saving.save_model(model, file.name))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
