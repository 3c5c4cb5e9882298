"""Labelled image files: from a folder in the layout of torchvision's ImageFolder, or from a tar.

    FOLDER/train/CLASS/NAME.jpg    FOLDER/val/CLASS/NAME.jpg    (also .jpeg, .png and .webp)

`tar -cf images.tar images` makes the tar: one large file, which a parallel file system reads far
faster than many small ones. Where it would not fit on a node's disk, use a folder of several tars,
which are read where they are. Hidden names and other endings are left out. Links are followed, and
a folder is entered once: see `Listing`.

`python image_files.py FOLDER` (or a tar) decodes all images at any depth, and names each one that
is damaged.
"""

import argparse
import contextlib
import ctypes
import functools
import heapq
import io
import os
import posixpath
import shutil
import signal
import sys
import tarfile
import tempfile
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from common.data import DataError
from plumbing import patient_group

PARTS = ("train", "val")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
# These names are hidden, and so is each that begins with a dot.
HIDDEN = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN")
# So many bits of an offset are the place in a tar, and those above them are the tar's number.
BITS = 48
# --image-size may be up to this. Larger images are cut into tiles beforehand.
LARGEST = 4096
# These are ImageNet's, with which torchvision's weights were trained: load_weights has exceptions.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # what Pillow is asked to read
Image.MAX_IMAGE_PIXELS = None  # large images are no attack here
# A file that begins like this is no image, or none that is read here.
KINDS = {
    b"version https://git-lfs": "it is a pointer of Git LFS: git lfs pull fetches the file",
    b"<": "it is a web page",
    b"\0\x05\x16\x07": "it is a companion file of macOS",
    b"BM": "it is a BMP file",
    b"II*\0": "it is a TIFF file",
    b"MM\0*": "it is a TIFF file",
    b"\0\0\0\x0cjP": "it is a JPEG 2000 file",
}


def train_transform(size):
    """Return the random augmentation of training images.

    EDIT: what suits your images. A mirrored b, for instance, is a d.
    """
    crop = v2.RandomResizedCrop(size, scale=(0.35, 1), antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip()])


