"""LoRA for the TinyGPT of common/, in a few lines; the example lora takes peft's."""

import torch
from torch import nn

from common.models import TinyGPT


class Adapted(nn.Module):
    """A frozen linear layer, and beside it the product of two small matrices, which are trained (Hu et al. 2021).

    It adds nothing until it is trained.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.layer(x) + self.up(self.down(x))


def with_adapters(model: TinyGPT, rank: int = 8) -> TinyGPT:
    """Freeze a model's weights, put adapters beside the linear layers of its blocks, and return it."""
    model.requires_grad_(False)
    layers = [(name, layer) for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in layers:
        model.blocks.set_submodule(name, Adapted(layer, rank))
    return model
