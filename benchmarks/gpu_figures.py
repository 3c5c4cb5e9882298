"""The figures that on_gpu.py measures: what is trained, with which words, and how its speed and cost are read.

A figure is a run of an example's own train.py, by its own launcher, for a few epochs. The rate of a figure, about what
an H100 reaches, only decides how long an epoch is; another card gets its share of the samples.
"""

import shutil
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_steps
from benchmarks.gpu_steps import FAILED, MEASURED, Done, LeftOut, Monitor, Row
from harness import outputs
from harness.launchers import EPOCH, LAUNCHERS, ROOT, copy_example

OWN = "measured_train.py"  # beside this file: train.py with batches in memory, or profiled
H100 = 989.4  # TFLOP/s in bf16, dense: what the rates below are for
# Dense bf16 TFLOP/s by what the name of a card has in it: the vendor's data sheets, without sparsity. First fit counts.
PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": H100,
    "H200": H100,
    "GH200": H100,
    "H800": H100,
    "B200": 2250,
    "B300": 2250,
    "A100": 312,
    "A800": 312,
    "A30": 165,
    "A40": 150,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
}

Sizes = Mapping[str, Any]
FULL: dict[str, Sizes] = {
    "fsdp": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304, "batch": 32},
    "vision": {"model": "resnet50", "image_size": 224, "batch": 256, "files": 4096, "pixels": (500, 375)},
    "lora": {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocabulary": 32000}
    | {"context": 1024, "rank": 16, "batch": 8},
    "small": {"batch": 4096, "images": 400_000},
}
TINY: dict[str, Sizes] = {  # every flag and every line, in seconds on two cores; the figures say nothing
    "fsdp": {"layers": 2, "width": 64, "heads": 2, "context": 32, "vocabulary": 512, "batch": 2},
    "vision": {"model": "resnet18", "image_size": 32, "batch": 4, "files": 16, "pixels": (60, 45)},
    "lora": {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 512}
    | {"context": 32, "rank": 4, "batch": 2},
    "small": {"batch": 64, "images": 256},
}


@dataclass(frozen=True)
class Figure:
    """A row of the table that is measured by a run of an example."""

    name: str
    group: str  # of sizes, and what --only may name
    example: str
    unit: str
    rate: float  # units a second of an H100, about
    words: str = ""  # of train.py, beside those of the group
    memory: bool = False  # batches that were decoded beforehand and lie in memory
    batch: int | None = None  # another one than that of the group
    epochs: int = 4  # the first does not count
    limit: float = 75
    needs: float = 30

    @property
    def variant(self) -> str:
        """Its precision, and what else decides which public script stands beside it."""
        words = self.words.split()
        return words[words.index("--precision") + 1] + " --compile" * ("--compile" in words)

    @property
    def slug(self) -> str:
        """Its name as that of a log."""
        return "-".join("".join(letter if letter.isalnum() or letter == "_" else " " for letter in self.name).split())


GPT, RESNET, LLAMA = "fsdp GPT 124M", "vision ResNet-50", "lora Llama 1B"
SMALL = ("ddp_spawn", "torchrun_multinode", "lightning", "deepspeed", "accelerate")
IMAGES: dict[str, Any] = {"group": "vision", "example": "torchrun_vision", "unit": "images/s"}
TOKENS: dict[str, Any] = {"group": "fsdp", "example": "fsdp", "unit": "tokens/s"}
ADAPTERS: dict[str, Any] = {"group": "lora", "example": "lora", "unit": "tokens/s"}
COMPILING: dict[str, Any] = {"limit": 100, "needs": 60}  # it takes a while until the first step
FIGURES = (  # in the order of their worth
    # With 32 an H100 is faster than Python can tell it what to do; without --compile 64 would not fit into 80 GB.
    Figure(
        f"{GPT} bf16 --compile",
        **TOKENS,
        rate=480_000,
        words="--precision bf16 --compile",
        batch=64,
        epochs=3,
        **COMPILING,
    ),
    Figure(f"{RESNET} memory bf16", **IMAGES, rate=3_800, words="--precision bf16", memory=True),
    Figure(f"{RESNET} JPEG bf16", **IMAGES, rate=6_000, words="--precision bf16", epochs=3),  # workers fill up first
    Figure(f"{LLAMA} LoRA bf16", **ADAPTERS, rate=40_000, words="--precision bf16 --lora-rank {rank}"),
    Figure(
        f"{RESNET} memory bf16 --compile",
        **IMAGES,
        rate=4_000,
        words="--precision bf16 --compile",
        memory=True,
        **COMPILING,
    ),
    Figure(f"{GPT} bf16", **TOKENS, rate=250_000, words="--precision bf16"),
    Figure(f"{RESNET} memory fp32", **IMAGES, rate=1_100, words="--precision fp32", memory=True),
    # Its checkpoint has 13 GB, so that there are fewer of them.
    Figure(f"{LLAMA} --full bf16", **ADAPTERS, rate=25_000, words="--precision bf16 --full", epochs=2, limit=90),
    Figure(f"{RESNET} JPEG bf16 --compile", **IMAGES, rate=3_000, words="--precision bf16 --compile", **COMPILING),
    Figure(f"{RESNET} JPEG fp32", **IMAGES, rate=1_100, words="--precision fp32"),
    *(
        Figure(f"{name} ConvNet bf16", "small", name, "images/s", 400_000, "--precision bf16", epochs=8, limit=45)
        for name in SMALL
    ),
)
GROUP_WORDS = {
    "fsdp": "--layers {layers} --width {width} --heads {heads} --context {context} --batch-size {batch} "
    "--tokens {tokens} --vocabulary {vocabulary} --lr 3e-4",
    "vision": "--data-dir {images} --model {model} --image-size {image_size} --batch-size {batch}",
    "lora": "--model-dir {model_dir} --text-file {text} --context {context} --batch-size {batch} --lr 1e-4",
    "small": "--dataset mnist --data-dir {data} --batch-size {batch}",
}
# What --only may name beside the groups of figures; `scripts` are the public ones, each after the figure beside it.
EPOCH_WORD = {"tokens/s": "tokens_per_second", "images/s": "samples_per_second"}


