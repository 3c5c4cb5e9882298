"""Images that Apptainer builds from each container.def, and the shipped jobs in them, by IMAGE=example.sif.

Built as on a cluster, by the ordinary user who submits the jobs, with two differences: the base is a Debian that
debootstrap has made, since there is no registry of images here, and the image is not compressed.
"""

import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs
from harness.jobs import EPOCHS, hand_over, submit
from harness.launchers import HOROVOD, LAUNCHERS, copy_example
from harness.runs import Reference, locked
from lab import Lab, Wanted, faults
from lab.config import STUDENT, find_account
from tests.slurm.small import all_nodes, assert_completed, assert_refused, held, two_processes
from tests.slurm.test_run_slurm import array_of_three, stub

pytestmark = [pytest.mark.slurm, pytest.mark.runs("full"), pytest.mark.timeout(3600)]
UNCOMPRESSED = "-noI -noD -noF -noX"
# What this machine needs to reach package indexes, and the image as well.
SETTINGS = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", "/root/.config/pip/pip.conf")
HERE = "docs/maintaining.md says where these tests run"


def as_user(home: Path, *words: str) -> list[str]:
    """Return a command that the lab's user runs outside of the lab, where the internet is, in a home folder for tests.

    Apptainer goes by the home folder that /etc/passwd names, unless it is told.
    """
    account = pwd.getpwuid(find_account(Wanted()).uid)
    user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups"]
    places = [f"APPTAINER_CONFIGDIR={home}/.apptainer", f"APPTAINER_CACHEDIR={home}/.apptainer/cache"]
    return [*user, "env", f"HOME={home}", f"USER={account.pw_name}", *places, *words]


def why_not_here() -> str | None:
    """Say why no image can be built on this machine, whose lab can start; None where it can."""
    if missing := [name for name in ("apptainer", "debootstrap") if not shutil.which(name)]:
        return f"needs Apptainer and debootstrap, and has no {missing[0]}: {HERE}"
    try:
        pwd.getpwuid(find_account(Wanted()).uid)
    except KeyError:
        return f"needs an ordinary user who owns this folder, or is called {STUDENT}: {HERE}"
    return None


