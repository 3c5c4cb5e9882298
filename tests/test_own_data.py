"""Own data: what is wrong with files and samples ends in one line, with what was found and what is expected."""

import os
import runpy
import signal
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import edits, refusals, runs, samples
from harness.launchers import LAUNCHERS, ROOT

TENSORFLOW = ROOT / "examples" / "horovod_tensorflow"


@pytest.fixture(params=["torch", "numpy"])
def own_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names in own_data.py, that of PyTorch's examples and that of horovod_tensorflow."""
    folder = ROOT / "examples" / "ddp_spawn"
    if request.param == "numpy":
        folder = TENSORFLOW
        monkeypatch.syspath_prepend(str(folder))
    return runpy.run_path(str(folder / "own_data.py"))


def arrays() -> dict[str, Any]:
    """Return 60 images and labels of ten classes, as they have to be."""
    import numpy as np

    images = np.random.default_rng(0).integers(0, 256, (60, 28, 28), dtype=np.uint8)
    return {"images": images, "labels": np.arange(60) % 10}


def save(folder: Path, **changed: Any) -> Path:
    """Write both parts, with other arrays in the training part; return that one's path."""
    import numpy as np

    folder.mkdir(exist_ok=True)
    np.savez(folder / "test.npz", **arrays())
    kept = {name: array for name, array in (arrays() | changed).items() if array is not None}
    np.savez(folder / "train.npz", **kept)
    return folder / "train.npz"


def refused(own_data: dict[str, Any], folder: Path, *texts: str) -> None:
    """Check that own_data.py refuses the data in a folder with one line that has all these texts."""
    with pytest.raises(Exception, match=r"^own_data\.py: ") as caught:
        own_data["load"]("digits", folder)
    message = str(caught.value)
    assert type(caught.value).__name__ == "DataError" and "\n" not in message
    assert all(text in message for text in texts), f"{texts} not in {message!r}"


