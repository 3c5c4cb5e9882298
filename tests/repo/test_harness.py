"""The harness itself: it loses no output, waits for nothing without a limit, and notices a process that is left."""

import sys
from pathlib import Path

import pytest

from harness import runs


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
