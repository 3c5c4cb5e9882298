"""One row for each example: how it is started, what its default run trains, and what it promises."""

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/train.py"))
# Issue 66: an example with longrun.py has the new form, one without carries plumbing/.
NEW_FORM = [name for name in EXAMPLES if (ROOT / "examples" / name / "longrun.py").exists()]
OLD_FORM = [name for name in EXAMPLES if name not in NEW_FORM]
MINIMAL = [name for name in EXAMPLES if (ROOT / "examples" / name / "minimal.py").exists()]
assert EXAMPLES and MINIMAL, "no examples/*/train.py or minimal.py found"
# What runs leave behind.
LEFT_OUT = shutil.ignore_patterns("output", "data", "__pycache__", ".venv", "*.out", "*.log")
# And what else may have been made in a folder of the repository, such as the data of `prepare`.
MADE = [line.rstrip("/").rpartition("/")[2] for line in (ROOT / ".gitignore").read_text().split()]


def copy_example(source: Path, target: Path) -> Path:
    """Copy an example's folder, as `cp -r` would, without what earlier runs may have left in it.

    From the repository comes nothing that git ignores: else old data would hide that today's cannot be made. From a
    folder elsewhere comes also the data that a test has had made there.
    """

    def left_out(folder: str, names: list[str]) -> set[str]:
        found = LEFT_OUT(folder, names)
        return found | shutil.ignore_patterns(*MADE)(folder, names) if source.is_relative_to(ROOT) else found

    return Path(shutil.copytree(source, target, ignore=left_out))


# How torchrun names a killed process. Once in some hundred times it reads the report that another process is just
# writing, of its lost connection, and fails on that instead.
TORCHRUN_KILLED = r"rank *: \d(.|\n)*SIGKILL|Failed to parse reply file"

EPOCH = "epoch {:2}/"  # what the line of an epoch begins with
# How train.py prints a column of metrics.csv: the words before the number, the unit after it, by what the column is
# multiplied, and how many digits follow the point.
PRINTED = {"test_accuracy": ("test acc", "%", 100, 2), "test_loss": ("test loss", "", 1, 4)}


@dataclass(frozen=True)
class Launcher:
    """One row. What has a default value is the same for most examples."""

    # How its processes are started and how they end.
    local: str  # the README's command, with {n} for the number of processes
    status_after_bad_input: int  # the exit status
    processes_in_job: int  # how many run.slurm starts, unmodified, on nodes without GPUs
    kill_message: str = r"(process \d|rank:? *\d)(.|\n)*SIGKILL"  # how stderr names a killed process: a pattern
    backend: str = "gloo"  # the word in the first line of a local run
    rank: str = "torch.distributed.get_rank()"  # the expression that gives a process its number, in a model

    # What its default run trains, and what train.py is like.
    first_line: str = "ConvNet on digits"  # what the first line that a run prints begins with
    metric: str = "test_accuracy"  # the column of metrics.csv that says what was learnt
    at_least: float = 0.96  # the bound of an accuracy, at the end
    at_most: float = 0.0  # the bound of a loss
    first_above: float = 1.0  # than which the training loss of the first epoch is higher
    last_below: float = 0.2  # than which that of the last epoch is lower
    checkpoint: str = "checkpoint.pt"  # or a pattern that names one file of it
    written: str = "output/checkpoint.pt"  # the path in the line about a full disk in epoch 2
    epoch_start: str = "    start = time.perf_counter()\n"  # the line of train.py where an epoch begins
    epoch_names: str = "args.output_dir, epoch"  # what has the output folder, and the epoch's number from 0, there
    torchvision: bool = False  # whether its framework imports it, asked for or not; transformers does where it is there
    global_batch: int = 128  # with two processes
    prepare: str = ""  # the README's command that makes the data, if they are not in the folder
    model: str = "model.pt"  # the trained model, in the output folder
    download: str = "python -m common.data"  # the command that downloads mnist, without its arguments

    # Which clauses of the contract it keeps.
    convnet: bool = True  # it trains the ConvNet on images
    pytorch: bool = True  # it uses PyTorch: its order of samples, its initial weights, its modules at sites
    gpus: bool = True  # it uses GPUs, where there are any
    fp64: bool = True  # it can train in fp64
    fp16: bool = False  # it can train in fp16, by --precision or, if it has one, by its configuration file
    job_recovers: bool = False  # the launcher in run.slurm starts a dead worker again
    stops_at_a_step: bool = False  # train.py saves after its current step when SLURM asks the job to stop
    any_world_size: bool = True  # a run may be resumed with another number of processes, at the same global batch

    def command(self, processes: int) -> list[str]:
        """Return the command, as a list of words, that starts `processes` processes on this machine."""
        return shlex.split(self.local.format(n=processes))

    @property
    def words(self) -> str:
        """The words that stand before what the run learns in the lines that it prints."""
        return PRINTED[self.metric][0]

    def has_learnt(self, row: dict[str, float], tolerance: float = 0) -> bool:
        """Return whether a row of metrics.csv keeps the bound, or misses it by no more than `tolerance`."""
        if self.metric == "test_accuracy":
            return row[self.metric] >= self.at_least - tolerance
        return row[self.metric] <= self.at_most + tolerance


