"""The data sets of the example, read with NumPy. They are kept in memory, so that reading a batch takes no time.

`python numpy_data.py fashion_mnist --data-dir data` downloads one, once, on a machine with internet.
Training itself never downloads.

common/digits.npz: the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn ships: its test part, 8x8 pixels
with values from 0 to 16, here in a fixed random order: 1,438 for training and 359 for testing.
"""

import argparse
import gzip
import os
import tempfile
from pathlib import Path

import numpy as np

# Name: folder, address, and the MD5 sums of the four files that are downloaded
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
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
NAMES = ("digits", *DOWNLOADS, "synthetic")


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


class Images:
    """Labelled images in one uint8 array, read a whole batch at a time.

    Indexing with B indices returns images (B, 28, 28, 1), float32, normalised, and labels (B,), int64.
    """

    MEAN, STD = 0.1307, 0.3081  # MNIST's pixels, scaled to 0..1; close enough for the others

    def __init__(self, images, labels):
        """Keep images (N, 28, 28), uint8, and labels (N,), any integer type."""
        self.images, self.labels = images[..., None], labels.astype(np.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        batch = self.images[indices].astype(np.float32)
        return (batch - np.float32(255 * self.MEAN)) / np.float32(255 * self.STD), self.labels[indices]


def load(name, data_dir="data", size=12_000):
    """Return the training and the test set called `name`; `size` is the number of synthetic training images.

    Raises DataError if the files of mnist or fashion_mnist under `data_dir` are missing or damaged.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(size, seed=0), _synthetic(max(1, size // 6), seed=1)
    if name in DOWNLOADS:
        return _idx_files(name, data_dir, *FILES[:2]), _idx_files(name, data_dir, *FILES[2:])
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
    return Images(patterns[labels] + generator.integers(128, size=(size, 28, 28), dtype=np.uint8), labels)


def _read_idx(path):
    """Return the array in a file of MNIST's format: its sizes, as big-endian 32-bit numbers, then the bytes."""
    content = path.read_bytes()
    if content[:3] != b"\0\0\x08":
        raise ValueError("it does not begin as a file of bytes in MNIST's format does")
    dimensions = content[3]
    sizes = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes)


def _idx_files(name, data_dir, images, labels):
    """Read one part of mnist or fashion_mnist."""
    folder = Path(data_dir, DOWNLOADS[name][0], "raw")
    command = f"python numpy_data.py {name} --data-dir {data_dir}"
    try:
        images, labels = _read_idx(folder / images), _read_idx(folder / labels)
    except FileNotFoundError as error:
        raise DataError(f"no {name} in {folder}: where there is internet, run: {command}") from error
    except (IndexError, OSError, ValueError) as error:
        raise DataError(f"a file in {folder} cannot be read ({error!r}): remove it, then run: {command}") from error
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or not len(labels):
        raise DataError(f"the files in {folder} do not belong together: remove that folder, then run: {command}")
    if labels.max() > 9 or not images.any():
        found = f"labels up to {labels.max()}" if images.any() else "images without a pixel above 0"
        raise DataError(f"the files in {folder} have {found}: remove that folder, then run: {command}")
    return Images(images, labels)


