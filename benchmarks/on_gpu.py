"""Try and measure the examples on the GPUs of this machine, within ten minutes. From the repository's root:

    python -m benchmarks.on_gpu                                        # all rows, what matters most first
    python -m benchmarks.on_gpu --examples fsdp --rows verify large    # some of them
    python -m benchmarks.on_gpu --device cpu --limit-steps 2           # to try this program without a GPU

It takes the Python that it is started with, and needs no network. An example whose packages are missing is left out.
on_gpu.md, a table with card, driver, release of PyTorch and commit, is written to the folder --output after each row.
What a failed run has printed is in EXAMPLE-ROW.log there. The status is 1 if a row failed.

default  the default run on all GPUs learns what the CPU learns: first loss within 2 %, last loss within 10 %; the CPU
         computes the same test metrics from model.pt (examples with the ConvNet)
killed   killed with SIGKILL after two epochs, then resumed; each process uses the memory of one GPU only (nvidia-smi)
bf16     it learns in bf16, and where train.py offers it in fp16
modes    flags that matter on GPUs only, such as --tensor-parallel
verify   the rows of verify/ that apply; with one GPU those that need one process
speed    images/s of the ConvNet with and without bf16, at two batch sizes
large    speed, memory and power at a size that fills a GPU: a GPT of 124 million weights, ResNet-50 from JPEG files

Rows before `speed` run for several examples at a time (--at-once), and may take 60 % of the time.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.measure import commit, cores, positive, speed, use_this_python
from harness import outputs, runs
from harness.edits import GO_ON, hold, hold_epochs
from harness.launchers import LAUNCHERS, ROOT, copy_example

EXAMPLES = [name for name, launcher in LAUNCHERS.items() if launcher.gpus]
TIMED = ("speed", "large")  # rows that need the machine for themselves
MODES = {  # flags, and how many processes they need
    "fsdp": ("--tensor-parallel 2", 2),
    "torchrun_vision": ("--sync-batchnorm --precision fp16 --max-grad-norm 1", 1),
}
# Rows of verify by the number of GPUs: none, one, two or more.
VERIFY = ("seed", "seed checkpoint stopped bf16", "seed samples random weights checkpoint killed stopped ends bf16")
LARGE = {  # flags that fill a GPU, and units of a sample
    "fsdp": (
        "--layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50304 --batch-size 64 --tokens 3000000 "
        "--lr 3e-4 --precision bf16 --compile",
        1024,
    ),
    "torchrun_vision": ("--data-dir jpeg --model resnet50 --image-size 224 --batch-size 256 --precision bf16", 1),
}
# Dense bf16 TFLOP/s by the data sheets, for the share of the peak; the first name that fits counts.
PEAKS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "A40": 150, "L4": 121}
GPT_FLOPS = 6 * 124e6 + 12 * 12 * 768 * 1024  # of a token: 6 N, and those of the attention (PaLM, appendix B)

ASK = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
found["card"] = torch.cuda.get_device_name(0) if found["gpus"] else "no GPU"
print(json.dumps(found))
"""


class LeftOut(Exception):
    """A row cannot be measured here, for a reason that is no fault."""