@pytest.fixture(scope="session")
def base(lab: Lab, session_folder: Path) -> Path:
    """A folder of the user's with Debian and Python instead of python:3.11-slim-bookworm."""
    if reason := why_not_here():
        pytest.skip(reason)
    folder, part = session_folder / "container-base", session_folder / "base-part"
    with locked(session_folder / "container-base.lock"):
        if not folder.exists():
            ask = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
            mirror = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=300).stdout.split()[0]
            packages = "ca-certificates,python3,python3-dev,python3-venv"
            words = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(part), mirror]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=600)
            for name in filter(os.path.exists, SETTINGS):
                (part / name[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(name, part / name[1:])
            shutil.rmtree(part / "dev")  # devices, which an ordinary user cannot copy
            (part / "dev").mkdir()
            hand_over(part).rename(folder)
    return folder


@pytest.fixture(scope="session")
def image(source: Path, base: Path, session_folder: Path) -> Path:
    """The image that the example's container.def describes: 6 GB, which pytest removes if all tests pass."""
    folder = session_folder / "image" / source.name
    with locked(session_folder / "image.lock"):
        if not (folder / "example.sif").exists():
            hand_over(copy_example(source, folder))
            words = ["apptainer", "build", "--mksquashfs-args", UNCOMPRESSED, "--build-arg", "BOOTSTRAP=localimage"]
            words += ["--build-arg", f"FROM={base}", "example.sif", "container.def"]
            home = session_folder / "home"
            home.mkdir(exist_ok=True)
            words = as_user(hand_over(home), *words)
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1500)
            assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return folder / "example.sif"


def test_shipped_job(
    example: str, source: Path, lab: Lab, image: Path, shipped_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """The shipped job in the image, and one with GPUs (--nv), end with the bits of the job without an image."""
    folder = copy_example(source, tmp_path / example)
    job = submit(lab, example, folder, options=(all_nodes(source),), VENV="/nowhere", IMAGE=str(image))
    small = submit(lab, example, folder, "--epochs=1", options=two_processes(source), IMAGE=str(image))
    assert_completed(job, EPOCHS)
    assert_completed(small, 1, processes=2)
    print(job.log)
    outputs.assert_same_run(job.output, shipped_job().output)
    if example in HOROVOD:
        assert "4 processes on 2 nodes, mpi on cpu" in job.log


@pytest.mark.only("torchrun_multinode")
def test_stopped_and_requeued(
    example: str, source: Path, lab: Lab, image: Path, two_process_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """Near its time limit, then preempted: the job in the image stops after a step, and ends with the same bits."""
    folder = held(source, tmp_path / example, 1)
    job = submit(lab, example, folder, options=two_processes(source), IMAGE=str(image))
    job.wait_for_hold(1)
    faults.timelimit(lab, job.id)
    job.wait_for_line("requeueing")
    edits.hold(folder, 2)
    job.wait_for_hold(2)
    faults.requeue(lab, job.id)
    job.wait_for_line("stopped after", 2)
    edits.hold(folder, edits.GO_ON)
    assert_completed(job, EPOCHS, processes=2)
    run = outputs.read_run(job.output)
    *stops, _ = [stop["step"] for stop in run["stops"]]
    assert job.shown["Restarts"] == "2" and len(stops) == 2, f"{job.shown}\n{job.log}"
    assert [start["step"] for start in run["starts"]] == [0, *stops], run
    outputs.assert_same_run(job.output, two_process_job().output)


def test_job_array(example: str, source: Path, lab: Lab, image: Path, tmp_path: Path) -> None:
    """A task of a job array is stopped near its time limit and requeued, alone, as without an image."""
    array_of_three(lab, stub(source, tmp_path / example), IMAGE=str(image))


LOOK = """
import os, sys
from pathlib import Path
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
Path("written").touch()
print("read", [Path(arguments[name], "marker").read_text() for name in ("--data-dir", "--text-file")], flush=True)
print("site", "site-packages" in "".join(path for path in sys.path if "elsewhere" in path), flush=True)
sys.exit(7)
"""


def test_what_it_sees(example: str, source: Path, lab: Lab, image: Path) -> None:
    """It sees the folder, whose name has a space, and data through links; an exit status is the job's, as without.

    All of this lies where Apptainer shows nothing by itself. PYTHONPATH of a user's shell has no effect.
    """
    with tempfile.TemporaryDirectory(dir="/srv") as name:
        place = Path(name)
        place.chmod(0o755)
        folder = stub(source, place / "my project" / example, LOOK)
        (place / "disk").mkdir()
        (place / "disk" / "marker").write_text("found")
        (place / "link").symlink_to("disk")
        (folder / "data").symlink_to(place / "disk")
        words = ("--data-dir", "data", "--text-file", str(place / "link"))
        variables: dict[str, Any] = {"IMAGE": str(image), "PYTHONPATH": "/elsewhere/site-packages"}
        job = submit(lab, example, folder, *words, **variables).wait()
        assert "read ['found', 'found']" in job.log and "site False" in job.log, job.log
        assert (folder / "written").exists()
        assert job.shown["JobState"] == "FAILED"
        # Where there are several tasks, srun ends the others by SIGTERM (143), and its status is the highest of all.
        by_torchrun = LAUNCHERS[example].local.startswith(("torchrun", "accelerate"))
        expected = ["1:0" if by_torchrun else "7:0", *["143:0"] * (example != "ddp_spawn")]
        assert job.shown["ExitCode"] in expected


def test_refused(example: str, source: Path, lab: Lab, base: Path, tmp_path: Path) -> None:
    """No such file, one that is no image, an image without what train.py imports: one line each, before srun."""
    module = re.search(r"^prepare (\w+)", (source / "run.slurm").read_text(), re.MULTILINE)[1]
    (tmp_path / "text.sif").write_text("not an image")
    other = tmp_path / "other.sif"  # a folder can be an image as well
    shutil.copytree(base, other, symlinks=True)
    if module != "torch":
        (other / "usr/lib/python3/dist-packages/torch").mkdir()
        (other / "usr/lib/python3/dist-packages/torch/__init__.py").touch()
    (other / "usr/bin/python").symlink_to("python3")
    hand_over(tmp_path)
    for image, text in (("missing.sif", "no such file"), ("text.sif", "image"), ("other.sif", module)):
        folder = stub(source, tmp_path / image.partition(".")[0] / example)
        job = submit(lab, example, folder, IMAGE=f"../../{image}")
        assert_refused(job, f"{image} cannot run train.py (", text)
        assert "started" not in job.log
