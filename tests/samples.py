"""Image files in MNIST's format, made of the embedded digits."""

import struct
from pathlib import Path

from harness.launchers import ROOT

CLASSES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
SIZES = {"train": 700, "t10k": 101}


def idx_files() -> dict[str, bytes]:
    """Return MNIST's four files: the header of the idx format, then the bytes."""
    import numpy as np  # late: each process of the tests imports this module

    arrays = np.load(ROOT / "common" / "digits.npz")
    files = {}
    for part, key in (("train", "train"), ("t10k", "test")):
        small = arrays[f"{key}_images"][: SIZES[part]].astype(np.uint16) * 255 // 16
        images = np.pad(small.astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
        labels = arrays[f"{key}_labels"][: SIZES[part]]
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">IIII", 0x803, *images.shape) + images.tobytes()
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">II", 0x801, len(labels)) + labels.tobytes()
    return files


def write_data(data_dir: Path, name: str) -> Path:
    """Write the files of data set `name` where torchvision expects them under `data_dir`; return their folder."""
    raw = data_dir / CLASSES[name] / "raw"
    raw.mkdir(parents=True)
    for file, content in idx_files().items():
        (raw / file).write_bytes(content)
    return raw
