"""sweep/sweep.py with a program that trains nothing: pruning, tasks that are killed or stopped, and bad input."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from harness import readme, runs
from harness.launchers import ROOT
from harness.processes import end_processes, wait_until

SWEEP = ROOT / "sweep" / "sweep.py"
# In the place of an example's run.slurm: what they all do, with the real job.sh.
RUN = """
VENV="${VENV:-.venv}"
source ./job.sh
prepare json
run bash "$code/train.sh" "$@"
"""
# In the place of train.py: the loss is --lr in each of three epochs. With 9.0 it waits in epoch 2 to be stopped, with
# 8.0 it fails, and with --hold each epoch ends when that file is there. It stops as longrun.py does.
TRAIN = r"""
cd "$output"
while [[ $# -gt 0 ]]; do [[ $1 == --lr ]] && lr=$2; [[ $1 == --hold ]] && hold=$2; shift; done
[[ "$lr" != 8.0 ]] || exit 3
[[ -e metrics.csv ]] && epoch=$(($(wc -l <metrics.csv) - 1)) || epoch=0
echo "begins after epoch $epoch" >>starts
while ((epoch < 3)); do
    epoch=$((epoch + 1))
    cat metrics.csv >new 2>/dev/null || echo epoch,test_loss >new
    echo "$epoch,$lr" >>new
    mv new metrics.csv
    touch checkpoint.pt
    while [[ "$hold" && ! -e "$hold" && ! -e stop ]]; do sleep 0.1; done
    while [[ "$lr" == 9.0 && "$epoch" == 2 && ! -e stop ]]; do sleep 0.1; done
    [[ ! -e stop ]] || { mv stop stopped; exit 0; }
done
"""
SCONTROL = """
[ "$1" = requeue ] && echo "$@" >>"{folder}/requeued" && exit
echo "JobId=8 ArrayJobId=7 JobState=RUNNING EndTime=$(($(date +%s) + 600)) "
"""


def marker(folder: Path, task: int) -> str:
    """Return the variable by which the processes of a task are found."""
    return f"{runs.MARKER}={folder.name}-{os.getpid()}-{task}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts a task of an array; squeue says that tasks 1 and 3 are there, and 2 is not."""
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "run.slurm").write_text(RUN)
    (tmp_path / "example" / "train.sh").write_text(TRAIN)
    shutil.copy(ROOT / "longrun" / "job.sh", tmp_path / "example")
    (tmp_path / "bin").mkdir()
    programs = {"squeue": "echo 7_1; echo 7_3", "scontrol": SCONTROL.format(folder=tmp_path), "scancel": ""}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    started: list[subprocess.Popen] = []

    def begin(task: int, *words: str) -> subprocess.Popen:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        variables = {"PATH": path, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "8"}
        variables |= {"SLURMD_NODENAME": "node1", "SLURM_CPUS_PER_TASK": "1", "VENV": sys.prefix}
        variables |= dict([marker(tmp_path, task).split("=")])
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, str(SWEEP), "example", *words]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | variables, **options))
        return started[-1]

    yield begin
    for task in (1, 2, 3):
        end_processes(marker(tmp_path, task))
    for process in started:
        process.communicate(timeout=300)


def study(folder: Path) -> optuna.Study:
    """Return the study of the sweep, which is made if there is none."""
    (folder / "output" / "example").mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(folder / "output" / "example" / "journal.log")))
    return optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)


def test_trials(tmp_path: Path, start: Callable[..., subprocess.Popen]) -> None:
    """A bad trial is pruned, one that fails is a failed one, and the page's command shows them all."""
    for rate in (0.5, 0.4, 9.0, 8.0):
        study(tmp_path).enqueue_trial({"lr": rate})
    words = ["--vary", "lr=log:0.1:10.0", "--trials", "4", "--startup", "2", "--warmup", "1"]
    said, errors = start(1, *words).communicate(timeout=300)
    trials = study(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "PRUNED", "FAIL"], said + errors
    assert [trial.value for trial in trials[:2]] == [0.5, 0.4] and len(trials[0].intermediate_values) == 3
    assert trials[2].last_step <= 2 and not (tmp_path / "requeued").exists()
    changes = {".venv/bin/optuna": f"{Path(sys.executable).parent}/optuna", "torchrun_multinode": "example"}
    for command, shown in {"trials": "trial-003", "best-trial": "trial-001"}.items():
        line = readme.command("docs/sweeps.md", f".venv/bin/optuna --quiet {command} ...", changes)
        run = readme.run_block([line], tmp_path)
        assert shown in run.stdout, run.stdout


def test_no_trial_is_lost(tmp_path: Path, start: Callable[..., subprocess.Popen]) -> None:
    """A killed task's trial goes on in another task, a stopped task's in itself; those of the living are left alone."""
    folder = tmp_path / "output" / "example"
    words = ["--vary", "lr=0.5,0.6", "--trials", "2", "--", "--hold", str(tmp_path / "go")]
    living = start(3, *words)
    wait_until((folder / "trial-000" / "metrics.csv").exists, 300, "the trial of task 3")
    killed = start(2, *words)
    wait_until((folder / "trial-001" / "metrics.csv").exists, 300, "the trial of task 2")
    end_processes(marker(tmp_path, 2))  # with its run.slurm, as SLURM ends all of a task that is killed
    killed.communicate(timeout=300)

    def starts(number: int) -> list[str]:
        return (folder / f"trial-00{number}" / "starts").read_text().splitlines()

    stopped = start(1, *words)
    wait_until(lambda: starts(1) == ["begins after epoch 0", "begins after epoch 1"], 300, "trial 1 in task 1")
    stopped.send_signal(signal.SIGUSR1)
    said, errors = stopped.communicate(timeout=300)
    assert "trial-001: stopped by SLURM" in errors and (tmp_path / "requeued").read_text() == "requeue 7_1\n", said

    (tmp_path / "go").touch()
    for process in (start(1, *words), living):
        said, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and not errors, said + errors
    assert len(starts(0)) == 1 and len(starts(1)) == 3 and len(list(folder.glob("trial-*.log"))) == 2
    done = [trial for trial in study(tmp_path).trials if trial.state.name == "COMPLETE"]
    assert sorted(trial.user_attrs["output"] for trial in done) == ["trial-000", "trial-001"]
    assert all(len(trial.intermediate_values) == 3 for trial in done)


@pytest.mark.parametrize(
    ("words", "message"),
    {
        ("--vary", "lr"): "argument --vary",
        ("--vary", "lr=1:0"): "argument --vary",
        ("--vary", "lr=0.5,0.6", "--metric", "accuracy"): "--metric may be one of epoch, test_loss",
        ("--vary", "lr=0.5,0.7"): "has another sweep: name another --folder",
        ("--vary", "lr=0.5,0.6", "--maximize"): "has another sweep: name another --folder",
    }.items(),
    ids=["no values", "empty range", "no column", "other values", "other direction"],
)
def test_bad_input(
    tmp_path: Path, start: Callable[..., subprocess.Popen], words: tuple[str, ...], message: str
) -> None:
    """One line says what is wrong."""
    if "another" in message:
        start(1, "--vary", "lr=0.5,0.6", "--trials", "1").communicate(timeout=300)
    refused = start(1, *words, "--trials", "1")
    _, errors = refused.communicate(timeout=300)
    assert refused.returncode != 0 and message in errors.splitlines()[-1], errors
