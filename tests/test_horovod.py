"""What the examples with Horovod promise: no task that trains alone, and one build for all of them."""

import re
from pathlib import Path

import pytest

from harness import readme, runs
from harness.launchers import HOROVOD
from tests.conftest import ci_with

pytestmark = pytest.mark.only(*HOROVOD)


@ci_with("horovod_cpu", "horovod_tensorflow")  # horovod_lightning asks as horovod_cpu does
def test_srun_without_pmi(example: str, folder: Path) -> None:
    """A task of a larger srun that no MPI has been told of would train alone: refused.

    Where the processor has AVX512_VNNI, TensorFlow notes that it uses oneDNN, before it reads how much it may print.
    """
    for script in ["train.py", *(f"more/{path.name}" for path in folder.glob("more/*.py"))]:
        run = runs.Run(["python", script], folder, {"SLURM_STEP_NUM_TASKS": "4"}).wait()
        note = r"WARNING: All log messages before absl::InitializeLog|I0000 .* oneDNN custom operations are on"
        errors = [line for line in run.stderr.splitlines() if not re.match(note, line)]
        assert run.status == 2 and len(errors) == 1, run.stderr
        assert errors[0].startswith("train.py: error: ") and "--mpi=pmix" in errors[0]


@pytest.mark.runs("full")
def test_second_install(example: str, folder: Path) -> None:
    """In another environment the wheel in the cache is used again: no second build, and what is installed works.

    That environment is made as the README says.
    """
    commands = readme.until(f"examples/{example}/README.md", "bash install.sh")
    installed = readme.run_block(commands, folder).stdout
    assert "building" not in installed and "have added up" in installed
    assert list(folder.glob(".venv/lib/python3*/site-packages/horovod"))