def test_transform(size):
    """Return what is done to images that are evaluated: nothing random, and the middle only."""
    return v2.Compose([v2.Resize(size * 8 // 7, antialias=True), v2.CenterCrop(size)])


def normalise(images, dtype):
    """Return images (B, 3, H, W), uint8, as `dtype` with about mean 0 and variance 1.

    This is done on the device: until then a loader worker moves one byte for each value, not four.
    """
    mean, std = mean_and_std(images.device, dtype)
    return images.to(dtype).sub_(mean).div_(std)


@functools.cache
def mean_and_std(device, dtype):
    """Return MEAN and STD of pixel values, each (1, 3, 1, 1).

    They are made once, since copying them would stop a GPU in each step.
    """
    tensors = [torch.tensor(values, device=device, dtype=dtype) for values in (MEAN, STD)]
    return [tensor.view(1, 3, 1, 1) * 255 for tensor in tensors]


def what_it_is(content):
    """Return what a file is that cannot be read, by how it begins, or None if that is not known."""
    if not content:
        return "it is empty"
    if content[4:8] == b"ftyp":
        return "it is an AVIF or HEIC file"
    if content[:4] == b"RIFF" and b"ANIM" in content[:64]:
        return "it has several frames"
    for start, kind in KINDS.items():
        if content[:99].lstrip().startswith(start):
            return kind
    return None


def decode(content):
    """Return the image (3, H, W), uint8, in a file's content; ValueError says why there is none."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            pixels = pixels_of(file, content)
            invisible = drawn_by_transparency(file, pixels)
            orientation = 1
            with contextlib.suppress(Exception):  # what is wrong in there is no pixel
                orientation = file.getexif().get(0x0112, 1)
            frames = getattr(file, "n_frames", 1) if file.format in ("GIF", "WEBP") else 1
    except Exception:  # a damaged file can raise almost anything
        raise ValueError(what_it_is(content) or "it cannot be decoded") from None
    if frames > 1:
        raise ValueError("it has several frames")
    if invisible:
        advice = "magick mogrify -path FOLDER -background white -alpha remove FILES"
        advice = f"{advice} writes copies on white into another folder"
        raise ValueError(f"without its transparency it is of one colour: {advice}")
    return torch.from_numpy(upright(pixels, orientation)).permute(2, 0, 1)


def pixels_of(file, content):
    """Return the pixels (H, W, 3), uint8, of an image that Pillow has opened."""
    # MPO is a JPEG with further pictures, as some cameras make.
    if file.format in ("JPEG", "MPO") and file.mode in ("RGB", "L"):
        # The same libjpeg-turbo as Pillow's, and the same pixels, in 0.6 times the time. It refuses
        # what libjpeg warns of; Pillow refuses only what is cut off.
        with contextlib.suppress(ValueError):
            return simplejpeg.decode_jpeg(content, "RGB")
    if file.mode.startswith("I"):  # 16 bits, grey, which Pillow would cut at 255
        grey = (np.asarray(file).astype(np.int32) + 128) // 257
        return grey.astype(np.uint8)[..., None].repeat(3, axis=2)
    return np.array(file.convert("RGB"))


def drawn_by_transparency(file, pixels):
    """Return whether nothing but its transparency, which is left out, shows what an image has."""
    if not file.has_transparency_data or (pixels != pixels[0, 0]).any():
        return False
    least, most = file.convert("RGBA").getchannel("A").getextrema()
    return least < most


def upright(pixels, orientation):
    """Return pixels (H, W, 3) as they have to be seen, by EXIF's number for that, from 1 to 8."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def shown(path):
    """Return a path as text for one line: what is no text in UTF-8, or ends a line, is escaped."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(letter if letter.isprintable() else ascii(letter).strip("'") for letter in text)


class Images(Dataset):
    """Labelled image files, decoded when they are asked for.

    Indexing with i or with (i, seed) returns one image (3, size, size), uint8, and its label. The
    same seed makes the same random augmentation, in whichever process. A file that cannot be read
    or decoded raises DataError.
    """

    def __init__(self, source, arrays, transform):
        """Keep what `as_arrays` returns.

        `source` is a folder, or the paths of tars and their file descriptors.
        """
        self.source = source
        self.transform = transform
        self.paths, self.labels, self.offsets, self.sizes = arrays

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, key):
        index, seed = key if isinstance(key, tuple) else (key, 0)
        image = self.read(index)
        # v2 uses this process's random numbers. torch.manual_seed() would set those of GPUs as
        # well, and take 0.3 ms more.
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
        if isinstance(self.source, Path):
            return shown(self.source)
        tars, _ = self.source
        return shown(tars[self.offsets[index] >> BITS])

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
                _, opened = self.source
                number, offset = divmod(int(self.offsets[index]), 2**BITS)
                content = os.pread(opened[number], int(self.sizes[index]), offset)
            return decode(content)
        except (OSError, ValueError) as error:
            wrong = f"{self.name(index)} is damaged ({getattr(error, 'strerror', None) or error})"
            advice = f"python image_files.py {self.where(index)} names all that are"
            raise DataError(f"{wrong}: replace it, or remove it; {advice}") from None


def as_arrays(files):
    """Return arrays of paths, labels, offsets and sizes, from a list that has these of each file.

    In a tar the offset has the number of the tar above its BITS. The list itself would not do:
    workers share memory with this process until it is written to, and reading an entry of a list
    writes its reference count.
    """
    paths = np.array([os.fsencode(path) for path, _, _, _ in files])
    labels = np.array([label for _, label, _, _ in files])
    offsets = np.array([offset for _, _, offset, _ in files])
    sizes = np.array([size for _, _, _, size in files])
    return paths, labels, offsets, sizes


def with_seeds(sampler, seed, epoch):
    """Return the sampler's indices as keys of Images, with other seeds in each epoch, from 0 on."""
    first = (seed * 10**4 + epoch + 1) * len(sampler.dataset)
    return [(index, (first + index) % 2**32) for index in sampler]


def prepare_worker(_):
    """Have a loader worker end with its parent, and ignore SIGTERM, at which the parent saves.

    DataLoader has given it a handler, and SLURM may send the signal to all processes of a job.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def errors_to(fail):
    """Call fail(message) at a DataError.

    One of a loader worker comes with a traceback, whose last line is the message.
    """
    try:
        yield
    except DataError as error:
        *_, line = str(error).strip().split("\n")
        fail(line.removeprefix("common.data.DataError: "))


class Link(NamedTuple):
    """A symbolic link in a tar."""

    target: str


class Listing:
    """What a folder or a tar has: its images, what was left out, and links that lead to nothing.

    All reading of names goes through `walk`, so that the same images are found in a folder, in a
    tar of it, and by predict.py. Paths are relative, with "/" between their parts. A folder that
    was entered has a "/" at its end.
    """

    def __init__(self):
        self.images = {}  # each path has its offset and its size in a tar
        self.folders = set()  # these were entered
        self.left_out = defaultdict(list)  # each kind has its paths
        self.broken = []  # these links lead to nothing
        self.twice = []  # these images are in an earlier tar as well
        self.top = []  # these names are beside train/ and val/

    def walk(self, prefix, top, entries, identify, around):
        """Add the images below the folder `top`, whose path is `prefix`.

        entries(folder) yields names with what they are, see `in_folder`. identify(folder) is the
        same for the same folder. `around` are the folders above. A link to a folder is followed
        when all real ones have been read, and only if that folder has not been read. So each image
        has the class of the folder in which it really lies, and a loop ends.
        """
        seen = {identify(folder) for folder in around}
        folders = [(prefix, top)]
        links = []
        while folders or links:
            path, folder = folders.pop() if folders else heapq.heappop(links)
            which = identify(folder)
            if which in seen:
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
                    _, ending = posixpath.splitext(name)
                    self.left_out[ending.lower() or "without an ending"].append(inner)
                elif is_link:
                    self.broken.append(inner)
                else:
                    self.left_out["no file"].append(inner)

    def walk_folder(self, prefix, path):
        """Add what is in a folder of a file system."""
        try:
            self.walk(prefix, str(path), in_folder, identity, Path(path).resolve().parents)
        except OSError as error:
            raise DataError(f"{shown(error.filename)} cannot be read ({error.strerror})") from None

    def walk_tar(self, tree, number):
        """Add train/ and val/ in the tree of a tar, by its number, whatever folders they are in."""

        def entries(folder):
            for name, node in folder.items():
                is_link = isinstance(node, Link)
                if is_link:
                    node = follow(tree, node.target)
                if isinstance(node, tuple):
                    offset, size = node
                    yield name, "file", (number * 2**BITS + offset, size), is_link
                else:
                    yield name, "nothing" if node is None else "folder", node, is_link

        chains = find_roots(tree)
        outside = {id(folder): folder for chain in chains for folder in chain} or {0: tree}
        for folder in outside.values():
            self.left_out["hidden"] += filter(is_hidden, folder)
        for chain in chains or [[tree]]:
            self.top += [name for name in chain[-1] if not is_hidden(name)]
        for chain in chains:
            for part in PARTS:
                for name, kind, value, _ in entries({part: chain[-1].get(part)}):
                    if kind == "folder":
                        self.walk(f"{name}/", value, entries, id, chain)

    def check_links(self, path, remedy):
        """Raise DataError if a link leads to nothing."""
        if not self.broken:
            return
        links = "one link leads to nothing,"
        if len(self.broken) > 1:
            links = f"{len(self.broken)} links lead to nothing, such as"
        raise DataError(f"{path}: {links} {shown(min(self.broken))}: {remedy}")

    def describe(self):
        """Return what was left out, as the end of a line, or nothing."""
        counts = [(len(paths), kind) for kind, paths in self.left_out.items() if paths]
        if not counts:
            return ""
        counts.sort(reverse=True)
        texts = []
        for count, kind in counts[:4]:
            texts.append(f"{count} {kind} (such as {shown(min(self.left_out[kind]))})")
        others = counts[4:]
        if others:
            texts.append(f"{sum(count for count, _ in others)} of {len(others)} other kinds")
        return f"; left out: {', '.join(texts)}"


def is_hidden(name):
    """Return whether a name is left out: systems and tools make such files beside the images."""
    return name.startswith(".") or name in HIDDEN


def in_folder(path):
    """Yield each name in a folder of a file system, its kind, its value, and whether it is a link.

    The value is what `Listing` needs of it. Only links cost a look at the file: what anything else
    is stands in the folder itself.
    """
    with os.scandir(path) as found:
        for entry in found:
            kind = "nothing"
            value = None
            # A link may lead to itself, or to where one may not look.
            with contextlib.suppress(OSError):
                if entry.is_file():
                    kind = "file"
                    value = (0, 0)
                elif entry.is_dir():
                    kind = "folder"
                    value = entry.path
            yield entry.name, kind, value, entry.is_symlink()


def identity(path):
    """Return what a folder of a file system has in common with itself under another path."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def read_tree(path, file):
    """Return the tree of names in a tar, by its file descriptor.

    It has a dict for a folder, (offset, size) for a file, a Link, and None for anything else.
    """
    tree = {}
    try:
        with os.fdopen(os.dup(file), "rb") as copy, tarfile.open(fileobj=copy, mode="r:") as tar:
            for member in tar:
                if member.issparse():
                    wrong = f"{path} has sparse files, such as {shown(member.name)}"
                    raise DataError(f"{wrong}: make it without --sparse")
                add_member(tree, member)
            # The tar goes on behind the mark of its end, of which tarfile has read one half or all.
            copy.seek(tar.offset)
            rest = copy.read(2**20)
    except (tarfile.TarError, OSError) as error:
        wrong = f"{path} is no complete tar ({error})"
        raise DataError(f"{wrong}: make it with tar -cf, without compression") from None
    if not rest or rest.strip(b"\0"):
        reason = "its end is missing"
        if rest:
            reason = "more follows behind its end, as after cat of two tars"
        raise DataError(f"{path} is no complete tar ({reason}): make it again with tar -cf")
    return tree


def add_member(tree, member):
    """Add a member of a tar to the tree of its names.

    As when a tar is unpacked, the last of several members of one name counts, and a hard link is
    the file itself.
    """
    *folders, name = parts_of(member.name) or [""]
    folder = tree
    for part in folders:
        if not isinstance(folder.get(part), dict):
            folder[part] = {}
        folder = folder[part]
    if member.isfile():
        folder[name] = (member.offset_data, member.size)
    elif member.issym():
        folder[name] = Link(posixpath.join("/".join(folders), member.linkname))
    elif member.islnk():
        target = "/".join(parts_of(member.linkname))
        folder[name] = follow(tree, target) or Link(target)
    elif name and not member.isdir():
        folder[name] = None
    elif name and not isinstance(folder.get(name), dict):
        folder[name] = {}


def parts_of(name):
    """Return the parts of a name in a tar, which may begin with "/", "./" or "../"."""
    return [part for part in posixpath.normpath(name).split("/") if part not in ("", ".", "..")]


def follow(tree, target, links=40):
    """Return what a path in a tar leads to, over up to so many links, or None."""
    node = tree
    for part in posixpath.normpath(target).split("/"):
        if part in ("", "."):
            continue
        node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, Link):
            node = follow(tree, node.target, links - 1) if links else None
    return node


def find_roots(tree):
    """Return the folders of a tar in which train/ and val/ are, or otherwise one of these two.

    They are those nearest to the top. Each is the last of a list, which begins with the top. So
    `tar -cf images.tar images`, and a tar that was made with an absolute path or with ./, are read
    alike.
    """
    for wanted in (all, any):
        chains = [[tree]]
        while chains:
            roots = [chain for chain in chains if wanted(part in chain[-1] for part in PARTS)]
            if roots:
                return roots
            below = []
            for chain in chains:
                folder = chain[-1]
                names = [name for name in folder if not is_hidden(name)] or list(folder)
                below += [[*chain, folder[name]] for name in names]
            chains = [chain for chain in below if isinstance(chain[-1], dict)]
    return []


def find(path, open_tar):
    """Return the source of Images for a folder, a tar or a folder of tars, and its Listing.

    open_tar(path) opens a tar.
    """
    source = open_source(Path(path), open_tar)
    return source, list_source(Path(path), source)


def open_source(path, open_tar):
    """Return the source of Images: the folder, or the paths of tars and their file descriptors."""
    if path.is_dir() and not tars_in(path):
        return path
    if not path.is_dir() and not path.is_file():
        kinds = "a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or a tar of one"
        advice = "or a folder of such tars; python make_images.py writes an example, images/"
        raise DataError(f"there is no {path}: --data-dir is {kinds}, {advice}")
    tars = tars_in(path) if path.is_dir() else [path]
    opened = []
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
        for name in os.listdir(path):
            (listing.left_out["hidden"] if is_hidden(name) else listing.top).append(name)
        for part in PARTS:
            if (path / part).is_dir():
                listing.walk_folder(f"{part}/", path / part)
        listing.check_links(path, "mend or remove them")
        return listing
    tars, opened = source
    if path.is_dir():
        for name in sorted({entry.name for entry in path.iterdir()} - {tar.name for tar in tars}):
            kind = "hidden" if is_hidden(name) else f"beside the tars in {path}"
            listing.left_out[kind].append(name)
    remedy = "their files are not in this tar; make it with tar --dereference -cf"
    for number, tar in enumerate(tars):
        listing.walk_tar(read_tree(tar, opened[number]), number)
        listing.check_links(tar, remedy)
        if listing.twice:  # one of the two would be lost
            other = f"another tar in {path}" if number else "another folder in it"
            wrong = f"{other} has {shown(min(listing.twice))}, too"
            raise DataError(f"{tar}: {wrong}: give one of them another name")
    return listing


def open_in_place(path):
    """Return the file descriptor of a tar that is read where it is."""
    return os.open(path, os.O_RDONLY)


def tars_in(path):
    """Return the tars in a folder that is none of train/CLASS/*.jpg itself."""
    if (path / "train").exists():
        return []
    return sorted(tar for tar in path.glob("*.tar") if not is_hidden(tar.name))


def class_of(path):
    """Return the class of an image, or of a folder that ends in "/", in Unicode NFC, or None."""
    parts = path.split("/", 2)
    if len(parts) < 3:
        return None
    _, name, _ = parts
    return unicodedata.normalize("NFC", name)


def class_names(path, listing):
    """Return the names of the classes, sorted.

    Raise DataError unless both parts have all of them, and there are two or more.
    """
    have = {part: set() for part in PARTS}
    for image in list(listing.images):
        name = class_of(image)
        if name is None:
            listing.left_out["in no folder of a class"].append(image)
            del listing.images[image]
        else:
            part, _, _ = image.partition("/")
            have[part].add(name)
    folders = {class_of(folder) for folder in listing.folders} - {None, ""}
    names = sorted(have["train"] | have["val"] | folders)
    left_out = listing.describe()
    for part in PARTS:
        if not have[part]:
            wrong = f"is not a folder CLASS/*.jpg (or {', '.join(ENDINGS[1:])})"
            top = "it is empty"
            if listing.top:
                top = f"it has {', '.join(map(shown, sorted(set(listing.top))[:5]))}"
            raise DataError(f"{path}/{part} {wrong}: {top}{left_out}")
        missing = [shown(name) for name in names if name not in have[part]]
        if missing:
            which = f"the class {missing[0]}"
            if len(missing) > 1:
                which = f"{len(missing)} classes, such as {missing[0]}"
            advice = "add some, or remove its folder in both parts"
            raise DataError(f"{path}/{part} has no image of {which}: {advice}{left_out}")
    if len(names) == 1:
        wrong = f"{path} has one class alone, {shown(names[0])}"
        rule = "each folder in train/ and in val/ is a class"
        raise DataError(f"{wrong}: {rule}; is there one level of folders too many?{left_out}")
    return names


def load(path, size):
    """Return the training set, the test set, and the names of the classes.

    Images have `size` x `size` pixels. All processes of torchrun call it. A tar is copied to the
    own disk of each node once, see `stage`, and rank 0 alone reads what there is, and prints what
    was left out. Raises DataError if there is nothing at `path`, or if the two parts do not have
    the same classes with at least one file each.
    """
    if size > LARGEST:
        wrong = f"--image-size {size} is above {LARGEST}"
        raise DataError(f"{wrong}: 224 is usual; cut larger images into tiles")
    path = Path(path)
    source = open_source(path, stage if path.is_file() else open_in_place)
    names, parts, sizes, left_out = from_rank_0(lambda: list_parts(path, source))
    own = sizes_of(source)
    if own != sizes:
        wrong = f"{path} on {os.uname().nodename} has {own} bytes, on the node of rank 0 {sizes}"
        raise DataError(f"{wrong}: copy it anew")
    train_files, test_files = parts
    train_set = Images(source, train_files, train_transform(size))
    test_set = Images(source, test_files, test_transform(size))
    if left_out and not (dist.is_initialized() and dist.get_rank()):
        print(f"{shown(path)}: {len(train_set)} images of {len(names)} classes{left_out}")
    return train_set, test_set, names


def list_parts(path, source):
    """Return the classes' names, the parts' arrays, the tars' sizes, and what was left out."""
    listing = list_source(path, source)
    names = class_names(path, listing)
    labels = {name: label for label, name in enumerate(names)}
    order = sorted(listing.images, key=lambda image: (unicodedata.normalize("NFC", image), image))
    parts = []
    for part in PARTS:
        images = [image for image in order if image.startswith(f"{part}/")]
        files = [(image, labels[class_of(image)], *listing.images[image]) for image in images]
        parts.append(as_arrays(files))
    return names, parts, sizes_of(source), listing.describe()


def sizes_of(source):
    """Return the sizes of a source's tars, as text: on each node they have to be the same files."""
    if isinstance(source, Path):
        return ""
    _, opened = source
    return " + ".join(str(os.fstat(tar).st_size) for tar in opened)


def from_rank_0(compute):
    """Return, in each process, what compute() returns in rank 0, or raise its DataError.

    So hundreds of processes do not all read the names in a folder, or the heads in a tar, from one
    file system. The others wait for that.
    """
    if not dist.is_initialized():
        return compute()
    patient = patient_group()
    found = [None]
    if dist.get_rank() == 0:
        try:
            found = [compute()]
        except DataError as error:
            found = [error]
    dist.broadcast_object_list(found, group=patient)
    dist.destroy_process_group(patient)
    (answer,) = found
    if isinstance(answer, DataError):
        raise answer
    return answer


def find_images(folder):
    """Return the sorted paths of all images under a folder, and what was left out, as text."""
    listing = Listing()
    if not Path(folder).is_dir():
        raise DataError(f"there is no folder {shown(folder)} with images")
    listing.walk_folder("", folder)
    listing.check_links(folder, "mend or remove them")
    if not listing.images:
        raise DataError(f"{shown(folder)} has no image ({', '.join(ENDINGS)}){listing.describe()}")
    return sorted(listing.images), listing.describe()


def stage(path):
    """Copy a tar to this node's own disk, once for all its processes; return the file descriptor.

    The copy has no name as soon as all have opened it: the disk space is free when the last process
    has ended, however that ends. It goes to $SLURM_TMPDIR, otherwise to $TMPDIR, otherwise to /tmp.
    Without torchrun it is read where it is.
    """
    if not dist.is_initialized():
        return open_in_place(path)
    folder = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())
    first = os.environ["LOCAL_RANK"] == "0"
    run = os.environ["TORCHELASTIC_RUN_ID"]
    copy = folder / f"{path.name}.{run}.{os.uname().nodename}"
    try:
        if first:
            copy.unlink(missing_ok=True)  # an attempt that was killed may have left it
            file = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        dist.barrier()
        if not first:
            file = os.open(copy, os.O_RDONLY)
        dist.barrier()
        if first:
            # Its name goes before it is filled: if this job is killed meanwhile, nothing is left.
            copy.unlink()
            with open(path, "rb") as source, os.fdopen(os.dup(file), "wb") as target:
                shutil.copyfileobj(source, target, 2**24)
            os.lseek(file, 0, os.SEEK_SET)  # the others' descriptors are there as well
        dist.barrier()
    except OSError as error:
        wrong = f"{path} cannot be copied to {folder} ({error.strerror})"
        raise DataError(f"{wrong}: set SLURM_TMPDIR or TMPDIR to a larger disk") from None
    return file


class Damage(Images):
    """What is wrong with each image, or nothing."""

    def __getitem__(self, index):
        try:
            self.read(index)
        except DataError as error:
            wrong, _, _ = str(error).partition(": replace it")
            return wrong
        return ""


def main():
    """Decode all images of a folder or a tar; name those that cannot be."""
    what = "Name all damaged images: the status is 1 if there is one."
    parser = argparse.ArgumentParser(description=what)
    kinds = "folder with images at any depth, a tar of one, or a folder of tars"
    parser.add_argument("path", type=Path, help=kinds)
    path = parser.parse_args().path
    try:
        if path.is_dir() and not tars_in(path):
            source = path
            images, left_out = find_images(path)
            files = [(image, 0, 0, 0) for image in images]
        else:
            source, listing = find(path, open_in_place)
            files = [(image, 0, *listing.images[image]) for image in sorted(listing.images)]
            left_out = listing.describe()
    except DataError as error:
        parser.error(str(error))
    damaged = 0
    loading = {"num_workers": len(os.sched_getaffinity(0))}
    loading["multiprocessing_context"] = "fork"  # a forked worker has the open tars
    for wrong in DataLoader(Damage(source, as_arrays(files), None), batch_size=None, **loading):
        if wrong:
            damaged += 1
            print(wrong)
    print(f"{len(files)} images, {damaged} of them damaged{left_out}")
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    main()
