"""Train a ConvNet with TensorFlow and Keras 3 on CPU nodes, where Horovod averages the gradients.

Locally:   horovodrun --gloo -np 2 python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "horovod:" mark what a single process would not need.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # print errors only, and one note
os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever ~/.keras/keras.json says
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


def make_steps(model, optimizer):
    """Return the functions that train with a batch and evaluate one, compiled to graphs."""
    weights = [variable.value for variable in model.trainable_variables]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits  # of each sample

    @tf.function(reduce_retracing=True)
    def train_step(images, labels):
        """Take a step; return (loss times samples, samples) of this process's batch."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(labels, model(images, training=True)))
        tape = hvd.DistributedGradientTape(tape)  # horovod: replaces gradient()
        gradients = tape.gradient(loss, weights)  # horovod: averages them over all processes
        optimizer.apply(gradients, model.trainable_variables)
        samples = tf.cast(tf.size(labels), tf.float64)
        return tf.stack([tf.cast(loss, tf.float64) * samples, samples])

    @tf.function(reduce_retracing=True)
    def test_step(images, labels):
        """Return (sum of the losses, correct predictions, labels) of this process's batch."""
        logits = model(images, training=False)
        correct = tf.math.count_nonzero(tf.argmax(logits, axis=1) == labels)
        sums = [tf.reduce_sum(losses(labels, logits)), correct, tf.size(labels)]
        return tf.stack([tf.cast(value, tf.float64) for value in sums])

    return train_step, test_step


def evaluate(model, test_step, test_set, part):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    # horovod: use rank 0's BatchNorm statistics: they differ by process
    hvd.broadcast_variables([each.value for each in model.non_trainable_variables], root_rank=0)
    sums = tf.zeros(3, tf.float64)  # loss, correct, labels
    for first in range(0, len(part), BATCH_SIZE):
        sums += test_step(*test_set[part[first : first + BATCH_SIZE]])
    sums = hvd.allreduce(sums, op=hvd.Sum).numpy()  # horovod: sum over all; each process calls this
    return (sums[:2] / sums[2]).tolist()


def main():
    """Train as one of the processes that horovodrun or srun has started."""
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()  # horovod: number of this process, from 0, and of all
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())  # share the cores
    threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()  # the same bits in each run

    train_set, test_set = data.load("digits")  # or fashion_mnist: see README.md
    steps = len(train_set) // world_size // BATCH_SIZE  # horovod: the same number in each process
    test_part = range(rank, len(test_set), world_size)  # horovod: each test sample once

    keras.utils.set_random_seed(SEED)
    model = ConvNet()
    optimizer = keras.optimizers.AdamW(LR, weight_decay=0.01, epsilon=1e-8)
    optimizer.build(model.trainable_variables)
    # horovod: sends rank 0's weights to all; `value` is TensorFlow's variable in Keras's
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
    train_step, test_step = make_steps(model, optimizer)
    for epoch in range(EPOCHS):
        # horovod: another order in each epoch, the same in all processes; each takes its part
        order = np.random.default_rng([SEED, epoch]).permutation(len(train_set))
        part = order[rank::world_size][: steps * BATCH_SIZE]
        sums = tf.zeros(2, tf.float64)  # loss, labels
        for indices in part.reshape(steps, BATCH_SIZE):
            sums += train_step(*train_set[indices])
        sums = hvd.allreduce(sums, op=hvd.Sum).numpy()  # horovod: sum over all processes
        test_loss, accuracy = evaluate(model, test_step, test_set, test_part)
        if rank == 0:
            printed = f"train loss {sums[0] / sums[1]:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {printed}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        model.save("model.keras")


if __name__ == "__main__":
    main()
