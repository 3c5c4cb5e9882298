"""The harness itself: it loses no output, waits for nothing without a limit, and notices a process that is left."""

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fake_gpus
from harness import browser, edits, jobs, launchers, runs, sessions
from harness.launchers import EXAMPLES, HOROVOD, LAUNCHERS, ROOT, copy_example
from harness.processes import (
    clean_environment,
    end_processes,
    find_processes,
    finish,
    read_line,
    running,
    wait_until,
)
from lab import Lab
from tests.conftest import PERMITTED_SKIPS


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
        assert time.monotonic() - start < 300 and run.pids() == []
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
    run.process.wait(300)
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
    run.wait(300)
    assert run.stdout == "epoch 1\nepoch 2\nepoch 3\n" and run.status == 0


def test_read_line() -> None:
    """A line of another command is read with a limit, and the rest stays for other readers."""
    with running(["sh", "-c", "printf 'one\\ntwo\\nthr'; exec sleep 600"]) as process:
        assert [read_line(process, 300) for _ in range(2)] == ["one\n", "two\n"]
        with pytest.raises(AssertionError, match="no line within 0.5 s, only b'thr'"):
            read_line(process, 0.5)
    assert process.returncode == -15
    with running(["sh", "-c", "printf 'one\\ntwo'"]) as process:
        assert read_line(process, 300) == "one\n" and process.communicate(timeout=300) == ("two", None)


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
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 failed, 1 passed" in done.stdout and "taken down" in done.stdout, done.stdout + done.stderr
    assert "Timeout" in done.stdout


STARTED = {  # what a command starts that does not end in time; each sleeps in the command's session
    "itself": "exec sleep 600",
    "a child": "sleep 600 & wait",
    "a child that is in no hurry": "trap '' TERM INT HUP; sleep 600",
    "a grandchild": "sh -c 'sleep 600 & wait' & wait",
    "an orphan": "(sleep 600 &); sleep 600",
    "several": "for number in 1 2 3; do sleep 600 & done; wait",
}


@pytest.mark.parametrize("script", STARTED.values(), ids=STARTED)
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, script: str) -> None:
    """After a time-out nothing runs on that nox or pytest, started by a test, has started."""
    marker = f"{runs.MARKER}={tmp_path.name}-{os.getpid()}"
    environment = os.environ | dict([marker.split("=")])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            finish(["sh", "-c", script], 0.5, env=environment)
        wait_until(lambda: not find_processes(marker), 300, "the end of all that it has started")
    finally:
        end_processes(marker)


LEFT = ("output", "data", "images", "model", "job-1.out", "job.log", "common/__pycache__", ".venv")


@pytest.mark.parametrize("name", LEFT)
def test_copy_has_nothing_that_a_run_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the repository comes nothing that git ignores, such as old data that would hide that they cannot be made."""
    monkeypatch.setattr(launchers, "ROOT", tmp_path / "repository")
    source = tmp_path / "repository" / "examples" / "some"
    (source / name).mkdir(parents=True)
    (source / "models.py").touch()
    copy = copy_example(source, tmp_path / "copy")
    assert (copy / "models.py").exists() and not (copy / name).exists()


def test_copy_has_what_a_test_has_made(tmp_path: Path) -> None:
    """From a folder elsewhere comes the data that a test's fixture has made there; each is one that git ignores."""
    for name in ("images", "model", "output"):
        (tmp_path / "source" / name).mkdir(parents=True)
    assert sorted(os.listdir(copy_example(tmp_path / "source", tmp_path / "copy"))) == ["images", "model"]
    for example in EXAMPLES:
        if words := LAUNCHERS[example].prepare.split():
            text = (ROOT / "examples" / example / words[1]).read_text()
            assert any(f'"{name}"' in text for name in launchers.MADE), words


SET = "SLURM_JOB_ID PET_RDZV_ENDPOINT GLOO_SOCKET_IFNAME PYTHONDONTWRITEBYTECODE OUTPUT_DIR VENV IMAGE WORLD_SIZE"


@pytest.mark.parametrize("name", SET.split())
def test_environment_of_a_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What a shell has set for its own jobs and runs is not handed on to those of the tests."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VENV_OF_MINE", "1")
    assert name not in clean_environment() and "VENV_OF_MINE" in clean_environment()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who gives files away")
