"""What only torchrun_vision promises: odd folders, odd and damaged files, weights, top-5 accuracy, predictions."""

import csv
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from harness import outputs, runs
from harness.runs import Reference
from tests import refusals

pytestmark = pytest.mark.only("torchrun_vision")


@pytest.fixture
def image_files(shipped: Path) -> ModuleType:
    return outputs.import_file(shipped / "image_files.py")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two classes: three files of each in train/, two in val/."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 3), ("val", 2)):
        for name in "ab":
            for number in range(1, count + 1):
                put(Path("data", part, name, f"{number}.png"))
    return Path("data")


def put(path: Path, content: bytes = b"") -> None:
    """Write a file, and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def two_forms(data: Path) -> None:
    """Have one class under both Unicode forms of its name in train/, and under the second one in val/."""
    (data / "train/a").rename(data / "train/\u00e9t\u00e9")
    put(data / "train/e\u0301te\u0301/9.png")
    (data / "val/a").rename(data / "val/e\u0301te\u0301")


def linked_class(data: Path) -> None:
    (data / "train/b").rename(data / "elsewhere")
    (data / "train/b").symlink_to("../elsewhere")


LISTED: dict[str, tuple[Callable[[Path], Any], int, int, str]] = {  # a change: images in train/, in val/, the line
    "plain": (lambda data: None, 6, 4, ""),
    "endings": (lambda data: [put(data / "train/a" / n) for n in ("4.JPG", "5.WebP", "7.tif")], 8, 4, "train/a/7.tif"),
    "nested": (lambda data: put(data / "train/a/x/y/1.png"), 7, 4, ""),
    "linked class": (linked_class, 6, 4, ""),
    "link to a folder above": (lambda data: (data / "train/a/up").symlink_to(".."), 6, 4, "train/a/up/"),
    "notebook": (lambda data: put(data / "train/.ipynb_checkpoints/1.png"), 6, 4, ""),
    "hidden in a class": (lambda data: [put(data / "val/a" / n) for n in ("._1.png", "@eaDir/1.png")], 6, 4, "2 files"),
    "no class": (lambda data: put(data / "train/1.png"), 6, 4, ""),
    "two forms": (two_forms, 7, 4, ""),
    "no text": (lambda data: put(data / os.fsdecode(b"train/a/\xff.png")), 7, 4, ""),
}


@pytest.mark.parametrize("case", LISTED)
def test_listed(
    example: str, image_files: ModuleType, data: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """Hidden names, other endings and loops of links are left out, and one line says so; a class is a class."""
    change, train, val, says = LISTED[case]
    change(data)
    train_set, test_set = image_files.load(data, 32, 0)
    assert (len(train_set), len(test_set), len(train_set.classes)) == (train, val, 2)
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(says) and says in printed, printed


REFUSED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {  # a change: what the one line says
    "no folder": (shutil.rmtree, ["data/train", "make_images.py"]),
    "other name": (lambda data: (data / "val").rename(data / "valid"), ["data/val", "train/CLASS/*.jpg"]),
    "one class": (lambda data: [shutil.rmtree(data / p / "b") for p in ("train", "val")], ["only one class"]),
    "empty class": (lambda data: (data / "train/c").mkdir(), ["Found no valid file", " c."]),
    "only in train": (lambda data: put(data / "train/c/1.png"), ["only one part has the class c"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(example: str, image_files: ModuleType, data: Path, case: str) -> None:
    """A folder that cannot be right is one line."""
    change, texts = REFUSED[case]
    change(data)
    with pytest.raises(image_files.DataError) as raised:
        image_files.load(data, 32, 0)
    assert "\n" not in str(raised.value) and all(text in str(raised.value) for text in texts), raised.value


def pixels(mode: str) -> Any:
    """Return an image (6, 8) of Pillow in a mode, with random colours."""
    import numpy as np
    from PIL import Image

    if mode == "I;16":
        return Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (6, 8)).astype("uint16"))
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype("uint8")).convert(mode)


FILES = {"1": "png", "L": "jpg", "P": "png", "RGBA": "png", "I;16": "png", "RGB": "webp"}


@pytest.mark.parametrize("mode", FILES)
def test_read(example: str, image_files: ModuleType, tmp_path: Path, mode: str) -> None:
    """An image of any kind is (3, H, W), uint8, with Pillow's values; of 16 bits the upper 8 count."""
    import numpy as np
    from PIL import Image

    path = tmp_path / f"1.{FILES[mode]}"
    pixels(mode).save(path, **({"lossless": True} if mode == "RGB" else {}))
    image = image_files.load_image(str(path))
    assert image.shape == (3, 6, 8) and image.dtype == torch.uint8
    if mode == "I;16":
        expected = np.asarray(pixels(mode))[..., None] // 256
    else:
        expected = np.asarray(Image.open(path).convert("RGB"))
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected.astype(int)).max() <= 1


