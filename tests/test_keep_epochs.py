"""--keep-epochs N: the checkpoints of the last N epochs, and the best one, beside the newest, whatever happens."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import outputs, runs
from harness.launchers import EXAMPLES, ROOT
from harness.processes import clean_environment

WITH_FLAG = [name for name in EXAMPLES if '"--keep-epochs"' in (ROOT / "examples" / name / "train.py").read_text()]


def load(path: Path) -> dict:
    """Return a checkpoint."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.mark.only(*WITH_FLAG)
@pytest.mark.runs("weekly")  # test_killed_at_each_moment calls the same functions
def test_kept(example: str, folder: Path) -> None:
    """A run is killed after its third epoch and resumed. The last two epochs are there, and the best; any continues."""
    output, words = folder / "output", ("--epochs", "5", "--keep-epochs", "2")
    run = runs.start(example, folder, 2, *words)
    run.read_epoch(3)
    runs.kill_all(example, run)
    runs.train(example, folder, 2, *words, "--resume")
    losses = [row["test_loss"] for row in outputs.read_metrics(output)]
    best = 1 + losses.index(min(losses))
    epochs = {"checkpoint-epoch-4.pt": 4, "checkpoint-epoch-5.pt": 5, "checkpoint-best.pt": best, "checkpoint.pt": 5}
    assert {path.name for path in output.glob("*checkpoint*")} == {*epochs}
    assert {name: len(load(output / name)["progress"]["history"]) for name in epochs} == epochs
    assert (output / "checkpoint.pt").samefile(output / "checkpoint-epoch-5.pt")  # they take the space of one

    earlier = folder / "earlier"
    earlier.mkdir()
    shutil.copy(output / "checkpoint-epoch-4.pt", earlier / "checkpoint.pt")
    runs.train(example, folder, 2, *words, "--resume", "--output-dir", earlier)
    outputs.assert_same_run(earlier, output)


# Six epochs with these test losses, and N=2. At one moment, counted from 1, the run is killed, or the disk is full.
# Each attempt is a process that is forked off this one, and so has torch at once. Its status is 0 if it met no moment.
PROGRAM = """
import errno, math, os, pathlib, signal, sys
from argparse import Namespace
import torch
from plumbing import checkpoints

LOSSES, SURVIVED = [3.0, math.nan, 1.0, 2.0, 2.5, 1.5], 3

def interrupting(moment, how):
    count = [0]
    def wrap(function):
        def act(*args, **settings):
            count[0] += 1
            if count[0] == moment and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if count[0] == moment:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **settings)
        return act
    return wrap, count

def no_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")

def train(output, moment, how):
    wrap, count = interrupting(moment, how)
    os.link = wrap(no_links if sys.argv[1] == "no links" else os.link)
    os.replace, torch.save, os.fsync = wrap(os.replace), wrap(torch.save), wrap(os.fsync)
    if how == "killed":  # to remove a file takes no space
        pathlib.Path.unlink = wrap(pathlib.Path.unlink)
    args = Namespace(output_dir=output, keep_epochs=2, steps_per_epoch=4, scale_lr=None, world_size=1)
    newest, history = output / "checkpoint.pt", []
    if newest.exists():
        history = checkpoints.load_checkpoint(newest)["progress"]["history"]
    for epoch in range(len(history), len(LOSSES)):
        checkpoints.write_checkpoint(args, {"progress": {"step": epoch * 4 + 2, "history": history}})  # within an epoch
        history.append({"test_loss": LOSSES[epoch]})
        checkpoints.write_checkpoint(args, {"progress": {"step": epoch * 4 + 4, "history": history}})
    os._exit(SURVIVED if 0 < moment <= count[0] else 0)

def attempt(*args):
    if not (pid := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train(*args)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def kept(output):
    found = {path.name: len(checkpoints.load_checkpoint(path)["progress"]["history"]) for path in output.glob("c*.pt")}
    newest = found.pop("checkpoint.pt", 0)
    assert len(found) <= 3, found
    assert all(name in (f"checkpoint-epoch-{epoch}.pt", "checkpoint-best.pt") for name, epoch in found.items()), found
    return newest, found

def best_of(epochs):
    return min(range(epochs), key=lambda epoch: (math.isnan(LOSSES[epoch]), LOSSES[epoch])) + 1

for how, statuses in (("killed", [-signal.SIGKILL]), ("full", [2, SURVIVED])):
    for moment in range(1, 1000):
        output = pathlib.Path(f"{how}-{moment}")
        output.mkdir()
        (output / "checkpoint-epoch-mine.pt").touch()
        status = attempt(output, moment, how)
        (output / "checkpoint-epoch-mine.pt").rename(output / "mine")
        assert status in [0, *statuses], (how, moment, status)
        newest, found = kept(output)
        # It may already be the best one with the epoch that is repeated.
        assert not newest or found["checkpoint-best.pt"] in (best_of(newest), best_of(min(newest + 1, 6))), found
        assert attempt(output, 0, "") == 0
        assert kept(output) == (6, {"checkpoint-epoch-5.pt": 5, "checkpoint-epoch-6.pt": 6, "checkpoint-best.pt": 3})
        if status == 0:
            break
    print(how, moment - 1)
"""


@pytest.mark.parametrize("file_system", ["links", pytest.param("no links", marks=pytest.mark.runs("weekly"))])
def test_killed_at_each_moment(tmp_path: Path, file_system: str) -> None:
    """Killed or without space at any moment of a save, a run has its newest checkpoint, and never more than N + 1.

    Resumed it ends with the last N and the best, as if nothing had been; a NaN is no best. What others have put there
    stays. It is the same where the file system has no hard links.
    """
    environment = clean_environment() | {"PYTHONPATH": str(ROOT / "examples" / "torchrun_multinode")}
    words = [sys.executable, "-c", PROGRAM, file_system]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    moments = dict(re.findall(r"^(killed|full) (\d+)$", run.stdout, re.MULTILINE))
    assert moments.keys() == {"killed", "full"} and all(int(number) > 50 for number in moments.values()), run.stdout
