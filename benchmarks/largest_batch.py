"""The largest batch that fits: `python -m benchmarks.largest_batch EXAMPLE -- ARGUMENTS`, from the repository's root.

It trains one epoch by the example's own command, again and again, each time in fresh processes: with twice the batch
until memory is full, then between the largest that fits and the smallest that does not. On GPUs memory is full when
PyTorch says so; on the CPU when a process has more resident than --limit, since else the machine itself would run out.
What follows -- goes to train.py. See docs/out-of-memory.md.
"""

import argparse
import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from harness.processes import find_processes

# What a run prints that has no memory left: PyTorch on a GPU or on the CPU, Python, and what the kernel's kill leaves.
FULL = r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|bad_alloc|SIGKILL"
DATA = r"error: (--batch-size .* is above )?the \d+ samples"  # fewer than one batch for each process
MEMORY, SAMPLES = "memory is full", "too few samples"
LOOK = 0.1  # seconds between two looks at the memory


@dataclass(frozen=True)
class Try:
    """What became of one batch size."""

    batch: int
    full: str = ""  # why it does not fit: MEMORY or SAMPLES
    speed: float = 0.0  # samples or tokens a second, of all processes
    memory: int = 0  # MB of the largest process, or of a GPU


def peak(pids: list[int]) -> int:
    """Return the most that the largest of these processes has had resident, in MB."""
    found = [0]
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, re.findall(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(errors="replace")))
    return max(found) >> 10


def end(mark: str) -> None:
    """Kill all processes of a run, also those that its launcher has put into sessions of their own."""
    while pids := find_processes(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK)


def run(args: argparse.Namespace, words: list[str]) -> tuple[int, str, int]:
    """Run a command; return its exit status, what it printed, and the MB that its largest process was seen to take.

    SIGKILL and nothing if it went above the limit.
    """
    seen = 0
    mark = f"LARGEST_BATCH={os.getpid()}"
    variables = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    variables |= {"LARGEST_BATCH": str(os.getpid())}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if args.limit else {}
    options = {"cwd": args.folder, "env": os.environ | variables, "text": True, "errors": "replace"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    printed, _ = process.communicate(timeout=LOOK)
                    return process.returncode, printed, seen
                seen = max(seen, peak(find_processes(mark))) if args.limit else 0
                if args.limit and seen > args.limit:
                    return -signal.SIGKILL, "", seen
        finally:
            end(mark)


def attempt(args: argparse.Namespace, batch: int) -> Try:
    """Train an epoch with a batch size; end the program with one line if that fails for another reason than memory."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*LAUNCHERS[args.example].command(args.processes), *args.arguments]
        status, printed, seen = run(args, [*words, "--batch-size", str(batch), "--epochs", "1", "--output-dir", folder])
        if status and re.search(DATA, printed):
            return Try(batch, SAMPLES)
        if status == -signal.SIGKILL or (status and re.search(FULL, printed)):
            return Try(batch, MEMORY)
        if status:
            lines = printed.splitlines() or [f"exit status {status}"]
            said = [line for line in lines if "error:" in line.lower()] or lines
            args.fail(f"--batch-size {batch} failed: {said[-1]}")
        with open(Path(folder, "metrics.csv"), newline="") as file:
            row = list(csv.DictReader(file))[-1]
        used = json.loads(Path(folder, "run.json").read_text())["stops"][-1].get("used")
    memory = max(one.get("gpu_mb") or one["mb"] for one in used) if used else seen  # those with plumbing/ record it
    if args.limit and memory > args.limit:  # between the last look and the end
        return Try(batch, MEMORY)
    return Try(batch, speed=float(row.get("samples_per_second") or row["tokens_per_second"]), memory=memory)


def search(args: argparse.Namespace) -> list[Try]:
    """Return all tries in their order: doubled until one does not fit, then halved between them, down to --step."""
    tries, low, high, batch = [], 0, 0, args.start
    while not high or high - low > max(1, int(low * args.step)):
        one = attempt(args, batch)
        print(f"| {batch} | {f'| {one.full}' if one.full else f'{one.speed:.0f} | {one.memory}'} |", flush=True)
        tries.append(one)
        low, high = (low, batch) if one.full else (batch, high)
        batch = (low + high) // 2 if high else 2 * low
    return tries


def parse_args() -> argparse.Namespace:
    """Return the arguments; what cannot be right ends the program with one line."""
    parser = argparse.ArgumentParser("python -m benchmarks.largest_batch", description=__doc__)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--folder", type=Path, help="yours, with its train.py (default: the example's)")
    parser.add_argument("--processes", type=int, default=1, help="on this machine, one for each GPU (default: 1)")
    parser.add_argument("--start", type=int, default=64, help="the first --batch-size (default: 64)")
    parser.add_argument("--step", type=float, default=0.1, help="how near to the limit, as a share (default: 0.1)")
    parser.add_argument("--limit", type=int, metavar="MB", help="train on the CPU, a process with no more than this")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:at])
    args.fail = lambda text: parser.exit(2, f"{parser.prog}: error: {text}\n")
    args.arguments, args.folder = words[at + 1 :], args.folder or ROOT / "examples" / args.example
    if min(args.processes, args.start, args.limit or 1) < 1 or args.limit == 0 or not 0 < args.step < 1:
        parser.error("--processes, --start and --limit must be 1 or more, --step between 0 and 1")
    if not (args.folder / "train.py").exists():
        parser.error(f"there is no {args.folder / 'train.py'}")
    if args.limit is None:
        if not LAUNCHERS[args.example].gpus:
            parser.error(f"{args.example} trains on the CPU: limit the memory of a process, such as --limit 2000")
        import torch  # here, as it takes seconds

        if not torch.cuda.is_available():
            parser.error("PyTorch finds no GPU here: limit the memory of a process, such as --limit 2000")
    return args


def main() -> None:
    """Search, and say what was found."""
    args = parse_args()
    unit = "tokens" if "tokens_per_second" in (args.folder / "train.py").read_text() else "samples"
    print(f"| batch | {unit}/s | MB of {'the largest process' if args.limit else 'a GPU'} |\n|---|---|---|", flush=True)
    tries = search(args)
    fitting = [one for one in tries if not one.full]
    if not fitting:
        args.fail(f"not even a batch of 1 fits: {tries[-1].full}")
    best = max(fitting, key=lambda one: one.batch)
    print(f"largest that fits: {best.batch}, {best.speed:.0f} {unit}/s, {best.memory} MB")
    if min((one for one in tries if one.full), key=lambda one: one.batch).full == SAMPLES:
        print("no larger one could be tried, as there are too few samples: memory may allow it")


if __name__ == "__main__":
    main()