def test_upright(example: str, image_files: ModuleType, tmp_path: Path) -> None:
    """A photograph that its camera has turned is read as it is seen."""
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    pixels("RGB").save(tmp_path / "turned.png", exif=exif)
    pixels("RGB").save(tmp_path / "plain.png")
    turned, plain = (image_files.load_image(str(tmp_path / f"{name}.png")) for name in ("turned", "plain"))
    assert torch.equal(turned, plain.flip(1, 2))


def test_damaged_image(example: str, folder: Path) -> None:
    """A damaged file that a loader worker meets ends the run with one line; a command names all of them."""
    damaged = [Path("images", part, "six", "007.png") for part in ("train", "val")]
    (folder / damaged[1]).write_bytes(b"not an image")
    run = runs.start(example, folder, 2, "--epochs", 1).wait()
    lines = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert run.status == 1 and len(lines) == 1, run.stderr  # beside it the other process says that it lost this one
    assert "images/val/six/007.png is damaged (Unsupported image file): replace or remove it" in lines[0]
    (folder / damaged[0]).write_bytes((folder / damaged[0]).read_bytes()[:60])
    found = runs.Run([sys.executable, "image_files.py", "images"], folder).wait().stdout.splitlines()
    assert [line.split(" is damaged")[0] for line in found] == list(map(str, damaged))


@pytest.mark.runs("full")
def test_weights(example: str, folder: Path, reference: Reference, image_files: ModuleType) -> None:
    """--weights takes a state dict, also of other classes; what is none, or another model's, is one line."""
    from torchvision import models

    weights = reference.output / "model.pt"
    found = torch.load(weights, weights_only=True)
    for classes in (6, 9):
        model = models.get_model("resnet18", num_classes=classes)
        image_files.load_weights(model, weights)
        same = [name for name, weight in model.state_dict().items() if torch.equal(weight, found[name])]
        assert len(found) - len(same) == (0 if classes == 6 else 2)
    script = "__import__('runpy').run_path('train.py', run_name='__main__')"
    shutil.copy(weights, folder / "weights.pt")
    texts = {
        "--weights train.py": ["--weights train.py is no state dict"],
        "--weights none.pt": ["--weights none.pt", "No such file"],
        "--weights weights.pt --model resnet50": ["--weights weights.pt does not fit --model"],
    }
    refusals.assert_calls_refused(folder, {(script, words): expected for words, expected in texts.items()})


def test_exact_metrics_and_predictions(
    example: str, folder: Path, reference: Reference, image_files: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test loss, top-1 and top-5 accuracy are those of model.pt, computed here; predict.py has each image once."""
    from torchvision import models

    monkeypatch.chdir(folder)
    _, test_set = image_files.load("images", 32, 0)
    images, labels = (torch.stack(part) for part in zip(*[(i, torch.tensor(n)) for i, n in test_set], strict=True))
    model = models.get_model("resnet18", num_classes=6).eval()
    model.load_state_dict(outputs.read_model(reference.output))
    with torch.no_grad():
        logits = model(image_files.normalise(images, torch.float32))
    found = logits.topk(5).indices == labels[:, None]
    row = outputs.read_metrics(reference.output)[-1]
    assert row["test_accuracy"] == pytest.approx(found[:, 0].double().mean().item(), abs=1e-12)
    assert row["test_top5_accuracy"] == pytest.approx(found.sum().item() / 150, abs=1e-12)
    assert row["test_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)

    command = "torchrun --standalone --nproc-per-node=2 predict.py --images images/val/ --model-of"
    run = runs.Run([*command.split(), str(reference.output)], folder).wait()
    assert run.status == 0, run.stderr
    with open("predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [os.path.relpath(path, "images/val") for path, _ in test_set.samples]
    assert [row["class"] for row in rows] == [test_set.classes[n] for n in logits.argmax(1)]
    assert [float(row["probability"]) for row in rows] == pytest.approx(logits.softmax(1).max(1)[0].tolist(), rel=1e-4)
