"""One row for each example: how it is started, what its default run trains, and what it promises."""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/train.py"))
MINIMAL = [name for name in EXAMPLES if (ROOT / "examples" / name / "minimal.py").exists()]
HOROVOD = [name for name in EXAMPLES if (ROOT / "examples" / name / "install.sh").exists()]  # which that script builds
assert EXAMPLES and MINIMAL, "no examples/*/train.py or minimal.py found"

LEFT_OUT = ("output", "verify-output", "data", "__pycache__", ".venv", "*.out", "*.log")  # what runs leave
MADE = ("images", "model")  # what the commands `prepare` below make


def copy_example(source: Path, target: Path) -> Path:
    """Copy an example's folder without what earlier runs have left in it."""
    # Old data of the repository's folder would hide that today's cannot be made.
    names = [*LEFT_OUT, *(MADE if source.is_relative_to(ROOT) else ())]
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns(*names)))


@dataclass(frozen=True)
class Launcher:
    """One row. What has a default value is the same for most examples."""

    local: str = "torchrun --standalone --nproc-per-node={n} train.py"  # the README's command for {n} processes
    processes_in_job: int = 4  # how many run.slurm starts, unmodified, on nodes without GPUs
    prepare: str = ""  # the README's command that makes the data, if they are not in the folder
    first_line: str = "ConvNet on digits"  # what the first line that a run prints begins with
    global_batch: int = 128  # with two processes
    at_least: float = 0.96  # the test accuracy at the end
    at_most: float = 0.0  # or, if this is not 0, the bound of the test loss
    checkpoint: str = "checkpoint.pt"
    model: str = "model.pt"  # the trained model, in the output folder

    # Which clauses of the contract it keeps.
    convnet: bool = True  # it trains the ConvNet on images
    pytorch: bool = True  # it uses PyTorch: its order of samples, its initial weights, its modules at sites
    gpus: bool = True  # it uses GPUs, where there are any
    fp64: bool = True  # it can train in fp64
    fp16: bool = False  # it can train in fp16, by --precision or, if it has one, by its configuration file
    any_world_size: bool = True  # a run may be resumed with another number of processes, at the same global batch
    # It saves after its current step when SLURM asks the job to stop; in a job its launcher starts a dead worker again.
    any_step: bool = False

    def command(self, processes: int) -> list[str]:
        """Return the command, as a list of words, that starts `processes` processes on this machine."""
        return shlex.split(self.local.format(n=processes))

    @property
    def status_after_bad_input(self) -> int:
        """The exit status: a launcher beside train.py has its own."""
        return 2 if self.local.startswith("python ") else 1

    @property
    def metric(self) -> str:
        """The column of metrics.csv that says what was learnt."""
        return "test_loss" if self.at_most else "test_accuracy"

    def has_learnt(self, row: dict[str, float], tolerance: float = 0) -> bool:
        """Return whether a row of metrics.csv keeps the bound, or misses it by no more than `tolerance`."""
        if self.at_most:
            return row["test_loss"] <= self.at_most + tolerance
        return row["test_accuracy"] >= self.at_least - tolerance


HOROVODRUN = "horovodrun --gloo -np {n} python train.py"
LAUNCHERS = {
    "accelerate": Launcher(
        "accelerate launch --config_file accelerate.yaml --num_processes {n} train.py", any_step=True
    ),
    "ddp_spawn": Launcher("python train.py --processes {n}", processes_in_job=2),
    "deepspeed": Launcher(any_world_size=False, fp16=True, fp64=False),
    "fsdp": Launcher(
        first_line="TinyGPT on a random source",
        at_most=2.2235 + 0.1,  # the source's entropy, and what may be missing
        global_batch=16,
        convnet=False,
        any_step=True,
    ),
    "horovod_cpu": Launcher(HOROVODRUN, gpus=False),
    "horovod_lightning": Launcher(HOROVODRUN, gpus=False),
    "horovod_tensorflow": Launcher(
        HOROVODRUN, checkpoint="checkpoint.npz", model="model.keras", gpus=False, pytorch=False
    ),
    "lightning": Launcher("python train.py --devices {n}"),
    "lora": Launcher(
        prepare="python make_model.py",
        first_line="LlamaForCausalLM in model on text.txt",
        at_most=4.35,
        global_batch=8,
        model="adapter/adapter_model.safetensors",
        fp64=False,
        convnet=False,
        any_step=True,
    ),
    "torchrun_multinode": Launcher(any_step=True),
    "torchrun_vision": Launcher(
        prepare="python make_images.py",
        first_line="resnet18 on images",
        global_batch=32,
        at_least=0.7,
        fp16=True,
        convnet=False,
        any_step=True,
    ),
}
assert sorted(LAUNCHERS) == EXAMPLES, f"not in both, examples/ and LAUNCHERS: {set(LAUNCHERS) ^ set(EXAMPLES)}"
