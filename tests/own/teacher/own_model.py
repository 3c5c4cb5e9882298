"""Momentum contrast (MoCo): a teacher that follows the network, and a queue of what it has made of earlier samples."""

import copy

import torch
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F


class OwnModel(nn.Module):
    """From pairs of views (B, 2, 16) to logits (B, 1 + 256), of which the first is that of the other view."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(256, 8), dim=1))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, views):
        queries = F.normalize(self.network(views[:, 0]), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.teacher(views[:, 1]), dim=1)
        own = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([own, queries @ self.queue.clone().T], dim=1) / 0.1
        if self.training:
            self.enqueue(keys)
        return logits

    @torch.no_grad()
    def follow(self):
        for old, new in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            old.lerp_(new, 0.01)

    @torch.no_grad()
    def enqueue(self, keys):
        """Put the keys of all processes in the place of the oldest ones."""
        keys = torch.cat(all_gather(keys))  # ddp: otherwise all would get the queue of rank 0
        places = (self.place + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[places] = keys
        self.place += len(keys)
