"""What only srun_multinode promises on one machine: it says how it is started. Its jobs have the other tests."""

from pathlib import Path

import pytest

from harness import refusals, runs

pytestmark = pytest.mark.only("srun_multinode")


def test_without_a_launcher(example: str, folder: Path) -> None:
    """Started as a plain script, it names both commands; so does minimal.py the lines that have them.

    A run.slurm that sets a number alone, and not where the processes meet, is refused in the same way.
    """
    for variables in ({}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}):
        run = runs.Run(["python", "train.py"], folder, variables).wait()
        refusals.assert_refused(run, 2, "sbatch run.slurm", "torchrun --standalone --nproc-per-node=2 train.py")
    run = runs.Run(["python", "minimal.py"], folder).wait()
    assert run.status == 1 and run.stderr == "minimal.py: error: start it as its first lines say\n"