def download(name, data_dir):
    """Download mnist or fashion_mnist into `data_dir` and return its folder; a failed download leaves nothing.

    Raises DataError if there is no answer or a checksum is wrong.
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
                packed = get_file(f"{file}.gz", f"{address}{file}.gz", file_hash=md5, cache_dir=temporary)
                (raw / file).write_bytes(gzip.decompress(Path(packed).read_bytes()))
            os.replace(raw.parent, target)
    except Exception as error:  # get_file raises a plain Exception, or ValueError for a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return target


def labelled_images(path, classes, size=(28, 28)):
    """Return the arrays `images` (N, *size), uint8, and `labels` (N,) of an .npz file, looked at as a whole.

    Raises DataError, with what was found and what is expected, if training with them would go wrong.
    """
    found = _arrays(path)
    names = ", ".join(found) or "nothing"
    if not {"images", "labels"} <= found.keys():
        usual = "x_train and y_train, X and y, data and target, arr_0 and arr_1"
        advice = f"np.savez(path, images=x, labels=y), in the place of {usual}"
        raise DataError(f"own_data.py: {path} has {names}; expected images and labels: {advice}")
    images, labels = found["images"], found["labels"]
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
        there = ", ".join(sorted(entry.name for entry in Path(path).parent.glob("*"))[:8]) or "nothing"
        raise DataError(f"own_data.py: there is no {path}; {Path(path).parent} has {there}") from None
    except Exception as error:  # a damaged file can raise almost anything
        reason = " ".join(str(error).split())[:160]
        advice = "copy it again, or write it with np.savez(path, images=x, labels=y), without object arrays"
        raise DataError(f"own_data.py: {path} is damaged, or no .npz file ({reason}): {advice}") from None


def _wrong_images(images, size):
    """Return what is wrong with an array of images, or None."""
    if images.shape[1:] != tuple(size):
        flat = images.ndim > 1 and images.dtype.kind in "biuf" and images[:1].size == size[0] * size[1]
        advice = f": save images.reshape(-1, {size[0]}, {size[1]})" if flat else ""
        return f"images have the shape {images.shape}; expected (N, {size[0]}, {size[1]}){advice}"
    if not len(images):
        return "there are no images; expected 1 or more"
    if images.dtype.kind not in "biuf":
        return f"images are {images.dtype}; expected uint8 from 0 to 255"
    low, high = float(images.min()), float(images.max())
    if images.dtype != np.uint8:
        advice = "scale them to 0 to 255, and save images.round().astype('uint8')"
        if 0 <= low <= high <= 255:
            advice = f"save (images{' * 255.0' if high <= 1 else ''}).round().astype('uint8')"
        return f"images are {images.dtype} from {low:g} to {high:g}; expected uint8 from 0 to 255: {advice}"
    if high <= 1:  # also what is left of numbers from 0 to 1 without their digits
        return f"images are from {low:g} to {high:g}; expected 0 to 255: multiply by 255 before they become uint8"
    return None


def _wrong_labels(labels, classes):
    """Return what is wrong with an array of labels, or None."""
    if labels.ndim != 1:
        advice = ""
        if labels.ndim == 2:
            advice = ": save labels.argmax(1)" if labels.shape[1] > 1 else ": save labels[:, 0]"
        return f"labels have the shape {labels.shape}; expected (N,), one number for each image{advice}"
    if not len(labels):
        return "there are no labels; expected 1 or more"
    expected = f"expected whole numbers from 0 to {classes - 1} (CLASSES in own_data.py)"
    if labels.dtype.kind == "f":
        wrong = "have NaN or infinity" if not np.isfinite(labels).all() else f"are {labels.dtype}"
        return f"labels {wrong}, such as {labels[0]:g}; {expected}: save labels.astype('int64') once they are whole"
    if labels.dtype.kind not in "iu":
        advice = "number them: np.unique(labels, return_inverse=True)[1]"
        return f"labels are {labels.dtype}, such as {labels[0]!r}; {expected}: {advice}"
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        advice = ": save labels - 1" if (low, high) == (1, classes) else ""
        return f"labels are {low} to {high}; {expected}{advice}"
    if low == high and len(labels) > 1:
        return f"all {len(labels)} labels are {low}, so that there is nothing to learn; {expected}"
    return None


def main():
    """Run the download command; end with status 2 and one line if it fails."""
    parser = argparse.ArgumentParser(prog="python numpy_data.py", description="Download a data set, once.")
    parser.add_argument("name", choices=tuple(DOWNLOADS))
    parser.add_argument("--data-dir", default="data")
    args = parser.parse_args()
    try:
        print(f"{args.name} is in {download(args.name, args.data_dir)}")
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