def nvidia_smi(query: str) -> list[list[str]]:
    """Return what nvidia-smi says, a list of cells for each GPU or process; nothing without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [line.split(", ") for line in lines]


@dataclass
class Bench:
    """Where and how all rows of one call are measured."""

    args: argparse.Namespace
    work: Path  # temporary, for copies of the examples
    about: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    stopped: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def csv(self) -> Path:
        """The file of all rows; the table is beside it."""
        return self.args.output / "on_gpu.csv"

    @property
    def caption(self) -> str:
        """When, where and with what the rows were measured."""
        about = self.about
        cuda = f"driver {about['driver']}, CUDA {about['cuda']}"
        words = [time.strftime("%d %B %Y"), f"{about['gpus']} x {about['card']}" if about["gpus"] else "no GPU", cuda]
        words += [
            f"{cores()} cores",
            f"Python {sys.version.split()[0]}",
            f"torch {about['torch']}",
            f"commit {commit()}",
        ]
        return ", ".join(words)

    @property
    def processes(self) -> int:
        """How many processes train: one for each GPU, or two on CPUs."""
        return self.about["gpus"] or 2

    def left(self, share: float = 1) -> float:
        """Return the seconds that are left of a share of the time."""
        return 0 if self.stopped else self.started + 60 * self.args.minutes * share - time.monotonic()

    def copy(self, example: str, row: str) -> Path:
        """Return a new copy of an example, with the data that its README has a user make."""
        source, target = self.work / example, self.work / f"{example}-{row}"
        return copy_example(source, target)

    def variables(self, on_cpu: bool = False) -> dict[str, str]:
        """Return the environment of a run: all GPUs, or none."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.about["gpus"])))
        return {"CUDA_VISIBLE_DEVICES": "" if on_cpu else given}

    def limited(self) -> list[str]:
        """Return the flag of train.py that makes a run short, if this was asked for."""
        return [f"--limit-steps={self.args.limit_steps}"] if self.args.limit_steps else []

    def train(self, example: str, folder: Path, words: str = "", on_cpu: bool = False) -> list[dict[str, float]]:
        """Train to the end; return the rows of metrics.csv. Raise AssertionError if the run fails or time is up."""
        output = folder / ("output-cpu" if on_cpu else "output")
        flags = [*words.split(), *self.limited(), f"--output-dir={output.name}"]
        limit = max(1, self.left())
        run = runs.train(example, folder, self.processes, *flags, seconds=limit, **self.variables(on_cpu))
        where = "nccl on cuda" if self.about["gpus"] and not on_cpu else "gloo on cpu"
        assert where in run.stdout, f"it does not train with {where}:\n{run.stdout}"
        return outputs.read_metrics(output)

    def learnt(self, example: str, row: dict[str, float], tolerance: float) -> str:
        """Return what was learnt, as text; raise AssertionError if that is too little in a run without a limit."""
        launcher = LAUNCHERS[example]
        text = f"{launcher.metric} {row[launcher.metric]:.4f}"
        assert self.args.limit_steps or launcher.has_learnt(row, tolerance), f"it has learnt too little: {text}"
        return text


def default(bench: Bench, example: str, folder: Path) -> str:
    """Train with the default settings on all GPUs, then on the CPU, and compare."""
    rows = bench.train(example, folder)
    others = bench.train(example, folder, on_cpu=True)
    losses = [row["train_loss"] for row in rows]
    expected = [row["train_loss"] for row in others]
    text = f"train loss {losses[-1]:.4f}, on the CPU {expected[-1]:.4f}; {bench.learnt(example, rows[-1], 0.01)}"
    assert rows[-1]["world_size"] == bench.processes and len(rows) == len(others), text
    assert abs(losses[0] / expected[0] - 1) < 0.02 and abs(losses[-1] / expected[-1] - 1) < 0.1, text
    if LAUNCHERS[example].convnet and not bench.args.limit_steps:
        loss, accuracy = outputs.recomputed(folder / "output", "digits", "data")
        same = abs(rows[-1]["test_loss"] / loss - 1) < 0.01 and abs(rows[-1]["test_accuracy"] - accuracy) < 0.005
        assert same, f"{text}; the CPU computes {loss:.4f} and {accuracy:.4f} from model.pt"
    return text


def killed(bench: Bench, example: str, folder: Path) -> str:
    """Kill all processes after two epochs, and resume."""
    hold_epochs(folder, 2)
    run = runs.start(example, folder, bench.processes, *bench.limited(), **bench.variables())
    run.read_until("epoch  2/", max(1, bench.left()))
    ids = set(map(str, run.pids()))
    used = [tuple(row) for row in nvidia_smi("compute-apps=pid,gpu_uuid") if row[0] in ids]
    runs.kill_all(run)
    assert len({pid for pid, _ in used}) == len(set(used)), f"a process uses several GPUs: {used}"
    hold(folder, GO_ON)
    rows = bench.train(example, folder, "--resume")
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 2, rows
    assert outputs.read_run(folder / "output")["starts"][-1]["step"] > 0, "it has begun again"
    return bench.learnt(example, rows[-1], 0.01)


def bf16(bench: Bench, example: str, folder: Path) -> str:
    """Train in bf16, and in fp16 where there is that: by an argument or, with DeepSpeed, by its file."""
    text = f"bf16: {bench.learnt(example, bench.train(example, folder, '--precision bf16')[-1], 0.02)}"
    if not LAUNCHERS[example].fp16 or not bench.about["gpus"]:
        return text
    other, words = bench.copy(example, "fp16"), "--precision fp16"
    if (config := other / "ds_config.json").exists():
        config.write_text(json.dumps(json.loads(config.read_text()) | {"fp16": {"enabled": True}}))
        words = ""
    return f"{text}; fp16: {bench.learnt(example, bench.train(example, other, words)[-1], 0.02)}"


