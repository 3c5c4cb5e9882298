"""What processes ask of a shared file system when they import PyTorch: `python -m studies.startup`, as root.

It copies a venv (--venv, with what an example requires) and offers it on a file system that is slow on purpose, as a
shared one is: each request waits --latency, and one server for all nodes, which takes --service for each request and
sends --bandwidth. That file system is a small one of FUSE, in Python. A node is a mount of its own, with caches of its
own, which are empty at first; the files themselves are in this machine's memory. On each of --nodes a process imports
what a train.py of PyTorch does, at the same time. The ways:

venv          the folder, with its compiled modules (.pyc)
no .pyc       the same without them, where Python may not write them
image         one file with the folder in it, a squashfs, mounted on each node, as Apptainer does with an image
archive       one tar file, copied to each node's own disk and unpacked there, as with sbcast; then imported

It writes startup.csv and startup.md to the folder --output. It needs fusepy from PyPI and `apt-get install fuse3
libfuse2 squashfs-tools strace`.
"""

import argparse
import collections
import csv
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import get_type_hints

from benchmarks import report
from benchmarks.measure import positive

ROOT = Path(__file__).resolve().parent.parent
IMPORT = "import torch; from torch.nn.parallel import DistributedDataParallel; torch.optim.AdamW([torch.zeros(1)])"
WAYS = ("venv", "no .pyc", "image", "archive")
CACHED = 3  # seconds that a node trusts what it has been told of a file, as NFS does at least


@dataclass(frozen=True)
class Row:
    """One start: a row of startup.csv. Requests and megabytes are those of all nodes."""

    way: str
    nodes: int
    seconds: float  # until the last process has imported, from the mount on
    requests: int
    megabytes: float


def slow_folder(source: Path, target: Path, counts, lock, figures: tuple[float, float, float]) -> None:
    """Serve a folder at another path until it is unmounted; `counts` are the requests and the bytes."""
    from fuse import FUSE, FuseOSError, Operations

    latency, service, bandwidth = figures

    class Slow(Operations):
        """The folder, read only; each method is a request of the kernel's."""

        def ask(self, size: int = 0) -> None:
            time.sleep(latency)
            with lock:
                counts[0] += 1
                counts[1] += size
                time.sleep(service + size / bandwidth)

        def __call__(self, name, path, *words):
            try:
                return super().__call__(name, f"{source}{path}", *words)
            except OSError as error:
                raise FuseOSError(error.errno) from None

        def getattr(self, path, handle=None):
            self.ask()
            found = os.lstat(path)
            return {key: getattr(found, key) for key in dir(found) if key.startswith("st_")}

        def readdir(self, path, handle):
            self.ask()
            return [".", "..", *os.listdir(path)]

        def readlink(self, path):
            self.ask()
            return os.readlink(path)

        def open(self, path, flags):
            self.ask()
            return os.open(path, flags)

        def read(self, path, size, offset, handle):
            found = os.pread(handle, size, offset)
            self.ask(len(found))
            return found

        def release(self, path, handle):
            os.close(handle)

    kernel = {"ro": True, "attr_timeout": CACHED, "entry_timeout": CACHED, "max_readahead": 2**20}
    FUSE(Slow(), str(target), foreground=True, nothreads=False, **kernel)


@contextmanager
def mounted(source: Path, target: Path, *words) -> Iterator[None]:
    """Have the folder at `target`, slow, within the block."""
    target.mkdir(parents=True)
    server = multiprocessing.get_context("fork").Process(target=slow_folder, args=(source, target, *words))
    server.start()
    try:
        limit = time.monotonic() + 30
        while not os.path.ismount(target):
            if time.monotonic() > limit or not server.is_alive():
                sys.exit("startup.py: error: cannot mount by FUSE: see above")
            time.sleep(0.01)
        yield
    finally:
        subprocess.run(["fusermount", "-u", "-z", target], check=False)
        server.join(10)
        server.terminate()


def command(venv: Path) -> list[str]:
    """Return the command of a process that imports what a venv has, and writes nothing there."""
    packages = str(next(venv.glob("lib/python3*/site-packages")))
    return [sys.executable, "-I", "-S", "-B", "-c", f"import sys; sys.path.append({packages!r}); {IMPORT}"]


def start(way: str, nodes: int, made: Path, folder: Path, figures: tuple[float, float, float]) -> Row:
    """Import on so many nodes, one way; `made` has what the ways need, `folder` is for mounts and copies."""
    fork = multiprocessing.get_context("fork")
    counts, lock = fork.Array("q", 2, lock=False), fork.Lock()
    with ExitStack() as stack:
        shared = [folder / f"node{number}" for number in range(nodes)]
        for target in shared:
            stack.enter_context(mounted(made, target, counts, lock, figures))
        counts[:] = [0, 0]
        begin, running = time.perf_counter(), []
        if way == "archive":
            copies = [folder / f"disk{number}" for number in range(nodes)]
            for copy in copies:
                copy.mkdir()
                stack.callback(shutil.rmtree, copy)
            words = [
                ["tar", "-xf", str(target / "venv.tar"), "-C", str(copy)]
                for target, copy in zip(shared, copies, strict=True)
            ]
            for process in [subprocess.Popen(word) for word in words]:
                assert process.wait() == 0
            running = [subprocess.Popen(command(copy)) for copy in copies]
        for target in shared if way != "archive" else ():
            venv = target / ("bare" if way == "no .pyc" else "venv")
            if way == "image":
                venv = folder / f"image-{target.name}"
                venv.mkdir()
                subprocess.run(["mount", "-o", "loop,ro", target / "venv.squashfs", venv], check=True)
                stack.callback(subprocess.run, ["umount", str(venv)], check=True)
            running.append(subprocess.Popen(command(venv)))
        if any(process.wait() for process in running):
            sys.exit("startup.py: error: a process cannot import PyTorch: see above")
        return Row(way, nodes, time.perf_counter() - begin, counts[0], counts[1] / 1e6)


