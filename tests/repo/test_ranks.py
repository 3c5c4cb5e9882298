"""Hundreds of ranks meet on one machine, in a shell whose soft limit of open files is the usual one."""

import subprocess
import sys

import pytest

from harness.launchers import ROOT
from harness.processes import clean_environment

FOLDER = ROOT
COMMAND = f"ulimit -Sn 1024; export SLURM_JOB_ID=1; source plumbing/job.sh; exec {sys.executable} -m studies.ranks"


def ranks(*numbers: int, command: str = COMMAND) -> subprocess.CompletedProcess[str]:
    """Have so many ranks do what train.py does outside of its model, by the functions that its jobs source."""
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["bash", "-c", f"{command} {' '.join(map(str, numbers))}"]
    return subprocess.run(words, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=900)


def test_a_few_ranks() -> None:
    """The study prints a row for each number: each rank holds few connections, but for rank 0."""
    done = ranks(2, 12)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [int(row[0]) for row in rows] == [2, 12]
    first, others = (int(rows[1][column]) - int(rows[0][column]) for column in (3, 4))
    assert 10 <= first <= 20 and others <= 6, "one connection of each rank to rank 0's store, none between the others"


@pytest.mark.runs("weekly")
@pytest.mark.timeout(1000)
def test_512_ranks() -> None:
    """512 ranks join, vote and finish where a process may open 1,024 files; without job.sh they would not."""
    done = ranks(512)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "finished: 512 ranks" in done.stdout
    bare = f"ulimit -n 1024; exec {sys.executable} -m studies.ranks --timeout 120"
    refused = ranks(512, command=bare)
    assert refused.returncode != 0 and "open files: 1024, at most 1024; Gloo connects at once" in refused.stdout
    assert "a rank failed, see above" in refused.stderr, "often one that had connected to the one without files"