def modes(bench: Bench, example: str, folder: Path) -> str:
    """Train with flags that matter on GPUs only."""
    words, divisor = MODES.get(example, ("", 1))
    if not words or not bench.about["gpus"] or bench.processes % divisor:
        raise LeftOut(f"{words} needs {divisor} GPUs, or a multiple" if words else "it has no such flags")
    return f"{words}: {bench.learnt(example, bench.train(example, folder, words)[-1], 0.1)}"


def verify(bench: Bench, example: str, folder: Path) -> str:
    """Have verify/ check the example; return its last line, and raise AssertionError with what has failed."""
    rows = VERIFY[min(bench.about["gpus"], 2)].split()
    launcher = LAUNCHERS[example].local
    if bench.about["gpus"] == 1:
        launcher = launcher.replace("{n}", "1")  # two processes would need two GPUs
    command = [sys.executable, "-m", "verify", str(folder), "--launcher", launcher, "--rows", *rows]
    path = ":".join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    run = runs.Run(command, folder, bench.variables() | {"PYTHONPATH": path}).wait(max(1, bench.left()))
    assert run.status == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout.splitlines()[-1]


def images_per_second(bench: Bench, example: str, folder: Path) -> str:
    """Measure the ConvNet with and without bf16, at two batch sizes."""
    if not LAUNCHERS[example].convnet:
        raise LeftOut("the row is for the ConvNet")
    texts = []
    for batch in (64, 512):
        for precision in ("fp32", "bf16"):
            words = f"--dataset synthetic --epochs 3 --precision {precision} --batch-size {batch}"
            shutil.rmtree(folder / "output", ignore_errors=True)
            bench.train(example, folder, words)
            texts.append(f"batch {batch}, {precision}: {speed(folder / 'output'):,.0f} images/s")
    return "; ".join(texts)


def large(bench: Bench, example: str, folder: Path) -> str:
    """Measure a size that fills a GPU."""
    if example not in LARGE or not bench.about["gpus"]:
        raise LeftOut("it needs a GPU" if example in LARGE else "there is no large size for it")
    words, units = LARGE[example]
    if "jpeg" in words:
        write_images(folder / "jpeg", 256 * 20 * bench.processes)
    command = ["nvidia-smi", "--query-gpu=memory.used,power.draw,utilization.gpu", "--format=csv,noheader,nounits"]
    with subprocess.Popen([*command, "--loop-ms=500"], stdout=subprocess.PIPE, text=True) as monitor:
        try:
            bench.train(example, folder, f"{words} --epochs 3")
        finally:
            monitor.terminate()
        samples = [list(map(float, re.findall(r"[\d.]+", line))) for line in monitor.stdout]
    rate = speed(folder / "output") * units
    text = f"{words}: {rate:,.0f} {'tokens' if units > 1 else 'images'}/s"
    peak = next((peak for name, peak in PEAKS.items() if name in bench.about["card"]), None)
    if example == "fsdp" and peak:
        text += f", {rate * GPT_FLOPS / 1e12 / peak / bench.processes:.1%} of the peak of {peak} TFLOP/s"
    used, watt, busy = zip(*([cells for cells in samples if len(cells) == 3] or [[0, 0, 0]]), strict=True)
    working = statistics.median([share for share in busy if share > 0] or [0])
    return f"{text}; {max(used):,.0f} MB, at most {max(watt):.0f} W, busy {working:.0f} %"


