"""Submit a run.slurm in the lab, follow the job, and find what it has left."""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.processes import ASK_SLURM, find_processes, wait_until
from lab import Lab, Wanted
from lab.config import find_account

# The nodes claim more CPUs than the machine has: what waits by spinning, OpenMP or MPI, would slow the others down.
SETTINGS = {"VENV": sys.prefix, "OMP_WAIT_POLICY": "passive", "OMPI_MCA_mpi_yield_when_idle": "1"}
NODES, CPUS, GPUS = 2, 16, 2  # CPUs for a few jobs at once: SLURM counts them, the machine need not have them
EPOCHS = 5  # of a run with the default settings


def on_this_machine_only(*folders: Path) -> list[Path]:
    """Of the folders that jobs use return those that a lab has to share: each of its nodes has a /tmp of its own."""
    names = {*folders, *(folder.resolve() for folder in folders)}  # .ci/run makes one environment a link to another
    return [folder for folder in sorted(names) if folder.resolve().is_relative_to("/tmp")]


def hand_over(folder: Path, lab: Lab | None = None) -> Path:
    """Give a folder, with all that is in it, to the user who runs a lab's jobs, and let them come to it; return it."""
    owner = lab or find_account(Wanted())  # the one whom a lab that is started here would have
    # chown goes from folder to folder by their handles: the user, who may own some already, cannot put a link in the
    # place of a folder meanwhile, and so get a file of root's.
    words = ["chown", "--recursive", "--no-dereference", f"{owner.uid}:{owner.gid}", str(folder)]
    subprocess.run(words, check=True, timeout=300)
    for parent in folder.parents:  # pytest makes its folders for itself alone
        if parent.is_relative_to(tempfile.gettempdir()) and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


def job_processes(lab: Lab, job: str) -> list[int]:
    """Return the ids of all processes of a job; a job of the same number in another lab is not meant."""
    found = set(find_processes(f"SLURM_JOB_ID={job}"))
    return sorted(found.intersection(lab.processes()))


@dataclass
class Job:
    """A submitted run.slurm."""

    lab: Lab
    name: str
    folder: Path
    id: str

    @property
    def log(self) -> str:
        """The log, where the README says that it is; empty before the job has started."""
        path = self.folder / f"{self.name}-{self.id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def output(self) -> Path:
        """The folder that the job writes, where the README says that it is."""
        return self.folder / "output" / self.id

    @property
    def shown(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        return self.lab.job(self.id)

    @property
    def ended(self) -> bool:
        """Whether SLURM has done with the job."""
        return self.shown["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")

    def wait_for_hold(self, epochs: int) -> None:
        """Wait until a job of held() waits after as many epochs; raise AssertionError if it ends before."""
        waits = self.folder / f"held-{epochs}"
        wait_until(lambda: waits.exists() or self.ended, 300, f"{epochs} epochs of job {self.id}", ASK_SLURM)
        assert waits.exists(), f"job {self.id} ended before {epochs} epochs: {self.shown}\n{self.log}"

    def wait_for_line(self, text: str, times: int = 1) -> None:
        """Wait until the log contains `text` that many times; raise AssertionError if the job ends before."""
        what = f"{text!r} in the log of job {self.id}"
        wait_until(lambda: self.log.count(text) >= times or self.ended, 300, what, ASK_SLURM)
        assert self.log.count(text) >= times, f"it ended without {times} times {what}: {self.shown}\n{self.log}"

    def wait(self, seconds: float = 500) -> "Job":
        """Wait until the job has ended, and none of its processes is left; it may have waited for other jobs first."""
        wait_until(lambda: self.ended, seconds, f"the end of job {self.id} in {self.folder}", ASK_SLURM)
        wait_until(lambda: not self.processes(), 300, f"the end of all processes of job {self.id}")
        return self

    def processes(self) -> list[int]:
        """Return the ids of the job's processes on all nodes, found by their environment, wherever they are now."""
        return job_processes(self.lab, self.id)

    def cancel(self) -> None:
        """Take the job out of SLURM."""
        self.lab.run(["scancel", self.id])
        self.wait()


def sbatch(line: str, options: Sequence[str], arguments: Sequence[str] = ()) -> list[str]:
    """Return a page's line that submits a job, with more options and arguments; it prints nothing but the job's id."""
    before, found, after = line.partition("sbatch ")
    assert found, line
    return ["bash", "-c", f"{before}sbatch {shlex.join(['--parsable', *options])} {after} {shlex.join(arguments)}"]


def submit(
    lab: Lab,
    name: str,
    folder: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    line: str = "sbatch run.slurm",
    **variables: str,
) -> Job:
    """Run a page's line, with further options and arguments, in an example's folder, the tests' own Python as its VENV.

    The folder is handed over to the user who runs jobs. Whoever runs other commands in the lab has to do that before.
    """
    done = lab.run(sbatch(line, options, arguments), cwd=hand_over(folder, lab), env=SETTINGS | variables)
    assert done.returncode == 0, done.stderr
    return Job(lab, name, folder, done.stdout.strip())
