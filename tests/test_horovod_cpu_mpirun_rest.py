"""The rest of the contract for horovod_cpu over MPI, which takes minutes: in `nox -s faults`."""

import pytest

from tests import test_contract
from tests.test_horovod_cpu_mpirun import HERE, mpirun, reference  # noqa: F401

pytestmark = pytest.mark.faults
ELSEWHERE = (*HERE, "test_readme_and_requirements", "test_on_gpus")
globals().update(
    {name: test for name, test in vars(test_contract).items() if name.startswith("test_") and name not in ELSEWHERE}
)
