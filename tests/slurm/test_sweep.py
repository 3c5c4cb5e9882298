"""sweep/sweep.slurm on two nodes of the lab: eight trials, one task killed, one near its time limit."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from harness import edits, outputs, readme
from harness.jobs import SETTINGS, hand_over, job_processes, sbatch
from harness.launchers import ROOT
from harness.processes import ASK_SLURM, command_lines, wait_until
from lab import Lab, faults, why_not
from tests.slurm.small import held

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]
EPOCHS = 3


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("full")
@pytest.mark.timeout(1200)
def test_eight_trials(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """A killed task's trial goes on in another task, after its last epoch; none of the eight is lost or there twice.

    A sweep that is cancelled stays so: none of its tasks comes back.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    ignored = shutil.ignore_patterns("output", "*.out", ".venv")
    folder = Path(shutil.copytree(ROOT / "sweep", tmp_path / "sweep", ignore=ignored))
    (folder / ".venv").symlink_to(sys.prefix)
    copied = held(source, tmp_path / "examples" / example, 1)  # so that both tasks wait in their first trials
    hand_over(tmp_path)
    enter = readme.command("docs/sweeps.md", "cd sweep")
    submit = readme.command("docs/sweeps.md", "sbatch ...")
    words = sbatch(f"{enter} && {submit}", ["--exclusive", "--cpus-per-task=2"])  # each task has a node of its own
    array = lab.run(words, cwd=tmp_path, env=SETTINGS, check=True).stdout.strip()
    logs = {task: folder / f"sweep-{array}_{task}.out" for task in (1, 2)}

    def output(task: int) -> Path:
        """The folder of the trial that a task has begun last."""
        name = re.findall(r"^(trial-\d+): --", logs[task].read_text(), re.MULTILINE)[-1]
        return folder / "output" / example / name

    for task in (1, 2):
        wait_until(lambda log=logs[task]: log.exists() and "trial-00" in log.read_text(), 300, f"task {task}")
    assert {lab.job(f"{array}_{task}")["NodeList"] for task in (1, 2)} == {"node1", "node2"}
    lost = output(2)
    wait_until((lost / "checkpoint.pt").exists, 300, "an epoch of the task that is to be killed")
    processes = job_processes(lab, lab.job(f"{array}_2")["JobId"])
    (killed,) = [process for process in processes if "sweep.py" in "".join(command_lines([process]))]
    os.kill(killed, signal.SIGKILL)
    assert lab.wait_for_job(f"{array}_2")["JobState"] == "FAILED"

    kept = output(1)  # the other task's: it is stopped near the time limit, and requeued
    wait_until((kept / "checkpoint.pt").exists, 300, "an epoch of the task that is to be stopped")
    faults.timelimit(lab, f"{array}_1")
    wait_until(lambda: lab.job(f"{array}_1")["Restarts"] == "1", 300, "the requeue", ASK_SLURM)
    edits.hold(copied, edits.GO_ON)
    state = lab.wait_for_job(f"{array}_1", seconds=900)["JobState"]
    assert state == "COMPLETED", "".join(log.read_text() for log in logs.values())

    storage = JournalStorage(JournalFileBackend(str(lost.parent / "journal.log")))
    study = optuna.load_study(study_name="sweep", storage=storage)
    ends = [trial for trial in study.trials if trial.state.name != "FAIL"]
    assert {trial.state.name for trial in ends} == {"COMPLETE", "PRUNED"}
    names = {trial.user_attrs["output"] for trial in ends}  # two numbers are those of the trials that went on
    assert len(ends) == len(names) == 8 and {lost.name, kept.name} < names
    assert len(study.trials) == 10, "each of the two that were interrupted has one trial more"
    for trial in ends:
        this = lost.parent / trial.user_attrs["output"]
        metrics, run = outputs.read_metrics(this), outputs.read_run(this)
        assert [one["epoch"] for one in metrics] == list(range(1, trial.last_step + 1))
        assert trial.state.name == "PRUNED" or len(metrics) == EPOCHS
        assert trial.value == metrics[-1]["test_loss"] and run["settings"]["lr"] == trial.params["lr"]
        assert len(run["starts"]) == (2 if this in (lost, kept) else 1), run["starts"]
    for this in (lost, kept):  # where its checkpoint was, not from the beginning
        first, second = outputs.read_run(this)["starts"]
        assert first["step"] == 0 and second["step"] > 0

    edits.hold(copied, 1)
    more = [word.replace("--trials 8", "--trials 10") for word in words]
    cancelled = lab.run(more, cwd=tmp_path, env=SETTINGS, check=True).stdout.strip()
    for task in (1, 2):
        log = folder / f"sweep-{cancelled}_{task}.out"
        wait_until(lambda log=log: log.exists() and "trial-" in log.read_text(), 300, f"task {task}", ASK_SLURM)
    lab.run(["scancel", cancelled], cwd="/", check=True)
    for task in (1, 2):
        shown = lab.wait_for_job(f"{cancelled}_{task}")
        assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0"), shown
