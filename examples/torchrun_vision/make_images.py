"""Write a small folder of image files, `images/`, made of the digits in common/.

`python make_images.py` writes 300 files for training and 150 for validation, in the layout that
train.py reads: PART/CLASS/NAME.png.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional as F

from common import data

# These digits differ from each other also if they are mirrored, as train.py does at random.
CLASSES = {0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 6: "six"}
# Each class has so many files.
PARTS = {"train": 50, "val": 25}


def write_images(folder, size):
    """Write the files under `folder`, each of size x size pixels in colour."""
    kept = {part: dict.fromkeys(CLASSES, 0) for part in PARTS}
    for part, test_or_train in zip(PARTS, data.load("digits"), strict=True):
        for image, label in zip(test_or_train.images, test_or_train.labels.tolist(), strict=True):
            if label not in CLASSES or kept[part][label] == PARTS[part]:
                continue
            kept[part][label] += 1
            number = kept[part][label]
            batch = image.permute(2, 0, 1)[None].float()
            (large,) = F.interpolate(batch, size=(size, size), mode="bilinear")
            # The colour is another one in each file.
            colour = torch.tensor([1.0, 0.2 + 0.008 * (number % 100), 0.5]).view(3, 1, 1)
            path = folder / part / CLASSES[label] / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = (large * colour).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(path)


def main():
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=defaults)
    add = parser.add_argument
    add("--folder", type=Path, default="images", help="the folder to write; it must not exist yet")
    add("--size", type=int, default=48, help="width and height of the images, in pixels")
    args = parser.parse_args()
    if args.folder.exists():
        print(f"{args.folder} is there already: nothing was written")
        return
    temporary = args.folder.with_name(f"{args.folder.name}.{os.getpid()}.tmp")
    try:
        write_images(temporary, args.size)
        os.replace(temporary, args.folder)
    except (OSError, RuntimeError) as error:
        parser.error(f"cannot write {args.folder} ({error}): is the disk full, or your quota?")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    count = sum(PARTS.values()) * len(CLASSES)
    print(f"{args.folder}: {count} images of {len(CLASSES)} classes")


if __name__ == "__main__":
    main()
