"""Run an example on this machine as a user would: start it, follow it, kill it and resume it."""

import contextlib
import fcntl
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.edits import HOLD, hold_epochs
from harness.launchers import EPOCH, LAUNCHERS, ROOT, copy_example
from harness.outputs import assert_same_run, read_run
from harness.processes import clean_environment, command_lines, find_processes, finish, wait_until, workers

MARKER = "EXAMPLES_TEST_RUN"  # in the environment of every process of a run, so that each can be found
PREFIX = re.compile(r"^\[\d+\]<std(?:out|err)>:", re.MULTILINE)  # horovodrun's, before each line of a process


STARTED: list["Run"] = []  # the runs that nobody has waited for yet


@dataclass(eq=False)
class Run:
    """A started command: wait for it, read its lines, look for its processes, kill them.

    It has a temporary folder of its own, which is removed at its end; `left` says what was in there then. A thread
    reads its stdout, all of it; `stdout` has what `read_until` and `wait` have taken of that. stderr is a file.
    """

    command: list[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marker = f"{MARKER}={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        self.temporary = Path(tempfile.mkdtemp(prefix="run-"))  # a short path: that of a socket has 107 bytes at most
        variables = {name: value, "TMPDIR": str(self.temporary)}
        environment = clean_environment() | variables | dict(self.environment)
        pipe = subprocess.PIPE
        self.errors = open(self.folder / f"stderr-{value}.txt", "w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=self.errors,
            text=True,
            errors="replace",
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # an empty one says that no more will come
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        STARTED.append(self)

    def _read(self) -> None:
        """Put each line of stdout into the queue. There is no other reader: between two of them lines are lost."""
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.put(line)
        self.lines.put("")

    def read_until(self, text: str, seconds: float = 300) -> str:
        """Return the next line of stdout that contains `text`.

        Raise AssertionError, with all that the run has printed, if the run ends before, or if `seconds` are over.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while line := self.lines.get(timeout=max(0, deadline - time.monotonic())):
                self.stdout += line
                if text in line:
                    return line
                if time.monotonic() > deadline:
                    break
            else:
                self.lines.put("")  # for whoever asks next
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)  # who closes stdout is about to end
        ended = self.process.poll()
        state = f"within {seconds} s; the run had not ended" if ended is None else f"before the run ended with {ended}"
        self.end()
        raise AssertionError(f"{text!r} did not come {state}:\n{self.stdout}\n{self.stderr}")

    def read_epoch(self, number: int) -> None:
        """Wait until an epoch is over: saved, and printed."""
        self.read_until(EPOCH.format(number))

    def wait(self, seconds: float = 300, leaves: float = 5) -> "Run":
        """Wait for the command at most `seconds`; `leaves` seconds after its end no process of it may be left.

        Else, and on a time-out, the processes are ended, and that is an AssertionError. The default of `seconds` is for
        a machine that is busy with other tests. A shorter time is part of what is promised. More of `leaves` is for a
        test that has killed one of them: launchers take some time then.
        """
        try:
            problem = self._wait(seconds, leaves)
        finally:
            self.end()
        if problem:
            raise AssertionError(f"{self.command} {problem}:\n{self.stdout}\n{self.stderr}")
        return self

    def _wait(self, seconds: float, leaves: float) -> str:
        """Wait as `wait` does; return what was wrong, or nothing."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"hung for {seconds} s"
        deadline = time.monotonic() + leaves
        while left := command_lines(self.pids()):
            if time.monotonic() > deadline:
                return f"ended with {self.status}, and {leaves} s later there were still {left}"
            time.sleep(0.1)
        return ""

    def end(self) -> None:
        """End all processes of the run, if there are any, and collect what it has printed and left."""
        if self not in STARTED:
            return
        self.kill()
        self.process.kill()  # if it hides its environment; else it has ended, and is collected here
        self.process.wait(300)
        self.reader.join(300)
        STARTED.remove(self)
        assert not self.reader.is_alive(), f"a process that hides from {self.marker} has the stdout of {self.command}"
        while line := self.lines.get():
            self.stdout += line
        self.lines.put("")
        with self.errors:
            self.errors.seek(0)
            self.stdout, self.stderr = PREFIX.sub("", self.stdout), PREFIX.sub("", self.errors.read())
        # PyTorch has a folder for each user in there, for what it compiles, and torchrun leaves one of reports.
        # TensorFlow removes its files when a program ends well.
        own = ("torchinductor_", "torchelastic_", *["__autograph_generated_file"] * (self.status != 0))
        self.left += [path.name for path in self.temporary.glob("*") if not path.name.startswith(own)]
        shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def status(self) -> int:
        """The exit status of the command (negative: the signal that ended it)."""
        return self.process.returncode

    def pids(self) -> list[int]:
        """Return the ids of all living processes of this run, whatever their parent or session is now."""
        return find_processes(self.marker)

    def workers(self) -> list[int]:
        """Return the ids of the processes that train: those with a framework loaded, without a child of this run."""
        return workers(self.pids())

    def kill(self) -> None:
        """End every process of this run with SIGKILL and wait until none is left."""
        deadline = time.monotonic() + 300
        while pids := self.pids():
            assert time.monotonic() < deadline, f"processes {pids} do not end"
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.poll()  # collects it, if it is our own child that has ended
            time.sleep(0.01)


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run with the default settings has written and printed."""

    output: Path
    stdout: str
    stderr: str = ""
    left: Sequence[str] = ()  # in its temporary folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is made where there is none, for as long as the block lasts."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def references(folder: Path, make: Callable[[Path], list[Reference]]) -> list[Reference]:
    """Have make(folder) do the reference runs, unless another of the tests' workers has done, or does so just now."""
    record = Path(f"{folder}.json")
    with locked(Path(f"{folder}.lock")):
        if record.exists():
            return [Reference(Path(output), *printed) for output, *printed in json.loads(record.read_text())]
        shutil.rmtree(folder, ignore_errors=True)  # what is left of an attempt that has failed
        made = make(folder)
        record.write_text(json.dumps([[str(one.output), one.stdout, one.stderr, one.left] for one in made]))
        return made


def start(example: str, folder: Path, processes: int, *args: object, **environment: str) -> Run:
    """Start an example with its local launcher; `args` go to train.py."""
    return Run(LAUNCHERS[example].command(processes) + [str(arg) for arg in args], folder, environment)


def train(example: str, folder: Path, processes: int, *args: object, seconds: float = 300, **environment: str) -> Run:
    """Run an example to its end and check that it succeeded."""
    run = start(example, folder, processes, *args, **environment).wait(seconds)
    assert run.status == 0, f"{run.command} ended with {run.status}:\n{run.stdout}\n{run.stderr}"
    return run


def train_ddp_spawn(folder: Path) -> list[Reference]:
    """Run ddp_spawn, which others are compared with, with 2 processes in a copy, made here."""
    copy_example(ROOT / "examples" / "ddp_spawn", folder)
    run = train("ddp_spawn", folder, 2)
    return [Reference(folder / "output", run.stdout, run.stderr, run.left)]


def kill_all(_: str, run: Run) -> None:
    """Send SIGKILL to every process of a run, which must not be over yet."""
    run.kill()
    run.wait()
    assert run.status != 0, f"over before its kill:\n{run.stdout}"


def kill_one(example: str, run: Run) -> None:
    """Send SIGKILL to one worker: within 60 s the run ends non-zero and says which process died.

    The process that was started is none of them, nor are its forks, by which horovodrun asks what it can do.
    """

    def others() -> list[int]:
        started = command_lines([run.process.pid])
        return [pid for pid in run.workers() if command_lines([pid]) not in ([], started)]

    wait_until(others, 300, "a worker that has loaded its framework", pause=0.1)
    os.kill(max(others()), signal.SIGKILL)
    run.wait(60, leaves=30)
    assert run.status > 0 and "finished" not in run.stdout
    assert re.search(LAUNCHERS[example].kill_message, run.stderr), run.stderr


def ask_to_stop(_: str, run: Run) -> int:
    """Ask a run to stop: all processes save after the same step, and it ends well. Return that step's number."""
    output = run.folder / "output"
    (output / "stop").touch()
    run.wait()
    assert run.status == 0, run.stderr
    assert not run.left
    assert (output / "stopped").exists() and not (output / "stop").exists()
    stop = read_run(output)["stops"][-1]
    assert stop["reason"].startswith("stopped by a signal") and f"\n{stop['reason']}\n" in run.stdout, run.stdout
    return stop["step"]


def assert_continued(output: Path, step: int) -> None:
    """Check that a run's last start was a continuation after this step."""
    assert read_run(output)["starts"][-1]["step"] == step


def kill_and_resume(
    example: str,
    folder: Path,
    reference: Reference,
    kills: list[Callable[[str, Run], object]],
    *arguments: object,
    **variables: str,
) -> Run:
    """Kill a run at a random moment in each of these ways, resume it each time, and compare its end with the reference.

    One kill in four comes before the run's first line: in its imports, its rendezvous, or as it reads the checkpoint.
    The others come in a step, an evaluation, a save, or after them all. At the end of the kills there is a checkpoint,
    which the last run reads: that one has the variables, and is returned. Each run may do two epochs, so that on a fast
    machine, too, none is over before its kill. The variable KILL_SEED repeats the moments of an earlier test, as far as
    a machine can, and KILL_EARLY=1 has all of them come early.
    """
    seed = os.environ.get("KILL_SEED") or str(random.randrange(10**6))
    print(f"the moments of the kills: KILL_SEED={seed} in the environment repeats them")
    moments = random.Random(seed)
    hold_epochs(folder, LAUNCHERS[example])
    first_line = 6.0  # s that it takes to come, until a run has shown it
    saved, number, last = folder / "output" / "metrics.csv", 0, len(kills) - 1
    while number <= last or not saved.exists():
        (folder / HOLD).write_text(str(2 * min(number, last) + 2))
        started = time.monotonic()
        run = start(example, folder, 2, *arguments, *["--resume"] * bool(number))
        if number <= last and (moments.randrange(4) == 0 or os.environ.get("KILL_EARLY")):
            time.sleep(first_line * moments.random())
        else:
            run.read_until(LAUNCHERS[example].first_line)
            first_line = time.monotonic() - started
            if moments.randrange(2) or (number >= last and not saved.exists()):  # it sees the end of an epoch
                run.read_until("train loss")
            time.sleep(0.6 * moments.random())
        kills[min(number, last)](example, run)
        number += 1
    (folder / HOLD).unlink()
    run = train(example, folder, 2, *arguments, "--resume", seconds=300, **variables)
    assert_same_run(folder / "output", reference.output)
    return run


def nox(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nox in a copy of the repository."""
    command = [sys.executable, "-m", "nox", "--non-interactive", *arguments]
    environment = clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    return finish(command, 300, cwd=repository, env=environment)
