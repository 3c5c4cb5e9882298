"""What only horovod_cpu promises: the same bits as ddp_spawn, its own arguments, train_lm.py, install.sh."""

import math
import os
import shutil
import signal
from pathlib import Path

import pytest

from harness import outputs, readme, runs
from harness.processes import wait_until

pytestmark = pytest.mark.only("horovod_cpu")
MPIRUN = "mpirun -np {n} --bind-to none --oversubscribe python train.py"
# Open MPI starts nothing as root, as whom tests run in a container, unless these variables permit it.
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI_AS_ROOT |= {"OMPI_MCA_mpi_yield_when_idle": "1"}  # other tests need the cores, too


def lm(folder: Path, processes: int, arguments: str, **environment: str) -> runs.Run:
    """Start train_lm.py with horovodrun."""
    command = f"horovodrun --gloo -np {processes} python more/train_lm.py {arguments}"
    return runs.Run(command.split(), folder, environment)


def test_without_a_launcher(example: str, folder: Path) -> None:
    """`python train.py` trains as one process on all cores."""
    run = runs.Run(["python", "train.py", "--epochs", "1"], folder, MPI_AS_ROOT).wait()
    assert run.status == 0, run.stderr
    threads = len(os.sched_getaffinity(0))
    assert f"1 processes on 1 node, mpi on cpu, {threads} thread" in run.stdout
    assert outputs.read_metrics(folder / "output")[0]["world_size"] == 1


@pytest.mark.runs("full")
def test_lm_reaches_the_floor(example: str, folder: Path) -> None:
    """The default run ends within 5 % of the source's entropy, in under two minutes on two cores."""
    run = lm(folder, 2, "").wait()
    assert run.status == 0, run.stderr
    output = folder / "output" / "lm"
    loss, floor = outputs.read_metrics(output)[-1]["test_loss"], outputs.read_run(output)["settings"]["entropy"]
    assert 0.99 * floor < loss < 1.05 * floor
    line = f"test loss {loss:.4f} (floor {floor:.4f}), perplexity {math.exp(loss):.2f} per byte"
    assert line in run.stdout and "sample: " in run.stdout


# In the environment of a test that installs: Python says that its headers are where there are none.
NO_HEADERS = """
import sysconfig
real = sysconfig.get_path
sysconfig.get_path = lambda name, *more, **others: "/none" if name == "include" else real(name, *more, **others)
"""
TOOLS = "bash sh env cat basename dirname grep head tr mkdir mktemp mv cp rm sed tail tar gzip nproc uname"


@pytest.mark.parametrize(
    ("missing", "texts"),
    [
        ("torch", ["torch", "pip install -r requirements.txt"]),
        ("c++", ["no c++", "apt-get install g++"]),
        pytest.param("cmake", ["no cmake", "apt-get install"], marks=pytest.mark.runs("full")),
        pytest.param("make", ["no make", "apt-get install"], marks=pytest.mark.runs("full")),
        ("Python.h", ["no Python.h", "apt-get install python3-dev", "conda"]),
        ("network", ["download failed", "login node"]),
    ],
)
def test_install_errors(example: str, folder: Path, tmp_path: Path, missing: str, texts: list[str]) -> None:
    """install.sh says in one line what is missing and what to install, and leaves no wheel behind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = shutil.which("python")
    (programs / "python").write_text(f'#!/bin/sh\nexec {python} {"-S" * (missing == "torch")} "$@"\n')
    (programs / "python").chmod(0o755)
    for name in [*TOOLS.split(), *{"c++", "cmake", "make", "uv"} - {missing}]:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    (programs / "sitecustomize.py").write_text(NO_HEADERS * (missing == "Python.h"))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    nowhere |= {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    variables = {"PATH": str(programs), "PYTHONPATH": str(programs)} | nowhere
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = runs.Run(["bash", "install.sh"], folder, variables).wait()
    errors = [line for line in run.stderr.splitlines() if line.startswith("install.sh: error: ")]
    assert run.status == 1 and len(errors) == 1, run.stderr
    assert all(text in errors[0] for text in texts), errors
    assert not list(tmp_path.glob("cache/**/*.whl"))
    assert ("building" in run.stdout) == (missing == "network"), "it has begun before it looked for all that it needs"


def test_launcher_killed(example: str, folder: Path) -> None:
    """SIGTERM to horovodrun alone: no worker outlives it, and nothing says that the run has finished.

    Its own status does not count, and may be 0: two threads of horovodrun wait for the same shell, and the one that
    comes second no longer learns how it ended.
    """
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_until("epoch  1/")
    os.kill(run.process.pid, signal.SIGTERM)
    wait_until(lambda: not run.workers(), 60, "the end of the processes that have lost horovodrun")
    run.wait(leaves=60)
    assert "finished" not in run.stdout


@pytest.mark.runs("full")
def test_mpirun_with_four_processes(example: str, folder: Path) -> None:
    """The README's command for MPI and the language model: NP processes of OMP_NUM_THREADS threads."""
    line = readme.command("examples/horovod_cpu/README.md", "... mpirun ...")
    run = readme.run_block([f"{line} --epochs 1"], folder, **MPI_AS_ROOT)
    assert "4 processes on 1 node, mpi on cpu, 2 threads each" in run.stdout


def test_by_mpirun(example: str, folder: Path, ddp_spawn_output: Path) -> None:
    """Started by mpirun, over MPI, the default run ends with the bits of ddp_spawn, too."""
    run = runs.Run(MPIRUN.format(n=2).split(), folder, MPI_AS_ROOT).wait()
    assert run.status == 0 and "2 processes on 1 node, mpi on cpu" in run.stdout, run.stdout + run.stderr
    outputs.assert_same_run(folder / "output", ddp_spawn_output)
