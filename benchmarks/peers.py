"""Public scripts beside our examples, in one run: `nox -s bench -- --peers`, or `python -m benchmarks.peers`.

    python -m benchmarks.peers                           # fetches the scripts from GitHub, once, into results/sources
    python -m benchmarks.peers --sources FOLDER          # there is no internet: FOLDER has clones of the repositories
    python -m benchmarks.peers --only csc_ddp pytorch    # some of them, and the examples that belong to these
    python -m benchmarks.peers --beside lora fsdp        # those that belong to these examples
    python -m benchmarks.peers --precisions fp32 bf16    # ours in bf16, too, relative to the public script in fp32

For figures that can be kept, run it on an idle machine. It writes peers.csv (a row for each run) and peers.md (the
table) to the folder --output, and the log of a run that fails: peers-NAME.log. A script that fails, or that is not what
our edits were written for, has a row in the table that says so; the others are measured all the same.

The clone of OWNER/NAME is FOLDER/OWNER+NAME or FOLDER/OWNER+NAME/repo, with a work tree or without.

The same for all: model, data, batch, optimizer (AdamW), fp32, --processes processes on this machine over Gloo, and as
many threads as a process has cores (by default a process uses all cores, under torchrun one; Horovod's script for
PyTorch sets 1 by itself). public_scripts.py has the edits that make it so: random images in MNIST's format and the
ConvNet of common/ for most; what lora and torchrun_vision train by default, with one loader worker where the script has
an argument for it; for fsdp its random source and a larger model. All else is as published: how data are read and
transformed, `loss.item()`, logging, settings of the framework. Speed is that of all processes in the training part of
an epoch, evaluation not counted, the median of all epochs but the first. Memory is the most that one process had
resident in the whole run. In a round each script runs once, ours and theirs in turn; a ratio is the median of those of
the rounds. Loader workers start anew in each epoch, so that they cost more with the default --images than with the
60,000 of MNIST.

They run in one environment with the requirements of the examples with PyTorch, of tests/, and of
requirements-peers.txt; horovod_tensorflow and the script beside it in another, made as that example's README says:
--venv horovod_tensorflow=FOLDER. nox makes both. Where rich is installed, Lightning draws CSC's progress bar with it.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.edits import CannotRun, edited
from benchmarks.measure import BATCH, environment, machine, positive, read_metrics, speed
from benchmarks.public_scripts import LORA, PEERS, WORKS, Peer, Work
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.runs import Run

GITHUB, CACHE = "https://github.com", ROOT / "results" / "sources"
SECONDS = 3600  # that one run may take
# Runs a command and prints the most memory that one of its processes had: it knows all that were waited for.
PEAK = """import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("peak:", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "kB")
sys.exit(status)"""
Way = tuple[str, str]  # what is run, a public script or an example, and its precision


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in a folder that is a repository; it does not look for one in the folders above."""
    variables = {"GIT_CEILING_DIRECTORIES": str(folder.parent.resolve()), "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)


def find_clone(peer: Peer, sources: Path) -> Path | None:
    """Return the folder of the clone that has the peer's commit, if there is one."""
    name = peer.repository.replace("/", "+")
    for folder in (sources / name, sources / name / "repo"):
        if folder.is_dir() and git(folder, "cat-file", "-e", f"{peer.commit}^{{commit}}").returncode == 0:
            return folder
    return None


def fetch(peer: Peer, sources: Path) -> str:
    """Fetch the peer's commit, and no other, into a repository without a work tree; return why that fails, or ""."""
    folder = sources / peer.repository.replace("/", "+")
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--bare")
    words = ["fetch", "--depth=1", f"{GITHUB}/{peer.repository}", f"{peer.commit}:refs/heads/{peer.commit[:7]}"]
    done = git(folder, *words)
    return " ".join(done.stderr.split()) or "git failed" if done.returncode else ""


def find_clones(names: Sequence[str], sources: Path | None) -> dict[str, Path]:
    """Return the clones of these peers: those in `sources`, or those that are, or are now, in results/sources.

    Where some are missing, end with one line that names all of them.
    """
    missing = {}
    for peer in {PEERS[name].repository: PEERS[name] for name in names}.values():
        place = f"{sources or GITHUB}/{peer.repository.replace('/', '+' if sources else '/')}"
        if not find_clone(peer, sources or CACHE) and (why := sources or fetch(peer, CACHE)):
            missing[f"{place} at {peer.commit}"] = "" if sources else f" ({why})"
    if missing:
        left = [name for name in names if find_clone(PEERS[name], sources or CACHE)]
        what = ", ".join(f"{place}{why}" for place, why in missing.items())
        todo = "git clone them there" if sources else "without internet use --sources, see --help"
        rest = f", or measure the others: --only {' '.join(left)}" if left else ""
        sys.exit(f"peers.py: error: cannot {'find' if sources else 'fetch'} {what}: {todo}{rest}")
    return {name: find_clone(PEERS[name], sources or CACHE) for name in names}


def write_images(folder: Path, images: int) -> None:
    """Write random 28x28 images as MNIST's files, with a sixth as many for the test."""
    raw, generator = folder / "MNIST" / "raw", random.Random(0)
    raw.mkdir(parents=True)
    for part, size in (("train", images), ("t10k", images // 6)):
        header = struct.pack(">IIII", 0x803, size, 28, 28)  # the idx format: bytes in three dimensions
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + generator.randbytes(size * 28 * 28))
        labels = bytes(generator.choices(range(10), k=size))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels)


def prepare(folder: Path, examples: Sequence[str], images: int) -> None:
    """Write what these examples, and the public scripts beside them, train with into a folder."""
    write_images(folder, images)
    for name in examples:
        if words := LAUNCHERS[name].prepare.split()[1:]:
            example = copy_example(ROOT / "examples" / name, folder / name)
            words += [] if name == "lora" else ["--folder", str(folder / "images")]
            done = subprocess.run([sys.executable, *words], cwd=example, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"peers.py: error: cannot make the data of {name}: {last_words(done.stderr)}")
        if name == "lora":
            (example / "model").rename(folder / "model")
            write_samples(folder, (example / "text.txt").read_text())


def write_samples(folder: Path, text: str) -> None:
    """Write a text for lora, and its tokens as samples in the form of Hugging Face's data sets."""
    from tokenizers import Tokenizer

    (folder / "text.txt").write_text(text := text * LORA["repeats"])
    tokens, size = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).encode(text).ids, LORA["context"]
    (folder / "samples").mkdir()
    with open(folder / "samples" / "train.jsonl", "w") as file:
        for start in range(0, len(tokens) * 9 // 10 - size, size):  # train.py keeps a tenth for its test
            file.write(json.dumps({"input_ids": tokens[start : start + size], "attention_mask": [1] * size}) + "\n")


def last_words(stderr: str) -> str:
    """Return the line of stderr that says why a run failed: the last error, else the last line that has a word."""
    lines = [line.strip() for line in stderr.splitlines() if re.search(r"\w", line)]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): \S", line)]
    return (errors or lines or ["nothing"])[-1]


