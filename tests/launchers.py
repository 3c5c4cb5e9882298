"""How each example is started locally, and what its launcher makes of a failure: one row an example."""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """One row: `local` is the README's command with {n} for the number of processes."""

    local: str
    refusal: int  # exit status after bad input
    dead_worker: str  # "fails": one dead worker ends the run; "recovers": the launcher starts it again
    processes_in_job: int  # how many run.slurm starts, unmodified, on nodes without GPUs
    checkpoint: str = "checkpoint.pt"

    def command(self, processes: int) -> list[str]:
        """Return the command, as a list of words, that starts `processes` processes on this machine."""
        return shlex.split(self.local.format(n=processes))


LAUNCHERS = {
    "ddp_spawn": Launcher("python train.py --processes {n}", refusal=2, dead_worker="fails", processes_in_job=2),
}
