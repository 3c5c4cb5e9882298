"""Run an example on this machine as a user would: start it, follow it, kill it."""

import contextlib
import dataclasses
import fcntl
import json
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.launchers import LAUNCHERS
from harness.processes import clean_environment, command_lines, end_processes, find_processes, workers

MARKER = "EXAMPLES_TEST_RUN"  # in the environment of every process of a run, so that each can be found
PREFIX = re.compile(r"^\[\d+\]<std(?:out|err)>:", re.MULTILINE)  # horovodrun's, before each line of a process
STARTED: list["Run"] = []  # the runs that nobody has waited for yet


class Run:
    """A started command: wait for it, read its lines, look for its processes, kill them.

    It has a temporary folder of its own, which is removed at its end; `left` says what was in there then.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command, self.folder = command, folder
        self.stdout, self.stderr, self.left = "", "", []  # at the end
        self.lines = 0  # how many read_until has read
        self.marker = f"{MARKER}={uuid.uuid4().hex}"
        self.place = Path(tempfile.mkdtemp(prefix="run-"))  # a short path: that of a socket has 107 bytes at most
        self.temporary = self.place / "t"
        self.temporary.mkdir()
        self.output, self.errors = self.place / "stdout", self.place / "stderr"
        variables = {MARKER: self.marker.partition("=")[2], "TMPDIR": str(self.temporary)}
        with open(self.output, "w") as output, open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=clean_environment() | variables | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        STARTED.append(self)

    def read_until(self, text: str, seconds: float = 300) -> str:
        """Return the next line of stdout that contains `text`.

        Raise AssertionError, with all that the run has printed, if the run ends before, or if `seconds` are over.
        """
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll()
            *lines, _ = self.output.read_text(errors="replace").split("\n")  # the last one is just being written
            for line in lines[self.lines :]:
                self.lines += 1
                if text in line:
                    return line
            if ended is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.end()
        state = f"within {seconds} s; the run had not ended" if ended is None else f"before the run ended with {ended}"
        raise AssertionError(f"{text!r} did not come {state}:\n{self.stdout}\n{self.stderr}")

    def wait(self, seconds: float = 300, leaves: float = 5) -> "Run":
        """Wait for the command at most `seconds`; `leaves` seconds after its end no process of it may be left.

        Else, and on a time-out, the processes are ended, and that is an AssertionError. A shorter time than the default
        is part of what is promised. Launchers take some time after a kill: hence more of `leaves`.
        """
        problem = ""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"hung for {seconds} s"
        deadline = time.monotonic() + leaves
        while not problem and (left := command_lines(self.pids())):
            if time.monotonic() > deadline:
                problem = f"ended with {self.status}, and {leaves} s later there were still {left}"
            time.sleep(0.1)
        self.end()
        if problem:
            raise AssertionError(f"{self.command} {problem}:\n{self.stdout}\n{self.stderr}")
        return self

    def end(self) -> None:
        """End all processes of the run, if there are any, and collect what it has printed and left."""
        if self not in STARTED:
            return
        self.kill()
        self.process.kill()  # if it hides its environment; else it has ended, and is collected here
        self.process.wait(300)
        STARTED.remove(self)
        printed = [PREFIX.sub("", path.read_text(errors="replace")) for path in (self.output, self.errors)]
        self.stdout, self.stderr = printed
        # PyTorch has a folder for each user in there, for what it compiles, and torchrun leaves one of reports.
        # TensorFlow removes its files when a program ends well.
        own = ("torchinductor_", "torchelastic_", *["__autograph_generated_file"] * (self.status != 0))
        self.left += [path.name for path in self.temporary.glob("*") if not path.name.startswith(own)]
        shutil.rmtree(self.place, ignore_errors=True)

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
        end_processes(self.marker)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What an undisturbed run with the default settings has written and printed."""

    output: Path
    stdout: str
    left: Sequence[str] = ()  # in its temporary folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is made where there is none, for as long as the block lasts."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(folder: Path, make: Callable[[Path], Reference]) -> Reference:
    """Have make(folder) do a reference run, unless another of the tests' workers has done, or does so just now."""
    record = Path(f"{folder}.json")
    with locked(Path(f"{folder}.lock")):
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what is left of an attempt that has failed
            record.write_text(json.dumps(dataclasses.asdict(make(folder)), default=str))
        found = json.loads(record.read_text())
        return Reference(Path(found.pop("output")), **found)


def start(example: str, folder: Path, processes: int, *args: object, **environment: str) -> Run:
    """Start an example with its local launcher; `args` go to train.py."""
    return Run(LAUNCHERS[example].command(processes) + [str(arg) for arg in args], folder, environment)


def train(example: str, folder: Path, processes: int, *args: object, seconds: float = 300, **environment: str) -> Run:
    """Run an example to its end and check that it succeeded."""
    run = start(example, folder, processes, *args, **environment).wait(seconds)
    assert run.status == 0, f"{run.command} ended with {run.status}:\n{run.stdout}\n{run.stderr}"
    return run


def kill_all(run: Run) -> None:
    """Send SIGKILL to every process of a run, which must not be over yet."""
    run.kill()
    run.wait()
    assert run.status != 0, f"over before its kill:\n{run.stdout}"