def run(name: str, command: list[str], folder: Path, args: argparse.Namespace, example: str) -> tuple[str, float]:
    """Run a script to its end; return what it has printed, and the MB of its largest process.

    If it fails, keep its log and raise CannotRun. It runs in the environment of the example.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.processes))
    variables = {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads, "TF_NUM_INTEROP_THREADS": "1"}
    variables |= {"PYTHONPATH": f"{ROOT}/plumbing:{ROOT}/examples/fsdp", "EPOCHS": str(args.epochs)}  # our model
    variables |= {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if example in args.venv:
        variables["PATH"] = f"{args.venv[example].resolve()}/bin:{os.environ['PATH']}"
    try:
        done = Run([sys.executable, "-c", PEAK, *command], folder, variables).wait(SECONDS)
    except AssertionError as error:
        raise CannotRun(f"failed: {str(error).partition(':')[0]}") from error
    if done.status:
        log = args.output / f"peers-{name}.log"
        log.write_text(done.stdout + done.stderr)
        raise CannotRun(f"failed: {last_words(done.stderr)} (see {log.name})")
    return done.stdout, int(re.findall(r"^peak: (\d+) kB$", done.stdout, re.MULTILINE)[-1]) / 1e3


def clocked(printed: str, args: argparse.Namespace) -> float:
    """Return the samples/s of all processes, the median of all epochs but the first, from what `clock` has printed."""
    ticks = [(float(time), int(size)) for time, size in re.findall(r"clock: ([\d.]+) (\d+) samples", printed)]
    if len(ticks) != 2 * args.epochs:
        raise CannotRun(f"failed: it printed the time {len(ticks)} times in {args.epochs} epochs")
    pairs = list(zip(ticks[::2], ticks[1::2], strict=True))[1:]
    return statistics.median(size * args.processes / (end - start) for (start, size), (end, _) in pairs)


def run_peer(name: str, clone: Path, folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Run a public script in a new folder beside `data`; return its samples/s and the MB of its largest process."""
    peer = PEERS[name]
    for path, source in peer.files.items():
        text = git(clone, "show", f"{peer.commit}:{path}").stdout
        (folder / Path(path).name).write_text(edited(path, text, source))
    # As ours do, the script takes the loopback interface, which works with any host name.
    command = ["env", "GLOO_SOCKET_IFNAME=lo", *peer.command.format(n=args.processes, epochs=args.epochs).split()]
    printed, memory = run(name, command, folder, args, peer.ours[0])
    return clocked(printed, args), memory


