"""Samples for the tests: image files in MNIST's format, on a server, too, and the batches that a process has to see."""

import contextlib
import functools
import gzip
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from harness.launchers import ROOT

CLASSES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
SIZES = {"train": 700, "t10k": 101}


def idx_files() -> dict[str, bytes]:
    """Return MNIST's four files, made of the embedded digits: the header of the idx format, then the bytes."""
    import numpy as np  # late, as PyTorch below: each process of the tests imports this module

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


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve MNIST's files, packed, from a folder that is made here, on loopback; yield the address."""
    folder.mkdir()
    for file, content in idx_files().items():
        (folder / f"{file}.gz").write_bytes(gzip.compress(content))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def batches(size: int, rank: int, world_size: int, batch_size: int, epoch: int = 0) -> list[list[int]]:
    """Return the indices of one process's training batches in an epoch, as every train.py makes them."""
    from torch.utils.data import BatchSampler, DistributedSampler

    sampler = DistributedSampler(range(size), world_size, rank, seed=0, drop_last=True)
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, batch_size, drop_last=True))
