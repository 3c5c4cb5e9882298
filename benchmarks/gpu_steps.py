"""Steps with a limit each, whose results are on disk after each of them: what on_gpu.py is made of.

It imports nothing but the standard library and harness/, so that it runs wherever the examples do.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.processes import FOREIGN, end_processes

MARKER = "ON_GPU_STEP"  # in the environment of every process of a step, so that each can be found
Row = dict[str, Any]  # of results.json: "step", "name", "state" (one of these), and what was measured, or why not
MEASURED, FAILED, LEFT_OUT = "measured", "failed", "left out"


def say(text: str) -> None:
    """Print a line at once, after the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()
STOPPED = threading.Event()  # all that runs is to be ended now


def write_json(path: Path, value: object) -> None:
    """Write a file that is whole at any moment."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


@dataclass
class Results:
    """What was measured so far, and the names of all rows that are to come; on disk whenever a row is added."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    plan: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows, and write all of them."""
        with self.lock:
            self.rows += rows
            self.write()

    def write(self) -> None:
        """Write what there is."""
        write_json(self.path, {"about": self.about, "plan": self.plan, "rows": self.rows})


@dataclass(frozen=True)
class Step:
    """What is run, and how long it may take."""

    name: str  # also that of its log
    group: str  # what --only may name
    limit: float  # seconds
    needs: float  # seconds: with fewer left it is not begun
    rows: tuple[str, ...]  # the names of the rows that it fills
    run: Callable[[float], list[Row]]  # gets its limit, and returns the rows

    def missing(self, state: str, reason: str) -> list[Row]:
        """Return all its rows, with the reason why nothing was measured."""
        return [{"step": self.name, "name": name, "state": state, "reason": reason} for name in self.rows]


def carry_out(step: Step, deadline: float) -> list[Row]:
    """Run a step within its limit and the time that is left; whatever goes wrong becomes its rows."""
    left = deadline - time.monotonic()
    if left < step.needs:
        reason = f"time was up: it needs {step.needs:.0f} s, and {max(0, left):.0f} s were left"
        say(f"{step.name}: {reason}")
        return step.missing(LEFT_OUT, reason)
    limit = min(step.limit, left)
    say(f"{step.name}: begins, at most {limit:.0f} s")
    start = time.monotonic()
    try:
        rows = step.run(limit)
    except LeftOut as error:
        rows = step.missing(LEFT_OUT, str(error))
    except Exception as error:  # a fault of one step must not end the others
        rows = step.missing(FAILED, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    for row in rows:
        row.setdefault("step", step.name)
        row["wall_seconds"] = round(seconds, 1)
        say(f"{shown(row)}   ({seconds:.0f} s)")
    return rows


class LeftOut(Exception):
    """A step cannot be run here, for a reason that is no fault."""


def shown(row: Row) -> str:
    """Return a row as one line of the log."""
    if row["state"] != MEASURED:
        return f"{row['name']}: {row['state']}: {row['reason']}"
    hidden = {"step", "name", "state", "command", "wall_seconds", "unit", "value", "beside"}
    hidden |= {"by_test", "skips"}
    hidden |= {name for name, found in row.items() if isinstance(found, list) and isinstance((found or [0])[0], dict)}
    value = f"{row['value']:,.0f} {row['unit']}" if "value" in row else ""
    rest = []
    for name, found in row.items():
        if name not in hidden and found not in (None, ""):
            text = " ".join(f"{one:,.0f}" for one in found) if name == "values" else str(found)
            rest.append(f"{name} {text}"[:400])
    return f"{row['name']}: {', '.join([value, *rest] if value else rest)}"


@dataclass
class Done:
    """A command that has ended, or was ended at its limit."""

    status: int
    text: str
    lines: list[tuple[float, str]]  # with the time at which each came
    over: float = 0  # the limit in seconds, if it was ended for that

    def why(self) -> str:
        """Return why it failed, in one line."""
        if self.over and STOPPED.is_set():
            return "it was ended with the whole run"
        if self.over:
            return f"it was ended at its limit, {self.over:.0f} s"
        return f"it ended with {self.status}: {last_words(self.text)}"


def last_words(text: str) -> str:
    """Return the line that says why a run failed: train.py's own, else the first error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    for pattern in (r"\S+\.py: error: ", r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b.*: ?\S"):
        if errors := [line for line in lines if re.match(pattern, line)]:
            return errors[0][:300]
    return (lines or ["nothing was printed"])[-1][:300]


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what a job or another launcher has set, and with what is added."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return kept | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"} | dict(added)


def run(
    command: Sequence[object],
    folder: Path,
    log: Path,
    seconds: float,
    variables: Mapping[str, str],
    cores: set[int] | None = None,
) -> Done:
    """Run a command with both outputs in a log, in a process group of its own; at its limit end all that it started.

    Processes of it that have a group of their own, such as torchrun's workers, are found by a variable.
    """
    value = uuid.uuid4().hex
    words = [str(word) for word in command]
    lines: list[tuple[float, str]] = []
    with open(log, "a") as file:
        file.write(f"$ {' '.join(words)}\n")
        file.flush()
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(variables) | {MARKER: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )

        begins = time.monotonic()

        def read() -> None:
            with process.stdout as stdout:
                for line in stdout:
                    lines.append((time.monotonic(), line))
                    file.write(f"{lines[-1][0] - begins:6.1f} {line}")
                    file.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        over, deadline = 0.0, time.monotonic() + seconds
        try:
            while process.poll() is None and not over:
                over = seconds if time.monotonic() > deadline or STOPPED.is_set() else 0.0
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            end_processes(f"{MARKER}={value}")
            process.wait(30)
            reader.join(30)
        if over:
            file.write(f"ended at its limit, {over:.0f} s\n")
    return Done(process.returncode, "".join(line for _, line in lines), lines, over)


def make_commands(folder: Path) -> Path:
    """Write commands into a folder for PATH, so that all examples start with this Python, whatever it is called."""
    folder.mkdir(parents=True)
    modules = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
    for name, module in {"python": "", "python3": "", **modules}.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {f"-m {module} " if module else ""}"$@"\n')
        path.chmod(0o755)
    return folder


class Monitor:
    """What nvidia-smi says twice a second, of all GPUs, for as long as a block lasts."""

    FIELDS = ("power.draw", "utilization.gpu", "memory.used", "clocks.sm")

    def __init__(self) -> None:
        self.samples: list[tuple[float, list[float]]] = []
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Monitor":
        if shutil.which("nvidia-smi"):
            query = ["--format=csv,noheader,nounits", "--loop-ms=500"]
            command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", *query]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]"
                self.samples.append((time.monotonic(), [float(word) for word in line.split(",")]))

    def __exit__(self, *_: object) -> None:
        if self.process:
            self.process.kill()
            self.process.wait(10)

    def medians(self, start: float, end: float) -> dict[str, float]:
        """Return the medians between two moments, and the most memory in use; nothing if there is no nvidia-smi."""
        within = [values for moment, values in self.samples if start <= moment <= end]
        if not within:
            return {}
        watt, busy, _, clock = (statistics.median(column) for column in zip(*within, strict=True))
        used = max(values[2] for _, values in self.samples)
        return {"watt": round(watt), "busy_percent": round(busy), "sm_mhz": round(clock), "smi_mb": round(used)}
