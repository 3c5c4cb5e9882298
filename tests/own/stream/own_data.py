"""A stream of samples, each of 8 numbers and one of three classes, that can only be read in its order."""

from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate, get_worker_info

from common.data import NAMES, DataError

__all__ = ["NAMES", "DataError", "load"]

CLASSES = 3


class Stream(IterableDataset):
    """Batches of records that can only be read in their order. Each process takes its part of each step."""

    def __init__(self, count):
        self.count = count  # samples of an epoch
        self.share(0, 1, 1)
        self.begin(0, range(1))

    def share(self, rank, processes, batch_size):
        """Say which part of each step this process takes."""
        self.rank, self.processes, self.batch_size = rank, processes, batch_size

    def begin(self, epoch, batches):
        """Say which batches of which epoch are yielded next."""
        self.epoch, self.batches = epoch, batches

    def __len__(self):
        return self.count

    def __iter__(self):
        worker = get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        own = islice(shuffled(self.records(), 1000, self.epoch), self.rank, None, self.processes)
        for number in range(self.batches.stop):
            batch = list(islice(own, self.batch_size))
            if len(batch) < self.batch_size:
                raise DataError(f"the stream has ended in batch {number + 1} of {self.batches.stop}")
            # A DataLoader takes the batches of its workers in turn.
            if number in self.batches and (number - self.batches.start) % workers == first:
                yield default_collate([self.sample(record) for record in batch])


def shuffled(records, size, seed):
    """Yield records in another order: each is drawn from the `size` ones that were read last."""
    generator = np.random.default_rng([7, seed])
    buffer = []
    for record in records:
        if len(buffer) < size:
            buffer.append(record)
            continue
        place = generator.integers(size)
        yield buffer[place]
        buffer[place] = record
    generator.shuffle(buffer)
    yield from buffer


class OwnData(Stream):
    """What a service would send: lines of numbers, of which the last is the class."""

    def records(self):
        """Yield the lines of an epoch, which are cheap; a process reads those of all."""
        generator = np.random.default_rng(self.count)
        for _ in range(2 * self.count):
            kind = generator.integers(CLASSES)
            yield " ".join(f"{number:.3f}" for number in [*(generator.standard_normal(8) / 2 + kind), kind])

    def sample(self, record):
        """Return the numbers and the class of a line; a process does so with its own."""
        *numbers, label = map(float, record.split())
        return torch.tensor(numbers), int(label)


def load(name, data_dir):
    """Return the training set, and the test set, which is in memory."""
    Path(data_dir).mkdir(exist_ok=True)
    train_set = OwnData(761)
    test = OwnData(200)
    numbers, labels = zip(*map(test.sample, islice(test.records(), 200)), strict=True)
    return train_set, TensorDataset(torch.stack(numbers), torch.tensor(labels))
