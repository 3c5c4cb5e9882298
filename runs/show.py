"""Show runs: tables of what they have reached and what they have used, and one picture of curves.

    python show.py ~/project/output     # on a login node, also while the jobs are running

A run is a folder with metrics.csv, as train.py writes it after each epoch. What its jobs have used
comes from SLURM's accounting (sacct), and what its GPUs did from gpus-NODE.csv, which nvidia-smi
can write in a job: see README.md. The program reads these files and changes nothing.
"""

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What a run has learned, if it is not only the loss: the column, the axis, and what is best.
QUALITY = {"test_accuracy": ("test accuracy", max), "perplexity": ("perplexity", min)}
SKIPPED = {"site-packages", "node_modules"}  # folders with very many files and no runs
SACCT = "JobID,State,NodeList,ElapsedRaw,TotalCPU,AllocCPUS,MaxRSS,AllocTRES,ConsumedEnergyRaw"
NVIDIA_SMI = ["utilization.gpu", "memory.used", "power.draw"]


@dataclass
class Run:
    """What the files of one run say."""

    name: str
    folder: Path
    rows: list  # of metrics.csv, a dictionary of numbers for each epoch
    facts: dict  # run.json, empty if there is none

    def column(self, name):
        """Return a column of metrics.csv; where it has no value, that is nan."""
        return [row.get(name, float("nan")) for row in self.rows]


def find_folders(top):
    """Return the folders below `top` that have a metrics.csv, also behind links."""
    found, seen = [], set()
    for folder, names, files in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or "pyvenv.cfg" in files:  # a link leads back; an environment
            names.clear()
            continue
        seen.add(real)
        names[:] = [name for name in names if not name.startswith(".") and name not in SKIPPED]
        if "metrics.csv" in files:
            found.append(os.path.abspath(folder))
    return found


def read_runs(tops):
    """Return all runs below some folders, the newest last."""
    folders = list(dict.fromkeys(folder for top in tops for folder in find_folders(top)))
    folders.sort(key=lambda folder: os.stat(f"{folder}/metrics.csv").st_mtime)
    runs = []
    for folder in map(Path, folders):
        name = os.path.relpath(folder, os.path.commonpath(folders))
        facts = folder / "run.json"
        try:
            with open(folder / "metrics.csv", newline="") as file:
                rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
            if not rows or not {"epoch", "train_loss"} <= rows[0].keys():
                raise ValueError("it has no epoch and train_loss")
            known = dict(json.loads(facts.read_text())) if facts.exists() else {}
            runs.append(Run(folder.name if name == "." else name, folder, rows, known))
        except (OSError, TypeError, ValueError) as error:  # it is damaged, or of another program
            print(f"show.py: {folder} is left out: {error}", file=sys.stderr)
    return runs


def results(runs):
    """Return a table of what each run has reached, and how fast."""
    head = ["run", "state", "starts", "epochs", "processes", "train loss", "test loss", "best"]
    rows = [[*head, "time", "speed"]]
    for run in runs:
        last, starts, stops = run.rows[-1], run.facts.get("starts", []), run.facts.get("stops", [])
        state = "running or killed" if starts else ""
        if stops and stops[-1]["time"] >= starts[-1]["time"]:  # else the last start has no end yet
            state = stops[-1]["reason"].partition(":")[0].partition(" ")[0]
        quality = next((name for name in QUALITY if name in last), "test_loss")
        values = [value for value in run.column(quality) if value == value]  # nan is not itself
        best = QUALITY.get(quality, (None, min))[1](values, default=float("nan"))
        unit = next((unit for unit in ("tokens", "samples") if f"{unit}_per_second" in last), None)
        speed = statistics.median(run.column(f"{unit}_per_second")) if unit else ""
        asked = run.facts.get("settings", {}).get("epochs", "?")
        cells = [run.name, state, len(starts) or "", f"{last['epoch']:.0f} of {asked}"]
        cells += [f"{last['world_size']:.0f}" if "world_size" in last else ""]
        cells += [f"{last[n]:.4f}" if n in last else "" for n in ("train_loss", "test_loss")]
        cells += [f"{best:.2%}" if quality == "test_accuracy" else f"{best:.4f}"]
        cells += [clock(sum(run.column("seconds"))) if "seconds" in last else ""]
        cells += [f"{speed:.0f} {unit}/s" if unit else ""]
        rows.append(cells)
    return rows


def used_by_jobs(runs):
    """Return a table of what each start of each job has used, from sacct."""
    head = ["run", "job", "state", "nodes", "time", "cores used", "memory MB", "GPUs"]
    rows = [[*head, "energy Wh"]]
    # job.sh makes the file started-1234, or started-1234_5 for a task of an array.
    files = [(path, run) for run in runs for path in sorted(run.folder.glob("started-*"))]
    names = {path.name.partition("-")[2]: run.name for path, run in files}
    for job, steps in ask_sacct(list(names)) if names else []:
        seconds, cpu = float(job["ElapsedRaw"] or 0), seconds_of(job["TotalCPU"])
        memory = max([float(step["MaxRSS"].rstrip("M") or 0) for step in steps], default=0)
        devices = dict(part.split("=") for part in job["AllocTRES"].split(",") if part)
        energy = float(job["ConsumedEnergyRaw"] or 0) / 3600
        cells = [names.get(job["JobID"], ""), job["JobID"], job["State"], job["NodeList"]]
        cells += [clock(seconds), f"{cpu / seconds:.1f} of {job['AllocCPUS']}" if cpu else ""]
        cells += [f"{memory:.0f}" if memory else "", devices.get("gres/gpu", "")]
        rows.append([*cells, f"{energy:.1f}" if energy else ""])
    return rows


