"""What enters torchrun_vision: the files that are listed, the images in them, weights and models of others.

Nothing is started here but in one test: the modules' functions are called in the process of pytest.
"""

import argparse
import gzip
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import plumbing
from harness import edits, outputs, readme, runs
from harness.runs import Reference

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
def predict(shipped: Path) -> ModuleType:
    return outputs.import_file(shipped / "predict.py")


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


def absolute(data: Path) -> Path:
    return make_tar("x.tar", data.resolve())


def from_beside(data: Path) -> Path:
    Path("beside").mkdir()
    return make_tar("x.tar", "-P", "-C", "beside", "../data")


def below_train(data: Path) -> Path:
    Path("train").mkdir()
    shutil.move(data, "train/images")
    return make_tar("x.tar", "train")


def with_macosx(data: Path) -> Path:
    put(Path("__MACOSX/data/train/a/._1.png"))
    return make_tar("x.tar", "__MACOSX", "data")


def twice(data: Path) -> Path:
    path = make_tar("x.tar", "data")
    put(data / "train/a/1.png", b"new")
    subprocess.run(["tar", "-rf", path, data / "train/a/1.png"], check=True, timeout=300)
    return path


def with_pool(data: Path) -> Path:
    put(Path("pool/1.png"), b"pool")
    link(data / "train/a/1.png", "../../../pool/1.png")
    return make_tar("x.tar", "data", "pool")


def absolute_links(data: Path) -> Path:
    link(data / "train/a/1.png", str((data / "train/b/1.png").resolve()))
    return make_tar("x.tar", data.resolve())


def in_format(word: str) -> Callable[[Path], Path]:
    return lambda data: (put(data / f"train/a/{'n' * 90}/{'m' * 95}.png"), make_tar("x.tar", f"--format={word}", data))[
        1
    ]


def several(data: Path) -> Path:
    Path("tars").mkdir()
    make_tar("tars/a.tar", *data.glob("*/a"))
    make_tar("tars/b.tar", "-C", "data", "train/b", "val/b")
    put(Path("tars/._a.tar"))
    return Path("tars")


READ = {  # the tar that is made: images in train/, and the content of the first, or of none
    "absolute": (absolute, 6, None),
    "from beside": (from_beside, 6, None),
    "below train": (below_train, 6, None),
    "of a mac": (with_macosx, 6, None),
    "twice": (twice, 6, b"new"),
    "pool beside": (with_pool, 6, b"pool"),
    "absolute links": (absolute_links, 6, b"data/train/b/1.png"),
    "gnu": (in_format("gnu"), 7, None),
    "pax": (in_format("pax"), 7, None),
    "parts apart": (lambda data: make_tar("x.tar", "--transform=s,data/val,other/val,", "data"), 6, None),
    "several": (several, 6, None),
}


@pytest.mark.parametrize("case", READ)
def test_tars(example: str, image_files: ModuleType, data: Path, case: str) -> None:
    """However a tar was made, its images are read; of two members with one name the last counts, as when unpacked."""
    make, count, first = READ[case]
    train, val, classes = load(image_files, make(data))
    assert (len(train), len(val), classes) == (count, 4, ["a", "b"])
    assert contents(train)[0] == (b"train/a/1.png", 0, first or b"data/train/a/1.png")


def outside(data: Path) -> Path:
    for path in sorted(data.glob("train/*/2.png")):
        put(Path("pool", path), path.read_bytes())
        link(path, f"../../../pool/{path}")
    return make_tar("x.tar", "data")


def cut(size: int) -> Callable[[Path], Path]:
    """Return what makes a tar that ends after so many bytes of its members, or before the end by so many."""

    def make(data: Path) -> Path:
        path = make_tar("x.tar", "--blocking-factor=1", "data")
        path.write_bytes(path.read_bytes()[:size])
        return path

    return make


def joined(data: Path) -> Path:
    one, other = make_tar("1.tar", *data.glob("*/a")), make_tar("2.tar", *data.glob("*/b"))
    Path("x.tar").write_bytes(one.read_bytes() + other.read_bytes())
    return Path("x.tar")


