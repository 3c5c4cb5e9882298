"""Changes to an example's copy, which make it do what a test needs."""

import difflib
import textwrap
from pathlib import Path

from harness.launchers import Launcher


def edit(path: Path, old: str, new: str) -> None:
    """Replace the one place where a file says `old`; raise AssertionError if there is none, or several."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path} says {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def end_after_handing_over(folder: Path) -> None:
    """Replace the functions of a live plumbing/, of which only job.sh's first lines stay: they hand over to a copy."""
    path = folder / "plumbing" / "job.sh"
    first, between, _ = path.read_text().partition("    return\nfi\n")
    assert between, "job.sh does not hand over"
    for file in path.parent.glob("*.sh"):
        file.write_text("echo 'the edited plumbing'; exit 3\n")
    path.write_text(f"{first}{between}echo 'the edited plumbing'; exit 3\n")


def changed_lines(one: str, other: str) -> int:
    """Return how many lines `diff` shows of two texts, removed and added ones together."""
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(one.splitlines(), other.splitlines(), n=0))[2:])


def play_one_gpu(folder: Path) -> None:
    """Have an example's train.py believe that this machine has one GPU."""
    imports = "from common import data\n"
    edit(folder / "train.py", imports, imports + "torch.cuda.device_count = lambda: 1\n")


def plant(folder: Path, lines: str) -> None:
    """Put lines of Python where an example's ConvNet begins to compute; in TensorFlow, where its graph is made."""
    path, first = folder / "common" / "models.py", "        x = F.relu(self.conv1(images))"
    if (folder / "numpy_data.py").exists():
        path, first = folder / "train.py", "        with tf.GradientTape() as tape:"
    edit(path, first, textwrap.indent(textwrap.dedent(lines), " " * 8) + first)


HOLD = "hold"  # a file with the number of epochs that may be done
WAIT = f"""
import os, time
from pathlib import Path

def wait():
    permitted, metrics = Path("{HOLD}"), Path("output", "metrics.csv")
    while metrics.exists() and not os.path.exists(os.environ["STOP_FILE"]):
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


NOTE_ORDER = """
import torch
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler

class Noting(DistributedSampler):
    def __iter__(self):
        if distributed_c10d.is_initialized():
            gloo = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
            with open("timeouts", "a") as file:
                print(gloo.options._timeout.total_seconds(), file=file)
        indices = list(super().__iter__())
        with open(f"order-{self.rank}", "a") as file:
            print(int(self.drop_last), self.epoch, len(self.dataset), *indices, file=file)
        return iter(indices)
"""


def note_order(folder: Path) -> None:
    """Have a copy of an example of PyTorch write down which samples each process trains with, in each epoch.

    The file `timeouts` has how many seconds a collective may take, where these are torch.distributed's.
    """
    (folder / "noting.py").write_text(NOTE_ORDER)
    edit(folder / "train.py", " = DistributedSampler(train_set, ", " = __import__('noting').Noting(train_set, ")


def leave_digits(folder: Path, samples: int, part: str = "train") -> None:
    """Leave only the first so many samples of the digits to train with, or to test, in an example's copy."""
    import numpy as np

    path = folder / "common" / "digits.npz"
    with np.load(path) as file:
        arrays = {name: array[:samples] if name.startswith(f"{part}_") else array for name, array in file.items()}
    np.savez(path, **arrays)


NOTE_USE = """
import os, signal
from pathlib import Path

taken = {}  # batches of each epoch

def note(epoch, indices):
    with open(f"used-{os.environ['NUMBER']}-{os.getpid()}", "a") as file:
        print(epoch, *indices, file=file)
    taken[epoch] = taken.get(epoch, 0) + 1
    if (epoch, taken[epoch]) == (int(os.environ.get("END_IN", -1)), 3):
        if "STEPS" in os.environ:
            Path(os.environ["STOP_FILE"]).touch()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
"""
NOTE_LOADER = """
from torch.utils.data import DataLoader, DistributedSampler

class Sampler(DistributedSampler):
    def __init__(self, dataset, *args, **options):
        super().__init__(dataset, *args, **options)
        Loader.sampled = self

class Loader(DataLoader):
    def __iter__(self):
        batches = super().__iter__()
        return self.noting(batches) if self.dataset is Loader.sampled.dataset else batches

    def noting(self, batches):
        lists = self.sampler if self.batch_sampler is None else self.batch_sampler
        for batch, indices in zip(batches, list(lists)):
            note(Loader.sampled.epoch, [index[0] if isinstance(index, tuple) else index for index in indices])
            yield batch
"""