def test_hand_over(tmp_path: Path) -> None:
    """All in a folder belongs to the lab's user, a link itself and not what it leads to; a lab's own user, if named."""
    running_lab = Lab()
    running_lab.uid, running_lab.gid = 54321, 54322
    precious = tmp_path / "precious"
    precious.touch()
    (tmp_path / "folder" / "in").mkdir(parents=True)
    (tmp_path / "folder" / "in" / "link").symlink_to(precious)
    (tmp_path / "folder" / "loop").symlink_to(tmp_path)
    jobs.hand_over(tmp_path / "folder", running_lab)
    for path in [tmp_path / "folder", *(tmp_path / "folder").rglob("*")]:
        assert (path.lstat().st_uid, path.lstat().st_gid) == (54321, 54322)
    assert precious.stat().st_uid == tmp_path.stat().st_uid == 0
    jobs.hand_over(tmp_path / "folder")
    assert (tmp_path / "folder" / "in").stat().st_uid not in (0, 54321)


def test_address_of_a_browser(tmp_path: Path) -> None:
    """The token, which all users would see in a list of processes, can stay in the file that the job has written."""
    url = "https://127.0.0.1:8888/lab?token=5ecre7"
    (tmp_path / "connect-1.txt").write_text(f"1. ssh -N login\n2. open\n   {url}\n")
    assert browser.address(str(tmp_path / "connect-1.txt")) == browser.address(url) == url


BUILDS = {  # of PyTorch, what UV_TORCH_BACKEND asks for: what is said, and whether CI permits it
    ("", ""): ("", True),
    ("+cu126", "cu126"): ("", True),
    ("+cpu", "cpu"): ("UV_TORCH_BACKEND=cpu: needs a PyTorch built for CUDA", True),
    ("+cpu", ""): ("needs a PyTorch built for CUDA, not 2.15.0+cpu", False),
    ("+cpu", "auto"): ("needs a PyTorch built for CUDA, not 2.15.0+cpu", False),
    ("+rocm7.2", ""): ("needs a PyTorch built for CUDA, not 2.15.0+rocm7.2", False),
}


@pytest.mark.parametrize(("build", "asked"), BUILDS)
def test_build_without_cuda(monkeypatch: pytest.MonkeyPatch, build: str, asked: str) -> None:
    """Without CUDA the GPU lines are not executed: in CI that is a failure, unless such a build was asked for."""
    says, permitted = BUILDS[build, asked]
    monkeypatch.setattr(fake_gpus, "KNOWN", "2.15.0")
    monkeypatch.setattr(fake_gpus, "version", lambda _: f"2.15.0{build}")
    monkeypatch.setenv("UV_TORCH_BACKEND", asked)
    reason = fake_gpus.why_not()
    assert reason.startswith(says) and bool(reason) == bool(says)
    assert not reason or any(re.match(pattern, reason) for pattern in PERMITTED_SKIPS) == permitted


NOX = """
import os, runpy, sys
os.geteuid = lambda: {user}
os.umask(0o077)
runpy.run_path("noxfile.py")
print(oct(os.umask(0)))
"""


@pytest.mark.parametrize(("user", "umask"), [(0, "0o22"), (1000, "0o77")])
def test_umask_of_nox(user: int, umask: str) -> None:
    """What root installs can be read by the user who runs the lab's jobs; others keep their umask."""
    done = finish([sys.executable, "-c", NOX.format(user=user)], 300, cwd=ROOT)
    assert done.stdout == f"{umask}\n", done.stderr


@functools.cache  # nox accepts each name of a session once
def noxfile() -> dict[str, Any]:
    """Return what noxfile.py defines."""
    return runpy.run_path(str(ROOT / "noxfile.py"))


def test_how_many_tests_at_once() -> None:
    """Cores and memory both bound it; two at least."""
    cases = {(2, 24.0): 3, (8, 33.0): 8, (64, 512.0): 96, (16, 8.0): 2, (1, 2.0): 2}
    assert {case: sessions.workers(*case) for case in cases} == cases


