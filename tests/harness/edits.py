"""Changes to an example's copy, which make it do what a test needs."""

import textwrap
from pathlib import Path


def edit(path: Path, old: str, new: str) -> None:
    """Replace the one place where a file says `old`; raise AssertionError if there is none, or several."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path} says {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def play_one_gpu(folder: Path) -> None:
    """Have an example's train.py believe that this machine has one GPU."""
    imports = "from common import data\n"
    edit(folder / "train.py", imports, imports + "torch.cuda.device_count = lambda: 1\n")


def plant(folder: Path, lines: str) -> None:
    """Put lines of Python where an example's ConvNet begins to compute."""
    first = "        x = F.relu(self.conv1(images))"
    edit(folder / "common" / "models.py", first, textwrap.indent(textwrap.dedent(lines), " " * 8) + first)
