"""Say what a run has used, by node: `python usage.py output/1234`, on a login node, when the run has ended.

It reads run.json, in which each process has written at its end what process() returns; plumbing.py calls that.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

HEAD = ["until", "node", "processes", "time", "cores used", "memory MB", "GPU MB", "read MB"]


def read_mb():
    """Return how many MB this process has read from files, also if they were in memory already; None if unknown."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1]) >> 20
    except OSError:  # a kernel that does not count
        return None


BEFORE = read_mb()  # what the imports have read


def process():
    """Return what this process has used: seconds since it began, of the clock and of cores; MB of memory, and read.

    `core_seconds` and `read_mb` have those of its loader workers that have ended. `cores` is what the job has there.
    """
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return {
        "host": os.uname().nodename,
        "seconds": round(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 2),
        "core_seconds": round(sum(os.times()[:4]), 2),
        "cores": int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "read_mb": None if BEFORE is None else read_mb() - BEFORE,
    }


def clock(seconds):
    """Return a time as 1:23:45."""
    return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f}:{seconds % 60:02.0f}"


def nodes(run):
    """Return the rows of a table of what each node has used, from run.json: one for each stop and node, under HEAD."""
    rows = []
    for stop in run["stops"]:
        hosts = {}
        for used in stop["used"]:
            if "seconds" in used:  # else it is from before usage.py
                hosts.setdefault(used["host"], []).append(used)
        for host, those in hosts.items():
            seconds = max(used["seconds"] for used in those)
            cores = sum(used["core_seconds"] for used in those) / seconds
            sums = [sum(used.get(name) or 0 for used in those) for name in ("mb", "gpu_mb", "read_mb")]
            until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stop["time"]))
            rows.append([until, host, len(those), clock(seconds), f"{cores:.1f} of {those[0]['cores']}", *sums])
    return rows


def table(head, rows):
    """Return a table as text, with columns that are as wide as their widest cell."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def report(folder):
    """Print what a run has used; `folder` is its --output-dir."""
    try:
        run = json.loads((folder / "run.json").read_text())
        rows = nodes(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"usage.py: error: {folder} is no --output-dir of a run ({error!r}): name one, such as output/1234")
    if rows:
        print(table(HEAD, rows))
    if without := len(run["starts"]) - len(run["stops"]):
        print(f"{without} of {len(run['starts'])} starts: no record, since it still runs or was killed: see sacct -D")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage.py: error: name the output folder of one run: python usage.py output/1234")
    report(Path(sys.argv[1]))
