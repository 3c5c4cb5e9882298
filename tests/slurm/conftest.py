"""The fixtures: the jobs that others are compared with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import runs
from harness.jobs import (
    EPOCHS,
    all_nodes,
    assert_completed,
    submit,
    two_processes,
)
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference
from lab import Lab


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