NAMES = ("has {}; expected images and labels", "np.savez", "x_train", "arr_0")
# What is changed, as a function of the right images and labels: what the line says.
ARRAYS: dict[str, tuple[Callable[[Any, Any, Any], dict[str, Any]], Sequence[str]]] = {
    "names of Keras": (lambda np, x, y: {"images": None, "labels": None, "x_train": x, "y_train": y}, ("x_train, y_",)),
    "no names": (lambda np, x, y: {"images": None, "labels": None, "arr_0": x}, ("has arr_0; expected",)),
    "only images": (lambda np, x, y: {"labels": None}, ("has images; expected images and labels",)),
    "singular": (lambda np, x, y: {"labels": None, "label": y}, ("has images, label; expected",)),
    "capitals": (lambda np, x, y: {"images": None, "Images": x}, ("has labels, Images; expected",)),
    "nothing": (lambda np, x, y: {"images": None, "labels": None}, ("has nothing; expected",)),
    "empty": (lambda np, x, y: {"images": x[:0], "labels": y[:0]}, ("there are no images",)),
    "no labels": (lambda np, x, y: {"labels": y[:0]}, ("there are no labels",)),
    "fewer labels": (lambda np, x, y: {"labels": y[:50]}, ("60 images and 50 labels",)),
    "channel last": (lambda np, x, y: {"images": x[..., None]}, ("(60, 28, 28, 1)", "images.reshape(-1, 28, 28)")),
    "channel first": (lambda np, x, y: {"images": x[:, None]}, ("(60, 1, 28, 28)", "images.reshape(-1, 28, 28)")),
    "flat": (lambda np, x, y: {"images": x.reshape(60, 784)}, ("(60, 784)", "images.reshape(-1, 28, 28)")),
    "colour": (lambda np, x, y: {"images": np.stack([x] * 3, -1)}, ("(60, 28, 28, 3)", "expected (N, 28, 28)")),
    "another size": (lambda np, x, y: {"images": x[:, ::2, ::2]}, ("(60, 14, 14)", "expected (N, 28, 28)")),
    "of MATLAB": (lambda np, x, y: {"images": x.transpose(1, 2, 0)}, ("(28, 28, 60)", "expected (N, 28, 28)")),
    "one image": (lambda np, x, y: {"images": x[0]}, ("(28, 28)", "expected (N, 28, 28)")),
    "a number": (lambda np, x, y: {"images": x[0, 0, 0]}, ("shape ()", "expected (N, 28, 28)")),
    "0 to 1": (lambda np, x, y: {"images": (x / 255).astype("f4")}, ("float32 from 0 to 1", "images * 255.0")),
    "0 to 1, halves": (lambda np, x, y: {"images": (x / 255).astype("f2")}, ("float16 from 0 to 1", "images * 255.0")),
    "0 to 255": (lambda np, x, y: {"images": x.astype("f4")}, ("float32 from 0 to 255", "round().astype('uint8')")),
    "-1 to 1": (lambda np, x, y: {"images": x / 127.5 - 1}, ("float64 from -1 to 1", "scale them to 0 to 255")),
    "normalised": (lambda np, x, y: {"images": (x - 33.0) / 79}, ("from -0.4", "scale them to 0 to 255")),
    "NaN": (lambda np, x, y: {"images": np.where(x > 250, np.nan, x)}, ("float64 from nan", "expected uint8")),
    "16 bits": (lambda np, x, y: {"images": x.astype("u2") * 257}, ("uint16 from 0 to 65535", "scale them")),
    "int64": (lambda np, x, y: {"images": x.astype("i8")}, ("int64 from 0 to 255", "astype('uint8')")),
    "int8": (lambda np, x, y: {"images": x.astype("i1")}, ("int8 from -128 to 127", "expected uint8")),
    "black and white": (lambda np, x, y: {"images": x > 99}, ("bool from 0 to 1", "images * 255.0")),
    "cut to 0 and 1": (lambda np, x, y: {"images": (x / 255).astype("u1")}, ("from 0 to 1;", "multiply by 255")),
    "black": (lambda np, x, y: {"images": x * 0}, ("from 0 to 0;", "expected 0 to 255")),
    "text as images": (lambda np, x, y: {"images": x.astype(str)}, ("expected uint8 from 0 to 255",)),
    "objects": (lambda np, x, y: {"images": np.array([*x, None], dtype=object)[:60]}, ("train.npz", "object arrays")),
    "1 to 10": (lambda np, x, y: {"labels": y + 1}, ("labels are 1 to 10; expected", "0 to 9", "save labels - 1")),
    "from -1": (lambda np, x, y: {"labels": y - 1}, ("labels are -1 to 8; expected", "0 to 9 (CLASSES")),
    "letters": (lambda np, x, y: {"labels": np.arange(60) % 26 + 1}, ("labels are 1 to 26; expected", "CLASSES")),
    "ignored": (lambda np, x, y: {"labels": np.where(y == 3, 255, y)}, ("labels are 0 to 255; expected",)),
    "floats": (lambda np, x, y: {"labels": y.astype("f4")}, ("labels are float32", "astype('int64')")),
    "NaN label": (lambda np, x, y: {"labels": np.where(y == 3, np.nan, y)}, ("labels have NaN", "expected whole")),
    "one-hot": (lambda np, x, y: {"labels": np.eye(10)[y]}, ("(60, 10); expected (N,)", "labels.argmax(1)")),
    "column": (lambda np, x, y: {"labels": y[:, None]}, ("(60, 1); expected (N,)", "labels[:, 0]")),
    "strings": (
        lambda np, x, y: {"labels": y.astype(str)},
        ("labels are <U", "np.unique(labels, return_inverse=True)"),
    ),
    "bytes": (lambda np, x, y: {"labels": y.astype("S")}, ("labels are |S", "np.unique")),
    "bool": (lambda np, x, y: {"labels": y > 4}, ("labels are bool", "expected whole numbers")),
    "dates": (lambda np, x, y: {"labels": y.astype("M8[D]")}, ("labels are datetime64", "expected whole numbers")),
    "one class": (lambda np, x, y: {"labels": y * 0 + 7}, ("all 60 labels are 7", "nothing to learn")),
}


