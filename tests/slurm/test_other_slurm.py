"""The shipped jobs on other releases of SLURM, in whole other Debians: `python -m lab tree`."""

import shutil
import subprocess
import sys

import pytest

from lab import tree, why_not
from tests.harness.launchers import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.faults]
NO_PMIX = {("horovod_cpu", "sid"): "this SLURM is packaged without its PMIx plugin, and MPI needs it"}


@pytest.mark.parametrize("suite", tree.SUITES)
def test_shipped_job(example: str, suite: str) -> None:
    """In a lab with another SLURM, Python and MPI, the shipped job completes, unmodified, beside one with GPUs."""
    if reason := why_not() or NO_PMIX.get((example, suite)):
        pytest.skip(reason)
    if not shutil.which("debootstrap") and not (tree.default_folder() / suite / "complete").exists():
        pytest.skip("needs debootstrap")
    session = f"python3 -m venv .venv && .venv/bin/pip install -q 'nox[uv]' && .venv/bin/nox -s 'slurm({example})'"
    command = ["sh", "-ec", f"{session} -- -k test_two_jobs_at_once 2>&1"]
    line = [sys.executable, "-m", "lab", "tree", suite, "--", *command]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and " 1 passed" in f" {done.stdout}", done.stdout[-5000:] + done.stderr
