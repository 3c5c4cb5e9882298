"""What only horovod_cpu promises on SLURM: MPI over two nodes, its second script, no silent lone tasks."""

import re
from pathlib import Path

import pytest

from harness import readme
from harness.jobs import SETTINGS, Job, hand_over, submit
from harness.launchers import copy_example
from lab import Lab
from tests.slurm.small import two_processes

pytestmark = [pytest.mark.slurm, pytest.mark.only("horovod_cpu")]
# Instead of train.py: one task of each node, of which the second comes to the fence 5 s late.
FENCE = """
import ctypes, os, time
pmix = ctypes.CDLL("libpmix.so.2")
node = os.environ["SLURM_NODEID"]
assert pmix.PMIx_Init(ctypes.create_string_buffer(260), None, ctypes.c_size_t(0)) == 0
time.sleep(5 * int(node))
came = time.monotonic()  # the nodes of the lab share the machine's clock
assert pmix.PMIx_Fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0)) == 0
print(f"node {node} came at {came} and left at {time.monotonic()}", flush=True)
assert pmix.PMIx_Finalize(None, ctypes.c_size_t(0)) == 0
"""
TEXT = "the quick brown fox jumps over the lazy dog\n" * 500


def assert_completed(job: Job) -> None:
    """Check that SLURM calls a job COMPLETED."""
    job.wait()
    assert job.shown["JobState"] == "COMPLETED", f"{job.shown}\n{job.log}"


def test_every_node_waits_for_the_others(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """run.slurm has PMIx hold each node until all have come, as MPI_Init needs: SLURM's default fence does not.

    SLURM 22.05.8 and 24.11.5 at least build its tree without edges when a job has fewer nodes than TreeWidth, 50 or 16
    by default. 3 of 600 starts of four ranks died of that: a rank got a message from the other node while it was still
    waiting in MPI_Init's first fence, and had no function yet to hand it to: a segmentation fault at address 0.
    """
    folder = copy_example(source, tmp_path / example)
    (folder / "fence.py").write_text(FENCE)
    job = submit(lab, example, folder, options=two_processes(source), SCRIPT="fence.py")
    assert_completed(job)
    times = {
        node: (came, left) for node, came, left in re.findall(r"node (\d) came at (\S+) and left at (\S+)", job.log)
    }
    assert times.keys() == {"0", "1"} and float(times["0"][1]) >= float(times["1"][0]), job.log


def test_srun_without_pmi(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Plain srun, which tells MPI nothing: Open MPI says so, or train.py itself. No task trains alone."""
    folder = hand_over(copy_example(source, tmp_path / example))
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", f"{SETTINGS['VENV']}/bin/python", "train.py"]
    done = lab.run(command, cwd=folder, timeout=300)
    assert done.returncode != 0 and re.search("PMI support|--mpi=pmix", done.stderr), done.stderr
    assert not (folder / "output").exists()


def test_language_model(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's other job: train_lm.py on a text."""
    folder = copy_example(source, tmp_path / example)
    (folder / "book.txt").write_text(TEXT)
    line = readme.command("examples/horovod_cpu/README.md", "SCRIPT=...")
    words = ["--context", "32", "--epochs", "1"]
    book = submit(lab, example, folder, *words, options=two_processes(source), line=line)
    assert_completed(book)
    first = f"TinyGPT on {folder}/book.txt, 32 tokens per sample: 2 processes on 2 nodes, mpi on cpu"
    assert first in book.log and "per byte" in book.log


@pytest.mark.runs("full")
def test_in_an_allocation(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's `salloc`, and in its shell `srun --mpi=pmix`: all four processes train together."""
    folder = hand_over(copy_example(source, tmp_path / example))
    salloc = readme.command("examples/horovod_cpu/README.md", "salloc ...")
    srun = readme.command("examples/horovod_cpu/README.md", "...srun --mpi=pmix ...")
    shell = f"source {SETTINGS['VENV']}/bin/activate && {srun}"
    done = lab.run([*salloc.split(), "bash", "-c", shell], cwd=folder, env=SETTINGS, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 processes on 2 nodes, mpi on cpu, 2 threads each" in done.stdout and "finished" in done.stdout
