"""The form of the examples: short lessons, plumbing beside them, and copies that are held to be the same."""

import ast
import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
import tokenize
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import copies, edits, runs
from harness.launchers import EXAMPLES, LAUNCHERS, MINIMAL, ROOT, copy_example
from harness.processes import clean_environment

# The most lines of each file; of train.py, see `lines` in the table of the examples.
LINES = {"README.md": 110, "run.slurm": 50}
# These are not bounded until they are one folder.
PLUMBING = ("plumbing.py", "plumbing.sh", "requeue.sh", "hangs.py", "checks.py")
TRAINING_BY = 100  # the line before which the function that trains begins
LONGEST, PARAMETERS = 55, 6  # lines and parameters of a function


def text_of(name: str, file: str = "train.py") -> str:
    """Return the text of a file of an example."""
    return (ROOT / "examples" / name / file).read_text()


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a program by their names, those in classes included."""
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def assert_readable(text: str, most: int) -> None:
    """Check that a lesson is short, that training begins early, and that functions and comments are short, too."""
    lines = text.splitlines()
    assert len(lines) <= most
    starts = [i for i, line in enumerate(lines, 1) if re.match(r" *def (train_one_epoch|training_step)\(", line)]
    assert len(starts) == 1 and starts[0] < TRAINING_BY
    for name, node in functions(text).items():
        assert node.end_lineno - node.lineno < LONGEST, name
        assert len(node.args.args) <= PARAMETERS, name
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    assert 0.08 <= len(commented) / len(lines) <= 0.2
    assert not re.search(r"# \w+:\s*$", text, re.MULTILINE), "a tag without words"


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_files_to_read(name: str) -> None:
    """train.py and run.slurm are lessons from the first line to the last; what they call is short, too."""
    assert_readable(text_of(name), LAUNCHERS[name].lines)
    for file, most in LINES.items():
        assert len(text_of(name, file).splitlines()) <= most, file
    for file in ("train.py", *LINES, *PLUMBING):
        assert all(len(line) <= 120 for line in text_of(name, file).splitlines()), file


def test_two_files_to_read_can_fail() -> None:
    """A long file, late training, a long function, many parameters and a tag without words are each noticed."""
    text, most = text_of("ddp_spawn"), LAUNCHERS["ddp_spawn"].lines
    assert_readable(text, most)
    long = text.replace("    # Train.\n", "    # Train.\n" + "    print()\n" * 15)
    late = text.replace("\n\n\ndef setup", "\n" * 35 + "def setup")
    bare = text.replace("# ddp: sum over all processes", "# ddp:", 1)
    many = text.replace("def setup(args, ", "def setup(args, a, b, c, d, e, ")
    for bad, bound in ((text + "\n" * 40, most), *((bad, 1000) for bad in (long, late, bare, many))):
        assert bad != text
        with pytest.raises(AssertionError):
            assert_readable(bad, bound)


# The most lines, of 100 columns.
MINIMAL_LINES = {"minimal.py": 99, "minimal.slurm": 25}
LONGER = {"ddp_spawn": 109, "deepspeed": 109, "lightning": 105, "fsdp": 130}  # minimal.py


@pytest.mark.parametrize("name", MINIMAL)
def test_minimal(name: str) -> None:
    """minimal.py and minimal.slurm are short, and the functions of minimal.py are those of train.py."""
    for file, most in MINIMAL_LINES.items():
        lines = text_of(name, file).splitlines()
        assert len(lines) <= (LONGER.get(name, most) if file == "minimal.py" else most), file
        assert max(map(len, lines)) <= 100, file
    text = text_of(name, "minimal.py")
    assert not re.search(r"# \w+:\s*$", text, re.MULTILINE), "a tag without words"
    assert "plumbing" not in text and "argparse" not in text
    own = functions(text).keys() - functions(text_of(name)).keys()
    assert own <= {"train_dataloader", "val_dataloader"}, "a function that train.py has not"
    assert "main" in functions(text)


@pytest.mark.parametrize("name", EXAMPLES)
def test_header_of_run_slurm(name: str) -> None:
    """run.slurm has no line that sbatch would ignore, and marks what everybody has to look at."""
    lines = text_of(name, "run.slurm").splitlines()
    assert lines[0] == "#!/bin/bash" and f"#SBATCH --job-name={name} " in "\n".join(lines), "the log is named after it"
    assert not [line for line in lines if re.match(r"#+\s+SBATCH|\s+#SBATCH", line)]
    options = {line.split()[1].split("=")[0] for line in lines if line.startswith("#SBATCH ")}
    assert options >= {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--requeue", "--signal", "--output"}
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    marked = {line.split()[1].split("=")[0] for line in lines if line.startswith("#") and "# EDIT" in line}
    gpus = {"--gpus-per-node"} if LAUNCHERS[name].gpus else set()
    assert {"--time", "--partition", "--account"} | gpus <= marked
    assert marked <= {"--time", "--partition", "--account", "--cpus-per-task", "--nodes", "--ntasks-per-node"} | gpus


def test_diff_shows_the_launcher() -> None:
    """ddp_spawn and torchrun_multinode differ in at most 105 lines: the launcher, accumulation, stopping."""
    assert 40 < edits.changed_lines(text_of("ddp_spawn"), text_of("torchrun_multinode")) <= 105
    assert edits.changed_lines("a\nb\n", "a\nc\nd\n") == 3 and edits.changed_lines("a\n", "a\n") == 0


def test_same_learning_rate() -> None:
    """The function that scales and warms up the learning rate is the same text in all; fsdp counts groups."""
    found = [ast.unparse(functions(text_of(name))["learning_rate"]) for name in EXAMPLES]
    assert {text.replace("args.groups", "args.world_size") for text in found} == {found[0]}


def test_learning_rate() -> None:
    """The rate rises along a line to --lr times 1, the processes or their square root, and then stays."""
    names: dict[str, Callable[[Namespace, int], float]] = {}
    exec(ast.unparse(functions(text_of(EXAMPLES[0]))["learning_rate"]), names)
    for scale, factor in ((None, 1), ("linear", 4), ("sqrt", 2)):
        args = Namespace(lr=0.5, scale_lr=scale, warmup_steps=3, world_size=4)
        rates = [names["learning_rate"](args, step) for step in range(6)]
        assert rates == [0.5 * factor * share for share in (0.25, 0.5, 0.75, 1, 1, 1)]
        args.warmup_steps = 0
        assert names["learning_rate"](args, 0) == names["learning_rate"](args, 10**6) == 0.5 * factor


def test_wish() -> None:
    """With --checkpoint-every N a process wants to save after each Nth step, with a time when that has passed.

    It is counted from the last save of the epoch, which also is where the process began: `seconds` of progress. A
    request to stop is above both. Without the flag nothing is wanted.
    """
    stops: list[bool] = []
    names: dict[str, Any] = {"timedelta": timedelta, "stop_requested": lambda: bool(stops)}
    exec(ast.unparse(functions(text_of("torchrun_multinode", "plumbing.py"))["wish"]), names)

    def wishes(every: int | timedelta | None, *moments: tuple[int, float]) -> list[int]:
        args = Namespace(checkpoint_every=every)
        return [names["wish"](args, {"step": step, "seconds": 100.0}, seconds) for step, seconds in moments]

    in_steps, in_time = [(step, 1e6) for step in range(6)], [(0, 100.0), (1, 159.9), (2, 160.1), (3, 1e6)]
    assert wishes(3, *in_steps) == [0, 0, 1, 0, 0, 1] and wishes(1, *in_steps) == [1] * 6
    assert wishes(timedelta(minutes=1), *in_time) == [0, 0, 1, 1]
    assert wishes(None, *in_steps) == [0] * 6
    stops.append(True)
    assert [*wishes(3, *in_steps), *wishes(timedelta(minutes=1), *in_time), *wishes(None, *in_steps)] == [2] * 16


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.json has the commit of the program, and whether files differ from it; in a job what requeue.sh has noted."""
    names: dict[str, Any] = {"Path": Path, "sys": sys, "subprocess": subprocess, "contextlib": contextlib}
    exec(ast.unparse(functions(text_of("torchrun_multinode", "plumbing.py"))["commit"]), names)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert names["commit"]() is None
    (tmp_path / "train.py").write_text("first")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in ("init --quiet", "add train.py", "commit --quiet --message=first"):
        subprocess.run([*git, *words.split()], check=True, timeout=60)
    assert re.fullmatch(r"[0-9a-f]{40}", clean := names["commit"]())
    (tmp_path / "train.py").write_text("second")
    assert names["commit"]() == f"{clean}-dirty"
    for noted, found in (("noted\n", "noted"), ("", None)):
        (tmp_path / ".commit").write_text(noted)
        assert names["commit"]() == found
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".commit").unlink()
    assert names["commit"]() is None


