"""Tokens to train a language model with: from files, or random tokens, which need no file.

The files are train.bin and val.bin, flat uint16 numbers without a header, as tokenize_text.py and
nanoGPT write them, or with the header of llm.c.
"""

import bisect
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

ENTROPY = 2.2235  # of the random source, in nats per token: no model can have a lower loss
LLM_C = np.int32(20240520).tobytes()  # a file of llm.c begins with this, in a header of 1,024 bytes


class DataError(Exception):
    """The data cannot be read; the message is one line that says why and what to do."""


class Tokens(Dataset):
    """Consecutive windows of one long sequence of tokens, which do not overlap.

    A sample is inputs (T,) and targets (T,), int64: the targets are the inputs shifted by one
    token. DataLoader reads a whole batch by __getitems__.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        """Keep tokens (N,), of whole numbers, to be cut into windows of T = `length`."""
        self.tokens = tokens
        self.length = length
        self.labels = tokens[: 2**20]  # longrun.py refuses a resume with other labels

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of inputs (B, T) and targets (B, T) with these B indices."""
        starts = [index * self.length for index in indices]
        windows = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        batch = torch.from_numpy(windows.astype(np.int64))
        return batch[:, :-1], batch[:, 1:]


def collate(samples):
    """Make a batch of a list of samples; data sets with __getitems__ already return batches."""
    return default_collate(samples) if isinstance(samples, list) else samples


def load(data_dir=None, context=64, vocabulary=256, size=60_000) -> tuple[Tokens, Tokens]:
    """Return the training set and the test set, of files in `data_dir`, or of `size` random tokens.

    Raises DataError if a file is missing or damaged, is too short, or is of another vocabulary.
    """
    if data_dir:
        parts = [read_tokens(Path(data_dir, name)) for name in ("train.bin", "val.bin")]
    else:
        tokens = random_tokens(size, vocabulary)
        cut = max(0, size - max(size // 10, context + 1))  # the last tenth is for testing
        parts = [tokens[:cut], tokens[cut:]]
    shortest = min(map(len, parts))
    if shortest <= context:
        raise DataError(f"{shortest} tokens are too few for --context {context}: use a longer text")
    largest = max(int(tokens[: 2**27].max()) for tokens in parts)  # the first part of a long file
    if largest >= vocabulary:
        raise DataError(f"there is a token {largest}: use the --vocabulary of your tokenizer")
    return Tokens(parts[0], context), Tokens(parts[1], context)


def read_tokens(path: Path) -> np.ndarray:
    """Return the tokens (N,) in a file, mapped into memory: a batch reads only what it needs."""
    try:
        tokens = np.memmap(path, np.uint16, "r")
    except (OSError, ValueError) as error:  # ValueError: empty, or the last number is cut
        raise DataError(f"cannot read {path} ({error}): tokenize_text.py writes it") from error
    return tokens[512:] if tokens[:2].tobytes() == LLM_C else tokens


def random_tokens(size: int, vocabulary: int) -> np.ndarray:
    """Return `size` random tokens (size,).

    For a vocabulary of 256 they are a Markov chain of 32 symbols, whose entropy is known (Shannon
    1948). Otherwise all tokens are equally likely, which is enough to measure the speed.
    """
    generator = torch.Generator().manual_seed(0)
    if vocabulary != 256:
        return torch.randint(vocabulary, (size,), generator=generator, dtype=torch.int32).numpy()
    matrix = torch.randn(32, 32, generator=generator, dtype=torch.float64).mul_(2).softmax(1)
    rows = matrix.cumsum(1)[:, :-1].tolist()  # without the last bound, 1, which rounding could miss
    tokens, state = bytearray(size), 0
    for i, draw in enumerate(torch.rand(size, generator=generator, dtype=torch.float64).tolist()):
        state = bisect.bisect(rows[state], draw)
        tokens[i] = state
    return np.frombuffer(tokens, np.uint8)
