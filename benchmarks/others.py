"""Check public programs of others with verify/, and measure their speed beside ours. From the repository's root:

    python -m benchmarks.others verify     # rows of verify, of all programs and of one of ours; an hour on 2 cores
    python -m benchmarks.others speed      # samples per second and memory, in turn with our examples
    python -m benchmarks.others verify --only csc pytorch --sources FOLDER   # FOLDER has clones: OWNER+NAME[/repo]

Without --sources, each repository is fetched once into results/sources. Each program is the file of a commit,
unchanged. An adapter here, which imports it, exchanges what a user exchanges first: data, model, optimizer and batch
size, so that the programs do the same work (random 28x28 images in MNIST's files, the ConvNet, AdamW, fp32; for the
language models random tokens). Each starts with the seed 0. Without GPUs, `pretend` lets calls for CUDA and NCCL take
the CPU and Gloo. All else is as published: how data are read, loader workers, `loss.item()`, logging, checkpoints.

verify: an epoch has some 8 steps of 48 samples. metrics.csv has the figures that the program reports, model.pt the
weights that its optimizer trains. "not offered": the program has no such feature.

speed: of all processes in the training part of an epoch, the median of all epochs but the first: of ours by
metrics.csv, of theirs from the begin of the loader's iteration to the epoch's last optimizer step, by public hooks of
PyTorch. Memory is the most that one process had resident. In each round ours and theirs run in turn; a ratio is the
median of the rounds.

others-*.csv and others-*.md, the table, are written to the folder --output. The environment needs the requirements of
all examples but Horovod's, torchmetrics and rich; a program that cannot run here is a line of the table.
"""

import argparse
import contextlib
import csv
import json
import os
import pickle
import random
import re
import shlex
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
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

ROOT = Path(__file__).resolve().parent.parent
BATCH = 64  # samples per batch of each process, for speed
NAME, FILE, ON_CPU = "OTHERS_NAME", "OTHERS_FILE", "OTHERS_ON_CPU"  # variables of a program's processes
SECONDS = 3600  # that one run may take
GPT = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 64}
# Runs a command and prints the most memory that one of its processes had.
PEAK = """import resource, subprocess, sys
status = subprocess.call(sys.argv[1:])
print("peak:", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "kB")
sys.exit(status)"""


# The adapters run in the processes of a program. Each gets `load`, which imports the file, and the arguments of
# `inner`, and starts the program.


def our_model() -> Any:
    """Return our ConvNet."""
    from common.models import ConvNet

    return ConvNet()


def mnist(train: bool = True, **_: Any) -> Any:
    """Return the images as torchvision reads them, each a tensor and a label; ignore arguments of other data sets."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    return MNIST("data", train, ToTensor())


def use_adamw() -> None:
    """Have AdamW take the place of the optimizers of torch.optim that the programs use."""
    import torch

    optim: Any = torch.optim
    optim.SGD = optim.Adam = optim.Adadelta = lambda params, *_, **__: optim.AdamW(params, lr=1e-3)


def use_batch(batch: int) -> None:
    """Have each DataLoader that is given a batch size use this one."""
    import torch

    loader: Any = torch.utils.data.DataLoader
    init = loader.__init__
    loader.__init__ = lambda self, *words, **named: init(
        self, *words, **(named | ({"batch_size": batch} if "batch_size" in named else {}))
    )


def tell(**values: float) -> None:
    """Append figures that a program reports to metrics.csv, on rank 0."""
    if os.environ["RANK"] == "0" or PROGRAMS[os.environ[NAME]].single:
        new = not Path("metrics.csv").exists()
        with open("metrics.csv", "a", newline="") as file:
            writer = csv.DictWriter(file, values)
            if new:
                writer.writeheader()
            writer.writerow(values)


def printed(program: Any, pattern: str, column: str) -> None:
    """Report the figure in each line that a program prints, if it has one."""

    def catch(*words: Any, **_: Any) -> None:
        for figure in re.findall(pattern, " ".join(map(str, words))):
            tell(**{column: float(figure)})

    program.print = catch


def csc(load: Callable[[], Any], args: Namespace) -> None:
    """Run CSC's example of DDP."""
    program = load()
    program.ConvNet = our_model
    printed(program, r"average loss: ([\d.]+)", "train_loss")
    use_adamw()
    use_batch(args.batch)
    program.train(args.epochs)


