"""Submit a run.slurm in the lab, follow the job, and find what it has left."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness import edits, outputs
from harness.launchers import EPOCH, LAUNCHERS, copy_example
from harness.processes import ASK_SLURM, find_processes, seldom, wait_until, workers
from lab import Lab, Wanted, faults
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
    """Give a folder, with all that is in it, to the user who runs a lab's jobs, and let them come to it; return it.

    Before there is a lab, he is the one whom a lab that is started here would have.
    """
    owner = lab or find_account(Wanted())
    # The program goes from folder to folder by their handles: the user, who may own some already, cannot put a link in
    # the place of a folder meanwhile, and so get a file of root's.
    subprocess.run(
        ["chown", "--recursive", "--no-dereference", f"{owner.uid}:{owner.gid}", folder], check=True, timeout=300
    )
    for parent in folder.parents:  # pytest makes its folders for itself alone
        if parent.is_relative_to(tempfile.gettempdir()) and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


def job_processes(lab: Lab, job: str) -> list[int]:
    """Return the ids of all processes of a job; a job of the same number in another lab is not meant."""
    found = set(find_processes(f"SLURM_JOB_ID={job}"))
    return sorted(found.intersection(lab.processes()))


def cancel_left(lab: Lab) -> str:
    """Cancel the jobs that are left in a lab; return them, one a line, or nothing."""
    words = ["squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING", "--format=%i %j %T"]
    left = lab.run(words, cwd="/", check=True).stdout.strip()
    if left:
        lab.run(["scancel", *(line.split()[0] for line in left.splitlines())], cwd="/", user="root")
        wait_until(lambda: not lab.run(["squeue", "--noheader"], cwd="/").stdout, 300, f"the end of {left}", ASK_SLURM)
    return left


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

    def wait_for_epoch(self, number: int) -> None:
        """Wait until an epoch is over: saved, and printed."""
        self.wait_for_line(EPOCH.format(number))

    def wait_for_hold(self, epoch: int) -> None:
        """Wait until a job of held() is where an epoch (from 0) begins; raise AssertionError if it ends before."""
        began, ended = self.folder / f"began-{epoch}", seldom(lambda: self.ended)
        wait_until(lambda: began.exists() or ended(), 300, f"epoch {epoch} of job {self.id}")
        assert began.exists(), f"job {self.id} ended before epoch {epoch}: {self.shown['JobState']}\n{self.log}"

    def wait_for_line(self, text: str, seconds: float = 300) -> None:
        """Wait until the log contains `text`; raise AssertionError if the job ends before."""
        ended = seldom(lambda: self.ended)
        wait_until(lambda: text in self.log or ended(), seconds, f"{text!r} in the log of job {self.id}")
        assert text in self.log, f"job {self.id} ended without {text!r}: {self.shown['JobState']}\n{self.log}"

    @property
    def ended(self) -> bool:
        """Whether SLURM has done with the job."""
        return self.shown["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")

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


def submit_four(lab: Lab, name: str, folder: Path, *arguments: str) -> Job:
    """Submit run.slurm for 4 processes of 2 threads: on 2 nodes, or on one where train.py starts them itself."""
    if header(folder, "nodes") > 1:
        return submit(lab, name, folder, *arguments)
    return submit(lab, name, folder, "--processes", "4", *arguments, options=("--cpus-per-task=8",))


def header(folder: Path, option: str) -> int:
    """Return the number that run.slurm's header gives to an option."""
    value = re.search(rf"^#SBATCH --{option}=(\d+)", (folder / "run.slurm").read_text(), re.MULTILINE)
    assert value, f"run.slurm has no --{option}"
    return int(value[1])


def slowed(source: Path, folder: Path, sleep: str) -> Path:
    """Copy an example and let each of its epochs sleep first, `sleep` seconds, so that it lasts and no core is busy."""
    edits.start_epochs_with(copy_example(source, folder), LAUNCHERS[source.name], f"time.sleep({sleep})")
    return folder


# Begin no epoch with the number (from 0) in the file `hold`, unless the run is asked to stop.
HOLD = """
import time
from pathlib import Path

def wait(output, epoch):
    Path(f"began-{epoch}").touch()
    while Path("hold").read_text() == str(epoch) and not (output / "stop").exists():
        time.sleep(0.05)
"""


