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

# Each has a folder, an address, and the MD5 sums of the four files that are downloaded.
DOWNLOADS = {
    "mnist": (
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
        "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": (
        "FashionMNIST",
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


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


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
        train_images, train_labels, test_images, test_labels = FILES
        train_set = _idx_files(name, data_dir, train_images, train_labels)
        test_set = _idx_files(name, data_dir, test_images, test_labels)
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


def _read_idx(path):
    """Return the array in a file of MNIST's format.

    Such a file has the array's sizes, as big-endian 32-bit numbers, and then its bytes.
    """
    content = path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError("it does not begin as a file of bytes in MNIST's format does")
    dimensions = content[3]  # the fourth byte is their number
    sizes = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes)


def _idx_files(name, data_dir, images, labels):
    """Read one part of mnist or fashion_mnist."""
    subfolder, *_ = DOWNLOADS[name]
    folder = Path(data_dir, subfolder, "raw")
    command = f"python numpy_data.py {name} --data-dir {data_dir}"
    advice = f"remove that folder, then run: {command}"
    try:
        images = _read_idx(folder / images)
        labels = _read_idx(folder / labels)
    except FileNotFoundError as error:
        advice = f"where there is internet, run: {command}"
        raise DataError(f"no {name} in {folder}: {advice}") from error
    except (IndexError, OSError, ValueError) as error:
        wrong = f"a file in {folder} cannot be read ({error!r})"
        raise DataError(f"{wrong}: remove it, then run: {command}") from error
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or not len(labels):
        raise DataError(f"the files in {folder} do not belong together: {advice}")
    if not images.any():
        raise DataError(f"the files in {folder} have images without a pixel above 0: {advice}")
    if labels.max() > 9:
        raise DataError(f"the files in {folder} have labels up to {labels.max()}: {advice}")
    return Images(images, labels)


def download(name, data_dir):
    """Download mnist or fashion_mnist into `data_dir` and return its folder.

    A failed download leaves nothing. Raises DataError if there is no answer or a checksum is wrong.
    """
    from keras.utils import get_file  # imported only here: it takes seconds

    folder, address, sums = DOWNLOADS[name]
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


def labelled_images(path, classes, size=(28, 28)):
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


def _arrays(path):
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


def _wrong_images(images, size):
    """Return what is wrong with an array of images, or None."""
    height, width = size
    are_numbers = images.dtype.kind in "biuf"
    if images.shape[1:] != (height, width):
        expected = f"expected (N, {height}, {width})"
        if are_numbers and images.ndim > 1 and images[:1].size == height * width:
            expected += f": save images.reshape(-1, {height}, {width})"
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


def _wrong_labels(labels, classes):
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