def write_images(folder: Path, count: int) -> None:
    """Write a folder of `count` JPEG files of 500 x 375 pixels, which are links to a few different ones."""
    import numpy as np
    from PIL import Image

    first, generator = [], np.random.default_rng(0)
    for index in range(count + 64):
        path = folder / ("train" if index < count else "val") / f"class{index % 8}" / f"{index:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if index >= 16:
            path.hardlink_to(first[index % 16])
            continue
        coarse = generator.integers(0, 256, (32, 42, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((500, 375)), dtype=np.int16)
        grained = smooth + generator.integers(-20, 20, (375, 500, 1), dtype=np.int16)
        Image.fromarray(np.clip(grained, 0, 255).astype(np.uint8)).save(path, quality=90)
        first.append(path)


ROWS: dict[str, Callable[[Bench, str, Path], str]] = {
    "default": default,
    "killed": killed,
    "bf16": bf16,
    "modes": modes,
    "verify": verify,
    "speed": images_per_second,
    "large": large,
}


def missing(example: str) -> str:
    """Return a package of requirements.txt that this Python lacks, or nothing."""
    text = (ROOT / "examples" / example / "requirements.txt").read_text()
    for name in re.findall(r"^[A-Za-z][\w.-]*", text, re.MULTILINE):
        try:
            version(name)
        except PackageNotFoundError:
            return name
    return ""


def measure(bench: Bench, row: str, example: str) -> None:
    """Fill one row, whatever goes wrong, and write the table."""
    start, share = time.monotonic(), 1 if row in TIMED or not set(TIMED) & set(bench.args.rows) else 0.6
    try:
        if bench.left(share) < 20:
            raise LeftOut("time was up")
        if name := missing(example):
            raise LeftOut(f"there is no {name} here")
        verdict, text = "ok", ROWS[row](bench, example, bench.copy(example, row))
    except LeftOut as why:
        verdict, text = "left out", str(why)
    except Exception as error:  # a fault of one row must not end the others
        (bench.args.output / f"{example}-{row}.log").write_text(f"{type(error).__name__}: {error}\n")
        verdict, text = "FAIL", " ".join(str(error).split())[:200]
    seconds = round(time.monotonic() - start)
    bench.rows.append({"example": example, "row": row, "verdict": verdict, "what": text, "s": seconds})
    print(f"{verdict:9} {example} {row}, {seconds} s: {text}", flush=True)
    report.write(sorted(bench.rows, key=lambda row: list(ROWS).index(row["row"])), bench.csv, bench.caption)


def look() -> dict[str, Any]:
    """Return what this machine has, as PyTorch and the driver say."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, check=True)
    driver = nvidia_smi("gpu=driver_version")
    return json.loads(done.stdout.splitlines()[-1]) | {"driver": driver[0][0] if driver else "none"}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.on_gpu", description=__doc__, formatter_class=layout)
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES, help="default: all")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
    parser.add_argument("--minutes", type=float, default=9, help="for all rows together (default: %(default)s)")
    parser.add_argument("--at-once", type=positive, help="examples at a time (default: one for 4 cores, at most 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program")
    parser.add_argument("--limit-steps", type=positive, help="of an epoch: to try this program; nothing has to learn")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "on_gpu", help="folder for what is written")
    args = parser.parse_args()
    args.at_once = args.at_once or max(1, min(4, cores() // 4))
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return args


def prepare(work: Path, example: str) -> None:
    """Copy an example, and make its data as its README says."""
    folder = copy_example(ROOT / "examples" / example, work / example)
    if command := LAUNCHERS[example].prepare:
        subprocess.run(command.split(), cwd=folder, capture_output=True, timeout=300)  # a run says what is missing


def main() -> None:
    """Measure the rows that were asked for."""
    args = parse_args()
    use_this_python()
    about = look()
    if args.device == "cuda" and not about["gpus"]:
        sys.exit("on_gpu.py: error: PyTorch finds no GPU here; --device cpu tries the program without one")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="on-gpu-", ignore_cleanup_errors=True) as work:
        bench = Bench(args, Path(work), about)

        def stop(*_: object) -> None:
            bench.stopped = True  # the rows that are left get a line
            for run in list(runs.STARTED):
                run.kill()

        signal.signal(signal.SIGTERM, stop)
        for example in args.examples:
            prepare(bench.work, example)
        tasks = [(row, example) for row in ROWS if row in args.rows for example in args.examples]
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda task: measure(bench, *task), [task for task in tasks if task[0] not in TIMED]))
        for task in [task for task in tasks if task[0] in TIMED]:
            measure(bench, *task)
    print(f"\n{bench.csv.with_suffix('.md').read_text()}\n{args.output}: on_gpu.md, on_gpu.csv, logs of what failed")
    sys.exit(any(row["verdict"] == "FAIL" for row in bench.rows))


if __name__ == "__main__":
    main()
