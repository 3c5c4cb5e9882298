"""The data sets of the examples. They are kept in memory, so that reading a batch takes no time.

`python -m common.data fashion_mnist --data-dir data` downloads one, once, on a machine with internet.
Training itself never downloads.

digits.npz: the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998,
UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn ships: its test part, 8x8 pixels
with values from 0 to 16, here in a fixed random order: 1,438 for training and 359 for testing.
"""

import argparse
import bisect
import codecs
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

DOWNLOADS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # torchvision's names of their class and folder
NAMES = ("digits", *DOWNLOADS, "synthetic")
# How files begin that are given as a text by mistake.
NO_TEXT = {b"\x1f\x8b": "compressed (gzip)", b"PK\x03\x04": "a zip file (.zip, .docx, .epub)", b"%PDF": "a PDF"}
NO_TEXT |= {b"BZh": "compressed (bzip2)", b"\xfd7zXZ": "compressed (xz)", b"(\xb5/\xfd": "compressed (zstd)"}


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


class Images(Dataset):
    """Labelled images in one uint8 tensor, read a whole batch at a time.

    Indexing with a list of B indices returns images (B, 1, 28, 28), float32, normalised, and labels (B,), int64.
    Give DataLoader a BatchSampler as `sampler` and `batch_size=None`, and one tensor operation makes a batch.
    """

    MEAN, STD = 0.1307, 0.3081  # MNIST's pixels, scaled to 0..1; close enough for the others

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep images (N, 28, 28), uint8, and labels (N,), any integer type."""
        self.images, self.labels = images.unsqueeze(-1), labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.images[indices].float().sub_(255 * self.MEAN).div_(255 * self.STD)
        return batch.permute(0, 3, 1, 2), self.labels[indices]  # channels_last: faster convolutions on CPU


def load(name: str, data_dir: str = "data", size: int = 12_000) -> tuple[Images, Images]:
    """Return the training and the test set called `name`; `size` is the number of synthetic training images.

    Raises DataError if the files of mnist or fashion_mnist under `data_dir` are missing or damaged.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(size, seed=0), _synthetic(max(1, size // 6), seed=1)
    if name in DOWNLOADS:
        return _torchvision(name, data_dir, train=True), _torchvision(name, data_dir, train=False)
    raise DataError(f"unknown data set {name!r}: choose from {', '.join(NAMES)}")


def _digits() -> tuple[Images, Images]:
    """Read the embedded digits, enlarged from 8x8 to 28x28."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        arrays = {key: torch.from_numpy(file[key]) for key in file.files}

    def part(split: str) -> Images:
        small = arrays[f"{split}_images"].float().mul_(255 / 16).unsqueeze(1)
        large = F.interpolate(small, size=28, mode="bilinear", align_corners=False).squeeze(1)
        return Images(large.round_().byte(), arrays[f"{split}_labels"])

    return part("train"), part("test")


def _synthetic(size: int, seed: int) -> Images:
    """Make `size` noisy copies of ten random patterns: fast to generate, and possible to learn."""
    patterns = torch.randint(128, (10, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1 + seed)
    labels = torch.randint(10, (size,), generator=generator)
    noise = torch.randint(128, (size, 28, 28), generator=generator, dtype=torch.uint8)
    return Images(patterns[labels] + noise, labels)


def _reader(name: str) -> type[Dataset]:
    """Return torchvision's class for mnist or fashion_mnist."""
    try:
        from torchvision import (
            datasets,  # imported only when needed: it adds seconds and 160 MB to every process
        )
    except (ImportError, RuntimeError) as error:  # RuntimeError: its build does not fit torch's
        raise DataError(f"{name} needs torchvision ({error}): pip install -r requirements.txt") from error
    return getattr(datasets, DOWNLOADS[name])


def _torchvision(name: str, data_dir: str, train: bool) -> Images:
    """Read one part of mnist or fashion_mnist with torchvision's own reader."""
    command = f"python -m common.data {name} --data-dir {data_dir}"
    reader = _reader(name)
    folder = Path(data_dir, DOWNLOADS[name], "raw")
    try:
        part = reader(data_dir, train=train)
    except RuntimeError as error:
        if "not found" in str(error):
            raise DataError(f"no {name} in {folder}: where there is internet, run: {command}") from error
        raise DataError(f"a file in {folder} is damaged: remove that folder, then run: {command}") from error
    except (AssertionError, EOFError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        raise DataError(f"a file in {folder} cannot be read ({error!r}): remove it, then run: {command}") from error
    if part.data.shape[1:] != (28, 28) or len(part.data) != len(part.targets) or not len(part.data):
        raise DataError(f"the files in {folder} do not belong together: remove that folder, then run: {command}")
    if part.targets.max() > 9 or not part.data.any():
        found = f"labels up to {part.targets.max()}" if part.data.any() else "images without a pixel above 0"
        raise DataError(f"the files in {folder} have {found}: remove that folder, then run: {command}")
    return Images(part.data, part.targets)


def download(name: str, data_dir: str) -> Path:
    """Download mnist or fashion_mnist into `data_dir` and return its folder; a failed download leaves nothing.

    Raises DataError if no mirror answers or a checksum is wrong.
    """
    reader = _reader(name)
    folder = Path(data_dir, DOWNLOADS[name])
    if folder.exists():
        _torchvision(name, data_dir, train=True), _torchvision(name, data_dir, train=False)
        return folder
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as temporary:
            reader(temporary, download=True)
            os.replace(Path(temporary, DOWNLOADS[name]), folder)
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError for a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return folder


def labelled_images(path: Path, classes: int, size: tuple[int, int] = (28, 28)) -> tuple[np.ndarray, np.ndarray]:
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


def _arrays(path: Path) -> dict[str, np.ndarray]:
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


def _wrong_images(images: np.ndarray, size: tuple[int, int]) -> str | None:
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


def _wrong_labels(labels: np.ndarray, classes: int) -> str | None:
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


def checked(sample: Any, index: int, shape: tuple, label_shape: tuple = (), classes: int | None = None) -> tuple:
    """Return a sample, an image and its label, if a batch can take it; it would stretch one of another shape.

    Labels are whole numbers below `classes`, or without that any finite ones. Raises DataError.
    """
    returns = f"own_data.py: sample({index}) returns"
    try:
        image, label = sample
        label = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):
        found = " ".join(repr(sample).split())[:80]
        raise DataError(f"{returns} {found}; expected an image and its label, in numbers") from None
    if not isinstance(image, torch.Tensor) or not image.is_floating_point():
        kind = getattr(image, "dtype", type(image).__name__)
        raise DataError(f"{returns} an image of type {kind}; expected a tensor of torch.float32")
    for what, value, expected in (("an image", image, shape), ("a label", label, label_shape)):
        if value.shape != expected:
            raise DataError(f"{returns} {what} of shape {tuple(value.shape)}; expected {expected}")
        if not value.isfinite().all():
            raise DataError(f"{returns} {what} with NaN or infinity: correct it, or leave it out")
    if classes is not None and (
        label.is_floating_point() or not 0 <= label.long().min() <= label.long().max() < classes
    ):
        found = f"{label.item()!r}" if not label.ndim else f"{label.min()} to {label.max()} ({label.dtype})"
        raise DataError(f"{returns} the label {found}; expected whole numbers from 0 to {classes - 1}, see CLASSES")
    return image, label


class Tokens(Dataset):
    """Consecutive windows of one long sequence of byte tokens.

    Indexing with a list of B indices returns inputs (B, T) and targets (B, T), int64: the targets are the inputs
    shifted by one token. Windows do not overlap; tokens that do not fill the last window are left out.
    """

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        """Keep tokens (N,), uint8, cut into windows of T = `length`; raises DataError if not one fits."""
        if len(tokens) <= length:
            advice = "use a longer text, or a smaller --context"
            raise DataError(f"{len(tokens)} tokens are too few for one window of {length}: {advice}")
        self.windows = tokens.unfold(0, length + 1, length)  # a view: no copy is made

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self.windows[indices].long()
        return windows[:, :-1], windows[:, 1:]


def read_text(path: str) -> bytes:
    """Return the content of a text file; its last letter may be cut off.

    Raises DataError if the file is missing, unreadable or empty, or if it is no text in UTF-8.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the text file {path}: {error.strerror}") from error
    if not content:
        raise DataError(f"the text file {path} is empty")
    kind = next((kind for start, kind in NO_TEXT.items() if content.startswith(start)), None)
    if kind:
        raise DataError(f"{path} is {kind} and no text: take the text out of it, into a file in UTF-8")
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), 2**20):  # in parts, since a string takes up to four times the memory
        try:
            decoder.decode(content[start : start + 2**20])
        except UnicodeDecodeError as error:
            advice = "convert it with iconv -f ENCODING -t UTF-8"
            raise DataError(f"the text file {path} is not UTF-8 ({error}): {advice}") from error
    if zeros := content.count(0):
        what = f"{zeros} of the {len(content)} bytes are 0, as in UTF-16 or in a binary file"
        raise DataError(f"{path} is no text in UTF-8 ({what}): convert it with iconv -f UTF-16LE -t UTF-8")
    return content


def text_tokens(path: str) -> torch.Tensor:
    """Return the bytes of a text file as tokens (N,), uint8: any language, since UTF-8 is bytes.

    Raises DataError as read_text does.
    """
    return torch.frombuffer(bytearray(read_text(path)), dtype=torch.uint8)


def saved_tokens(path: str, vocabulary: int, kind: str | None = None) -> torch.Tensor:
    """Return the tokens (N,) of a file that torch.save or, with a `kind` such as "int32", numpy's tofile has written.

    A file of a `kind` is mapped into memory: its pages are read when a batch needs them. Raises DataError if these are
    no whole numbers from 0 to below `vocabulary`, the number of tokens that the model knows.
    """
    try:
        if kind is None:
            tokens = torch.load(path, weights_only=True)
        else:
            size, rest = divmod(os.stat(path).st_size, np.dtype(kind).itemsize)
            if rest or not size:
                raise DataError(f"{path} has {os.stat(path).st_size} bytes, which is no whole number of {kind} numbers")
            tokens = torch.from_file(str(path), size=size, dtype=getattr(torch, kind))
    except OSError as error:
        raise DataError(f"cannot read the tokens in {path}: {error.strerror or error}") from error
    except DataError:
        raise
    except Exception as error:  # a file of something else can raise almost anything
        what = str(error).strip().partition("\n")[0] or repr(error)
        raise DataError(f"cannot read the tokens in {path}, as torch.save writes them: {what}") from error
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 1 or not len(tokens):
        found = f"a tensor of shape {tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else repr(type(tokens))
        raise DataError(f"{path} has {found}: tokens are one tensor with one dimension, tensor.flatten()")
    if tokens.dtype.is_floating_point or tokens.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise DataError(f"{path} has numbers of {tokens.dtype}: tokens are whole numbers, such as torch.int32")
    least, most = token_range(tokens)
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        advice = "is it of another tokenizer, of another type of numbers, or a text?"
        raise DataError(f"{path} has token {wrong}, and tokens are 0 to {vocabulary - 1}: {advice}")
    first = tokens[:4096].numpy()
    if kind and len(first) > 64 and not first[1::2].any() and first[::2].any():
        raise DataError(f"every second number in {path} is 0: it has larger numbers than {kind}, such as int64")
    return tokens


def token_range(tokens: torch.Tensor) -> tuple[int, int]:
    """Return the least and the largest token; of more than 134 million, those in 128 parts spread over them."""
    part = 2**20
    starts = range(0, len(tokens), part)
    if len(starts) > 128:
        starts = np.linspace(0, len(tokens) - part, 128).astype(int).tolist()
    parts = [tokens[start : start + part].numpy() for start in starts]
    return min(int(one.min()) for one in parts), max(int(one.max()) for one in parts)


def markov_tokens(size: int, symbols: int = 32, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Return `size` tokens (size,), uint8, of a random first-order Markov chain, and its entropy in nats a token.

    No model can predict the next token with a lower mean loss than the entropy rate, the stationary mean of the
    entropies of the rows of the transition matrix (Shannon 1948): the loss has a floor to be compared with. Raises
    DataError if `size` is absurd.
    """
    if size > 10**9:
        raise DataError(f"{size} random tokens would take hours to make: use at most {10**9}")
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(symbols, symbols, generator=generator, dtype=torch.float64).mul_(2).softmax(1)
    stationary = torch.linalg.matrix_power(matrix, 1024)[0]
    entropy = -(stationary @ (matrix * matrix.log()).sum(1)).item()
    rows = matrix.cumsum(1)[:, :-1].tolist()  # without the last bound, 1, which rounding could miss
    tokens, state = bytearray(size), 0
    for i, draw in enumerate(torch.rand(size, generator=generator, dtype=torch.float64).tolist()):
        tokens[i] = state = bisect.bisect(rows[state], draw)
    return torch.frombuffer(tokens, dtype=torch.uint8), entropy


def random_tokens(size: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Return `size` random tokens (size,) and their entropy in nats a token: for 256 those of markov_tokens.

    For another vocabulary all its tokens are equally likely, int32: quickly made, for measuring how fast a model is.
    """
    if vocabulary == 256:
        return markov_tokens(size, seed=seed)
    if size > 10**10:
        raise DataError(f"{size} random tokens would take {size * 4 // 10**9} GB of memory: use at most {10**10}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (size,), generator=generator, dtype=torch.int32), math.log(vocabulary)


def main() -> None:
    """Run the download command; end with status 2 and one line if it fails."""
    parser = argparse.ArgumentParser(prog="python -m common.data", description="Download a data set, once.")
    parser.add_argument("name", choices=tuple(DOWNLOADS))
    parser.add_argument("--data-dir", default="data", help="folder to put it in (default: %(default)s)")
    args = parser.parse_args()
    try:
        print(f"{args.name} is in {download(args.name, args.data_dir)}")
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
