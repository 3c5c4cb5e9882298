"""The data sets of the examples. They are kept in memory, so that reading a batch takes no time.

`python -m common.data fashion_mnist --data-dir data` downloads one, once, on a machine with
internet. Training itself never downloads.

digits.npz has the 1,797 images of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998, UCI Machine Learning Repository, doi 10.24432/C50P49, CC BY 4.0) that scikit-learn
ships: its test part, 8x8 pixels with values from 0 to 16. They are in a fixed random order here:
1,438 for training and 359 for testing.
"""

import argparse
import bisect
import codecs
import itertools
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from common.arrays import FOLDERS, DataError, idx_parts
from common.arrays import labelled_images as labelled_images  # own_data.py takes it from here

NAMES = ("digits", *FOLDERS, "synthetic")
# How files begin that are given as a text by mistake.
NO_TEXT = {
    b"\x1f\x8b": "compressed (gzip)",
    b"PK\x03\x04": "a zip file (.zip, .docx, .epub)",
    b"%PDF": "a PDF",
    b"BZh": "compressed (bzip2)",
    b"\xfd7zXZ": "compressed (xz)",
    b"(\xb5/\xfd": "compressed (zstd)",
}


class Images(Dataset):
    """Labelled images in one uint8 tensor, read a whole batch at a time.

    Indexing with a list of B indices returns images (B, 1, 28, 28), float32, normalised, and labels
    (B,), int64. Give DataLoader a BatchSampler as `sampler` and `batch_size=None`, and one tensor
    operation makes a batch.
    """

    # These are of MNIST's pixels, scaled to 0..1. They are close enough for the others.
    MEAN = 0.1307
    STD = 0.3081

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep images (N, 28, 28), uint8, and labels (N,), any integer type."""
        self.images = images.unsqueeze(-1)
        self.labels = labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.images[indices].float().sub_(255 * self.MEAN).div_(255 * self.STD)
        # The channel stays last in memory, with which convolutions on CPUs are faster.
        return batch.permute(0, 3, 1, 2), self.labels[indices]


def load(name: str, data_dir: str = "data", size: int = 12_000) -> tuple[Images, Images]:
    """Return the training and the test set called `name`.

    `size` is the number of synthetic training images. Raises DataError if the files of mnist or
    fashion_mnist under `data_dir` are missing or damaged.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic(size, seed=0), _synthetic(max(1, size // 6), seed=1)
    if name in FOLDERS:
        parts = idx_parts(name, data_dir, "python -m common.data")
        train_set, test_set = [Images(*map(torch.from_numpy, part)) for part in parts]
        return train_set, test_set
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
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(128, (10, 28, 28), generator=generator, dtype=torch.uint8)
    generator.manual_seed(1 + seed)
    labels = torch.randint(10, (size,), generator=generator)
    noise = torch.randint(128, (size, 28, 28), generator=generator, dtype=torch.uint8)
    return Images(patterns[labels] + noise, labels)


def download(name: str, data_dir: str) -> Path:
    """Download mnist or fashion_mnist into `data_dir` and return its folder.

    A failed download leaves nothing. Raises DataError if no mirror answers or a checksum is wrong.
    """
    folder = Path(data_dir, FOLDERS[name])
    if folder.exists():
        load(name, data_dir)
        return folder
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: its build does not fit torch's
        advice = "pip install -r requirements.txt"
        raise DataError(f"to download {name} needs torchvision ({error}): {advice}") from error
    download_with = getattr(datasets, FOLDERS[name])
    try:
        os.makedirs(data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as temporary:
            download_with(temporary, download=True)
            os.replace(Path(temporary, FOLDERS[name]), folder)
    except (OSError, RuntimeError) as error:  # torchvision raises RuntimeError for a wrong checksum
        raise DataError(f"{name} was not downloaded: {' '.join(str(error).split())}") from error
    return folder


def checked(
    sample,
    index: int,
    shape: tuple,
    label_shape: tuple = (),
    classes: int | None = None,
    ignored: int | None = None,
):
    """Return a sample, an image and its label, if a batch can take it.

    A batch would stretch one of another shape. Labels are whole numbers below `classes`, or
    `ignored`, which the loss leaves out; without `classes` any finite ones. Raises DataError.
    """
    returns = f"own_data.py: sample({index}) returns"
    try:
        image, label = sample
        label = torch.as_tensor(label)
    except (TypeError, ValueError, RuntimeError) as error:
        found = " ".join(repr(sample).split())[:80]
        expected = f"expected an image and its label, in numbers ({' '.join(str(error).split())})"
        raise DataError(f"{returns} {found}; {expected}") from None
    if not isinstance(image, torch.Tensor) or not image.is_floating_point():
        kind = getattr(image, "dtype", type(image).__name__)
        raise DataError(f"{returns} an image of type {kind}; expected a tensor of torch.float32")
    for what, value, expected in (("an image", image, shape), ("a label", label, label_shape)):
        if value.shape != expected:
            found = f"{what} of shape {tuple(value.shape)}"
            raise DataError(f"{returns} {found}; expected {expected}")
        if not value.isfinite().all():
            advice = "correct it, or leave it out"
            raise DataError(f"{returns} {what} with NaN or infinity: {advice}")
    if classes is None:
        return image, label
    numbers = label.long()
    if ignored is not None:
        numbers = numbers.where(numbers != ignored, 0)
    if label.is_floating_point() or numbers.min() < 0 or numbers.max() >= classes:
        known = label if label.is_floating_point() else label.long()  # of uint16 there is no min()
        range_of_all = f"{known.min()} to {known.max()} ({label.dtype})"
        found = range_of_all if label.ndim else repr(label.item())
        expected = f"whole numbers from 0 to {classes - 1}, see CLASSES"
        if label.ndim and known.max() == 255:
            expected += ", or ignored=255 if these pixels do not count"
        raise DataError(f"{returns} the label {found}; expected {expected}")
    return image, label


class Shards:
    """Tokens (N,) in several parts, as one sequence: it has a length, and a slice of it is one too.

    With parts that are mapped files, `copy` reads no more of them than it copies.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Keep the parts (N1,), (N2,) and so on, of whole numbers."""
        self.parts = parts
        self.ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, places: slice) -> "Shards":
        start, stop, _ = places.indices(len(self))
        found = []
        for part, end in zip(self.parts, self.ends, strict=True):
            first = end - len(part)
            found.append(part[max(0, start - first) : max(0, stop - first)])
        return Shards(found)

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Copy the tokens from `start` on into `target` (T,)."""
        number = bisect.bisect(self.ends, start)  # the first part that ends after `start`
        while len(target):
            part = self.parts[number]
            place = start - self.ends[number] + len(part)
            tokens = part[place : place + len(target)]
            target[: len(tokens)] = tokens
            target = target[len(tokens) :]
            start += len(tokens)
            number += 1


class Tokens(Dataset):
    """Consecutive windows of one long sequence of tokens.

    Indexing with a list of B indices returns inputs (B, T) and targets (B, T), int64: the targets
    are the inputs shifted by one token. Windows do not overlap. Tokens that do not fill the last
    window are left out.
    """

    def __init__(self, tokens: "torch.Tensor | Shards", length: int) -> None:
        """Keep tokens (N,), of whole numbers, cut into windows of T = `length`.

        Raises DataError if not one fits.
        """
        if len(tokens) <= length:
            wrong = f"{len(tokens)} tokens are too few for one window of {length}"
            raise DataError(f"{wrong}: use a longer text, or a smaller --context")
        self.tokens = tokens if isinstance(tokens, Shards) else Shards([tokens])
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        windows = torch.empty(len(indices), self.length + 1, dtype=torch.int64)
        for window, index in zip(windows, indices, strict=True):
            self.tokens.copy(index * self.length, window)  # it reads this window alone
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
        advice = "take the text out of it, into a file in UTF-8"
        raise DataError(f"{path} is {kind} and no text: {advice}")
    decoder = codecs.getincrementaldecoder("utf-8")()
    # It is decoded in parts, since a string takes up to four times the memory.
    for start in range(0, len(content), 2**20):
        try:
            decoder.decode(content[start : start + 2**20])
        except UnicodeDecodeError as error:
            advice = "convert it with iconv -f ENCODING -t UTF-8"
            raise DataError(f"the text file {path} is not UTF-8 ({error}): {advice}") from error
    if zeros := content.count(0):
        what = f"{zeros} of the {len(content)} bytes are 0, as in UTF-16 or in a binary file"
        advice = "convert it with iconv -f UTF-16LE -t UTF-8"
        raise DataError(f"{path} is no text in UTF-8 ({what}): {advice}")
    return content


def text_tokens(path: str) -> torch.Tensor:
    """Return the bytes of a text file as tokens (N,), uint8: any language, since UTF-8 is bytes.

    Raises DataError as read_text does.
    """
    return torch.frombuffer(bytearray(read_text(path)), dtype=torch.uint8)


def saved_tokens(path: str, vocabulary: int, kind: str | None = None) -> torch.Tensor:
    """Return the tokens (N,) of a file that torch.save or numpy's tofile has written.

    For the latter `kind` is the type of its numbers, such as "int32". Such a file is mapped into
    memory: its pages are read when a batch needs them. Raises DataError if the tokens are no whole
    numbers from 0 to below `vocabulary`, the number of tokens that the model knows.
    """
    try:
        tokens = mapped_tokens(path, kind) if kind else torch.load(path, weights_only=True)
    except DataError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read the tokens in {path}: {reason}") from error
    except Exception as error:  # a file of something else can raise almost anything
        reason = str(error).strip().partition("\n")[0] or repr(error)
        wrong = f"cannot read the tokens in {path}, as torch.save writes them"
        raise DataError(f"{wrong}: {reason}") from error
    is_tensor = isinstance(tokens, torch.Tensor)
    if not is_tensor or tokens.dim() != 1 or not len(tokens):
        found = f"a tensor of shape {tuple(tokens.shape)}" if is_tensor else repr(type(tokens))
        advice = "tokens are one tensor with one dimension, tensor.flatten()"
        raise DataError(f"{path} has {found}: {advice}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        advice = "tokens are whole numbers, such as torch.int32"
        raise DataError(f"{path} has numbers of {tokens.dtype}: {advice}")
    least, most = token_range(tokens)
    if least < 0 or most >= vocabulary:
        found = least if least < 0 else most
        wrong = f"{path} has token {found}, and tokens are 0 to {vocabulary - 1}"
        advice = "is it of another tokenizer, of another type of numbers, or a text?"
        raise DataError(f"{wrong}: {advice}")
    first = tokens[:4096].numpy()
    if kind and len(first) > 64 and not first[1::2].any() and first[::2].any():
        wrong = f"every second number in {path} is 0"
        raise DataError(f"{wrong}: it has larger numbers than {kind}, such as int64")
    return tokens


def mapped_tokens(path: str, kind: str) -> torch.Tensor:
    """Return the numbers (N,) in a file that numpy's tofile has written, mapped into memory.

    Raises DataError if there is no number, or not a whole number of them.
    """
    length = os.stat(path).st_size
    size, rest = divmod(length, np.dtype(kind).itemsize)
    if rest or not size:
        raise DataError(f"{path} has {length} bytes, which is no whole number of {kind} numbers")
    return torch.from_file(str(path), size=size, dtype=getattr(torch, kind))


def token_range(tokens: torch.Tensor) -> tuple[int, int]:
    """Return the least and the largest token.

    Of more than 134 million tokens it looks at 128 parts, which are spread over them.
    """
    part = 2**20
    starts = range(0, len(tokens), part)
    if len(starts) > 128:
        starts = np.linspace(0, len(tokens) - part, 128).astype(int).tolist()
    parts = [tokens[start : start + part].numpy() for start in starts]
    return min(int(one.min()) for one in parts), max(int(one.max()) for one in parts)


def markov_tokens(size: int, symbols: int = 32) -> tuple[torch.Tensor, float]:
    """Return `size` tokens (size,), uint8, of a random Markov chain, and its entropy.

    The chain is of first order, and the entropy in nats a token. No model can predict the next
    token with a lower mean loss than the entropy rate, the stationary mean of the entropies of the
    rows of the transition matrix (Shannon 1948): the loss has a floor to be compared with. Raises
    DataError if `size` is absurd.
    """
    if size > 10**9:
        wrong = f"{size} random tokens would take hours to make"
        raise DataError(f"{wrong}: use at most {10**9}")
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(symbols, symbols, generator=generator, dtype=torch.float64)
    matrix = matrix.mul_(2).softmax(1)
    stationary = torch.linalg.matrix_power(matrix, 1024)[0]
    entropy = -(stationary @ (matrix * matrix.log()).sum(1)).item()
    rows = matrix.cumsum(1)[:, :-1].tolist()  # without the last bound, 1, which rounding could miss
    draws = torch.rand(size, generator=generator, dtype=torch.float64).tolist()
    tokens = bytearray(size)
    state = 0
    for i, draw in enumerate(draws):
        state = bisect.bisect(rows[state], draw)
        tokens[i] = state
    return torch.frombuffer(tokens, dtype=torch.uint8), entropy


def random_tokens(size: int, vocabulary: int) -> tuple[torch.Tensor, float]:
    """Return `size` random tokens (size,) and their entropy in nats a token.

    For a vocabulary of 256 they are those of markov_tokens. For another one all its tokens, int32,
    are equally likely: they are quickly made, for measuring how fast a model is.
    """
    if vocabulary == 256:
        return markov_tokens(size)
    if size > 10**10:
        wrong = f"{size} random tokens would take {size * 4 // 10**9} GB of memory"
        raise DataError(f"{wrong}: use at most {10**10}")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (size,), generator=generator, dtype=torch.int32)
    return tokens, math.log(vocabulary)


def main() -> None:
    """Run the download command; end with status 2 and one line if it fails."""
    description = "Download a data set, once."
    parser = argparse.ArgumentParser(prog="python -m common.data", description=description)
    parser.add_argument("name", choices=tuple(FOLDERS))
    advice = "folder to put it in (default: %(default)s)"
    parser.add_argument("--data-dir", default="data", help=advice)
    args = parser.parse_args()
    try:
        print(f"{args.name} is in {download(args.name, args.data_dir)}")
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
