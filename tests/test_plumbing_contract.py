"""The contract of the examples that carry plumbing/: in the ordinary sessions one of them keeps it, ONE in conftest.py.

`nox -s weekly` runs it with the others. It goes with plumbing/.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import LAUNCHERS
from harness.processes import wait_until
from harness.runs import Reference

pytestmark = [pytest.mark.only("plumbing"), pytest.mark.runs("one")]
EPOCHS = 5  # of a run with the default settings


@pytest.fixture
def finished(folder: Path, reference: Reference) -> Path:
    """A copy of the example's folder with the reference run in it."""
    shutil.copytree(reference.output, folder / "output")
    return folder


def content(output: Path) -> dict[str, bytes]:
    """Return the bytes of each file that a run has written, by its path."""
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def damage(example: str, output: Path, change: Callable[[bytearray], object]) -> None:
    """Change the content of one file of a run's checkpoint."""
    (checkpoint,) = output.glob(LAUNCHERS[example].checkpoint)
    old = bytearray(checkpoint.read_bytes())
    change(old)
    checkpoint.write_bytes(old)


def test_resume_of_a_finished_run(example: str, finished: Path, reference: Reference) -> None:
    """With --resume a finished run writes its model again and ends well."""
    (finished / "output" / LAUNCHERS[example].model).unlink()
    run = runs.train(example, finished, 2, "--resume")
    assert "continuing after epoch 5 of 5" in run.stdout and "train loss" not in run.stdout
    outputs.assert_same_run(finished / "output", reference.output)


def test_another_learning_rate(example: str, finished: Path, reference: Reference) -> None:
    """A run may be resumed with another --lr, and that one counts: with 0 the weights stay as they are."""
    run = runs.train(example, finished, 2, "--resume", "--epochs", EPOCHS + 1, "--lr", 0)
    assert f"epoch  {EPOCHS + 1}/{EPOCHS + 1}" in run.stdout
    weights, before = (outputs.read_model(path) for path in (finished / "output", reference.output))
    for name in [name for name in weights if re.search("running_|num_batches", name)]:  # BatchNorm's statistics
        del weights[name], before[name]
    assert outputs.largest_difference(weights, before) == 0


def test_killed_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to one process, then to all, at random moments, and --resume: the same bits, no row twice or missing."""
    runs.kill_and_resume(example, folder, reference, [runs.kill_one, runs.kill_all])


@pytest.mark.only("stops_at_a_step")
def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; --resume continues there, to the same bits.

    One process alone sees the request, as on one of several nodes: it has to tell the other.
    """
    edits.edit(
        folder / "plumbing" / "stopping.py", "    return os.path.exists(", "    return rank() == 1 and os.path.exists("
    )
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    runs.train(example, folder, 2, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.only("convnet")  # whose code it changes
def test_exception_in_one_worker(example: str, folder: Path) -> None:
    """An exception on rank 1 alone: its traceback is shown and the run ends non-zero within 60 s of that."""
    rank = LAUNCHERS[example].rank
    edits.plant(folder, f"if {rank} == 1:\n    raise ArithmeticError('planted on rank 1')\n")
    run = runs.start(example, folder, 2)
    shown = Path(run.errors.name)
    wait_until(lambda: "planted on rank 1" in shown.read_text(), 300, "the exception's traceback")
    run.wait(60)
    assert run.status > 0
    assert "Traceback" in run.stderr and "ArithmeticError: planted on rank 1" in run.stderr, run.stderr
    assert not (folder / "output" / LAUNCHERS[example].model).exists()


@pytest.mark.waits
def test_one_worker_hangs(example: str, folder: Path) -> None:
    """A worker that stops answering: the other gives up after --timeout, and the run ends non-zero in time."""
    timeout = 20
    run = runs.start(example, folder, 2, "--timeout", timeout)
    run.read_epoch(1)
    os.kill(max(run.workers()), signal.SIGSTOP)
    run.wait(timeout + 60, leaves=60)
    assert run.status > 0 and "finished" not in run.stdout
    assert f"no step for {int(0.8 * timeout)} s (--timeout {timeout})" in run.stderr, run.stderr


def test_stacks(example: str, folder: Path, reference: Reference) -> None:
    """Asked as run.slurm's processes are, each that trains prints its stack; the run goes on, to the same bits."""
    edits.hold_epochs(folder, LAUNCHERS[example])
    (folder / edits.HOLD).write_text("1")
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    shown = Path(run.errors.name)
    # It is by the job's number that the processes are found. These have no job: another variable takes its place.
    edits.edit(folder / "plumbing" / "job.sh", '"SLURM_JOB_ID=$SLURM_JOB_ID"', f'"{run.marker}"')
    words = ["bash", "-c", "SLURM_JOB_ID=1; source plumbing/job.sh; ask_for_stacks"]
    subprocess.run(words, cwd=folder, check=True, timeout=300)
    for rank in range(2):
        pattern = rf'\[{re.escape(os.uname().nodename)} rank {rank}\]   File ".*/train\.py", line \d+ in '
        wait_until(lambda: re.search(pattern, shown.read_text()), 300, pattern)  # noqa: B023
    (folder / edits.HOLD).unlink()
    assert run.wait().status == 0, run.stderr
    outputs.assert_same_run(folder / "output", reference.output)


def test_two_runs_in_one_folder(example: str, folder: Path) -> None:
    """While a run writes to its --output-dir a second one is refused, even with --resume; the first continues."""
    first = runs.start(example, folder, 2, "--epochs", 10000)
    first.read_epoch(1)
    second = runs.start(example, folder, 1, "--resume").wait()
    refusals.assert_refused(second, LAUNCHERS[example].status_after_bad_input, "another run", "--output-dir output")
    assert not second.left
    first.read_until("epoch ")
    first.kill()
    first.wait()


def test_disk_full(example: str, folder: Path) -> None:
    """A checkpoint that the disk does not take ends the run with one line.

    A limit on the size of a file is in the place of the disk: what is written beyond it fails in the same way.
    """
    limited = ["bash", "-c", 'ulimit -f 2000; exec "$@"', "bash", *LAUNCHERS[example].command(2)]
    run = runs.Run(limited, folder).wait()
    assert run.status == LAUNCHERS[example].status_after_bad_input
    assert "train.py: error: cannot write output/checkpoint" in run.stderr, run.stderr


@pytest.mark.only("gpus")
def test_gpus_that_cannot_be_used(example: str, folder: Path) -> None:
    """A job with GPUs that PyTorch cannot use does not train on the CPU unasked."""
    run = runs.start(example, folder, 1, SLURM_GPUS_ON_NODE="2").wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, " GPUs", "README.md", "ALLOW_CPU=1")
    assert not (folder / "output").exists()


