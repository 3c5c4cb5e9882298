"""What only ddp_spawn promises: its parent process, its threads."""

import os
import signal
from pathlib import Path

import pytest

from harness import edits, runs
from harness.processes import wait_until, with_framework

pytestmark = pytest.mark.only("ddp_spawn")


def test_cores_of_the_job(example: str, folder: Path) -> None:
    """The processes share the cores of the job, --cpus-per-task."""
    run = runs.train(example, folder, 2, "--epochs", 1, SLURM_CPUS_PER_TASK="6")
    assert "2 processes on 1 node, gloo on cpu, 3 threads each" in run.stdout


def test_every_traceback(example: str, folder: Path) -> None:
    """Two processes that fail at once both show their tracebacks: the cause is not lost."""
    edits.plant(
        folder,
        """\
        import os, time
        rank = torch.distributed.get_rank()
        open(f"started-{rank}", "w").close()
        while open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.05)
        raise ArithmeticError(f"planted on rank {rank}")
        """,
    )
    run = runs.start(example, folder, 2)
    # The workers need the parent's store to meet.
    wait_until(lambda: len(list(folder.glob("started-*"))) == 2, 300, "both workers")
    os.kill(run.process.pid, signal.SIGSTOP)
    wait_until(lambda: len(with_framework(run.pids())) == 1, 300, "the end of all but the parent")
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait(60)
    assert run.status == 1
    assert "planted on rank 0" in run.stderr and "planted on rank 1" in run.stderr
