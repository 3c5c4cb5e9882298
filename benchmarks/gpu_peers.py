"""Public scripts beside our examples on GPUs, for on_gpu.py: nanoGPT, torchvision's references and peft with Trainer.

Model, sizes, batch, precision and data are those of our example. All else is as published: the optimizer's form, how
data are read, `loss.item()`, logging. Nothing is evaluated or saved within the steps that count. Each script gets lines
that print, every few steps, the time and how many tokens or images all processes have had. They stand behind a line of
the script that waits for the GPU: nanoGPT's own time of a step is without that wait where it logs every tenth step.

The sources are clones, or folders OWNER+NAME with the files alone, which `export` writes: see `read`.
"""

import functools
import json
import pickle
import random
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edits import CannotRun, Edit, Source, edited


@dataclass(frozen=True)
class Sizes:
    """What the scripts train; the same numbers are for our examples."""

    device: str = "cuda"  # or "cpu"
    processes: int = 1  # one for each GPU
    every: int = 10  # steps between two times that are printed
    # nanogpt, beside fsdp: a GPT of 124 million weights. It has the biases that our TinyGPT has.
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    context: int = 1024
    batch: int = 32  # samples of a step of each process
    steps: int = 100
    # torchvision, beside torchrun_vision
    images: Path = Path("images")  # train/CLASS/*.jpg and val/CLASS/*.jpg, of five classes or more
    image_model: str = "resnet50"
    image_size: int = 224
    image_batch: int = 256
    image_epochs: int = 2
    image_rounds: int = 4  # of an epoch: in a round each worker reads a batch, or several
    workers: int = 15  # of each process
    # peft, beside lora
    model: Path = Path("model")  # in Hugging Face's format, with a tokenizer
    lora_context: int = 1024
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_targets: str = "all-linear"
    lora_batch: int = 8
    lora_steps: int = 60


# On CPUs, in a minute for all: so that a misspelt flag is not found on a GPU. `images` and `model` are to be set.
TINY = Sizes(
    device="cpu",
    every=2,
    layers=2,
    heads=2,
    width=64,
    vocabulary=256,
    context=64,
    batch=4,
    steps=8,
    image_model="resnet18",
    image_size=32,
    image_batch=16,
    workers=1,
    lora_context=32,
    lora_batch=4,
    lora_steps=8,
)


@dataclass(frozen=True)
class Script:
    """A public script, in one variant."""

    name: str
    repository: str  # on GitHub
    commit: str
    beside: str  # our example
    variant: str  # precision, and "compile"
    unit: str
    files: Mapping[str, Source]  # the script first
    arrange: Callable[[Path, Sizes], list[str]]  # writes the data into the folder, and returns the command

    @property
    def file(self) -> str:
        """The path of the script in its repository."""
        return next(iter(self.files))

    def prepare(self, sources: Path, folder: Path, sizes: Sizes) -> list[str]:
        """Write an edited copy and its data into `folder`; return the command, which runs there.

        Raises CannotRun, with one line that says why.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for path, source in self.files.items():
            (folder / Path(path).name).write_text(edited(path, read(self, sources, path), source))
        every = round_of_steps(sizes) if self.unit == "images/s" else sizes.every
        return ["env", "-u", "SLURM_PROCID", f"CLOCK_EVERY={every}", *self.arrange(folder, sizes)]

    def speed(self, log: str) -> float:
        """Return the units per second of all processes: the median of the intervals but the first.

        Where the number of units falls a new epoch has begun: that is no interval, since it has an evaluation.
        Raises CannotRun, with one line that says why.
        """
        ticks = [(float(time), int(units)) for time, units in re.findall(r"clock: ([\d.]+) (\d+)", log)]
        pairs = zip(ticks, ticks[1:], strict=False)
        speeds = [(after - before) / (end - start) for (start, before), (end, after) in pairs if after > before]
        if len(speeds) < 2:
            raise CannotRun(f"failed: it printed the time {len(ticks)} times, which is too few for a figure")
        return statistics.median(speeds[1:])


def round_of_steps(sizes: Sizes) -> int:
    """Return how many steps after another count as one interval of torchvision's script.

    Loader workers hand over their batches in turn: only after a whole round, or several, has each read as many.
    """
    return max(1, sizes.workers) * -(-sizes.every // max(1, sizes.workers))


def read(script: Script, sources: Path, path: str) -> str:
    """Return a file of the script's commit: from OWNER+NAME/PATH in `sources`, or from a clone OWNER+NAME[/repo]."""
    folder = sources / script.repository.replace("/", "+")
    if (folder / path).is_file() and not (folder / ".git").exists():
        return (folder / path).read_bytes().decode()
    for clone in (folder, folder / "repo"):
        if clone.is_dir():
            words = ["git", "-C", str(clone), "show", f"{script.commit}:{path}"]
            done = subprocess.run(words, capture_output=True)
            if done.returncode == 0:
                return done.stdout.decode()
    raise CannotRun(f"cannot run: {folder} has neither {path} nor a clone with commit {script.commit[:12]}")


