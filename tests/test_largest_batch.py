"""benchmarks/largest_batch.py: with ddp_spawn on the CPU, and with a train.py whose memory is known."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import readme
from harness.launchers import ROOT
from harness.processes import clean_environment, find_processes

pytestmark = pytest.mark.only("ddp_spawn")
PAGE = ROOT / "docs" / "out-of-memory.md"
STAND_IN = """
import argparse, json, pathlib, resource, signal, sys

parser = argparse.ArgumentParser()
for name in ("--batch-size", "--gpu", "--samples", "--hang", "--epochs", "--processes"):
    parser.add_argument(name, type=int, default=10**9)
parser.add_argument("--output-dir", type=pathlib.Path)
args = parser.parse_args()
held = b"x" * (args.batch_size << 20)  # 1 MB a sample
if args.batch_size > args.hang:
    signal.pause()
if args.batch_size > args.gpu:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
if args.batch_size > args.samples:
    sys.exit(f"train.py: error: --batch-size {args.batch_size} is above the {args.samples} samples of each process")
used = [{"mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "gpu_mb": 0}]
(args.output_dir / "run.json").write_text(json.dumps({"stops": [{"used": used}]}))
(args.output_dir / "metrics.csv").write_text("epoch,samples_per_second\\n1,50.2\\n")
"""


def search(*words: object, line: str = "python -m benchmarks.largest_batch") -> subprocess.CompletedProcess[str]:
    """Run the program in the repository, as its page says; in the end there is no process of its runs."""
    command = ["bash", "-c", f"exec {line} {shlex.join(map(str, words))}"]
    options: dict[str, Any] = {"cwd": ROOT, "env": clean_environment(), "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        printed = process.communicate(timeout=580)
        assert find_processes(f"LARGEST_BATCH={process.pid}") == []
    return subprocess.CompletedProcess(command, process.returncode, *printed)


def check(text: str, limit: int, step: float = 0.1) -> int:
    """Hold a table to what it promises, and return the batch that was found."""
    rows = re.findall(r"^\| (\d+) \| (\d*) ?\| (\d+|[a-z ]+) \|$", text, re.MULTILINE)
    fits = {int(batch): int(memory) for batch, speed, memory in rows if speed}
    full = {int(batch) for batch, speed, _ in rows if not speed}
    best = max(fits)
    assert len(fits) + len(full) == len(rows) and best < min(full) <= best + max(1, step * best), text
    assert max(fits.values()) <= limit and all(int(speed) > 0 for _, speed, _ in rows if speed), text
    assert re.search(rf"^largest that fits: {best}, \d+ samples/s, {fits[best]} MB$", text, re.MULTILINE), text
    return best


@pytest.mark.runs("weekly")
@pytest.mark.timeout(900)
def test_on_the_cpu(example: str, source: Path) -> None:
    """The page's command keeps what it promises, as does the page's table, and a larger batch takes more memory."""
    line = readme.command("docs/out-of-memory.md", "... benchmarks.largest_batch ddp_spawn --limit ...")
    done = search("--folder", source, line=line)
    assert done.returncode == 0, done.stderr + done.stdout
    limit = int(line.split()[-1])
    (start,) = re.findall(r"^\| 64 \| \d+ \| (\d+) \|$", done.stdout, re.MULTILINE)
    assert check(done.stdout, limit) > 64 and "memory is full" in done.stdout and int(start) < 0.9 * limit, done.stdout
    assert check(PAGE.read_text().rpartition("\n## ")[2], limit) > 64


def test_known_memory(example: str, tmp_path: Path) -> None:
    """The limit is found to the MB, one that would not end is ended, and a GPU's error and too few samples are seen."""
    (tmp_path / "train.py").write_text(STAND_IN)
    words = (example, "--folder", tmp_path, "--limit", 150, "--start", 100, "--step", 0.03, "--", "--hang", 170)
    done = search(*words)
    assert done.returncode == 0 and 125 <= check(done.stdout, 150, 0.03) < 150, done.stdout + done.stderr
    done = search(*words, "--gpu", 9)  # all that were tried first are too large
    assert check(done.stdout, 150) == 9 and done.stdout.count("memory is full") >= 4, done.stdout + done.stderr
    done = search(*words, "--samples", 110)
    assert check(done.stdout, 150, 0.03) in range(107, 111) and "too few samples: memory" in done.stdout, done.stdout


def test_bad_input(example: str, tmp_path: Path) -> None:
    """Without a GPU and a limit nothing is tried; what cannot be, and train.py's own errors, are one line."""
    for words, says in (
        (["--start", "0", "--limit", "900"], "--start and --limit must be 1 or more"),
        (["--limit", "0"], "--start and --limit must be 1 or more"),
        (["--limit", "900", "--folder", "/none"], "there is no /none/train.py"),
        (["--limit", "1"], "not even a batch of 1 fits: memory is full"),
        (["--limit", "900", "--", "--colour", "red"], "--batch-size 64 failed: train.py: error: unrecognized arg"),
        ([], "PyTorch finds no GPU here: limit the memory of a process"),
    ):
        (tmp_path / "train.py").write_text(STAND_IN)
        refused = search(example, "--folder", tmp_path, *words)
        assert refused.returncode == 2 and says in refused.stderr.splitlines()[-1], refused.stderr
