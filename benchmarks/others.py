"""Run public programs of others beside our examples, as they stand. From the repository's root:

    python -m benchmarks.others                      # fetches each repository once, into results/sources
    python -m benchmarks.others --sources FOLDER     # without internet: FOLDER has clones: OWNER+NAME[/repo]
    python -m benchmarks.others --only csc pytorch   # some of the programs, with the examples beside them

Each program is the file of a commit, unchanged. An adapter here, which imports it, exchanges what a user exchanges
first: data, model, optimizer and batch size, so that both programs do the same work (random 28x28 images in MNIST's
files, the ConvNet, AdamW, batch 64 per process, fp32; for nanoGPT a small GPT on random tokens). Without GPUs,
`pretend` lets calls for CUDA and NCCL take the CPU and Gloo. All else is as published: how data are read and
transformed, loader workers, `loss.item()`, logging.

Speed is that of all processes in the training part of an epoch, the median of all epochs but the first: of ours by
metrics.csv, of theirs from the begin of the loader's iteration to the epoch's last optimizer step, by public hooks of
PyTorch. Memory is the most that one process had resident. In each round ours and theirs run in turn; a ratio is the
median of the rounds. others.csv and others.md, the table, are written to the folder --output. The environment needs the
requirements of the examples that are measured, and torchvision; a program that cannot run here is a line of the table.
"""

import argparse
import json
import os
import pickle
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
BATCH, EPOCHS = 64, "OTHERS_EPOCHS"  # samples per batch of each process; the variable with the number of epochs
NAME, FILE, EVENTS, ON_CPU = "OTHERS_NAME", "OTHERS_FILE", "OTHERS_EVENTS", "OTHERS_ON_CPU"  # variables, too
SECONDS = 3600  # that one run may take
GPT = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 64, "batch_size": 8}
# Runs a command and prints the most memory that one of its processes had.
PEAK = """import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("peak:", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "kB")
sys.exit(status)"""


# The adapters run in the processes of a program. Each gets `load`, which imports the file, and starts the program.


def our_model() -> Any:
    """Return our ConvNet."""
    from common.models import ConvNet

    return ConvNet()


def mnist(train: bool = True) -> Any:
    """Return the images as torchvision reads them, each a tensor and a label."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    return MNIST("data", train, ToTensor())


def use_adamw() -> None:
    """Have AdamW take the place of the optimizers of torch.optim that the programs use."""
    import torch

    optim: Any = torch.optim
    optim.SGD = optim.Adam = lambda params, *_, **__: optim.AdamW(params, lr=1e-3)


def csc(load: Callable[[], Any]) -> None:
    """Run CSC's example of DDP."""
    program = load()
    program.ConvNet = our_model
    loader = program.DataLoader
    program.DataLoader = lambda *words, **named: loader(*words, **{**named, "batch_size": BATCH})
    use_adamw()
    program.train(int(os.environ[EPOCHS]))


def csc_lightning(load: Callable[[], Any]) -> None:
    """Run CSC's example of Lightning; its log by MLflow is left out."""
    import torch

    sys.modules["mlflow"] = MagicMock()
    program = load()
    their_net: Any = program.LitConvNet

    class OurNet(their_net):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2, self.fc = our_model(), torch.nn.Identity(), torch.nn.Identity()

    program.LitConvNet = OurNet
    loader, trainer = program.DataLoader, program.L.Trainer
    program.DataLoader = lambda *words, **named: loader(*words, **{**named, "batch_size": BATCH})
    if os.environ.get(ON_CPU):
        program.L.Trainer = lambda **named: trainer(**{**named, "accelerator": "cpu"})
    use_adamw()
    program.main()


