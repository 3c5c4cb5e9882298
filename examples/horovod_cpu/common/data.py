"""The data sets of the examples. They are small and stay in memory.

`python -m common.data fashion_mnist --data-dir data` downloads one of them, on a machine with
internet. Training never downloads anything.

digits.npz has the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn
ships: its test part, 8x8 pixels with values from 0 to 16. Here they are in a fixed random order:
1,438 for training and 359 for testing.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from common.arrays import FOLDERS, DataError, load_arrays

NAMES = ("digits", *FOLDERS, "synthetic")


class Images(Dataset):
    """Grey images with labels, in memory: data_set[index] is one image (1, 28, 28) and its label.

    Images are float32 and normalised, labels are int64. DataLoader reads a whole batch by
    __getitems__, which is much faster than reading the images one by one.
    """

    # Mean and standard deviation of MNIST's pixels, scaled to 0..1. They suit all of the data sets.
    MEAN = 0.1307
    STD = 0.3081

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Keep images (N, 28, 28), uint8, and labels (N,), any integer type."""
        self.images = images.unsqueeze(-1)
        self.labels = labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of images (B, 1, 28, 28) and labels (B,) with these B indices."""
        batch = self.images[indices].float().sub_(255 * self.MEAN).div_(255 * self.STD)
        # The channel stays last in memory: convolutions on CPUs are faster with that.
        return batch.permute(0, 3, 1, 2), self.labels[indices]


def collate(samples):
    """Make a batch of a list of samples; data sets with __getitems__ already return batches."""
    return default_collate(samples) if isinstance(samples, list) else samples


def load(name: str, data_dir: str = "data", size: int = 12_000) -> tuple[Images, Images]:
    """Return the training set and the test set called `name`.

    `size` is the number of synthetic training images. Raises DataError if the files of mnist or
    fashion_mnist in `data_dir` are missing or damaged.
    """
    if name == "digits":
        return digits("train"), digits("test")
    if name == "synthetic":
        return synthetic(size, seed=1), synthetic(max(1, size // 6), seed=2)
    if name not in FOLDERS:
        raise DataError(f"unknown data set {name!r}: choose from {', '.join(NAMES)}")
    train, test = load_arrays(name, data_dir)
    return Images(*map(torch.from_numpy, train)), Images(*map(torch.from_numpy, test))


def digits(part: str) -> Images:
    """Return the embedded digits, "train" or "test", enlarged from 8x8 to 28x28 pixels."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = (torch.from_numpy(file[f"{part}_{kind}"]) for kind in ("images", "labels"))
    small = images.float().mul_(255 / 16).unsqueeze(1)
    large = F.interpolate(small, size=28, mode="bilinear", align_corners=False).squeeze(1)
    return Images(large.round_().byte(), labels)


def synthetic(size: int, seed: int) -> Images:
    """Make `size` noisy copies of ten random patterns: fast to generate, and possible to learn."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(128, (10, 28, 28), generator=generator, dtype=torch.uint8)
    generator.manual_seed(seed)
    labels = torch.randint(10, (size,), generator=generator)
    noise = torch.randint(128, (size, 28, 28), generator=generator, dtype=torch.uint8)
    return Images(patterns[labels] + noise, labels)


def download(name: str, data_dir: str) -> Path:
    """Download mnist or fashion_mnist into `data_dir`, and return its folder.

    A failed download leaves nothing behind. Raises DataError if torchvision is missing, no mirror
    answers, or a checksum is wrong.
    """
    folder = Path(data_dir, FOLDERS[name])
    if folder.exists() and any(folder.iterdir()):
        load(name, data_dir)  # raises DataError if the files are damaged
        return folder
    try:
        from torchvision import datasets

        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as temporary:
            getattr(datasets, FOLDERS[name])(temporary, download=True)
            os.replace(Path(temporary, FOLDERS[name]), folder)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return folder


def main() -> None:
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
