"""Start a train.py as its users do, with the hook, and read what its runs leave."""

import contextlib
import csv
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path

LAUNCHERS = {  # name: the flag by which its train.py is known, its command, rows that do not apply
    "spawn": ("--processes", "python train.py --processes {n}", ("accumulation",)),
    "torchrun": (None, "torchrun --standalone --nproc-per-node={n} train.py", ()),
    "srun": (
        "",  # never chosen by itself
        "srun --mpi=none --overlap --kill-on-bad-exit=1 --ntasks={n} bash -c 'source job.sh;"
        " export MASTER_ADDR=$(scontrol show hostnames | head -n 1) RANK=$SLURM_PROCID"
        " MASTER_PORT=$((10000 + (SLURM_JOB_ID + SLURM_STEP_ID) % 20000)) LOCAL_RANK=$SLURM_LOCALID"
        ' WORLD_SIZE=$SLURM_NTASKS; choose_interface; exec python train.py "$@"\' bash',
        (),
    ),
}
# Columns of metrics.csv that differ between two equal runs.
TIMES = ("second", "time", "hour", "minute", "speed", "memory", "world_size")
EPOCHS, STEPS, BATCH = 2, 4, 24  # of each run; the batch is that of all processes


class Refused(Exception):
    """There is nothing to check; the message is one line."""


