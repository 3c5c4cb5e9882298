"""docs/horovod.md: each of Horovod's switches that it offers, run as it stands, with horovod_cpu."""

import json
import re
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import MPI_AS_ROOT, ROOT, SECOND_LAUNCHERS
from harness.runs import Reference

pytestmark = [pytest.mark.only("horovod_cpu"), pytest.mark.runs("weekly")]
PAGE = ROOT / "docs" / "horovod.md"


def apply_recipe(folder: Path, word: str) -> None:
    """Apply the page's one diff that has this word to train.py."""
    (text,) = (text for text in readme.fences(PAGE, "diff") if word in text)
    edits.apply_diff(folder / "train.py", text)


def test_timeline(example: str, folder: Path) -> None:
    """The trace is JSON, and has an all-reduce of each gradient in each step, which begins and ends."""
    readme.run_block([readme.command("docs/horovod.md", "HOROVOD_TIMELINE=...")], folder)
    assert_trace(folder / "timeline.json", steps=1438 // 2 // 64)


def assert_trace(path: Path, steps: int) -> None:
    """Check that a trace has an all-reduce of each of the ConvNet's eight gradients in each step."""
    events = json.loads(path.read_text())
    named = [event for event in events if event.get("name") == "process_name" and "name" in event["args"]]
    gradients = [event["pid"] for event in named if re.match(r"allreduce\.(conv|fc)", event["args"]["name"])]
    assert len(gradients) == 8, named
    for tensor in gradients:
        phases = [(event["ph"], event.get("name")) for event in events if event["pid"] == tensor]
        assert phases.count(("B", "GLOO_ALLREDUCE")) == steps
        assert sum(phase == "B" for phase, _ in phases) == sum(phase == "E" for phase, _ in phases)


def test_clipped_gradients(example: str, folder: Path) -> None:
    """The norm to which two processes clip is that of the averaged gradients: they train as one does.

    It is so low here that AdamW's epsilon counts.
    """
    apply_recipe(folder, "clip_grad_norm_")
    edits.edit(folder / "train.py", "(model.parameters(), 1.0)", "(model.parameters(), 1e-6)")
    for processes, batch_size in ((1, 64), (2, 32)):
        words = f"--epochs 1 --precision fp64 --batch-size {batch_size} --output-dir {processes}"
        runs.train(example, folder, processes, *words.split(), SLURM_CPUS_PER_TASK="1")
    assert outputs.largest_difference(outputs.read_model(folder / "1"), outputs.read_model(folder / "2")) < 1e-9


def test_adasum(example: str, folder: Path, reference: Reference) -> None:
    """Over MPI it learns the digits, to other weights than by averaging; over Gloo it says that there is none."""
    apply_recipe(folder, "hvd.Adasum")
    command = SECOND_LAUNCHERS[example].command(2)
    run = runs.Run(command, folder).wait()
    assert run.status == 0, run.stderr
    assert outputs.read_metrics(folder / "output")[-1]["test_accuracy"] > 0.95
    weights, averaged = (outputs.read_model(output) for output in (folder / "output", reference.output))
    assert outputs.largest_difference(weights, averaged) > 1e-4
    run = runs.start(example, folder, 2, "--output-dir", "output/gloo").wait()
    assert run.status != 0 and "No Adasum operation enabled" in run.stderr


@pytest.mark.parametrize("launcher", ["horovodrun --gloo -np 4", "mpirun --oversubscribe -np 4"])
def test_process_sets(example: str, folder: Path, launcher: str) -> None:
    """Two pairs of four processes sum on their own, over Gloo and over MPI."""
    (script,) = readme.fences(PAGE, "python")
    assert "horovodrun --gloo -np 4 python pairs.py" in script
    (folder / "pairs.py").write_text(script)
    run = runs.Run([*launcher.split(), "python", "pairs.py"], folder, MPI_AS_ROOT).wait()
    assert run.status == 0, run.stderr
    for rank in range(4):
        line = f"rank {rank} is number {rank // 2} of 2, whose sum is {2 if rank % 2 == 0 else 4}"
        assert run.stdout.count(line) == 1, run.stdout
