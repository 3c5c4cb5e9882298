"""A job with what users have around them: a umask, a locale, a temporary folder with noexec, data on a node's disk."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import outputs, readme
from harness.jobs import EPOCHS, SETTINGS, Job, hand_over, submit
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference
from lab import Lab
from tests import samples
from tests.slurm.small import assert_completed, two_processes
from tests.test_circumstances import ASCII, OPEN_TO_OTHERS, folder_name

pytestmark = pytest.mark.slurm
TEMPORARY = "/tmp/noexec"


@pytest.fixture
def noexec(lab: Lab) -> Iterator[None]:
    """Let each node have a temporary folder of which no program can be executed."""
    with contextlib.ExitStack() as stack:
        for node in lab.nodes:
            make = f"mkdir {TEMPORARY} && mount -t tmpfs -o mode=1777,noexec tmpfs {TEMPORARY}"
            lab.run(["sh", "-c", make], node, "/", user="root", check=True)
            stack.callback(lab.run, ["umount", "--lazy", TEMPORARY], node, "/", user="root", check=True)
        yield


@pytest.mark.only("ddp_spawn", "horovod_cpu", "horovod_tensorflow", "lightning", "torchrun_multinode")
@pytest.mark.runs("full")  # each job of the lab is an ordinary user's; test_ordinary_user of one machine has the rest
@pytest.mark.usefixtures("noexec")
def test_ordinary_user(
    example: str, source: Path, lab: Lab, tmp_path: Path, two_process_job: Callable[[], Reference]
) -> None:
    """An ordinary user, umask 077, an ASCII locale, a space and an é in the path, TMPDIR with noexec: all work.

    The job ends with the bits of an undisturbed one, and nobody else can read what it has written, its log included.
    """
    folder = hand_over(copy_example(source, tmp_path / folder_name(example) / example), lab)
    before = set(folder.rglob("*"))
    sbatch = ["sh", "-c", 'umask 077; exec sbatch --parsable "$@"', "sh", *two_processes(source), "run.slurm"]
    done = lab.run(sbatch, cwd=folder, env=SETTINGS | ASCII | {"TMPDIR": TEMPORARY}, check=True)
    job = Job(lab, example, folder, done.stdout.strip())
    assert_completed(job, EPOCHS, processes=2)
    assert lab.uid != 0 and job.shown["UserId"] == f"{lab.user}({lab.uid})"
    assert "Traceback" not in job.log and "error:" not in job.log, job.log
    written = {path: path.lstat() for path in set(folder.rglob("*")) - before if not path.is_symlink()}
    assert {job.output / LAUNCHERS[example].model, folder / f"{example}-{job.id}.out"} <= written.keys()
    assert {(one.st_uid, one.st_mode & OPEN_TO_OTHERS) for one in written.values()} == {(lab.uid, 0)}, written
    outputs.assert_same_run(job.output, two_process_job().output)


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("full")
def test_data_on_the_nodes(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The page's lines in run.slurm unpack a tar on the disk of each node, and remove the copy at the end."""
    folder = copy_example(source, tmp_path / example)
    samples.write_data(tmp_path / "data", "fashion_mnist")
    subprocess.run(["tar", "-cf", folder / "data.tar", "-C", tmp_path / "data", "."], check=True, timeout=60)
    lines = readme.block("docs/on-your-cluster.md", 'tar -xf /project/data.tar -C "$folder"')
    staging = "".join(f"    {line}\n" for line in lines).replace("/project/", f"{folder}/")
    script = (folder / "run.slurm").read_text()
    for old, new in (("    until_asked", f"{staging}    until_asked"), ('" "$@"\n', '" "$@" --data-dir "$folder"\n')):
        assert script.count(old) == 1, script
        script = script.replace(old, new)
    (folder / "run.slurm").write_text(script)
    arguments = ("--dataset", "fashion_mnist", "--epochs", "2", "--batch-size", "16")
    job = submit(lab, example, folder, *arguments, options=two_processes(source))
    assert_completed(job, 2, processes=2)
    outputs.assert_exact_metrics(job.output, "fashion_mnist", str(tmp_path / "data"))
    for node in lab.nodes:
        assert "tmp." not in lab.run(["ls", "/tmp"], node=node).stdout
