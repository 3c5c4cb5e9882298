"""The programs of benchmarks/ with few steps on the CPU: they start, and write their tables."""

import csv
import os
import sys
from pathlib import Path

import pytest

from benchmarks import others
from harness.launchers import ROOT
from harness.processes import finish


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def run(*words: object) -> str:
    """Run a module of benchmarks/, which has to end well; return what it prints."""
    done = finish([sys.executable, "-m", *map(str, words)], 1100, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.runs("full")
@pytest.mark.timeout(1200)
def test_on_gpu(tmp_path: Path) -> None:
    """Each row is tried with ddp_spawn; what needs a GPU is left out by name."""
    words = ["--device", "cpu", "--limit-steps", "2", "--examples", "ddp_spawn", "--at-once", "1", "--minutes", "18"]
    words += ["--output", str(tmp_path)]
    printed = run("benchmarks.on_gpu", *words)
    verdicts = {row["row"]: row["verdict"] for row in rows(tmp_path / "on_gpu.csv")}
    measured = dict.fromkeys(("default", "killed", "bf16", "verify", "speed"), "ok")
    assert verdicts == measured | {"modes": "left out", "large": "left out"}
    assert "no GPU, driver" in printed and (tmp_path / "on_gpu.md").read_text() in printed


@pytest.mark.runs("full")
def test_measure_local(tmp_path: Path) -> None:
    """Two examples of one environment end with the same bits and losses, at plausible costs."""
    words = ["--examples", "torchrun_multinode", "--limit-steps", "3", "--output", tmp_path]
    run("benchmarks.measure", "local", *words)
    for row in (found := rows(tmp_path / "local.csv")):
        assert float(row["weights"]) == 0 and float(row["losses"]) < 1e-12
        assert float(row["s to the first step"]) > 1 and 200 < float(row["MB per process"]) < 4000
    assert [row["example"] for row in found] == ["ddp_spawn", "torchrun_multinode"]


def test_no_gpu_and_no_clone(tmp_path: Path) -> None:
    """A machine without GPUs gets one line; a program without its clone is a line of the table."""
    words = [sys.executable, "-m", "benchmarks.on_gpu", "--output", str(tmp_path)]
    refused = finish(words, 300, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "finds no GPU" in refused.stderr
    words = ["--sources", tmp_path, "--only", "csc", "--rounds", "1", "--device", "cpu", "--output", tmp_path]
    assert f"{tmp_path}/CSCfi+pytorch-ddp-examples is no clone with commit" in run("benchmarks.others", "speed", *words)


def test_epochs_of_a_public_program() -> None:
    """An epoch lasts from the begin of the training loader's iteration to its last step; a test in between is none."""
    train, test, step = 7, 8, 0
    events = [(0.0, test), (1.0, train), (1.1, train), (2.0, step), (3.1, step), (3.5, test)]
    events += [(5.0, train), (5.5, step), (6.0, step), (6.5, test)]
    assert others.epochs_of(events) == pytest.approx([2 / 2.0, 2 / 1.0])
    assert others.epochs_of([(float(number), step) for number in range(9)]) == [1.0, 1.0, 1.0]
