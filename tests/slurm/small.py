"""What tests of jobs share: small jobs, jobs that wait, and how a job has to end."""

import re
from pathlib import Path

from harness import edits, outputs
from harness.jobs import Job
from harness.launchers import LAUNCHERS, copy_example


def header(folder: Path, option: str) -> int:
    """Return the number that run.slurm's header gives to an option."""
    return int(re.search(rf"^#SBATCH --{option}=(\d+)", (folder / "run.slurm").read_text(), re.MULTILINE)[1])


def held(source: Path, folder: Path, epochs: int) -> Path:
    """Copy an example whose runs wait after as many epochs, until edits.hold permits more."""
    edits.hold_epochs(copy_example(source, folder), epochs)
    return folder


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


def assert_refused(job: Job, *texts: str) -> None:
    """Check that a job has failed with one error line."""
    job.wait()
    assert job.shown["JobState"] == "FAILED", job.log
    errors = [line for line in job.log.splitlines() if line.startswith("run.slurm: error:")]
    assert len(errors) == 1 and all(text in errors[0] for text in texts), job.log