def link_or_copy(source: str, target: str) -> None:
    """Make a file the same as another, without a copy of its bytes if that can be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def make(venv: Path, made: Path) -> None:
    """Make what the ways need: two copies of the venv, one of them compiled, an image and an archive."""
    made.mkdir()
    for name in ("bare", "venv"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(venv, made / name, symlinks=True, ignore=ignored, copy_function=link_or_copy)
    words = [sys.executable, "-m", "compileall", "-q", "-j", "2", str(made / "venv")]
    subprocess.run(words, stdout=subprocess.DEVNULL)  # it complains about files that are no Python, as pip does not
    fast = ["-comp", "zstd", "-Xcompression-level", "1", "-quiet", "-no-progress"]
    subprocess.run(["mksquashfs", made / "venv", made / "venv.squashfs", *fast], check=True)
    subprocess.run(["tar", "-C", made / "venv", "-cf", made / "venv.tar", "."], check=True)


def trace(venv: Path, file: Path) -> str:
    """Return what strace says of an import's calls that have to do with files."""
    words = ["strace", "-f", "-y", "-o", str(file), "-e", "trace=%file,read,pread64,getdents64,mmap"]
    subprocess.run([*words, *command(venv)], check=True)
    return file.read_text(errors="replace")


def count(lines: str, venv: Path) -> dict[str, int]:
    """Return how many calls of each kind a trace has for files of a venv, those that failed, and the bytes read."""
    found: collections.Counter[str] = collections.Counter()
    for line in lines.splitlines():
        match = re.match(r"(?:\d+ +)?(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+)", line)
        if match and f"{venv}/" in match[2]:
            name, _, result = match.groups()
            found[name] += 1
            found[f"{name}, not found"] += result == "-1"
            found["bytes read"] += int(result) if name in ("read", "pread64") else 0
    return dict(+found)


def write(rows: Sequence[Row], path: Path) -> None:
    """Write rows to a CSV file, with the names of their fields in its first line."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(part.name for part in fields(Row))
        writer.writerows([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in astuple(row)] for row in rows)


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        kinds = get_type_hints(Row).items()
        return [Row(**{name: kind(row[name]) for name, kind in kinds}) for row in csv.DictReader(file)]


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the table's rows of cells."""
    found = []
    for way in dict.fromkeys(row.way for row in rows):
        mine = [row for row in rows if row.way == way]
        cell = {"way": way}
        cell |= {f"{row.nodes} nodes, s".replace("1 nodes", "1 node"): f"{row.seconds:.1f}" for row in mine}
        cell |= {"requests of a node": f"{mine[0].requests / mine[0].nodes:,.0f}"}
        found.append(cell | {"MB read by a node": f"{mine[0].megabytes / mine[0].nodes:,.0f}"})
    return found


def main() -> None:
    """Read the command line, measure, write and print."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.startup", description=__doc__, formatter_class=layout)
    parser.add_argument("--venv", type=Path, default=Path(sys.prefix), help="default: this Python's own")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--nodes", nargs="+", type=positive, default=[1, 2, 4])
    parser.add_argument("--latency", type=float, default=0.5e-3, help="seconds of a request")
    parser.add_argument("--service", type=float, default=0.1e-3, help="seconds of the server for a request")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second of the server")
    parser.add_argument(
        "--folder", type=Path, help="where to work: it takes three times the venv, and as much per node"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    missing = [name for name in ("fusermount", "mksquashfs", "strace", "tar") if not shutil.which(name)]
    if os.geteuid() != 0 or missing:
        parser.error(f"needs root, and {' '.join(missing) or 'a venv'} (apt-get install fuse3 squashfs-tools strace)")
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="startup-", dir=args.folder) as temporary:
        folder, made = Path(temporary), Path(temporary, "made")
        make(args.venv.resolve(), made)
        for name, number in count(trace(made / "venv", folder / "trace"), made / "venv").items():
            print(f"{name}: {number:,}", flush=True)
        for way in args.ways:
            for number in args.nodes:
                rows.append(
                    start(
                        way,
                        number,
                        made,
                        folder / f"{WAYS.index(way)}-{number}",
                        (args.latency, args.service, args.bandwidth),
                    )
                )
                print(rows[-1], flush=True)
                write(rows, args.output / "startup.csv")
    report.finish(cells(rows), None, args.output / "startup.csv", "")


if __name__ == "__main__":
    main()
