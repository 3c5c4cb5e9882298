"""Changes to an example's copy, which make it do what a test needs."""

import textwrap
from pathlib import Path

from harness.launchers import Launcher


def edit(path: Path, old: str, new: str) -> None:
    """Replace the one place where a file says `old`; raise AssertionError if there is none, or several."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path} says {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def plant(folder: Path, lines: str) -> None:
    """Put lines of Python where an example's ConvNet begins to compute; in TensorFlow, where its graph is made."""
    path, first = folder / "common" / "models.py", "        x = F.relu(self.conv1(images))"
    if (folder / "checkpoint.py").exists():
        path, first = folder / "train.py", "        with tf.GradientTape() as tape:"
    edit(path, first, textwrap.indent(textwrap.dedent(lines), " " * 8) + first)


HOLD = "hold"  # a file with the number of epochs that may be done
WAIT = f"""
import time
from pathlib import Path

def wait():
    permitted, metrics = Path("{HOLD}"), Path("output", "metrics.csv")
    while metrics.exists() and not Path("output", "stop").exists():
        try:
            number = permitted.read_text()
        except FileNotFoundError:
            return
        if number and len(metrics.read_text().splitlines()) - 1 < int(number):  # else it is just being written
            return
        time.sleep(0.05)
"""


def start_epochs_with(folder: Path, launcher: Launcher, statement: str) -> None:
    """Have an example's copy begin each epoch with this statement."""
    line = launcher.epoch_start
    indent = line[: -len(line.lstrip())]
    edit(folder / "train.py", line, f"{indent}{statement}\n{line}")


def hold_epochs(folder: Path, launcher: Launcher) -> None:
    """Have an example's copy begin no epoch after as many as the file HOLD says, unless it is asked to stop."""
    (folder / "held.py").write_text(WAIT)
    start_epochs_with(folder, launcher, "__import__('held').wait()")


def leave_digits(folder: Path, samples: int, part: str = "train") -> None:
    """Leave only the first so many samples of the digits to train with, or to test, in an example's copy."""
    import numpy as np

    path = folder / "common" / "digits.npz"
    with np.load(path) as file:
        arrays = {name: array[:samples] if name.startswith(f"{part}_") else array for name, array in file.items()}
    np.savez(path, **arrays)


PLAIN_MODEL = """
from torch import nn

def make(classes):
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, classes))
"""


def without_batchnorm(folder: Path) -> None:
    """Have a copy of torchrun_vision train a model without BatchNorm, whose statistics are of one process's batch."""
    (folder / "plain_model.py").write_text(PLAIN_MODEL)
    old = "models.get_model(args.model, num_classes=len(args.classes))"
    edit(folder / "train.py", old, "__import__('plain_model').make(len(args.classes))")
