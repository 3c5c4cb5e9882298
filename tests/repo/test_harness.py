"""The harness itself: it loses no output, waits for nothing without a limit, and notices a process that is left."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import edits, runs
from harness.launchers import LAUNCHERS, ROOT
from harness.processes import read_line, running


def python(text: str, folder: Path) -> runs.Run:
    """Start a program."""
    return runs.Run([sys.executable, "-c", text], folder)


def test_no_line_is_lost(tmp_path: Path) -> None:
    """Of three lines that come in one piece the first is waited for, then the second: the third is there at the end."""
    run = python("import os; os.write(1, b'epoch 1\\nwritten x\\nfinished'); os.write(2, b'said')", tmp_path)
    assert run.read_until("epoch") == "epoch 1\n"
    assert run.read_until("written") == "written x\n"
    run.wait()
    assert (run.stdout, run.stderr, run.status) == ("epoch 1\nwritten x\nfinished", "said", 0)


def test_line_that_never_comes(tmp_path: Path) -> None:
    """read_until gives up after its limit, also while other lines come, and at the end of the run: it says which."""
    silent = "import sys, time; print('out', flush=True); print('err', file=sys.stderr, flush=True); time.sleep(600)"
    busy = "import time\nprint('out', end='', flush=True)\nwhile True: print('more', flush=True); time.sleep(0.01)"
    for text in (silent, busy):
        run, start = python(text, tmp_path), time.monotonic()
        with pytest.raises(AssertionError, match="did not come within 2 s; the run had not ended:\nout") as error:
            run.read_until("epoch", 2)
        assert time.monotonic() - start < 60 and run.pids() == []
        assert ("err" in str(error.value)) == (text == silent)
    ends = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path)
    with pytest.raises(AssertionError, match="'epoch' did not come before the run ended with 3:\nout\n\nerr"):
        ends.read_until("epoch")


def test_hang(tmp_path: Path) -> None:
    """A command that does not end in time is ended, and an error that shows what it has printed."""
    run = python("import time; print('out', flush=True); time.sleep(600)", tmp_path)
    with pytest.raises(AssertionError, match="hung for 2 s:\nout"):
        run.wait(2)
    assert run.pids() == [] and not run.temporary.exists()


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
    run.process.wait(60)
    assert len(run.pids()) == 1
    run.kill()
    assert run.pids() == []
    run.wait()


EPOCHS = """
import os, time
from pathlib import Path

Path("output").mkdir()
for epoch in range(1, 4):
    start = time.perf_counter()
    with open("output/metrics.csv", "a") as file:
        print("epoch\\n" * (epoch == 1), epoch, sep="", file=file)
    print("epoch", epoch, flush=True)
"""


def test_held_epochs(tmp_path: Path) -> None:
    """A fast run that may do two epochs is there when it is killed; one that is asked to stop begins the next."""
    (tmp_path / "train.py").write_text(EPOCHS)
    edits.hold_epochs(tmp_path, LAUNCHERS["ddp_spawn"])
    (tmp_path / edits.HOLD).write_text("2")
    run = runs.Run([sys.executable, "train.py"], tmp_path)
    run.read_until("epoch 2")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(1)
    (tmp_path / runs.STOP).touch()
    run.wait(60)
    assert run.stdout == "epoch 1\nepoch 2\nepoch 3\n" and run.status == 0


def test_read_line() -> None:
    """A line of another command is read with a limit, and the rest stays for other readers."""
    with running(["sh", "-c", "printf 'one\\ntwo\\nthr'; exec sleep 600"]) as process:
        assert [read_line(process, 60) for _ in range(2)] == ["one\n", "two\n"]
        with pytest.raises(AssertionError, match="no line within 0.5 s, only b'thr'"):
            read_line(process, 0.5)
    assert process.returncode == -15
    with running(["sh", "-c", "printf 'one\\ntwo'"]) as process:
        assert read_line(process, 60) == "one\n" and process.communicate(timeout=60) == ("two", None)


def test_every_command_has_a_limit() -> None:
    """Each subprocess.run of the harness and the tests says how long it may take, and nothing waits for a line."""
    functions = {"run", "call", "check_call", "check_output"}
    for path in [*ROOT.glob("harness/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            where, words = f"{path.relative_to(ROOT)}:{node.lineno}", {keyword.arg for keyword in node.keywords}
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess":
                assert node.func.attr not in functions or words & {"timeout", None}, where
            assert node.func.attr != "communicate" or "timeout" in words, where
            assert ast.unparse(node.func).rpartition(".stdout.")[2] not in ("read", "readline"), where


def test_hang_of_a_test(tmp_path: Path) -> None:
    """A test that hangs fails, its fixtures are taken down, its runs are ended, and the next test runs."""
    (tmp_path / "test_x.py").write_text(
        "import time, sys\n"
        "import pytest\n"
        "from pathlib import Path\n"
        "from harness import runs\n"
        "from tests.conftest import no_run_left\n\n"
        "@pytest.fixture(scope='session', autouse=True)\n"
        "def server():\n"
        "    yield\n"
        "    print('taken', 'down')\n\n"
        "@pytest.mark.timeout(2)\n"
        "def test_hangs():\n"
        "    runs.Run([sys.executable, '-c', 'import time; time.sleep(600)'], Path('.')).wait()\n\n"
        "def test_next():\n"
        "    pass\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    words += [f"--config-file={ROOT}/pyproject.toml", f"--rootdir={ROOT}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 failed, 1 passed" in done.stdout and "taken down" in done.stdout, done.stdout + done.stderr
    assert "Timeout" in done.stdout
