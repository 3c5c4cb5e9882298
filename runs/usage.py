"""Say what a run has used, by node and by device: `python usage.py output/1234`, on a login node.

It reads run.json, in which each process has written at its end what it has used, and usage-NODE.txt, to which log_usage
of job.sh appends what nvidia-smi, rocm-smi and the kernel print. It needs nothing but Python.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import reader

DEVICES = ["node", "device", "busy %", "memory MB", "power W", "clock MHz", "slowed", "energy Wh"]
MEASURED = ["busy", "memory_mb", "watts", "mhz"]
# What NVIDIA's driver says of why a GPU is slower than it could be: bits of nvmlClocksEventReasons that cost speed.
SLOWED = {0x04: "power", 0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power supply"}
# The columns of rocm-smi that have what is measured, by their titles, which differ between releases.
AMD = [r"GPU use \(%\)", r"VRAM Total Used Memory", r".*Package Power \(W\)", r"sclk clock speed"]


def number(text: str) -> float | None:
    """Return the first number of a text, such as 1700 of "(1700Mhz)", or None: nvidia-smi prints [N/A] for some."""
    found = re.search(r"\d+(\.\d+)?", text)
    return float(found[0]) if found else None


def nvidia(cells: list[str]) -> dict[str, Any]:
    """Return what a line of nvidia-smi says of a GPU, under MEASURED, and what slows it, "" for nothing."""
    bits = int(cells[-1], 16) if cells[-1].startswith("0x") else 0
    slowed = "+".join(sorted({name for bit, name in SLOWED.items() if bits & bit}))
    return dict(zip(MEASURED, map(number, cells[1:-1]), strict=True)) | {"slowed": slowed}


def amd(titles: list[str], cells: list[str]) -> dict[str, Any]:
    """Return the same of a line of rocm-smi, which does not say what slows a GPU."""
    found = [next((c for t, c in zip(titles, cells, strict=True) if re.match(title, t)), "") for title in AMD]
    busy, memory, watts, mhz = map(number, found)
    megabytes = None if memory is None else memory // 2**20
    return {"busy": busy, "memory_mb": megabytes, "watts": watts, "mhz": mhz, "slowed": ""}


def read(path: Path) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Yield each sample of a log: its time, the start of the job that it belongs to, the device, what that says.

    A processor says only how many microjoules it has used, `counter`, which begins again after `most`. A line that was
    cut off, by a kill or on a full disk, is left out.
    """
    now, start, titles = 0.0, "", []
    for line in path.read_text(errors="replace").split("\n")[:-1]:  # what follows the last newline was cut off
        cells = [cell.strip() for cell in line.split(",")]
        if began := re.fullmatch(r"(\d{10}\.\d+) (\d+\.\d+)", line):
            now, start = float(began[1]), began[2]
        elif cells[0] == "device":
            titles = cells
        elif re.fullmatch(r"\d+(, [^,]+){4}, (0x[0-9a-fA-F]{16}|\[.*\])", line):
            yield now, start, f"gpu{cells[0]}", nvidia(cells)
        elif cells[0].startswith("card") and len(cells) == len(titles):
            yield now, start, cells[0].replace("card", "gpu"), amd(titles, cells)
        elif energy := re.fullmatch(r"(\d+),(\d+),package-(\S+)", line):  # the other counters are parts of these
            said = {"counter": int(energy[1]), "most": int(energy[2]), "slowed": ""}
            yield now, start, f"cpu{energy[3]}", dict.fromkeys(MEASURED) | said


def samples(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return what the logs of an output folder have: by node and device its samples, under MEASURED, or None.

    `seconds` of a sample is since the device's last one of the same start of the job, 0 if it is the first.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("usage-*.txt")):
        last: dict[tuple[str, str], dict[str, Any]] = {}
        try:
            read_samples = list(read(path))
        except OSError as error:
            print(f"{path} cannot be read ({error.strerror}): left out", file=sys.stderr)
            continue
        for now, start, device, sample in read_samples:
            before = last.get((start, device), {"time": now})
            seconds = now - before["time"]
            last[start, device] = sample = sample | {"time": now, "seconds": seconds}
            if "counter" in sample and seconds:
                used = (sample["counter"] - before["counter"]) % (sample["most"] + 1)
                sample["watts"] = used / seconds / 1e6
            if "counter" not in sample or seconds:
                found.setdefault((path.stem.partition("-")[2], device), []).append(sample)
    return found


def devices(folder: Path) -> list[list[str]]:
    """Return the rows of a table of what the devices of each node did, under DEVICES: means, and the most memory."""
    rows = []
    for (node, device), those in samples(folder).items():
        columns = {name: [one[name] for one in those if one[name] is not None] for name in MEASURED}
        mean = {name: f"{sum(column) / len(column):.0f}" if column else "" for name, column in columns.items()}
        reasons = sorted({reason for one in those for reason in one["slowed"].split("+") if reason})
        slowed = f"{sum(bool(one['slowed']) for one in those) / len(those):.0%} {', '.join(reasons)}".rstrip()
        energy = sum(one["watts"] * one["seconds"] for one in those if one["watts"] is not None) / 3600
        memory = f"{max(columns['memory_mb']):.0f}" if columns["memory_mb"] else ""
        rows.append([node, device, mean["busy"], memory, mean["watts"], mean["mhz"], slowed, f"{energy:.2f}"])
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text, with columns that are as wide as their widest cell."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def report(folder: Path) -> None:
    """Print what a run has used; `folder` is its --output-dir."""
    run, wrong = reader.read_run(folder / "run.json")
    found = devices(folder)
    if not run and not found:
        wrong = wrong or "it has no run.json"
        sys.exit(f"usage.py: error: {folder} is no --output-dir of a run ({wrong}): name one, such as output/1234")
    if not run:
        print(f"{folder}/run.json: left out ({wrong or 'there is none'})", file=sys.stderr)
    rows = reader.used_by_node(run) if run else []
    without = len(run["starts"]) - len(run["stops"]) if run else 0
    if rows:
        print(table(reader.USED, rows))
    if found:
        kinds = {kind: [float(row[-1]) for row in found if row[1].startswith(kind)] for kind in ("gpu", "cpu")}
        known = [f"{sum(energy):.1f} Wh of {kind.upper()}s" for kind, energy in kinds.items() if energy]
        print(f"\n{table(DEVICES, found)}\nenergy: {' and '.join(known)}")
    if without:
        print(f"{without} of {len(run['starts'])} starts: no record, since it still runs or was killed: see sacct -D")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage.py: error: name the output folder of one run: python usage.py output/1234")
    report(Path(sys.argv[1]))
