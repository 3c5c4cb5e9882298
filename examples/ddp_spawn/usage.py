"""Say what a run has used, by node: `python usage.py output/1234`, on a login node, when the run has ended.

It reads run.json, in which each process has written at its end what process() returns; plumbing.py calls that. And it
reads usage-NODE.csv, which `python usage.py --log` writes on each node, in the background: plumbing.sh starts it.
"""

import csv
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

HEAD = ["until", "node", "processes", "time", "cores used", "memory MB", "GPU MB", "read MB"]
DEVICES = ["node", "device", "busy %", "memory MB", "power W", "clock MHz", "slowed", "energy Wh"]
SAMPLE = ["time", "device", "seconds", "busy", "memory_mb", "watts", "mhz", "slowed"]  # seconds: since the one before
# What NVIDIA's driver says of why a GPU is slower than it could be: bits of nvmlClocksEventReasons that cost speed.
SLOWED = {0x04: "power", 0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power supply"}
POWERCAP = Path("/sys/class/powercap")  # RAPL: counters of the energy of processors, often for root alone


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


def answer(*words):
    """Return the rows that a program prints as CSV; none if it is not there, fails, or does not answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)) if done.returncode == 0 else []


def nvidia():
    """Return a sample of each NVIDIA GPU that the job has on this node: device, busy, memory_mb, watts, mhz, slowed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only, fields = [f"--id={visible}"] * bool(visible), "index,utilization.gpu,memory.used,power.draw,clocks.sm"
    for reasons in ("clocks_event_reasons", "clocks_throttle_reasons"):  # the second: drivers before 535
        query = f"--query-gpu={fields},{reasons}.active"
        if rows := answer("nvidia-smi", *only, query, "--format=csv,noheader,nounits"):
            break
    found = []
    for index, *numbers, bits in rows:
        bits = int(bits, 16) if bits.startswith("0x") else 0
        slowed = "+".join(sorted({name for bit, name in SLOWED.items() if bits & bit}))
        numbers = [number if re.fullmatch(r"[\d.]+", number) else "" for number in numbers]  # "[N/A]"
        found.append([f"gpu{index}", *numbers, slowed])
    return found


def amd():
    """Return the same of each AMD GPU of the node; rocm-smi does not say what slows them."""
    shown = ["--showuse", "--showmeminfo", "vram", "--showpower", "--showclocks"]
    head, *rows = answer("rocm-smi", *shown, "--csv") or [[]]
    found = []
    for row in rows:
        cells = []
        for title in (r"GPU use \(%\)", r"VRAM Total Used Memory", r".*Package Power \(W\)", r"sclk clock speed"):
            text = next((cell for name, cell in zip(head, row, strict=False) if re.match(title, name)), "")
            number = re.search(r"[\d.]+", text)
            cells.append(number[0] if number else "")
        cells[1] = str(int(cells[1]) >> 20) if cells[1] else ""
        found += [[row[0].replace("card", "gpu"), *cells, ""]] if row and row[0].startswith("card") else []
    return found


def processors(before, seconds):
    """Return the same of each processor whose energy can be read; `before` has its counter from `seconds` ago."""
    found = []
    for zone in POWERCAP.glob("intel-rapl:*"):  # of AMD's, too
        number = zone.name.partition(":")[2]
        try:
            energy, most = (int((zone / f"{name}_uj").read_text()) for name in ("energy", "max_energy_range"))
        except OSError:
            continue
        if number.isdigit() and (zone / "name").read_text().startswith("package"):  # the others are parts of these
            if number in before:
                watts = (energy - before[number]) % (most + 1) / seconds / 1e6
                found.append([f"cpu{number}", "", "", f"{watts:.1f}", "", ""])
            before[number] = energy
    return sorted(found)


def log(folder, every):
    """Append a sample of each device of this node to usage-NODE.csv each so many seconds, until this is killed.

    Without a device that tells anything it returns at once.
    """
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    counters, last, path = {}, None, folder / f"usage-{os.uname().nodename}.csv"
    while True:
        now = time.time()
        seconds, last = now - (last or now), now
        rows = (nvidia() or amd() if gpus else []) + processors(counters, seconds)
        if not (rows or counters or path.exists()):
            return
        lines = [",".join(SAMPLE)] * (not path.exists())
        lines += [",".join([f"{now:.2f}", device, f"{seconds:.2f}", *cells]) for device, *cells in rows]
        with open(path, "a") as file:
            file.write("".join(f"{line}\n" for line in lines))
        time.sleep(max(0, now + every - time.time()))


def samples(folder):
    """Return what usage-NODE.csv of an output folder have: by node and device its samples, with numbers or None."""
    found = {}
    for path in sorted(folder.glob("usage-*.csv")):
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if None not in row and None not in row.values():  # else it was cut off: killed, or a full disk
                    numbers = {name: float(row[name]) if row[name] else None for name in SAMPLE[2:-1]}
                    one = numbers | {"time": float(row["time"]), "slowed": row["slowed"]}
                    found.setdefault((path.stem.partition("-")[2], row["device"]), []).append(one)
    return found


def devices(folder):
    """Return the rows of a table of what the devices of each node did, under DEVICES."""
    rows = []
    for (node, device), those in samples(folder).items():
        columns = {name: [one[name] for one in those if one[name] is not None] for name in SAMPLE[2:-1]}
        mean = {name: f"{sum(column) / len(column):.0f}" if column else "" for name, column in columns.items()}
        reasons = sorted({reason for one in those for reason in one["slowed"].split("+") if reason})
        slowed = f"{sum(map(bool, (one['slowed'] for one in those))) / len(those):.0%} {', '.join(reasons)}".rstrip()
        energy = sum(one["watts"] * one["seconds"] for one in those if one["watts"] is not None) / 3600
        memory = f"{max(columns['memory_mb']):.0f}" if columns["memory_mb"] else ""
        rows.append([node, device, mean["busy"], memory, mean["watts"], mean["mhz"], slowed, f"{energy:.2f}"])
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
    if found := devices(folder):
        kinds = {kind: [float(row[-1]) for row in found if row[1].startswith(kind)] for kind in ("gpu", "cpu")}
        known = [f"{sum(energy):.1f} Wh of {kind.upper()}s" for kind, energy in kinds.items() if energy]
        print(f"\n{table(DEVICES, found)}\nenergy: {' and '.join(known)}")
    if without := len(run["starts"]) - len(run["stops"]):
        print(f"{without} of {len(run['starts'])} starts: no record, since it still runs or was killed: see sacct -D")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--log"]:
        log(Path(sys.argv[2]), float(sys.argv[3]))
        sys.exit()
    if len(sys.argv) != 2:
        sys.exit("usage.py: error: name the output folder of one run: python usage.py output/1234")
    report(Path(sys.argv[1]))
