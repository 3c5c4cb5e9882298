"""sweep/sweep.slurm on two nodes of the lab: eight trials, one task killed, one near its time limit; a bad trial."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.jobs import SETTINGS, hand_over, header, job_processes, sbatch, slowed, two_processes
from harness.launchers import ROOT
from harness.processes import ASK_SLURM, command_lines, find_processes, wait_until
from lab import Lab, faults, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]
EPOCHS = 3


def copy_sweep(folder: Path) -> Path:
    """Copy sweep/ without what earlier sweeps may have left in it."""
    return Path(shutil.copytree(ROOT / "sweep", folder, ignore=shutil.ignore_patterns("output", "*.out")))


def show(folder: Path, example: str) -> dict[int, dict[str, str]]:
    """Return the rows of the table that `sweep.py show` writes, by the number of the trial."""
    words = [sys.executable, "sweep.py", "show", f"output/{example}"]
    shown = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    print(shown.stdout)
    return table(folder, example)


def table(folder: Path, example: str) -> dict[int, dict[str, str]]:
    """Return the rows of the table that `sweep.py show` has written, by the number of the trial."""
    with open(folder / "output" / example / "sweep.csv", newline="") as file:
        return {int(row["trial"]): row for row in csv.DictReader(file)}


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("weekly")
@pytest.mark.timeout(1200)
def test_eight_trials(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A killed task's trial goes on in another task, after its last epoch; none of the eight is lost or there twice."""
    folder = copy_sweep(tmp_path / "sweep")
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

    shown = readme.command("docs/sweeps.md", "... show ...", {"../examples/torchrun_multinode/.venv": sys.prefix})
    print(log, readme.run_block([enter, shown], tmp_path).stdout)
    rows = table(folder, example)
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


@pytest.mark.only("ddp_spawn", "deepspeed", "horovod_cpu", "lightning")
@pytest.mark.runs("weekly")
@pytest.mark.timeout(1200)
def test_bad_trial(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A trial that does not learn is pruned: no process of it is left, and its checkpoint can be continued.

    Its epochs are long, so that it cannot be over before it is asked to stop. The trials before and after it are
    complete, and the task ends well.
    """
    folder, rates, epochs = copy_sweep(tmp_path / "sweep"), [0.05, 1e-6, 0.05], 5
    ask = "trial = study.ask()"
    edits.edit(folder / "sweep.py", ask, f"study.enqueue_trial({{'lr': {rates}[len(study.trials)]}}); {ask}")
    copied = slowed(source, tmp_path / "examples" / example, "6 * os.environ['OUTPUT_DIR'].endswith('trial-001')")
    hand_over(tmp_path)
    options = ["--parsable", "--array=1", f"--nodes={header(source, 'nodes')}", *two_processes(source)]
    words = [example, "--vary", "lr=log:1e-6:0.1", "--trials", "3", "--startup", "1", "--warmup", "0"]
    sbatch = ["sbatch", *options, "sweep.slurm", *words, "--", "--epochs", str(epochs)]
    array = lab.run(sbatch, cwd=folder, env=SETTINGS, check=True).stdout.strip()
    log, output = folder / f"sweep-{array}_1.out", folder / "output" / example / "trial-001"

    def says(text: str) -> bool:
        return log.exists() and text in log.read_text()

    wait_until(lambda: says("trial 1: "), 500, "the end of the bad trial")
    wait_until(lambda: not find_processes(f"OUTPUT_DIR={output}"), 5, "the end of all its processes")
    assert lab.job(f"{array}_1")["JobState"] == "RUNNING", "SLURM would have ended them"
    shown = lab.wait_for_job(f"{array}_1", seconds=500)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("COMPLETED", "0:0", "0"), log.read_text()
    rows = show(folder, example)
    assert [rows[number]["state"] for number in range(3)] == ["complete", "pruned", "complete"], rows
    done = len(outputs.read_metrics(output))
    assert 1 <= int(rows[1]["epochs"]) == done < epochs, rows
    words = ["--output-dir", str(output), "--lr", str(rates[1]), "--epochs", str(epochs), "--resume"]
    run = runs.train(example, copied, 2, *words, OUTPUT_DIR="")
    assert f"continuing after epoch {done} of {epochs}" in run.stdout, run.stdout
    assert [row["epoch"] for row in outputs.read_metrics(output)] == list(range(1, epochs + 1))
