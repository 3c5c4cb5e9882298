"""A small GPT, its first weights, and its loss."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then feed-forward, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        # Three layers instead of one, so that tensor parallelism can split each by heads.
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        hidden = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width); position t sees positions 0 to t only."""
        normed = self.norm1(x)
        layers = (self.query, self.key, self.value)
        parts = [layer(normed).unflatten(2, (-1, self.head_width)) for layer in layers]
        query, key, value = (part.transpose(1, 2) for part in parts)  # (B, heads, T, head width)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A decoder-only transformer language model in the layout of GPT-2 (Radford et al. 2019).

    The defaults give 437,760 weights and a vocabulary of 256: one token is one byte.
    """

    def __init__(self, vocabulary=256, context=64, width=128, heads=4, layers=2) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied (Press and Wolf 2017)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T), int64, T at most `context`, to logits (B, T, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, labels: Tensor, reduction="mean") -> Tensor:
    """Return the loss of logits (N, vocabulary) in nats. When compiled, it makes no fp32 copy."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits, labels, reduction=reduction)


@torch.no_grad()
def initialise(model, seed):
    """Draw the weights from a normal distribution, the same for any number of processes."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        whole = torch.zeros(weight.shape, dtype=weight.dtype)  # fsdp: one whole weight at a time
        if name.endswith("weight"):  # biases stay 0
            whole.fill_(1)  # of a LayerNorm
            if weight.dim() > 1:  # of another layer, as in GPT-2
                generator = torch.Generator().manual_seed(seed * 10_000 + number)
                whole.normal_(0, 0.02, generator=generator)
        whole = whole.to(weight.device)
        # fsdp: cut into shards like the weight; each process cuts its own copy, and sends none
        part = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(part)
