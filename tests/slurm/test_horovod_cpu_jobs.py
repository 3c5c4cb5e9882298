"""What only horovod_cpu promises on SLURM: MPI over two nodes, its second script, staging, no silent lone tasks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from harness import edits, readme, samples
from harness.jobs import SETTINGS, Job, hand_over, stub, submit, two_processes, wait_for_start
from harness.launchers import copy_example
from harness.processes import ASK_SLURM, wait_until
from lab import Lab, faults

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
    """Plain srun, which tells MPI nothing: every task refuses with the same line, and none trains alone."""
    folder = hand_over(copy_example(source, tmp_path / example))
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", f"{SETTINGS['VENV']}/bin/python", "train.py"]
    done = lab.run(command, cwd=folder, timeout=300)
    errors = [line for line in done.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert done.returncode != 0 and len(errors) == 4 and len(set(errors)) == 1, done.stderr
    assert "--mpi=pmix" in errors[0]
    assert not (folder / "output").exists()


def test_language_model_and_staged_images(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's two other jobs: train_lm.py on a text, and images that each node has first copied to its disk."""
    folder = copy_example(source, tmp_path / example)
    (folder / "book.txt").write_text(TEXT)
    samples.write_data(folder / "data", "mnist")
    line = readme.command("examples/horovod_cpu/README.md", "SCRIPT=...")
    words = ["--context", "32", "--epochs", "1"]
    book = submit(lab, example, folder, *words, options=two_processes(source), line=line)
    line = readme.command("examples/horovod_cpu/README.md", "STAGE=...")
    images = submit(lab, example, folder, "--batch-size", "16", "--epochs", "1", line=line)
    assert_completed(book)
    first = f"TinyGPT on {folder}/book.txt, 32 tokens per sample: 2 processes on 2 nodes, mpi on cpu"
    assert first in book.log and "tokens/s" in book.log
    assert_completed(images)
    assert re.search(rf"copied data to \S+/data-{images.id} on 2 nodes in \d+ s", images.log), images.log
    assert "ConvNet on mnist: 4 processes on 2 nodes" in images.log


@pytest.mark.runs("weekly")
def test_language_model_with_staged_text(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """SCRIPT=more/train_lm.py and STAGE=1: the text is copied once per node, read there, and removed at the end."""
    folder = copy_example(source, tmp_path / example)
    (folder / "data").mkdir()
    (folder / "data" / "book.txt").write_text(TEXT)
    arguments = ["--text-file", "book.txt", "--context", "32", "--epochs", "1"]
    variables: dict[str, Any] = {"SCRIPT": "more/train_lm.py", "STAGE": "1", "DATA_DIR": "data"}
    job = submit(lab, example, folder, *arguments, **variables)
    assert_completed(job)
    assert re.search(rf"copied data to \S+/data-{job.id} on 2 nodes in \d+ s", job.log), job.log
    first = "TinyGPT on book.txt, 32 tokens per sample: 4 processes on 2 nodes, mpi on cpu"
    assert first in job.log and "tokens/s" in job.log
    assert (job.output / "model.pt").exists()
    assert not staged(lab, job.id)


def staged(lab: Lab, job: str) -> list[str]:
    """Return the nodes on which a job's copy of the data lies."""
    return [node for node in lab.nodes if lab.run(["ls", "-d", f"/tmp/data-{job}"], node=node).returncode == 0]


def test_staged_data_is_removed(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The copies are gone when the job is requeued, when it is cancelled, and when one could not be made."""
    folder = stub(source, tmp_path / example)
    (folder / "data").mkdir()
    (folder / "data" / "book.txt").write_text(TEXT)
    job = submit(lab, example, folder, STAGE="1")
    wait_for_start(folder, job.id)
    assert staged(lab, job.id) == ["node1", "node2"]
    for node in lab.nodes:
        lab.run(["touch", f"/tmp/data-{job.id}/old"], node=node, check=True)
    faults.requeue(lab, job.id)
    wait_for_start(folder, job.id, starts=2)
    assert staged(lab, job.id) == ["node1", "node2"]
    assert all(lab.run(["ls", f"/tmp/data-{job.id}/old"], node=node).returncode != 0 for node in lab.nodes)
    job.cancel()
    assert not staged(lab, job.id)

    os.mkfifo(folder / "data" / "endless")  # nobody writes to it: a copy of what is in it does not end
    edits.edit(folder / "plumbing" / "staging.sh", "cp -rT", "cp -rT --copy-contents")
    copying = submit(lab, example, folder, STAGE="1")
    wait_until(lambda: staged(lab, copying.id), 300, "the beginning of the copy", ASK_SLURM)
    copying.cancel()
    assert not staged(lab, copying.id) and "copied" not in copying.log

    lab.run(["mkdir", "/tmp/on-node1"], node="node1", check=True)
    for missing in ("no-such-folder", "/tmp/on-node1"):  # on all nodes, and on one of them
        broken = submit(lab, example, folder, STAGE="1", DATA_DIR=missing)
        assert broken.wait().shown["JobState"] == "FAILED" and "started" not in broken.log
        assert "run.slurm: error: the data could not be copied to all nodes" in broken.log, broken.log
        assert not staged(lab, broken.id)

    # What somebody else has put where the copy would be is not written to; the job fails.
    name = f"/tmp/data-{int(broken.id) + 1}"
    lab.run(["sh", "-c", f"mkdir -m 777 {name} && chown nobody {name}"], node="node1", user="root", check=True)
    (folder / "few").mkdir()
    (folder / "few" / "book.txt").write_text(TEXT)
    planted = submit(lab, example, folder, STAGE="1", DATA_DIR="few")
    assert name.endswith(f"-{planted.id}") and planted.wait().shown["JobState"] == "FAILED"
    assert "run.slurm: error: the data could not be copied to all nodes" in planted.log, planted.log
    assert lab.run(["ls", "-A", name], node="node1", check=True).stdout == ""


@pytest.mark.runs("weekly")
def test_in_an_allocation(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's `salloc`, and in its shell `srun --mpi=pmix`: all four processes train together."""
    folder = hand_over(copy_example(source, tmp_path / example))
    salloc = readme.command("examples/horovod_cpu/README.md", "salloc ...")
    srun = readme.command("examples/horovod_cpu/README.md", "...srun --mpi=pmix ...")
    shell = f"source {SETTINGS['VENV']}/bin/activate && {srun}"
    done = lab.run([*salloc.split(), "bash", "-c", shell], cwd=folder, env=SETTINGS, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 processes on 2 nodes, mpi on cpu, 2 threads each" in done.stdout and "finished" in done.stdout
