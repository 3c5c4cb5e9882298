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

LAUNCHERS = {  # name: the flag by which its train.py is known, its command, rows without a meaning
    "spawn": ("--processes", "python train.py --processes {n}", ("accumulation",)),
    "torchrun": (None, "torchrun --standalone --nproc-per-node={n} train.py", ()),
    "srun": (
        "",  # never found, always named
        "srun --mpi=none --overlap --kill-on-bad-exit=1 --ntasks={n} bash -c 'source job.sh;"
        " export MASTER_ADDR=$(scontrol show hostnames | head -n 1) RANK=$SLURM_PROCID"
        " MASTER_PORT=$((10000 + (SLURM_JOB_ID + SLURM_STEP_ID) % 20000)) LOCAL_RANK=$SLURM_LOCALID"
        ' WORLD_SIZE=$SLURM_NTASKS; choose_interface; exec python train.py "$@"\' bash',
        (),
    ),
}
BATCH = 24  # samples of a step, of all processes: 1, 2 or 3, with one batch or two
LIMITS = {"--epochs": 2, "--limit-steps": 4}
TIMES = ("second", "time", "hour", "minute", "speed", "memory", "world_size")  # in columns' names
HOOK = Path(__file__).parent / "hook"


class Refused(Exception):
    """There is nothing to check; the message is one line."""


