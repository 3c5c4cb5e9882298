"""Run an example as a user would, find all of its processes, end them, and read what it has written."""

import csv
import json
import os
import re
import signal
import subprocess
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from filelock import FileLock
from launchers import LAUNCHERS, copy_example

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/train.py"))
assert EXAMPLES, "no examples/*/train.py found"
MARKER = "EXAMPLES_TEST_RUN"  # in the environment of every process of a run, so that each can be found
FOREIGN = re.compile(r"SLURM|OMPI_|PMI|HOROVOD_|MASTER_|TORCHELASTIC|(RANK|WORLD_SIZE|LOCAL_RANK|OMP_NUM_THREADS)$")
PREFIX = re.compile(r"^\[\d+\]<std(?:out|err)>:", re.MULTILINE)  # horovodrun's, before each line of a process
TIMES = ("samples_per_second", "seconds")  # the columns of metrics.csv that differ from run to run


def clean_environment() -> dict[str, str]:
    """Return this environment without what a job or another launcher has set, and without GPUs."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def edit(path: Path, old: str, new: str) -> None:
    """Replace the one place where a file says `old`; raise AssertionError if there is none, or several."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path} says {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def play_one_gpu(folder: Path) -> None:
    """Have an example's train.py believe that this machine has one GPU."""
    imports = "from common import data\n"
    edit(folder / "train.py", imports, imports + "torch.cuda.device_count = lambda: 1\n")


def plant(folder: Path, lines: str) -> None:
    """Put lines of Python where an example's ConvNet begins to compute."""
    first = "        x = F.relu(self.conv1(images))"
    edit(folder / "common" / "models.py", first, textwrap.indent(textwrap.dedent(lines), " " * 8) + first)


def find_processes(variable: str) -> list[int]:
    """Return the ids of all living processes that have `variable`, as NAME=value, in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is not ours
            continue
    return found


def with_torch(pids: list[int]) -> dict[int, int]:
    """Of these processes return those that have torch loaded, with their parents."""
    found = {}
    for pid in pids:
        try:
            if "libtorch" in Path(f"/proc/{pid}/maps").read_text():
                found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    return found


def workers(pids: list[int]) -> list[int]:
    """Of these processes return those that train: torch is loaded, and none of the others is a child of theirs."""
    parents = with_torch(pids)
    return [pid for pid in parents if pid not in parents.values()]


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds; raise AssertionError, with `what`, if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.2)


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
        """Return the ids of the processes that train: those with torch loaded and without a child of this run."""
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


def read_metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv in an output folder."""
    with open(output / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Leave out the columns that a clock has filled."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def read_model(output: Path) -> dict[str, torch.Tensor]:
    """Return the weights in model.pt."""
    return torch.load(output / "model.pt", weights_only=True)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two models' weights; raise AssertionError if shapes differ."""
    assert {name: (w.shape, w.dtype) for name, w in one.items()} == {
        name: (w.shape, w.dtype) for name, w in other.items()
    }
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def assert_same_run(output: Path, reference: Path) -> None:
    """Check that two runs ended the same: model.pt bit for bit, metrics.csv in all but the times."""
    assert without_times(read_metrics(output)) == without_times(read_metrics(reference))
    one, other = read_model(output), read_model(reference)
    assert largest_difference(one, other) == 0
    assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


def assert_refused(run: Run, status: int, *texts: str) -> None:
    """Check that bad input ended a run with `status` and one clear line, without a traceback.

    A launcher that makes a status of its own, other than train.py's 2, may add its own traceback, with no file of ours.
    """
    lines = {line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")}
    assert len(lines) == 1, f"not one error line but {len(lines)}:\n{run.stdout}\n{run.stderr}"
    assert all(text in min(lines) for text in texts), f"{texts} not in {lines}"
    ours = r'File "(.*/)?(train|train_lm|data|models)\.py"'
    assert not re.search("Traceback" if status == 2 else ours, run.stderr), run.stderr
    assert run.status == status, f"status {run.status}, not {status}"


def assert_arguments_refused(folder: Path, texts: Mapping[str, list[str]]) -> None:
    """Check that train.py refuses each of these command lines with status 2 and one line that has all of its texts.

    One process here, without a launcher, goes through all of them: a start for each would take minutes.
    """
    (folder / "each.py").write_text(
        "import sys, train\n"
        f"for words in {list(texts)}:\n"
        "    sys.argv = ['train.py', *words.split()]\n"
        "    try:\n"
        "        train.parse_args()\n"
        "    except SystemExit as end:\n"
        "        print('status', end.code)\n"
    )
    run = Run(["python", "each.py"], folder).wait(120)
    assert run.stdout == "status 2\n" * len(texts), run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    for line, (words, expected) in zip(lines, texts.items(), strict=True):
        assert all(text in line for text in expected), f"{words}: {line}"