@pytest.mark.parametrize(("change", "texts"), ARRAYS.values(), ids=ARRAYS)
def test_arrays(own_data: dict[str, Any], tmp_path: Path, change: Callable, texts: Sequence[str]) -> None:
    """Arrays of another name, length, shape, type or range are refused, with the file."""
    import numpy as np

    right = arrays()
    save(tmp_path, **change(np, right["images"], right["labels"]))
    refused(own_data, tmp_path, str(tmp_path / "train.npz"), *texts)


def test_colour(tmp_path: Path) -> None:
    """Images with a colour channel are read if their size says so; otherwise the line names it."""
    import numpy as np

    from common import data

    right = arrays()
    path = save(tmp_path, images=np.stack([right["images"]] * 3, -1))
    assert data.labelled_images(path, 10, (28, 28, 3))[0].shape == (60, 28, 28, 3)
    with pytest.raises(data.DataError, match=r"expected \(N, 28, 28, 1\)"):
        data.labelled_images(path, 10, (28, 28, 1))


RIGHT = {
    "as they have to be": lambda np, x, y: {},
    "compressed": lambda np, x, y: {"compressed": True},
    "more arrays": lambda np, x, y: {"ids": y, "mean": np.float32(3)},
    "bytes as labels": lambda np, x, y: {"labels": y.astype("u1")},
    "big-endian labels": lambda np, x, y: {"labels": y.astype(">i4")},
    "of Fortran": lambda np, x, y: {"images": np.asfortranarray(x)},
    "one sample": lambda np, x, y: {"images": x[3:4], "labels": y[3:4]},
    "five classes": lambda np, x, y: {"labels": y % 5},
}


def test_images_of_another_size(own_data: dict[str, Any], tmp_path: Path) -> None:
    """The images of a file may have the size that SHAPE says."""
    shape = tuple(14 if size == 28 else size for size in own_data["SHAPE"])
    own_data["load"].__globals__["SHAPE"] = shape
    path = save(tmp_path, images=arrays()["images"][:, ::2, ::2])
    path.with_name("test.npz").write_bytes(path.read_bytes())
    train_set, _ = own_data["load"]("digits", tmp_path)
    images, _ = train_set[[3, 5]]
    assert tuple(images.shape) == (2, *shape)


@pytest.mark.parametrize("change", RIGHT.values(), ids=RIGHT)
def test_right_arrays(own_data: dict[str, Any], tmp_path: Path, change: Callable) -> None:
    """What can be read is read, to the bit: pixels divided by 255 once, labels as they are."""
    import numpy as np

    changed = change(np, *arrays().values())
    if changed.pop("compressed", False):
        np.savez_compressed(save(tmp_path), **arrays())
    else:
        save(tmp_path, **changed)
    train_set, _ = own_data["load"]("digits", tmp_path)
    right = arrays() | changed
    indices = np.arange(len(right["labels"]))
    images, labels = (np.asarray(part) for part in train_set[indices])
    assert (images.reshape(-1, 28, 28) == right["images"] / np.float32(255)).all() and images.dtype == np.float32
    assert labels.tolist() == right["labels"].tolist() and labels.dtype == np.int64


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def inner_file_cut(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content[:1000])


def single_array(path: Path) -> None:
    import numpy as np

    with open(path, "wb") as file:
        np.save(file, arrays()["images"])


def pickled(path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps(arrays()))


def saved_by_torch(path: Path) -> None:
    import torch

    torch.save({"images": torch.zeros(3)}, path)


