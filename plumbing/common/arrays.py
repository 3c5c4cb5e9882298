"""Data sets that come as files of arrays: those in MNIST's format, and .npz files of a user's own.

Nothing here needs PyTorch or TensorFlow.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

# The values are torchvision's names of the data set's folder.
FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
PARTS = ("train", "t10k")  # MNIST's names of the part to train on and of that to test with
# The first labels of the part to train on tell which of the two it is: their files have one name.
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2]}


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


def idx_parts(name: str, data_dir: str, command: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return images (N, 28, 28) and labels (N,), uint8, to train on, and the same to test with.

    They are read from the four files of mnist or fashion_mnist, packed by gzip or not, where
    torchvision puts them, in `data_dir`/MNIST/raw, or else in `data_dir`/MNIST, or in `data_dir`
    itself, as Debian and many sites have them. `command` is that which downloads them. Raises
    DataError if they are missing or damaged, or are those of the other data set.
    """
    own = Path(data_dir, FOLDERS[name], "raw")
    command = f"{command} {name} --data-dir {data_dir}"
    folders = [own, own.parent, Path(data_dir)]
    folder = next((one for one in folders if _idx_file(one, PARTS[0], "images")), own)
    advice = f"remove that folder, then run: {command}"
    if folder != own:
        advice = "copy them there again, or give another --data-dir"
    parts = []
    for part in PARTS:
        paths = [_idx_file(folder, part, kind) for kind in ("images", "labels")]
        if None in paths:
            raise DataError(f"no {name} in {folder}: where there is internet, run: {command}")
        try:
            images, labels = map(_read_idx, paths)
        except (EOFError, IndexError, OSError, ValueError, zlib.error) as error:
            wrong = f"a file in {folder} cannot be read ({error!r})"
            raise DataError(f"{wrong}: {advice}") from error
        wrong = _wrong_idx(images, labels)
        if wrong:
            raise DataError(f"the files in {folder} {wrong}: {advice}")
        parts.append((images, labels))
    _, labels = parts[0]
    for other, first in FIRST_LABELS.items():
        if other != name and labels[: len(first)].tolist() == first:
            raise DataError(f"the files in {folder} are {other}: use --dataset {other}")
    return parts


def _idx_file(folder: Path, part: str, kind: str) -> Path | None:
    """Return the path of the file with a part's images or labels, or None if there is none."""
    end = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}[kind]
    # Some copies on the web have a dot in the name. What is not packed is read faster.
    names = [f"{part}-{kind}{between}{end}" for between in "-."]
    paths = [folder / f"{name}{packed}" for packed in ("", ".gz") for name in names]
    return next((path for path in paths if path.is_file()), None)


def _read_idx(path: Path) -> np.ndarray:
    """Return the array in a file of MNIST's format.

    Such a file has the array's sizes, as big-endian 32-bit numbers, and then its bytes.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} does not begin as bytes in MNIST's format do")
    dimensions = content[3]  # the fourth byte is their number
    sizes = np.frombuffer(content, ">i4", dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if len(values) != math.prod(sizes.tolist()):
        raise ValueError(f"{path.name} has {len(values)} values, and says {sizes.tolist()}")
    return values.reshape(sizes).copy()  # a tensor of it can then be written to


def _wrong_idx(images: np.ndarray, labels: np.ndarray) -> str | None:
    """Return what is wrong with a part of mnist or fashion_mnist, or None."""
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or not len(labels):
        return "do not belong together"
    if not images.any():
        return "have images without a pixel above 0"
    if labels.max() > 9:
        return f"have labels up to {labels.max()}"
    return None


def labelled_images(path: Path, classes: int, size: tuple) -> tuple[np.ndarray, ...]:
    """Return the arrays `images` (N, *size), uint8, and `labels` (N,) of an .npz file.

    They are looked at as a whole. Raises DataError, with what was found and what is expected, if
    training with them would go wrong.
    """
    found = _arrays(path)
    names = ", ".join(found) or "nothing"
    if not {"images", "labels"} <= found.keys():
        wrong = f"{path} has {names}; expected images and labels"
        usual = "x_train and y_train, X and y, data and target, arr_0 and arr_1"
        advice = f"np.savez(path, images=x, labels=y), in the place of {usual}"
        raise DataError(f"own_data.py: {wrong}: {advice}")
    images = found["images"]
    labels = found["labels"]
    wrong = _wrong_images(images, size) or _wrong_labels(labels, classes)
    if not wrong and len(images) != len(labels):
        wrong = f"there are {len(images)} images and {len(labels)} labels; expected as many"
    if wrong:
        raise DataError(f"own_data.py: {path}: {wrong}")
    return images, labels


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays in an .npz file by their names."""
    try:
        file = np.load(path)
        if isinstance(file, np.ndarray):
            raise ValueError("it is a single array, as np.save writes it")
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        folder = Path(path).parent
        names = sorted(entry.name for entry in folder.glob("*"))
        there = ", ".join(names[:8]) or "nothing"
        raise DataError(f"own_data.py: there is no {path}; {folder} has {there}") from None
    except Exception as error:  # a damaged file can raise almost anything
        reason = " ".join(str(error).split())[:160]
        wrong = f"{path} is damaged, or no .npz file ({reason})"
        advice = "copy it again, or write it with np.savez(path, images=x, labels=y)"
        raise DataError(f"own_data.py: {wrong}: {advice}, without object arrays") from None


