"""common/: the models, the data sets, and what is promised of them."""

from pathlib import Path

import pytest
import torch

from common import data
from common.models import ConvNet, TinyGPT


def test_convnet() -> None:
    """The classic layers, 1.2 million parameters, and no module that acts differently in training."""
    model = ConvNet()
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert sum(p.numel() for p in model.parameters()) == 320 + 18_496 + 1_179_776 + 1_290
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model.train()(images), model.eval()(images))


def test_tinygpt() -> None:
    """Logits at a position depend on that token and the ones before it; the embedding is tied; limits are kept."""
    model = TinyGPT()
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 600_000
    assert model.head.weight is model.token.weight
    tokens = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 50] = (changed[:, 50] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 128, 256)
    assert torch.allclose(before[:, :50], after[:, :50], atol=1e-5)
    assert (before[:, 50:] - after[:, 50:]).abs().amax(dim=(0, 2)).min() > 1e-4
    with pytest.raises(ValueError, match="129 tokens"):
        model(torch.zeros(1, 129, dtype=torch.long))
    with pytest.raises(ValueError, match="multiple"):
        TinyGPT(width=100, heads=3)


def test_digits() -> None:
    """All 1,797 images of the source, each class as often as there; a list of indices gives a normalised batch."""
    train_set, test_set = data.load("digits")
    assert (len(train_set), len(test_set)) == (1438, 359)
    counts = torch.bincount(train_set.labels) + torch.bincount(test_set.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images, labels = train_set[[5, 3, 1000]]
    assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == [train_set.labels[i].item() for i in (5, 3, 1000)] and labels.dtype == torch.int64
    assert torch.equal(images[1:2], train_set[[3]][0])
    black, white = (0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081
    assert images.min().item() == pytest.approx(black) and black < images.max().item() <= white + 1e-6


def test_synthetic() -> None:
    """Any size, the same each time, with classes that can be told apart by their mean image."""
    train_set, test_set = data.load("synthetic", size=600)
    assert (len(train_set), len(test_set)) == (600, 100)
    assert torch.equal(train_set.images, data.load("synthetic", size=600)[0].images)
    images, labels = train_set[list(range(600))]
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    images, labels = test_set[list(range(100))]
    assert torch.equal(torch.cdist(images.flatten(1), means.flatten(1)).argmin(1), labels)


def test_text_tokens(tmp_path: Path) -> None:
    """Any language: tokens are the bytes, windows do not overlap, and targets are the inputs moved on by one."""
    text = "नमस्ते दुनिया, hello world. " * 20
    (tmp_path / "text").write_text(text, encoding="utf-8")
    tokens = data.text_tokens(str(tmp_path / "text"))
    assert bytes(tokens.tolist()).decode("utf-8") == text
    windows = data.Tokens(tokens, 64)
    assert len(windows) == (len(tokens) - 1) // 64
    inputs, targets = windows[[0, 1]]
    assert inputs.shape == targets.shape == (2, 64) and inputs.dtype == torch.int64
    assert torch.equal(inputs.flatten(), tokens[:128].long())
    assert torch.equal(targets.flatten(), tokens[1:129].long())


def test_markov_entropy() -> None:
    """The entropy it names is that of the tokens: their own bigram statistics give the same figure."""
    tokens, entropy = data.markov_tokens(1_000_000)
    assert torch.equal(tokens[:1000], data.markov_tokens(1_000_000)[0][:1000])
    pairs = torch.bincount(tokens[:-1].long() * 32 + tokens[1:].long(), minlength=32 * 32).view(32, 32).double()
    conditional = pairs / pairs.sum(1, keepdim=True)
    measured = -(pairs / pairs.sum() * conditional.clamp_min(1e-12).log()).sum().item()
    assert measured == pytest.approx(entropy, rel=0.003)
    assert 0.5 < entropy < 0.8 * torch.tensor(32.0).log().item()