def renamed(path: Path) -> None:
    path.rename(path.with_name("there.npy"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = {
    truncate: ("damaged",),
    flip: ("damaged", "copy it again"),
    inner_file_cut: ("damaged",),
    single_array: ("single array", "np.savez"),
    pickled: ("no .npz file", "np.savez"),
    saved_by_torch: ("/data.pkl", "expected images and labels"),
    renamed: ("there is no", "has ", "there.npy"),
    a_folder: ("no .npz file",),
    Path.unlink: ("there is no", "has t"),
    lambda path: path.write_bytes(b""): ("no .npz file",),
    lambda path: path.write_text("<!DOCTYPE html><title>404</title>"): ("no .npz file", "copy it again"),
    lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"): ("no .npz file",),
    lambda path: path.write_text("label,pixel1\n3,0\n"): ("no .npz file",),
}


@pytest.mark.parametrize(("harm", "texts"), FILES.items())
@pytest.mark.parametrize("part", ["train", "test"])
def test_files(
    own_data: dict[str, Any], tmp_path: Path, part: str, harm: Callable[[Path], object], texts: Sequence[str]
) -> None:
    """A file that is damaged, missing or of another kind is named, be it the training part or the test part."""
    save(tmp_path)
    harm(tmp_path / f"{part}.npz")
    refused(own_data, tmp_path, str(tmp_path / f"{part}.npz"), *texts)


SAMPLES: dict[str, tuple[str, Sequence[str]]] = {
    "without channel": ("torch.rand(28, 28), 3", ["an image of shape (28, 28); expected (1, 28, 28)"]),
    "colour": ("torch.rand(3, 28, 28), 3", ["an image of shape (3, 28, 28); expected (1, 28, 28)"]),
    "one column": ("torch.rand(1, 28, 1), 3", ["an image of shape (1, 28, 1); expected"]),
    "one pixel": ("torch.tensor(0.5), 3", ["an image of shape (); expected"]),
    "another size": ("torch.rand(1, 32, 32), 3", ["an image of shape (1, 32, 32); expected"]),
    "0 to 255": (
        "torch.ones(1, 28, 28, dtype=torch.uint8), 3",
        ["type torch.uint8; expected a tensor of torch.float32"],
    ),
    "an array": ("self.images[index][None] / 255, 3", ["type float64; expected a tensor"]),
    "a file": ("open('/dev/null'), 3", ["type TextIOWrapper; expected a tensor"]),
    "nothing": ("None", ["returns None; expected an image and its label"]),
    "three things": ("torch.rand(1, 28, 28), 3, 4", ["expected an image and its label"]),
    "NaN": ("torch.full((1, 28, 28), float('nan')), 3", ["NaN or infinity"]),
    "infinity": ("torch.rand(1, 28, 28) / 0, 3", ["NaN or infinity"]),
    "label above": ("torch.rand(1, 28, 28), 10", ["the label 10; expected whole numbers from 0 to 9"]),
    "label below": ("torch.rand(1, 28, 28), -1", ["the label -1; expected"]),
    "label between": ("torch.rand(1, 28, 28), 2.5", ["the label 2.5; expected whole numbers"]),
    "label of NumPy": ("torch.rand(1, 28, 28), np.float32(2)", ["the label 2.0; expected whole numbers"]),
    "label of uint16": ("torch.rand(1, 28, 28), np.uint16(10)", ["the label 10; expected whole numbers from 0 to 9"]),
    "label as text": ("torch.rand(1, 28, 28), '3'", ["expected an image and its label, in numbers"]),
    "mirrored": ("torch.rand(1, 28, 28), np.arange(3)[::-1]", ["in numbers (At least one stride"]),
    "one-hot": ("torch.rand(1, 28, 28), torch.eye(10)[3]", ["a label of shape (10,); expected ()"]),
    "a mask": ("torch.rand(1, 28, 28), torch.ones(28, 28).long()", ["a label of shape (28, 28); expected ()"]),
}
SAMPLE = "        return torch.from_numpy(self.images[index])[None] / 255, int(self.labels[index])\n"


def with_sample(folder: Path, text: str) -> dict[str, Any]:
    """Return the names of own_data.py of PyTorch's examples with another end of sample()."""
    path = folder / "own_data.py"
    path.write_text((ROOT / "examples" / "ddp_spawn" / "own_data.py").read_text())
    edits.edit(path, SAMPLE, f"        import numpy as np\n        return {text}\n")
    return runpy.run_path(str(path))


@pytest.mark.parametrize(("text", "says"), SAMPLES.values(), ids=SAMPLES)
def test_samples(tmp_path: Path, text: str, says: Sequence[str]) -> None:
    """What sample() returns is looked at before a batch would stretch or cut it, at the start and later."""
    save(tmp_path)
    refused(with_sample(tmp_path, text), tmp_path, "sample(0) returns", *says)
    later = with_sample(tmp_path, f"({text}) if index == 7 else (torch.rand(1, 28, 28), 3)")
    train_set, _ = later["load"]("digits", tmp_path)
    assert train_set[[5, 6]][0].shape == (2, 1, 28, 28)
    with pytest.raises(later["DataError"], match=r"own_data\.py: sample\(7\) returns") as caught:
        train_set[[6, 7]]
    assert all(part in str(caught.value) for part in says)


RIGHT_SAMPLES = {
    "as shipped": SAMPLE.strip().removeprefix("return "),
    "float64": "torch.rand(1, 28, 28).double(), 3",
    "label as a tensor": "torch.rand(1, 28, 28), torch.tensor(3)",
    "label of NumPy": "torch.rand(1, 28, 28), np.uint8(3)",
    "normalised": "torch.randn(1, 28, 28), 3",
}


@pytest.mark.parametrize("text", RIGHT_SAMPLES.values(), ids=RIGHT_SAMPLES)
def test_right_samples(tmp_path: Path, text: str) -> None:
    """What a batch can hold is taken."""
    save(tmp_path)
    train_set, _ = with_sample(tmp_path, text)["load"]("digits", tmp_path)
    images, labels = train_set[[3, 13]]
    assert (images.shape, str(images.dtype), labels.tolist()) == ((2, 1, 28, 28), "torch.float32", [3, 3])


def test_file_that_stays_open(tmp_path: Path) -> None:
    """What sample() opens and keeps is not open in the data set: loader workers would inherit it, with its place."""
    save(tmp_path)
    opened = "setattr(self, 'file', open('/dev/null')) or (torch.rand(1, 28, 28), 3)"
    for part in with_sample(tmp_path, opened)["load"]("digits", tmp_path):
        assert not hasattr(part, "file")
        part[[0]]
        part.file.close()


def test_ignored() -> None:
    """A mask with 255 is refused with a line that says how to leave these pixels out, and then taken, but no 254."""
    import torch

    from common import data

    words = (0, (3, 2, 2), (2, 2), 3)
    for kind in (torch.uint8, torch.uint16):  # of the latter PyTorch has no min()
        image, mask = torch.rand(3, 2, 2), torch.tensor([[0, 2], [255, 255]], dtype=kind)
        with pytest.raises(data.DataError, match=r"0 to 255 .*expected whole numbers from 0 to 2, .*ignored=255"):
            data.checked((image, mask), *words)
        assert data.checked((image, mask), *words, ignored=255)[1].tolist() == mask.tolist()
    mask[0, 0] = 254
    with pytest.raises(data.DataError, match=r"2 to 255 "):
        data.checked((image, mask), *words, ignored=255)


BATCHES = {
    "without channel": ("self.images[indices].astype('float32'), self.labels[indices]", "(1, 28, 28)"),
    "0 to 255": ("self.images[indices][..., None], self.labels[indices]", "uint8"),
    "NaN": ("self.images[indices][..., None] * np.float32('nan'), self.labels[indices]", "sample 0"),
    "label above": ("self.images[indices][..., None] / np.float32(255), self.labels[indices] + 10", "sample 0"),
    "label as a float": ("self.images[indices][..., None] / np.float32(255), self.labels[indices] / 1", "float64"),
}


@pytest.mark.parametrize(("text", "says"), BATCHES.values(), ids=BATCHES)
def test_batches_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    """The same for what batch() of horovod_tensorflow returns."""
    monkeypatch.syspath_prepend(str(TENSORFLOW))
    old = 'images, self.labels[indices].astype("int64")'
    (tmp_path / "own_data.py").write_text((TENSORFLOW / "own_data.py").read_text())
    edits.edit(tmp_path / "own_data.py", old, text)
    save(tmp_path)
    refused(runpy.run_path(str(tmp_path / "own_data.py")), tmp_path, "batch([0]...) returns", says)


IDX = {"labels up to 26": ("labels-idx1-ubyte", 8, 26), "without a pixel": ("images-idx3-ubyte", 16, 0)}


@pytest.mark.parametrize(("says", "place"), IDX.items())
@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("reader", ["torch", "numpy"])
def test_idx_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, part: str, says: str, place: tuple[str, int, int]
) -> None:
    """Files in MNIST's format with letters as labels, or full of zeros, are refused, by both readers."""
    monkeypatch.syspath_prepend(str(TENSORFLOW))
    data = __import__("numpy_data") if reader == "numpy" else __import__("common.data", fromlist=["load"])
    name, start, value = place
    path = samples.write_data(tmp_path, "mnist") / f"{part}-{name}"
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes([value]) * (len(content) - start))
    with pytest.raises(data.DataError, match=rf"MNIST/raw have .*{says}.*: remove that folder, then run: python"):
        data.load("mnist", str(tmp_path))


