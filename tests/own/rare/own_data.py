"""A table of four numbers a row, of two classes, of which the second has one row in 16."""

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from common.data import NAMES, DataError, checked

__all__ = ["NAMES", "DataError", "WeightedSampler", "load"]

CLASSES = 2
SHAPE = (4,)
LABEL_SHAPE = ()


class WeightedSampler(DistributedSampler):
    """Draws samples with replacement, those of each class equally often.

    All processes draw the same, in the order of seed and epoch, and take their parts.
    """

    def __iter__(self):
        labels = torch.as_tensor(self.dataset.labels)
        weights = 1 / torch.bincount(labels).double()[labels]  # one for each sample
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(weights, len(labels), replacement=True, generator=generator)
        return iter(drawn[self.rank : self.total_size : self.num_replicas].tolist())


class OwnData(Dataset):
    """Rows and their class. Indexing with a list of indices returns their batch."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        self.labels = np.arange(count) % 16 // 15
        self.images = generator.standard_normal((count, 4)).astype("float32") + 2 * self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def sample(self, index):
        """Return a row and its class."""
        return torch.from_numpy(self.images[index]), int(self.labels[index])

    def __getitem__(self, indices):
        images = torch.empty(len(indices), *SHAPE)
        labels = torch.empty(len(indices), *LABEL_SHAPE, dtype=torch.long)
        for place, index in enumerate(indices):
            images[place], labels[place] = checked(self.sample(index), index, SHAPE, LABEL_SHAPE, CLASSES)
        return images, labels


def load(name, data_dir):
    """Return the training and the test set."""
    return OwnData(1024, seed=1), OwnData(301, seed=2)
