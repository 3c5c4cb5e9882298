"""Labelled image files: from a folder in the layout of torchvision's ImageFolder, or from a tar of one.

    FOLDER/train/CLASS/NAME.jpg    FOLDER/val/CLASS/NAME.jpg    (also .jpeg, .png and .webp)

`tar -cf images.tar images` makes the tar: one large file, which a parallel file system reads far faster than many
small ones. Where it would not fit on a node's disk: a folder of several, which are read where they are. Hidden names
are left out, and what has another ending; links are followed, and a folder is entered once. `Listing` says it all.

`python image_files.py FOLDER` (or a tar) decodes all images at any depth, and names each one that is damaged.
"""

import argparse
import contextlib
import ctypes
import functools
import heapq
import os
import posixpath
import shutil
import signal
import sys
import tarfile
import tempfile
import unicodedata
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from common.data import DataError

PARTS = ("train", "val")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
HIDDEN = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN")  # beside names that begin with a dot
BITS = 48  # of an offset in a tar
LARGEST = 4096  # --image-size: what has more pixels is cut into tiles beforehand
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which torchvision's weights were trained

KINDS = {  # how the content of a file begins that is no image, or none that is read here
    b"version https://git-lfs": "it is a pointer of Git LFS: git lfs pull fetches the file",
    b"<": "it is a web page",
    b"\0\x05\x16\x07": "it is a companion file of macOS",
    b"BM": "it is a BMP file",
    b"II*\0": "it is a TIFF file",
    b"MM\0*": "it is a TIFF file",
    b"\0\0\0\x0cjP": "it is a JPEG 2000 file",
}


def train_transform(size):
    """Return the random augmentation of training images. EDIT: what suits yours; a mirrored b is a d, say."""
    return v2.Compose([v2.RandomResizedCrop(size, scale=(0.35, 1), antialias=True), v2.RandomHorizontalFlip()])


def test_transform(size):
    """Return what is done to images that are evaluated: nothing random, and the middle part only."""
    return v2.Compose([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)])


def normalise(images, dtype):
    """Return images (B, 3, H, W), uint8, as `dtype` with about mean 0 and variance 1.

    This is done on the device: until then a pixel is one byte, which a loader worker has to move, not four.
    """
    mean, std = mean_and_std(images.device, dtype)
    return images.to(dtype).sub_(mean).div_(std)


@functools.cache
def mean_and_std(device, dtype):
    """Return MEAN and STD (1, 3, 1, 1) of pixel values, made once: copying them would stop a GPU in each step."""
    return [torch.tensor(values, device=device, dtype=dtype).view(1, 3, 1, 1) * 255 for values in (MEAN, STD)]


def what_it_is(content):
    """Return what a file is that cannot be read, by how it begins, or None if that is not known."""
    if not content:
        return "it is empty"
    if content[4:8] == b"ftyp":
        return "it is an AVIF or HEIC file"
    if content[:4] == b"RIFF" and b"ANIM" in content[:64]:
        return "it has several frames"
    return next((kind for start, kind in KINDS.items() if content[:99].lstrip().startswith(start)), None)