@pytest.mark.only("any_world_size")
def test_another_number_of_processes(example: str, folder: Path, tmp_path: Path) -> None:
    """An epoch of two processes and one of three train as one process does, to a rounding, in fp64."""
    launcher, output = LAUNCHERS[example], folder / "output"
    rounding = 1e-9
    if launcher.convnet:
        edits.leave_digits(folder, 200)  # fp64 takes long
        edits.leave_digits(folder, 61, "test")
    words = ["--precision", "fp64", "--global-batch", launcher.global_batch // 4 * 3]
    runs.train(example, folder, 1, *words, "--epochs", 2)
    reference = output.rename(tmp_path / "reference")
    runs.train(example, folder, 2, *words, "--epochs", 1)
    runs.train(example, folder, 3, *words, "--epochs", 2, "--resume")
    assert outputs.largest_difference(outputs.read_model(output), outputs.read_model(reference)) < rounding
    rows, others = outputs.read_metrics(output), outputs.read_metrics(reference)
    assert [row["world_size"] for row in rows] == [2, 3]
    for name in ("train_loss", "test_loss"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in others], rel=rounding)


# Reads the checkpoint.
READ = """
from plumbing import checkpoints
args = train.parse_args()
vars(args).pop("zero_stage", None)  # deepspeed has it from a file
checkpoints.checks.look_at_model = lambda *_: None  # there is no model yet
name = getattr(train, "CHECKPOINT", checkpoints.CHECKPOINT)
name = train.shards.CHECKPOINT if getattr(args, "shard", hasattr(train, "shards")) else name
checkpoints.accept(checkpoints.read_checkpoint(args, None, name))
"""
BAD_ARGUMENTS = {
    "--precision fp8": ["--precision", "'fp8'", "bf16"],
    "--epochs -1": ["--epochs", "1 or more", "-1"],
    "--batch-size 0": ["--batch-size", "1 or more", "0"],
    "--lr nan": ["--lr", "0 or more", "nan"],
    "--no-such-flag": ["--no-such-flag"],
}


def test_bad_input(example: str, finished: Path) -> None:
    """Bad arguments, input and checkpoints end a run with one clear line; the checkpoint is left untouched.

    In one process without a launcher; what the launcher makes of it, test_bad_checkpoint shows.
    """
    launcher, output = LAUNCHERS[example], finished / "output"
    truncated = shutil.copytree(output, finished / "truncated")
    damage(example, truncated, lambda old: old.__delitem__(slice(len(old) // 2, None)))
    settings, same = [f"global_batch {launcher.global_batch}"], f"--resume --global-batch {launcher.global_batch}"
    settings += [] if launcher.any_world_size else ["one file of DeepSpeed for each process, whose number was 2:"]
    texts = {
        "": ["output/checkpoint", "--resume", "--output-dir"],
        "--output-dir train.py/output": ["--output-dir", "train.py/output", "another folder"],
        "--resume --batch-size 24": ["output/checkpoint", *settings],
        # DeepSpeed's files are looked at by all processes together, which there have to be as many of.
        f"{same} --output-dir truncated": [
            "truncated/checkpoint",
            *(["damaged", "move it away"] if launcher.any_world_size else settings[1:]),
        ],
    }
    if launcher.convnet:
        texts["--dataset mnist"] = ["no mnist in data/MNIST/raw", f"{launcher.download} mnist --data-dir data"]
        texts["--batch-size 1439"] = ["--batch-size 1439", "1438"]
    before = content(output), content(truncated)
    calls = {(READ, f"{same} --epochs {EPOCHS - 1}"): ["output/checkpoint", "5 epochs", "not 4"]}
    calls[READ, f"{same} --seed 1"] = ["output/checkpoint", "seed 0:"]
    calls[READ, f"{same} --precision bf16"] = ["output/checkpoint", "precision fp32:"]
    calls |= {("train.parse_args()", words): expected for words, expected in BAD_ARGUMENTS.items()}
    refusals.assert_runs_refused(example, finished, texts, calls)
    assert (content(output), content(truncated)) == before


def test_bad_checkpoint(example: str, finished: Path) -> None:
    """One bit has changed: with its launcher and 2 processes, too, a run ends with one clear line and in time."""
    output = finished / "output"

    def flip(old: bytearray) -> None:
        old[len(old) // 2] ^= 1

    damage(example, output, flip)
    before = content(output)
    run = runs.start(example, finished, 2, "--resume").wait()
    texts = ["output/checkpoint", "damaged", "move it away"]
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *texts)
    assert content(output) == before