def mila(load: Callable[[], Any], args: Namespace) -> None:
    """Run Mila's example of several nodes, or of checkpoints: CIFAR-10 and a ResNet-18, which are exchanged."""
    for name, variable in (("PROCID", "RANK"), ("LOCALID", "LOCAL_RANK"), ("NTASKS", "WORLD_SIZE")):
        os.environ[f"SLURM_{name}"] = os.environ.get(variable, "")
    os.environ |= {"SCRATCH": ".", "SLURM_TMPDIR": ".", "SLURM_JOBID": "1", "SLURM_CPUS_PER_TASK": "1"}
    program = load()
    program.CIFAR10, program.resnet18 = mnist, lambda **_: our_model()
    validate = program.validation_loop

    def reported(*words: Any) -> Any:
        loss, accuracy = validate(*words)
        tell(test_loss=float(loss), test_accuracy=float(accuracy))
        return loss, accuracy

    program.validation_loop = reported
    sys.argv += ["--epochs", str(args.epochs), "--batch-size", str(args.batch)]
    program.main()


def pytorch(load: Callable[[], Any], args: Namespace) -> None:
    """Run the last part of PyTorch's tutorial on DDP: its data set is in memory, so the images are, too."""
    import torch

    program, model = load(), our_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program.load_train_objs = lambda: (list(mnist()), model, optimizer)
    program.main(1, args.epochs, args.batch)


def guide(load: Callable[[], Any], args: Namespace) -> None:
    """Run `train` of the guide to mp.spawn; torchrun has started the processes. Apex is imported, but not used."""
    sys.modules |= {"apex": MagicMock(), "apex.parallel": MagicMock()}
    program = load()
    program.ConvNet = our_model
    use_adamw()
    use_batch(args.batch)
    world = int(os.environ["WORLD_SIZE"])
    program.train(int(os.environ["RANK"]), Namespace(nr=0, gpus=world, world_size=world, epochs=args.epochs))


def chapter(load: Callable[[], Any], args: Namespace) -> None:
    """Run Lambda's chapter on DDP, with a small Llama on random tokens, not compiled."""
    import torch
    from transformers import LlamaConfig

    program = load()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    program.AutoConfig = MagicMock(from_pretrained=lambda *_, **__: LlamaConfig(vocab_size=256, **sizes))
    program.torch.compile = lambda model: model
    program.get_mem_stats = lambda *_: {"curr_alloc_gb": 0}
    tokens = torch.randint(256, (384, 32), generator=torch.Generator().manual_seed(0))
    program._load_and_preprocess_data = lambda *_: [{"input_ids": row, "labels": row} for row in tokens]
    info = program.LOGGER.info
    program.LOGGER.info = lambda line: tell(train_loss=line["running_loss"]) if isinstance(line, dict) else info(line)
    sys.argv += shlex.split("-e experiment --save-dir . -d random -m llama --log-freq 8 --ckpt-freq 8 --lr 1e-3")
    sys.argv += ["--num-epochs", str(args.epochs), "-b", str(args.batch)]
    program.main()