def ask_sacct(jobs):
    """Return what sacct has of each start of some jobs: a dictionary, and those of its steps."""
    words = ["sacct", "--parsable2", "--duplicates", "--units=M", f"--format={SACCT}"]
    try:
        asked = subprocess.run([*words, f"--jobs={','.join(jobs)}"], capture_output=True, text=True)
        wrong = asked.stderr.strip() if asked.returncode else None
    except OSError as error:
        wrong = f"{error.strerror}: run this on a login node"
    if wrong:
        print(f"show.py: sacct does not say what the jobs used ({wrong})", file=sys.stderr)
        return []
    found = []
    for row in csv.DictReader(asked.stdout.splitlines(), delimiter="|"):
        if "." not in row["JobID"]:
            found.append((row, []))
        elif found:  # 1234.batch and 1234.0 follow the start of job 1234 that they belong to
            found[-1][1].append(row)
    return found


def used_by_gpus(runs):
    """Return a table of what each GPU did, from gpus-NODE.csv: means, and the largest memory."""
    rows = [["run", "node", "GPU", "busy %", "memory MB", "power W", "samples"]]
    for run in runs:
        for path in sorted(run.folder.glob("gpus-*.csv")):
            samples, titles = {}, []
            for line in path.read_text(errors="replace").splitlines():
                cells = [cell.strip().split(" ")[0] for cell in line.split(",")]  # without units
                row = dict(zip(titles, cells, strict=False))
                if "index" in cells:  # a requeued job writes the titles again
                    titles = cells
                elif row.get("index", "").isdigit():
                    samples.setdefault(int(row["index"]), []).append(row)
            for gpu, those in sorted(samples.items()):
                busy, memory, power = (numbers(those, name) for name in NVIDIA_SMI)
                cells = [run.name, path.stem.partition("-")[2], gpu, f"{statistics.mean(busy):.0f}"]
                cells += [f"{max(memory):.0f}", f"{statistics.mean(power):.0f}", len(those)]
                rows.append(cells)
    return rows


def numbers(rows, name):
    """Return the numbers of a column, without [N/A] and a last row that is cut off; else nan."""
    found = []
    for row in rows:
        with contextlib.suppress(KeyError, ValueError):
            found.append(float(row[name]))
    return found or [float("nan")]


def seconds_of(text):
    """Return the seconds of a time that sacct prints, such as 1-02:03:04 or 03:04.567."""
    days, _, time = text.rpartition("-")
    seconds = 0.0
    for part in time.split(":"):
        seconds = 60 * seconds + float(part or 0)
    return 86400 * int(days or 0) + seconds


def clock(seconds):
    """Return a time as 1:23:45."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def print_table(rows):
    """Print a table, titles first; nothing if there are only titles."""
    if len(rows) == 1:
        return
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (str(cell).ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


def draw(runs, path):
    """Draw losses, and what else the runs have learned, by epoch: a colour for each run."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed
    import matplotlib.pyplot as plt

    shown = [name for name in QUALITY if any(name in run.rows[-1] for run in runs)]
    size = (6 * (1 + len(shown)), 4.5)
    figure, panels = plt.subplots(1, 1 + len(shown), figsize=size, squeeze=False)
    figure.set_layout_engine("constrained")
    losses, *others = panels[0]
    for number, run in enumerate(runs):
        epochs, colour = run.column("epoch"), f"C{number % 10}"
        losses.plot(epochs, run.column("test_loss"), "o-", color=colour, label=run.name)
        losses.plot(epochs, run.column("train_loss"), "--", color=colour, alpha=0.6)
        for axes, name in zip(others, shown, strict=True):
            axes.plot(epochs, run.column(name), "o-", color=colour)
    losses.plot([], [], "--", color="0.4", label="dashed: training loss")
    for axes, label in zip(panels[0], ["loss", *(QUALITY[name][0] for name in shown)], strict=True):
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def main():
    """Print the tables and draw the picture."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("show.py", description=__doc__, formatter_class=form)
    parser.add_argument("folders", nargs="+", help="each has runs in it, or is one")
    parser.add_argument("--picture", default="curves.png", help="the file to draw (curves.png)")
    args = parser.parse_args()
    runs = read_runs(args.folders)
    if not runs:
        sys.exit(f"show.py: no run in {', '.join(args.folders)}: train.py writes metrics.csv there")
    for table in (results, used_by_jobs, used_by_gpus):
        print_table(table(runs))
    try:
        draw(runs, args.picture)
        print(f"curves: {args.picture}")
    except ImportError:
        print("show.py: no picture: it needs pip install -r requirements.txt", file=sys.stderr)


if __name__ == "__main__":
    main()
