"""Every shipped run.slurm and minimal.slurm, unmodified, on a real SLURM."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, outputs, readme
from harness.jobs import EPOCHS, submit
from harness.launchers import HOROVOD, LAUNCHERS, MINIMAL, ROOT, copy_example
from harness.runs import Reference
from lab import Lab, faults
from tests.conftest import ci_with
from tests.slurm.small import all_nodes, assert_completed, held, two_processes
from tests.test_faults import verdicts
from verify import checks

pytestmark = pytest.mark.slurm


def test_shipped_job(example: str, shipped_job: Callable[[], Reference]) -> None:
    """Unmodified, run.slurm completes, on all nodes that it may use, and the model has learnt."""
    assert LAUNCHERS[example].has_learnt(outputs.read_metrics(shipped_job().output)[-1], tolerance=0.01)


@pytest.mark.only(*HOROVOD)
def test_mpi_on_two_nodes(example: str, shipped_job: Callable[[], Reference]) -> None:
    """The shipped script: 4 ranks on 2 nodes over MPI, with the cores that SLURM has given to each."""
    log = shipped_job().stdout
    assert "ConvNet on digits: 4 processes on 2 nodes, mpi on cpu, 2 threads each, global batch 256" in log


@pytest.mark.only("torchrun_multinode")
def test_srun_job(example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]) -> None:
    """Unmodified, srun.slurm, without torchrun, ends with the bits of run.slurm."""
    folder = copy_example(source, tmp_path / example)
    line = readme.command(f"examples/{example}/README.md", "sbatch srun.slurm")
    job = submit(lab, example, folder, options=(all_nodes(source),), line=line)
    assert_completed(job, EPOCHS)
    assert "4 processes on 2 nodes, gloo on cpu, 2 threads each" in job.log, job.log
    outputs.assert_same_run(job.output, shipped_job().output)


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("full")
def test_verify(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """In an allocation of two nodes, verify starts train.py by srun, and its table is the one in its README."""
    folder = copy_example(source, tmp_path / example)
    shutil.copytree(ROOT / "verify", folder / "verify")
    options = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", f"--output={example}-%j.out")
    command = 'exec "$VENV/bin/python" -m verify . --launcher srun'
    job = submit(lab, example, folder, options=options, line=f"sbatch --wrap='{command}'").wait(1500)
    assert job.shown["JobState"] == "COMPLETED", job.log
    found, shown = re.findall(r"^(ok|weak|FAIL|not checked) {2,}", job.log, re.MULTILINE), verdicts("srun")
    assert found == [shown[row] for row in checks.ROWS], job.log


@pytest.mark.only(*MINIMAL)
@ci_with("ddp_spawn", "horovod_cpu", "lightning", "torchrun_multinode")  # one of each way to start processes
def test_minimal_job(
    example: str, source: Path, lab: Lab, tmp_path: Path, shipped_job: Callable[[], Reference]
) -> None:
    """minimal.slurm trains as run.slurm does, with as many processes, and one of them prints and writes the model."""
    folder = copy_example(source, tmp_path / example)
    (folder / ".venv").symlink_to(sys.prefix)  # it does not read VENV
    line = readme.command(f"examples/{example}/README.md", "sbatch minimal.slurm")
    job = submit(lab, example, folder, line=line).wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    line = r"epoch (\d+): train loss ([\d.]+)(?:, test loss [\d.]+)?(?:, test acc [\d.]+%)?$"
    printed = re.findall(line, job.log, re.MULTILINE)
    rows = outputs.read_metrics(shipped_job().output)
    assert [int(epoch) for epoch, _ in printed] == [row["epoch"] for row in rows], job.log
    for row, (_, train_loss) in zip(rows, printed, strict=True):  # as many processes make as large a global batch
        assert float(train_loss) == pytest.approx(row["train_loss"], rel=0.01)
    assert rows[0]["world_size"] == LAUNCHERS[example].processes_in_job
    weights = outputs.read_model(folder), outputs.read_model(shipped_job().output)
    assert outputs.largest_difference(*weights) < 0.1  # of the same start; the order of sums may be another


@pytest.mark.only(*HOROVOD)
@pytest.mark.runs("full")  # a run over Gloo is an ordinary test of each example of Horovod
def test_gloo_instead_of_mpi(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """LAUNCH=gloo on two nodes, preempted and requeued: the bits of the same processes with MPI.

    Neither mpirun nor ssh is called: where run.slurm would find them, there are programs that fail and leave a file.
    """
    words, options = ("--limit-steps", "2"), two_processes(source)
    by_mpi = submit(lab, example, copy_example(source, tmp_path / "mpi" / example), *words, options=options)
    folder = held(source, tmp_path / example, 1)
    for program in ("mpirun", "orted", "prted", "ssh"):
        path = folder / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\ntouch "{folder}/$0-was-called"\nexit 1\n')
        path.chmod(0o755)
    edits.edit(folder / "run.slurm", "\nprepare ", '\nPATH="$PWD/bin:$PATH"\nprepare ')
    line = readme.command(f"examples/{example}/README.md", "LAUNCH=gloo sbatch run.slurm")
    job = submit(lab, example, folder, *words, options=options, line=line)
    job.wait_for_hold(1)
    faults.requeue(lab, job.id)
    job.wait_for_line("stopped after")
    edits.hold(folder, edits.GO_ON)
    assert_completed(job, EPOCHS, processes=2)
    assert job.log.count("2 processes on 2 nodes, gloo on cpu, 1 thread each") == 2, job.log
    assert not list(folder.rglob("*was-called"))
    assert_completed(by_mpi, EPOCHS, processes=2)
    outputs.assert_same_run(job.output, by_mpi.output)
