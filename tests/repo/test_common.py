"""common/: the models, the data sets, and what is promised of them."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from common import data
from common.models import ConvNet, TinyGPT, positions_in_documents


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


def test_documents_apart() -> None:
    """With an end of documents, a document's logits are the same whatever stands before it; the default has no such."""
    assert positions_in_documents(torch.tensor([[5, 7, 7, 1, 2], [7, 1, 2, 7, 3]]), 7).tolist() == [
        [0, 1, 0, 0, 1],
        [0, 0, 1, 2, 0],
    ]
    torch.manual_seed(0)
    model = TinyGPT(vocab=20, context=16, width=32).double()
    document = [3, 1, 4, 1, 5, 9, 2, 6]
    windows = torch.tensor([[8, 8, 8, 7, *document], [9, 7, 7, 7, *document], [1, 2, 3, 7, *document]])
    with torch.no_grad():
        mixed = model(windows)[:, 4:]
        model.end = 7
        apart = model(windows)[:, 4:]
        alone = model(torch.tensor([document]))
        assert model(windows[:0]).shape == (0, 12, 20)
    assert (apart - alone).abs().max() < 1e-12 < 1e-4 < (mixed - alone).abs().max(dim=2).values.min()
    single = model(torch.tensor([document[:5]]))
    model.end = None
    assert (single - model(torch.tensor([document[:5]]))).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.int32, torch.uint32])
def test_shards(kind: torch.dtype) -> None:
    """Tokens in several parts, some shorter than a window and some empty, are windows and slices of the whole."""
    tokens = torch.arange(200).to(kind)
    for bounds in ([0, 200], [0, 1, 2, 2, 5, 90, 90, 200], [0, 100, 200], [*range(200), 200]):
        shards = data.Shards([tokens[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)])
        assert len(shards) == 200
        for start, end in ((0, 200), (0, 180), (180, 200), (3, 95), (90, 101)):
            one, other = data.Tokens(tokens[start:end], 10), data.Tokens(shards[start:end], 10)
            assert len(one) == len(other) == (end - start - 1) // 10
            indices = [*range(len(one))][::-1]
            for found, expected in zip(other[indices], one[indices], strict=True):
                assert found.dtype == torch.int64 and torch.equal(found, expected)
            assert one[indices][0][-1].tolist() == [*range(start, start + 10)]
    assert [part.shape for part in data.Tokens(tokens, 10)[[]]] == [(0, 10), (0, 10)]


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


def test_unknown_name() -> None:
    with pytest.raises(data.DataError, match="unknown data set 'cifar': choose from digits, mnist"):
        data.load("cifar")


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


def test_text_tokens_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(data.DataError, match=r"cannot read the text file .*missing: No such file"):
        data.text_tokens(str(tmp_path / "missing"))
    with pytest.raises(data.DataError, match="is empty"):
        data.text_tokens(str(tmp_path / "empty"))
    with pytest.raises(data.DataError, match="64 tokens are too few for one window of 64"):
        data.Tokens(torch.zeros(64, dtype=torch.uint8), 64)


NO_TEXT = {
    "UTF-16": ("river".encode("utf-16"), "is not UTF-8"),
    "UTF-16 without a mark": ("a river".encode("utf-16-le"), "7 of the 14 bytes are 0, as in UTF-16"),
    "UTF-32": ("river".encode("utf-32-le"), "15 of the 20 bytes are 0"),
    "Latin-1": (b"a caf\xe9 and a river", "is not UTF-8"),
    "late": (b"river " * 2**18 + b"\xe9t\xe9", "is not UTF-8"),
    "gzip": (gzip.compress(b"river " * 99), r"is compressed \(gzip\) and no text"),
    "docx": (b"PK\x03\x04 and so on", "is a zip file"),
    "PDF": (b"%PDF-1.7 and so on", "is a PDF and no text"),
    "xz": (lzma.compress(b"river " * 99), r"is compressed \(xz\)"),
    "ELF": (b"\x7fELF\x02\x01\x01" + bytes(9), "9 of the 16 bytes are 0"),
    "empty": (b"", "is empty"),
}


@pytest.mark.parametrize("case", NO_TEXT)
def test_no_text(tmp_path: Path, case: str) -> None:
    """What is no text in UTF-8 is refused, and the line says what it is."""
    content, message = NO_TEXT[case]
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.text_tokens(str(tmp_path / "text"))


def test_odd_texts(tmp_path: Path) -> None:
    """One line without an end, a mark at the start, letters over the bounds of a part, or a cut one at the end."""
    for text in (
        b"one line",
        b"\xef\xbb\xbfmarked",
        "\u0928".encode() * 2**20,
        "a river \u0928".encode()[:-1],
        b"\r\n",
    ):
        (tmp_path / "text").write_bytes(text)
        assert data.read_text(str(tmp_path / "text")) == text
        assert len(data.text_tokens(str(tmp_path / "text"))) == len(text)
    with pytest.raises(data.DataError, match="Is a directory"):
        data.text_tokens(str(tmp_path))


