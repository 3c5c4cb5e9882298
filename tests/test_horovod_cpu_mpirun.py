"""The contract once more for horovod_cpu, over MPI by its mpirun_local.sh: here what MPI might do otherwise."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import test_contract
from tests.harness import runs
from tests.harness.launchers import LAUNCHERS, copy_example
from tests.harness.runs import Reference

AS_ROOT = "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"  # Open MPI's leave for containers
HERE = ("test_default_run",)  # a process killed over MPI: slurm/test_jobs.py
globals().update({name: getattr(test_contract, name) for name in HERE})


@pytest.fixture(scope="module", autouse=True)
def mpirun(example: str) -> Iterator[None]:
    """Start horovod_cpu with mpirun instead of horovodrun."""
    row = LAUNCHERS[example]
    LAUNCHERS[example] = replace(
        row,
        local=f"{AS_ROOT} NP={{n}} bash mpirun_local.sh",
        status_after_bad_input=2,
        backend="mpi",
        kill_message=r"process rank \d (.|\n)*signal 9",
    )
    yield
    LAUNCHERS[example] = row


@pytest.mark.faults
def test_four_processes(example: str, folder: Path) -> None:
    """The README's command for MPI and the language model: NP processes of OMP_NUM_THREADS threads."""
    variables = dict(word.split("=") for word in AS_ROOT.split()[1:]) | {"NP": "4", "OMP_NUM_THREADS": "2"}
    run = runs.Run(["bash", "mpirun_local.sh", "train_lm.py", "--epochs", "1"], folder, variables).wait(400)
    assert run.status == 0, run.stderr
    assert "4 processes on 1 node, mpi on cpu, 2 threads each" in run.stdout


@pytest.fixture(scope="module")
def reference(example: str, mpirun: None, source: Path, common_folder: Path) -> Reference:
    """Run mpirun_local.sh, once, in a fresh copy."""

    def make(folder: Path) -> list[Reference]:
        copy_example(source, folder)
        run = runs.train(example, folder, 2)
        return [Reference(folder / "output", run.stdout, run.stderr)]

    return runs.references(common_folder / f"mpirun-{example}", make)[0]
