"""Short texts with good words, class 1, or bad ones, class 0, in the form that models of transformers take."""

import random

import torch
from torch.utils.data import Dataset

from common.data import NAMES, DataError

__all__ = ["NAMES", "DataError", "load"]

GOOD, BAD = ["bright", "warm", "clear", "kind", "honest"], ["dull", "cold", "vague", "cruel", "false"]
OTHERS = ["the", "a", "this", "is", "was", "very", "and", "but", "its", "light", "story", "voice", "page", "answer"]
VOCABULARY = {word: number for number, word in enumerate(["padding", *GOOD, *BAD, *OTHERS])}
LENGTH = 16


class Inputs(dict):
    """Tensors by their names, which train.py moves as if they were one; none of them becomes a float."""

    dtype = torch.float32  # what the logits become for the loss

    def __len__(self):
        """Return the number of samples, which train.py counts: a dict's would be that of its names."""
        return len(next(iter(self.values())))

    def to(self, device, dtype=None, non_blocking=False):
        """Return the same on a device."""
        moved = Inputs({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})
        moved.dtype = dtype or self.dtype
        return moved


class OwnData(Dataset):
    """Texts and their classes. Indexing with a list of indices returns their batch."""

    def __init__(self, count, seed):
        words = random.Random(seed)
        self.texts, self.labels = [], []
        for number in range(count):
            chosen = words.choices(GOOD if number % 2 else BAD, k=2) + words.choices(OTHERS, k=words.randint(3, 12))
            words.shuffle(chosen)
            self.texts.append(" ".join(chosen))
            self.labels.append(number % 2)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices):
        ids = torch.zeros(len(indices), LENGTH, dtype=torch.long)  # the tokenizer of a model would do this
        for place, index in enumerate(indices):
            tokens = [VOCABULARY[word] for word in self.texts[index].split()]
            ids[place, : len(tokens)] = torch.tensor(tokens)
        labels = torch.tensor([self.labels[index] for index in indices], dtype=torch.long)
        return Inputs(input_ids=ids, attention_mask=(ids > 0).long()), labels


def load(name, data_dir):
    """Return the training and the test set."""
    return OwnData(1280, seed=6), OwnData(257, seed=7)
