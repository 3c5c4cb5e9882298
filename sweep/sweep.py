"""Search settings of an example: tasks of a job array share Optuna's journal file, and each trains one trial at a time.

`run` is what sweep.slurm starts in each task, `show FOLDER` prints a table and draws a picture, also meanwhile.
See ../docs/sweeps.md. A trial is the example's own run.slurm in this task's allocation, with an output folder of its
own. Who has a trial stands in the journal: a trial whose task is no longer in SLURM's queue is taken up by another
task, where its checkpoint is.
"""

import argparse
import contextlib
import csv
import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

NAME = "sweep"  # of the study in the journal
CREATE = 4  # what a line of the journal says that begins a trial
EVERY = 1.0  # seconds between two looks at metrics.csv
ENDS, INSISTS = 10, 30  # seconds that it then gets to end by itself, and after SIGTERM and SIGKILL to its children
SETTLES = 3  # seconds after a failure in which SLURM may say that it has ended the whole task
# Parts of a metric's name that say whether it is best where it is largest.
LARGEST = {"acc": True, "auc": True, "f1": True, "iou": True, "loss": False, "perplexity": False, "error": False}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class SweepError(Exception):
    """Something has to be corrected; the message is one line that says what."""


# ---- What is searched ----


def vary(text: str) -> tuple[str, list[Any]]:
    """Return the name of a flag and what it may be: ["log", low, high], ["range", low, high] or ["of", value, ...]."""
    name, _, values = text.partition("=")
    words = values.split(":")
    with contextlib.suppress(ValueError):
        kind, bounds = ("log", words[1:]) if words[0] == "log" else ("range", words)
        if len(bounds) == 2:
            number = int if all(word.lstrip("-").isdigit() for word in bounds) else float
            low, high = map(number, bounds)
            if name and -math.inf < low < high < math.inf and (kind != "log" or low > 0):
                return name, [kind, low, high]
        several = values.split(",")
        if name and kind == "range" and len(bounds) == 1 and len(set(several)) > 1 and all(several):
            return name, ["of", *several]
    raise argparse.ArgumentTypeError(f"{text!r}: such as lr=log:1e-4:1e-1, warmup-steps=0:50, batch-size=16,32,64")


