"""The front page's pictures: they say what run.slurm does and what was measured, and one command draws them."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import pictures, report
from benchmarks.pictures import FOLDER, PATTERNS, Pattern
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from harness.processes import clean_environment

README = (ROOT / "README.md").read_text()
LAUNCH = ("", "torchrun", "train.py")  # what may stand between srun and the processes
SIZES = {"launch": (1800, 1110), "compare": (1800, 510)}


def check_pattern(pattern: Pattern) -> None:
    """Check that a pattern starts as many processes as run.slurm says, by a launcher in one task, or each as a task."""
    assert LAUNCHERS[pattern.example].processes_in_job == pattern.nodes * pattern.processes
    assert pattern.tasks == (1 if pattern.launcher else pattern.processes) and pattern.launcher in LAUNCH


def test_patterns() -> None:
    """Each launch pattern has a panel; a run.slurm with another launcher, more tasks or more nodes is noticed."""
    assert sorted(pattern.example for pattern in PATTERNS) == [name for name in EXAMPLES if LAUNCHERS[name].pattern]
    for pattern in PATTERNS:
        check_pattern(pattern)
    text = (ROOT / "examples" / "torchrun_multinode" / "run.slurm").read_text()
    for old, new in (
        ("-> torchrun,", "-> mpirun,"),
        (" -> torchrun,", ","),
        ("per-node=1", "per-node=2"),
        ("nodes=2", "nodes=3"),
    ):
        changed = pictures.read_pattern("torchrun_multinode", text.replace(old, new))
        with pytest.raises(AssertionError):
            check_pattern(changed)


def draw(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command that draws both pictures, without PyTorch: matplotlib has to be enough."""
    program = (
        "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('benchmarks.pictures', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


def described(path: Path) -> dict[str, list]:
    """Return the content that a picture was drawn from; it must have the expected size, and not be of one colour."""
    with Image.open(path) as image:
        assert image.size == SIZES[path.stem]
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255) and len(image.convert("L").getcolors()) > 20
        return json.loads(image.text["Description"])


def test_committed_pictures(tmp_path: Path) -> None:
    """Both pictures in the repository are what the command draws, and the README has them and the same table."""
    done = draw("--output", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in SIZES:
        drawn = described(tmp_path / f"{name}.png")
        assert drawn == described(FOLDER / f"{name}.png"), (
            f"draw benchmarks/{name}.png again: see benchmarks/pictures.py"
        )
        (alternative,) = re.findall(rf"^!\[(.+)\]\(benchmarks/{name}\.png\)$", README, re.MULTILINE)
        assert len(alternative) > 50
    assert done.stdout in README, "the README's table is not that of benchmarks/compare.csv"

    launch, compare = described(tmp_path / "launch.png"), described(tmp_path / "compare.png")
    ranks = [text for text in launch["texts"] if text.startswith("rank ")]
    assert len(ranks) == sum(pattern.nodes * pattern.processes for pattern in PATTERNS)
    assert launch["texts"].count("torchrun") == 4 and launch["texts"].count("run.slurm") == len(PATTERNS)
    assert {*(pattern.example for pattern in PATTERNS), *pictures.ROLES} <= set(launch["texts"])
    runs = report.read_runs(FOLDER / "compare.csv")
    assert {run.example for run in runs} <= set(compare["texts"]) and len(compare["bars"]) == 5 * len(runs)
    assert compare["bars"][len(runs)] == runs[0].samples_per_second
    slower = [*runs[:-1], dataclasses.replace(runs[-1], samples_per_second=1.0)]
    assert pictures.content(report.runs_figure(runs)) == compare != pictures.content(report.runs_figure(slower))


def runs_of(*differences: float) -> list[report.Run]:
    """Return a run for each difference of its weights from the first one's; its losses differ as much."""
    return [
        report.Run(f"run{i}", one, 0.97, 10.0, 400.0, 500.0, 200, 380, (1.5 + one, 0.3 + one))
        for i, one in enumerate(differences)
    ]


def test_comparison_says_who_agrees(tmp_path: Path) -> None:
    """The title counts who agrees to the bit; who does not has a curve of its own, and is named."""
    same = runs_of(0, 0, 0)
    same[1] = dataclasses.replace(same[1], train_losses=(1.5000000000000002, 0.3))  # the same sum in another order
    report.write_csv(same, tmp_path / "runs.csv")
    assert report.read_runs(tmp_path / "runs.csv") == same
    axis = report.runs_figure(same).axes[0]
    assert axis.get_title().endswith("\nall 3 agree to the bit") and len(axis.lines) == 1
    others = runs_of(0, 0, 1e-9, 0)
    others[1] = dataclasses.replace(others[1], train_losses=(1.5, 0.3001))
    axis = report.runs_figure(others).axes[0]
    assert axis.get_title().endswith("\n2 of 4 agree to the bit")
    assert [line.get_label() for line in axis.lines] == ["2 of 4 examples", "run1", "run2"]
    assert [tuple(line.get_ydata()) for line in axis.lines] == [run.train_losses for run in others[:3]]


def test_refused(tmp_path: Path) -> None:
    """A CSV file that is not there, or of something else, or empty, is refused with one line."""
    (tmp_path / "other.csv").write_text("name,rate\nddp_spawn,1\n")
    report.write_csv(runs_of(0), tmp_path / "none.csv")
    (tmp_path / "none.csv").write_text((tmp_path / "none.csv").read_text().splitlines()[0] + "\n")
    for name, message in (("missing", "No such file"), ("other", "cannot be read as"), ("none", "has no rows")):
        refused = draw("--csv", tmp_path / f"{name}.csv", "--output", tmp_path / "drawn")
        assert refused.returncode == 2 and message in refused.stderr.splitlines()[-1], refused.stderr
        assert "Traceback" not in refused.stderr and not (tmp_path / "drawn").exists()