def held(source: Path, folder: Path, epoch: int) -> Path:
    """Copy an example with longrun.py that waits where this epoch begins (from 0), see hold()."""
    copy_example(source, folder)
    (folder / "held.py").write_text(HOLD)
    launcher = LAUNCHERS[source.name]
    edits.start_epochs_with(folder, launcher, f"__import__('held').wait({launcher.epoch_names})")
    hold(folder, epoch)
    return folder


def hold(folder: Path, epoch: int | None) -> None:
    """Have the job of a folder that held() has made wait where another epoch begins, or nowhere any more."""
    (folder / "new-hold").write_text(str(epoch))
    (folder / "new-hold").rename(folder / "hold")  # in one piece: it is read all the time


def all_nodes(folder: Path) -> str:
    """Return the option that gives a job the first nodes of the lab, as many as its header asks for."""
    return f"--nodelist=node[1-{header(folder, 'nodes')}]"


def two_processes(folder: Path) -> tuple[str, ...]:
    """Return the options that give a job 2 processes of one thread, on all nodes that its header asks for.

    Each start of a process takes a core 6 to 9 s. So most of what happens to jobs is tested with as few as there can
    be. The order in which gradients are added shows only with more: some tests keep the 4 of the header for that.
    """
    each = 2 // header(folder, "nodes")
    return (all_nodes(folder), "--ntasks-per-node=1", f"--gpus-per-node={each}", f"--cpus-per-task={each}")


def assert_completed(job: Job, epochs: int, processes: int | None = None) -> None:
    """Check that a job ended well, where the README says, and that as many processes trained as it asked for."""
    job.wait()
    assert job.shown["JobState"] == "COMPLETED", f"{job.shown}\n{job.log}"
    rows = outputs.read_metrics(job.output)
    assert [row["epoch"] for row in rows] == list(range(1, epochs + 1))
    assert {row["world_size"] for row in rows} == {processes or LAUNCHERS[job.name].processes_in_job}
    assert "\nfinished: " in job.log
    assert outputs.read_model(job.output)


def kill_worker(job: Job) -> None:
    """Send SIGKILL to one of a job's workers."""
    os.kill(max(workers(job.processes())), signal.SIGKILL)


def assert_failed(job: Job, since: float, seconds: float = 60, output: str = "") -> None:
    """Check that a job fails in time after what happened to it, says what to do, and leaves no process.

    `output` is the name of the folder that it writes in output/, where that is another job's.

    What happened came after the moment `since`, as time.time() tells it. SLURM has noted when the job ended, and when
    it began: what it waited in the queue, and how long this test took to notice its end, does not count.
    """
    shown = job.wait().shown
    assert shown["JobState"] == "FAILED", shown
    began, ended = (datetime.fromisoformat(shown[name]).timestamp() for name in ("StartTime", "EndTime"))
    took = ended - max(since, began)
    assert took <= seconds, f"job {job.id} failed after {took:.0f} s, not within {seconds} s:\n{job.log}"
    last = job.log.splitlines()[-1]
    advice = f"sbatch run.slurm --output-dir output/{output or job.id}"
    assert last.startswith("run.slurm: error:") and advice in last, job.log


def assert_refused(job: Job, *texts: str) -> None:
    """Check that a job has failed with one error line."""
    job.wait()
    assert job.shown["JobState"] == "FAILED", job.log
    errors = [line for line in job.log.splitlines() if line.startswith("run.slurm: error:")]
    assert len(errors) == 1 and all(text in errors[0] for text in texts), job.log


def assert_no_step_lost(job: Job, stops: int = 1) -> None:
    """Check that a job has stopped so many times after a step that all processes agreed on, and continued after it."""
    run = outputs.read_run(job.output)
    *stopped, _ = run["stops"]
    assert len(stopped) == stops and all(stop["reason"].startswith("stopped") for stop in stopped), run["stops"]
    assert [start["step"] for start in run["starts"]] == [0, *(stop["step"] for stop in stopped)], run