@pytest.mark.parametrize("kind", [None, "uint8", "int16", "uint16", "int32", "int64"])
def test_saved_tokens(tmp_path: Path, kind: str | None) -> None:
    """Tokens come back as they were saved, by torch.save or as numbers of any size, and fill windows."""
    tokens = torch.arange(200) % 101
    if kind:
        tokens.numpy().astype(kind).tofile(tmp_path / "tokens")
    else:
        torch.save(tokens, tmp_path / "tokens")
    found = data.saved_tokens(str(tmp_path / "tokens"), 101, kind)
    assert found.tolist() == tokens.tolist()
    inputs, _ = data.Tokens(found, 10)[[0, 12]]
    assert inputs.dtype == torch.int64 and inputs.tolist() == [[*range(10)], [*range(19, 29)]]


GOOD = torch.arange(200) % 101
NO_TOKENS = {
    "above the vocabulary": (GOOD, None, 100, "has token 100, and tokens are 0 to 99"),  # transformers 12763
    "negative": (torch.where(GOOD == 5, -100, GOOD), None, 101, "has token -100"),
    "int16 that has overflowed": (
        (GOOD * 999).to(torch.int16),
        None,
        99_999,
        "has token -",
    ),  # transformers-trainers 12
    "two dimensions": (GOOD.view(2, 100), None, 101, r"a tensor of shape \(2, 100\): tokens are one tensor"),
    "none": (GOOD[:0], None, 101, r"a tensor of shape \(0,\)"),
    "a list": (GOOD.tolist(), None, 101, "<class 'list'>: tokens are one tensor"),
    "fractions": (GOOD.float(), None, 101, "numbers of torch.float32: tokens are whole numbers"),
    "booleans": (GOOD.bool(), None, 101, "numbers of torch.bool"),
    "odd length": (b"\1\0\0\0\2\0\0", "int32", 101, "has 7 bytes, which is no whole number of int32"),
    "no bytes": (b"", "int32", 101, "has 0 bytes"),
    "int64 as int32": (GOOD.numpy(), "int32", 101, "every second number in .* is 0"),
    "int64 as uint16": (GOOD.numpy(), "uint16", 101, "every second number in .* is 0"),
    "int32 as uint16": (GOOD.int().numpy(), "uint16", 101, "every second number in .* is 0"),
    "uint16 as int32": (GOOD.numpy().astype("uint16"), "int32", 50304, "has token [0-9]+, and tokens are 0 to 50303"),
    "int32 as int64": (GOOD.int().numpy(), "int64", 50304, "has token [0-9]+, and tokens are 0 to 50303"),
    "a text": (b"a river and a village " * 10, "int32", 50304, "or a text"),
    "not of torch.save": (b"a river and a village", None, 50304, "as torch.save writes them"),
}


@pytest.mark.parametrize("case", NO_TOKENS)
def test_saved_tokens_refused(tmp_path: Path, case: str) -> None:
    """Tokens that a model of this vocabulary cannot have are refused before it is trained, in one line."""
    content, kind, vocabulary, message = NO_TOKENS[case]
    if isinstance(content, (bytes, np.ndarray)):
        (tmp_path / "tokens").write_bytes(bytes(content) if isinstance(content, bytes) else content.tobytes())
    else:
        torch.save(content, tmp_path / "tokens")
    with pytest.raises(data.DataError, match=message) as raised:
        data.saved_tokens(str(tmp_path / "tokens"), vocabulary, kind)
    assert "\n" not in str(raised.value)
    with pytest.raises(data.DataError, match="cannot read the tokens in .*No such file"):
        data.saved_tokens(str(tmp_path / "missing"), vocabulary, kind)


def test_range_of_many_tokens(tmp_path: Path) -> None:
    """Of more tokens than 128 parts hold, the first and the last are looked at, too."""
    tokens = torch.ones(2**27 + 5, dtype=torch.uint8)
    tokens[0], tokens[-1] = 0, 200
    assert data.token_range(tokens) == (0, 200)


def test_too_many_random_tokens() -> None:
    with pytest.raises(data.DataError, match="use at most 1000000000"):
        data.markov_tokens(10**12)


def test_random_tokens() -> None:
    """A vocabulary of 256 gives the Markov chain; any other one its own tokens, equally likely, and their entropy."""
    assert torch.equal(data.random_tokens(1000, 256)[0], data.markov_tokens(1000)[0])
    for vocabulary in (2, 1000, 50_304):
        tokens, entropy = data.random_tokens(300_000, vocabulary)
        assert torch.equal(tokens, data.random_tokens(300_000, vocabulary)[0])
        assert entropy == pytest.approx(torch.tensor(float(vocabulary)).log().item(), rel=1e-6)
        assert 0 <= tokens.min() <= vocabulary * 0.01 and vocabulary * 0.99 - 1 <= tokens.max() < vocabulary
        assert tokens.double().mean().item() == pytest.approx((vocabulary - 1) / 2, rel=0.01)
    with pytest.raises(data.DataError, match="use at most 10000000000"):
        data.random_tokens(10**12, 1000)


def test_markov_entropy() -> None:
    """The entropy it names is that of the tokens: their own bigram statistics give the same figure."""
    tokens, entropy = data.markov_tokens(1_000_000)
    assert torch.equal(tokens[:1000], data.markov_tokens(1_000_000)[0][:1000])
    pairs = torch.bincount(tokens[:-1].long() * 32 + tokens[1:].long(), minlength=32 * 32).view(32, 32).double()
    conditional = pairs / pairs.sum(1, keepdim=True)
    measured = -(pairs / pairs.sum() * conditional.clamp_min(1e-12).log()).sum().item()
    assert measured == pytest.approx(entropy, rel=0.003)
    assert 0.5 < entropy < 0.8 * torch.tensor(32.0).log().item()