@pytest.mark.parametrize("reader", ["torch", "numpy"])
@pytest.mark.parametrize("kind", [0x0D, 0x0B, 0x09, 0x00])
def test_idx_files_of_another_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, kind: int) -> None:
    """Labels in MNIST's format, but as floats, shorts or signed bytes, are no traceback, and not taken for bytes."""
    monkeypatch.syspath_prepend(str(TENSORFLOW))
    data = __import__("numpy_data") if reader == "numpy" else __import__("common.data", fromlist=["load"])
    path = samples.write_data(tmp_path, "mnist") / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[2] = kind
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=r"MNIST/raw .*: remove (it|that folder), then run: python"):
        data.load("mnist", str(tmp_path))


BAD_SAMPLE = "(torch.rand(28, 28), 3) if index == 11 and len(self) > 400 else (torch.rand(1, 28, 28), 3)"


@pytest.mark.runs("one")
@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
def test_sample_in_training(example: str, folder: Path) -> None:
    """A sample that is wrong within an epoch, read by a loader worker: one line, no traceback, no checkpoint."""
    from tests.test_recipes import make_it_yours

    make_it_yours(folder)
    edits.edit(folder / "own_data.py", SAMPLE, f"        return {BAD_SAMPLE}\n")
    run = runs.start(example, folder, 2).wait(leaves=30)
    refusals.assert_refused(
        run, LAUNCHERS[example].status_after_bad_input, "own_data.py: sample(11) returns", "(28, 28)"
    )
    assert not list(folder.glob("output/checkpoint*"))