def _wrong_images(images: np.ndarray, size: tuple) -> str | None:
    """Return what is wrong with an array of images, or None."""
    are_numbers = images.dtype.kind in "biuf"
    if images.shape[1:] != tuple(size):
        numbers = ", ".join(map(str, size))
        expected = f"expected (N, {numbers})"
        if are_numbers and images.ndim > 1 and images[:1].size == math.prod(size):
            expected += f": save images.reshape(-1, {numbers})"
        return f"images have the shape {images.shape}; {expected}"
    if not len(images):
        return "there are no images; expected 1 or more"
    if not are_numbers:
        return f"images are {images.dtype}; expected uint8 from 0 to 255"
    low = float(images.min())
    high = float(images.max())
    found = f"from {low:g} to {high:g}"
    if images.dtype != np.uint8:
        advice = "scale them to 0 to 255, and save images.round().astype('uint8')"
        if 0 <= low <= high <= 1:
            advice = "save (images * 255.0).round().astype('uint8')"
        elif 0 <= low <= high <= 255:
            advice = "save (images).round().astype('uint8')"
        return f"images are {images.dtype} {found}; expected uint8 from 0 to 255: {advice}"
    if high <= 1:  # numbers from 0 to 1 that have lost their digits are such images, too
        advice = "multiply by 255 before they become uint8"
        return f"images are {found}; expected 0 to 255: {advice}"
    return None


def _wrong_labels(labels: np.ndarray, classes: int) -> str | None:
    """Return what is wrong with an array of labels, or None."""
    if labels.ndim != 1:
        expected = "expected (N,), one number for each image"
        if labels.ndim == 2:
            expected += ": save labels.argmax(1)" if labels.shape[1] > 1 else ": save labels[:, 0]"
        return f"labels have the shape {labels.shape}; {expected}"
    if not len(labels):
        return "there are no labels; expected 1 or more"
    expected = f"expected whole numbers from 0 to {classes - 1} (CLASSES in own_data.py)"
    if labels.dtype.kind == "f":
        are_finite = np.isfinite(labels).all()
        wrong = f"are {labels.dtype}" if are_finite else "have NaN or infinity"
        advice = "save labels.astype('int64') once they are whole"
        return f"labels {wrong}, such as {labels[0]:g}; {expected}: {advice}"
    if labels.dtype.kind not in "iu":
        advice = "number them: np.unique(labels, return_inverse=True)[1]"
        return f"labels are {labels.dtype}, such as {labels[0]!r}; {expected}: {advice}"
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= classes:
        advice = ": save labels - 1" if (low, high) == (1, classes) else ""
        return f"labels are {low} to {high}; {expected}{advice}"
    if low == high and len(labels) > 1:
        return f"all {len(labels)} labels are {low}, so that there is nothing to learn; {expected}"
    return None
