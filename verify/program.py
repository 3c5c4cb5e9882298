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
from pathlib import Path

SRUN = """srun --mpi=none --overlap --kill-on-bad-exit=1 --ntasks={n} bash -c '
    source job.sh; export MASTER_ADDR=$(scontrol show hostnames | head -n 1); choose_interface
    export MASTER_PORT=$((10000 + (SLURM_JOB_ID + SLURM_STEP_ID) % 20000))
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python train.py "$@"' bash"""
LAUNCHERS = {  # its command, the flag by which its train.py is known, rows without a meaning
    "srun": (SRUN, "", ()),  # never found, always named
    "spawn": ("python train.py --processes {n}", "--processes", ("accumulation",)),
    "torchrun": ("torchrun --standalone --nproc-per-node={n} train.py", "--help", ()),
}
LIMITS = {"--epochs": 2, "--limit-steps": 8}  # and 48 samples a step: for 1, 2 or 3 processes
TIMES = ("second", "time", "hour", "minute", "speed", "memory", "world_size")  # of metrics.csv


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
        self.launcher = LAUNCHERS.get(launcher, (launcher,))[0] or "python train.py"
        run = self.start("help", 1, ["--help"])
        if run.status != 0:
            raise Refused(f"train.py --help has failed: {run.error}")
        self.help = set(run.text.translate(str.maketrans("[](){},", "       ")).split())
        if not launcher:
            known = (command for command, flag, _ in LAUNCHERS.values() if flag in self.help)
            self.launcher = next(known, LAUNCHERS["torchrun"][0])
        self.gpus = max([note["gpus"] for note in run.of("exit")], default=0)
        if self.gpus == 1 and not launcher:
            raise Refused("2 processes need 2 GPUs: hide this one by CUDA_VISIBLE_DEVICES= (empty)")
        limits = LIMITS | {"--timeout": max(60, round(5 * run.seconds))}
        self.base = [str(x) for pair in limits.items() if pair[0] in self.help for x in pair]
        self.precise = next((p for p in ("fp64", "fp32") if {"--precision", p} <= self.help), "")

    def run(self, name, processes=2, more=(), size=48, parts=1, **named):
        """Train, once for each name; see start. One step has `size` samples in all."""
        if name not in self.runs:
            batch = {"--global-batch": size, "--batch-size": size // processes // parts}
            batch = [[flag, str(batch[flag])] for flag in batch if flag in self.help][:1]
            flags = [*self.base, *sum(batch, []), *self.flags, *more]
            run = self.runs[name] = self.start(name, processes, flags, **named)
            self.left = max(0, self.left - 1)
            left = f"{self.left} more take about {self.left * self.took / 60:.1f} minutes"
            self.tell(f"run {name}: {run.seconds:.0f} s; {left}")
        return self.runs[name]

    def start(self, name, processes, flags, do="", into=None, wait=0):
        """Run to the end; after an action of the hook at most `wait` seconds and the limit."""
        run, limit = Run(self.output / name, into), wait + max(30, round(5 * self.took))
        (run.place / "notes").mkdir(parents=True)
        words = shlex.split(self.launcher.replace("{n}", str(processes)))
        words += ["python", "train.py"] * ("train.py" not in self.launcher)
        words += flags if flags == ["--help"] else [*flags, "--output-dir", str(run.folder)]
        paths = {"PYTHONPATH": Path(__file__).parent / "hook", "PATH": Path(sys.executable).parent}
        variables = {key: f"{path}:{os.environ.get(key, '')}" for key, path in paths.items()}
        variables |= {"VERIFY_DIR": str(run.place / "notes"), "VERIFY_DO": do, "COLUMNS": "1000"}
        variables |= {"VERIFY_STOP": str(run.folder / "stop"), "ALLOW_OTHER_WEIGHTS": "1"}
        if ":" in do:  # also ends what has lost its launcher on another node
            variables["VERIFY_LIMIT"] = str(10 * limit)
        began, run.acted = time.monotonic(), 0
        with open(run.place / "log", "w") as log:
            process = subprocess.Popen(
                words, cwd=self.folder, env=os.environ | variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            while run.status is None and not 0 < run.acted < time.monotonic() - limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.status = process.wait(0.1)
                if not run.acted and (run.place / "notes/done").exists():
                    run.acted = time.monotonic()
        finally:
            if run.status is None:
                process.terminate()  # torchrun and srun end their processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        run.seconds, run.after = time.monotonic() - began, time.monotonic() - run.acted
        self.took = self.took if ":" in do else max(self.took, run.seconds)
        run.read()
        return run


class Run:
    """What a run has left: status (None: the limit ended it), log, notes and results."""

    def __init__(self, place, into=None):
        self.place, self.folder, self.status = place, into or place / "output", None

    def read(self):
        """Read the log and the hook's notes."""
        self.text = (self.place / "log").read_text(errors="replace")
        files = sorted(self.place.glob("notes/*.jsonl"))
        self.notes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        self.steps = max([note["step"] for note in self.of("exit")], default=0)
        self.good = self.status == 0 and (self.folder / "metrics.csv").exists()
        lines = [line.strip() for line in self.text.splitlines() if line.strip()] or ["no output"]
        said = [line for line in lines if "rror: " in line and "torch.distributed" not in line]
        self.error = f"{(said or lines)[-1][:300]} (log: {self.place / 'log'})"

    def of(self, event):
        """Return the notes of an event."""
        return [note for note in self.notes if note["event"] == event]

    @property
    def results(self):
        """All numbers in metrics.csv, by column and epoch, and all tensors in model.pt, by name."""
        import torch

        with open(self.folder / "metrics.csv", newline="") as file:
            rows = enumerate(csv.DictReader(file), 1)
            cells = {f"{name} of epoch {n}": text for n, row in rows for name, text in row.items()}
        found = {}
        for name, text in cells.items():
            with contextlib.suppress(TypeError, ValueError):  # no number
                found |= {} if any(word in name for word in TIMES) else {name: float(text)}
        found = {name: torch.tensor(value).double() for name, value in found.items()}
        model = self.folder / "model.pt"
        return found | (tensors(torch.load(model, "cpu")) if model.exists() else {})


def tensors(value, name="model.pt"):
    """Return the tensors in nested dicts as one dict."""
    if isinstance(value, dict):
        parts = [tensors(inner, f"{name} {key}").items() for key, inner in value.items()]
        return dict(item for part in parts for item in part)
    if not hasattr(value, "numel"):
        return {}
    return {name: value if value.is_complex() else value.double()}


def apart(one, other):
    """Return by how much results differ, relatively to the largest value of a tensor, by name."""
    import torch

    one, other, found = one.results, other.results, {}
    sizes = {name: value.abs().max().item() for name, value in one.items() if value.numel()}
    weights = sorted(size for name, size in sizes.items() if name.startswith("model.pt"))
    usual = weights[len(weights) // 2] if weights else 0  # some biases stay near 0
    for name in one.keys() | other.keys():
        if name not in one or name not in other or one[name].shape != other[name].shape:
            found[name] = math.inf
        elif not torch.equal(one[name].nan_to_num(), other[name].nan_to_num()):
            largest = max(sizes[name], usual if name.startswith("model.pt") else 0)
            difference = (one[name] - other[name]).abs().max().item()
            found[name] = difference / largest if largest and difference < math.inf else math.inf
    return dict(sorted(found.items(), key=lambda item: -item[1]))