def nanogpt(load: Callable[[], Any], args: Namespace) -> None:
    """Run nanoGPT: it reads random tokens, and takes all that our GPT has from its command line."""
    world, steps = int(os.environ["WORLD_SIZE"]), args.epochs * (20 if args.speed else 8)
    shutil.copy(Path(os.environ[FILE]).with_name("configurator.py"), ".")
    data = Path("data", "random")
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(struct.pack("<20000H", *random.Random(0).choices(range(256), k=20_000)))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    words = {"dataset": "random", "out_dir": ".", "dtype": "float32", "compile": False, "bias": True, "dropout": 0.0}
    words |= {"gradient_accumulation_steps": world, "batch_size": args.batch, "grad_clip": 0.0, "max_iters": steps}
    words |= {"eval_interval": 1000 if args.speed else 8, "eval_iters": 1, "log_interval": 10, **GPT}
    words |= {"init_from": "resume" if args.resume else "scratch", "device": "cpu" if world == 1 else "cuda"}
    sys.argv += [f"--{name}={value}" for name, value in words.items()]
    load()


def accelerate(load: Callable[[], Any], args: Namespace) -> None:
    """Run accelerate's example of language, with a small BERT on random words."""
    import torch
    from datasets import Dataset, DatasetDict
    from transformers import BertConfig, BertForSequenceClassification

    metric, pairs = SimpleNamespace(seen=[]), random.Random(0)
    metric.add_batch = lambda predictions, references: metric.seen.extend(predictions == references)

    def compute() -> dict[str, float]:
        accuracy = sum(map(float, metric.seen)) / len(metric.seen)
        metric.seen.clear()
        tell(test_accuracy=accuracy)
        return {"accuracy": accuracy}

    metric.compute = compute
    sys.modules["evaluate"] = MagicMock(load=lambda *_: metric)
    program = load()

    def part(size: int) -> Any:
        words = [[" ".join(pairs.choices("abcdefgh", k=9)) for _ in range(size)] for _ in "12"]
        labels = [int(first < second) for first, second in zip(*words, strict=True)]
        return Dataset.from_dict({"sentence1": words[0], "sentence2": words[1], "label": labels, "idx": range(size)})

    class Tokenizer:
        def __call__(self, first: list[str], second: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[ord(a) for a in f"{a} {b}"] for a, b in zip(first, second, strict=True)]}

        def pad(self, examples: Any, **_: Any) -> Any:
            from transformers import BatchEncoding

            return BatchEncoding({key: torch.tensor([each[key] for each in examples]) for key in examples[0]})

    program.load_dataset = lambda *_: DatasetDict(train=part(384), validation=part(65))
    program.AutoTokenizer = MagicMock(from_pretrained=lambda *_: Tokenizer())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=128, **sizes))
    program.AutoModelForSequenceClassification = MagicMock(from_pretrained=lambda *_, **__: model)
    settings = {"lr": 1e-3, "num_epochs": args.epochs, "seed": 0, "batch_size": args.batch}
    program.MAX_GPU_BATCH_SIZE = args.batch // args.gradient_accumulation_steps
    program.training_function(settings, Namespace(cpu=bool(os.environ.get(ON_CPU)), mixed_precision="no"))