def run_ours(name: str, precision: str, folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Run one of our examples in a new folder beside `data`; return samples/s and the MB of its largest process."""
    copy_example(ROOT / "examples" / name, folder / name)
    work = WORKS.get(name, Work())
    words = [*work.words, f"--epochs={args.epochs}", f"--batch-size={work.batch}", f"--precision={precision}"]
    memory = run(name, [*LAUNCHERS[name].command(args.processes), *words], folder / name, args, name)[1]
    return speed(read_metrics(folder / name / "output")), memory


def cells(args: argparse.Namespace, runs: Sequence[report.PeerRun], failed: Mapping[Way, str]) -> list[dict[str, str]]:
    """Return the rows of the table: one for each public script, each example beside it, and its precision."""
    found: dict[Way, dict[int, report.PeerRun]] = {}  # by the number of the round
    for one in runs:
        found.setdefault((one.name, one.precision), {})[one.round] = one

    def median(way: Way, what: str, unit: str = "") -> str:
        values = [getattr(one, what) for one in found.get(way, {}).values()]
        return f"{statistics.median(values):.0f}{unit}" if values else ""

    def ratios(way: Way, other: Way, what: str) -> str:
        ours, theirs = found.get(way, {}), found.get(other, {})
        both = [getattr(ours[key], what) / getattr(theirs[key], what) for key in sorted(ours.keys() & theirs.keys())]
        return report.spread(both) if both else ""

    rows = []
    for name in args.only:
        for way in ours_beside(name, args.precisions):
            theirs, unit = (name, "fp32"), f" {WORKS.get(way[0], Work()).unit}/s"
            remarks = [f"{key[0]} {failed[key]}" for key in (theirs, way) if key in failed]
            rows.append(
                {
                    "public script": PEERS[name].title,
                    "speed": median(theirs, "per_second", unit),
                    "MB": median(theirs, "peak_mb"),
                    "ours": f"{way[0]}, {way[1]}",
                    "speed of ours": median(way, "per_second", unit),
                    "MB of ours": median(way, "peak_mb"),
                    "speed, ours / theirs": ratios(way, theirs, "per_second"),
                    "memory, ours / theirs": ratios(way, theirs, "peak_mb"),
                    "remark": "; ".join(remarks).replace("|", "/"),
                }
            )
    return rows


def ours_beside(name: str, precisions: Sequence[str]) -> list[Way]:
    """Return the examples that a public script is compared with, in each precision."""
    return [(ours, precision) for ours in PEERS[name].ours for precision in precisions]


def measure(args: argparse.Namespace, clones: Mapping[str, Path]) -> None:
    """Run each public script and our examples in turn, as often as --rounds says, and write what was measured."""
    caption = (
        f"{time.strftime('%d %B %Y')}, {machine()}, load {os.getloadavg()[0]:.1f} before it, {args.processes} "
        f"processes, {args.images} images in MNIST's format, median of {args.rounds} rounds, in each the median of the "
        f"epochs from 2 to {args.epochs}"
    )
    print(caption, flush=True)
    ways = dict.fromkeys(way for name in args.only for way in [(name, "fp32"), *ours_beside(name, args.precisions)])
    runs: list[report.PeerRun] = []
    failed: dict[Way, str] = {}
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        prepare(
            Path(temporary, "data"), list(dict.fromkeys(name for name, _ in ways if name not in PEERS)), args.images
        )
        for number in range(args.rounds):
            for name, precision in ways:
                if (name, precision) in failed:
                    continue
                folder = Path(temporary, "run")
                folder.mkdir()
                (folder / "data").symlink_to("../data")
                try:
                    if name in PEERS:
                        rate, memory = run_peer(name, clones[name], folder, args)
                    else:
                        rate, memory = run_ours(name, precision, folder, args)
                except CannotRun as error:
                    failed[name, precision] = str(error)
                    print(f"{name} {error}", flush=True)
                else:
                    work = WORKS.get(PEERS[name].ours[0] if name in PEERS else name, Work())
                    runs.append(report.PeerRun(name, precision, number, work.unit, rate * work.size, memory))
                    print(runs[-1], flush=True)
                    report.write_csv(runs, args.output / "peers.csv")
                shutil.rmtree(folder)
    report.finish(cells(args, runs, failed), None, args.output / "peers.csv", caption)


def main() -> None:
    """Read the command line, find or fetch the scripts, and measure them."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description=__doc__, formatter_class=layout)
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS), help="public scripts (default: all)")
    examples = sorted({name for peer in PEERS.values() for name in peer.ours})
    parser.add_argument("--beside", nargs="+", choices=examples, default=examples, help="examples (default: all)")
    parser.add_argument("--venv", type=environment, action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="folder of clones; default: fetch from GitHub")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="of our examples")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--images", type=positive, default=6000, help="for training")
    parser.add_argument("--epochs", type=positive, default=3, help="2 or more: the first does not count")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    args.venv = dict(args.venv)
    args.only = [name for name in args.only if set(PEERS[name].ours).intersection(args.beside)]
    if args.epochs < 2:
        parser.error("--epochs 1: the first epoch does not count, so there must be a second")
    if args.images < args.processes * BATCH:
        parser.error(
            f"--images {args.images} are too few for a batch of {BATCH} for each of {args.processes} processes"
        )
    if args.sources and not args.sources.is_dir():
        parser.error(f"--sources {args.sources}: there is no such folder")
    measure(args, find_clones(args.only, args.sources))


if __name__ == "__main__":
    main()
