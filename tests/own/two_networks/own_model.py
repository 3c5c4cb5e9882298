"""A generator of rows of four numbers, and a discriminator that tells them from those of the data."""

import torch
from torch import nn


class OwnModel(nn.Module):
    """Both networks of a GAN, so that a checkpoint has both."""

    def __init__(self):
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, images, turn="discriminator"):
        made = self.generator(torch.randn(len(images), 8, device=images.device, dtype=images.dtype))
        if turn == "generator":
            self.discriminator.requires_grad_(False)  # it judges, and does not learn
            logits = self.discriminator(made)
            self.discriminator.requires_grad_(True)
            return logits, torch.ones(len(made), dtype=torch.long, device=made.device)
        real = torch.arange(2 * len(images), device=images.device) < len(images)
        return self.discriminator(torch.cat([images, made.detach()])), real.long()
