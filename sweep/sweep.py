"""Search settings of an example with Optuna: each task of a job array trains trial after trial.

sweep.slurm starts this program in each task. A trial is the example's own run.slurm, started inside
the task, with its own output folder. The tasks share Optuna's journal file. See ../docs/sweeps.md.
"""

import argparse
import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

EVERY = 1  # seconds between two looks at metrics.csv
LIVING = "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING,COMPLETING"
heard = []  # the signals from SLURM


def vary(text):
    """Return the flag and the values of lr=log:1e-4:1, warmup-steps=0:50 or batch-size=32,64."""
    name, values = text.split("=")
    words = values.split(":")
    log = words[0] == "log"
    if not log and len(words) == 1:
        return name, CategoricalDistribution(values.split(","))
    low, high = words[log:]
    if low.isdigit() and high.isdigit():
        return name, IntDistribution(int(low), int(high), log=log)
    return name, FloatDistribution(float(low), float(high), log=log)


def open_study(args):
    """Return the study of the sweep's folder; refuse another sweep in the same folder."""
    args.folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(args.folder / "journal.log"))),
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(constant_liar=True),  # for trials at the same time
        pruner=optuna.pruners.MedianPruner(args.startup, args.warmup),
        direction="maximize" if args.maximize else "minimize",
    )
    words = [str(args.example), args.metric, args.maximize, *map(str, args.vary), *args.flags]
    if study.user_attrs.get("words", words) != words:
        sys.exit(f"sweep.py: error: {args.folder} has another sweep: name another --folder")
    study.set_user_attr("words", words)
    return study


def outputs(study):
    """Return the last trial of each output folder: an interrupted trial continues as a new one."""
    trials = study.get_trials(deepcopy=False)
    return {trial.user_attrs.get("output", trial.number): trial for trial in trials}


def take_up(study, task):
    """Queue the trials again that this task, or a task that is gone, has left unfinished."""
    words = ["squeue", "--me", "--array", "--noheader", "--format=%i", LIVING]
    living = subprocess.run(words, capture_output=True, text=True).stdout.split()
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        owner = trial.user_attrs.get("task")  # None: a task is about to begin it
        if owner and (owner == task or (living and owner not in living)):
            with contextlib.suppress(ValueError, RuntimeError):  # another task was faster
                study.tell(trial.number, state=TrialState.FAIL)
                study.enqueue_trial(trial.params, {"output": trial.user_attrs["output"]})


def read_metric(args, output):
    """Return the metric of each epoch, from metrics.csv, which is there after the first epoch."""
    if not (output / "metrics.csv").exists():
        return {}
    with open(output / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if args.metric not in rows[0]:
        sys.exit(f"sweep.py: error: --metric may be one of {', '.join(rows[0])}")
    return {int(row["epoch"]): float(row[args.metric]) for row in rows}


def train(args, study, trial, task):
    """Train a trial until its run ends, and tell the study; end the task if SLURM stops the run."""
    trial.set_user_attr("output", trial.user_attrs.get("output", f"trial-{trial.number:03}"))
    trial.set_user_attr("task", task)
    output = args.folder / trial.user_attrs["output"]
    flags = [word for name, value in trial.params.items() for word in (f"--{name}", str(value))]
    print(f"{output.name}: {' '.join(flags)}; log: {output}.log", flush=True)
    variables = os.environ | {"OUTPUT_DIR": str(output)}
    with open(f"{output}.log", "a") as log:
        words = ["bash", "run.slurm", *args.flags, *flags]
        run = subprocess.Popen(words, cwd=args.example, env=variables, stdout=log, stderr=log)
    handed_on, seen, ended = 0, 0, False
    while not ended:
        time.sleep(EVERY)
        for number in heard[handed_on:]:  # run.slurm saves, and requeues this task
            run.send_signal(number)
            handed_on += 1
        ended = run.poll() is not None
        values = read_metric(args, output)
        for epoch in list(values)[seen:]:
            trial.report(values[epoch], epoch)
            if trial.should_prune() and not ended:
                (output / "stop").touch()  # train.py saves and ends; an empty file: no requeue
        seen = len(values)
    stopped = output / "stopped"
    if stopped.exists() and stopped.stat().st_size > 0 or heard and run.returncode:
        sys.exit(f"{output.name}: stopped by SLURM; a task of this sweep will continue it")
    if stopped.exists():
        study.tell(trial, state=TrialState.PRUNED)
    elif run.returncode or not values:
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, values[max(values)])
    print(f"{output.name}: {outputs(study)[output.name].state.name.lower()}", flush=True)


def work(args):
    """Train trials until there are as many as asked for, or SLURM wants this task to end."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    task = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job
    if not task:
        sys.exit("sweep.py: error: it runs in a job: sbatch --array=1-2 sweep.slurm NAME ...")
    if not (args.example / "job.sh").exists():
        sys.exit(f"sweep.py: error: {args.example} has no run.slurm with its job.sh")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    study = open_study(args)
    while not heard:
        take_up(study, task)
        last = outputs(study)
        waiting = any(trial.state == TrialState.WAITING for trial in last.values())
        if len(last) >= args.trials and not waiting:
            return
        train(args, study, study.ask(dict(args.vary)), task)
    if signal.SIGUSR1 in heard:  # near the time limit, just after the end of a trial
        subprocess.run(["scontrol", "requeue", task])


def main():
    """Read the command line; what follows `--` goes to every trial."""
    parser = argparse.ArgumentParser("sweep.py", description=__doc__)
    parser.add_argument("example", help="name of an example, or a folder with a run.slurm")
    parser.add_argument("--vary", type=vary, action="append", required=True, metavar="FLAG=VALUES")
    parser.add_argument("--trials", type=int, default=20, help="of all tasks together (20)")
    parser.add_argument("--metric", default="test_loss", help="a column of metrics.csv (test_loss)")
    parser.add_argument("--maximize", action="store_true", help="the largest metric is the best")
    parser.add_argument("--startup", type=int, default=4, help="complete trials before pruning (4)")
    parser.add_argument("--warmup", type=int, default=2, help="the first epoch to be pruned in (2)")
    parser.add_argument("--folder", type=Path, help="of the whole sweep (output/NAME)")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.flags = words[end + 1 :]
    beside = Path(__file__).resolve().parents[1] / "examples" / args.example
    args.example = beside if beside.is_dir() else Path(args.example).resolve()
    args.folder = (args.folder or Path("output", args.example.name)).resolve()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    work(args)


if __name__ == "__main__":
    main()