def decode(content):
    """Return the image (3, H, W), uint8, that is the content of a file; a ValueError says why there is none."""
    try:
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        image = decode_image(encoded, ImageReadMode.RGB, apply_exif_orientation=True)
    except (RuntimeError, ValueError):
        raise ValueError(what_it_is(content) or "it cannot be decoded") from None
    if image.dim() == 4:  # an animated GIF
        raise ValueError("it has several frames")
    if image.dtype == torch.uint16:  # a PNG of 16 bits for each colour
        image = ((image.int() + 128) // 257).byte()
    return image


def shown(path):
    """Return a path as text for one line of any terminal: what is no text in UTF-8, or ends a line, is escaped."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Images(Dataset):
    """Labelled image files, decoded when they are asked for.

    Indexing with i or with (i, seed) returns one image (3, size, size), uint8, and its label. The same seed makes the
    same random augmentation, in whichever process. Raises DataError if the file cannot be read or decoded.
    """

    def __init__(self, source, arrays, transform):
        """Keep what `as_arrays` returns; `source` is a folder, or the paths of tars and their file descriptors."""
        self.source, self.transform = source, transform
        self.paths, self.labels, self.offsets, self.sizes = arrays

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, key):
        index, seed = key if isinstance(key, tuple) else (key, 0)
        image = self.read(index)
        # v2 uses this process's random numbers. torch.manual_seed() would set those of GPUs, too, and take 0.3 ms more.
        torch.default_generator.manual_seed(seed)
        try:
            image = self.transform(image)
        except Exception as error:
            error.add_note(f"The image is {self.name(index)}")
            raise
        if image.dtype != torch.uint8 or image.dim() != 3 or len(image) != 3:
            found = f"{tuple(image.shape)}, {str(image.dtype).removeprefix('torch.')}"
            text = "must return (3, H, W), uint8, which normalise() expects"
            raise DataError(f"{self.name(index)}: the transform {text}, not {found}")
        return image, int(self.labels[index])

    def where(self, index):
        """Return the folder or the tar that an image is in, for messages."""
        return shown(self.source if isinstance(self.source, Path) else self.source[0][self.offsets[index] >> BITS])

    def name(self, index):
        """Return the whole path of an image, for messages."""
        return f"{self.where(index)}/{shown(self.path(index))}"

    def path(self, index):
        """Return the path of an image in its source."""
        return os.fsdecode(self.paths[index])

    def read(self, index):
        """Return an image (3, H, W), uint8, as it is in its file."""
        try:
            if isinstance(self.source, Path):
                content = (self.source / self.path(index)).read_bytes()
            else:
                number, offset = divmod(int(self.offsets[index]), 2**BITS)
                content = os.pread(self.source[1][number], int(self.sizes[index]), offset)
            return decode(content)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            rest = f"python image_files.py {self.where(index)} names all that are"
            raise DataError(f"{self.name(index)} is damaged ({reason}): replace it, or remove it; {rest}") from None


def as_arrays(files):
    """Return arrays of paths, labels, offsets and sizes, from a list that has these four of each file.

    In a tar the offset has the number of the tar above its BITS. Not the list itself: workers share memory with this
    process until it is written to, and reading an entry of a list writes its reference count.
    """
    paths = np.array([os.fsencode(file[0]) for file in files])
    return paths, *(np.array([file[i] for file in files]) for i in (1, 2, 3))


def with_seeds(sampler, seed, epoch):
    """Return the sampler's indices as keys of Images, each with a seed of its own for each epoch, counted from 0."""
    first = (seed * 10**4 + epoch + 1) * len(sampler.dataset)
    return [(index, (first + index) % 2**32) for index in sampler]


def prepare_worker(_):
    """Have a loader worker end with its parent, and ignore SIGTERM, at which the parent still has to save.

    DataLoader has given it a handler, and SLURM may send the signal to all processes of a job.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def errors_to(fail):
    """Call fail(message) at a DataError; one of a loader worker comes with a traceback, whose last line it is."""
    try:
        yield
    except DataError as error:
        fail(str(error).strip().rpartition("\n")[2].removeprefix("common.data.DataError: "))


class Link(NamedTuple):
    """A symbolic link in a tar."""

    target: str


class Listing:
    """What a folder or a tar has: its images, what was left out, by kind, and links that lead to nothing.

    All reading of names goes through `walk`, so that the same images are found in a folder, in a tar of it, and by
    predict.py. Paths are relative, with "/" between their parts.
    """

    def __init__(self):
        self.images = {}  # path: offset and size in a tar
        self.folders = set()  # that were entered, each with a "/" at its end
        self.left_out = defaultdict(list)  # kind: paths
        self.broken, self.twice, self.top = [], [], []  # links, images of an earlier tar, names beside train/ and val/

    def walk(self, prefix, top, entries, identify, around):
        """Add the images below the folder `top`, whose path is `prefix`.

        entries(folder) yields names with what they are, see `in_folder`, and identify(folder) is the same for the same
        folder. A link to a folder is followed when all real ones have been read, and only if it has not been: each
        image has the class of the folder in which it really lies, and a loop ends. `around` are the folders above.
        """
        seen, folders, links = {identify(folder) for folder in around}, [(prefix, top)], []
        while folders or links:
            path, folder = folders.pop() if folders else heapq.heappop(links)
            if (which := identify(folder)) in seen:
                self.left_out["linked twice"].append(path)
                continue
            seen.add(which)
            self.folders.add(path)
            for name, kind, value, is_link in entries(folder):
                inner = path + name
                if is_hidden(name):
                    self.left_out["hidden"].append(inner)
                elif kind == "folder" and is_link:
                    heapq.heappush(links, (f"{inner}/", value))
                elif kind == "folder":
                    folders.append((f"{inner}/", value))
                elif kind == "file" and name.lower().endswith(ENDINGS):
                    if inner in self.images:
                        self.twice.append(inner)
                    self.images[inner] = value
                elif kind == "file":
                    self.left_out[posixpath.splitext(name)[1].lower() or "without an ending"].append(inner)
                else:
                    (self.broken if is_link else self.left_out["no file"]).append(inner)

    def walk_folder(self, prefix, path):
        """Add what is in a folder of a file system."""
        try:
            self.walk(prefix, str(path), in_folder, identity, Path(path).resolve().parents)
        except OSError as error:
            raise DataError(f"{shown(error.filename)} cannot be read ({error.strerror})") from None

    def walk_tar(self, tree, number):
        """Add train/ and val/ in the tree of a tar, whatever folders they are in; `number` is the tar's."""

        def entries(folder):
            for name, node in folder.items():
                is_link = isinstance(node, Link)
                node = follow(tree, node.target) if is_link else node
                if isinstance(node, tuple):
                    yield name, "file", (number * 2**BITS + node[0], node[1]), is_link
                else:
                    yield name, "nothing" if node is None else "folder", node, is_link

        chains = find_roots(tree)
        outside = {id(folder): folder for chain in chains for folder in chain} or {0: tree}
        self.left_out["hidden"] += [name for folder in outside.values() for name in folder if is_hidden(name)]
        self.top += [name for chain in chains or [[tree]] for name in chain[-1] if not is_hidden(name)]
        for chain in chains:
            for part in PARTS:
                for name, kind, value, _ in entries({part: chain[-1].get(part)}):
                    if kind == "folder":
                        self.walk(f"{name}/", value, entries, id, chain)

    def check_links(self, path, remedy):
        """Raise DataError if a link leads to nothing."""
        if count := len(self.broken):
            links = f"{count} links lead to nothing, such as" if count > 1 else "one link leads to nothing,"
            raise DataError(f"{path}: {links} {shown(min(self.broken))}: {remedy}")

    def describe(self):
        """Return what was left out, as the end of a line, or nothing."""
        kinds = sorted(((len(paths), kind) for kind, paths in self.left_out.items() if paths), reverse=True)
        texts = [f"{count} {kind} (such as {shown(min(self.left_out[kind]))})" for count, kind in kinds[:4]]
        if rest := sum(count for count, _ in kinds[4:]):
            texts.append(f"{rest} of {len(kinds) - 4} other kinds")
        return f"; left out: {', '.join(texts)}" if texts else ""


def is_hidden(name):
    """Return whether a file or folder is left out: made by a system or a tool beside the images, or an unseen one."""
    return name.startswith(".") or name in HIDDEN


def in_folder(path):
    """Yield each name in a folder of a file system, its kind, its value for `Listing`, and whether it is a link.

    Only links cost a look at the file: what anything else is stands in the folder itself.
    """
    with os.scandir(path) as found:
        for entry in found:
            kind, value = "nothing", None
            with contextlib.suppress(OSError):  # a link to itself, or to where one may not look
                if entry.is_file():
                    kind, value = "file", (0, 0)
                elif entry.is_dir():
                    kind, value = "folder", entry.path
            yield entry.name, kind, value, entry.is_symlink()


def identity(path):
    """Return what a folder of a file system has in common with itself under another path."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def read_tree(path, file):
    """Return the tree of names in a tar: a dict for a folder, (offset, size) for a file, a Link, None for the rest.

    As when a tar is unpacked, the last of several members of one name counts, and a hard link is the file itself.
    """
    tree = {}
    try:
        with os.fdopen(os.dup(file), "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                *folders, name = parts_of(member.name) or [""]
                folder = tree
                for part in folders:
                    if not isinstance(folder.get(part), dict):
                        folder[part] = {}
                    folder = folder[part]
                if member.issparse():
                    raise DataError(f"{path} has sparse files, such as {shown(member.name)}: make it without --sparse")
                if member.isfile():
                    folder[name] = (member.offset_data, member.size)
                elif member.issym():
                    folder[name] = Link(posixpath.join("/".join(folders), member.linkname))
                elif member.islnk():
                    target = "/".join(parts_of(member.linkname))
                    folder[name] = follow(tree, target) or Link(target)
                elif not (member.isdir() and isinstance(folder.get(name), dict)) and name:
                    folder[name] = {} if member.isdir() else None
            opened.seek(tar.offset)  # behind the mark of its end, of which tarfile has read one half or all
            rest = opened.read(2**20)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} is no complete tar ({error}): make it with tar -cf, without compression") from None
    if not rest or rest.strip(b"\0"):
        reason = "more follows behind its end, as after cat of two tars" if rest else "its end is missing"
        raise DataError(f"{path} is no complete tar ({reason}): make it again with tar -cf")
    return tree


def parts_of(name):
    """Return the parts of a name in a tar, which may begin with "/", "./" or "../"."""
    return [part for part in posixpath.normpath(name).split("/") if part not in ("", ".", "..")]


def follow(tree, target, links=40):
    """Return what a path in a tar leads to, over up to so many links, or None."""
    node = tree
    for part in [part for part in posixpath.normpath(target).split("/") if part not in ("", ".")]:
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, Link):
            node = follow(tree, node.target, links - 1) if links else None
    return node


def find_roots(tree):
    """Return the folders of a tar in which train/ and val/ are, or one of them, as near to the top as there are some.

    Each is the last of a list, which begins with the top. So `tar -cf images.tar images`, and a tar that was made with
    an absolute path or with ./, are read alike.
    """
    for wanted in (all, any):
        chains = [[tree]]
        while chains:
            if roots := [chain for chain in chains if wanted(part in chain[-1] for part in PARTS)]:
                return roots
            inner = [[(chain, name) for name in chain[-1]] for chain in chains]
            inner = [[one for one in names if not is_hidden(one[1])] or names for names in inner]
            chains = [[*chain, chain[-1][name]] for names in inner for chain, name in names]
            chains = [chain for chain in chains if isinstance(chain[-1], dict)]
    return []


def find(path, open_tar):
    """Return the source of Images for a folder, a tar or a folder of tars, and a Listing; open_tar(path) opens one."""
    source = open_source(Path(path), open_tar)
    return source, list_source(Path(path), source)


def open_source(path, open_tar):
    """Return the source of Images: the folder, or the paths of tars and their file descriptors."""
    if path.is_dir() and not tars_in(path):
        return path
    if not path.is_dir() and not path.is_file():
        raise DataError(
            f"there is no {path}: --data-dir is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or a tar of one, "
            "or a folder of such tars; python make_images.py writes an example, images/"
        )
    tars, opened = tars_in(path) if path.is_dir() else [path], []
    for tar in tars:
        try:
            opened.append(open_tar(tar))
        except OSError as error:
            raise DataError(f"{tar} cannot be read ({error.strerror})") from None
    return tars, opened


def list_source(path, source):
    """Return the Listing of a source."""
    listing = Listing()
    if isinstance(source, Path):
        listing.left_out["hidden"] += [name for name in os.listdir(path) if is_hidden(name)]
        listing.top += [name for name in os.listdir(path) if not is_hidden(name)]
        for part in PARTS:
            if (path / part).is_dir():
                listing.walk_folder(f"{part}/", path / part)
        listing.check_links(path, "mend or remove them")
        return listing
    if path.is_dir():
        others = sorted({entry.name for entry in path.iterdir()} - {tar.name for tar in source[0]})
        for name in others:
            listing.left_out["hidden" if is_hidden(name) else f"beside the tars in {path}"].append(name)
    for number, (tar, opened) in enumerate(zip(*source, strict=True)):
        listing.walk_tar(read_tree(tar, opened), number)
        listing.check_links(tar, "their files are not in this tar; make it with tar --dereference -cf")
        if listing.twice:  # one of the two would be lost
            other = f"another tar in {path}" if number else "another folder in it"
            raise DataError(f"{tar}: {other} has {shown(min(listing.twice))}, too: give one of them another name")
    return listing


def open_in_place(path):
    """Return the file descriptor of a tar that is read where it is."""
    return os.open(path, os.O_RDONLY)


def tars_in(path):
    """Return the tars in a folder that is none of train/CLASS/*.jpg itself."""
    tars = [tar for tar in path.glob("*.tar") if not is_hidden(tar.name)]
    return [] if (path / "train").exists() else sorted(tars)


def class_of(path):
    """Return the class of an image, or of a folder with a "/" at its end, None if it is in none: one Unicode form."""
    parts = path.split("/", 2)
    return unicodedata.normalize("NFC", parts[1]) if len(parts) == 3 else None


def class_names(path, listing):
    """Return the names of the classes, sorted; raise DataError unless both parts have all of them, two or more."""
    for image in [image for image in listing.images if class_of(image) is None]:
        listing.left_out["in no folder of a class"].append(image)
        del listing.images[image]
    have = {part: {class_of(image) for image in listing.images if image.startswith(f"{part}/")} for part in PARTS}
    folders = {class_of(folder) for folder in listing.folders} - {None, ""}
    names, left_out = sorted(have["train"] | have["val"] | folders), listing.describe()
    for part in PARTS:
        if not have[part]:
            top = f"it has {', '.join(map(shown, sorted(set(listing.top))[:5]))}" if listing.top else "it is empty"
            raise DataError(f"{path}/{part} is not a folder CLASS/*.jpg (or {', '.join(ENDINGS[1:])}): {top}{left_out}")
        if missing := [shown(name) for name in names if name not in have[part]]:
            which = f"the class {missing[0]}" if len(missing) == 1 else f"{len(missing)} classes, such as {missing[0]}"
            text = "add some, or remove its folder in both parts"
            raise DataError(f"{path}/{part} has no image of {which}: {text}{left_out}")
    if len(names) == 1:
        text = f"has one class alone, {shown(names[0])}: each folder in train/ and in val/ is a class"
        raise DataError(f"{path} {text}; is there one level of folders too many?{left_out}")
    return names


def load(path, size):
    """Return the training set, the test set, and the names of the classes; images have `size` x `size` pixels.

    All processes of torchrun call it: a tar is copied to the own disk of each node once, see `stage`, and rank 0 alone
    reads what there is. Raises DataError if there is nothing at `path`, or if the two parts do not have the same
    classes with at least one file each. Rank 0 prints what was left out.
    """
    if size > LARGEST:
        raise DataError(f"--image-size {size} is above {LARGEST}: 224 is usual; cut larger images into tiles")
    path = Path(path)
    source = open_source(path, stage if path.is_file() else open_in_place)
    names, parts, sizes, left_out = from_rank_0(lambda: list_parts(path, source))
    if (own := sizes_of(source)) != sizes:
        raise DataError(f"{path} on {os.uname().nodename} has {own} bytes, on the node of rank 0 {sizes}: copy it anew")
    sets = [Images(source, *two) for two in zip(parts, (train_transform(size), test_transform(size)), strict=True)]
    if left_out and not (dist.is_initialized() and dist.get_rank()):
        print(f"{shown(path)}: {len(sets[0])} images of {len(names)} classes{left_out}")
    return *sets, names


def list_parts(path, source):
    """Return the names of the classes, the arrays of each part, the sizes of the tars, and what was left out."""
    listing = list_source(path, source)
    names, parts = class_names(path, listing), []
    labels = {name: label for label, name in enumerate(names)}
    order = sorted(listing.images, key=lambda image: (unicodedata.normalize("NFC", image), image))
    for part in PARTS:
        files = [image for image in order if image.startswith(f"{part}/")]
        parts.append(as_arrays([(image, labels[class_of(image)], *listing.images[image]) for image in files]))
    return names, parts, sizes_of(source), listing.describe()


def sizes_of(source):
    """Return the sizes of the tars of a source, as text: on each node they have to be the same files."""
    return "" if isinstance(source, Path) else " + ".join(str(os.fstat(tar).st_size) for tar in source[1])


def from_rank_0(compute):
    """Return, in each process, what compute() returns in rank 0, or raise the DataError that it raises there.

    So hundreds of processes do not all read the names in a folder, or the heads in a tar, from one file system. The
    others wait for that. It may take longer than --timeout, which is for what all do together.
    """
    if not dist.is_initialized():
        return compute()
    patient, found = dist.new_group(backend="gloo", timeout=timedelta(days=7)), [None]
    if dist.get_rank() == 0:
        try:
            found[0] = compute()
        except DataError as error:
            found[0] = error
    dist.broadcast_object_list(found, group=patient)
    dist.destroy_process_group(patient)
    if isinstance(found[0], DataError):
        raise found[0]
    return found[0]


def find_images(folder):
    """Return the paths of all images under a folder, at any depth, sorted, and what was left out, as text."""
    listing = Listing()
    if not Path(folder).is_dir():
        raise DataError(f"there is no folder {shown(folder)} with images")
    listing.walk_folder("", folder)
    listing.check_links(folder, "mend or remove them")
    if not listing.images:
        raise DataError(f"{shown(folder)} has no image ({', '.join(ENDINGS)}){listing.describe()}")
    return sorted(listing.images), listing.describe()


def stage(path):
    """Copy a tar to this node's own disk, once for all processes of the node; return its file descriptor.

    The copy has no name as soon as all have opened it: the disk space is free when the last process has ended, however
    that ends. It goes to $SLURM_TMPDIR, else to $TMPDIR, else to /tmp. Without torchrun it is read where it is.
    """
    if not dist.is_initialized():
        return open_in_place(path)
    folder = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    first = os.environ["LOCAL_RANK"] == "0"
    copy = folder / f"{path.name}.{os.environ['TORCHELASTIC_RUN_ID']}.{os.uname().nodename}"
    try:
        if first:
            copy.unlink(missing_ok=True)  # of an attempt that was killed
            file = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        dist.barrier()
        if not first:
            file = os.open(copy, os.O_RDONLY)
        dist.barrier()
        if first:  # its name goes before it is filled: even if this job is killed meanwhile, nothing is left of it
            copy.unlink()
            with open(path, "rb") as source, os.fdopen(os.dup(file), "wb") as target:
                shutil.copyfileobj(source, target, 2**24)
            os.lseek(file, 0, os.SEEK_SET)  # where the others' descriptors are, too
        dist.barrier()
    except OSError as error:
        reason = f"{error.strerror}): set SLURM_TMPDIR or TMPDIR to a larger disk"
        raise DataError(f"{path} cannot be copied to {folder} ({reason}") from None
    return file


class Damage(Images):
    """What is wrong with each image, or nothing."""

    def __getitem__(self, index):
        try:
            self.read(index)
        except DataError as error:
            return str(error).partition(": replace it")[0]
        return ""


def main():
    """Decode all images of a folder or a tar; name those that cannot be."""
    parser = argparse.ArgumentParser(description="Name all damaged images: the status is 1 if there is one.")
    parser.add_argument("path", type=Path, help="folder with images at any depth, a tar of one, or a folder of tars")
    path = parser.parse_args().path
    try:
        if path.is_dir() and not tars_in(path):
            source, (images, left_out) = path, find_images(path)
            files = [(image, 0, 0, 0) for image in images]
        else:
            source, listing = find(path, open_in_place)
            files = [(image, 0, *listing.images[image]) for image in sorted(listing.images)]
            left_out = listing.describe()
    except DataError as error:
        parser.error(str(error))
    damaged = 0
    loading = {"num_workers": len(os.sched_getaffinity(0)), "multiprocessing_context": "fork"}  # with the open tars
    for text in DataLoader(Damage(source, as_arrays(files), None), batch_size=None, **loading):
        if text:
            damaged += 1
            print(text)
    print(f"{len(files)} images, {damaged} of them damaged{left_out}")
    sys.exit(damaged > 0)


if __name__ == "__main__":
    main()