def export(clones: Path, out: Path) -> None:
    """Write the files that the scripts need, as they are published, into folders OWNER+NAME of `out`."""
    for script in SCRIPTS:
        for path, source in script.files.items():
            text = edited(path, read(script, clones, path), Source(source.sha256))
            target = out / script.repository.replace("/", "+") / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def launcher(sizes: Sizes) -> list[str]:
    """Return the words before the script's name: one process needs no launcher."""
    if sizes.processes == 1:
        return ["python"]
    return ["torchrun", "--standalone", f"--nproc-per-node={sizes.processes}"]


def arrange_nanogpt(folder: Path, sizes: Sizes, compiled: bool) -> list[str]:
    """Write random tokens in nanoGPT's format; return its command."""
    import numpy

    data = folder / "data" / "random"
    data.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for name in ("train.bin", "val.bin"):
        generator.integers(sizes.vocabulary, size=2_000_000).astype(numpy.uint16).tofile(data / name)
    with open(data / "meta.pkl", "wb") as file:  # from which it takes the size of the vocabulary
        pickle.dump({"vocab_size": sizes.vocabulary}, file)
    flags = {
        "dataset": "random",
        "device": sizes.device,
        "dtype": "bfloat16",
        "compile": compiled,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_embd": sizes.width,
        "bias": True,  # as our TinyGPT
        "block_size": sizes.context,
        "batch_size": sizes.batch,
        "gradient_accumulation_steps": sizes.processes,  # which it divides by their number
        "grad_clip": 0.0,  # ours clips only if it is told to
        "max_iters": sizes.steps,
        "log_interval": sizes.every,
        "eval_interval": sizes.steps + 1,
        "eval_iters": 0,  # of its evaluation before the first step
    }
    # On a CPU the compiler takes two minutes for a small model, too: there only the flag is tried.
    words = ["TORCHDYNAMO_DISABLE=1"] if compiled and sizes.device == "cpu" else []
    return [*words, *launcher(sizes), "train.py", *(f"--{name}={value}" for name, value in flags.items())]


