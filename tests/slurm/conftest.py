"""The fixtures: a SLURM of two nodes on this machine, and the jobs that others are compared with."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Lab, why_not
from tests.harness import runs
from tests.harness.jobs import (
    CPUS,
    EPOCHS,
    GPUS,
    NODES,
    all_nodes,
    assert_completed,
    on_this_machine_only,
    submit,
    two_processes,
)
from tests.harness.launchers import copy_example
from tests.harness.runs import Reference


@pytest.fixture(scope="session")
def lab(session_folder: Path) -> Iterator[Lab]:
    """A running lab that ends with this process, whatever happens to it."""
    if reason := why_not():
        pytest.skip(reason)
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    with Lab(NODES, CPUS, GPUS, name=f"test{os.getpid()}", share=shared) as lab:
        python = lab.run([sys.executable, "--version"], cwd="/")
        assert python.returncode == 0, f"user {lab.user}, who runs jobs, cannot use {sys.executable}: {python.stderr}"
        yield lab


@pytest.fixture(scope="session")
def reference_jobs(example: str, source: Path, lab: Lab, session_folder: Path) -> Callable[[], list[Reference]]:
    """A function that returns what two jobs leave, run at once in one folder: as shipped, and with 2 processes.

    The lab's GPUs, which the second job asks for, are stand-ins: CUDA finds none, and it trains on CPU.
    """

    def make(folder: Path) -> list[Reference]:
        copied = copy_example(source, folder / example)
        shipped = submit(lab, example, copied, options=(all_nodes(source),))
        small = submit(lab, example, copied, options=two_processes(source))
        assert_completed(shipped, EPOCHS)
        assert_completed(small, EPOCHS, processes=2)
        assert "gpu:" in small.shown["TresPerNode"]
        return [Reference(job.output, job.log) for job in (shipped, small)]

    return lambda: runs.references(session_folder / f"undisturbed-{example}", make)


@pytest.fixture(scope="session")
def shipped_job(reference_jobs: Callable[[], list[Reference]]) -> Callable[[], Reference]:
    """A function that returns what run.slurm leaves as it is; called last, since it may have to run the job."""
    return lambda: reference_jobs()[0]


@pytest.fixture(scope="session")
def two_process_job(reference_jobs: Callable[[], list[Reference]]) -> Callable[[], Reference]:
    """A function that returns what a job with 2 processes leaves; called last, since it may have to run the job."""
    return lambda: reference_jobs()[1]