class WithoutPlumbing(ast.NodeTransformer):
    """Remove the import of plumbing and each call to it, whose value is None then."""

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        return None if node.names[0].name == "plumbing" else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [part for part in node.decorator_list if "plumbing" not in ast.unparse(part)]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return ast.Constant(None) if ast.unparse(node.func).startswith("plumbing.") else self.generic_visit(node)


def test_without_plumbing(tmp_path: Path) -> None:
    """Without plumbing.py and the calls to it, ddp_spawn's train.py still trains: its loss falls as before."""
    folder = copy_example(ROOT / "examples" / "ddp_spawn", tmp_path / "plain")
    (folder / "plumbing.py").unlink()
    (folder / "plumbing.sh").unlink()
    (folder / "requeue.sh").unlink()
    text = text_of("ddp_spawn").replace("plumbing.print_epoch(args, progress)", "print('row', row) if rank == 0 else 0")
    tree = ast.fix_missing_locations(WithoutPlumbing().visit(ast.parse(text)))
    assert "plumbing" not in "\n".join(ast.unparse(tree).splitlines()[10:])  # the docstring names it
    (folder / "train.py").write_text(ast.unparse(tree))
    run = runs.train("ddp_spawn", folder, 2)
    losses = [ast.literal_eval(row)["train_loss"] for row in re.findall(r"^row (.*)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses[0] > 1 and losses[-1] < 0.2


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what `nox -s sync` looks at."""
    left_out = shutil.ignore_patterns("output", "data", ".venv", "__pycache__")
    for name in ("common", "examples", "harness", "jupyter"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=left_out)
    for name in ("noxfile.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


def test_sync_of_common(repository: Path) -> None:
    """`nox -s sync` fails on a changed, a missing and an extra file, names them, and --fix corrects them."""
    assert runs.nox(repository, "-s", "sync").returncode == 0
    copy = repository / "examples" / EXAMPLES[0] / "common"
    (copy / "models.py").write_text((copy / "models.py").read_text() + "\n")
    (copy / "digits.npz").unlink()
    (copy / "extra.py").touch()
    without_torch = "horovod_tensorflow/common/models.py"  # that one has the data file only
    (repository / "examples" / without_torch).write_text((ROOT / "common" / "models.py").read_text())
    failed = runs.nox(repository, "-s", "sync")
    assert failed.returncode != 0
    assert all(f"{EXAMPLES[0]}/common/{name}" in failed.stderr for name in ("models.py", "digits.npz", "extra.py"))
    assert without_torch in failed.stderr
    assert "data.py" not in failed.stderr and "nox -s sync -- --fix" in failed.stderr
    assert runs.nox(repository, "-s", "sync", "--", "--fix").returncode == 0
    assert copies.differences(repository) == [] and runs.nox(repository, "-s", "sync").returncode == 0


@pytest.mark.parametrize("name", copies.FILES)
def test_sync_of_files(repository: Path, name: str) -> None:
    """A file that differs from the first example's is named, and --fix writes that one's text into the others.

    With `# own: why` in it, it may differ, and --fix leaves it alone. A changed source changes all others.
    """
    assert copies.differences(repository) == []
    path, source = repository / "examples" / "horovod_lightning" / name, copies.in_examples(repository, name)[0]
    before = path.read_text()
    path.write_text(f"{before}\n# changed\n")
    assert copies.differences(repository) == [f"examples/horovod_lightning/{name}"]
    copies.fix(repository)
    assert path.read_text() == before and copies.differences(repository) == []

    path.write_text(own := f"{before}\n# own: this launcher needs another\n")
    assert copies.differences(repository) == []
    copies.fix(repository)
    assert path.read_text() == own
    path.write_text(before)

    source.write_text(f"{source.read_text()}\n# changed\n")
    assert f"examples/horovod_lightning/{name}" in copies.differences(repository)
    own = "# own: " in (repository / "examples" / "horovod_tensorflow" / name).read_text()
    assert own == (name not in ("checks.py", "hangs.py", "requeue.sh"))  # of another framework, but in the same way
    assert any("horovod_tensorflow" in wrong for wrong in copies.differences(repository)) != own
    copies.fix(repository)
    assert path.read_text() == source.read_text() != before and copies.differences(repository) == []


SAVE = """
import errno, os, pathlib, signal, sys
import plumbing

def save(file):
    file.write(b"half of the new")
    file.flush()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, "No space left on device")

plumbing.write(pathlib.Path("checkpoint.pt"), save)
"""


@pytest.mark.parametrize(("how", "status"), [("killed", -signal.SIGKILL), ("disk full", 2)])
def test_save_that_does_not_end(tmp_path: Path, how: str, status: int) -> None:
    """A process that is killed while it saves, and a full disk, leave the file as it was; all examples save alike."""
    (tmp_path / "checkpoint.pt").write_text("the old")
    environment = clean_environment() | {"PYTHONPATH": str(ROOT / "examples" / copies.FIRST)}
    words = [sys.executable, "-c", SAVE, how]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == status, run.stderr
    assert (tmp_path / "checkpoint.pt").read_text() == "the old"
    if how != "killed":
        assert run.stderr.count("\n") == 1 and "cannot write checkpoint.pt" in run.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


CHANGES: dict[str, tuple[str, str, str]] = {  # file, what is changed, and the function in which it is
    "Python": ("examples/ddp_spawn/plumbing.py", "os.fsync(file.fileno())", "write"),
    "bash": ("examples/ddp_spawn/plumbing.sh", "claim_folder", "prepare"),
    "jupyter": ("jupyter/run.slurm", "status=$?", "wait_for"),
}


@pytest.mark.parametrize(("file", "old", "function"), CHANGES.values(), ids=CHANGES)
def test_sync_of_functions(repository: Path, file: str, old: str, function: str) -> None:
    """A function that differs from the first example's is named, and --fix writes that one's text into the others.

    With `# own: why` above it, it may differ, and --fix leaves it alone. A changed source changes all others.
    """
    before = (repository / file).read_text()
    edits.edit(repository / file, old, f"{old}  # changed")
    assert copies.differences(repository) == [f"{file}: {function}"]
    copies.fix(repository)
    assert (repository / file).read_text() == before

    edits.edit(repository / file, old, f"{old}  # changed")
    start = re.search(rf"^(def )?{function}\(", before, re.MULTILINE)[0]
    edits.edit(repository / file, f"\n{start}", f"\n# own: this launcher needs another\n{start}")
    own = (repository / file).read_text()
    assert copies.differences(repository) == []
    copies.fix(repository)
    assert (repository / file).read_text() == own

    source = repository / "examples" / copies.FIRST / Path(file.replace("jupyter/run.slurm", "plumbing.sh")).name
    edits.edit(source, old, f"{old}  # changed")
    wrong = copies.differences(repository)
    assert len(wrong) > 1 and all(name.endswith(f": {function}") for name in wrong)
    copies.fix(repository)
    assert copies.differences(repository) == []


@pytest.mark.parametrize(
    ("file", "function"),
    [("horovod_lightning/plumbing.py", "gather"), ("fsdp/shards.py", "begin"), ("horovod_cpu/gloo.sh", "own_address")],
    ids=["own", "shards", "gloo"],
)
def test_sync_of_other_functions(repository: Path, file: str, function: str) -> None:
    """Functions that are own for the same reason have the same text, and those of shards.py and gloo.sh, too."""
    path = repository / "examples" / file
    before = path.read_text()
    start = re.search(rf"^(?:def )?{function}\(.*\n", before, re.MULTILINE)[0]
    edits.edit(path, start, f"{start}    # changed\n")
    assert copies.differences(repository) == [f"examples/{file}: {function}"]
    copies.fix(repository)
    assert copies.differences(repository) == [] and path.read_text() == before