def sparse(data: Path) -> Path:
    with open(data / "train/a/4.png", "wb") as file:
        file.truncate(2**20)
        file.seek(2**20)
        file.write(b"end")
    return make_tar("x.tar", "--sparse", "data")


def compressed(data: Path) -> Path:
    Path("x.tar").write_bytes(gzip.compress(make_tar("y.tar", "data").read_bytes()))
    return Path("x.tar")


def two_sets(data: Path) -> Path:
    shutil.copytree(data, "both/one")
    shutil.copytree(data, "both/other")
    return make_tar("x.tar", "both")


def of_nothing(data: Path) -> Path:
    put(Path("photos/a/1.png"))
    return make_tar("x.tar", "photos")


BAD_TARS = {  # the tar that is made: what the line says
    "links outside": (outside, ["2 links lead to nothing", "train/a/2.png", "tar --dereference"]),
    "cut in a file": (cut(7000), ["no complete tar"]),
    "cut between two files": (cut(-1024), ["no complete tar (its end is missing)"]),
    "joined": (joined, ["no complete tar (more follows behind its end"]),
    "sparse": (sparse, ["sparse files, such as data/train/a/4.png", "without --sparse"]),
    "compressed": (compressed, ["no complete tar", "without compression"]),
    "two data sets": (two_sets, ["another folder in it has train/a/1.png, too"]),
    "of nothing": (of_nothing, ["x.tar/train is not a folder CLASS/*.jpg", "it has photos"]),
    "empty file": (lambda data: (put(Path("x.tar"), b""), Path("x.tar"))[1], ["no complete tar"]),
}


@pytest.mark.parametrize("case", BAD_TARS)
def test_bad_tars(example: str, image_files: ModuleType, data: Path, case: str) -> None:
    """A tar that lacks images, or has them where they cannot be read, is one line."""
    make, texts = BAD_TARS[case]
    path = make(data)
    assert_one_line(image_files, lambda: load(image_files, path), "x.tar", *texts)


def test_folder_that_cannot_be_read(
    example: str, image_files: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that the user may not read is one line, not a class with fewer images."""
    (data / "train/a/more").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry]:
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read all of them
    assert_one_line(image_files, lambda: load(image_files, data), "data/train/a/more", "Permission denied")


def test_no_look_at_each_file(
    example: str, image_files: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is no link only folders cost a call of `stat`: there may be a million files."""
    seen, stat = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **words: (seen.append(str(path)), stat(path, **words))[1])
    load(image_files, data)
    assert not [path for path in seen if path.endswith(".png")] and "data/train/a" in seen


@pytest.mark.parametrize("case", [name for name in LISTED if name not in ("no class", "git", "archive of a mac")])
def test_listed_by_predict(example: str, image_files: ModuleType, data: Path, case: str) -> None:
    """predict.py finds the images of a part that train.py finds, and says the same of what was left out."""
    change, count, _, left_out = LISTED[case]
    change(data)
    paths, text = image_files.find_images(data / "train")
    assert sorted(f"train/{path}" for path in paths) == sorted(
        os.fsdecode(path) for path in load(image_files, data)[0].paths
    )
    assert len(paths) == count and bool(text) <= bool(left_out)


def folder_of_tars(data: Path) -> Path:
    Path("tars").mkdir()
    make_tar("tars/1.tar", "data/train/a", "data/val")
    make_tar("tars/2.tar", "data/train/b")
    return Path("tars")


def with_more(data: Path) -> Path:
    put(data / "train/a/notes.txt")
    put(data / "train/a/.hidden.png")
    link(data / "val/b/7.png", "1.png")
    return make_tar("data.tar", data)


# What is listed, made of the folder `data`.
SHARED: dict[str, Callable[[Path], Path]] = {
    "a folder": lambda data: data,
    "a tar": lambda data: make_tar("data.tar", data),
    "a folder of tars": folder_of_tars,
    "a tar of what is left out, too": with_more,
    "a link to a folder": lambda data: data.rename("other") and (link(data, "other"), data)[1],
    "without val": lambda data: shutil.rmtree(data / "val") or data,
    "a tar that was cut": lambda data: cut(4000)(data),
    "nothing": lambda data: Path("nothing"),
}


