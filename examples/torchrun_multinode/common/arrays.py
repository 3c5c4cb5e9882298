"""MNIST and FashionMNIST from their files, as NumPy arrays. Nothing here needs PyTorch."""

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # as torchvision names the folders
# The first labels tell the two data sets apart: their files have the same names.
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2]}
# The exceptions that a damaged file can raise.
DAMAGED = (EOFError, IndexError, KeyError, OSError, ValueError, zipfile.BadZipFile, zlib.error)


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


def load_arrays(name: str, data_dir: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return images (N, 28, 28) and labels (N,), uint8, for training, and the same for testing.

    They come from the four files of mnist or fashion_mnist, compressed by gzip or not, in
    `data_dir`/MNIST/raw (or FashionMNIST), where torchvision puts them, or in `data_dir` itself.
    A file such as Keras's mnist.npz in `data_dir` works, too. Raises DataError if files are
    missing or damaged, or if they belong to the other data set.
    """
    folders = [Path(data_dir, FOLDERS[name], "raw"), Path(data_dir, FOLDERS[name]), Path(data_dir)]
    folder = next((folder for folder in folders if find(folder, "train-images-idx3")), None)
    keras = Path(data_dir, f"{name}.npz")
    command = f"python -m common.data {name} --data-dir {data_dir}"
    try:
        if folder:
            parts = [[read_idx(folder, f"{part}-{kind}") for kind in ("images-idx3", "labels-idx1")]
                     for part in ("train", "t10k")]  # fmt: skip
        elif keras.exists():
            with np.load(keras) as file:
                parts = [[file[f"{kind}_{part}"] for kind in "xy"] for part in ("train", "test")]
        else:
            raise DataError(f"no {name} in {folders[0]}: where there is internet, run: {command}")
    except DAMAGED as error:
        wrong = f"the files of {name} in {folder or keras} cannot be read ({error!r})"
        raise DataError(f"{wrong}: remove them, then run: {command}") from error
    for images, labels in parts:
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
            raise DataError(f"the images and labels in {folder or keras} do not belong together")
    for other, first in FIRST_LABELS.items():
        if other != name and parts[0][1][:8].tolist() == first:
            raise DataError(f"the files in {folder or keras} are {other}: use --dataset {other}")
    return [(images, labels) for images, labels in parts]


def find(folder: Path, name: str) -> Path | None:
    """Return the path of a file in MNIST's format, or None if the folder does not have it."""
    names = (f"{name}-ubyte", f"{name.replace('-idx', '.idx')}-ubyte")  # some copies have a dot
    paths = [folder / f"{name}{packed}" for packed in ("", ".gz") for name in names]
    return next((path for path in paths if path.is_file()), None)


def read_idx(folder: Path, name: str) -> np.ndarray:
    """Return the uint8 array in a file of MNIST's format: sizes as big-endian int32, then bytes.

    Raises OSError or ValueError if the file is missing or damaged.
    """
    path = find(folder, name)
    if not path:
        raise FileNotFoundError(f"there is no {name}-ubyte")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if content[:3] != b"\0\0\x08":  # \x08: the values are bytes; the next byte counts dimensions
        raise ValueError(f"{path.name} is not in MNIST's format")
    sizes = np.frombuffer(content, ">i4", content[3], offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes))
    if len(values) != math.prod(sizes):
        raise ValueError(f"{path.name} has {len(values)} bytes instead of {sizes}")
    return values.reshape(sizes).copy()  # a copy can be written to, as PyTorch wants it