def suggest(trial: Trial, space: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the trial's settings; those that it has already stay as they are."""
    found = {}
    for name, (kind, *values) in space.items():
        if kind == "of":
            found[name] = trial.suggest_categorical(name, values)
        elif isinstance(values[0], int):
            found[name] = trial.suggest_int(name, *values, log=kind == "log")
        else:
            found[name] = trial.suggest_float(name, *values, log=kind == "log")
    return found


# ---- Who has which trial ----


def own_task() -> str:
    """Return the id of this task as squeue shows it, which a requeue keeps."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")


def own_queue() -> str:
    """Return whose tasks living() knows: those of this user on this cluster; others may share the folder."""
    return f"{os.getuid()} {os.environ.get('SLURM_CLUSTER_NAME', '')}"


def living() -> set[str] | None:
    """Return the ids of all tasks of this user that run or wait, or None if SLURM does not answer."""
    words = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"]
    # What a user has set for squeue, such as SQUEUE_STATES=PENDING, would hide tasks that live.
    hiding = ("SQUEUE_", "SLURM_CLUSTERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hiding)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"sweep.py: squeue says nothing ({error}): trials of other tasks are left to them")
        return None
    return set(done.stdout.split())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock under which trials are given out; it is Optuna's, which works on NFS, and outlives no dead task."""
    lock = JournalFileOpenLock(str(folder / "trials"))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


class Lock(JournalFileSymlinkLock):
    """Optuna's own lock of a journal; whoever gets it first ends the half line that a killed task may have left."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self.journal = journal

    def acquire(self) -> bool:
        """Wait for the lock."""
        got = super().acquire()
        data = self.journal.read_bytes() if ends_in_half_line(self.journal) else b""
        if data:
            whole, _, half = data.rpartition(b"\n")
            if operation(half) or not b'{"op_code":'.startswith(half[:11]):  # only its end is missing; or it is none
                with open(self.journal, "ab") as file:
                    file.write(b"\n")
            else:
                os.truncate(self.journal, len(whole) + bool(whole))
                say_left_out(self.journal, [half])
        return got


def ends_in_half_line(journal: Path) -> bool:
    """Return whether a journal's last line was cut off, by a full disk, a quota or the loss of power."""
    with open(journal, "rb") as file:
        return bool(file.seek(0, os.SEEK_END)) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"


def operation(line: bytes) -> dict[str, Any] | None:
    """Return what a line of a journal says, or None if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(found, dict) and found.get("op_code") in range(11) and isinstance(found.get("trial_id", 0), int)
    return found if known else None


def lines_of(data: bytes) -> list[bytes]:
    """Return the lines of a journal; the last of them may have no end."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


def say_left_out(journal: Path, lines: list[bytes]) -> None:
    """Print that lines of a journal are left out."""
    beginning = lines[0][:40].decode(errors="replace")
    print(f"sweep.py: {journal}: left out {len(lines)} damaged line{'s' * (len(lines) > 1)} ({beginning!r}...)")


def mend(journal: Path) -> None:
    """Leave damaged lines out of a journal, which is kept beside it; raise SweepError if trials could be mixed up.

    The number of a trial is its place among the lines that begin one (CREATE). One of these that is damaged becomes the
    beginning of a trial that nobody has trained yet.
    """
    data = journal.read_bytes()
    if all(map(operation, lines_of(data))):
        return
    what = "the beginning of a trial, or of all, was in a damaged line"
    lost = f"{journal} cannot be read ({what}): restore a copy, or name another --folder"
    lines, left_out, trials = [], [], 0
    for line in lines_of(data):
        parts = [line]
        if not operation(line) and (at := line.rfind(b'{"op_code":')) > 0:  # a line was appended to a half one
            parts = [line[:at], line[at:]]
        for part in parts:
            found: dict[str, Any] | None = operation(part)
            if not found:
                left_out.append(part)
                if not re.match(rb'\{"op_code":%d,' % CREATE, part):
                    continue
                now = datetime.datetime.now(datetime.UTC).isoformat()
                found = {"op_code": CREATE, "worker_id": "", "study_id": 0, "datetime_start": now}
            trials += found["op_code"] == CREATE
            lines.append(json.dumps(found, separators=(",", ":")).encode())
            if found.get("trial_id", -1) >= trials or json.loads(lines[0])["op_code"] != 0:
                raise SweepError(lost)
    if not lines:
        raise SweepError(lost)
    names = (journal.with_name(f"{journal.name}.damaged{number}") for number in range(1, 10**6))
    kept = next(name for name in names if not name.exists())
    kept.write_bytes(data)
    part = journal.with_name(f"{journal.name}.part")
    part.write_bytes(b"".join(line + b"\n" for line in lines))
    os.replace(part, journal)
    say_left_out(journal, left_out)
    print(f"sweep.py: the journal as it was: {kept}")


def open_study(folder: Path, settings: dict[str, Any] | None = None, startup: int = 0, warmup: int = 0) -> tuple:
    """Return the study of a folder and its storage; with settings make it, if there is none, and refuse others."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if settings:
        folder.mkdir(parents=True, exist_ok=True)
    elif not (folder / "journal.log").exists():
        raise SweepError(f"there is no sweep in {folder}: it has no journal.log")
    journal = folder / "journal.log"
    lock = Lock(journal)
    backend = JournalFileBackend(str(journal), lock)  # makes the file
    try:
        if ends_in_half_line(journal) or not all(map(operation, lines_of(journal.read_bytes()))):
            lock.acquire()
            try:
                mend(journal)
            finally:
                lock.release()
        storage = JournalStorage(backend)
        if not settings:
            return optuna.load_study(study_name=NAME, storage=storage), storage
    except SweepError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        raise SweepError(f"cannot read {journal} ({error!r}): restore a copy of it, or name another --folder") from None
    with locked(folder):
        study = optuna.create_study(
            study_name=NAME,
            storage=storage,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(constant_liar=True),  # tells tasks that run at a time apart
            pruner=optuna.pruners.MedianPruner(startup, warmup),
            direction="maximize" if settings["maximize"] else "minimize",
        )
        if study.user_attrs.setdefault("settings", settings) != settings:
            had = study.user_attrs["settings"]
            differ = ", ".join(name for name in settings if settings[name] != had.get(name))
            raise SweepError(f"the sweep in {folder} has other settings ({differ}): name another --folder")
        study.set_user_attr("settings", settings)
    return study, storage


def trial_of(study: optuna.Study, storage: Any, number: int) -> Trial:
    """Return the trial of a number, to report to."""
    return Trial(study, storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(NAME), number))


def next_trial(study: optuna.Study, storage: Any, folder: Path, trials: int) -> Trial | None:
    """Return this task's trial: its own that was interrupted, else one of a dead task, else a new one, else None."""
    task = own_task()
    before = {one.number: one.user_attrs.get("task") for one in study.get_trials(states=[TrialState.RUNNING])}
    alive = living() if set(before.values()) - {task} else set()
    with locked(folder):
        running = study.get_trials(states=[TrialState.RUNNING])
        running = [one for one in running if one.user_attrs.get("queue", own_queue()) == own_queue()]

        def free(one: FrozenTrial) -> bool:
            """Whether nobody works on a trial.

            1. It has no owner: its task died before it could write that it is. It is free.
            2. SLURM did not say who lives (`alive` is None): it is not free.
            3. Its owner lives: it is not free.
            4. Its owner is not among the living: it is free, unless another has come to own it since SLURM was asked.
            """
            owner = one.user_attrs.get("task")
            if not owner:
                return True
            return alive is not None and owner not in alive and before.get(one.number) == owner

        ours = [one for one in running if one.user_attrs.get("task") == task] + [one for one in running if free(one)]
        if ours:
            trial = trial_of(study, storage, ours[0].number)
        elif len(study.get_trials(deepcopy=False)) < trials:
            trial = study.ask()
        else:
            return None
        trial.set_user_attr("starts", trial.user_attrs.get("starts", 0) + 1)
        trial.set_user_attr("queue", own_queue())
        trial.set_user_attr("task", task)
        return trial


# ---- One trial ----


def rows_of(output: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv, which is there after the first epoch."""
    try:
        with open(output / "metrics.csv", newline="") as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, TypeError, ValueError):  # there is none yet; or it is damaged, and the trial has failed
        return []


class Task:
    """What this task was asked by signals, and its trial's run."""

    def __init__(self) -> None:
        self.asked = False  # to end: USR1 near the time limit, TERM at a preemption or scancel
        self.noticed = self.requeued = False  # it got USR1; SLURM starts it again
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: object) -> None:
        self.asked = True
        self.noticed = self.noticed or number == signal.SIGUSR1

    def requeue(self, why: str) -> None:
        """Have SLURM start this task again; its trial, if it has one, stays its own."""
        for pause in (5, 5, 0):  # SLURM may be without its controller for a moment
            asked = subprocess.run(["scontrol", "requeue", own_task()], capture_output=True, text=True)
            if not re.search("nable to contact|timed out|refused|not responding", asked.stderr):
                break
            time.sleep(pause)
        if asked.returncode:
            refusal = f"SLURM refuses to requeue the task ({asked.stderr.strip()})"
            raise SweepError(f"{why}: {refusal}: submit the same sweep again, to go on")
        self.requeued = True
        print(f"{why}: the task is requeued, and goes on with the sweep")

    def stop(self, run: subprocess.Popen, mark: Path) -> None:
        """Stop a run as SLURM does near the time limit: it saves, and ends or says that it may be ended.

        If SLURM has asked, that is 20 s before this task's end at the latest. A bad trial need not save once more.
        """
        if run.poll() is None:
            run.send_signal(signal.SIGUSR1)
        while self.asked and run.poll() is None and not mark.exists():
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # What stops at a step ends by itself; other examples go on here, to the end of an epoch.
            run.wait(2 if mark.exists() else ENDS)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if run.poll() is None:
                for child in children(run.pid):  # srun, which ends its step; run.slurm then ends as well
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(INSISTS)
        if run.poll() is None:  # else its number may by now be that of another process of this user
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()

    def train(self, args: argparse.Namespace, study: optuna.Study, trial: Trial) -> bool:
        """Train a trial until it ends or is pruned, and tell the study; return False if this task has to end."""
        name = f"trial-{trial.number:03}"
        output, mark, log = args.folder / name, args.folder / f"{name}.saved", args.folder / f"{name}.log"
        mark.unlink(missing_ok=True)
        if output.exists() and not trial.params.keys() >= args.space.keys():
            print(f"trial {trial.number}: the journal has lost its settings")
            return done(study, trial, TrialState.FAIL)
        settings, starts = suggest(trial, args.space), trial.user_attrs["starts"]
        flags = [word for flag, value in settings.items() for word in (f"--{flag}", str(value))]
        print(f"trial {trial.number}, start {starts}: {' '.join(flags)}; log: {log}")
        variables = {
            "OUTPUT_DIR": str(output),
            "KEPT_CODE": str(output / "code"),  # a trial goes on with the program that it began with
            "SLURM_RESTART_COUNT": str(starts - 1),  # of the trial, by which run.slurm sees that it makes no progress
            "SUCCESSORS": "0",  # it submits no job: see `Task.requeue`
            "SWEEP_MARK": str(mark),
        }
        with open(log, "a") as file:
            words = ["bash", "run.slurm", *args.arguments, *flags]
            run = subprocess.Popen(
                words, cwd=args.example, env=os.environ | variables, stdout=file, stderr=file, start_new_session=True
            )
        seen, bad = 0, False
        try:
            while run.poll() is None and not self.asked and not bad:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(EVERY)
                seen, bad = follow(args, trial, rows_of(output), seen)
            if self.asked or bad:
                self.stop(run, mark)
        except SweepError:
            self.stop(run, mark)
            study.tell(trial.number, state=TrialState.FAIL)
            raise
        rows, saved = rows_of(output), mark.exists()
        mark.unlink(missing_ok=True)
        follow(args, trial, rows, seen)
        if bad or (run.returncode == 0 and not saved and rows and math.isnan(rows[-1][args.metric])):
            return done(study, trial, TrialState.PRUNED)
        if saved:  # it has asked to be requeued
            self.requeue(f"trial {trial.number} has saved")
            return False
        if run.returncode == 0 and rows:
            return done(study, trial, TrialState.COMPLETE, rows[-1][args.metric])
        deadline = time.monotonic() + SETTLES
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.asked:
            print(f"trial {trial.number} was stopped without having saved: it waits for a task that takes it up")
            return False
        return done(study, trial, TrialState.FAIL)


def children(process: int) -> list[int]:
    """Return the children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # As bytes: before the bracket stands a name, which the kernel cuts after 15 of them, also inside a letter.
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == process:
                found.append(int(stat.parent.name))
    return found


def follow(args: argparse.Namespace, trial: Trial, rows: list[dict[str, float]], seen: int) -> tuple[int, bool]:
    """Report the epochs from number `seen` on; return how many there are, and whether the trial is a bad one."""
    known = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values  # by a task that has died since
    bad = False
    for row in rows[seen:]:
        if args.metric not in row:
            raise SweepError(f"metrics.csv has no column {args.metric}: --metric may be one of {', '.join(row)}")
        if int(row["epoch"]) not in known:
            trial.report(row[args.metric], int(row["epoch"]))
        bad = bad or math.isnan(row[args.metric]) or trial.should_prune()
    return len(rows), bad


def done(study: optuna.Study, trial: Trial, state: TrialState, value: float | None = None) -> bool:
    """Write down how a trial has ended."""
    study.tell(trial.number, value, state)
    print(f"trial {trial.number}: {state.name.lower()}{'' if value is None else f', {value:.6g}'}")
    return True


def work(args: argparse.Namespace) -> None:
    """Train trials until none is left, or this task has to end."""
    settings = {name: getattr(args, name) for name in ("space", "metric", "maximize", "arguments")}
    settings |= {"example": str(args.example)}
    task = Task()
    study, storage = open_study(args.folder, settings, args.startup, args.warmup)
    ended = 0  # trials, since this task was started last
    while not task.asked:
        trial = next_trial(study, storage, args.folder, args.trials)
        if trial is None:
            print(f"no trial is left to begin: see `python sweep.py show {args.folder}`")
            return
        if not task.train(args, study, trial):
            break
        ended += 1
    states = [one.state for one in study.get_trials(deepcopy=False)]
    if task.noticed and not task.requeued and (len(states) < args.trials or TrialState.RUNNING in states):
        if not ended:  # it would go on for ever
            raise SweepError("nothing was saved and no trial ended before the time limit: raise --time")
        task.requeue("the time limit is near, and trials are left")


# ---- The result ----


def last_value(trial: FrozenTrial) -> float:
    """Return a trial's metric after its last epoch; nan if it has none."""
    return trial.intermediate_values.get(trial.last_step, math.nan) if trial.value is None else trial.value


def show(folder: Path) -> None:
    """Print a table of all trials, the best first, and write it as sweep.csv and as a picture, sweep.png."""
    study, _ = open_study(folder)
    if not (settings := study.user_attrs.get("settings")):
        raise SweepError(
            f"the journal of {folder} does not say what is searched: a task that goes on writes that again"
        )
    names, metric, sign = list(settings["space"]), settings["metric"], -1 if settings["maximize"] else 1
    order = {TrialState.COMPLETE: 0, TrialState.RUNNING: 1, TrialState.PRUNED: 2}

    def key(trial: FrozenTrial) -> tuple[float, float]:
        value = last_value(trial)
        return order.get(trial.state, 3), math.inf if math.isnan(value) else sign * value

    trials = sorted(study.trials, key=key)
    head = ["trial", "state", metric, "epochs", "starts", *names]
    rows = [
        [t.number, t.state.name.lower(), f"{last_value(t):.6g}", t.last_step or 0, t.user_attrs.get("starts", 0)]
        + [f"{v:.4g}" if isinstance(v, float) else v for v in (t.params.get(name, "") for name in names)]
        for t in trials
    ]
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    try:
        with open(folder / "sweep.csv", "w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
        draw(trials, names, metric, folder / "sweep.png")
    except OSError as error:  # it may be somebody else's folder
        raise SweepError(f"no table and no picture can be written to {folder} ({error.strerror})") from None
    print(f"the same in {folder / 'sweep.csv'}, a picture in {folder / 'sweep.png'}")


def draw(trials: list[FrozenTrial], names: list[str], metric: str, path: Path) -> None:
    """Draw the metric by epoch, and at its end by each of the settings."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"COMPLETE": "C0", "PRUNED": "0.7", "RUNNING": "C2", "FAIL": "C3"}
    size = (4 * (len(names) + 1), 3.6)
    figure, panels = plt.subplots(1, len(names) + 1, figsize=size, squeeze=False, layout="constrained")
    first, *others = panels[0]
    for trial in reversed(trials):  # the best on top
        state, value = trial.state.name, last_value(trial)
        colour = colours.get(state, "0.5")
        label = "" if state.lower() in first.get_legend_handles_labels()[1] else state.lower()
        points = sorted(trial.intermediate_values.items())
        first.plot([epoch for epoch, _ in points], [loss for _, loss in points], color=colour, marker=".")
        first.plot([], [], color=colour, marker="o", label=label)
        for axes, name in zip(others, names, strict=True):
            if name in trial.params and not math.isnan(value):
                axes.plot(trial.params[name], value, "o", color=colour)
    first.set(xlabel="epoch", ylabel=metric)
    first.legend(frameon=False)
    for axes, name in zip(others, names, strict=True):
        axes.set(xlabel=name, ylabel=metric)
        kinds = [trial.distributions[name] for trial in trials if name in trial.distributions]
        if kinds and getattr(kinds[0], "log", False):
            axes.set_xscale("log")
    figure.savefig(path, dpi=120)


# ---- The command line ----


def parse_args() -> argparse.Namespace:
    """Return the arguments; what cannot be right ends the program with one line."""
    parser = argparse.ArgumentParser("sweep.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="print a table of the trials, and draw a picture")
    shown.add_argument("folder", type=Path, help="the sweep's --folder")
    run = commands.add_parser("run", help="train trials, in a task of sweep.slurm")
    run.add_argument("example", help="an example's name, or a folder with a run.slurm")
    run.add_argument("--vary", type=vary, action="append", required=True, metavar="FLAG=VALUES")
    run.add_argument("--trials", type=int, default=20, help="of all tasks together (default: 20)")
    run.add_argument("--metric", default="test_loss", help="a column of metrics.csv (default: test_loss)")
    run.add_argument("--maximize", action="store_true", help="the largest is best, as with test_accuracy")
    run.add_argument("--startup", type=int, default=4, help="trials that are complete before one is pruned (4)")
    run.add_argument("--warmup", type=int, default=2, help="no trial is pruned in its first epochs (2)")
    run.add_argument("--folder", type=Path, help="of the whole sweep (default: output/EXAMPLE)")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    if args.command == "show":
        return args
    args.arguments = words[at + 1 :]  # what all trials have in common, for the example's run.slurm
    example = EXAMPLES / args.example if (EXAMPLES / args.example).is_dir() else Path(args.example)
    args.example, args.space = example.resolve(), dict(args.vary)
    args.folder = (args.folder or Path("output", args.example.name)).resolve()
    if not (args.example / "run.slurm").exists():
        names = ", ".join(sorted(path.parent.name for path in EXAMPLES.glob("*/run.slurm")))
        run.error(f"{example} has no run.slurm: name such a folder, or one of {names}")
    if len(args.space) < len(args.vary):
        run.error("--vary has the same flag twice: a trial could have one value of it only")
    largest = [known for part, known in LARGEST.items() if part in args.metric.lower()]
    if largest and args.maximize not in largest:
        change = "largest: add" if largest[0] else "smallest: leave out"
        run.error(f"--metric {args.metric} is best where it is {change} --maximize")
    if min(args.trials, args.startup) < 1 or args.warmup < 0:
        run.error("--trials and --startup must be 1 or more, and --warmup not below 0")
    if not own_task():
        run.error("it needs an allocation: sbatch sweep.slurm")
    return args


def main() -> None:
    """Do what the command line says."""
    args = parse_args()
    try:
        show(args.folder) if args.command == "show" else work(args)
    except SweepError as error:
        sys.exit(f"sweep.py: error: {error}")


if __name__ == "__main__":
    main()