@pytest.mark.parametrize("case", SHARED)
def test_listed_by_rank_0_alone(
    example: str, image_files: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """All other processes read no folder and no head of a tar, have the same images, and raise the same error."""
    path, reads, sent = SHARED[case](data), [], []

    class Rank(argparse.Namespace):
        """In the place of torch.distributed, in the process of this number: what rank 0 sends is kept for the other."""

        def broadcast_object_list(self, values: list, group: object) -> None:
            if self.get_rank() == 0:
                sent.append(values[0])
            values[0] = sent[-1]

    def count(name: str) -> Callable:
        function = getattr(os, name)
        return lambda *words: reads.append((name, *words)) or function(*words)

    monkeypatch.setattr(image_files, "stage", image_files.open_in_place)
    monkeypatch.setattr(image_files, "os", argparse.Namespace(**vars(os)))
    for name in ("scandir", "dup", "listdir", "pread"):  # read_tree takes a copy of the descriptor
        monkeypatch.setattr(image_files.os, name, count(name))
    found: list[Any] = []
    for number in range(2):
        dist = Rank(is_initialized=lambda: True, get_rank=lambda number=number: number)
        dist.destroy_process_group = lambda _: None
        monkeypatch.setattr(image_files, "dist", dist)
        monkeypatch.setattr(image_files, "patient_group", lambda: "the group of rank 0 and the other")
        reads.clear()
        try:
            *sets, names = image_files.load(path, 32)
            found.append(([contents(part) for part in sets], names))
        except image_files.DataError as error:
            found.append(str(error))
        assert bool(reads) == (number == 0 and case != "nothing"), reads
    assert found[0] == found[1] and (not isinstance(found[0], str) or path.name in found[0])
    assert case != "nothing" or "python make_images.py" in found[0]


def test_another_tar_on_another_node(example: str, image_files: Any, data: Path) -> None:
    """A file that is not the one in which rank 0 has looked is refused: its images would be others, or damaged."""
    for path in (make_tar("data.tar", data), folder_of_tars(data)):
        image_files.stage = image_files.open_in_place
        source = image_files.open_source(path, image_files.open_in_place)
        names, parts, sizes, left_out = image_files.list_parts(path, source)
        image_files.from_rank_0 = lambda _: (names, parts, sizes, left_out)  # noqa: B023 (called at once)
        assert image_files.load(path, 32)[2] == ["a", "b"]
        put(data / "train/b/4.png", bytes(20_000))
        make_tar("data.tar" if path.is_file() else "tars/2.tar", data / "train/b")
        assert_one_line(image_files, lambda: image_files.load(path, 32), f"{path} on ", "copy it anew")  # noqa: B023


@pytest.mark.parametrize("size", [4097, 100_000, 10**9])
def test_absurd_size(example: str, image_files: ModuleType, data: Path, size: int) -> None:
    """An --image-size for which no memory would do is one line, before any is asked for."""
    assert_one_line(image_files, lambda: image_files.load(data, size), f"--image-size {size} is above 4096")


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("program", ["train.py", "image_files.py"])
def test_workers_have_the_open_tars(
    example: str,
    shipped: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    program: str,
) -> None:
    """Loader workers are forked, whatever the default is (forkserver, from Python 3.14 on): they read a tar."""
    import multiprocessing

    from torch.utils.data import DataLoader

    module, had = outputs.import_file(shipped / "image_files.py"), multiprocessing.get_start_method(allow_none=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for path in data.glob("*/*/*.png"):
        put(path, png(8, 2, pixels(3)))
    make_tar("data.tar", data)
    try:
        multiprocessing.set_start_method(method, force=True)
        if program == "train.py":
            monkeypatch.setattr(plumbing.launchers.atexit, "register", lambda *_: None)
            plumbing.end_with_loader_workers()
            train_set, _, _ = load(module, Path("data.tar"))
            assert [image.shape[1] for image, _ in DataLoader(train_set, num_workers=1)] == [3] * 6
        else:
            monkeypatch.setattr(sys, "argv", ["image_files.py", "data.tar"])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 0 and "10 images, 0 of them damaged" in capsys.readouterr().out
    finally:
        multiprocessing.set_start_method(had, force=True)


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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_upright(example: str, image_files: ModuleType, form: str, orientation: int) -> None:
    """An image is turned and mirrored as EXIF says, as Pillow does it."""
    import numpy as np
    from PIL import Image, ImageOps

    content = saved("RGB", form, exif=TURNED[:24] + bytes([orientation]) + TURNED[25:])
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    assert (image_files.decode(content).permute(1, 2, 0).numpy() == np.asarray(expected)).all()


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_damaged_exif(example: str, image_files: ModuleType, form: str) -> None:
    """An image is intact if what is damaged is its EXIF."""
    content = saved("RGB", form, exif=b"Exif\0\0no EXIF at all")
    assert (image_files.decode(content) == image_files.decode(saved("RGB", form))).all()


def test_decoded_with_a_warning(example: str, image_files: ModuleType) -> None:
    """A JPEG with bytes between its parts, which libjpeg only warns of, is an image all the same."""
    content = saved("RGB", "JPEG")
    assert (image_files.decode(content[:-2] + b"abc" + content[-2:]) == image_files.decode(content)).all()


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


def test_odd_transforms(example: str, image_files: ModuleType, data: Path) -> None:
    """A transform that returns what normalise() does not expect is one line; one that fails names its image."""
    import torch

    put(data / "train/a/1.png", png(8, 2, pixels(3)))
    train, _, _ = load(image_files, data)
    for change, text in (
        (lambda image: image / 255, "not (3, 6, 8), float32"),
        (lambda image: image.int(), "not (3, 6, 8), int32"),
        (lambda image: image.permute(1, 2, 0), "not (6, 8, 3), uint8"),
        (lambda image: image[:1], "not (1, 6, 8), uint8"),
        (lambda image: image[0], "not (6, 8), uint8"),
    ):
        train.transform = change
        assert_one_line(image_files, lambda: train[0], "data/train/a/1.png: the transform must return (3, H, W)", text)
    train.transform = lambda image: image.reshape(7)
    with pytest.raises(RuntimeError) as raised:
        train[0]
    assert raised.value.__notes__ == ["The image is data/train/a/1.png"]
    train.transform = torch.clone
    assert torch.equal(train[0][0], torch.from_numpy(pixels(3)).permute(2, 0, 1))


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


def with_change(key: str, change: Callable[[Any], Any]) -> Callable[[dict], dict]:
    return lambda weights: weights | {key: change(weights[key])}


def bytes_of(content: bytes) -> Callable[[dict], bytes]:
    return lambda weights: content


BAD_WEIGHTS = {  # what is in the file: what the line says
    "other model": (
        lambda weights: {"features.0.weight": weights["0.weight"]},
        ["the model has 0.weight (4, 3, 3, 3), the other has not", "the file has features.0.weight (4, 3, 3, 3)"],
    ),
    "more layers": (lambda weights: weights | {"4.bias": weights["3.bias"]}, ["the file has 4.bias (6,), the other"]),
    "other shape": (
        with_change("0.weight", lambda w: w[:, :1]),
        ["0.weight is (4, 3, 3, 3) in the model, (4, 1, 3, 3) in the file"],
    ),
    "part of a model": (
        lambda weights: prefixed("backbone.")(weights),
        ["the model has 0.weight", "backbone.0.weight"],
    ),
    "other classes": (lambda weights: small_model(10).state_dict(), ["is for 10 classes", "has 6", "--new-head"]),
    "whole numbers": (with_change("0.weight", lambda w: w.char()), ["torch.float32 in the model, torch.int8 in the"]),
    "not finite": (with_change("3.weight", lambda w: w / 0), ["numbers that are not finite, in 3.weight"]),
    "whole model": (lambda weights: small_model(), ["more than weights", "model.state_dict()"]),
    "arguments, too": (lambda weights: {"model": weights, "args": argparse.Namespace(a=1)}, ["more than weights"]),
    "only an optimizer": (lambda weights: {"optimizer": {"lr": 1}}, ["no weights in it"]),
    "list": (lambda weights: [1, 2], ["no weights in it"]),
    "web page": (bytes_of(b"<!DOCTYPE html>"), ["it is a web page"]),
    "Git LFS": (bytes_of(b"version https://git-lfs.github.com/spec/v1\n"), ["git lfs pull"]),
    "empty": (bytes_of(b""), ["it is empty"]),
    "text": (bytes_of(b"weights"), ["it is no file of torch.save"]),
    "safetensors": (bytes_of(b"\x02\0\0\0\0\0\0\0{}"), ["safetensors.torch.load_file"]),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_refused(
    example: str, image_files: ModuleType, classifiers: ModuleType, tmp_path: Path, case: str
) -> None:
    """Weights that do not fit, or are none, are one line, which names what differs first on both sides."""
    import torch

    make, texts = BAD_WEIGHTS[case]
    content, path = make(small_model().state_dict()), tmp_path / "weights.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    call = lambda: classifiers.load_weights(small_model(), "small", path)  # noqa: E731
    assert_one_line(image_files, call, f"--weights {path}", *texts)
    if case == "other classes":
        model = small_model()
        classifiers.load_weights(model, "small", path, small_model(7))
        assert torch.equal(model[0].weight, content["0.weight"]) and len(model[3].weight) == 6


HEAD_FIRST = """
from torch import nn

class OwnModel(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)
        layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.backbone = nn.Sequential(*layers)

    def forward(self, images):
        return self.head(self.backbone(images))
"""


def test_new_head_that_is_declared_first(example: str, classifiers: ModuleType, tmp_path: Path) -> None:
    """--new-head finds the layer with the classes by its shapes, wherever it stands."""
    import torch

    space: dict[str, Any] = {}
    exec(HEAD_FIRST, space)
    model = space["OwnModel"](6)
    own = model.head.weight.clone()
    for classes in (10, 6):  # the second file has as many as the data
        other = space["OwnModel"](classes)
        torch.save(other.state_dict(), tmp_path / "weights.pth")
        classifiers.load_weights(model, "own", tmp_path / "weights.pth", space["OwnModel"](7).to("meta"))
        assert torch.equal(model.backbone[0].weight, other.backbone[0].weight) and torch.equal(model.head.weight, own)


def test_pixels_of_weights(
    example: str, image_files: ModuleType, classifiers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models whose weights torchvision trained with other pixels get these, or are refused in one line."""
    get_model: Callable = lambda name, num_classes, **options: seen.append(options) or small_model(num_classes)  # noqa: E731
    monkeypatch.setattr(classifiers.models, "get_model", get_model)
    seen: list[dict] = []
    for name in ("googlenet", "inception_v3", "resnet18"):
        classifiers.make(name, 6, 4)
    assert [options.get("transform_input") for options in seen] == [True, True, None]
    call = lambda: classifiers.load_weights(small_model(), "efficientnet_v2_l", Path("weights.pth"))  # noqa: E731
    assert_one_line(image_files, call, "--weights: ", "set MEAN = STD = (0.5, 0.5, 0.5) in image_files.py")


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


def test_statistics_once_with_gradient_checkpointing(example: str, classifiers: ModuleType) -> None:
    """A block that is computed twice updates its statistics once, of whatever norm, and need not have any."""
    import torch
    from torch import nn

    for name in ("BatchNorm2d", "InstanceNorm2d", "without statistics", "momentum None"):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 4, 3), norms()[name](), nn.ReLU())
        before = {key: value.clone() for key, value in block.state_dict().items()}
        images = torch.rand(2, 3, 8, 8)
        block(images)
        after = {key: value.clone() for key, value in block.state_dict().items()}
        block.load_state_dict(before)
        first, second = classifiers.first_and_second(block)
        with first:
            block(images)
        with second:
            block(images)
        assert all(torch.equal(value, after[key]) for key, value in block.state_dict().items()), name


def finished_run(folder: Path, model: Any, **settings: object) -> argparse.Namespace:
    """Write what a run of a model leaves, as far as predict.py reads it, and return what predict.py is told."""
    import torch

    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.pt")
    known = {"model": "squeezenet1_1", "image_size": 32, "seed": 0, "precision": "fp32", "lr": 1e-3}
    known |= {"classes": ["cat", "dog"]}
    (folder / "run.json").write_text(json.dumps({"settings": known | settings}))
    return argparse.Namespace(model_of=folder)


def test_predict_knows_the_classes(
    example: str, predict: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the classes are those that the run has recorded; the model may be any."""
    import torch

    space: dict[str, Any] = {}
    exec(HEAD_FIRST, space)
    monkeypatch.setattr(predict.train.classifiers, "make", lambda name, classes, size: space["OwnModel"](classes))
    own, cpu = space["OwnModel"](2), torch.device("cpu")
    args = finished_run(Path("recorded"), own)
    model, _, names, _ = predict.load_model(args, cpu)
    assert names == ["cat", "dog"] and torch.equal(model.head.weight, own.head.weight) and not model.training


def test_predict_refuses(
    example: str, predict: ModuleType, image_files: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not belong to the model is one line that says what to do."""
    import torch

    space: dict[str, Any] = {}
    exec(HEAD_FIRST, space)
    make = predict.train.classifiers.make
    monkeypatch.setattr(predict.train.classifiers, "make", lambda name, classes, size: space["OwnModel"](classes))
    own, cpu = space["OwnModel"](2), torch.device("cpu")

    def refused(args: argparse.Namespace, *texts: str) -> None:
        assert_one_line(image_files, lambda: predict.load_model(args, cpu), *texts)

    refused(finished_run(Path("three"), space["OwnModel"](3)), "three/run.json has 2 classes, the model has 3")
    refused(finished_run(Path("older"), own, classes=None), "run.json was made by an older train.py", "--resume")
    args = finished_run(Path("damaged"), own)
    put(args.model_of / "model.pt", b"half")
    refused(args, "damaged/model.pt cannot be read", "--resume")
    os.remove(args.model_of / "model.pt")
    refused(args, "there is no damaged/model.pt yet")
    put(args.model_of / "run.json", b"")
    refused(args, "damaged/run.json cannot be read", "--resume")
    os.remove(args.model_of / "run.json")
    refused(args, "there is no damaged/run.json")
    monkeypatch.setattr(predict.train.classifiers, "make", make)
    args = finished_run(Path("own"), own)
    refused(
        args, "own/model.pt is of another model than train.py makes now", "head.weight (2, 64)", "own_classifier.py"
    )
    assert_one_line(image_files, lambda: image_files.find_images(Path("none")), "there is no folder none")


MASK = """
import torch
from torch import nn

class OwnModel(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 8, 8)
        mask = torch.full((16, 16), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", mask)
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))
        self.head = nn.Linear(48, classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / 7 + self.mask).softmax(-1)
        return self.head((weights @ self.v(x)).mean(1))
"""


@pytest.mark.runs("weekly")
def test_mask_on_two_processes(example: str, folder: Path) -> None:
    """A model with a mask of the smallest number trains on two processes as on one: the same weights, to 1e-9.

    run.json has the names of the classes, and predict.py takes them from there.
    """
    for text in readme.fences(folder / "README.md", "diff"):
        edits.apply_diff(folder / "train.py", text)
    (folder / "own_classifier.py").write_text(MASK)
    words = "--epochs 2 --precision fp64 --output-dir"
    for processes, batch_size in ((2, 8), (1, 16)):
        runs.train(example, folder, processes, *words.split(), f"output/{processes}", "--batch-size", batch_size)
    one, two = (outputs.read_model(folder / "output" / name) for name in "12")
    assert outputs.largest_difference(one, two) < 1e-9
    rows = outputs.read_metrics(folder / "output/2")
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] < 2
    assert outputs.read_run(folder / "output/2")["settings"]["classes"][:2] == ["four", "one"]
    (folder / "images").rename(folder / "moved")
    command = "torchrun --standalone --nproc-per-node=2 predict.py --images moved/val --model-of output/2"
    run = runs.Run(command.split(), folder).wait()
    assert run.status == 0, run.stderr
    lines = (folder / "predictions/predictions.csv").read_text().splitlines()[1:]
    right = sum(line.split("/")[0] == line.split(",")[1] for line in lines) / len(lines)
    assert right == pytest.approx(rows[-1]["test_accuracy"]) and len(lines) == 150


def test_classes_are_recorded(example: str, reference: Reference) -> None:
    """run.json of a run has the names of its classes, in the order of the model's outputs."""
    classes = outputs.read_run(reference.output)["settings"]["classes"]
    assert classes == ["four", "one", "six", "three", "two", "zero"]
