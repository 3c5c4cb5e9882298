"""A run that hangs says which process stands where, and any run does when it is asked: on this machine, over Gloo."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import edits, outputs, runs
from harness.launchers import HOROVOD, LAUNCHERS
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


@pytest.mark.runs("weekly")  # test_one_worker_hangs and slurm/test_hangs.py have ordinary tests of nearly the same
@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
def test_hang(example: str, folder: Path) -> None:
    """Rank 1 sleeps in its forward pass: before --timeout each process says where it stands, and rank 1 is missing."""
    rank, timeout = LAUNCHERS[example].rank, 40
    edits.plant(
        folder,
        f"self.times = getattr(self, 'times', 0) + 1\nif {rank} == 1 and self.times == 20:\n"
        "    __import__('time').sleep(1000)\n",
    )
    run = runs.start(example, folder, 2, "--timeout", timeout).wait(600)
    assert run.status > 0
    lines = run.stderr.splitlines()
    own = [line for line in lines if re.search(r"rank 1\] no step for \d\d s \(--timeout 40\), after step 1\d: ", line)]
    assert len(own) == 1 and "common/models.py" in own[0] and "forward: __import__('time').sleep(1000)" in own[0]
    assert sum("rank 0] no step for " in line for line in lines) == 1
    if example not in HOROVOD:  # which has no store by which the processes could tell each other
        verdict = (
            rf"missing: rank 1 on {HOST} \(common/models\.py:\d+, forward: .*; waiting: rank 0 in gloo:all_reduce "
        )
        assert re.search(verdict, run.stderr), run.stderr
    end = "Timeout (" if example in HOROVOD else "Traceback"
    assert run.stderr.index("no step for") < run.stderr.index(end), run.stderr


@pytest.mark.runs("weekly")
@pytest.mark.only("ddp_spawn")
def test_detail(example: str, folder: Path) -> None:
    """As docs/hangs.md says, DDP does not start with TORCH_DISTRIBUTED_DEBUG=DETAIL: if it does again, say so there."""
    run = runs.start(example, folder, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL").wait()
    assert run.status == 1 and "ended with SIGSEGV" in run.stderr, run.stderr
