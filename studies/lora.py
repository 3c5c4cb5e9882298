"""What LoRA saves beside training all weights: `python -m studies.lora`.

For figures that can be kept, run it on an idle machine. It writes a Markdown table to stdout.
"""

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.outputs import read_metrics

EXAMPLE = "lora"


def train(folder: Path, words: list[str], epochs: int) -> tuple[float, float, float]:
    """Train once; return the median tokens/s of all epochs but the first, MB exchanged in a step, MB of a process."""
    shutil.rmtree(folder / "output", ignore_errors=True)
    command = [*LAUNCHERS[EXAMPLE].command(2), *words, "--epochs", str(epochs)]
    printed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    exchanged = float(re.search(r"a step exchanges ([\d.]+) MB", printed)[1])
    (stop,) = json.loads((folder / "output" / "run.json").read_text())["stops"]
    memory = float(max(used["mb"] for used in stop["used"]))
    rows = read_metrics(folder / "output")[1:]
    return statistics.median(row["tokens_per_second"] for row in rows), exchanged, memory


def main() -> None:
    """Train with adapters and in turn all weights, as often as --rounds says, and print the medians."""
    parser = argparse.ArgumentParser("python -m studies.lora", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to train (default: the temporary folder)")
    parser.add_argument("arguments", nargs="*", help="of train.py, after --")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {"LoRA": [], "`--full`": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = copy_example(ROOT / "examples" / EXAMPLE, Path(temporary, EXAMPLE))
        prepare = shlex.split(LAUNCHERS[EXAMPLE].prepare)
        subprocess.run([sys.executable, *prepare[1:]], cwd=folder, check=True, capture_output=True)
        for _ in range(args.rounds):
            for way, words in zip(found, ([], ["--full"]), strict=True):
                found[way].append(train(folder, [*words, *args.arguments], args.epochs))
            print(*(f"{way}: {rounds[-1][0]:.0f} tokens/s" for way, rounds in found.items()), file=sys.stderr)
    full = [speed for speed, _, _ in found["`--full`"]]
    print(f"2 processes, {' '.join(args.arguments) or 'default settings'}, median of {args.rounds} pairs\n")
    print("| | tokens/s | relative to `--full` | exchanged in a step | memory of a process |\n|---|---|---|---|---|")
    for way, rounds in found.items():
        speed, exchanged, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [one / other for (one, _, _), other in zip(rounds, full, strict=True)]
        relative = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {way} | {speed:.0f} | {relative * (way == 'LoRA')} | {exchanged:.3f} MB | {memory:.0f} MB |")


if __name__ == "__main__":
    main()
