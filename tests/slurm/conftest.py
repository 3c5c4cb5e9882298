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
from tests.harness.launchers import LAUNCHERS, copy_example
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
def reference_job(example: str, source: Path, lab: Lab, session_folder: Path) -> Callable[[str], Reference]:
    """A function that returns what a job leaves: one as shipped, or a small one with 2 processes.

    With the five launch patterns both run at once, in one folder. The lab's GPUs, which the small job asks for, are
    stand-ins: CUDA finds none, and it trains on CPU.
    """

    def make(folder: Path, wanted: list[str]) -> list[Reference]:
        copied = copy_example(source, folder / example)
        options = {"shipped": (all_nodes(source),), "small": two_processes(source)}
        jobs = {name: submit(lab, example, copied, options=options[name]) for name in wanted}
        for name, job in jobs.items():
            assert_completed(job, EPOCHS, processes=2 if name == "small" else None)
            assert name == "shipped" or "gpu:" in job.shown["TresPerNode"]
        return [Reference(job.output, job.log) for job in jobs.values()]

    def find(name: str) -> Reference:
        wanted = ["shipped", "small"] if LAUNCHERS[example].pattern else [name]
        folder = session_folder / f"undisturbed-{'-'.join(wanted)}-{example}"
        return runs.references(folder, lambda folder: make(folder, wanted))[wanted.index(name)]

    return find


@pytest.fixture(scope="session")
def shipped_job(reference_job: Callable[[str], Reference]) -> Callable[[], Reference]:
    """A function that returns what run.slurm leaves as it is; called last, since it may have to run the job."""
    return lambda: reference_job("shipped")


@pytest.fixture(scope="session")
def two_process_job(reference_job: Callable[[str], Reference]) -> Callable[[], Reference]:
    """A function that returns what a job with 2 processes leaves; called last, since it may have to run the job."""
    return lambda: reference_job("small")
