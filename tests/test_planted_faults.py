"""Faults that a student or a later change could make: each, planted alone, is found by an ordinary test.

This tests the tests. Each fault is planted in a copy of the repository, where the test that is named, of the sessions
`smoke`, `checks`, `slurm` or `repo`, has to fail with the words that are given, not for another reason.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from harness import edits
from harness.launchers import copy_repository
from harness.processes import finish
from lab import why_not

pytestmark = [pytest.mark.only("torchrun_multinode"), pytest.mark.runs("weekly"), pytest.mark.timeout(1800)]


class Fault(NamedTuple):
    """A line of a file, what it becomes, the test that finds it, and words of its failure."""

    file: str  # in examples/EXAMPLE, or of the repository with a leading slash
    old: str
    new: str
    test: str
    says: str
    example: str = "torchrun_multinode"


CONTRACT, RUN_SLURM = "tests/test_contract.py::test_", "tests/slurm/test_run_slurm.py::test_"
EVALUATED = "    shard = range(rank, len(test_set), args.world_size)\n"
PADDED = "    shard = list(DistributedSampler(test_set, args.world_size, rank, shuffle=False))\n"
WRITE = "            file.flush()\n            os.fsync(file.fileno())\n        os.replace(temporary, path)\n"
LATE = "            os.replace(temporary, path)\n            file.flush()\n            os.fsync(file.fileno())\n"
FAULTS = {
    "no set_epoch": Fault(
        "train.py", "sampler.set_epoch(epoch)", "sampler.set_epoch(0)", CONTRACT + "killed_and_resumed", "assert_order"
    ),
    "the same random numbers in all processes": Fault(
        "train.py",
        'progress["step"] * args.world_size + dist.get_rank())',
        'progress["step"] * args.world_size)',
        "tests/test_recipes.py::test_own_data_and_own_model",
        "assert_drawn_once",
        "ddp_spawn",
    ),
    "loss of rank 0 only": Fault(
        "train.py",
        "    sums = sums.clone()\n    dist.all_reduce(sums)",
        "    sums = sums.clone()\n    dist.all_reduce(sums.clone())",
        CONTRACT + "same_bits_as_ddp_spawn",
        "train_loss",
    ),
    "a checkpoint that is not atomic": Fault(
        "/examples/torchrun_multinode/plumbing/files.py",
        'temporary = path.with_name(f"tmp.{os.getpid()}.{path.name}")',
        "temporary = path",
        "tests/test_keep_epochs.py::test_killed_at_each_moment",
        "",
        "",
    ),
    "no drop_last": Fault(
        "train.py",
        "seed=args.seed, drop_last=True)",
        "seed=args.seed)",
        CONTRACT + "another_number_of_processes",
        "",
        "ddp_spawn",
    ),
    "requeue of the array's id": Fault(
        "plumbing/requeue.sh",
        'scontrol requeue "$job"',
        'scontrol requeue "${SLURM_ARRAY_JOB_ID:-$job}"',
        RUN_SLURM + "job_array",
        "",
    ),
    "no lock": Fault(
        "plumbing/files.py",
        "        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        CONTRACT + "two_runs_in_one_folder",
        "another run",
        "ddp_spawn",
    ),
    "a resume that forgets the optimizer": Fault(
        "train.py",
        '        optimizer.load_state_dict(checkpoint["optimizer"])\n',
        "",
        CONTRACT + "killed_and_resumed",
        "assert_same_run",
    ),
    "samples that are evaluated twice": Fault(
        "train.py", EVALUATED, PADDED, CONTRACT + "default_run", "assert_exact_metrics"
    ),
    "no timeout": Fault(
        "train.py",
        "dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))",
        "dist.init_process_group(backend)",
        CONTRACT + "killed_and_resumed",
        "300.0",
    ),
    "a signal that is not passed on": Fault(
        "plumbing/job.sh",
        """trap 'touch "$STOP_FILE"; signalled=yes' USR1 TERM""",
        "trap 'signalled=yes' USR1 TERM",
        "tests/slurm/test_torchrun_jobs.py::test_preempted",
        "",
    ),
    "a name before its content is on the disk": Fault(
        "/plumbing/files.py", WRITE, LATE, "tests/test_damaged_files.py::test_on_the_disk_before_its_name", "named", ""
    ),
    "another seed on a resume": Fault(
        "plumbing/checkpoints.py", '"fp16_allreduce", "seed"),', '"fp16_allreduce"),', CONTRACT + "bad_input", "seed 0"
    ),
    "gradients that add up": Fault(
        "train.py", "        optimizer.zero_grad()\n", "", CONTRACT + "same_bits_as_ddp_spawn", "loss"
    ),
    "lines of every rank": Fault(
        "plumbing/records.py",
        "    if rank() > 0:\n        return\n    row = ",
        "    row = ",
        CONTRACT + "default_run",
        "values == expected",
    ),
    "a rate times the number of processes": Fault(
        "train.py",
        'plumbing.set_learning_rate(args, optimizer, progress["step"])',
        'plumbing.set_learning_rate(args, optimizer, progress["step"], args.world_size)',
        CONTRACT + "same_bits_as_ddp_spawn",
        "loss",
    ),
    "a stop after which the epoch begins anew": Fault(
        "train.py",
        "        batches = plumbing.batches_left(args, progress, batches)",
        "        plumbing.batches_left(args, progress, batches)",
        "tests/test_torchrun_multinode.py::test_stopped_and_resumed",
        "assert_same_run",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slurm] * ("slurm" in FAULTS[name].test)) for name in FAULTS]
)
def test_found(example: str, tmp_path: Path, name: str) -> None:
    """The test fails on the copy with the fault, with these words."""
    fault = FAULTS[name]
    if "slurm" in fault.test and (reason := why_not()):
        pytest.skip(reason)
    repository = copy_repository(tmp_path / "repository")
    folder = repository if fault.file.startswith("/") else repository / "examples" / fault.example
    edits.edit(folder / fault.file.lstrip("/"), fault.old, fault.new)
    file, _, test = fault.test.partition("::")
    words = ["-q", "-p", "no:cacheprovider", "-k", f"{test} and not second", file]
    words += ["--example", fault.example] if fault.example else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = finish([sys.executable, "-m", "pytest", *words], 1500, cwd=repository, env=environment)
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout + done.stderr
    assert fault.says in done.stdout, done.stdout
