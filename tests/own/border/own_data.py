"""Images of discs on noise with masks, in which the border of a disc has no class, 255, as in Pascal VOC.

Every second image has also no class in its upper half: so do processes have other numbers of pixels that count.
"""

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data import NAMES, DataError, checked

__all__ = ["NAMES", "DataError", "load"]

CLASSES = 3
SHAPE = (3, 32, 32)
LABEL_SHAPE = (32, 32)


class OwnData(Dataset):
    """Images and masks. Indexing with a list of indices returns their batch."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        rows, columns = np.mgrid[:32, :32]
        self.images = generator.integers(0, 120, (count, *SHAPE)).astype("uint8")
        self.labels = np.zeros((count, *LABEL_SHAPE), "int64")
        for image, mask in zip(self.images, self.labels, strict=True):
            kind = generator.integers(1, CLASSES)
            row, column, radius = generator.integers(9, 23), generator.integers(9, 23), generator.integers(4, 9)
            distance = (rows - row) ** 2 + (columns - column) ** 2
            mask[distance < radius**2] = kind
            image[kind, mask > 0] += 120
            mask[(distance >= (radius - 1) ** 2) & (distance < (radius + 1) ** 2)] = 255
        self.labels[::2, :16] = 255

    def __len__(self):
        return len(self.labels)

    def sample(self, index):
        """Return an image and its mask."""
        return torch.from_numpy(self.images[index]) / 255, torch.from_numpy(self.labels[index])

    def __getitem__(self, indices):
        images = torch.empty(len(indices), *SHAPE)
        labels = torch.empty(len(indices), *LABEL_SHAPE, dtype=torch.long)
        for place, index in enumerate(indices):
            sample = checked(self.sample(index), index, SHAPE, LABEL_SHAPE, CLASSES, ignored=255)
            images[place], labels[place] = sample
        return images, labels


def load(name, data_dir):
    """Return the training and the test set."""
    return OwnData(256, seed=1), OwnData(51, seed=2)
