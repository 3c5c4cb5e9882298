"""The data sets of the example, read with NumPy.

They are kept in memory, so that reading a batch takes no time. `python numpy_data.py fashion_mnist
--data-dir data` downloads one, once, on a machine with internet. Training itself never downloads.

common/digits.npz has the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin
and C. Kaynak, 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that
scikit-learn ships: its test part, 8x8 pixels with values from 0 to 16. They are in a fixed random
order here: 1,438 for training and 359 for testing.
"""

import argparse
import gzip
import os
import tempfile
from pathlib import Path

import numpy as np

from common.arrays import FOLDERS, DataError, idx_parts
from common.arrays import labelled_images as labelled_images  # own_data.py takes it from here

# Each has an address, and the MD5 sums of the four files that are downloaded.
DOWNLOADS = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
        "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
        "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
    ),
}
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
NAMES = ("digits", *DOWNLOADS, "synthetic")


class Images:
    """Labelled images in one uint8 array, read a whole batch at a time.

    Indexing with B indices returns images (B, 28, 28, 1), float32, normalised, and labels (B,),
    int64.
    """

    # These are of MNIST's pixels, scaled to 0..1. They are close enough for the others.
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
    """Return the training and the test set called `name`.

    `size` is the number of synthetic training images. Raises DataError if the files of mnist or
    fashion_mnist under `data_dir` are missing or damaged.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(size, seed=0), _synthetic(max(1, size // 6), seed=1)
    if name in DOWNLOADS:
        parts = idx_parts(name, data_dir, "python numpy_data.py")
        train_set, test_set = [Images(*part) for part in parts]
        return train_set, test_set
    raise DataError(f"unknown data set {name!r}: choose from {', '.join(NAMES)}")


def _digits():
    """Read the embedded digits, enlarged from 8x8 to 28x28 by bilinear interpolation."""
    # Column j of `weights` says of which small pixels the pixel j of the large image is made.
    centres = np.clip((np.arange(28) + 0.5) * 8 / 28 - 0.5, 0, 7)
    weights = np.maximum(0, 1 - np.abs(centres - np.arange(8)[:, None]))  # (8, 28)
    with np.load(Path(__file__).parent / "common" / "digits.npz") as file:
        arrays = {key: file[key] for key in file.files}

    def part(split):
        large = weights.T @ (arrays[f"{split}_images"] * (255 / 16)) @ weights  # (N, 28, 28)
        return Images(large.round().astype(np.uint8), arrays[f"{split}_labels"])

    return part("train"), part("test")


def _synthetic(size, seed):
    """Make `size` noisy copies of ten random patterns: fast to generate, and possible to learn."""
    patterns = np.random.default_rng(0).integers(128, size=(10, 28, 28), dtype=np.uint8)
    generator = np.random.default_rng(1 + seed)
    labels = generator.integers(10, size=size)
    noise = generator.integers(128, size=(size, 28, 28), dtype=np.uint8)
    return Images(patterns[labels] + noise, labels)


def download(name, data_dir):
    """Download mnist or fashion_mnist into `data_dir` and return its folder.

    A failed download leaves nothing. Raises DataError if there is no answer or a checksum is wrong.
    """
    from keras.utils import get_file  # imported only here: it takes seconds

    address, sums = DOWNLOADS[name]
    folder = FOLDERS[name]
    target = Path(data_dir, folder)
    if target.exists():
        load(name, data_dir)
        return target
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as temporary:
            raw = Path(temporary, folder, "raw")
            raw.mkdir(parents=True)
            for file, md5 in zip(FILES, sums.split(), strict=True):
                source = f"{address}{file}.gz"
                packed = get_file(f"{file}.gz", source, file_hash=md5, cache_dir=temporary)
                (raw / file).write_bytes(gzip.decompress(Path(packed).read_bytes()))
            os.replace(raw.parent, target)
    except Exception as error:
        # get_file raises a plain Exception, or ValueError for a wrong checksum.
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return target


def main():
    """Run the download command; end with status 2 and one line if it fails."""
    description = "Download a data set, once."
    parser = argparse.ArgumentParser(prog="python numpy_data.py", description=description)
    parser.add_argument("name", choices=tuple(DOWNLOADS))
    parser.add_argument("--data-dir", default="data")
    args = parser.parse_args()
    try:
        print(f"{args.name} is in {download(args.name, args.data_dir)}")
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
