"""Image files in FOLDER/train/CLASS/ and FOLDER/val/CLASS/, read by torchvision's ImageFolder.

`python image_files.py FOLDER` reads all images below a folder, and names those that are damaged.
"""

import ctypes
import functools
import os
import signal
import sys
import unicodedata

import torch
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2

from common.data import DataError

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
HIDDEN = ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN")  # and names that begin with a dot
# Mean and standard deviation of ImageNet's pixels, with which torchvision's weights were trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def train_transform(size):
    """Return the random augmentation of training images: change it to suit your images."""
    return v2.Compose([v2.RandomResizedCrop(size, scale=(0.35, 1)), v2.RandomHorizontalFlip()])


def test_transform(size):
    """Return the transform of all other images: nothing is random, and only the centre is used."""
    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size)])


def normalise(images, dtype):
    """Return images (B, 3, H, W), uint8, as floats with about mean 0 and variance 1.

    train.py does this on the GPU: until then an image has one byte per value instead of four.
    """
    mean, std = statistics(images.device, dtype)
    return images.to(dtype, memory_format=torch.channels_last).sub_(mean).div_(std)


@functools.cache  # if they were copied to the GPU in each step, the CPU would wait
def statistics(device, dtype):
    """Return MEAN and STD of pixels from 0 to 255, each (3, 1, 1)."""
    return [255 * torch.tensor(x, device=device, dtype=dtype)[:, None, None] for x in (MEAN, STD)]


def load_image(path):
    """Return the image (3, H, W), uint8, in a file, upright. DataError names a damaged file."""
    try:
        image = decode_image(path, mode="RGB", apply_exif_orientation=True)
        if image.dim() != 3:
            raise RuntimeError("it has several frames")
    except RuntimeError as error:
        reason = str(error).split(", ", 2)[-1].partition(". ")[0]  # without torchvision's own file
        advice = "replace or remove it; python image_files.py FOLDER names all damaged files"
        raise DataError(f"{path} is damaged ({reason}): {advice}") from None
    return v2.functional.to_dtype(image, torch.uint8, scale=True)  # a PNG may have 16 bits


def is_hidden(name):
    """Return whether systems and tools put a file or folder of this name beside the images."""
    return name.startswith(".") or name in HIDDEN


@functools.cache
def leads_up(folder, root):
    """Return whether a folder is in a link to a folder above, whose images would be read again."""
    if folder == root:
        return False
    above = os.path.dirname(folder)
    again = f"{os.path.realpath(above)}/".startswith(f"{os.path.realpath(folder)}/")
    return again or leads_up(above, root)


class Images(ImageFolder):
    """ImageFolder without hidden names. An image's augmentation depends on seed, epoch and index.

    So an augmentation is the same in any process, and after a resume. `left_out`: other files.
    """

    def __init__(self, folder, transform=None, seed=0):
        self.seed, self.left_out = seed, []
        self.epoch = torch.tensor(0).share_memory_()  # shared: workers see train.py's value
        folder = os.path.normpath(folder)
        super().__init__(folder, transform, loader=load_image, is_valid_file=self.is_wanted)

    def is_wanted(self, path):
        """Return whether a file is an image to be read; note it in left_out if it is not."""
        names = os.path.relpath(path, self.root).split("/")
        wanted = path.lower().endswith(ENDINGS) and not any(map(is_hidden, names))
        wanted = wanted and not leads_up(os.path.dirname(path), self.root)
        self.left_out += [] if wanted else [path]
        return wanted

    def find_classes(self, directory):
        """Return the names of the classes, and each folder's number."""
        names, _ = super().find_classes(directory)
        # A letter such as é can be written in two ways, and macOS and Linux use different ones.
        same = {n: unicodedata.normalize("NFC", n) for n in names if not is_hidden(n)}
        classes = sorted(set(same.values()))
        numbers = {name: number for number, name in enumerate(classes)}
        return classes, {name: numbers[one] for name, one in same.items()}

    def __getitem__(self, index):
        number = (self.seed * 10**4 + self.epoch.item() + 1) * len(self) + index
        torch.default_generator.manual_seed(number)  # torch.manual_seed would take 0.3 ms longer
        return super().__getitem__(index)


class Unlabelled(Images):
    """The images below a folder, at any depth, all with the label 0."""

    def find_classes(self, directory):
        """Make the folder itself the only class."""
        return [""], {"": 0}


def load(folder, size, seed):
    """Return the training set and the test set, with images of size x size pixels."""
    try:
        train_set = Images(f"{folder}/train", train_transform(size), seed)
        test_set = Images(f"{folder}/val", test_transform(size), seed)
    except (OSError, ValueError) as error:  # ImageFolder has found no class, or a class is empty
        layout = "it needs train/CLASS/*.jpg and val/CLASS/*.jpg, as make_images.py writes them"
        raise DataError(f"--data-dir {folder}: {error}; {layout}") from None
    other = sorted({*train_set.classes} ^ {*test_set.classes})
    if other or len(train_set.classes) < 2:
        wrong = f"only one part has the class {other[0]}" if other else "there is only one class"
        raise DataError(f"{wrong} in {folder}: each folder in train/ and val/ is a class")
    left_out = train_set.left_out + test_set.left_out
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"{len(left_out)} files are left out, such as {left_out[0]}")
    return train_set, test_set


def load_weights(model, path):
    """Load a state dict; the last layer keeps random weights if the file has other classes."""
    own = model.state_dict()
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        fits = {name: w for name, w in found.items() if name in own and w.shape == own[name].shape}
    except Exception as error:  # a wrong file can raise almost anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(f"--weights {path} is no state dict ({reason})") from None
    new = [name for name in own if name not in fits]
    if len({name.rpartition(".")[0] for name in new}) > 1:
        raise DataError(f"--weights {path} does not fit --model: it lacks {', '.join(new[:5])}")
    model.load_state_dict(fits, strict=False)


def start_worker(_):
    """Make a loader's worker end, and clean up, when the process that it reads for ends."""

    def end(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the signal can come twice
        sys.exit()

    signal.signal(signal.SIGINT, end)
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    for path, _ in Unlabelled(sys.argv[1]).samples:
        try:
            load_image(path)
        except DataError as error:
            print(error)
