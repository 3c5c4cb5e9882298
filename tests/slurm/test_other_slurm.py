"""The shipped jobs on other releases of SLURM, in whole other Debians: `python -m lab tree`."""

import re
import subprocess
import sys

import pytest

from harness.launchers import ROOT
from lab import tree, why_not
from tests.slurm.test_containers import why_not_here

pytestmark = [pytest.mark.slurm, pytest.mark.runs("full"), pytest.mark.timeout(4000)]
NO_PMIX = "this SLURM is packaged without its PMIx plugin, and MPI needs it"


def run_in_tree(suite: str, session: str, tests: str) -> str:
    """Run some tests of a nox session in another Debian; return what pytest prints."""
    if reason := tree.why_not(suite):
        pytest.skip(reason)
    nox = f"python3 -m venv .venv && .venv/bin/pip install -q 'nox[uv]' && .venv/bin/nox -s '{session}'"
    line = [sys.executable, "-m", "lab", "tree", suite, "--", "sh", "-ec", f"{nox} -- -k {tests} 2>&1"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize("suite", tree.SUITES)
def test_shipped_job(example: str, suite: str) -> None:
    """In a lab with another SLURM, Python and MPI, the shipped job completes, unmodified."""
    if reason := why_not() or (NO_PMIX if suite == "sid" and example.startswith("horovod_") else None):
        pytest.skip(reason)
    assert " 1 passed" in f" {run_in_tree(suite, f'slurm({example})', 'test_shipped_job')}"


def test_containers(example: str) -> None:
    """Where no image can be built here, test_containers.py runs in a Debian that has it, and passes, all of it."""
    if reason := why_not():
        pytest.skip(reason)
    if not why_not_here():
        pytest.skip("this machine has Apptainer: test_containers.py has run here")
    printed = run_in_tree("trixie", f"full({example})", "test_containers.py")
    assert re.search(r"\b[4-9] passed", printed) and "skipped" not in printed, printed
