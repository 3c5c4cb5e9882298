"""How each example is copied and started locally, and what its launcher makes of a failure: one row an example."""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/train.py"))
assert EXAMPLES, "no examples/*/train.py found"
# What runs leave behind.
LEFT_OUT = shutil.ignore_patterns("output", "data", "__pycache__", ".venv", "*.out", "*.log")


def copy_example(source: Path, target: Path) -> Path:
    """Copy an example's folder, as `cp -r` would, without what earlier runs may have left in it."""
    return Path(shutil.copytree(source, target, ignore=LEFT_OUT))


# How torchrun names a killed process. Once in some hundred times it reads the report that another process is just
# writing, of its lost connection, and fails on that instead.
TORCHRUN_KILLED = r"rank *: \d(.|\n)*SIGKILL|Failed to parse reply file"


@dataclass(frozen=True)
class Launcher:
    """One row: `local` is the README's command with {n} for the number of processes."""

    local: str
    refusal: int  # exit status after bad input
    processes_in_job: int  # how many run.slurm starts, unmodified, on nodes without GPUs
    job_recovers: bool = False  # whether the launcher in run.slurm starts a dead worker again
    stops_at_a_step: bool = False  # whether train.py saves after its current step when SLURM asks the job to stop
    checkpoint: str = "checkpoint.pt"  # or a pattern that names one file of it
    backend: str = "gloo"  # the word in the first line of a local run
    rank: str = "torch.distributed.get_rank()"  # what gives a process its number, in a model
    killed: str = r"(process \d|rank:? *\d)(.|\n)*SIGKILL"  # how stderr names a killed process
    gpus: bool = True  # whether it uses them, where there are any
    fp64: bool = True  # whether it can train in fp64
    epoch_start: str = "    model.train()\n"  # the line of train.py where an epoch begins
    torchvision: bool = False  # whether its framework imports it, asked for or not

    def command(self, processes: int) -> list[str]:
        """Return the command, as a list of words, that starts `processes` processes on this machine."""
        return shlex.split(self.local.format(n=processes))


LAUNCHERS = {
    "ddp_spawn": Launcher("python train.py --processes {n}", refusal=2, processes_in_job=2),
    "deepspeed": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        refusal=1,
        processes_in_job=4,
        checkpoint="checkpoint/epoch*/*_model_states.pt",
        killed=TORCHRUN_KILLED,
        fp64=False,
    ),
    "horovod_cpu": Launcher(
        "horovodrun --gloo -np {n} python train.py",
        refusal=1,
        processes_in_job=4,
        rank="__import__('horovod.torch').torch.rank()",
        killed=r"Process name: \d\nExit code: 137",
        gpus=False,
    ),
    "lightning": Launcher(
        "python train.py --devices {n}",
        refusal=2,
        processes_in_job=4,
        checkpoint="checkpoint.ckpt",
        epoch_start="        self.start = time.perf_counter()\n",
        torchvision=True,  # torchmetrics does
    ),
    "torchrun_multinode": Launcher(
        "torchrun --standalone --nproc-per-node={n} train.py",
        refusal=1,
        processes_in_job=4,
        job_recovers=True,
        stops_at_a_step=True,
        killed=TORCHRUN_KILLED,
    ),
}
