"""The fixture: a SLURM of two nodes on this machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_jobs import CPUS, GPUS, NODES

from lab import Lab, why_not


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running lab that ends with this process, whatever happens to it."""
    if reason := why_not():
        pytest.skip(reason)
    folders = [tmp_path_factory.getbasetemp(), Path(sys.prefix)]
    shared = [folder for folder in folders if folder.resolve().is_relative_to("/tmp")]  # each node has its own /tmp
    with Lab(NODES, CPUS, GPUS, name=f"test{os.getpid()}", share=shared) as lab:
        yield lab