def fabric(load: Callable[[], Any], args: Namespace) -> None:
    """Run Lightning Fabric's example of images; torchrun, in place of `fabric run`, has started the processes."""
    import torch

    program = load()
    device = "cpu" if os.environ.get(ON_CPU) else "cuda"
    made = program.Fabric(accelerator=device, devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    made.launch()
    program.Fabric = lambda: made
    program.MNIST = lambda *_, train, **__: mnist(train)
    program.Net = lambda: torch.nn.Sequential(our_model(), torch.nn.LogSoftmax(1))
    use_adamw()
    printed(program, r"Average loss: ([\d.]+)", "test_loss")
    settings = {"batch_size": args.batch, "epochs": args.epochs, "lr": 1.0, "gamma": 1.0, "seed": 0}
    program.run(Namespace(**settings, log_interval=10, dry_run=False, save_model=False))


def deepspeed(load: Callable[[], Any], args: Namespace) -> None:
    """Run DeepSpeed's example of CIFAR-10."""
    from torch.utils.data import Subset

    program = load()
    program.torchvision.datasets.CIFAR10 = lambda train, **_: mnist() if train else Subset(mnist(False), range(64))
    program.Net = lambda _: our_model()  # its test needs whole batches of 4
    config = program.get_ds_config
    program.get_ds_config = lambda words: config(words) | {"train_batch_size": args.global_batch}
    printed(program, r"test images: ([\d.]+)", "test_accuracy")
    sys.argv += ["--epochs", str(args.epochs), "--dtype", "fp32"]
    program.main(program.add_argument())


@dataclass(frozen=True)
class Program:
    """A public program: where it is, which flag `inner` offers for it, and which of our examples stands beside it."""

    source: str  # on GitHub: OWNER/NAME@COMMIT
    file: str
    adapt: Callable[[Callable[[], Any], Namespace], None]
    ours: str = ""  # for speed; "": nothing of ours does the same work
    flag: str = ""  # besides those of all programs
    words: str = "--dataset=mnist --data-dir=../data --batch-size=64"  # of our train.py
    single: bool = False  # it trains with one process

    @property
    def title(self) -> str:
        """The name in a table."""
        repository, commit = self.source.split("@")
        return f"{repository}@{commit[:7]}: {'/'.join(Path(self.file).parts[-2:])}"


OUR_GPT = "--layers=4 --heads=4 --width=256 --context=64 --batch-size=8 --tokens=20000"
CSC = "CSCfi/pytorch-ddp-examples@4467e84197ea364e4b4629e96f78e19e3c3a5907"
MILA = "mila-iqia/mila-docs@12229ef44970bc65d1f878217e1953bcb946af6e"
PYTORCH = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
LAMBDA = "LambdaLabsML/distributed-training-guide@aed748914472cca80d8cfe139ab43ec63103913a"
GUIDE = "yangkky/distributed_tutorial@24467967c1c719110c33fccca69353ad8e5ae2e4"
NANOGPT = "karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
ACCELERATE = "huggingface/accelerate@16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
LIGHTNING = "Lightning-AI/pytorch-lightning@7f0c3436cd3f6ad3753125672024fc415cbcb414"
DEEPSPEED = "deepspeedai/DeepSpeedExamples@45b4b7156c8794a3452a5a7d03dbd8d797068569"
PROGRAMS = {
    "csc": Program(CSC, "mnist_ddp.py", csc, "ddp_spawn"),
    "mila": Program(MILA, "docs/examples/distributed/multi_node/main.py", mila, "torchrun_multinode"),
    "mila_checkpoints": Program(
        MILA, "docs/examples/good_practices/checkpointing/main.py", mila, flag="--resume", single=True
    ),
    "pytorch": Program(
        PYTORCH, "distributed/ddp-tutorial-series/multigpu_torchrun.py", pytorch, "torchrun_multinode", "--resume"
    ),
    "lambda": Program(LAMBDA, "02-distributed-data-parallel/train_llm.py", chapter, flag="--resume"),
    "mp_spawn": Program(GUIDE, "src/mnist-distributed.py", guide, "ddp_spawn"),
    "nanogpt": Program(NANOGPT, "train.py", nanogpt, "fsdp", "--resume", OUR_GPT),
    "accelerate": Program(ACCELERATE, "examples/nlp_example.py", accelerate, flag="--gradient-accumulation-steps"),
    "fabric": Program(LIGHTNING, "examples/fabric/image_classifier/train_fabric.py", fabric, "torchrun_multinode"),
    "deepspeed": Program(DEEPSPEED, "training/cifar/cifar10_deepspeed.py", deepspeed, "deepspeed"),
}
ROWS = ["seed", "samples", "weights", "checkpoint", "processes", "accumulation", "killed", "ends"]  # of verify


# In a process of a program: verify, or torchrun, has started the file train.py that `prepare` has written.


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
    kinds[0].pin_memory = lambda self: self
    join, init = torch.distributed.init_process_group, ddp.__init__
    load = torch.load
    torch.load = lambda file, *_, **named: load(file, **{**named, "map_location": "cpu"})
    cuda.set_device = lambda _: None

    def join_gloo(*_: Any, device_id: Any = None, **named: Any) -> None:
        join(**{**named, "backend": "gloo"})

    torch.distributed.init_process_group = join_gloo
    ddp.__init__ = lambda self, module, *_, **__: init(self, module)


class Torch(ModuleType):
    """The module torch as a program sees it without GPUs: it has GPUs, which are the CPU."""

    def __init__(self) -> None:
        """Prepare what differs from torch."""
        import torch

        super().__init__("torch")
        self.cuda: Any = MagicMock(is_available=lambda: True, device_count=lambda: 8)
        self.cuda.random.get_rng_state_all = list
        self.device: Any = lambda *_: torch.device("cpu")
        self.cuda.amp.GradScaler = torch.amp.GradScaler
        self.original = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def inner() -> None:
    """Run a program with its adapter; note when it began to iterate a loader, when it made a step, and its weights."""
    name = os.environ[NAME]
    program, path = PROGRAMS[name], Path(os.environ[FILE])
    parser = argparse.ArgumentParser(name)
    more = [program.flag] * (program.flag == "--gradient-accumulation-steps")
    for flag in ("--epochs", "--global-batch", "--timeout", *more):
        parser.add_argument(flag, type=int, default=1)
    if program.flag == "--resume":
        parser.add_argument("--resume", action="store_true", help="the program does so by itself, or by its own flag")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--speed", action="store_true", help="measure it")
    args = parser.parse_args()
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    args.batch = args.global_batch // int(os.environ.get("WORLD_SIZE", "1"))
    sys.argv = [str(path)]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(args.output_dir)
    with contextlib.suppress(FileExistsError):
        Path("data").symlink_to(path.parents[len(Path(program.file).parts)] / "data")
    events: list[tuple[float, int]] = []
    last: list[Any] = []
    if os.environ.get(ON_CPU):
        pretend()
    loader: Any = torch.utils.data.DataLoader
    iterate = loader.__iter__

    def noted(self: Any) -> Any:
        events.append((time.perf_counter(), id(self)))
        return iterate(self)

    loader.__iter__ = noted

    def stepped(optimizer: Any, *_: Any) -> None:
        events.append((time.perf_counter(), 0))
        last[:] = [optimizer]

    register_optimizer_step_post_hook(stepped)
    sys.path.insert(0, str(path.parent))

    def load() -> ModuleType:
        module: Any = ModuleType("program")
        module.__file__ = str(path)
        if program.adapt is nanogpt:
            module.__name__ = "__main__"  # a script without functions
        sys.modules["program"] = module  # in which pickle looks for the program's classes
        exec(compile(path.read_text(), path, "exec"), vars(module))
        if os.environ.get(ON_CPU) and program.adapt in (mila, chapter):
            module.torch = Torch()
        return module

    torch.manual_seed(0)
    program.adapt(load, args)
    if program.single or os.environ["RANK"] == "0":
        if not Path("metrics.csv").exists():
            Path("metrics.csv").write_text("epochs\n")  # the program reports no figure
        values = [value for group in last[0].param_groups for value in group["params"]]
        torch.save({str(number): value.detach().clone() for number, value in enumerate(values)}, "model.pt")
        Path("events.json").write_text(json.dumps(events))
    os._exit(0)  # Gloo can abort a process while Python shuts down


def epochs_of(events: list[tuple[float, int]]) -> list[float]:
    """Return the steps per second of each epoch, from its loader's iteration; without loaders, of thirds of the steps.

    A loader for the test, and one of which only one batch is looked at, are iterated without steps.
    """
    steps = [when for when, loader in events if not loader]
    starts = [when for when, loader in events if loader]
    if not starts:
        third = len(steps) // 3
        return [third / (steps[end] - steps[end - third]) for end in (third, 2 * third, 3 * third - 1)]
    found = []
    for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        if within := [when for when in steps if start < when < end]:
            found.append(len(within) / (within[-1] - start))
    return found


# The runner.


def clone(program: Program, sources: Path | None) -> Path:
    """Return a folder of git that has the program's commit; fetch it if there are no sources. Raise LookupError."""
    repository, commit = program.source.split("@")
    place = (sources or ROOT / "results" / "sources") / repository.replace("/", "+")
    for folder in (place, place / "repo"):
        words = ["git", "-C", str(folder), "cat-file", "-e", f"{commit}^{{commit}}"]
        if folder.is_dir() and not subprocess.run(words, capture_output=True).returncode:
            return folder
    if sources:
        raise LookupError(f"{place} is no clone with commit {commit[:12]}")
    subprocess.run(["git", "init", "-q", "--bare", place], check=True)
    words = ["git", "-C", str(place), "fetch", "-q", "--depth=1", f"https://github.com/{repository}", commit]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LookupError(f"cannot fetch {repository}: {' '.join(done.stderr.split())}; see --sources")
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


def prepare(name: str, folder: Path, args: Namespace) -> dict[str, str]:
    """Put the program, images and a train.py that runs its adapter into a folder; return the variables of its runs."""
    program = PROGRAMS[name]
    source = clone(program, args.sources)
    part = str(Path(program.file).parent)
    words = ["git", "-C", str(source), "archive", program.source.partition("@")[2], *([part] if part != "." else [])]
    archive = subprocess.run(words, check=True, capture_output=True).stdout
    theirs = folder / "theirs"
    theirs.mkdir()
    subprocess.run(["tar", "-x", "-C", theirs], input=archive, check=True)
    write_images(folder / "data", args.images)
    (folder / "train.py").write_text("from benchmarks.others import inner\n\ninner()\n")
    variables = {NAME: name, FILE: str(theirs / program.file), "PYTHONPATH": str(ROOT)}
    variables |= {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // args.processes))}
    if program.single:
        variables["RANK"] = "1"  # the rank that verify kills
    if args.device == "cpu":
        variables |= {ON_CPU: "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return variables


def verified(name: str, folder: Path, args: Namespace) -> dict[str, Any]:
    """Return the row of the table for a program, or for an example of ours: the verdicts of verify."""
    from harness.launchers import LAUNCHERS, copy_example
    from verify import checks

    variables: dict[str, str] = {}
    if name in PROGRAMS:
        program, variables = PROGRAMS[name], prepare(name, folder, args)
        rows = [row for row in ROWS if not program.single or row in ("seed", "checkpoint", "killed")]
        found = checks.check(folder, rows, "python train.py" if program.single else None)
        row = {"program": program.title}
    else:
        found = checks.check(copy_example(ROOT / "examples" / name, folder / name), ROWS, LAUNCHERS[name].local)
        row = {"program": f"our {name}"}
    row |= dict.fromkeys(ROWS, "")
    with patch.dict(os.environ, variables):  # checks.check starts the runs while the loop goes on
        for key, verdict, text in found:
            reason = text.partition(": ")[2]
            print(f"{name} {key}: {verdict}: {reason}", flush=True)
            missing = verdict == "not checked" and ("has no --" in reason or "writes no checkpoint" in reason)
            row[key] = "not offered" if missing else verdict
    return row


def measured(command: list[str], folder: Path, args: Namespace, name: str, variables: dict[str, str]) -> float:
    """Run a command to its end; return the MB of its largest process. Raise LookupError if it fails."""
    from harness.processes import finish

    done = finish([sys.executable, "-c", PEAK, *command], SECONDS, cwd=folder, env=os.environ | variables)
    if done.returncode:
        (args.output / f"others-{name}.log").write_text(done.stdout + done.stderr)
        lines = [line.strip() for line in done.stderr.splitlines() if re.search(r"\w*(Error|error): ", line)]
        raise LookupError(f"failed: {(lines or ['see its log'])[-1][:150]} (others-{name}.log)")
    return int(re.findall(r"^peak: (\d+) kB$", done.stdout, re.MULTILINE)[-1]) / 1e3


def one_round(name: str, folder: Path, args: Namespace) -> dict[str, float]:
    """Run a public program, then ours; return samples per second, and the MB of the largest process, of each."""
    from benchmarks.measure import speed
    from harness.launchers import LAUNCHERS, copy_example

    program = PROGRAMS[name]
    variables = prepare(name, folder, args)
    n = 1 if program.adapt is nanogpt else args.processes
    batch = n * (8 if program.adapt is nanogpt else BATCH)
    words = f"--speed --epochs={args.epochs} --global-batch={batch} --output-dir={folder}/output"
    command = f"torchrun --standalone --nproc-per-node={n} train.py {words}".split()
    run = {"MB": measured(command, folder, args, name, variables)}
    rates = epochs_of(json.loads((folder / "output" / "events.json").read_text()))
    run["theirs"] = statistics.median(rates[1:]) * batch
    example = copy_example(ROOT / "examples" / program.ours, folder / program.ours)
    command = [*LAUNCHERS[program.ours].command(n), *program.words.split(), f"--epochs={args.epochs}"]
    del variables["PYTHONPATH"]
    run["MB of ours"] = measured(command, example, args, program.ours, variables)
    run["ours"] = speed(example / "output")
    return run


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the table for a program: medians of the rounds in which both ended well."""
    from benchmarks import report

    program = PROGRAMS[name]
    row: dict[str, Any] = {"program": program.title, "beside": program.ours}
    rounds = [run for run in runs if run["program"] == name and "ours" in run]
    if rounds:
        row |= {key: statistics.median(run[key] for run in rounds) for key in ("theirs", "ours", "MB", "MB of ours")}
        row["ours / theirs"] = report.spread([run["ours"] / run["theirs"] for run in rounds])
    return row | {"remark": next((run["remark"] for run in runs if run["program"] == name and "remark" in run), "")}


def main() -> None:
    """Read the command line, and check or measure."""
    from benchmarks import report
    from benchmarks.measure import machine, positive, use_this_python

    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.others", description=__doc__, formatter_class=layout)
    parser.add_argument("what", choices=("verify", "speed"))
    names = [*PROGRAMS, "torchrun_multinode"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="of clones; default: fetch from GitHub")
    device = "cuda" if shutil.which("nvidia-smi") else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default here: %(default)s")
    parser.add_argument("--processes", type=positive, default=2, help="on GPUs at most as many as there are GPUs")
    parser.add_argument("--images", type=positive, default=6000, help="for training, to measure the speed")
    parser.add_argument("--epochs", type=lambda text: positive(text, 2), default=3, help="the first does not count")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    use_this_python()
    args.output.mkdir(parents=True, exist_ok=True)
    speed, args.images = args.what == "speed", args.images if args.what == "speed" else 390
    chosen = [name for name in args.only if not speed or name in PROGRAMS and PROGRAMS[name].ours]
    runs: list[dict[str, Any]] = []
    for _ in range(args.rounds if speed else 1):
        for name in chosen:
            with tempfile.TemporaryDirectory(prefix=f"others-{name}-") as folder:
                run: dict[str, Any] = {"program": name}
                try:
                    run |= (one_round if speed else verified)(name, Path(folder), args)
                except (LookupError, subprocess.TimeoutExpired) as why:
                    run["remark"] = str(why)
            runs.append(run)
            print(run, flush=True)
            table = [summary(name, runs) for name in chosen] if speed else runs
            report.write(runs, args.output / f"others-{args.what}.csv", machine(), table)
    print(report.table(table))


if __name__ == "__main__":
    main()
