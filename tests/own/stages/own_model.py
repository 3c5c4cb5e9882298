"""A network whose head is trained alone for two epochs, and then together with its backbone and a second head."""

from torch import nn


class OwnModel(nn.Module):
    """From rows (B, 4) to logits (B, 2)."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 2)
        self.later = nn.Linear(32, 2)
        self.second = True

    def begin_epoch(self, epoch):
        """Freeze what this epoch, counted from 0, does not train; return whether it begins a stage."""
        self.second = epoch >= 2  # not ==, which a run that is resumed later would never meet
        self.backbone.requires_grad_(self.second)
        self.later.requires_grad_(self.second)
        return epoch == 2

    def train(self, mode=True):
        """Have frozen layers evaluate, so that the statistics of BatchNorm stay as they are."""
        super().train(mode)
        self.backbone.train(mode and self.second)
        return self

    def forward(self, rows):
        seen = self.backbone(rows)
        return self.head(seen) + self.later(seen) if self.second else self.head(seen)
