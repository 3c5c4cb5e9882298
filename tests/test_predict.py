"""predict.py of torchrun_vision: each image once, in order, for any number of processes, whatever happens."""

import csv
import os
import shutil
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import ROOT
from harness.processes import wait_until
from harness.runs import Reference

pytestmark = pytest.mark.only("torchrun_vision")
WORDS = ["predict.py", "--images", "images/val"]


def start(folder: Path, processes: int, *arguments: str) -> runs.Run:
    """Start predict.py with small parts: 150 images are 10 of 16, the last of 6."""
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return runs.Run([*launcher, *WORDS, "--part", "16", "--batch-size", "8", *arguments], folder)


def read(output: Path) -> list[dict[str, str]]:
    """Return the rows of predictions.csv."""
    with open(output / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


def assert_refused(run: runs.Run, *texts: str) -> None:
    """Check that a run ended with one clear line of predict.py."""
    lines = {line for line in run.stderr.splitlines() if line.startswith("predict.py: error: ")}
    assert run.status == 1 and len(lines) == 1 and all(text in min(lines) for text in texts), run.stderr
    assert 'predict.py", line' not in run.stderr, run.stderr


def assert_correct(folder: Path, output: Path, accuracy: float) -> None:
    """Check that each image is there once, in order, with the model's class; `accuracy` is what the run has found."""
    rows = read(output)
    paths = sorted(str(path.relative_to(folder / "images" / "val")) for path in folder.glob("images/val/*/*.png"))
    assert len(paths) == 150 and [row["path"] for row in rows] == paths
    assert sum(row["class"] == row["path"].split("/")[0] for row in rows) / 150 == pytest.approx(accuracy)
    assert all(1 / 6 <= float(row["probability"]) <= 1 for row in rows)
    assert not (output / "parts").exists()


def test_predictions(example: str, folder: Path, reference: Reference) -> None:
    """The page's command, with parts whose number no process divides: every image once, and the run's own accuracy."""
    shutil.copytree(reference.output, folder / "output")
    command = readme.command("docs/using-the-model.md", "torchrun ...")
    readme.run_block([f"{command} --part 16 --batch-size 8"], folder)
    accuracy = outputs.read_metrics(folder / "output")[-1]["test_accuracy"]
    assert_correct(folder, folder / "predictions", accuracy)
    # The page's program for one image.
    row = read(folder / "predictions")[-1]
    (program,) = readme.fences(ROOT / "docs" / "using-the-model.md", "python")
    program = program.replace("photo.jpg", f"images/val/{row['path']}")
    name, probability = runs.Run(["python", "-c", program], folder).wait().stdout.split()
    assert name == row["class"] and float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


@pytest.mark.runs("weekly")
def test_killed_and_stopped(example: str, folder: Path, reference: Reference) -> None:
    """Killed, stopped, then continued by three processes: the predictions of one process; nothing is done twice."""
    shutil.copytree(reference.output, folder / "output")
    program = folder / "predict.py"
    shipped = program.read_text()
    line = "        vote = torch.tensor([int(plumbing.stop_requested())])\n"
    wait = '        while progress["step"] == 2 and not plumbing.stop_requested(): __import__("time").sleep(0.1)\n'
    edits.edit(program, line, wait + line)
    parts = folder / "predictions" / "parts"
    run = start(folder, 2)
    wait_until(lambda: len([*parts.glob("0*.csv")]) == 4, 300, "four parts")
    run.kill()
    run.wait()
    before = {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.csv")}
    assert sorted(before) == [f"{number:08}.csv" for number in range(4)]
    assert_refused(start(folder, 2).wait(), "predictions/inputs.json", "--resume")
    run = start(folder, 2, "--resume")
    run.read_until("4 of them done before")
    wait_until(lambda: len([*parts.glob("0*.csv")]) == 8, 300, "eight parts")
    (folder / runs.STOP).touch()
    run.wait()
    assert run.status == 0 and "stopped by a signal after round 2 of 3: use --resume" in run.stdout, run.stderr
    assert (folder / "predictions" / "stopped").exists()
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in parts.glob("0*.csv")}.items()

    program.write_text(shipped)
    (folder / "images" / "val" / "one" / "new.png").write_bytes(b"")
    assert_refused(start(folder, 3, "--resume").wait(), "of other images")
    os.remove(folder / "images" / "val" / "one" / "new.png")
    # Two parts are left, so that the third process has none: it waits longer for them than --timeout.
    edits.edit(program, "            rows = []\n", "            rows = __import__('time').sleep(30) or []\n")
    run = start(folder, 3, "--resume", "--timeout", "20").wait()
    program.write_text(shipped)
    assert run.status == 0 and "8 of them done before" in run.stdout, run.stderr
    accuracy = outputs.read_metrics(folder / "output")[-1]["test_accuracy"]
    assert_correct(folder, folder / "predictions", accuracy)
    assert start(folder, 1, "--output-dir", "alone").wait().status == 0
    for one, other in zip(read(folder / "predictions"), read(folder / "alone"), strict=True):
        assert (one["path"], one["class"]) == (other["path"], other["class"])
        assert float(one["probability"]) == pytest.approx(float(other["probability"]), abs=1e-4)