def arrange_torchvision(folder: Path, sizes: Sizes, bf16: bool) -> list[str]:
    """Write a folder of links to the images, as often as an epoch needs them; return torchvision's command."""
    files = sorted((sizes.images / "train").glob("*/*"))
    random.Random(0).shuffle(files)  # so that each class is there
    classes = len({path.parent.name for path in files})
    if classes < 5:
        raise CannotRun(f"cannot run: it shows the accuracy of 5 classes, and {sizes.images} has {classes}")
    steps = sizes.image_rounds * round_of_steps(sizes)
    for number in range(steps * sizes.image_batch * sizes.processes):
        file = files[number % len(files)]
        link = folder / "images" / "train" / file.parent.name / f"{number}{file.suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    (folder / "images" / "val").symlink_to((sizes.images / "val").resolve())
    flags = {
        "device": sizes.device,
        "data-path": "images",
        "model": sizes.image_model,
        "batch-size": sizes.image_batch,
        "workers": sizes.workers,
        "epochs": sizes.image_epochs,
        "train-crop-size": sizes.image_size,
        "val-crop-size": sizes.image_size,
        "val-resize-size": sizes.image_size * 8 // 7,
        "opt": "adamw",
        "lr": 5e-4,
        "weight-decay": 0.01,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [*launcher(sizes), "train.py", *words, *(["--amp"] if bf16 else [])]


def arrange_peft(folder: Path, sizes: Sizes) -> list[str]:
    """Write random tokens as samples of Hugging Face's data sets; return the script's command."""
    import numpy

    vocabulary = json.loads((sizes.model / "config.json").read_text())["vocab_size"]
    held_out, context = 16, sizes.lora_context  # the script holds out 16 samples
    count = sizes.lora_steps * sizes.lora_batch * sizes.processes + held_out
    tokens = numpy.random.default_rng(0).integers(vocabulary, size=(count, context))
    (folder / "samples").mkdir()
    with open(folder / "samples" / "train.jsonl", "w") as file:
        for row in tokens.tolist():
            file.write(json.dumps({"input_ids": row, "attention_mask": [1] * context, "labels": row}) + "\n")
    flags = {
        "base_model": sizes.model.resolve(),
        "data_path": "samples",
        "val_set_size": held_out,
        "batch_size": sizes.lora_batch,
        "device_map": "auto" if sizes.device == "cuda" else "cpu",
        "dtype": "bfloat16",
        "lora_r": sizes.lora_rank,
        "lora_alpha": sizes.lora_alpha,
        "lora_dropout": 0,
        "lora_target_modules": sizes.lora_targets,
        "eval_step": 10**6,
        "save_step": 10**6,
    }
    # Words of `env`.
    offline = [f"HF_HOME={folder.resolve() / 'cache'}", "HF_HUB_OFFLINE=1"]
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [*offline, *launcher(sizes), "olora_finetuning.py", *words]


EVERY = "int(__import__('os').environ['CLOCK_EVERY'])"
NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
NANOGPT_CLOCK = """\
        print(f"clock: {time.perf_counter()} {iter_num * tokens_per_iter}", flush=True)
"""
NANOGPT_FILES = {
    "train.py": Source(
        "413bd97b40bb400a2a0d01230e2946f056c263ebac1b7281c2367d964a123085", [Edit(324, 0, 0, NANOGPT_CLOCK)]
    ),
    "model.py": Source("7c01703240dbec5d554527dc666e35b3df8391d0b117fddc07afcf325a21d11c"),
    "configurator.py": Source("5cc23aca26b4ab3c0d9e5f82740f4781f9444f42718c15abcee70d93c5aabe8f"),
}

TORCHVISION = ("pytorch/vision", "7af698794eded568735f9519593603c1ec889eba")  # release 0.21.0
TORCHVISION_CLOCK = f"""\
        if i % {EVERY} == {EVERY} - 1:
            images_so_far = (i + 1) * batch_size * utils.get_world_size()
            print(f"clock: {{time.perf_counter()}} {{images_so_far}}", flush=True)
"""
TORCHVISION_BF16 = [
    Edit(29, 37, 0, "dtype=torch.bfloat16, "),
    Edit(287, 39, 0, "enabled=False"),  # its scaler stays, by which the script knows of autocast, and does nothing
]


def torchvision_files(edits: Sequence[Edit]) -> dict[str, Source]:
    """Return torchvision's files, with these edits and the clock."""
    folder = "references/classification"
    script = Source(
        "50e351e18f825fe8c87ba1cf0182c93b66f7351dab4588d20acdd5962a1076b9", [Edit(60, 0, 0, TORCHVISION_CLOCK), *edits]
    )
    return {
        f"{folder}/train.py": script,
        f"{folder}/utils.py": Source("8f891cd8e2b948c484cb45764a4a517bb1b103470f10b7646330824fd8ef279f"),
        f"{folder}/presets.py": Source("99e2fcea703726c31d3621806b895a56010d1501bc312b56a05401b0cc177a4e"),
        f"{folder}/sampler.py": Source("2f1a5540a2b4c44ae45f1c0cd3a52c101e79d51a5b7b25f37b388f6b8cea4d24"),
        f"{folder}/transforms.py": Source("8827fd2ca0d1222018f4590e0fa51a8c156b27a1703094fa80c74d147a309233"),
    }


PEFT = ("huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40")
# Trainer has read the loss, and so waited for the GPU, before it calls `on_log`.
PEFT_CLOCK = """\
    class Clock(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            samples = state.global_step * args.per_device_train_batch_size * args.world_size
            units = samples * len(train_data[0]["input_ids"])
            if state.is_world_process_zero and "loss" in logs:
                print(f"clock: {__import__('time').perf_counter()} {units}", flush=True)

    trainer.add_callback(Clock)
"""
PEFT_FILES = {
    "examples/olora_finetuning/olora_finetuning.py": Source(
        "320cdec89fc2babbb00db8d2e92fd895a55d7c9f9543e09ad5598cc8c687f8cb",
        [
            Edit(96, 0, 0, "        return example\n"),  # the samples are tokens already
            Edit(107, 26, 17, "True"),  # LoRA's usual first weights, as ours
            Edit(126, 26, 3, EVERY),
            Edit(
                127, 0, 0, "            bf16=True, use_cpu=not torch.cuda.is_available(),\n"
            ),  # autocast, as ours: adapters stay in fp32
            Edit(141, 0, 0, PEFT_CLOCK),
        ],
    )
}

SCRIPTS = (
    Script(
        "nanogpt",
        *NANOGPT,
        beside="fsdp",
        variant="bf16",
        unit="tokens/s",
        files=NANOGPT_FILES,
        arrange=functools.partial(arrange_nanogpt, compiled=False),
    ),
    Script(
        "nanogpt_compile",
        *NANOGPT,
        beside="fsdp",
        variant="bf16 --compile",
        unit="tokens/s",
        files=NANOGPT_FILES,
        arrange=functools.partial(arrange_nanogpt, compiled=True),
    ),
    Script(
        "torchvision_fp32",
        *TORCHVISION,
        beside="torchrun_vision",
        variant="fp32",
        unit="images/s",
        files=torchvision_files([]),
        arrange=functools.partial(arrange_torchvision, bf16=False),
    ),
    Script(
        "torchvision",
        *TORCHVISION,
        beside="torchrun_vision",
        variant="bf16",
        unit="images/s",
        files=torchvision_files(TORCHVISION_BF16),
        arrange=functools.partial(arrange_torchvision, bf16=True),
    ),
    Script("peft", *PEFT, beside="lora", variant="bf16", unit="tokens/s", files=PEFT_FILES, arrange=arrange_peft),
)
