"""The model of the examples that train on images, for Keras."""

from keras import Input, Sequential, layers


def ConvNet():  # noqa: N802 - it is named as PyTorch's class in the other examples
    """Return the small CNN of the classic MNIST guides: images (B, 28, 28, 1) to logits (B, 10)."""
    return Sequential(
        [
            Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        name="ConvNet",
    )
