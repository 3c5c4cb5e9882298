"""The front page's picture of the launch patterns says what run.slurm does, that of RESULTS.md what was measured."""

import dataclasses
import re
from pathlib import Path

from PIL import Image

from benchmarks import report
from harness.launchers import LAUNCHERS, ROOT

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
COMPARED = ROOT / "benchmarks" / "compare.csv"


def who_starts_whom(example: str, text: str) -> str:
    """Return what the front page's picture says of a launch pattern whose run.slurm has this text."""
    nodes, tasks = (int(re.search(rf"^#SBATCH --{name}=(\d+)", text, re.M)[1]) for name in ("nodes", "ntasks-per-node"))
    _, _, *launcher = re.search(r"^# Who starts the processes: (.*)$", text, re.M)[1].split(" -> ")
    task = "one task" if tasks == 1 else f"{tasks} tasks"
    processes = LAUNCHERS[example].processes_in_job // nodes
    where = "one node" if nodes == 1 else f"each of {nodes} nodes"
    last = "Each task is a process."
    if launcher:
        program = re.match(r"[\w.]+\w", launcher[0])[0]
        last = f"{program} starts {processes} processes."
    assert launcher or tasks == processes
    return f"{example}: {task} on {where}. {last}"


def boxes() -> set[str]:
    """Return what the boxes of the front page's picture say, to which srun leads: a text for each launch pattern."""
    block = re.search(r"^```mermaid\nflowchart LR\n(.*?)^```$", README, re.M | re.S)[1]
    texts = [text.replace("<br/>", " ") for text in re.findall(r'^ +srun --> \w+\["(.*)"\]$', block, re.M)]
    return {text.replace(names, name) for text in texts for names in text.split(":")[:1] for name in names.split(", ")}


def test_launch_patterns() -> None:
    """The picture has each launch pattern as its run.slurm is; another launcher, or other numbers, are noticed."""
    patterns = [name for name, row in LAUNCHERS.items() if row.pattern]
    texts = {name: (ROOT / "examples" / name / "run.slurm").read_text() for name in patterns}
    assert {who_starts_whom(name, text) for name, text in texts.items()} == boxes()
    said = " ".join(README.replace("\\", "").split())
    assert all(LAUNCHERS[name].meets.partition(";")[0] in said for name in patterns)
    for old, new in (("-> torchrun,", "-> mpirun,"), ("nodes=2", "nodes=3"), ("per-node=1", "per-node=2")):
        text = texts["torchrun_multinode"]
        assert old in text and who_starts_whom("torchrun_multinode", text.replace(old, new)) not in boxes()


def test_comparison() -> None:
    """RESULTS.md has the picture and the table of benchmarks/compare.csv, a copy of results/local.csv."""
    assert len(re.findall(r"^!\[.+\]\(compare\.png\)$", RESULTS, re.MULTILINE)) == 1
    with Image.open(COMPARED.with_suffix(".png")) as image:
        assert image.text["Description"] == COMPARED.read_text(), "copy results/local.png, too"
    runs = report.read_runs(COMPARED)
    assert report.table([report.run_cells(run, runs[0].example) for run in runs]) in RESULTS


def runs_of(*differences: float) -> list[report.Run]:
    """Return a run for each difference of its weights from the first one's; its losses differ as much."""
    return [
        report.Run(f"run{i}", one, 0.97, 10.0, 400.0, 500.0, 200, (1.5 + one, 0.3 + one))
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
