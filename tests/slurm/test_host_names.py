"""Host names as clusters have them: fully qualified, resolving to a loopback address, or to nothing at all."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.jobs import CPUS, GPUS, NODES, assert_completed, on_this_machine_only, submit, two_processes
from harness.launchers import copy_example
from lab import Lab, Wanted, faults

pytestmark = pytest.mark.slurm


@pytest.fixture
def badly_named(session_folder: Path) -> Iterator[Lab]:
    """A lab of its own: full names, and a first node that resolves its own name to a loopback address, as on Debian."""
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    name, domain = f"names{os.getpid()}", "cluster.example"
    loopback = {"node1": {"node1": "127.0.1.1"}}
    with Lab(Wanted(NODES, CPUS, GPUS, name=name, share=shared, domain=domain, hosts=loopback)) as lab:
        yield lab


@pytest.mark.runs("weekly")
def test_host_names(example: str, source: Path, badly_named: Lab, tmp_path: Path) -> None:
    """A job trains where the first node's name is a loopback address, and where no node's name resolves at all."""
    lab = badly_named
    assert lab.run(["hostname"], node="node1").stdout.strip() == "node1.cluster.example"
    assert lab.run(["getent", "ahostsv4", "node1"], node="node1").stdout.startswith("127.0.1.1")
    for case in ("loopback", "nothing"):
        if case == "nothing":
            for node in lab.nodes:
                faults.unresolve(lab, node)
            assert lab.run(["getent", "ahostsv4", "node1"], node="node1").returncode != 0
        folder = copy_example(source, tmp_path / case / example)
        job = submit(lab, example, folder, "--epochs", "1", options=two_processes(source))
        assert_completed(job, 1, processes=2)