def stop_twice(lab: Lab, source: Path, folder: Path, options: tuple[str, ...], **variables: str) -> Job:
    """Stop a job near its time limit, then by a requeue as in preemption: it completes, and no step is lost.

    Return the job. It runs in a copy of the example, whose epochs last so long that there is time to stop them.
    """
    sleep = "2 * (os.environ.get('SLURM_RESTART_COUNT', '0') in '01')"
    job = submit(lab, source.name, slowed(source, folder, sleep), options=options, **variables)
    job.wait_for_epoch(1)
    faults.timelimit(lab, job.id)
    job.wait_for_line("continuing after epoch")
    job.wait_for_epoch(len(outputs.read_metrics(job.output)) + 1)
    faults.requeue(lab, job.id)
    job.wait()
    assert job.shown["JobState"] == "COMPLETED" and job.shown["Restarts"] == "2", f"{job.shown}\n{job.log}"
    assert_no_step_lost(job, stops=2)
    return job


# It saves a checkpoint under each example's name again and again, until there is a file `finish` in its output folder,
# or it is asked to stop. It writes no model.
STUB = r"""
import contextlib, os, sys, time
from pathlib import Path

output = Path(sys.argv[sys.argv.index("--output-dir") + 1])
(output / "checkpoint").mkdir(exist_ok=True)
os.write(1, f"started {sys.argv[1:]}\n".encode())  # in one piece, beside other processes
while not (output / "finish").exists():
    for name in ("checkpoint.pt", "checkpoint.npz", "checkpoint/run.json"):
        (output / name).touch()
    time.sleep(0.1)
    with contextlib.suppress(FileNotFoundError):  # there is none, or another process was faster
        if (output / "stop").stat().st_size:  # else it is just being written
            (output / "stop").rename(output / "stopped")
    if (output / "stopped").exists():
        break
"""


def stub(source: Path, folder: Path, text: str = STUB) -> Path:
    """Copy an example and put another program in the place of its train.py."""
    copy_example(source, folder)
    (folder / "train.py").write_text(text)
    return folder


def by_torchrun(folder: Path) -> bool:
    """Return whether it is torchrun that starts the processes of a job, called by accelerate or not."""
    text = (folder / "run.slurm").read_text()
    return "torch.distributed.run" in text or "accelerate.commands.launch" in text


def stubs(folder: Path) -> int:
    """Return how many processes of a job say that they run, with the stub and the header's numbers."""
    return header(folder, "ntasks-per-node") * header(folder, "nodes") * (2 if by_torchrun(folder) else 1)


def wait_for_start(folder: Path, name: str, starts: int = 1) -> None:
    """Wait until the stub has said so many times that it runs, in the log of the job `name`."""
    log = folder / f"{folder.name}-{name}.out"

    def started() -> bool:
        text = log.read_text() if log.exists() else ""
        assert "error: the job failed" not in text, text
        return text.count("started [") >= starts * stubs(folder)

    wait_until(started, 300, f"start {starts} in {log}")


def array_of_three(lab: Lab, folder: Path, **variables: str) -> None:
    """In an array of 3 one task is requeued near its time limit: the finished and the running one are left alone.

    The stub is in the place of train.py.
    """
    array = submit(lab, folder.name, folder, options=("--array=1-3", "--cpus-per-task=1"), **variables)
    tasks = [f"{array.id}_{number}" for number in (1, 2, 3)]
    ids = [lab.wait_for_job(task, "RUNNING")["JobId"] for task in tasks]
    for job in ids:
        wait_for_start(folder, job)
    asked = ids.index(array.id)  # one task has the array's own id: `scontrol requeue` of that id means all of them
    finished, other = (asked + 1) % 3, (asked + 2) % 3
    (folder / "output" / tasks[finished] / "finish").touch()
    lab.wait_for_job(tasks[finished])
    faults.timelimit(lab, tasks[asked])
    wait_until(lambda: lab.job(tasks[asked])["Restarts"] == "1", 300, "the requeue of one task", ASK_SLURM)
    wait_for_start(folder, ids[asked], starts=2)
    shown = [lab.job(task) for task in tasks]
    assert [job["Restarts"] for job in shown] == [str(int(number == asked)) for number in range(3)]
    states = {asked: "RUNNING", finished: "COMPLETED", other: "RUNNING"}
    assert {number: job["JobState"] for number, job in enumerate(shown)} == states
    for number in (asked, other):
        (folder / "output" / tasks[number] / "finish").touch()
        assert lab.wait_for_job(tasks[number])["JobState"] == "COMPLETED"