def pytorch(load: Callable[[], Any]) -> None:
    """Run the last part of PyTorch's tutorial on DDP: its data set is in memory, so the images are, too."""
    import torch

    program, model, epochs = load(), our_model(), int(os.environ[EPOCHS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program.load_train_objs = lambda: (list(mnist()), model, optimizer)
    program.main(epochs, epochs, BATCH)


def accelerate(load: Callable[[], Any]) -> None:
    """Run accelerate's example of vision: it reads images by the names of files, and trains a model of timm."""
    import torch

    images = mnist()
    model = our_model()
    model.get_classifier, model.default_cfg = lambda: model, {"mean": [0.1307], "std": [0.3081]}
    sys.modules["timm"] = MagicMock(create_model=lambda *_, **__: model)
    program = load()

    class Pets(torch.utils.data.Dataset):
        def __init__(self, file_names: list[str], image_transform: Any, label_to_id: dict[str, int]) -> None:
            self.numbers = [int(re.findall(r"\d+", name)[-1]) for name in file_names]
            self.transform = image_transform

        def __len__(self) -> int:
            return len(self.numbers)

        def __getitem__(self, index: int) -> dict[str, Any]:
            image = program.PIL.Image.fromarray(images.data[self.numbers[index]].numpy())
            return {"image": self.transform(image), "label": int(images.targets[self.numbers[index]])}

    program.PetsDataset = Pets
    Path("pets").mkdir(exist_ok=True)
    for number in range(len(images)):
        Path("pets", f"{int(images.targets[number])}_{number}.jpg").touch()
    use_adamw()
    settings = {"lr": 1e-3, "num_epochs": int(os.environ[EPOCHS]), "seed": 0, "batch_size": BATCH, "image_size": 28}
    cpu = bool(os.environ.get(ON_CPU))
    program.training_function(settings, Namespace(cpu=cpu, mixed_precision="no", data_dir="pets"))


def nanogpt(load: Callable[[], Any]) -> None:
    """Run nanoGPT: it reads random tokens, and takes all that our GPT has from its command line."""
    data = Path("data", "random")
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(struct.pack("<20000H", *random.Random(0).choices(range(256), k=20_000)))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    load()


@dataclass(frozen=True)
class Program:
    """A public program: where it is, how it is started, and which of our examples stands beside it."""

    repository: str  # on GitHub
    commit: str
    file: str
    adapt: Callable[[Callable[[], Any]], None]
    ours: str
    # {n}: number of processes; {run}: this file, which takes the program's arguments
    command: str = "torchrun --standalone --nproc-per-node={n} {run}"
    words: str = "--dataset=mnist --data-dir=../data --batch-size=64"  # of our train.py
    processes: int | None = None  # if not those of the command line


PYTORCH_DDP = "distributed/ddp-tutorial-series/multigpu_torchrun.py"
NANOGPT = "python {run} --dataset=random --device={device} --dtype=float32 --compile=False --bias=True --dropout=0.0 "
NANOGPT += "--gradient_accumulation_steps=1 --grad_clip=0.0 --max_iters=60 --log_interval=10 --eval_interval=1000 "
NANOGPT += "--eval_iters=0 " + " ".join(f"--{name}={value}" for name, value in GPT.items())
OUR_GPT = "--layers=4 --heads=4 --width=256 --context=64 --batch-size=8 --tokens=20000"
PROGRAMS = {
    "csc": Program(
        "CSCfi/pytorch-ddp-examples", "4467e84197ea364e4b4629e96f78e19e3c3a5907", "mnist_ddp.py", csc, "ddp_spawn"
    ),
    "csc_lightning": Program(
        "CSCfi/pytorch-ddp-examples",
        "4467e84197ea364e4b4629e96f78e19e3c3a5907",
        "mnist_lightning_ddp.py",
        csc_lightning,
        "lightning",
        "python {run} --gpus={n} --epochs={epochs}",
    ),
    "pytorch": Program(
        "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", PYTORCH_DDP, pytorch, "torchrun_multinode"
    ),
    "accelerate": Program(
        "huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        "examples/cv_example.py",
        accelerate,
        "accelerate",
    ),
    "nanogpt": Program(
        "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "train.py", nanogpt, "fsdp", NANOGPT, OUR_GPT, 1
    ),
}


# In a process of a program: this file was started as the program, with its arguments.


def pretend() -> None:
    """Let calls for GPUs take the CPU, and NCCL Gloo."""
    import torch

    cuda: Any = torch.cuda
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    kinds: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)

    def on_cpu(method: Any) -> Any:
        def to(self: Any, *words: Any, **named: Any) -> Any:
            first = words[0] if words else named.get("device")
            return self if isinstance(first, int) or "cuda" in str(first) else method(self, *words, **named)

        return to

    for kind in kinds:
        kind.to = on_cpu(kind.to)
        kind.cuda = lambda self, *_, **__: self
    join, init = torch.distributed.init_process_group, ddp.__init__
    cuda.set_device = lambda _: None
    torch.distributed.init_process_group = lambda *_, **named: join(**{**named, "backend": "gloo"})
    ddp.__init__ = lambda self, module, *_, **__: init(self, module)


def inner() -> None:
    """Run a program with its adapter, and write when it began to iterate a loader, and when it made a step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    path, events = Path(os.environ[FILE]), []
    if os.environ.get(ON_CPU):
        pretend()
    loader: Any = torch.utils.data.DataLoader
    iterate = loader.__iter__

    def noted(self: Any) -> Any:
        events.append((time.perf_counter(), id(self)))
        return iterate(self)

    loader.__iter__ = noted
    register_optimizer_step_post_hook(lambda *_: events.append((time.perf_counter(), 0)))
    sys.path.insert(0, str(path.parent))

    def load() -> ModuleType:
        program = ModuleType("program")
        program.__file__ = str(path)
        if PROGRAMS[os.environ[NAME]].adapt is nanogpt:
            program.__name__ = "__main__"  # a script without functions
        sys.modules["program"] = program  # in which pickle looks for the program's classes
        exec(compile(path.read_text(), path, "exec"), vars(program))
        return program

    PROGRAMS[os.environ[NAME]].adapt(load)
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        Path(os.environ[EVENTS]).write_text(json.dumps(events))
    os._exit(0)  # Gloo can abort a process while Python shuts down


def epochs_of(events: list[tuple[float, int]]) -> list[float]:
    """Return the steps per second of each epoch; without a loader, of each third of the steps.

    The loader that was iterated last before the first step is the one for training.
    """
    steps = [when for when, loader in events if not loader]
    before = [loader for when, loader in events if loader and when < steps[0]]
    if not before:
        third = len(steps) // 3
        return [third / (steps[end] - steps[end - third]) for end in (third, 2 * third, 3 * third - 1)]
    starts = [when for when, loader in events if loader == before[-1]]
    found = []
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        if within := [when for when in steps if start < when < end]:  # none: only one batch was looked at
            found.append(len(within) / (within[-1] - start))
    return found


# The runner.


def clone(program: Program, sources: Path | None) -> Path:
    """Return a folder of git that has the program's commit; fetch it if there are no sources. Raise LookupError."""
    place = (sources or ROOT / "results" / "sources") / program.repository.replace("/", "+")
    for folder in (place, place / "repo"):
        words = ["git", "-C", str(folder), "cat-file", "-e", f"{program.commit}^{{commit}}"]
        if folder.is_dir() and not subprocess.run(words, capture_output=True).returncode:
            return folder
    if sources:
        raise LookupError(f"{place} is no clone with commit {program.commit[:12]}")
    subprocess.run(["git", "init", "-q", "--bare", place], check=True)
    words = [
        "git",
        "-C",
        str(place),
        "fetch",
        "-q",
        "--depth=1",
        f"https://github.com/{program.repository}",
        program.commit,
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LookupError(f"cannot fetch {program.repository}: {' '.join(done.stderr.split())}; see --sources")
    return place


def write_images(folder: Path, images: int) -> None:
    """Write random 28x28 images as MNIST's files, with a sixth as many for the test."""
    raw, generator = folder / "MNIST" / "raw", random.Random(0)
    raw.mkdir(parents=True)
    for part, size in (("train", images), ("t10k", images // 6)):
        header = struct.pack(">IIII", 0x803, size, 28, 28)  # the idx format: bytes in three dimensions
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + generator.randbytes(size * 28 * 28))
        labels = bytes(generator.choices(range(10), k=size))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels)


def measured(command: list[str], folder: Path, args: Namespace, name: str, variables: dict[str, str]) -> float:
    """Run a command to its end; return the MB of its largest process. Raise LookupError if it fails."""
    from harness.processes import finish

    variables |= {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.processes))}
    done = finish([sys.executable, "-c", PEAK, *command], SECONDS, cwd=folder, env=os.environ | variables)
    if done.returncode:
        (args.output / f"others-{name}.log").write_text(done.stdout + done.stderr)
        lines = [line.strip() for line in done.stderr.splitlines() if re.search(r"\w*(Error|error): ", line)]
        raise LookupError(f"failed: {(lines or ['see its log'])[-1][:150]} (others-{name}.log)")
    return int(re.findall(r"^peak: (\d+) kB$", done.stdout, re.MULTILINE)[-1]) / 1e3


