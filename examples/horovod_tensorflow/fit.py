"""Train with model.fit, over Horovod and Keras 2, which lives on as tf-keras.

Locally:  horovodrun --gloo -np 2 python fit.py

It needs `pip install tf-keras==2.21.0`. With Keras 3, model.fit does not average the gradients, and
nothing says so. Of Horovod's callbacks, BroadcastGlobalVariablesCallback works, with tf-keras only;
MetricAverageCallback and LearningRateWarmupCallback work with neither.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported
import horovod.tensorflow.keras as hvd
import numpy as np
import tf_keras as keras

import numpy_data

hvd.init()
rank = hvd.rank()
size = hvd.size()
train_set, test_set = numpy_data.load("digits")
length = len(train_set) // size * size  # so that all shards are equally long
images, labels = train_set[range(rank, length, size)]
model = keras.Sequential(
    [
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)]
verbose = 2 if rank == 0 else 0
model.fit(images, labels, batch_size=64, epochs=5, callbacks=callbacks, verbose=verbose)
images, labels = test_set[range(rank, len(test_set), size)]
correct = np.sum(model.predict(images, verbose=0).argmax(1) == labels, dtype=np.float64)
correct = float(hvd.allreduce(correct, op=hvd.Sum))
print(f"test acc {correct / len(test_set):.2%}")
