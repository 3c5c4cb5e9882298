"""Sentences of different lengths, with one of five tags for each token, which its own and the one before it decide."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, DistributedSampler

from common.data import NAMES, DataError

__all__ = ["NAMES", "DataError", "ByLength", "load"]

TOKENS = 10.28  # the mean number of tokens of a training sample


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


def collate(samples):
    """Return a batch of samples, as long as the longest of them; the tag of padding is -100."""
    tokens, tags = zip(*samples, strict=True)
    lengths = torch.tensor([len(sentence) for sentence in tokens])
    inputs = Inputs(tokens=pad_sequence(tokens, batch_first=True), lengths=lengths)
    return inputs, pad_sequence(tags, batch_first=True, padding_value=-100)


class ByLength(DistributedSampler):
    """Steps of samples of similar lengths, in a random order; each process takes its part of each step.

    The samples of 100 steps are drawn, and sorted: the shortest ones make a step, and so on.
    """

    def __init__(self, dataset, processes, rank, seed, global_batch):
        super().__init__(dataset, processes, rank, seed=seed, drop_last=True)
        self.step = global_batch
        self.lengths = torch.as_tensor(dataset.lengths)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[: len(order) // self.step * self.step]
        parts = [part[self.lengths[part].argsort(stable=True)] for part in order.split(100 * self.step)]
        steps = torch.cat(parts).view(-1, self.step)
        steps = steps[torch.randperm(len(steps), generator=generator)]
        return iter(steps[:, self.rank :: self.num_replicas].flatten().tolist())


class OwnData(Dataset):
    """Sentences and their tags. Indexing with a list of indices returns their batch."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        self.lengths = np.minimum(2 + generator.geometric(0.12, count), 40).tolist()
        self.tokens = [torch.from_numpy(generator.integers(1, 30, length)) for length in self.lengths]

    def __len__(self):
        return len(self.tokens)

    def sample(self, index):
        """Return a sentence and its tags."""
        tokens = self.tokens[index]
        return tokens, (tokens + torch.cat([tokens[:1], tokens[:-1]])) % 5

    def __getitem__(self, indices):
        return collate([self.sample(index) for index in indices])


def load(name, data_dir):
    """Return the training and the test set."""
    return OwnData(800, seed=1), OwnData(123, seed=2)
