"""A U-Net of two levels, whose GroupNorm looks at one image: two processes train it as one does."""

import torch
from torch import nn


def block(inputs, outputs):
    """Return two convolutions with GroupNorm."""
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()]
    second = [nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()]
    return nn.Sequential(*first, *second)


class OwnModel(nn.Module):
    """From images (B, 3, H, W) to logits (B, 3, H, W), of which the second dimension is that of the classes."""

    def __init__(self):
        super().__init__()
        self.left, self.bottom, self.right = block(3, 8), block(8, 16), block(24, 8)
        self.pool, self.enlarge = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images):
        left = self.left(images)
        bottom = self.enlarge(self.bottom(self.pool(left)))
        return self.head(self.right(torch.cat([left, bottom], 1)))
