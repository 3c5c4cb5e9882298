"""What enters torchrun_vision: the files that are listed, the images in them, weights and models of others.

Nothing is started here but in one test: the modules' functions are called in the process of pytest.
"""

import io
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from harness import outputs, runs

if TYPE_CHECKING:  # tests of other examples read this file, too, and shall not import it
    import numpy as np

pytestmark = pytest.mark.only("torchrun_vision")


@pytest.fixture
def image_files(shipped: Path) -> ModuleType:
    return outputs.import_file(shipped / "image_files.py")


@pytest.fixture
def classifiers(shipped: Path) -> ModuleType:
    return outputs.import_file(shipped / "classifiers.py")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two classes: three files of each in train/, two in val/; the content of each is its path."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 3), ("val", 2)):
        for name in "ab":
            for number in range(1, count + 1):
                put(Path("data", part, name, f"{number}.png"))
    return Path("data")


def put(path: Path, content: bytes | None = None) -> None:
    """Write a file, and the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.fsencode(path) if content is None else content)


def contents(dataset: Any) -> list[tuple[bytes, int, bytes]]:
    """Return the path, the label and the content of each file of a set, in its order."""
    found = []
    for path, label, offset, size in zip(dataset.paths, dataset.labels, dataset.offsets, dataset.sizes, strict=True):
        if isinstance(dataset.source, Path):
            content = (dataset.source / os.fsdecode(path)).read_bytes()
        else:
            content = os.pread(dataset.source[1][offset >> 48], int(size), int(offset % 2**48))
        found.append((bytes(path), int(label), content))
    return found


def make_tar(path: str, *words: object) -> Path:
    """Make a tar with GNU tar."""
    subprocess.run(["tar", "-cf", path, *map(str, words)], check=True, stderr=subprocess.DEVNULL, timeout=300)
    return Path(path)


def load(image_files: Any, path: Path) -> tuple[Any, Any, list[str]]:
    """Load a data set without torchrun: a tar is read where it is."""
    image_files.stage = lambda path: os.open(path, os.O_RDONLY)
    return image_files.load(path, 32)


def link(path: Path, target: str) -> None:
    """Put a symbolic link in the place of a file, or where there is none."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def links_inside(data: Path) -> None:
    for path in sorted(data.glob("*/*/2.png")):
        put(data / "pool" / path.relative_to(data), path.read_bytes())
        link(path, f"../../pool/{path.relative_to(data)}")


def hard_links(data: Path) -> None:
    for path in sorted(data.glob("*/*/2.png")):
        os.link(path, path.with_name("9.png"))


def chain_of_links(data: Path) -> None:
    link(data / "train/a/7.png", "8.png")
    link(data / "train/a/8.png", "../b/1.png")


def linked_class(data: Path) -> None:
    (data / "train/b").rename(data / "elsewhere")
    (data / "train/b").symlink_to("../elsewhere")


def linked_part(data: Path) -> None:
    (data / "train").rename(data / "first")
    (data / "train").symlink_to("first")


def hidden(*names: str) -> Callable[[Path], None]:
    """Return what puts these hidden files into a folder of images."""

    def change(data: Path) -> None:
        for name in names:
            put(data / name, b"\0\x05\x16\x07")

    return change


def two_forms(data: Path) -> None:
    """Have one class under both Unicode forms of its name in train/, and under the second one in val/."""
    (data / "train/a").rename(data / "train/\u00e9t\u00e9")
    put(data / "train/e\u0301te\u0301/9.png")
    (data / "val/a").rename(data / "val/e\u0301te\u0301")


def other_endings(data: Path) -> None:
    for name in ("4.JPG", "5.jpeg", "6.WebP", "7.tif", "8.tif", "9.bmp", "notes", "Thumbs.db"):
        put(data / "train/a" / name)


