"""What reading image files costs: `python -m studies.images read` and `python -m studies.images train`.

For figures that can be kept, run it on an idle machine. It writes Markdown tables to stdout.
"""

import argparse
import inspect
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import edits
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.outputs import read_metrics

EXAMPLE = "torchrun_vision"


def drop_caches() -> None:
    """Have the kernel forget all files that it keeps in memory (needs root)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def read_files(paths: list[Path]) -> int:
    """Open and read each file; return the number of bytes."""
    return sum(len(path.read_bytes()) for path in paths)


def read_tar(path: Path, where: list[tuple[int, int]]) -> int:
    """Read the files in a tar at these offsets and sizes; return the number of bytes."""
    file = os.open(path, os.O_RDONLY)
    try:
        return sum(len(os.pread(file, size, offset)) for offset, size in where)
    finally:
        os.close(file)


def rate(function: Callable[[], object], count: int, cold: bool) -> float:
    """Return how many files a second a function reads that reads `count` of them."""
    if cold:
        drop_caches()
    start = time.perf_counter()
    function()
    return count / (time.perf_counter() - start)


def read(args: argparse.Namespace) -> None:
    """Read files in random order, from a folder and from a tar: cold, and when the kernel has them in memory."""
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, tar_path = Path(temporary, "images"), Path(temporary, "images.tar")
        folder.mkdir()
        for number in range(args.files):
            (folder / f"{number:06}.jpg").write_bytes(random.randbytes(args.kilobytes * 1000))
        with tarfile.open(tar_path, "w") as tar:
            tar.add(folder, "images")
        with tarfile.open(tar_path) as tar:
            where = [(member.offset_data, member.size) for member in tar if member.isfile()]
        paths = sorted(folder.iterdir())
        order = random.Random(0).sample(range(args.files), args.files)
        paths, where = [paths[i] for i in order], [where[i] for i in order]
        copy = Path(temporary, "copy.tar")
        ways = {
            "files, cold": lambda: rate(lambda: read_files(paths), args.files, cold=True),
            "files, warm": lambda: rate(lambda: read_files(paths), args.files, cold=False),
            "tar in place, cold": lambda: rate(lambda: read_tar(tar_path, where), args.files, cold=True),
            "tar copied first, cold": lambda: rate(
                lambda: (shutil.copyfile(tar_path, copy), read_tar(copy, where)), args.files, cold=True
            ),
            "tar, warm": lambda: rate(lambda: read_tar(copy, where), args.files, cold=False),
        }
        found = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                found[name].append(way())
        print(f"{args.files} files of {args.kilobytes} kB, median of {args.rounds} rounds\n")
        print("| read | files/s |\n|---|---|")
        for name, rates in found.items():
            print(f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) |")


def train(args: argparse.Namespace) -> None:
    """Train from files and, in turn, from the same images decoded beforehand, which need no loader worker."""
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        files = copy_example(ROOT / "examples" / EXAMPLE, Path(temporary, "files"))
        command = LAUNCHERS[EXAMPLE].command(2)
        subprocess.run([sys.executable, "make_images.py"], cwd=files, check=True, stdout=subprocess.DEVNULL)
        memory = copy_example(files, Path(temporary, "memory"))
        edits.edit(
            memory / "image_files.py",
            "    def __getitem__(self, key):\n",
            "    def __getitem__(self, key):\n"
            "        if not hasattr(self, 'kept'):\n"
            "            self.kept = {}\n"
            "            self.kept = {index: self[index] for index in range(len(self))}\n"
            "        if self.kept:\n"
            "            return self.kept[key[0] if isinstance(key, tuple) else key]\n",
        )
        rounds = []
        for _ in range(args.rounds):
            speeds = []
            for folder, words in ((files, ["--workers", "1"]), (memory, ["--workers", "0"])):
                shutil.rmtree(folder / "output", ignore_errors=True)
                words = [*command, *words, "--epochs", "4", *args.arguments]
                subprocess.run(words, cwd=folder, check=True, capture_output=True)
                rows = read_metrics(folder / "output")[1:]
                speeds.append(statistics.median(row["samples_per_second"] for row in rows))
            rounds.append(speeds)
            print(
                f"files {speeds[0]:.1f}, memory {speeds[1]:.1f} images/s: {speeds[0] / speeds[1]:.2f}", file=sys.stderr
            )
        ratios = [ours / theirs for ours, theirs in rounds]
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        print(f"2 processes, {' '.join(args.arguments) or 'default settings'}, median of {args.rounds} pairs\n")
        print("| images | images/s | relative |\n|---|---|---|")
        print(f"| decoded beforehand, in memory | {medians[1]:.1f} | |")
        print(
            f"| files, 1 worker for each process | {medians[0]:.1f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


def main() -> None:
    """Read the command line and measure what it names."""
    parser = argparse.ArgumentParser("python -m studies.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for measure in (read, train):
        command = commands.add_parser(measure.__name__, description=inspect.getdoc(measure))
        command.set_defaults(measure=measure)
        command.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
        command.add_argument("--rounds", type=int, default=3)
    commands.choices["read"].add_argument("--files", type=int, default=4000)
    commands.choices["read"].add_argument("--kilobytes", type=int, default=100, help="size of a file")
    commands.choices["train"].add_argument("arguments", nargs="*", help="of train.py, after --")
    args = parser.parse_args()
    args.measure(args)


if __name__ == "__main__":
    main()
