"""The harness itself: it notices a process that is left, and a copy that differs from its source."""

import shutil
import sys
from pathlib import Path

import pytest

from harness import copies, runs
from harness.launchers import EXAMPLES, ROOT


def python(text: str, folder: Path) -> runs.Run:
    """Start a program."""
    return runs.Run([sys.executable, "-c", text], folder)


LEAVES = {
    "with its output": "subprocess.Popen(['sleep', '600'])",
    "elsewhere": "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, start_new_session=True)",
}


@pytest.mark.parametrize("where", LEAVES)
def test_process_left(tmp_path: Path, where: str) -> None:
    """A run that ends well and leaves a process: an error that names it. One that takes a moment is no error."""
    run = python(f"import subprocess; {LEAVES[where]}; print('done')", tmp_path)
    with pytest.raises(AssertionError, match=r"ended with 0, and 1 s later there were still \['sleep 600'\]:\ndone"):
        run.wait(leaves=1)
    assert run.pids() == []
    slow = python(f"import subprocess; {LEAVES[where].replace('600', '1')}; print('done')", tmp_path).wait()
    assert slow.status == 0 and slow.stdout == "done\n"


def test_kill_finds_every_process(tmp_path: Path) -> None:
    """A grandchild in a session of its own, whose parent is gone, is found and ended."""
    child = "import os, time; os.setsid(); print('ready', flush=True); time.sleep(600)"
    run = python(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])", tmp_path)
    run.read_until("ready")
    run.process.wait(300)
    assert len(run.pids()) == 1
    run.kill()
    assert run.pids() == []
    run.wait()


def test_sync(tmp_path: Path) -> None:
    """`nox -s sync` names a changed, a missing and an extra file, and --fix corrects them."""
    for name in ("common", "longrun", "examples", "harness", "lab"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("output", "data", ".venv"))
    for name in ("noxfile.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    assert runs.nox(tmp_path, "-s", "sync").returncode == 0
    changed = []
    for name in EXAMPLES:
        files = [tmp_path / "examples" / name / file for file in ("longrun.py", "job.sh", "common/arrays.py")]
        changed += [file for file in files if file.exists()]  # fsdp has no common/
    for path in changed[:-1]:
        path.write_text("changed\n")
    changed[-1].unlink()
    extra = tmp_path / "examples" / "ddp_spawn" / "common" / "extra.py"
    extra.touch()
    wrong = {str(path.relative_to(tmp_path)) for path in [*changed, extra]}
    failed = runs.nox(tmp_path, "-s", "sync")
    assert failed.returncode != 0 and "nox -s sync -- --fix" in failed.stderr
    assert {*copies.differences(tmp_path)} == wrong and all(name in failed.stderr for name in wrong)
    assert runs.nox(tmp_path, "-s", "sync", "--", "--fix").returncode == 0
    assert copies.differences(tmp_path) == [] and not extra.exists()