@dataclass
class Bench:
    """Where and how all figures of one run are measured."""

    out: Path  # for results and logs
    work: Path  # temporary, for data and checkpoints: in memory, if there is enough
    programs: Path  # temporary, for what is executed, which some systems forbid for what is in memory
    sizes: Mapping[str, Sizes]
    seconds: float  # of an epoch, about
    tiny: bool
    peak: float | None  # dense bf16 TFLOP/s of a GPU, if it is known
    gpus: int  # 0: on the CPU
    processes: int
    variables: dict[str, str]
    cores: int
    sources: Path | None = None
    missing: dict[str, str] = field(default_factory=dict)  # package: why it is not there
    made: dict[str, Any] = field(default_factory=dict)  # what gpu_data.py has said of the data
    found: dict[str, Any] = field(default_factory=dict)  # about this machine
    groups: set[str] = field(default_factory=set)  # of all steps that are to be run
    reached: dict[str, Row] = field(default_factory=dict)  # rows of figures, by their names

    def steps(self, figure: Figure) -> int:
        """Return the optimizer steps of an epoch."""
        if self.tiny:
            return 2
        of_a_step = self.batch(figure) * self.sizes[figure.group].get("context", 1)
        return max(4, round(figure.rate * (self.peak or H100) / H100 * self.seconds / of_a_step))

    def batch(self, figure: Figure) -> int:
        """Return the samples of a batch of each process."""
        return (not self.tiny and figure.batch) or self.sizes[figure.group]["batch"]

    def data(self, figure: Figure, steps: int | None = None) -> dict[str, Any]:
        """Return the names that the words of a figure may use; make what it reads in `steps` steps an epoch."""
        sizes = {**self.sizes[figure.group], "batch": self.batch(figure)}
        steps = steps or self.steps(figure)
        samples = steps * sizes["batch"] * self.processes
        if figure.group == "fsdp":  # the last tenth is for the test
            tokens = samples * sizes["context"] + 1
            sizes["tokens"] = max(-(-tokens * 10 // 9) + 1, tokens + sizes["context"] + 1)
        elif figure.group == "vision":
            sizes["images"] = link_images(self.work / "jpeg", self.work / f"images-{samples}", samples)
        elif figure.group == "lora":
            sizes |= {"model_dir": self.work / "model", "text": self.write_text(samples, sizes["context"])}
        else:
            sizes["data"] = self.work / "data"
        return sizes

    def write_text(self, samples: int, context: int) -> Path:
        """Write a text that has so many samples for training, and a tenth more."""
        path = self.work / f"text-{samples}.txt"
        text = (ROOT / "examples" / "lora" / "text.txt").read_text()
        length = (samples * 10 // 9 + 2) * context * len(text) // self.made["tokens"]
        path.write_text((text * (length // len(text) + 1))[:length])
        return path

    def epochs(self, figure: Figure) -> int:
        """Return how many epochs it trains; the first does not count."""
        return 2 if self.tiny else figure.epochs

    def command(
        self, figure: Figure, script: str = "train.py", steps: int | None = None, epochs: int | None = None
    ) -> list[str]:
        """Return the command that a user would type, as words; without `steps` and `epochs` it has those to measure."""
        words = f"{GROUP_WORDS[figure.group]} {figure.words} --epochs {{epochs}}"
        launcher = LAUNCHERS[figure.example].command(self.processes)
        given = words.format(**self.data(figure, steps), epochs=epochs or self.epochs(figure)).split()
        return [script if word == "train.py" else word for word in launcher] + given

    def why_not(self, figure: Figure) -> str:
        """Return why a figure cannot be measured here, or nothing."""
        if reason := self.missing.get(figure.example):
            return reason
        text = (ROOT / "examples" / figure.example / "train.py").read_text()
        words = f"{GROUP_WORDS[figure.group]} {figure.words}".split()
        lacking = [word for word in words if word in NEWER and f'"{word}"' not in text]
        if lacking:
            return f"train.py of {figure.example} has no {' and no '.join(lacking)}"
        return self.why_no_script(figure)

    def why_no_script(self, figure: Figure) -> str:
        """Return why a public script cannot run here with what a figure trains with, or nothing."""
        needed = {"vision": "jpeg", "lora": "model", "small": "data"}.get(figure.group)
        if needed and not (self.work / needed).exists():
            return f"its data were not made: see the row prepare ({needed})"
        return ""


NEWER = ("--compile", "--vocabulary")  # flags that an older train.py does not have


def link_images(distinct: Path, folder: Path, count: int) -> Path:
    """Return a folder with `count` images for training, in classes, that are links to fewer distinct files."""
    if folder.exists():
        return folder
    files = sorted(distinct.glob("*.jpg"))
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    for kind, number in (("train", count), ("val", min(len(files), 64))):
        for index in range(number):
            path = part / kind / f"class{index % 8}" / f"{index:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(files[index % len(files)])
    part.rename(folder)
    return folder


def measure(bench: Bench, figure: Figure, limit: float) -> list[Row]:
    """Run a figure within its limit; return its row."""
    if reason := bench.why_not(figure):
        raise LeftOut(reason)
    folder = copy_example(ROOT / "examples" / figure.example, bench.work / "runs" / figure.slug)
    script = "train.py"
    variables = dict(bench.variables)
    if figure.memory:
        script = OWN
        shutil.copy(Path(__file__).with_name(OWN), folder)
        variables["BATCHES_IN_MEMORY"] = "4"
    command = bench.command(figure, script)
    with Monitor() as monitor:
        done = gpu_steps.run(command, folder, bench.out / f"{figure.slug}.log", limit, variables)
    row = {"step": figure.slug, "name": figure.name, "command": " ".join(command), "unit": figure.unit}
    try:
        bench.reached[figure.name] = row | read(bench, figure, folder / "output", done, monitor)
        return [bench.reached[figure.name]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(bench: Bench, figure: Figure, output: Path, done: Done, monitor: Monitor) -> Row:
    """Return what a run has measured: its speed, memory, power, and the share of the card's peak."""
    rows = outputs.read_metrics(output) if (output / "metrics.csv").exists() else []
    values = [row[EPOCH_WORD[figure.unit]] for row in rows[1:]]
    if not values or (done.status != 0 and not done.over):
        return {"state": FAILED, "reason": done.why()}
    if done.over and len(rows) < bench.epochs(figure):
        remark = f"ended at its limit after {len(rows)} of {bench.epochs(figure)} epochs"
    else:
        remark = ""
    value = statistics.median(values)
    found: Row = {"state": MEASURED, "value": value, "values": values, "remark": remark}
    found["seconds"] = round(sum(row["seconds"] for row in rows[1:]), 1)
    found["batch"] = bench.batch(figure)
    start, *_, end = epoch_ends(done, len(rows)) or [0, time.monotonic()]
    found |= monitor.medians(start, end)
    run = outputs.read_run(output)
    if run["stops"] and run["stops"][-1].get("used"):
        found["torch_mb"] = max(used["gpu_mb"] for used in run["stops"][-1]["used"])
        found["ram_mb"] = max(used["mb"] for used in run["stops"][-1]["used"])
    weights = run["starts"][-1].get("model", {}).get("weights")
    if weights:
        found["weights"] = weights
    if figure.group == "fsdp" and weights and bench.peak and bench.gpus:
        flops = flops_of_a_token(weights, bench.sizes["fsdp"]) * value
        found["peak_share"] = round(flops / 1e12 / bench.peak / bench.gpus, 4)
    return found


def flops_of_a_token(weights: int, sizes: Sizes) -> float:
    """Return the operations for training with one token (PaLM, appendix B): 6 N, and those of the attention.

    N are the weights without the table of positions, which nothing is multiplied with.
    """
    attention = 12 * sizes["layers"] * sizes["width"] * sizes["context"]
    return 6 * (weights - sizes["context"] * sizes["width"]) + attention


def epoch_ends(done: Done, epochs: int) -> list[float]:
    """Return the moments at which the lines of the epochs came, or nothing if one of them is missing."""
    found = []
    for number in range(1, epochs + 1):
        begins = EPOCH.format(number)
        found += [moment for moment, line in done.lines if line.startswith(begins)][:1]
    return found if len(found) == epochs and epochs > 1 else []