class Program:
    """A train.py with its launcher and flags; it keeps its runs in FOLDER/verify-output."""

    def __init__(self, folder, launcher, flags, tell):
        """Ask train.py for its flags. Raises Refused."""
        self.folder, self.flags, self.tell = Path(folder).resolve(), flags, tell
        self.runs, self.took, self.left = {}, 0, 0
        self.output = self.folder / "verify-output"
        if not (self.folder / "train.py").is_file():
            raise Refused(f"there is no {self.folder / 'train.py'}")
        if self.output.exists() and not (self.output / "help").exists():
            raise Refused(f"{self.output} is not from verify: move it away")
        shutil.rmtree(self.output, ignore_errors=True)
        self.launcher = LAUNCHERS.get(launcher, (0, launcher))[1] or "python train.py"
        run = self.start("help", 1, ["--help"])
        if run.status != 0:
            raise Refused(f"train.py --help has failed: {run.error}")
        self.help = set(run.text.replace(",", " ").replace("{", " ").replace("}", " ").split())
        self.help = {word.strip("[]()") for word in self.help}
        if not launcher:
            self.launcher = next(c for f, c, _ in LAUNCHERS.values() if f is None or f in self.help)
        self.gpus = max([note["gpus"] for note in run.of("exit")], default=0)
        if self.gpus == 1 and not launcher:
            raise Refused("2 processes need 2 GPUs: hide this one by CUDA_VISIBLE_DEVICES= (empty)")
        limits = LIMITS | {"--timeout": max(60, round(5 * run.seconds))}
        self.base = [str(x) for pair in limits.items() if pair[0] in self.help for x in pair]
        self.exact = ["--precision", "fp64"] if {"--precision", "fp64"} <= self.help else []

    def run(self, name, processes=2, more=(), size=BATCH, parts=1, **named):
        """Train, once for each name; see start."""
        if name not in self.runs:
            batch = ["--global-batch", str(size)]
            if "--global-batch" not in self.help:
                batch = ["--batch-size", str(size // processes // parts)]
            flags = [*self.base, *(batch if batch[0] in self.help else ()), *self.flags, *more]
            run = self.runs[name] = self.start(name, processes, flags, **named)
            self.left = max(0, self.left - 1)
            left = f"{self.left} more take about {self.left * self.took / 60:.1f} minutes"
            self.tell(f"run {name}: {run.seconds:.0f} s; {left}")
        return self.runs[name]

    def start(self, name, processes, flags, do="", into=None, wait=0):
        """Run to the end; after an action of the hook at most `wait` seconds and the limit."""
        run, limit = Run(self.output / name, into), wait + max(30, round(5 * self.took))
        run.place.joinpath("notes").mkdir(parents=True)
        flags = flags if flags == ["--help"] else [*flags, "--output-dir", str(run.folder)]
        words = [word.replace("{n}", str(processes)) for word in shlex.split(self.launcher)]
        words += ["python", "train.py"] * ("train.py" not in self.launcher)
        paths = {"PYTHONPATH": HOOK, "PATH": Path(sys.executable).parent}
        paths = {key: f"{path}:{os.environ.get(key, '')}".strip(":") for key, path in paths.items()}
        variables = {"VERIFY_DIR": str(run.place / "notes"), "VERIFY_DO": do, "COLUMNS": "1000"}
        variables |= paths | {"VERIFY_STOP": str(run.folder / "stop")}
        if ":" in do:  # also ends what has lost its launcher on another node
            variables["VERIFY_LIMIT"] = str(10 * limit)
        began, acted = time.monotonic(), 0
        with open(run.place / "log", "w") as log:
            process = subprocess.Popen(
                [*words, *flags], cwd=self.folder, env=os.environ | variables,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                while run.status is None and not (acted and time.monotonic() > acted + limit):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.status = process.wait(0.1)
                    acted = acted or run.acted and time.monotonic()
            finally:
                end(process)
        run.seconds, run.after = time.monotonic() - began, time.monotonic() - acted
        self.took = self.took if ":" in do else max(self.took, run.seconds)
        return run


def end(process):
    """End a launcher, and what it has started on this machine."""
    if process.poll() is None:
        process.terminate()  # torchrun and srun end their processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Run:
    """What a run has left: status (None: the limit ended it), log, notes, metrics, weights."""

    def __init__(self, place, into=None):
        self.place, self.folder, self.status = place, into or place / "output", None

    @property
    def acted(self):
        return (self.place / "notes/done").exists()

    @property
    def text(self):
        return (self.place / "log").read_text(errors="replace")

    @property
    def error(self):
        """The line of the log that says most, and the log's path."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()] or ["no output"]
        said = [line for line in lines if "rror: " in line and "torch.distributed" not in line]
        return f"{(said or lines)[-1][:300]} (log: {self.place / 'log'})"

    @property
    def good(self):
        return self.status == 0 and (self.folder / "metrics.csv").exists()

    @cached_property
    def notes(self):
        files = sorted(self.place.glob("notes/*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def of(self, event):
        """Return the notes of an event."""
        return [note for note in self.notes if note["event"] == event]

    @property
    def steps(self):
        """The number of optimizer steps that this run took."""
        return max([note["step"] for note in self.of("exit")], default=0)

    @cached_property
    def metrics(self):
        """The rows of metrics.csv."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))

    @property
    def weights(self):
        """All tensors in model.pt, by name."""
        import torch

        path = self.folder / "model.pt"
        return tensors(torch.load(path, "cpu", weights_only=True)) if path.exists() else {}


def tensors(value, name=""):
    """Return the tensors in nested dicts as one dict."""
    if isinstance(value, dict):
        parts = [tensors(inner, f"{name}.{key}") for key, inner in value.items()]
        return {key: tensor for part in parts for key, tensor in part.items()}
    return {name[1:]: value} if hasattr(value, "numel") else {}


def columns_apart(one, other):
    """Return for each column that differs in two metrics.csv: how much, relatively, and where."""
    if len(one.metrics) != len(other.metrics):
        return {"train_loss": (math.inf, f"metrics.csv has {len(other.metrics)} epochs")}
    found = {}
    for row, second in zip(one.metrics, other.metrics, strict=True):
        for name in row.keys() | second.keys():
            texts, apart = (row.get(name), second.get(name)), math.inf
            if texts[0] == texts[1] or any(word in name for word in TIMES):
                continue
            with contextlib.suppress(TypeError, ValueError):  # not numbers
                first, last = map(float, texts)
                apart = abs(first - last) / max(abs(first), abs(last))
            if name not in found or apart > found[name][0]:
                found[name] = apart, f"{name} {texts[1]} instead of {texts[0]}"
    return found


def weights_apart(one, other, counters=True):
    """Return the largest difference in two model.pt, relative to its tensor, and where it is.

    counters: whole numbers, such as BatchNorm's number of batches, have to be equal, too.
    """
    import torch

    one, other = one.weights, other.weights
    if {n: w.shape for n, w in one.items()} != {n: w.shape for n, w in other.items()}:
        return math.inf, "model.pt has other tensors"
    real = {name: w for name, w in one.items() if w.is_floating_point() or w.is_complex()}
    sizes = {name: weight.abs().max().item() for name, weight in real.items() if weight.numel()}
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0  # that of a bias can be 1e-11
    found = [(0, "")]
    for name, weight in one.items():
        if name in sizes and not torch.equal(weight, other[name]):
            apart = (weight - other[name]).abs().max().item() / max(sizes[name], usual)
            found.append((apart, f"{name} in model.pt differs by {apart:.0e}"))
        elif counters and not torch.equal(weight, other[name]):
            found.append((math.inf, f"{name} in model.pt differs"))
    return max(found)
