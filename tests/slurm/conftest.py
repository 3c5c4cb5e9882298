"""The fixtures: the jobs that others are compared with, and ssh to nodes of the lab."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import readme, runs
from harness.jobs import EPOCHS, submit
from harness.launchers import copy_example
from harness.processes import running
from harness.runs import Reference
from lab import Lab
from tests.slurm.small import all_nodes, assert_completed, two_processes

HEAD = "head"  # the login node of the lab


@pytest.fixture(scope="session")
def reference_job(example: str, source: Path, lab: Lab, session_folder: Path) -> Callable[[str], Reference]:
    """A function that returns what a job leaves: one as shipped, or a small one with 2 processes.

    The lab's GPUs, which the small job asks for, are stand-ins: CUDA finds none, and it trains on CPU.
    """

    def make(folder: Path, small: bool) -> Reference:
        copied = copy_example(source, folder / example)
        options = two_processes(source) if small else (all_nodes(source),)
        line = "sbatch run.slurm"
        if example != "deepspeed":  # whose README has it with an argument, see test_deepspeed_jobs.py
            line = readme.command(f"examples/{example}/README.md", "sbatch run.slurm")
        job = submit(lab, example, copied, options=options, line=line)
        assert_completed(job, EPOCHS, processes=2 if small else None)
        assert not small or "gpu:" in job.shown["TresPerNode"]
        return Reference(job.output, job.log)

    def find(name: str) -> Reference:
        folder = session_folder / f"undisturbed-{name}-{example}"
        return runs.keep(folder, lambda folder: make(folder, name == "small"))

    return find


@pytest.fixture(scope="session")
def shipped_job(reference_job: Callable[[str], Reference]) -> Callable[[], Reference]:
    """A function that returns what run.slurm leaves as it is; called last, since it may have to run the job."""
    return lambda: reference_job("shipped")


@pytest.fixture(scope="session")
def two_process_job(reference_job: Callable[[str], Reference]) -> Callable[[], Reference]:
    """A function that returns what a job with 2 processes leaves; called last, since it may have to run the job."""
    return lambda: reference_job("small")


@pytest.fixture
def ssh(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """An ssh server on the login node and on node1, as clusters have them, and a key with which the lab's user enters.

    The user's own computer is the login node, too.
    """
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(words, check=True, timeout=300)
    own = Path(lab.home, ".ssh")
    lab.run(["mkdir", "-p", str(own)], cwd="/", check=True)
    settings = f"IdentityFile {own}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    for name, text in {"config": settings, "user": (keys / "user").read_text()}.items():
        lab.run(["sh", "-c", f"umask 077; cat >{own}/{name}"], cwd="/", input=text, check=True)
    words = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", "-h", str(keys / "host")]
    options = [f"AuthorizedKeysFile={keys}/user.pub", "StrictModes=no", "UsePAM=no", "PidFile=none"]
    words += [word for option in options for word in ("-o", option)]
    with contextlib.ExitStack() as stack:
        for node in (HEAD, "node1"):
            lab.run(["mkdir", "-p", "/run/sshd"], node, "/", user="root", check=True)
            stack.enter_context(running(lab.command(words, node, "/", user="root")))
        yield