LISTED = {  # what is done to the folder: images in train/ and in val/, what the line says of what was left out
    "plain": (lambda data: None, 6, 4, ""),
    "links inside": (links_inside, 6, 4, ""),
    "hard links": (hard_links, 8, 6, ""),
    "chain of links": (chain_of_links, 8, 4, ""),
    "linked class": (linked_class, 6, 4, ""),
    "linked part": (linked_part, 6, 4, ""),
    "val is train": (lambda data: (shutil.rmtree(data / "val"), link(data / "val", "train")), 6, 6, ""),
    "loop": (lambda data: link(data / "train/a/again", "."), 6, 4, "1 linked twice (such as train/a/again/)"),
    "loop to the class": (lambda data: link(data / "train/a/x", "../a"), 6, 4, "1 linked twice (such as train/a/x/)"),
    "loop to the part": (lambda data: link(data / "train/a/up", ".."), 6, 4, "1 linked twice (such as train/a/up/)"),
    "loop to the top": (lambda data: link(data / "train/a/up", "../.."), 6, 4, "1 linked twice (such as train/a/up/)"),
    "link to a class": (lambda data: link(data / "train/a/b", "../b"), 6, 4, "1 linked twice (such as train/a/b/)"),
    "notebook": (hidden(*(f"{p}/.ipynb_checkpoints/1.png" for p in ("train", "val"))), 6, 4, "2 hidden"),
    "notebook in a class": (hidden("train/a/.ipynb_checkpoints/1.png"), 6, 4, "1 hidden"),
    "empty notebook": (lambda data: (data / "train/.ipynb_checkpoints").mkdir(), 6, 4, "1 hidden"),
    "mac": (hidden(*(f"train/a/._{i}.png" for i in range(50))), 6, 4, "50 hidden (such as train/a/._0.png)"),
    "mac, beside folders": (hidden("._train", "train/._a", "val/.DS_Store"), 6, 4, "3 hidden"),
    "archive of a mac": (hidden("__MACOSX/train/a/._1.png"), 6, 4, "1 hidden (such as __MACOSX)"),
    "trash": (hidden("train/.Trash-1000/files/1.png", "val/#recycle/1.png"), 6, 4, "2 hidden"),
    "thumbnails": (hidden("train/a/@eaDir/1.png/SYNO_THUMB.jpg"), 6, 4, "1 hidden (such as train/a/@eaDir)"),
    "emacs": (lambda data: link(data / "train/a/.#1.png", "me@login.1:2"), 6, 4, "1 hidden"),
    "git": (hidden(".git/train/a/1.png"), 6, 4, "1 hidden (such as .git)"),
    "endings": (
        other_endings,
        9,
        4,
        "2 .tif (such as train/a/7.tif), 1 without an ending (such as train/a/notes), 1 .db",
    ),
    "no class": (lambda data: put(data / "train/1.png"), 6, 4, "1 in no folder of a class (such as train/1.png)"),
    "nested": (lambda data: put(data / "train/a/x/y/1.png"), 7, 4, ""),
    "pipe": (lambda data: os.mkfifo(data / "train/a/4.png"), 6, 4, "1 no file (such as train/a/4.png)"),
    "two forms": (two_forms, 7, 4, ""),
    "no text": (lambda data: put(data / os.fsdecode(b"train/a/\xff.png")), 7, 4, ""),
    "end of line": (lambda data: put(data / "train/a/x\ny.txt"), 6, 4, r"1 .txt (such as train/a/x\ny.txt)"),
    "class named train": (lambda data: [put(data / p / "train/1.png") for p in ("train", "val")], 7, 5, ""),
    "other folders": (lambda data: [put(data / "test/a/1.png"), put(data / "README.md")], 6, 4, ""),
}