LAUNCHERS = {
    "accelerate": Launcher(
        "accelerate launch --config_file accelerate.yaml --num_processes {n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        epoch_start="        sampler.set_epoch(epoch)",
        job_recovers=True,
        stops_at_a_step=True,
        kill_message=TORCHRUN_KILLED,
    ),
    "ddp_spawn": Launcher(
        "python train.py --processes {n}",
        status_after_bad_input=2,
        processes_in_job=2,
        epoch_start="        sampler.set_epoch(epoch)",
    ),
    "deepspeed": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        any_world_size=False,
        fp16=True,
        epoch_start="        sampler.set_epoch(epoch)",
        written="output/checkpoint/step22",
        kill_message=TORCHRUN_KILLED,
        fp64=False,
    ),
    "fsdp": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        first_line="TinyGPT on a random source",
        metric="test_loss",
        at_most=2.2235 + 0.1,  # the source's entropy, and what may be missing
        first_above=2.6,
        last_below=2.3,
        written="output/checkpoint/step104",
        global_batch=16,
        epoch_start="        sampler.set_epoch(epoch)",
        convnet=False,
        job_recovers=True,
        stops_at_a_step=True,
        kill_message=TORCHRUN_KILLED,
    ),
    "horovod_cpu": Launcher(
        "horovodrun --gloo -np {n} python train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        rank="__import__('horovod.torch').torch.rank()",
        kill_message=r"Process name: \d\nExit code: 137",
        gpus=False,
    ),
    "horovod_lightning": Launcher(
        "horovodrun --gloo -np {n} python train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        epoch_start="        self.start = time.perf_counter()\n",
        rank="__import__('horovod.torch').torch.rank()",
        kill_message=r"Process name: \d\nExit code: 137",
        torchvision=True,  # torchmetrics does
        gpus=False,
    ),
    "horovod_tensorflow": Launcher(
        "horovodrun --gloo -np {n} python train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        checkpoint="checkpoint.npz",
        model="model.keras",
        download="python numpy_data.py",
        rank="__import__('horovod.tensorflow').tensorflow.rank()",
        kill_message=r"Process name: \d\nExit code: 137",
        gpus=False,
        pytorch=False,
    ),
    "lightning": Launcher(
        "python train.py --devices {n}",
        status_after_bad_input=2,
        processes_in_job=4,
        epoch_start="        self.start = time.perf_counter()\n",
        epoch_names="self.args.output_dir, self.current_epoch",
        kill_message=r"Child process with PID \d+ terminated with code -9",
        torchvision=True,  # torchmetrics does
    ),
    "lora": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        first_line="LlamaForCausalLM in model on text.txt",
        metric="test_loss",
        at_most=4.35,
        first_above=5,
        last_below=4.4,
        global_batch=8,
        prepare="python make_model.py",
        model="adapter/adapter_model.safetensors",
        epoch_start='    start = time.perf_counter() - progress["seconds"]\n',
        convnet=False,
        job_recovers=True,
        stops_at_a_step=True,
        kill_message=TORCHRUN_KILLED,
    ),
    "torchrun_multinode": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        epoch_start="        sampler.set_epoch(epoch)",
        job_recovers=True,
        stops_at_a_step=True,
        kill_message=TORCHRUN_KILLED,
    ),
    "torchrun_vision": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        status_after_bad_input=1,
        processes_in_job=4,
        fp16=True,
        first_line="resnet18 on images",
        at_least=0.7,
        first_above=1.3,
        last_below=1,
        global_batch=32,
        prepare="python make_images.py",
        epoch_start="        sampler.set_epoch(epoch)",
        torchvision=True,
        convnet=False,
        job_recovers=True,
        stops_at_a_step=True,
        kill_message=TORCHRUN_KILLED,
    ),
}

assert sorted(LAUNCHERS) == EXAMPLES, f"not in both, examples/ and LAUNCHERS: {set(LAUNCHERS) ^ set(EXAMPLES)}"
HOROVOD = [name for name in EXAMPLES if (ROOT / "examples" / name / "install.sh").exists()]  # which that script builds

# Open MPI starts nothing as root, as whom tests run in a container, unless these variables permit it.
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# How horovod_cpu is started by mpirun.
MPI = replace(
    LAUNCHERS["horovod_cpu"],
    local=shlex.join(["env", *(f"{name}={value}" for name, value in MPI_AS_ROOT.items())])
    + " NP={n} bash more/mpirun_local.sh",
    status_after_bad_input=2,
    backend="mpi",
    kill_message=r"process rank \d (.|\n)*signal 9",
)
