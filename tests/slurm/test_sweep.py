"""sweep/sweep.slurm on two nodes of the lab: eight trials of an example, one task killed, one near its time limit."""

import csv
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from harness import outputs, readme
from harness.jobs import SETTINGS, hand_over, job_processes, sbatch, slowed
from harness.launchers import ROOT
from harness.processes import ASK_SLURM, command_lines, wait_until
from lab import Lab, faults, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]
EPOCHS = 3


@pytest.mark.runs("weekly")
@pytest.mark.timeout(1200)
def test_eight_trials(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A killed task's trial goes on in another task, after its last epoch; none of the eight is lost or there twice."""
    folder = tmp_path / "sweep"
    shutil.copytree(ROOT / "sweep", folder, ignore=shutil.ignore_patterns("output", "*.out"))
    slowed(source, tmp_path / "examples" / example, "2")
    hand_over(tmp_path)
    enter = readme.command("docs/sweeps.md", "cd sweep")
    submit = readme.command("docs/sweeps.md", "... sbatch ...", {"../examples/torchrun_multinode/.venv": sys.prefix})
    words = sbatch(f"{enter} && {submit}", ["--exclusive", "--cpus-per-task=2"])  # each task has a node of its own
    array = lab.run(words, cwd=tmp_path, env=SETTINGS, check=True).stdout.strip()
    logs = {task: folder / f"sweep-{array}_{task}.out" for task in (1, 2)}

    def trial_of(task: int) -> int:
        """The number of the trial that a task has begun last."""
        return int(re.findall(r"^trial (\d+), start", logs[task].read_text(), re.MULTILINE)[-1])

    def output(number: int) -> Path:
        return folder / "output" / example / f"trial-{number:03}"

    for task in (1, 2):
        wait_until(lambda log=logs[task]: log.exists() and ", start 1:" in log.read_text(), 300, f"task {task}")
    assert {lab.job(f"{array}_{task}")["NodeList"] for task in (1, 2)} == {"node1", "node2"}
    lost = trial_of(2)
    wait_until((output(lost) / "checkpoint.pt").exists, 300, "an epoch of the task that is to be killed")
    processes = job_processes(lab, lab.job(f"{array}_2")["JobId"])
    (killed,) = [process for process in processes if "sweep.py run" in "".join(command_lines([process]))]
    os.kill(killed, signal.SIGKILL)
    assert lab.wait_for_job(f"{array}_2")["JobState"] == "FAILED"

    kept = trial_of(1)  # the other task's: it is stopped near the time limit, and requeued
    wait_until((output(kept) / "checkpoint.pt").exists, 300, "an epoch of the task that is to be stopped")
    faults.timelimit(lab, f"{array}_1")
    wait_until(lambda: lab.job(f"{array}_1")["Restarts"] == "1", 300, "the requeue", ASK_SLURM)
    state = lab.wait_for_job(f"{array}_1", seconds=900)["JobState"]
    log = logs[1].read_text()
    assert state == "COMPLETED" and "no trial is left" in log, log + "".join(logs[2].read_text())

    show = readme.command("docs/sweeps.md", "... show ...", {"../examples/torchrun_multinode/.venv": sys.prefix})
    print(log, readme.run_block([enter, show], tmp_path).stdout)
    with open(folder / "output" / example / "sweep.csv", newline="") as file:
        rows = {int(row["trial"]): row for row in csv.DictReader(file)}
    assert sorted(rows) == list(range(8)) and {row["state"] for row in rows.values()} <= {"complete", "pruned"}, rows
    assert (folder / "output" / example / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for number, row in rows.items():
        metrics, run = outputs.read_metrics(output(number)), outputs.read_run(output(number))
        assert [one["epoch"] for one in metrics] == list(range(1, int(row["epochs"]) + 1))
        assert row["state"] == "pruned" or len(metrics) == EPOCHS
        assert float(row["test_loss"]) == pytest.approx(metrics[-1]["test_loss"], rel=1e-4)
        assert run["settings"]["lr"] == pytest.approx(float(row["lr"]), rel=1e-2)
        assert len(run["starts"]) == int(row["starts"]), run["starts"]
    assert {number for number, row in rows.items() if row["starts"] != "1"} == {lost, kept}
    for number in (lost, kept):  # where its checkpoint was, not from the beginning
        first, second = outputs.read_run(output(number))["starts"]
        assert first["step"] == 0 and second["step"] > 0
    assert "pruned" in {row["state"] for row in rows.values()}, rows