@pytest.mark.parametrize("case", LISTED)
def test_listed(
    example: str, image_files: ModuleType, data: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """The same images, in the same order, and the same line of what was left out: from a folder and a tar of it."""
    change, train, val, left_out = LISTED[case]
    change(data)
    found = []
    for path in (data, make_tar("data.tar", "data"), make_tar("top.tar", "-C", "data", ".")):
        *sets, classes = load(image_files, path)
        assert [len(part) for part in sets] == [train, val] and len(classes) == 2 + (case == "class named train")
        found.append((contents(sets[0]), contents(sets[1]), classes))
        printed = capsys.readouterr().out
        assert printed.count("\n") == bool(left_out) and left_out in printed, printed
        assert not left_out or f"{train} images of {len(classes)} classes; left out: {left_out}" in printed, printed
    assert found[0] == found[1] == found[2]


def remove_val(data: Path) -> None:
    (data / "val").rename(data / "valid")


def one_level_more(data: Path) -> None:
    for part in ("train", "val"):
        (data / part).rename(data / "x")
        (data / part).mkdir()
        (data / "x").rename(data / part / "images")


def only_tif(data: Path) -> None:
    for path in data.glob("val/b/*.png"):
        path.rename(path.with_suffix(".tif"))


REFUSED = {  # what is done to the folder: what the one line says
    "broken link": (lambda data: link(data / "train/a/1.png", "/none/1.png"), ["one link leads to nothing, train/a/1"]),
    "broken links": (lambda data: [link(p, "gone") for p in data.glob("*/*/1.png")], ["4 links", "such as train/a/1"]),
    "broken class": (lambda data: link(data / "train/c", "/none/c"), ["one link leads to nothing, train/c"]),
    "link to itself": (lambda data: link(data / "val/a/7.png", "7.png"), ["one link leads to nothing, val/a/7.png"]),
    "two links, one loop": (
        lambda data: [link(data / "val/a/7.png", "8.png"), link(data / "val/a/8.png", "7.png")],
        ["2 links lead to nothing, such as val/a/7.png"],
    ),
    "one class": (lambda data: [shutil.rmtree(data / p / "b") for p in ("train", "val")], ["one class alone, a:"]),
    "one level more": (one_level_more, ["has one class alone, images:", "one level of folders too many"]),
    "empty class": (lambda data: (data / "train/c").mkdir(), ["/train has no image of the class c"]),
    "empty class in both": (lambda data: [(data / p / "c").mkdir() for p in ("train", "val")], ["the class c"]),
    "only in train": (lambda data: put(data / "train/c/1.png"), ["/val has no image of the class c"]),
    "only in val": (lambda data: [put(data / f"val/{n}/1.png") for n in "cd"], ["/train", "2 classes, such as c"]),
    "other name": (remove_val, ["/val is not a folder CLASS/*.jpg", "it has train, valid"]),
    "other case": (lambda data: (data / "val/b").rename(data / "val/B"), ["/train has no image of the class B"]),
    "only .tif": (only_tif, ["/val has no image of the class b", "left out: 2 .tif (such as val/b/1.tif)"]),
    "no folders": (lambda data: [p.rename(data / f"train/{p.name}x.jpg") for p in data.glob("train/?")], ["train"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(example: str, image_files: ModuleType, data: Path, case: str) -> None:
    """What cannot be right is one line, from a folder and from a tar of it."""
    change, texts = REFUSED[case]
    change(data)
    for path in (data, make_tar("data.tar", "data")):
        assert_one_line(image_files, lambda path=path: load(image_files, path), str(path), *texts)


def assert_one_line(image_files: ModuleType, call: Callable[[], object], *texts: str) -> None:
    """Check that a call raises DataError, with a message of one line that has these texts."""
    with pytest.raises(image_files.DataError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message and all(text in message for text in texts), message


def png(depth: int, colours: int, values: "np.ndarray") -> bytes:
    """Return a PNG of values (H, W, channels)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = values.shape
    lines = b"".join(b"\0" + line.astype(">u2" if depth == 16 else "u1").tobytes() for line in values)
    head = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def pixels(channels: int, depth: int = 8) -> "np.ndarray":
    """Return random pixels (6, 8, channels), the smallest and the largest value among them."""
    import numpy as np

    values = np.random.default_rng(0).integers(0, 2**depth, (6, 8, channels))
    values[0, 0], values[0, 1] = 0, 2**depth - 1
    return values


def saved(mode: str, form: str, **words: object) -> bytes:
    """Return the content of a file that Pillow has written of the same colours in a mode."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(pixels(3).astype(np.uint8)).convert(mode)
    words |= {"append_images": [image.transpose(Image.Transpose.ROTATE_180)]} if "save_all" in words else {}
    with io.BytesIO() as file:
        image.save(file, form, **words)
        return file.getvalue()


def eighth(values: "np.ndarray") -> "np.ndarray":
    """Return 16 bits scaled to 8."""
    import numpy as np

    return np.round(values / 257)


TURNED = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0\0\0\0\0"
IMAGES = {  # the content of a file: what its pixels (6, 8, 3) are
    "16 bits, grey": (lambda: png(16, 0, pixels(1, 16)), lambda: eighth(pixels(1, 16)).repeat(3, 2)),
    "16 bits, colours": (lambda: png(16, 2, pixels(3, 16)), lambda: eighth(pixels(3, 16))),
    "16 bits, grey, alpha": (lambda: png(16, 4, pixels(2, 16)), lambda: eighth(pixels(2, 16))[..., :1].repeat(3, 2)),
    "16 bits, colours, alpha": (lambda: png(16, 6, pixels(4, 16)), lambda: eighth(pixels(4, 16))[..., :3]),
    "8 bits, grey": (lambda: png(8, 0, pixels(1)), lambda: pixels(1).repeat(3, 2)),
    "8 bits, colours, alpha": (lambda: png(8, 6, pixels(4)), lambda: pixels(4)[..., :3]),
    "one colour, opaque": (lambda: png(8, 6, pixels(4) * 0 + 255), lambda: pixels(3) * 0 + 255),
    "1 bit": (lambda: saved("1", "PNG"), None),
    "palette": (lambda: saved("P", "PNG"), None),
    "palette, one transparent": (lambda: saved("P", "PNG", transparency=3), None),
    "CMYK": (lambda: saved("CMYK", "JPEG"), None),
    "grey JPEG": (lambda: saved("L", "JPEG"), None),
    "WebP": (lambda: saved("RGB", "WEBP", lossless=True), None),
    "GIF": (lambda: saved("P", "GIF"), None),
    "two pictures of a camera": (lambda: saved("RGB", "MPO", save_all=True), None),
    "upside down": (lambda: saved("RGB", "PNG", exif=TURNED), lambda: pixels(3)[::-1, ::-1]),
}


@pytest.mark.parametrize("case", IMAGES)
def test_decoded(example: str, image_files: ModuleType, case: str) -> None:
    """An image is (3, H, W), uint8, with the right values, which for 8 bits are Pillow's; 16 bits are scaled."""
    import numpy as np
    from PIL import Image

    make, right = IMAGES[case]
    content = make()
    image = image_files.decode(content)
    assert image.shape == (3, 6, 8) and str(image.dtype) == "torch.uint8"
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) if right is None else right()
    # Pillow cuts the lower 8 of 16 bits of a colour off, which is another number by up to 1.
    exact = right and "colours" not in case and case != "16 bits, grey, alpha"
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).max() <= (0 if exact else 1)


NO_IMAGES = {  # the content of a file: what the line says
    "empty": (lambda: b"", "it is empty"),
    "text": (lambda: b"no image", "it cannot be decoded"),
    "Git LFS": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n", "git lfs pull"),
    "web page": (lambda: b"\n<!DOCTYPE html><html>404</html>", "it is a web page"),
    "macOS": (lambda: b"\0\x05\x16\x07\0\x02\0\0Mac OS X", "it is a companion file of macOS"),
    "BMP": (lambda: saved("RGB", "BMP"), "it is a BMP file"),
    "TIFF": (lambda: saved("RGB", "TIFF"), "it is a TIFF file"),
    "JPEG 2000": (lambda: saved("RGB", "JPEG2000"), "it is a JPEG 2000 file"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0", "it is an AVIF or HEIC file"),
    "animated GIF": (lambda: saved("P", "GIF", save_all=True), "it has several frames"),
    "animated WebP": (lambda: saved("RGB", "WEBP", save_all=True), "it has several frames"),
    "cut JPEG": (lambda: saved("RGB", "JPEG")[:-40], "it cannot be decoded"),
    "cut PNG": (lambda: saved("RGB", "PNG")[:100], "it cannot be decoded"),
    "transparency": (lambda: png(8, 6, pixels(4) * [0, 0, 0, 1]), "of one colour: magick mogrify"),
    "pixel missing": (lambda: png(16, 0, pixels(1, 16))[:60], "it cannot be decoded"),
}


def test_not_decoded(example: str, image_files: ModuleType, data: Path, shipped: Path) -> None:
    """What is no image ends a run with one line that has its path and what it is; one command names all of them."""
    for number, (make, _) in enumerate(NO_IMAGES.values()):
        put(data / f"train/a/0{number:02}.png", make())
    train, _, _ = load(image_files, data)
    for index, (_, text) in enumerate(NO_IMAGES.values()):
        path = f"data/train/a/0{index:02}.png is damaged ("
        assert_one_line(image_files, lambda index=index: train[index], path, text, "image_files.py data names all")
    for path in sorted(data.glob("*/*/?.png")):
        put(path, png(16, 0, pixels(1, 16)))
    run = runs.Run([sys.executable, str(shipped / "image_files.py"), "data"], Path.cwd()).wait()
    lines = run.stdout.splitlines()
    assert run.status == 1 and lines[-1] == f"{10 + len(NO_IMAGES)} images, {len(NO_IMAGES)} of them damaged"
    assert [line.split(" is damaged (")[0] for line in lines[:-1]] == [
        f"data/train/a/0{number:02}.png" for number in range(len(NO_IMAGES))
    ]


def small_model(classes: int = 6) -> Any:
    from torch import nn

    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


def prefixed(prefix: str) -> Callable[[dict], dict]:
    return lambda weights: {prefix + key: weight for key, weight in weights.items()}


WEIGHTS = {  # how the weights of small_model() are kept in a file
    "plain": lambda weights: weights,
    "module": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "both": prefixed("module._orig_mod."),
    "both, the other way": prefixed("_orig_mod.module."),
    "lightning": lambda weights: {"state_dict": prefixed("model.")(weights), "epoch": 3, "global_step": 4},
    "state_dict": lambda weights: {"state_dict": prefixed("module.")(weights), "best_acc1": 0.5},
    "model": lambda weights: {"model": weights, "optimizer": {"state": {}}, "model_ema": {}},
    "our checkpoint": lambda weights: {"model": weights, "optimizer": {}, "scaler": {}, "progress": {"step": 3}},
    "half precision": lambda weights: {key: w.half() if w.is_floating_point() else w for key, w in weights.items()},
    "no count": lambda weights: {key: w for key, w in weights.items() if "num_batches" not in key},
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_in_another_form(example: str, classifiers: ModuleType, tmp_path: Path, case: str) -> None:
    """--weights takes what others write around a state dict, and our own checkpoint.pt; the values are the file's."""
    import torch

    weights = {key: w.half().float() if w.is_floating_point() else w for key, w in small_model().state_dict().items()}
    torch.save(WEIGHTS[case](weights), tmp_path / "weights.pth")
    model = small_model()
    classifiers.load_weights(model, "small", tmp_path / "weights.pth")
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())


def norms() -> dict[str, Callable[[], Any]]:
    """Return layers with running statistics."""
    from torch import nn

    return {
        "BatchNorm2d": lambda: nn.BatchNorm2d(4),
        "BatchNorm1d": lambda: nn.BatchNorm1d(4),
        "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
        "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        "momentum None": lambda: nn.BatchNorm2d(4, momentum=None),
        "fp64": lambda: nn.BatchNorm2d(4).double(),
        "subclass": lambda: type("Own", (nn.BatchNorm2d,), {})(4),
        "without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    }


def test_only_statistics_are_averaged(example: str, classifiers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics become the mean of all processes', to the bit; another buffer that of rank 0, never a mean."""
    import torch
    from torch import nn

    sent = []
    monkeypatch.setattr(classifiers.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(classifiers.dist, "all_reduce", lambda flat: (sent.append(len(flat)), flat.mul_(3)))
    monkeypatch.setattr(classifiers.dist, "broadcast", lambda flat, source: sent.append(len(flat)))
    for name, make in norms().items():
        model = nn.Sequential(make(), nn.Linear(2, 2))
        least = torch.finfo(torch.float32).min
        model[1].register_buffer("mask", torch.full((5, 5), least).triu(1))
        model[1].register_buffer("places", torch.arange(4))
        model[1].register_buffer("not_there", None)
        mean = torch.arange(4.0)
        if model[0].running_mean is not None:
            model[0].running_mean.copy_(mean)
        classifiers.average_statistics(model)
        assert torch.equal(model[1].mask, torch.full((5, 5), least).triu(1)), name
        assert torch.equal(model[1].places, torch.arange(4)), name
        if model[0].running_mean is not None:
            assert torch.equal(model[0].running_mean.float(), mean * 3 / 2), name
            assert torch.equal(model[0].running_var.float(), torch.full((4,), 1.5)), name
        assert sent == ([25] if name == "without statistics" else [8, 25]), name
        sent.clear()
    monkeypatch.setattr(classifiers.dist, "get_world_size", lambda: 1)
    classifiers.average_statistics(nn.BatchNorm2d(4))
    assert not sent
