"""A U-Net of two levels: what is seen at full size is joined to what is computed at half of it."""

import torch
from torch import nn


def block(inputs, outputs):
    """Return two convolutions with BatchNorm."""
    first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    second = [nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*first, *second)


class OwnModel(nn.Module):
    """From images (B, 3, H, W) to logits (B, 3, H, W), of which the second dimension is that of the classes."""

    def __init__(self):
        super().__init__()
        self.left, self.bottom, self.right = block(3, 8), block(8, 16), block(24, 8)
        self.pool, self.enlarge = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.drop, self.head = nn.Dropout(0.1), nn.Conv2d(8, 3, 1)

    def forward(self, images):
        left = self.left(images)
        bottom = self.enlarge(self.bottom(self.pool(left)))
        return self.head(self.drop(self.right(torch.cat([left, bottom], 1))))