class Program:
    """A train.py with its launcher and flags; it keeps its runs in FOLDER/verify-output."""

    def __init__(self, folder, launcher, flags, tell):
        self.folder, self.flags, self.tell = Path(folder).resolve(), [*flags], tell
        self.runs, self.took, self.left, self.noise = {}, 0, 0, None
        if not (self.folder / "train.py").is_file():
            raise Refused(f"there is no {self.folder / 'train.py'}")
        if taken := {"--output-dir", "--resume"} & {flag.partition("=")[0] for flag in flags}:
            raise Refused(f"{taken.pop()} is given by verify")
        self.output = self.folder / "verify-output"
        if self.output.exists() and not (self.output / "made-by-verify").exists():
            raise Refused(f"{self.output} is not from verify: move it away")
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()
        (self.output / "made-by-verify").touch()
        self.launcher = LAUNCHERS.get(launcher, (0, launcher))[1] or "python train.py"
        help_run = self.start("help", 1, ["--help"])
        if help_run.status != 0:
            raise Refused(f"train.py --help has failed: {help_run.error}")
        self.help = {word.strip("[](){},") for word in help_run.text.split()}
        self.help |= {word for words in self.help for word in words.split(",")}
        if not launcher:
            known = (name for name, (flag, *_) in LAUNCHERS.items() if flag in (None, *self.help))
            self.launcher = LAUNCHERS[next(known)][1]
        self.gpus = max([note["gpus"] for note in help_run.of("exit")], default=0)
        if self.gpus == 1 and not launcher:
            raise Refused("2 processes need 2 GPUs: hide this one by CUDA_VISIBLE_DEVICES= (empty)")
        limits = {
            "--epochs": EPOCHS,
            "--limit-steps": STEPS,
            "--timeout": max(60, int(5 * self.took)),
        }
        pairs = [(flag, value) for flag, value in limits.items() if flag in self.help]
        self.base = [str(part) for pair in pairs for part in pair]
        self.exact = ["--precision", "fp64"] if {"--precision", "fp64"} <= self.help else []

    def batch(self, size, processes, parts=1):
        """Return the flags for a batch of all processes, or None if train.py has none."""
        if "--global-batch" in self.help:
            return ["--global-batch", str(size)]
        each = str(size // processes // parts)
        return ["--batch-size", each] if "--batch-size" in self.help else None

    def run(self, name, processes=2, more=(), size=BATCH, parts=1, **named):
        """Train, once for each name; see start."""
        if name not in self.runs:
            flags = [*self.base, *(self.batch(size, processes, parts) or ()), *self.flags, *more]
            run = self.runs[name] = self.start(name, processes, flags, **named)
            self.left = max(0, self.left - 1)
            rest = f"about {self.left} runs are left, {self.left * self.took / 60:.1f} minutes"
            self.tell(f"run {name}: {run.seconds:.0f} s; {rest}")
        return self.runs[name]

    def start(self, name, processes, flags, actions="", into=None, wait=0):
        """Run a command to its end; from an action of the hook on, at most for a limit."""
        run = Run(self.output / name, into)
        run.notes_folder.mkdir(parents=True)
        if flags != ["--help"]:
            flags = [*flags, "--output-dir", str(run.folder)]
        words = [word.replace("{n}", str(processes)) for word in shlex.split(self.launcher)]
        words += [] if any("train.py" in word for word in words) else ["python", "train.py"]
        hook = Path(__file__).parent / "hook"
        path = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
        limit = wait + max(30, int(5 * self.took))  # from an action to the end
        variables = {"PYTHONPATH": path, "VERIFY_DIR": str(run.notes_folder), "VERIFY_DO": actions}
        variables |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        variables |= {"COLUMNS": "1000", "VERIFY_STOP": str(run.folder / "stop")}
        if actions and actions != "plain":  # what outlives its launcher, on other nodes as well
            variables["VERIFY_LIMIT"] = str(10 * limit)
        began, acted, done = (
            time.monotonic(),
            None,
            run.notes_folder / f"done-{actions.split(':')[0]}",
        )
        with open(run.log, "w") as log:
            process = subprocess.Popen(
                [*words, *flags],
                cwd=self.folder,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while run.status is None and (not acted or time.monotonic() < acted + limit):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.status = process.wait(0.1)
                    acted = acted or (done.exists() and time.monotonic())
            finally:
                end(process)
        run.acted, run.seconds = bool(acted), time.monotonic() - began
        run.after = time.monotonic() - (acted or began)
        if not actions or actions == "plain":
            self.took = max(self.took, run.seconds)
        return run


def end(process):
    """End a launcher, and what it has started on this machine."""
    if process.poll() is None:
        process.terminate()  # torchrun ends its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Run:
    """What a run has left: its status (None: ended by the limit), log, notes, metrics, weights."""

    def __init__(self, place, into=None):
        self.folder = into or place / "output"
        self.log, self.notes_folder, self.status = place / "log", place / "notes", None

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    @property
    def error(self):
        """The line of the log that says most, and the log's path."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()] or ["no output"]
        said = [line for line in lines if "rror: " in line and "torch.distributed" not in line]
        return f"{(said or lines)[-1][:300]} (log: {self.log})"

    @property
    def good(self):
        return self.status == 0 and (self.folder / "metrics.csv").exists()

    @cached_property
    def notes(self):
        """The notes of all processes that have a rank."""
        lines = [
            line
            for path in sorted(self.notes_folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return list(map(json.loads, lines))

    def of(self, event, **facts):
        """Return the notes of an event; facts: values that they have."""
        found = [note for note in self.notes if note["event"] == event]
        return [note for note in found if all(note.get(key) == facts[key] for key in facts)]

    @property
    def steps(self):
        """The number of optimizer steps that this run took."""
        return max([note["step"] for note in self.of("exit")], default=0)

    @cached_property
    def metrics(self):
        """The rows of metrics.csv, with numbers where these are numbers."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return [
                {name: number(text) for name, text in row.items()} for row in csv.DictReader(file)
            ]

    @property
    def weights(self):
        """All tensors in model.pt, by name."""
        import torch

        path = self.folder / "model.pt"
        return tensors(torch.load(path, "cpu", weights_only=True)) if path.exists() else {}


def number(text):
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def tensors(value, name=""):
    """Return the tensors in nested dicts and lists, as one dict."""
    if hasattr(value, "numel"):
        return {name: value}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    return {
        key: tensor
        for part, inner in items
        for key, tensor in tensors(inner, f"{name}.{part}").items()
    }


def columns_apart(one, other):
    """Return for each column that differs in two metrics.csv: how much, relatively, and where."""
    if len(one.metrics) != len(other.metrics):
        return {"epochs": (math.inf, f"{len(other.metrics)} epochs instead of {len(one.metrics)}")}
    found = {}
    for epoch, (row, second) in enumerate(zip(one.metrics, other.metrics, strict=True), 1):
        for name in row.keys() | second.keys():
            pair = row.get(name), second.get(name)
            if pair[0] == pair[1] or pair[0] != pair[0] and pair[1] != pair[1]:  # both are nan
                continue
            apart = math.inf
            if all(isinstance(value, float) and math.isfinite(value) for value in pair):
                apart = abs(pair[0] - pair[1]) / max(map(abs, pair))
            if apart > found.get(name, (0, ""))[0]:
                found[name] = apart, f"{name} of epoch {epoch} is {pair[1]} instead of {pair[0]}"
    return {name: found[name] for name in found if not any(word in name for word in TIMES)}


def weights_apart(one, other, counters=True):
    """Return the largest difference in two model.pt, relative to its tensor, and its name.

    counters: whole numbers, such as BatchNorm's number of batches, have to be equal, too.
    """
    import torch

    one, other = one.weights, other.weights
    if {n: w.shape for n, w in one.items()} != {n: w.shape for n, w in other.items()}:
        return math.inf, "model.pt has other tensors"
    reals = {name for name, w in one.items() if w.is_floating_point() or w.is_complex()}
    sizes = {name: one[name].abs().max().item() for name in reals if one[name].numel()}
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0  # that of a bias may be 1e-11
    largest, where = 0, ""
    for name in one:
        if torch.equal(one[name], other[name]) or not (counters or name in reals):
            continue
        apart = math.inf
        if name in reals:
            apart = (one[name] - other[name]).abs().max().item() / max(sizes[name], usual)
        if not apart <= largest:
            largest, where = apart, f"{name.strip('.')} of model.pt differs by {apart:.1e}"
    return largest, where
