"""sweep/sweep.py with a program that trains nothing: who takes which trial, pruning, dead tasks, and bad input."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness import outputs, runs
from harness.launchers import ROOT
from harness.processes import command_lines, end_processes, find_processes, read_line, wait_until

SWEEP = ROOT / "sweep" / "sweep.py"
# In the place of an example: the loss is --lr, in each of three epochs. With --hold an epoch ends when that file is
# there. It answers the signal as run.slurm does, and fails with --lr 9.
RUN = r"""
trap 'scontrol requeue 1; exit 0' USR1
while [[ $# -gt 0 ]]; do [[ $1 == --lr ]] && lr=$2; [[ $1 == --hold ]] && hold=$2; shift; done
[[ "$lr" != 9 ]] || exit 3
metrics="$OUTPUT_DIR/metrics.csv"
mkdir -p "$OUTPUT_DIR"
[[ -e "$metrics" ]] || echo epoch,test_loss >"$metrics"
epoch=$(($(wc -l <"$metrics") - 1))
echo "begins after epoch $epoch" >>"$OUTPUT_DIR/starts"
while ((epoch < 3)); do
    epoch=$((epoch + 1))
    echo "$epoch,$lr" >>"$metrics"
    while [[ "$hold" && ! -e "$hold" ]]; do sleep 0.1; done
done
"""
# A process that gives itself a name.
# What sweep.slurm puts before the command scontrol.
FUNCTION = (ROOT / "sweep" / "sweep.slurm").read_text().split("\nscontrol()")[1].splitlines()[0]


def marker(folder: Path, task: int) -> str:
    """Return the variable by which the processes of a task are found."""
    return f"{runs.MARKER}={folder.name}-{os.getpid()}-{task}"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """A function that starts a task of an array, the first or another; squeue says that 1 and 3 live.

    A run.slurm that a task has started and left is an error, as it would be of any other run.
    """
    (tmp_path / "example").mkdir()
    (tmp_path / "example" / "run.slurm").write_text(RUN)
    (tmp_path / "bin").mkdir()
    for name, text in {"squeue": "echo 7_1 7_3", "scontrol": f'echo "$@" >>{tmp_path}/requeued'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def begin(task: int, *words: str) -> subprocess.Popen:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        variables = {"PATH": path, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        variables |= dict([marker(tmp_path, task).split("=")])
        script = f'scontrol(){FUNCTION}; export -f scontrol; exec "$@"'
        command = ["bash", "-c", script, "bash", sys.executable, str(SWEEP), *words]
        pipe = subprocess.PIPE
        options: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | variables, **options))
        return started[-1]

    started: list[subprocess.Popen] = []
    yield begin
    left = [line for task in (1, 2, 3) for line in command_lines(find_processes(marker(tmp_path, task)))]
    for task in (1, 2, 3):
        end_processes(marker(tmp_path, task))
    for process in started:
        process.communicate(timeout=300)
    assert not left, f"left running: {left}"


def table(folder: Path) -> dict[int, dict[str, str]]:
    """Return what `show` writes, by the number of the trial."""
    words = [sys.executable, str(SWEEP), "show", "output/example"]
    shown = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert (folder / "output/example/sweep.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "output/example/sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row["state"] in shown.stdout for row in rows)
    return {int(row["trial"]): row for row in rows}


def test_no_trial_is_lost(tmp_path: Path, start: Callable[..., subprocess.Popen]) -> None:
    """A killed task's trial is taken up by another, a stopped task's by itself; bad ones are pruned, none is two."""
    words = ["run", "example", "--vary", "lr=log:0.001:1", "--trials", "7", "--startup", "2", "--warmup", "1"]
    words += ["--", "--hold", str(tmp_path / "go")]
    killed, log = start(2, *words), tmp_path / "output/example/trial-000/metrics.csv"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) == 2, 300, "the first epoch")
    end_processes(marker(tmp_path, 2))  # with its run.slurm, as SLURM ends all of a task that is killed
    killed.communicate(timeout=300)
    shutil.move(tmp_path / "output/example/trial-000.log", tmp_path / "first.log")

    stopped = start(1, *words)
    wait_until((tmp_path / "output/example/trial-000.log").exists, 300, "the second start")
    wait_until(lambda: "begins after epoch 1" in (log.parent / "starts").read_text(), 300, "its beginning")
    stopped.send_signal(signal.SIGUSR1)
    said, errors = stopped.communicate(timeout=300)
    assert stopped.returncode == 0 and "trial 0 has saved: the task is requeued" in said, errors
    assert (tmp_path / "requeued").read_text() == "requeue 7_1\n"
    assert table(tmp_path)[0]["state"] == "running"

    (tmp_path / "go").touch()
    said, errors = start(1, *words).communicate(timeout=300)
    assert "no trial is left" in said and not errors, said + errors
    rows = table(tmp_path)
    assert sorted(rows) == list(range(7)) and {row["state"] for row in rows.values()} <= {"complete", "pruned"}
    assert rows[0]["starts"] == "3" and all(rows[number]["starts"] == "1" for number in range(1, 7))
    best = min(rows.values(), key=lambda row: float(row["test_loss"]))
    assert best["state"] == "complete" and float(best["test_loss"]) == pytest.approx(float(best["lr"]), rel=1e-3)


def test_trials_of_the_living(tmp_path: Path, start: Callable[..., subprocess.Popen]) -> None:
    """A trial whose task lives is left alone; a run that fails is a failed trial, and the sweep goes on."""
    words = ["run", "example", "--vary", "lr=9,0.5", "--trials", "2", "--", "--hold", str(tmp_path / "go")]
    first, output = start(1, *words), tmp_path / "output" / "example"
    wait_until((output / "trial-000.log").exists, 300, "the first trial")
    other = start(3, *words)
    wait_until((output / "trial-001.log").exists, 300, "the second trial")
    (tmp_path / "go").touch()
    said, errors = other.communicate(timeout=300)
    first_said, first_errors = first.communicate(timeout=300)
    assert "no trial is left" in said and not errors + first_errors, said + errors + first_errors
    rows = table(tmp_path)
    assert sorted(rows) == [0, 1] and all(row["starts"] == "1" for row in rows.values())
    for row in rows.values():
        assert row["state"] == ("fail" if row["lr"] == "9" else "complete"), rows


BAD = {
    "no such example": (["run", "nope", "--vary", "lr=1:2"], "nope has no run.slurm: name such a folder, or one of"),
    "no range": (["run", "example", "--vary", "lr=2:1"], "'lr=2:1': such as lr=log:1e-4:1e-1"),
    "log of 0": (["run", "example", "--vary", "lr=log:0:1"], "such as lr=log"),
    "one value": (["run", "example", "--vary", "lr=3"], "such as lr=log"),
    "no trials": (["run", "example", "--vary", "lr=1:2", "--trials", "0"], "must be 1 or more"),
    "no column": (["run", "example", "--vary", "lr=1:2", "--metric", "loss"], "no column loss: --metric may be one of"),
    "no value": (["run", "example", "--vary", "lr=1,2,"], "'lr=1,2,': such as lr=log"),
    "the least": (["run", "example", "--vary", "lr=1:2", "--metric", "test_accuracy"], "largest: add --maximize"),
    "the most": (["run", "example", "--vary", "lr=1:2", "--maximize"], "test_loss is best where it is smallest: leave"),
    "no sweep": (["show", "nope"], "there is no sweep in nope"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(start: Callable[..., subprocess.Popen], what: str) -> None:
    """What cannot be right ends with one line that says so."""
    words, says = BAD[what]
    run = start(1, *words)
    _, errors = run.communicate(timeout=300)
    assert run.returncode != 0 and says in errors.splitlines()[-1] and "Traceback" not in errors, errors


def test_other_settings(tmp_path: Path, start: Callable[..., subprocess.Popen]) -> None:
    """A sweep goes on with the settings that it has, and without SLURM there is no task."""
    for values, status in (("lr=1:2", 0), ("lr=1:3", 1)):
        run = start(1, "run", "example", "--vary", values, "--trials", "1")
        _, errors = run.communicate(timeout=300)
        assert run.returncode == status, errors
    assert errors.splitlines() == [
        f"sweep.py: error: the sweep in {tmp_path}/output/example has other settings (space): name another --folder"
    ]
    words = [sys.executable, str(SWEEP), "run", "example", "--vary", "lr=1:2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    refused = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "needs an allocation: sbatch sweep.slurm" in refused.stderr


# Programs in the place of a trial's run.slurm, which has a child, as srun is one; whether the child is then killed, and
# whether the group of processes is.
STUBBORN = {
    "it ends when it is asked": ("trap 'kill $!; exit 0' USR1; sleep 600 & echo; wait", False, False),
    "its child ends at SIGTERM": ("trap '' USR1; sleep 600 & echo; wait", True, False),
    "its child ignores SIGTERM": ("trap '' USR1 TERM; sleep 600 & echo; wait", True, False),
    "it goes on without its child": ("trap '' USR1; echo; sleep 600; while :; do sleep 0.1; done", True, True),
    "it has no child": ("trap '' USR1; echo; exec sleep 600", False, True),
}


@pytest.mark.parametrize("case", STUBBORN)
def test_stopped(sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """A run ends, whatever it ignores; its group is killed only while the run itself is one of it, and only once.

    The number of a run that has ended may be that of another process of the same user, whose group would be killed.
    """
    script, child, group = STUBBORN[case]
    for name, value in {"ENDS": 0.3, "INSISTS": 0.5}.items():
        monkeypatch.setattr(sweep, name, value)
    killed: list[int] = []
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True, text=True) as run:
        sweep_os = Namespace(kill=os.kill, killpg=lambda number, _: killed.append(number) or run.kill())
        monkeypatch.setattr(sweep, "os", sweep_os)
        try:
            read_line(run, 300)
            if child:
                wait_until(lambda: sweep.children(run.pid), 300, "its child")
            children = sweep.children(run.pid)
            sweep.Task.stop(Namespace(asked=False), run, tmp_path / "mark")
            assert run.returncode is not None and killed == [run.pid] * group
            assert not child or not [number for number in children if Path(f"/proc/{number}").exists()]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)


# The signal in the first of two trials, and whether that ends then; what scontrol answers; what is said.
ENDINGS: dict[str, tuple[int, bool, str, str]] = {
    "a trial ends after the notice": (signal.SIGUSR1, True, "exit 0", "trials are left: the task is requeued"),
    "SLURM refuses": (signal.SIGUSR1, True, "echo no >&2; exit 1", "SLURM refuses to requeue the task (no)"),
    "no trial ends": (signal.SIGUSR1, False, "exit 0", "raise --time"),
    "scancel": (signal.SIGTERM, True, "exit 0", ""),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_ends_with_the_task(
    sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    """At the time limit a task is started again if trials are left, unless it would go on so for ever."""
    number, ends, answer, says = ENDINGS[case]

    def train(task: Any, _: Namespace, study: Any, trial: Any) -> bool:
        signal.raise_signal(number)
        return sweep.done(study, trial, sweep.TrialState.COMPLETE, 1.0) if ends else False

    monkeypatch.setattr(sweep.Task, "train", train)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    args = Namespace(**SETTINGS, example="x", folder=tmp_path / "sweep", trials=2, startup=1, warmup=0)
    before = {one: signal.getsignal(one) for one in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    try:
        sweep.work(args)
    except sweep.SweepError as error:
        print(error)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    said = capsys.readouterr().out
    assert says in said and ("requeue" in said) == ("requeue" in says), said


SETTINGS = {"space": {"lr": ["log", 1e-4, 1e-1]}, "metric": "test_loss", "maximize": False, "arguments": []}


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    """The module of sweep.py."""
    return outputs.import_file(SWEEP)


# In the place of an example that saves after an epoch: near the time limit it waits for that, and goes on.
SLOW = r"""
trap 'until [[ -e save ]] || ! kill -0 "$!"; do sleep 0.1; done 2>/dev/null; [[ ! -e save ]] || touch mark' USR1
sleep 600 &
touch ready
wait "$!"
wait "$!"
"""


@pytest.mark.parametrize("asked", [True, False], ids=["the time limit", "a bad trial"])
def test_saves_late(sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Near the time limit a save is waited for, however late it comes; nothing is waited for to end a bad trial."""
    clock = SimpleNamespace(monotonic=count(0, 1000).__next__, sleep=time.sleep)  # each look at it is much later
    if asked:
        monkeypatch.setattr(sweep, "time", clock)
    monkeypatch.setattr(sweep, "ENDS", 1)
    mark, save = tmp_path / "mark", threading.Timer(3, (tmp_path / "save").touch)
    began = time.monotonic()
    with subprocess.Popen(["bash", "-c", SLOW], cwd=tmp_path, start_new_session=True) as run:
        wait_until((tmp_path / "ready").exists, 300, "the beginning")
        if asked:
            save.start()
        sweep.Task.stop(SimpleNamespace(asked=asked), run, mark)
    assert mark.exists() == asked and time.monotonic() - began < 300


@pytest.fixture
def journal(sweep: ModuleType, tmp_path: Path) -> Path:
    """The journal of three trials, each with one setting and its result: lines 3 to 5, 6 to 8, and 9 to 11."""
    study, _ = sweep.open_study(tmp_path, SETTINGS)
    for number in range(3):
        trial = study.ask()
        trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        study.tell(trial.number, 1 / (number + 1))
    assert len((tmp_path / "journal.log").read_bytes().splitlines()) == 11
    return tmp_path / "journal.log"


def swap(number: int, text: bytes | None) -> Callable[[list[bytes]], list[bytes]]:
    """Return a function that puts another text in the place of a line, counted from 1; with None its first 40 bytes."""

    def swapped(lines: list[bytes]) -> list[bytes]:
        other = lines[number - 1][:40] + b"\n" if text is None else text
        return [*lines[: number - 1], other, *lines[number:]]

    return swapped


# What becomes of the journal's lines; how many trials are known then, which of them have a result; and whether the
# journal as it was is kept beside it, which a mere half line at the end is not worth.
BOTH, ALL = {0: 1.0, 1: 0.5}, {0: 1.0, 1: 0.5, 2: 1 / 3}
DAMAGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int, dict[int, float], bool]] = {
    "the last line was cut": (lambda lines: [*lines[:-1], lines[-1][:-25]], 3, BOTH, False),
    "in its first byte": (lambda lines: [*lines[:-1], lines[-1][:1]], 3, BOTH, False),
    "only its end is missing": (lambda lines: [*lines[:-1], lines[-1][:-1]], 3, ALL, False),
    "the beginning of a trial was cut": (lambda lines: [*lines[:8], lines[8][:50]], 2, BOTH, False),
    "not UTF-8": (swap(11, b"\xff\xfe{\n"), 3, BOTH, True),
    "cut in the middle": (swap(8, None), 3, {0: 1.0, 2: 1 / 3}, True),
    "zeros in the middle": (swap(8, bytes(100) + b"\n"), 3, {0: 1.0, 2: 1 / 3}, True),
    "an empty line": (swap(8, b"\n"), 3, {0: 1.0, 2: 1 / 3}, True),
    "a number": (swap(8, b"7\n"), 3, {0: 1.0, 2: 1 / 3}, True),
    "an operation that there is not": (swap(8, b'{"op_code":99}\n'), 3, {0: 1.0, 2: 1 / 3}, True),
    "appended to a half line": (lambda ls: [*ls[:7], ls[7][:-25] + ls[8], *ls[9:]], 3, {0: 1.0, 2: 1 / 3}, True),
    "the beginning of a trial": (swap(6, None), 3, ALL, True),
    "its setting, in the middle": (swap(7, None), 3, ALL, True),
    "what is searched": (swap(2, None), 3, ALL, True),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_journal(sweep: ModuleType, journal: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """All whole lines count, each result stays with its trial, one line says what was left out, and the sweep goes on.

    A trial whose beginning was lost is one that has not begun: else all later ones would have the results of others.
    """
    change, count, values, kept = DAMAGED[case]
    before = change(journal.read_bytes().splitlines(keepends=True))
    journal.write_bytes(b"".join(before))
    study, _ = sweep.open_study(journal.parent, SETTINGS)
    trials = study.get_trials()
    assert len(trials) == count and {one.number: one.value for one in trials if one.value is not None} == values
    said = capsys.readouterr().out.splitlines()
    left_out = [line for line in said if "left out 1 damaged line" in line]
    assert len(left_out) == (case != "only its end is missing"), said
    copies = [path.read_bytes() for path in journal.parent.glob("journal.log.damaged*")]
    assert copies == [b"".join(before)] * kept

    trial = study.ask()  # the next one, and what another task and `show` read then
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    study.tell(trial.number, 0.25)
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())
    sweep.show(journal.parent)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:3] == [str(count), "complete", "0.25"] and not [
        line for line in shown if "left out" in line
    ]