BUILDS_OF_TORCH = {  # the system, nvidia-smi, variables, uv: the variable that is set, and a word of what is said
    "laptop": ("linux", False, {}, "uv", {"UV_TORCH_BACKEND": "cpu"}, "for CPUs, since there is no NVIDIA driver"),
    "no index": ("linux", False, {}, "offline-uv", {}, "for CUDA, since the index of those for CPUs"),
    "without uv": ("linux", False, {}, "", {}, "for CUDA, since uv does not"),
    "driver": ("linux", True, {}, "uv", {}, "NVIDIA driver"),
    "asked for": ("linux", True, {"UV_TORCH_BACKEND": "cu126"}, "uv", {}, "UV_TORCH_BACKEND=cu126"),
    "CI": ("linux", False, {"CI": "true"}, "uv", {}, "CI=true"),
    "macOS": ("darwin", False, {}, "uv", {}, "on this system"),
}


@pytest.mark.parametrize("case", BUILDS_OF_TORCH)
def test_build_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """The small build for CPUs is taken where it will do and can be had; what is said says which one it is.

    The stub of uv looks at the command and at its variables.
    """
    system, driver, variables, uv, expected, says = BUILDS_OF_TORCH[case]
    for name, status in (("uv", 0), ("offline-uv", 2), ("nvidia-smi", 0)):
        wanted = 'test "$UV_HTTP_RETRIES $1 $2" = "0 pip install"'
        (tmp_path / name).write_text(f"#!/bin/sh\n{wanted} && exit {status}\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "requirements.txt").write_text("torch==2.15.0\n")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sessions.shutil, "which", lambda name: name if driver else None)
    for name in ("CI", "UV_TORCH_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = sessions.build_of_torch(str(tmp_path / uv) if uv else "", tmp_path / "requirements.txt")
    assert found[0] == expected and says in found[1]


@pytest.mark.parametrize("horovod", HOROVOD)
def test_horovod_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, horovod: str) -> None:
    """Only the wheel that install.sh would take counts: of its Horovod, its framework's release, this Python."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script, pins = ((ROOT / "examples" / horovod / name).read_text() for name in ("install.sh", "requirements.txt"))
    recipe = "-".join(re.search(rf"^{name}=(\S+)", script, re.MULTILINE)[1] for name in ("version", "recipe"))
    framework = "".join(re.search(r"^(torch|tensorflow)(?:-cpu)?==(\S+)", pins, re.MULTILINE).groups())
    assert not sessions.horovod_is_built(horovod, "3.11")
    for name in (
        f"{recipe}-{framework}-py3.12-linux",
        f"0.1-{recipe}-{framework}-py3.11-linux",
        f"{recipe}-none-py3.11-x",
    ):
        (tmp_path / "horovod-wheels" / name).mkdir(parents=True)
        (tmp_path / "horovod-wheels" / name / "horovod.whl").touch()
    assert not sessions.horovod_is_built(horovod, "3.11")
    folder = tmp_path / "horovod-wheels" / f"{recipe}-{framework}-py3.11-linux-mpi"
    folder.mkdir()
    assert not sessions.horovod_is_built(horovod, "3.11")
    (folder / "horovod.whl").touch()
    assert sessions.horovod_is_built(horovod, "3.11")


REFUSED_BY_NOX = {  # the platform, and what follows `--`
    "no release": ("linux", ["--torch"], "--torch : choose from 2.6.0"),
    "no release, last": ("linux", ["-k", "bad", "--torch"], "--torch : choose from 2.6.0"),
    "no such release": ("linux", ["--torch", "1.0"], "--torch 1.0: choose from 2.6.0"),
    "macOS": ("darwin", [], "so they need Linux"),
    "Windows": ("win32", [], "so they need Linux"),
}


@pytest.mark.parametrize("case", REFUSED_BY_NOX)
def test_refused_by_nox(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One line, before anything is installed."""
    platform, words, says = REFUSED_BY_NOX[case]
    monkeypatch.setattr(sys, "platform", platform)

    class Session:
        posargs = words

        def error(self, text: str) -> None:
            raise SystemExit(text)

    with pytest.raises(SystemExit, match=re.escape(says)):
        noxfile()["run_tests"](Session(), "ddp_spawn", "smoke")
