"""A network from views to unit vectors, and the loss of pairs of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F


class OwnModel(nn.Module):
    """From pairs of views (B, 2, 16) to pairs of unit vectors (B, 2, 8)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, views):
        return F.normalize(self.net(views), dim=-1)


def loss_of_pairs(vectors, temperature=0.1):
    """Return the loss of unit vectors (B, 2, D): each has to find its other one (InfoNCE)."""
    # ddp: among those of all processes; gradients travel back to the process of each vector
    everyone = torch.cat(all_gather(vectors.contiguous()))
    own = torch.arange(len(vectors), device=vectors.device) + dist.get_rank() * len(vectors)
    first = F.cross_entropy(vectors[:, 0] @ everyone[:, 1].T / temperature, own)
    second = F.cross_entropy(vectors[:, 1] @ everyone[:, 0].T / temperature, own)
    return (first + second) / 2
