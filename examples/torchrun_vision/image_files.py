"""Labelled image files: from a folder in the layout of torchvision's ImageFolder, or from a tar of one.

    FOLDER/train/CLASS/NAME.jpg    FOLDER/val/CLASS/NAME.jpg    (also .jpeg, .png and .webp)

`tar -cf images.tar images` makes the tar: one large file, which a parallel file system reads far faster than many
small ones. Where it would not fit on a node's disk: a folder of several, which are read where they are.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from common.data import DataError

PARTS = ("train", "val")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
BITS = 48  # of an offset in a tar
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, with which torchvision's weights were trained


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


class Images(Dataset):
    """Labelled image files, decoded when they are asked for.

    Indexing with i or with (i, seed) returns one image (3, size, size), uint8, and its label. The same seed makes the
    same random augmentation, in whichever process. Raises DataError if the file cannot be read or decoded.
    """

    def __init__(self, source, files, transform):
        """Keep files, a list of (path, label, offset, size), the offset with the number of a tar above its BITS.

        `source` is a folder, or the paths of tars and their file descriptors.
        """
        self.source, self.transform = source, transform
        # Arrays, not a list: workers share memory with this process until it is written to, and reading an entry of a
        # list writes its reference count.
        self.paths = np.array([os.fsencode(file[0]) for file in files])
        self.labels, self.offsets, self.sizes = (np.array([file[i] for file in files]) for i in (1, 2, 3))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, key):
        index, seed = key if isinstance(key, tuple) else (key, 0)
        path = os.fsdecode(self.paths[index])
        try:
            if isinstance(self.source, Path):
                content = (self.source / path).read_bytes()
            else:
                number, offset = divmod(int(self.offsets[index]), 2**BITS)
                content = os.pread(self.source[1][number], int(self.sizes[index]), offset)
            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            image = decode_image(encoded, ImageReadMode.RGB, apply_exif_orientation=True)
        except (OSError, RuntimeError, ValueError) as error:
            where = self.source if isinstance(self.source, Path) else self.source[0][number]
            reason = getattr(error, "strerror", None) or "it cannot be decoded"
            raise DataError(f"{where}/{path} is damaged ({reason}): replace it, or remove it") from None
        # v2 uses this process's random numbers. torch.manual_seed() would set those of GPUs, too, and take 0.3 ms more.
        torch.default_generator.manual_seed(seed)
        return self.transform(image), int(self.labels[index])


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


def load(path, size):
    """Return the training set, the test set, and the names of the classes; images have `size` x `size` pixels.

    All processes of torchrun call it: a tar is copied to the own disk of each node once, see `stage`. Raises DataError
    if there is nothing at `path`, or if the two parts do not have the same classes with at least one file each.
    """
    path = Path(path)
    if tars := tars_in(path):
        source, files = _open_tars(path, tars)
    elif path.is_dir():
        source, files = path, {part: _files_in_folder(path, part) for part in PARTS}
    elif path.is_file():
        source = ([path], [stage(path)])
        files = _files_in_tar(path, source[1][0])
    else:
        raise DataError(
            f"there is no {path}: --data-dir is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or a tar of one, "
            "or a folder of such tars; python make_images.py writes an example, images/"
        )
    classes = [sorted({PurePosixPath(file).parts[1] for file in files[part]}) for part in PARTS]
    for part, missing in (("val", set(classes[0]) - set(classes[1])), ("train", set(classes[1]) - set(classes[0]))):
        if missing:
            raise DataError(
                f"{path}/{part} has no image of the class {min(missing)}, which the other part has: add some"
            )
    if not classes[0]:
        raise DataError(f"{path} has no train/CLASS/*.jpg (or {', '.join(ENDINGS[1:])})")
    labels = {name: label for label, name in enumerate(classes[0])}
    sets = []
    for part, transform in zip(PARTS, (train_transform(size), test_transform(size)), strict=True):
        listed = [(file, labels[PurePosixPath(file).parts[1]], *where) for file, where in sorted(files[part].items())]
        sets.append(Images(source, listed, transform))
    return *sets, classes[0]


def _files_in_folder(path, part):
    """Return the images of one part, as paths relative to `path`, with nothing to say about where they are in a tar."""
    try:
        found = ImageFolder(path / part, is_valid_file=lambda file: file.lower().endswith(ENDINGS)).samples
    except OSError as error:  # no such folder, no class, or a class without an image
        reason = str(error).partition(". ")[0]
        raise DataError(f"{path}/{part} is not a folder CLASS/*.jpg ({reason}): add what is missing") from None
    return {os.path.relpath(file, path): (0, 0) for file, _ in found}


def _files_in_tar(path, file):
    """Return the images of a tar by part, with their offset and size in it."""
    found = {part: {} for part in PARTS}
    try:
        with os.fdopen(os.dup(file), "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                parts = parts[1:] if parts and parts[0] not in PARTS else parts  # `tar -cf images.tar images`
                if not member.isfile() or len(parts) < 3 or parts[0] not in PARTS:
                    continue
                if parts[-1].lower().endswith(ENDINGS):
                    found[parts[0]]["/".join(parts)] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} is no complete tar ({error}): make it with tar -cf, without compression") from None
    return found


def tars_in(path):
    """Return the tars in a folder that is none of train/CLASS/*.jpg itself."""
    return [] if (path / "train").exists() else sorted(path.glob("*.tar"))


def _open_tars(path, tars):
    """Return the source of Images for a folder of tars, and the images of all of them by part; they are not copied."""
    opened, found = [], {part: {} for part in PARTS}
    for number, tar in enumerate(tars):
        try:
            opened.append(os.open(tar, os.O_RDONLY))
        except OSError as error:
            raise DataError(f"{tar} cannot be read ({error.strerror})") from None
        for part, files in _files_in_tar(tar, opened[-1]).items():
            if twice := found[part].keys() & files.keys():  # one of the two would be lost
                raise DataError(f"{tar}: another tar in {path} has {min(twice)}, too: give one of them another name")
            found[part] |= {file: (number * 2**BITS + offset, size) for file, (offset, size) in files.items()}
    return (tars, opened), found


def stage(path):
    """Copy a tar to this node's own disk, once for all processes of the node; return its file descriptor.

    The copy has no name as soon as all have opened it: the disk space is free when the last process has ended, however
    that ends. It goes to $SLURM_TMPDIR, else to $TMPDIR, else to /tmp.
    """
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
