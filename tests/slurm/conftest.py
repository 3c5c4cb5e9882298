"""The fixtures: a SLURM of two nodes on this machine, and the job that others are compared with."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
from runs import Reference
from slurm_jobs import (
    CPUS,
    EPOCHS,
    GPUS,
    NODES,
    all_nodes,
    assert_completed,
    copy,
    on_this_machine_only,
    submit,
    undisturbed_folder,
)

from lab import Lab, why_not


@pytest.fixture(scope="session")
def lab(common_folder: Path) -> Iterator[Lab]:
    """A running lab that ends with this process, whatever happens to it."""
    if reason := why_not():
        pytest.skip(reason)
    shared = on_this_machine_only(common_folder, Path(sys.prefix))
    with Lab(NODES, CPUS, GPUS, name=f"test{os.getpid()}", share=shared) as lab:
        yield lab


@pytest.fixture(scope="session")
def undisturbed(example: str, source: Path, lab: Lab, common_folder: Path) -> Callable[[], Reference]:
    """A function that returns what the shipped job leaves: called last, since it runs that job if none has yet."""

    def make(folder: Path) -> Reference:
        job = submit(lab, example, copy(source, folder / example), options=(all_nodes(source),))
        assert_completed(job, EPOCHS)
        return Reference(job.output, job.log)

    return lambda: runs.reference(undisturbed_folder(common_folder), make)
