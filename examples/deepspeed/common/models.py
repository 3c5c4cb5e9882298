"""The model of the examples that train on images."""

import warnings

from torch import Tensor, nn
from torch.nn import functional as F

# DDP warns about the memory layout of conv1, which has one input channel. This is harmless.
warnings.filterwarnings("ignore", "Grad strides")


class ConvNet(nn.Module):
    """The small CNN of the classic MNIST guides: two convolutions, one max-pool, two linear layers.

    It has no dropout and no batch norm, on purpose: N processes with batch b then take the same
    steps as one process with batch N*b, which our tests compare.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images of shape (B, 1, 28, 28), normalised float, to logits of shape (B, 10)."""
        x = F.relu(self.conv1(images))  # (B, 32, 26, 26)
        x = F.relu(self.conv2(x))  # (B, 64, 24, 24)
        x = F.max_pool2d(x, 2).flatten(1)  # (B, 9216)
        return self.fc2(F.relu(self.fc1(x)))
