"""What users have around them: an account that is not root's, a umask, a locale, a folder's name, a /tmp of many."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from harness import outputs, refusals, runs
from harness.jobs import hand_over
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference
from lab import Wanted
from lab.config import find_account

# A locale in which no é can be written; Python would leave it for UTF-8 without the other two.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NAME = "my thésis"
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# Of the words after the first, which is a folder, makes a command that finds no program to be executed in there.
NOEXEC = 'mount -t tmpfs -o mode=1777,noexec tmpfs "$0"; exec "$@"'
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who mounts, and gives files away")


def noexec(folder: Path) -> list[str]:
    """Make a folder and return what stands before a command for which a file system without programs is in it."""
    folder.mkdir()
    return ["unshare", "--mount", "sh", "-ec", NOEXEC, str(folder)]


def as_user(uid: int, gid: int) -> list[str]:
    """Return what stands before a command that a user, perhaps without a name, executes."""
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]


def assert_trained(run: runs.Run, example: str, reference: Reference) -> None:
    """Check that a run has finished without a traceback, to the bits of an undisturbed one."""
    assert run.status == 0 and f"finished: {LAUNCHERS[example].words}" in run.stdout, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
    outputs.assert_same_run(run.folder / "output", reference.output)


@needs_root
@pytest.mark.runs("one")
def test_ordinary_user(example: str, source: Path, tmp_path: Path, reference: Reference) -> None:
    """A user without a name, umask 077, an ASCII locale, a space and an é in the path, TMPDIR with noexec: all work.

    The run ends with the bits of an undisturbed one, and nobody else can read what it has written.
    """
    folder, home, temporary = copy_example(source, tmp_path / NAME / example), tmp_path / "home", tmp_path / "t"
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
@pytest.mark.runs("weekly")
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


LOCALE = "en_US.ISO-8859-1"
LOCALES = Path("/usr/share/i18n/charmaps/ISO-8859-1.gz")


@pytest.mark.skipif(not (LOCALES.exists() and shutil.which("localedef")), reason="needs Debian's package locales")
@pytest.mark.runs("weekly")
def test_latin_1(example: str, source: Path, tmp_path: Path, reference: Reference) -> None:
    """In a locale whose letters are single bytes, in a folder whose name it lacks, a run has the same bits."""
    (tmp_path / "locales").mkdir()
    words = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", f"{tmp_path / 'locales' / LOCALE}"]
    subprocess.run(words, check=True, timeout=300)
    folder = copy_example(source, tmp_path / "Ελένη" / example)
    own = {"LC_ALL": LOCALE, "LOCPATH": str(tmp_path / "locales"), "PYTHONUTF8": "0"}
    asked = "import locale; print(locale.getpreferredencoding())"
    assert runs.Run(["python", "-c", asked], folder, own).wait().stdout == "ISO-8859-1\n"
    assert_trained(runs.Run(LAUNCHERS[example].command(2), folder, own).wait(), example, reference)


@needs_root
@pytest.mark.only("fsdp", "lora", "srun_multinode", "torchrun_multinode", "torchrun_vision")
@pytest.mark.runs("weekly")
@pytest.mark.parametrize("other", [False, True])
def test_compile(example: str, folder: Path, tmp_path: Path, other: bool) -> None:
    """--compile where no program of TMPDIR can be executed: one line says so, and what it names helps."""
    words = [*noexec(tmp_path / "t"), *LAUNCHERS[example].command(2), "--compile", "--epochs", "1"]
    own = {"TMPDIR": str(tmp_path / "t")}
    if other:
        own["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    run = runs.Run(words, folder, own).wait(500)
    if other:
        assert run.status == 0, run.stderr
    else:
        refusals.assert_refused(run, 1, "--compile: PyTorch cannot compile the model", "TORCHINDUCTOR_CACHE_DIR")


@needs_root
@pytest.mark.only("deepspeed")
@pytest.mark.runs("weekly")
def test_compiled_op(example: str, folder: Path, tmp_path: Path) -> None:
    """An op of DeepSpeed's that is compiled where no program can be executed: one line says so."""
    words = [*noexec(tmp_path / "t"), *LAUNCHERS[example].command(2), "--deepspeed_config", "ds_config_offload.json"]
    run = runs.Run(words, folder, {"TORCH_EXTENSIONS_DIR": str(tmp_path / "t" / "ops")}).wait(400)
    refusals.assert_refused(run, 1, "ds_config_offload.json", "TORCH_EXTENSIONS_DIR")