def note_use(folder: Path, launcher: Launcher) -> None:
    """Have a copy of an example write down which samples each process trains with, when it does, in used-NUMBER-PID.

    NUMBER is a variable of the run. With END_IN a process ends the run after its third batch of that epoch, counted
    from 0: with STEPS it asks the run to stop, else it kills itself.
    """
    (folder / "used.py").write_text(NOTE_USE + NOTE_LOADER * launcher.pytorch)
    if launcher.pytorch:
        names = "from used import Loader as DataLoader, Sampler as DistributedSampler\n\n"
        edit(folder / "train.py", "def parse_args():\n", names + "def parse_args():\n")
    else:
        step = "        sums += train_step(*train_set[indices])\n"
        edit(folder / "train.py", step, f"        __import__('used').note(epoch, indices)\n{step}")


PLAIN_MODEL = """
from torch import nn

def make(classes):
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, classes))
"""


def without_batchnorm(folder: Path) -> None:
    """Have a copy of torchrun_vision train a model without BatchNorm, whose statistics are of one process's batch."""
    (folder / "plain_model.py").write_text(PLAIN_MODEL)
    old = "classifiers.make(args.model, classes, args.image_size)"
    edit(folder / "train.py", old, "__import__('plain_model').make(classes)")


NOTE_RATES = """
import traceback
from torch.optim.optimizer import register_optimizer_step_post_hook

def note_rates(optimizer, args, kwargs):
    if {"broadcast_optimizer_state", "_init_optim_state"} & {frame.name for frame in traceback.extract_stack()}:
        return  # Horovod's and the distributed checkpoint's: they take a step so that there is a state to be replaced
    state = next(iter(optimizer.state.values()))
    for group in optimizer.param_groups:
        with open("rates", "a") as file:
            print(int(state["step"]), group["lr"], file=file)

register_optimizer_step_post_hook(note_rates)
"""


def note_rates(folder: Path, launcher: Launcher) -> None:
    """Have an example's copy write down with which learning rate its optimizer has taken each of its steps."""
    if launcher.pytorch:
        data = folder / "common" / "data.py"  # which every example imports
        data.write_text(data.read_text() + NOTE_RATES)
        return
    step = "        optimizer.apply(gradients, model.trainable_variables)\n"
    note = "        tf.print(optimizer.iterations, optimizer.learning_rate, output_stream='file://rates')\n"
    edit(folder / "train.py", step, step + note)


def noted_rates(folder: Path) -> list[float]:
    """Return the learning rates that note_rates has written down, in the order of the steps, and forget them.

    Raises AssertionError if processes, groups of parameters or a resumed run had different rates in one step, or if a
    step is missing.
    """
    noted = {tuple(line.split()) for line in (folder / "rates").read_text().splitlines()}
    (folder / "rates").unlink()
    rates = {int(step): float(rate) for step, rate in noted}
    assert len(rates) == len(noted) and sorted(rates) == list(range(1, len(rates) + 1)), noted
    return [rates[step] for step in sorted(rates)]


def apply_diff(path: Path, text: str) -> None:
    """Apply a README's diff: lines with `-` are replaced by those with `+`; lines with a space before them stay.

    A part of the diff is some lines with a space or `-`, and after them some with `+`.
    Raises AssertionError if the first lines of a part are not in the file exactly once, as complete lines.
    """
    lines = text.splitlines()
    while lines:
        old, new = "\n", "\n"
        while lines and not lines[0].startswith("+"):
            assert lines[0][:1] in ("-", " "), f"a line that neither stays nor is removed or added: {lines[0]!r}"
            new += f"{lines[0][1:]}\n" if lines[0].startswith(" ") else ""
            old += f"{lines.pop(0)[1:]}\n"
        while lines and lines[0].startswith("+"):
            new += f"{lines.pop(0)[1:]}\n"
        content = f"\n{path.read_text()}"
        assert old != "\n" and content.count(old) == 1, f"{path} says {old!r} {content.count(old)} times"
        assert new != old, f"nothing changes {old!r}"
        path.write_text(content.replace(old, new).removeprefix("\n"))
