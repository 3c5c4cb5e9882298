"""Changes to an example's copy, which make it do what a test needs."""

import textwrap
from pathlib import Path

from tests.harness.launchers import Launcher


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
    """Put lines of Python where an example's ConvNet begins to compute; in TensorFlow, where its graph is made."""
    path, first = folder / "common" / "models.py", "        x = F.relu(self.conv1(images))"
    if not path.exists():
        path, first = folder / "train.py", "        with tf.GradientTape() as tape:"
    edit(path, first, textwrap.indent(textwrap.dedent(lines), " " * 8) + first)


NOTE_RATES = """
import traceback
from torch.optim.optimizer import register_optimizer_step_post_hook

def note_rates(optimizer, args, kwargs):
    if any(frame.name == "broadcast_optimizer_state" for frame in traceback.extract_stack()):
        return  # Horovod's, which takes a step so that there is a state that it can replace
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
    """Apply a README's diff: each run of lines with `-` is replaced by the lines with `+` that follow it.

    Raises AssertionError if a run is not in the file exactly once, as complete lines.
    """
    lines = text.splitlines()
    while lines:
        removed, added = [], []
        while lines and lines[0].startswith("-"):
            removed.append(lines.pop(0)[1:] + "\n")
        while lines and lines[0].startswith("+"):
            added.append(lines.pop(0)[1:] + "\n")
        assert removed, f"a line that is neither removed nor added: {lines[:1]}"
        content = path.read_text()
        old, new = ("\n" + "".join(part) for part in (removed, added))
        assert f"\n{content}".count(old) == 1, f"{path} says {old!r} {content.count(old)} times"
        path.write_text(f"\n{content}".replace(old, new).removeprefix("\n"))
