"""What users have around them: an account that is not root's, a umask, a locale, a folder's name, a /tmp of many."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from harness import outputs, runs
from harness.jobs import hand_over
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT, copy_example
from harness.runs import Reference
from lab import Wanted
from lab.config import find_account

# A locale in which no é can be written; Python would leave it for UTF-8 without the other two.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Of the words after the first, which is a folder, makes a command that finds no program to be executed in there.
NOEXEC = 'mount -t tmpfs -o mode=1777,noexec tmpfs "$0"; exec "$@"'
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who mounts, and gives files away")


def folder_name(example: str) -> str:
    """Return a name with a space and an é, which TensorFlow itself cannot read in an ASCII locale."""
    return "my thésis" if LAUNCHERS[example].pytorch else "my thesis"


def noexec(folder: Path) -> list[str]:
    """Make a folder and return what stands before a command for which a file system without programs is in it."""
    folder.mkdir()
    return ["unshare", "--mount", "sh", "-ec", NOEXEC, str(folder)]


def as_user(uid: int, gid: int) -> list[str]:
    """Return what stands before a command that a user, perhaps without a name, executes."""
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]


def assert_trained(run: runs.Run, example: str, reference: Reference) -> None:
    """Check that a run has finished without a traceback, to the bits of an undisturbed one."""
    assert run.status == 0 and "\nfinished: " in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
    outputs.assert_same_run(run.folder / "output", reference.output)


@needs_root
@pytest.mark.runs("full", *[name for name in EXAMPLES if name != "ddp_spawn"])
def test_ordinary_user(example: str, source: Path, tmp_path: Path, reference: Reference) -> None:
    """A user without a name, umask 077, an ASCII locale, a space and an é in the path, TMPDIR with noexec: all work.

    The run ends with the bits of an undisturbed one, and nobody else can read what it has written.
    """
    folder = copy_example(source, tmp_path / folder_name(example) / example)
    home, temporary = tmp_path / "home", tmp_path / "t"
    home.mkdir()
    mount = noexec(temporary)
    hand_over(tmp_path)
    who = find_account(Wanted())
    assert who.uid, "tests run in a folder of root's, or of an ordinary user's"
    private = ["sh", "-c", 'umask 077; exec "$0" "$@"']
    own = ASCII | {"HOME": str(home), "USER": "", "LOGNAME": "", "TMPDIR": str(temporary)}
    before = set(folder.rglob("*"))
    run = runs.Run([*mount, *as_user(who.uid, who.gid), *private, *LAUNCHERS[example].command(2)], folder, own).wait()
    assert_trained(run, example, reference)
    written = {path: path.lstat() for path in set(folder.rglob("*")) - before if not path.match("stderr-*.txt")}
    assert folder / "output" / LAUNCHERS[example].model in written
    assert {(one.st_uid, one.st_mode & OPEN_TO_OTHERS) for one in written.values()} == {(who.uid, 0)}, written


@needs_root
@pytest.mark.only("ddp_spawn", "deepspeed", "horovod_tensorflow", "lora")
@pytest.mark.runs("full")
def test_two_users(example: str, source: Path, tmp_path: Path, reference: Reference) -> None:
    """Two users, neither of whom can write to the other's files, train at once with one temporary folder: both do."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    who, users = find_account(Wanted()), []
    for uid in (who.uid, who.uid + 1):
        folder, home = copy_example(source, tmp_path / f"user{uid}" / example), tmp_path / f"home{uid}"
        home.mkdir()
        users.append((uid, folder, home))
    hand_over(tmp_path)
    tmp_path.chmod(0o755)  # the second user has to come to his folder, too
    temporary.chmod(0o1777)
    started = []
    for uid, folder, home in users:
        subprocess.run(["chown", "--recursive", f"{uid}:{uid}", folder, home], check=True, timeout=300)
        own = {"HOME": str(home), "USER": "", "LOGNAME": "", "TMPDIR": str(temporary)}
        started.append(runs.Run([*as_user(uid, uid), *LAUNCHERS[example].command(2)], folder, own))
    for run in started:
        assert_trained(run.wait(600), example, reference)


@pytest.mark.only("torchrun_multinode")
def test_two_machines_without_slurm(example: str, folder: Path, reference: Reference) -> None:
    """The command of docs/index.md for two machines, here two launchers on one: the bits of one launcher."""
    (line,) = re.findall("`(torchrun --nnodes=2 .*)`", (ROOT / "docs" / "index.md").read_text())
    port = str(20000 + os.getpid() % 10000)
    for old, new in {"HOST1:29500": f"127.0.0.1:{port}", "--nproc-per-node=4": "--nproc-per-node=1"}.items():
        assert line.count(old) == 1, line
        line = line.replace(old, new)
    one_thread = {"OMP_NUM_THREADS": "1"}  # as torchrun sets it for several processes
    for run in [runs.Run(line.split(), folder, one_thread) for _ in range(2)]:
        assert run.wait().status == 0, run.stderr
    outputs.assert_same_run(folder / "output", reference.output)
