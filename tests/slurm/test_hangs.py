"""A job that hangs says which rank stands where, before its time-out and when it is asked: see docs/hangs.md."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import Job, submit, two_processes
from harness.launchers import copy_example
from harness.processes import wait_until, workers
from lab import Lab

pytestmark = pytest.mark.slurm


def ask_for_stacks(lab: Lab, job: Job) -> None:
    """Have all processes of a job print their stacks, as the READMEs say."""
    lab.run(["scancel", "--signal=USR2", "--batch", job.id], check=True)


def stop_rank_1(job: Job) -> None:
    """Stop the process of rank 1, after its first epoch."""
    job.wait_for_epoch(1)
    (pid,) = [pid for pid in workers(job.processes()) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(pid, signal.SIGSTOP)


def sleep(number: str) -> str:
    """Return lines that have rank 1 sleep when it comes there for the 20th time; they count in the object `number`."""
    return (
        "import time, torch\n"
        f"{number}.times = getattr({number}, 'times', 0) + 1\n"
        f"if torch.distributed.get_rank() == 1 and {number}.times == 20:\n"
        "    print('planted')\n"
        "    time.sleep(1000)\n"
    )


def in_forward(folder: Path) -> None:
    """Have rank 1 sleep in the forward pass."""
    edits.plant(folder, sleep("self"))


def in_loader(folder: Path) -> None:
    """Have rank 1 stop in the data loader."""
    line = "        batch = self.images[indices]"
    text = "".join(f"        {line}\n" for line in sleep("self").splitlines())
    edits.edit(folder / "common" / "data.py", line, text + line)


def out_of_loop(folder: Path) -> None:
    """Have rank 1 leave its loop early, and wait for the others elsewhere."""
    line = '        if request >= 1:\n            progress["seconds"]'
    leave = (
        '        if dist.get_rank() == 1 and progress["step"] == 20:\n            print("planted")\n            break\n'
    )
    edits.edit(folder / "train.py", line, leave + line)
    line = "    sums = sums.clone()\n"
    edits.edit(folder / "train.py", line, f"    dist.barrier()\n{line}")


FAULTS = {  # what is planted, what then happens to the job, the line of rank 1, that on who is missing
    "sleeps in forward": (
        in_forward,
        None,
        r"common/models\.py:\d+, forward: time\.sleep\(1000\)",
        r"missing: rank 1 on node2 \(common/models\.py:\d+, forward: .*; waiting: rank 0 in gloo:all_reduce number \d+",
    ),
    "stops in the data loader": (
        in_loader,
        None,
        r"common/data\.py:\d+, __getitem__: time\.sleep\(1000\)",
        r"missing: rank 1 on node2 \(common/data\.py:\d+, __getitem__: .*; waiting: rank 0 in gloo:all_reduce number",
    ),
    "stopped by SIGSTOP": (
        None,
        stop_rank_1,
        "",
        r"missing: rank 1 on node2 \(no answer: .*\); waiting: rank 0 in gloo:all_reduce number \d+",
    ),
    "left its loop early": (
        out_of_loop,
        None,
        r"train\.py:\d+, train_one_epoch: dist\.barrier\(\).*; it waits in gloo:barrier number \d+",
        r"missing: none; waiting: rank 0 in gloo:all_reduce number \d+; rank 1 in gloo:barrier number \d+",
    ),
}
CELLS = [pytest.param(fault, marks=[pytest.mark.runs("weekly")] * (fault != "sleeps in forward")) for fault in FAULTS]


@pytest.mark.waits
@pytest.mark.only("torchrun_multinode")
@pytest.mark.parametrize("fault", CELLS)
def test_a_hang_names_its_rank(example: str, source: Path, lab: Lab, tmp_path: Path, fault: str) -> None:
    """The log names rank, host and place before the job gives up; asked for stacks, it has them before that, too."""
    timeout = 40
    plant, inflict, own, verdict = FAULTS[fault]
    folder = copy_example(source, tmp_path / example)
    if plant:
        plant(folder)
    job = submit(lab, example, folder, "--timeout", str(timeout), options=two_processes(source))
    if inflict:
        inflict(job)
    else:
        job.wait_for_line("planted")
    ask_for_stacks(lab, job)
    job.wait_for_line("[node1 rank 0]   File ")
    if own:
        place = re.match(r"\w+(/\w+)?\\\.py", own)[0]
        pattern = rf'^\[node2 rank 1\]   File ".*/{place}", line \d+ in '
        wait_until(lambda: re.search(pattern, job.log, re.MULTILINE), 300, pattern)
    job.wait_for_line("waiting: ")
    log = job.log.partition("RuntimeError")[0]  # which ends the job
    lines = [r"^\[node1 rank 0\] no step for \d\d s \(--timeout 40\), after step \d+: train\.py:\d+, .*"]
    lines += [r"^\[node2 rank 1\] no step for \d\d s \(--timeout 40\), after step \d+: " + own] * bool(own)
    for pattern in [*lines, rf"^\[node1 rank 0\] {verdict}"]:
        assert re.search(pattern, log, re.MULTILINE), (pattern, job.log)
    for pid in job.processes():  # which would have 30 s: who hangs does not hear that the job is to end
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.wait()
