"""Shards of JSON lines of unequal numbers of samples, each of 8 numbers and one of three classes."""

import json
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data import NAMES, DataError, checked

__all__ = ["NAMES", "DataError", "load"]

CLASSES = 3
SHAPE = (8,)
LABEL_SHAPE = ()


class Lines(Dataset):
    """Lines of several files, by their numbers. The files are mapped: all processes of a node share them."""

    def __init__(self, paths):
        self.paths = sorted(paths)  # one order in all processes
        self.files = {}
        ends = []
        for path in self.paths:
            with open(path, "rb") as file:
                ends.append(np.fromiter(map(len, file), "int64").cumsum())
        self.file_of = np.repeat(np.arange(len(ends)), [len(part) for part in ends])
        self.starts = np.concatenate([np.append(0, part)[:-1] for part in ends])
        self.ends = np.concatenate(ends)

    def __len__(self):
        return len(self.ends)

    def line(self, index):
        """Return a line as bytes."""
        number = self.file_of[index]
        if number not in self.files:
            self.files[number] = np.memmap(self.paths[number], "uint8", "r")
        return bytes(self.files[number][self.starts[index] : self.ends[index]])

    def __getstate__(self):
        return self.__dict__ | {"files": {}}  # a loader worker that is spawned maps them anew


class OwnData(Lines):
    """Samples in lines. Indexing with a list of indices returns their batch."""

    def sample(self, index):
        """Return the numbers and the class."""
        found = json.loads(self.line(index))
        return torch.tensor(found["numbers"]), found["class"]

    def __getitem__(self, indices):
        images = torch.empty(len(indices), *SHAPE)
        labels = torch.empty(len(indices), *LABEL_SHAPE, dtype=torch.long)
        for place, index in enumerate(indices):
            images[place], labels[place] = checked(self.sample(index), index, SHAPE, LABEL_SHAPE, CLASSES)
        return images, labels


def write(path, count, seed):
    """Write a shard, if it is not there: with letters of several bytes, and without a line end after the last line."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(CLASSES, size=count).tolist()
    numbers = generator.standard_normal((count, *SHAPE)) / 2 + np.array(labels)[:, None]
    pairs = zip(numbers.round(3).tolist(), labels, strict=True)
    samples = [{"numbers": row, "class": label, "name": "\u00fc" * seed} for row, label in pairs]
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    part = path.with_name(f"{path.name}.{np.random.randint(2**31)}")  # several processes write at once
    part.write_text("\n".join(lines), encoding="utf-8")
    part.replace(path)


def load(name, data_dir):
    """Return the training and the test set."""
    Path(data_dir).mkdir(exist_ok=True)
    for number, count in enumerate((300, 201, 170, 90, 41, 70)):
        write(Path(data_dir, f"{'train' if number < 4 else 'test'}-{number}.jsonl"), count, number)
    return tuple(OwnData(Path(data_dir).glob(f"{part}-*.jsonl")) for part in ("train", "test"))
