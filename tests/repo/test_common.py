"""common/: the model, the data sets, and how a DataLoader reads them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from common import data
from common.models import ConvNet


def test_convnet() -> None:
    """The classic layers, 1.2 million parameters, and no module that acts differently in training."""
    model = ConvNet()
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert sum(p.numel() for p in model.parameters()) == 320 + 18_496 + 1_179_776 + 1_290
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model.train()(images), model.eval()(images))


def test_digits() -> None:
    """All 1,797 images of the source, each class as often as there; a list of indices gives a normalised batch."""
    train_set, test_set = data.load("digits")
    assert (len(train_set), len(test_set)) == (1438, 359)
    counts = torch.bincount(train_set.labels) + torch.bincount(test_set.labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images, labels = train_set.__getitems__([5, 3, 1000])
    assert images.shape == (3, 1, 28, 28) and images.dtype == torch.float32
    assert labels.tolist() == [train_set.labels[i].item() for i in (5, 3, 1000)] and labels.dtype == torch.int64
    assert torch.equal(images[1], train_set[3][0])
    black, white = (0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081
    assert images.min().item() == pytest.approx(black) and black < images.max().item() <= white + 1e-6


def test_synthetic() -> None:
    """Any size, the same each time, with classes that can be told apart by their mean image."""
    train_set, test_set = data.load("synthetic", size=600)
    assert (len(train_set), len(test_set)) == (600, 100)
    assert torch.equal(train_set.images, data.load("synthetic", size=600)[0].images)
    images, labels = train_set.__getitems__(list(range(600)))
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    images, labels = test_set.__getitems__(list(range(100)))
    assert torch.equal(torch.cdist(images.flatten(1), means.flatten(1)).argmin(1), labels)
    with pytest.raises(data.DataError, match="unknown data set 'cifar': choose from digits, mnist"):
        data.load("cifar")


def test_loader() -> None:
    """DataLoader reads whole batches, also of a part of a set; data.collate joins the samples of any other data set."""
    train_set, _ = data.load("digits")
    part = Subset(train_set, range(0, 1438, 3))
    batches = list(DataLoader(part, 64, collate_fn=data.collate))
    assert [len(labels) for _, labels in batches] == [64] * 7 + [32]
    assert torch.equal(torch.cat([labels for _, labels in batches]), train_set.labels[::3])
    one, other = train_set[7], train_set[8]
    images, labels = next(iter(DataLoader([one, other], 2, collate_fn=data.collate)))
    assert torch.equal(images, torch.stack([one[0], other[0]])) and labels.tolist() == [one[1], other[1]]


def test_keras_file(tmp_path: Path) -> None:
    """Keras's mnist.npz is read where MNIST's own files are not there; another kind of .npz is refused."""
    images = np.arange(20 * 28 * 28).reshape(20, 28, 28).astype("uint8")
    labels = np.arange(20) % 10
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images[:5], y_test=labels[:5])
    train_set, test_set = data.load("mnist", str(tmp_path))
    assert (len(train_set), len(test_set)) == (20, 5) and train_set[3][1] == 3
    assert torch.equal(train_set.images.squeeze(-1), torch.from_numpy(images))
    np.savez(tmp_path / "mnist.npz", a=images)
    with pytest.raises(data.DataError, match=r"mnist.npz cannot be read .*: remove them, then run: python -m common"):
        data.load("mnist", str(tmp_path))
