"""Write a small folder of image files, images/, made of the digits in common/.

It has 300 files for training and 150 for validation, as train.py reads them: PART/CLASS/NAME.png.
"""

import shutil
from pathlib import Path

import torch
from torchvision.transforms import v2

from common import data

FOLDER, SIZE = Path("images"), 48  # pixels
# These digits differ from each other also if they are mirrored, as train.py does at random.
CLASSES = {0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 6: "six"}
PARTS = {"train": 50, "val": 25}  # files of each class


def main():
    """Write the files, each in colour, unless the folder exists."""
    if FOLDER.exists():
        raise SystemExit(f"{FOLDER} is there already: nothing was written")
    temporary = FOLDER.with_name("images.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    for part, digits in zip(PARTS, data.load("digits"), strict=True):
        written = dict.fromkeys(CLASSES.values(), 0)
        for image, label in zip(digits.images, digits.labels.tolist(), strict=True):
            name = CLASSES.get(label)
            if name is None or written[name] == PARTS[part]:
                continue
            written[name] += 1
            image = image.permute(2, 0, 1).float()
            large = v2.functional.resize(image, [SIZE, SIZE], antialias=False)
            # Each file has another colour.
            colour = torch.tensor([1.0, 0.2 + 0.008 * written[name], 0.5])[:, None, None]
            path = temporary / part / name / f"{written[name]:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            v2.functional.to_pil_image((large * colour).byte()).save(path)
    temporary.rename(FOLDER)
    print(f"{FOLDER}: {sum(PARTS.values()) * len(CLASSES)} images of {len(CLASSES)} classes")


if __name__ == "__main__":
    main()
