"""The two models of the examples: a small CNN for images and a small GPT for bytes of text."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """The small CNN of the classic MNIST guides: two convolutions, one max-pool, two linear layers.

    There is no dropout and no batch norm, on purpose: N processes with batch b then take the same
    step as one process with batch N*b, which is what our tests compare.
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


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then feed-forward, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        # There are three layers, so that tensor parallelism can split each by heads.
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        hidden = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, T, width) to (B, T, width); position t sees positions 0 to t only.

        With a mask (B, 1, T, T), position t sees those that it has in row t instead.
        """
        normed = self.norm1(x)
        layers = (self.query, self.key, self.value)
        parts = [layer(normed).unflatten(2, (-1, self.head_width)) for layer in layers]
        # Each is of shape (B, heads, T, width / heads).
        query, key, value = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def token_loss(logits: Tensor, labels: Tensor, dtype: torch.dtype, reduction="mean") -> Tensor:
    """Return the loss of logits (B, T, vocab) or (B, classes) in nats, computed in `dtype`.

    It is a function, so that it can be compiled.
    """
    return F.cross_entropy(logits.flatten(0, -2).to(dtype), labels.flatten(), reduction=reduction)


def positions_in_documents(tokens: Tensor, end: int) -> Tensor:
    """Return the positions (B, T) of tokens (B, T) in their documents, which end with `end`.

    In a document that has begun before its row, they count from the first token of the row.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = F.pad(tokens[:, :-1] == end, (1, 0))  # True where the token before has ended one
    return places - torch.where(begins, places, 0).cummax(1).values


class TinyGPT(nn.Module):
    """A decoder-only transformer language model.

    It has the pre-norm layout of GPT-2 (Radford et al. 2018/2019). The defaults give about 440,000
    parameters and a vocabulary of 256: one token is one byte. Raises ValueError if `width`
    is no multiple of `heads`.

    If `end` is set to a token, documents end with it: positions then begin anew in each, and
    attention does not cross from one into another.
    """

    def __init__(self, vocab=256, context=128, width=128, heads=4, layers=2) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} must be a multiple of heads {heads}")
        self.context = context
        self.end: int | None = None
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        # The default, 1.0, makes the first logits far too large.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight  # tied (Press and Wolf 2017)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T), int64, T at most `context`, to next-token logits (B, T, vocab)."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit into a context of {self.context}")
        positions = torch.arange(length, device=tokens.device)
        mask = None
        if self.end is not None:
            positions = positions_in_documents(tokens, self.end)
            documents = (positions == 0).cumsum(1)
            mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)  # your own block may take no mask
        return self.head(self.norm(x))
