"""The runs below a folder, and what is on disk of each: metrics.csv and run.json, as train.py writes them.

It needs nothing but Python.
"""

import csv
import json
import os
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Folders without runs, with very many files: everywhere, beside one another, and beside pyvenv.cfg.
SKIPPED = {"site-packages", "node_modules", "__pycache__"}
DATA_SET, ENVIRONMENT = {"train", "val"}, {"bin", "lib", "lib64", "include", "share"}


@dataclass(frozen=True, eq=False)  # equal to itself only, so that predictions can be kept for each run
class Run:
    """What is on disk of one run."""

    name: str  # its folder, below the one in which it was found
    folder: Path
    rows: list[dict[str, float]]  # of metrics.csv, one for each epoch
    facts: dict[str, Any]  # of run.json; empty if there is none

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the last start, as run.json has them."""
        return self.facts.get("settings", {})


def find_runs(top: Path, columns: Set[str]) -> tuple[list[Run], list[str]]:
    """Return every run below a folder, and the files that were left out, or whose end was, each with the reason.

    A metrics.csv without these columns is of another program.
    """
    runs, left_out = [], []
    for folder in folders(top):
        rows, wrong = read_metrics(folder / "metrics.csv")
        if rows and (missing := columns - rows[0].keys()):
            rows, wrong = [], "no column " + ", ".join(sorted(missing))
        if wrong:
            left_out.append(f"{folder / 'metrics.csv'} ({wrong})")
        if not rows:
            continue
        facts, wrong = read_run(folder / "run.json")
        if wrong:
            left_out.append(f"{folder / 'run.json'} ({wrong})")
        name = str(folder.relative_to(top)) if folder != top else folder.resolve().name
        runs.append(Run(name, folder, rows, facts))
    return runs, left_out


def folders(top: Path) -> Iterator[Path]:
    """Yield the folders in which a run can be, also behind links: `output` may be one to another file system."""
    seen = set()
    for folder, names, files in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link may lead back to above itself
            names.clear()
            continue
        seen.add(real)
        skipped = SKIPPED | (DATA_SET if set(names) >= DATA_SET else set())
        skipped |= ENVIRONMENT if "pyvenv.cfg" in files else set()
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skipped)
        if "metrics.csv" in files:
            yield Path(folder)


def read_metrics(path: Path) -> tuple[list[dict[str, float]], str]:
    """Return the rows of a metrics.csv and what is wrong with it, if anything; a last row that was cut off is left out.

    Without its end, the last number of a file may be another number.
    """
    try:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(whole)]
        [int(row["epoch"]) for row in rows if "epoch" in row]  # else it is nan, or infinite
    except (OSError, TypeError, ValueError, OverflowError, csv.Error) as error:
        return [], f"{type(error).__name__}: {error}"
    return rows, "" if text.endswith("\n") else "its last row was cut off" if text else "it is empty"


def read_run(path: Path) -> tuple[dict[str, Any], str]:
    """Return what a run.json says, and why that is nothing, if it is there but not one that train.py has written."""
    try:
        run = json.loads(path.read_text())
        used_by_node(run)
        starts, settings = [{"step": 0} | one for one in run["starts"]], dict(run.get("settings", {}))
        profile = {"shares": {}} | dict(run.get("profile", {}))
        profile["shares"] = {name: float(share) for name, share in profile["shares"].items()}
        return run | {"starts": starts, "settings": settings, "profile": profile}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        return {}, f"{type(error).__name__}: {error}"


USED = ["until", "node", "processes", "time", "cores used", "memory MB", "GPU MB", "read MB"]


def used_by_node(run: dict[str, Any]) -> list[list[Any]]:
    """Return the rows of a table of what each node has used, under USED, from run.json: one for each stop and node."""
    rows = []
    for stop in run["stops"]:
        hosts: dict[str, list[dict[str, Any]]] = {}
        for used in stop.get("used", []):  # train.py with longrun.py records none
            if "seconds" in used:  # else it is from before this was counted
                hosts.setdefault(used["host"], []).append(used)
        for host, those in hosts.items():
            seconds = max(used["seconds"] for used in those)
            cores = sum(used["core_seconds"] for used in those) / seconds
            sums = [sum(used.get(name) or 0 for used in those) for name in ("mb", "gpu_mb", "read_mb")]
            until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stop["time"]))
            rows.append([until, host, len(those), clock(seconds), f"{cores:.1f} of {those[0]['cores']}", *sums])
    return rows


def clock(seconds: float) -> str:
    """Return a time as 1:23:45."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
