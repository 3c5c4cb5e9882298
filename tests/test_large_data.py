"""docs/large-data.md: its change to fsdp's train.py, and what measures it, as they stand."""

import argparse
import re
import sys
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import ROOT

pytestmark = pytest.mark.only("fsdp")
PAGE = ROOT / "docs" / "large-data.md"


def test_mapped_text(example: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mapped, a text has the same samples as in memory, and takes none; what cannot be mapped is one clear line."""
    import torch

    text = folder / "book.txt"
    text.write_bytes(bytes(range(256)) * 2**18)  # 64 MB
    args = argparse.Namespace(text_file=text, context=64)
    before = outputs.import_file(folder / "train.py").load_data(args)
    (diff,) = readme.fences(PAGE, "diff")
    edits.apply_diff(folder / "train.py", diff)
    train = outputs.import_file(folder / "train.py")
    held = memory()
    after = train.load_data(args)
    for one, other in zip(before, after, strict=True):
        indices = torch.randint(len(one), (50,)).tolist()
        assert len(one) == len(other) and all(map(torch.equal, one[indices], other[indices]))
    assert memory() - held < 2**25, "a map is no memory of the process's own"
    assert re.fullmatch(r"of 67108864 tokens, the first with checksum \d+", args.text)
    calls: list[str] = []

    def fail(message: object) -> None:
        calls.append(str(message))

    train.plumbing.fail = fail
    (folder / "empty.txt").write_bytes(b"")
    for name in ("none.txt", "empty.txt"):
        train.load_data(argparse.Namespace(text_file=folder / name, context=64))
    assert len(calls) == 2 and "none.txt" in calls[0], calls


def memory() -> int:
    """Return how many bytes of its own this process has, without those of files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def test_what_measures_it(example: str, folder: Path) -> None:
    """The page's program prints its ratio."""
    (program,) = readme.fences(PAGE, "python")
    (folder / "compare.py").write_text(program)
    (folder / "book.txt").write_bytes(bytes(2**22))
    run = runs.Run([sys.executable, "compare.py", "book.txt", str(2**22)], folder).wait()
    assert run.status == 0 and re.fullmatch(r"map / memory: \d+\.\d\d\n", run.stdout), run.stderr