@pytest.mark.runs("one")
@pytest.mark.only("ddp_spawn")
def test_divided_by_each_process(example: str, folder: Path) -> None:
    """Processes that shuffle the data each in its own way are refused, since some samples would never be read."""
    from tests.test_recipes import make_it_yours

    make_it_yours(folder)
    shuffled = "torch.utils.data.Subset(train_set, random.sample(range(len(train_set)), len(train_set))), test_set"
    last = "    return train_set, test_set\n"
    edits.edit(folder / "own_data.py", last, f"    import random\n    return {shuffled}\n")
    run = runs.start(example, folder, 2).wait()
    says = ("rank 1 has other training samples than rank 0", "seed what divides", "ALLOW_OTHER_DATA=1")
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *says)
    assert not (folder / "output").exists() or not list(folder.glob("output/*.pt"))


@pytest.mark.runs("weekly")
@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
def test_killed_beside_its_workers(example: str, folder: Path) -> None:
    """A process is killed whose loader workers read the user's data: the run ends within 60 s, and so do they.

    A worker that goes on holds the output of the run open, and horovodrun waits for its end.
    """
    from tests.test_recipes import make_it_yours

    make_it_yours(folder)
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_epoch(1)
    os.kill(min(set(run.workers()) - {run.process.pid}), signal.SIGKILL)
    run.wait(60, leaves=30)
    assert run.status != 0 and "finished" not in run.stdout