def theirs(name: str, source: Path, folder: Path, args: Namespace) -> tuple[float, float]:
    """Run a public program; return its samples per second, and the MB of its largest process."""
    program = PROGRAMS[name]
    n = program.processes or args.processes
    part = str(Path(program.file).parent)
    words = ["git", "-C", str(source), "archive", program.commit, *([part] if part != "." else [])]
    archive = subprocess.run(words, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    variables = {NAME: name, FILE: str(folder / program.file), EVENTS: str(folder / "events.json")}
    variables |= {EPOCHS: str(args.epochs), "PYTHONPATH": str(ROOT)}
    if args.device == "cpu":
        variables |= {ON_CPU: "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = program.command.format(n=n, run=Path(__file__).resolve(), epochs=args.epochs, device=args.device)
    memory = measured(command.split(), folder, args, name, variables)
    rates = epochs_of(json.loads((folder / "events.json").read_text()))
    batch = GPT["batch_size"] if program.adapt is nanogpt else BATCH
    return statistics.median(rates[1:]) * batch * n, memory


def ours(name: str, folder: Path, args: Namespace) -> tuple[float, float]:
    """Run the example beside a public program; return its samples per second, and the MB of its largest process."""
    from benchmarks.measure import speed
    from harness.launchers import LAUNCHERS, copy_example

    program = PROGRAMS[name]
    example = copy_example(ROOT / "examples" / program.ours, folder / program.ours)
    command = [*LAUNCHERS[program.ours].command(program.processes or args.processes), *program.words.split()]
    variables = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    memory = measured([*command, f"--epochs={args.epochs}"], example, args, program.ours, variables)
    return speed(example / "output"), memory


def main() -> None:
    """Read the command line, and measure."""
    from benchmarks import report
    from benchmarks.measure import machine, positive, use_this_python

    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.others", description=__doc__, formatter_class=layout)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="of clones; default: fetch from GitHub")
    device = "cuda" if shutil.which("nvidia-smi") else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    parser.add_argument("--processes", type=positive, default=2, help="on GPUs at most as many as there are GPUs")
    parser.add_argument("--images", type=positive, default=6000, help="for training")
    parser.add_argument("--epochs", type=lambda text: positive(text, 2), default=3, help="the first does not count")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    use_this_python()
    args.output.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="others-") as temporary:
        write_images(Path(temporary, "data"), args.images)
        for number in range(args.rounds):
            for name in args.only:
                folder = Path(temporary, f"{name}-{number}")
                folder.mkdir()
                (folder / "data").symlink_to("../data")
                (folder / "MNIST").symlink_to("../data/MNIST")
                run: dict[str, Any] = {"program": name, "round": number}
                try:
                    run["theirs"], run["MB"] = theirs(name, clone(PROGRAMS[name], args.sources), folder, args)
                    run["ours"], run["MB of ours"] = ours(name, folder, args)
                except (LookupError, subprocess.TimeoutExpired) as why:
                    run["remark"] = str(why)
                shutil.rmtree(folder)
                runs.append(run)
                print(run, flush=True)
                table = [summary(name, runs) for name in args.only]
                report.write(runs, args.output / "others.csv", machine(), table)
    print(report.table(table))


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the table for a program: medians of the rounds in which both ended well."""
    from benchmarks import report

    program = PROGRAMS[name]
    row: dict[str, Any] = {"program": f"{program.repository}@{program.commit[:7]}: {Path(program.file).name}"}
    row["beside"] = program.ours
    rounds = [run for run in runs if run["program"] == name and "ours" in run]
    if rounds:
        row |= {key: statistics.median(run[key] for run in rounds) for key in ("theirs", "ours", "MB", "MB of ours")}
        row["ours / theirs"] = report.spread([run["ours"] / run["theirs"] for run in rounds])
    return row | {"remark": next((run["remark"] for run in runs if run["program"] == name and "remark" in run), "")}


if __name__ == "__main__":
    if NAME in os.environ:
        inner()
    else:
        main()
