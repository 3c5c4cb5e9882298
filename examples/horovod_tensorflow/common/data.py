"""The data sets of the example, as NumPy arrays in memory.

`python -m common.data fashion_mnist --data-dir data` downloads one of them, on a machine with
internet. Training never downloads anything.

digits.npz has the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn
ships: its test part, 8x8 pixels with values from 0 to 16. Here they are in a fixed random order:
1,438 for training and 359 for testing.
"""

import argparse
from pathlib import Path

import numpy as np

from common.arrays import FOLDERS, DataError, load_arrays

NAMES = ("digits", *FOLDERS, "synthetic")


class Images:
    """Grey images with labels, in memory: data_set[indices] reads a whole batch of B samples.

    The batch is images (B, 28, 28, 1), float32 and normalised, and labels (B,), int64.
    """

    # Mean and standard deviation of MNIST's pixels, scaled to 0..1. They suit all of the data sets.
    MEAN = 0.1307
    STD = 0.3081

    def __init__(self, images, labels):
        """Keep images (N, 28, 28), uint8, and labels (N,), any integer type."""
        self.images = images[..., None]
        self.labels = labels.astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        batch = self.images[indices].astype(np.float32)
        batch = (batch - np.float32(255 * self.MEAN)) / np.float32(255 * self.STD)
        return batch, self.labels[indices]


def load(name, data_dir="data", size=12_000):
    """Return the training set and the test set called `name`.

    `size` is the number of synthetic training images. Raises DataError if the files of mnist or
    fashion_mnist in `data_dir` are missing or damaged.
    """
    if name == "digits":
        return digits("train"), digits("test")
    if name == "synthetic":
        return synthetic(size, seed=1), synthetic(max(1, size // 6), seed=2)
    train, test = load_arrays(name, data_dir)
    return Images(*train), Images(*test)


def digits(part):
    """Return the embedded digits, "train" or "test", enlarged from 8x8 to 28x28 pixels."""
    # Bilinear: column j of `weights` says which small pixels make up pixel j of the large image.
    centres = np.clip((np.arange(28) + 0.5) * 8 / 28 - 0.5, 0, 7)
    weights = np.maximum(0, 1 - np.abs(centres - np.arange(8)[:, None]))  # (8, 28)
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file[f"{part}_images"], file[f"{part}_labels"]
    large = weights.T @ (images * (255 / 16)) @ weights  # (N, 28, 28)
    return Images(large.round().astype(np.uint8), labels)


def synthetic(size, seed):
    """Make `size` noisy copies of ten random patterns: fast to generate, and possible to learn."""
    patterns = np.random.default_rng(0).integers(128, size=(10, 28, 28), dtype=np.uint8)
    generator = np.random.default_rng(seed)
    labels = generator.integers(10, size=size)
    noise = generator.integers(128, size=(size, 28, 28), dtype=np.uint8)
    return Images(patterns[labels] + noise, labels)


def download(name, data_dir):
    """Download mnist or fashion_mnist into a file in `data_dir`, and return its path.

    Raises DataError if there is no answer, or if a checksum is wrong.
    """
    from keras import datasets  # imported only here, because the import takes seconds

    path = Path(data_dir, f"{name}.npz")
    try:
        (x_train, y_train), (x_test, y_test) = getattr(datasets, name).load_data()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.part.npz")  # the file is complete or not there at all
        np.savez(part, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
        part.replace(path)
    except Exception as error:  # Keras raises Exception, or ValueError for a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return path


def main():
    """Run the download command; end with status 2 and one line if it fails."""
    parser = argparse.ArgumentParser("python -m common.data", description="Download a data set.")
    parser.add_argument("name", choices=tuple(FOLDERS))
    parser.add_argument("--data-dir", default="data", help="folder for it (default: %(default)s)")
    args = parser.parse_args()
    try:
        print(f"{args.name} is in {download(args.name, args.data_dir)}")
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
