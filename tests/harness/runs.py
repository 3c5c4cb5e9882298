"""Run an example on this machine as a user would: start it, follow it, kill it and resume it."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from tests.harness.launchers import LAUNCHERS, ROOT, copy_example
from tests.harness.outputs import assert_same_run
from tests.harness.processes import clean_environment, find_processes, workers

MARKER = "EXAMPLES_TEST_RUN"  # in the environment of every process of a run, so that each can be found
PREFIX = re.compile(r"^\[\d+\]<std(?:out|err)>:", re.MULTILINE)  # horovodrun's, before each line of a process


@dataclass
class Run:
    """A started command: wait for it, read its lines, look for its processes, kill them."""

    command: list[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    stdout: str = ""
    stderr: str = ""

    def __post_init__(self) -> None:
        self.marker = f"{MARKER}={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        environment = clean_environment() | {name: value} | dict(self.environment)
        pipe = subprocess.PIPE
        self.errors = open(self.folder / f"stderr-{value}.txt", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=self.errors,
            text=True,
        )

    def read_until(self, text: str) -> str:
        """Return the next line of stdout that contains `text`; raise AssertionError if the run ends before."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.stdout += line
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came:\n{self.stdout}\n{self.wait(30).stderr}")

    def wait(self, seconds: float) -> "Run":
        """Wait for the command at most `seconds`; then, or on a time-out, no process of it is left."""
        try:
            out, _ = self.process.communicate(timeout=seconds)
            self.stdout += out
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise AssertionError(f"{self.command} hung for {seconds} s:\n{self.stdout}") from error
        finally:
            self.kill()
            self.errors.seek(0)
            self.stdout, self.stderr = PREFIX.sub("", self.stdout), PREFIX.sub("", self.errors.read())
        return self

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
        deadline = time.monotonic() + 30
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


def references(folder: Path, make: Callable[[Path], list[Reference]]) -> list[Reference]:
    """Have make(folder) do the reference runs, unless another of the tests' workers has done, or does so just now."""
    record = Path(f"{folder}.json")
    with FileLock(f"{folder}.lock"):
        if record.exists():
            return [Reference(Path(output), *printed) for output, *printed in json.loads(record.read_text())]
        shutil.rmtree(folder, ignore_errors=True)  # what is left of an attempt that has failed
        made = make(folder)
        record.write_text(json.dumps([[str(one.output), one.stdout, one.stderr] for one in made]))
        return made


def start(example: str, folder: Path, processes: int, *args: object, **environment: str) -> Run:
    """Start an example with its local launcher; `args` go to train.py."""
    return Run(LAUNCHERS[example].command(processes) + [str(arg) for arg in args], folder, environment)


def train(example: str, folder: Path, processes: int, *args: object, seconds: float = 180, **environment: str) -> Run:
    """Run an example to its end and check that it succeeded."""
    run = start(example, folder, processes, *args, **environment).wait(seconds)
    assert run.status == 0, f"{run.command} ended with {run.status}:\n{run.stdout}\n{run.stderr}"
    return run


def train_ddp_spawn(folder: Path) -> Path:
    """Run ddp_spawn, which others are compared with, with 2 processes in a copy in `folder`; return its output."""
    copy = copy_example(ROOT / "examples" / "ddp_spawn", folder / "ddp_spawn")
    train("ddp_spawn", copy, 2)
    return copy / "output"


def kill_all(_: str, run: Run) -> None:
    """Send SIGKILL to every process of a run."""
    run.kill()
    run.wait(30)


def kill_one(example: str, run: Run) -> None:
    """Send SIGKILL to one worker: within 60 s the run ends non-zero and says which process died."""
    os.kill(max(run.workers()), signal.SIGKILL)
    run.wait(60)
    assert run.status > 0 and "finished" not in run.stdout
    assert re.search(LAUNCHERS[example].kill_message, run.stderr), run.stderr


def ask_to_stop(_: str, run: Run) -> tuple[int, int]:
    """Send SIGUSR1 to one worker: all save after the same step, and the run ends well. Return step and epoch."""
    os.kill(max(run.workers()), signal.SIGUSR1)
    run.wait(60)
    assert run.status == 0 and run.stdout.count("\nused: ") == 1, run.stderr
    ((step, epoch),) = re.findall(r"stopped by a signal after step (\d+) of epoch (\d+): use --resume", run.stdout)
    return int(step), int(epoch)


def kill_and_resume(
    example: str, folder: Path, reference: Reference, kills: list[Callable[[str, Run], object]], *arguments: object
) -> Run:
    """Kill a run at a random moment in each of these ways, resume it each time, and compare its end with the reference.

    Return the last run.
    """
    seed = random.randrange(10**6)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    for number, kill in enumerate(kills):
        run = start(example, folder, 2, *arguments, *["--resume"] * bool(number))
        run.read_until(LAUNCHERS[example].first_line)
        for _ in range(moments.randrange(2)):  # epochs that this run gets to see the end of
            run.read_until("train loss")
        time.sleep(0.6 * moments.random())  # not a wait: the random moment, in a step, an evaluation or a save
        assert run.process.poll() is None, "the run was over before its kill: too fast a machine for so few epochs"
        kill(example, run)
    run = train(example, folder, 2, *arguments, "--resume", PYTHONPROFILEIMPORTTIME="1")
    assert_same_run(folder / "output", reference.output)
    return run
