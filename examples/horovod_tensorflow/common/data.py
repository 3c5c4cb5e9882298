"""The data sets of the example, as NumPy arrays in memory.

`python -m common.data fashion_mnist --data-dir data` downloads one of them, on a machine with
internet. Training never downloads anything.

digits.npz has the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn
ships: its test part, 8x8 pixels with values from 0 to 16. Here they are in a fixed random order:
1,438 for training and 359 for testing.
"""

import argparse
import gzip
import os
import tempfile
from pathlib import Path

import numpy as np

from common.arrays import FOLDERS, DataError, load_arrays

NAMES = ("digits", *FOLDERS, "synthetic")
DOWNLOADS = {  # addresses, and the MD5 sums of FILES
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/ f68b3c2dcbeaaa9fbdd348bbdeb94873 "
    "d53e105ee54ea40749a09fcbcd1e9432 9fb629c4189551a2d022fa330f9573f3 "
    "ec29112dd5afa0611ce80d1b7f02629c",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/ "
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
    "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
}
FILES = [f"{part}-ubyte" for part in ("train-images-idx3", "train-labels-idx1")]
FILES += [f"{part}-ubyte" for part in ("t10k-images-idx3", "t10k-labels-idx1")]


class Images:
    """Grey images with labels, in memory: data_set[indices] reads a whole batch of B samples.

    That is images (B, 28, 28, 1), float32 and normalised, and labels (B,), int64.
    """

    # Mean and standard deviation of MNIST's pixels, scaled to 0..1. They fit the others, too.
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
    # Bilinear: column j of `weights` says of which small pixels pixel j of the large image is made.
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
    """Download mnist or fashion_mnist into `data_dir`, and return its folder.

    A failed download leaves nothing behind. Raises DataError if there is no answer, or if a
    checksum is wrong.
    """
    from keras.utils import get_file  # imported only here: it takes seconds

    folder = Path(data_dir, FOLDERS[name])
    if folder.exists():
        load(name, data_dir)  # raises DataError if the files are damaged
        return folder
    address, *sums = DOWNLOADS[name].split()
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as temporary:
            raw = Path(temporary, FOLDERS[name], "raw")
            raw.mkdir(parents=True)
            for file, md5 in zip(FILES, sums, strict=True):
                source = f"{address}{file}.gz"
                packed = get_file(f"{file}.gz", source, file_hash=md5, cache_dir=temporary)
                (raw / file).write_bytes(gzip.decompress(Path(packed).read_bytes()))
            os.replace(raw.parent, folder)
    except Exception as error:  # get_file raises a plain one, or ValueError for a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return folder


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
