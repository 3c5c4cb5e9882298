"""A run that hangs says which process stands where, and any run does when it is asked: on this machine, over Gloo."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import edits, outputs, runs
from harness.launchers import LAUNCHERS
from harness.processes import wait_until
from harness.runs import Reference

HOST = re.escape(os.uname().nodename)


@pytest.mark.runs("one")
def test_stacks(example: str, folder: Path, reference: Reference) -> None:
    """Asked as run.slurm's processes are, each that trains prints its stack; the run goes on, to the same bits.

    What does not listen, such as torchrun or the process that has spawned the others, is left alone.
    """
    edits.hold_epochs(folder, LAUNCHERS[example])
    with open(folder / "held.py", "a") as file:  # what a logger does, to write its last rows
        file.write('__import__("atexit").register(lambda: Path(f"exit-{os.getpid()}").touch())\n')
        file.write('left_open = [open(f"exit-{kind}-{os.getpid()}", kind) for kind in ("w", "wb")]\n')
        file.write('__import__("atexit").register(lambda: (left_open[0].write("row"), left_open[1].write(b"row")))\n')
    (folder / edits.HOLD).write_text("1")
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    shown = Path(run.errors.name)
    # It is by the job's number that the processes are found. These have no job: another variable takes its place.
    edits.edit(folder / "plumbing" / "job.sh", '"SLURM_JOB_ID=$SLURM_JOB_ID"', f'"{run.marker}"')
    words = ["bash", "-c", "SLURM_JOB_ID=1; source plumbing/job.sh; ask_for_stacks"]
    subprocess.run(words, cwd=folder, check=True, timeout=300)
    for rank in range(2):
        pattern = rf'^(\[\d\]<stderr>:)?\[{HOST} rank {rank}\]   File ".*/train\.py", line \d+ in '
        wait_until(lambda: re.search(pattern, shown.read_text(), re.MULTILINE), 300, pattern)  # noqa: B023
    (folder / edits.HOLD).unlink()
    assert run.wait().status == 0, run.stderr
    outputs.assert_same_run(folder / "output", reference.output)
    assert "no step for" not in run.stderr
    ended = [path.read_text() for path in folder.glob("exit-*")]
    assert sorted(ended) == ["", "", *["row"] * 4], "what is registered with atexit is called, and files are written"


@pytest.mark.runs("weekly")
@pytest.mark.only("ddp_spawn")
def test_detail(example: str, folder: Path) -> None:
    """As docs/hangs.md says, DDP does not start with TORCH_DISTRIBUTED_DEBUG=DETAIL: if it does again, say so there."""
    run = runs.start(example, folder, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL").wait()
    assert run.status == 1 and "ended with SIGSEGV" in run.stderr, run.stderr
