"""The form of the examples: short lessons, plumbing beside them, and copies that are held to be the same."""

import ast
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import plumbing
from harness import copies, edits, refusals, runs
from harness.launchers import EXAMPLES, LAUNCHERS, MADE, MINIMAL, ROOT, copy_example
from harness.processes import clean_environment

# The most lines of each file; of train.py, see `lines` in the table of the examples.
LINES = {"README.md": 110, "run.slurm": 50}
TRAINING_BY = 100  # the line before which the function that trains begins
LONGEST, MAIN, PARAMETERS = 55, 66, 6  # lines of a function, and of main; parameters


def text_of(name: str, file: str = "train.py") -> str:
    """Return the text of a file of an example."""
    return (ROOT / "examples" / name / file).read_text()


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a program by their names, those in classes included."""
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_files_to_read(name: str) -> None:
    """train.py and run.slurm are lessons from the first line to the last; what they call is short, too."""
    text = text_of(name)
    assert len(text.splitlines()) <= LAUNCHERS[name].lines
    starts = [text[: at.start()].count("\n") for at in re.finditer(r"\n *def (train_one_epoch|training_step)\(", text)]
    assert len(starts) == 1 and starts[0] < TRAINING_BY - 2
    for function, node in functions(text).items():
        assert node.end_lineno - node.lineno < (MAIN if function == "main" else LONGEST), function
        assert len(node.args.args) <= PARAMETERS, function
    assert not re.search(r"# \w+:\s*$", text, re.MULTILINE), "a tag without words"
    for path in (ROOT / "examples" / name).glob("*.py"):
        assert path.name in text_of(name, "README.md"), f"the README does not say what {path.name} is for"
    for file, most in LINES.items():
        assert len(text_of(name, file).splitlines()) <= most, file
    for file in ("train.py", *LINES):
        wide = [line for line in text_of(name, file).splitlines() if len(line) > 100]
        assert not [line for line in wide if not re.match(r"\||\S*https://\S+$", line)], file


# The most lines, of 100 columns.
MINIMAL_LINES = {"minimal.py": 110, "minimal.slurm": 25}
LONGER = {"deepspeed": 112, "fsdp": 135}  # minimal.py


@pytest.mark.parametrize("name", MINIMAL)
def test_minimal(name: str) -> None:
    """minimal.py and minimal.slurm are short, and the functions of minimal.py are those of train.py."""
    for file, most in MINIMAL_LINES.items():
        lines = text_of(name, file).splitlines()
        assert len(lines) <= (LONGER.get(name, most) if file == "minimal.py" else most), file
        assert max(map(len, lines)) <= 100, file
    assert f"#SBATCH --job-name={name} " in text_of(name, "minimal.slurm"), "the log is named after it"
    text = text_of(name, "minimal.py")
    assert not re.search(r"# \w+:\s*$", text, re.MULTILINE), "a tag without words"
    assert "plumbing" not in text and "argparse" not in text
    own = functions(text).keys() - functions(text_of(name)).keys()
    assert own <= {"train_dataloader", "val_dataloader"}, "a function that train.py has not"
    assert "main" in functions(text)


def code_of(text: str) -> list[str]:
    """Return a program's statements, a line each, without docstrings, comments, and `args` of flags."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    lines = ast.unparse(tree).splitlines()
    return [re.sub(r"args(\.|, |(?=\)))", "", line.strip()).lower() for line in lines if line.strip()]


@pytest.mark.parametrize("name", MINIMAL)
def test_diff_of_minimal(name: str) -> None:
    """At least 60 % of minimal.py's lines of code stand in train.py: their `diff` shows what a long job needs."""
    own, lines = code_of(text_of(name, "minimal.py")), code_of(text_of(name))
    assert sum(line in lines for line in own) >= 0.6 * len(own)


# The most entries of a launch pattern's folder. deepspeed has two settings, horovod_cpu install.sh and more/.
MOST = {"deepspeed": 13, "horovod_cpu": 13}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if LAUNCHERS[name].pattern])
def test_entries(name: str, tmp_path: Path) -> None:
    """`ls` of a copied launch pattern shows few files, of which the README names the first to read."""
    folder = copy_example(ROOT / "examples" / name, tmp_path / name)
    entries = sorted(path.name for path in folder.iterdir())
    assert len(entries) <= MOST.get(name, 12), entries


def test_widths() -> None:
    """No program that people copy has a line of more than 100 columns; install.sh is as it was measured."""
    found = []
    for room in ("examples", *copies.FOLDERS):
        for path in (ROOT / room).rglob("*"):
            name = path.relative_to(ROOT)
            if path.suffix in (".py", ".sh", ".slurm") and name.name != "install.sh" and not {*MADE} & {*name.parts}:
                lines = path.read_text().splitlines()
                found += [f"{name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not found


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
    """ddp_spawn and torchrun_multinode differ in at most 115 lines: the launcher, accumulation, stopping."""
    assert edits.changed_lines(text_of("ddp_spawn"), text_of("torchrun_multinode")) <= 115
    assert edits.changed_lines("a\nb\n", "a\nc\nd\n") == 3 and edits.changed_lines("a\n", "a\n") == 0


def test_without_torchrun() -> None:
    """train.py and minimal.py of srun_multinode are torchrun_multinode's apart from the launcher's lines.

    In train.py these are tagged, in the docstrings, what is refused, the threads, and what catches an exception.
    """
    assert [name for name in EXAMPLES if LAUNCHERS[name].twin] == ["srun_multinode"]
    for file, most in (("train.py", 28), ("minimal.py", 20)):
        changed = edits.changed_lines(text_of(LAUNCHERS["srun_multinode"].twin, file), text_of("srun_multinode", file))
        assert changed <= most, file


def test_help() -> None:
    """--help says in a sentence what train.py is, without the docstring's commands, which argparse runs together."""
    for description, shown in (("It trains.\n\nLocally:   python train.py\n", "It trains."), (None, "")):
        assert plumbing.arguments(description, ["fp32"]).description == shown


def test_learning_rate() -> None:
    """The rate rises along a line to --lr times 1, the processes or their square root, and then stays.

    Where groups of processes share samples, these are counted.
    """
    for groups in ({"world_size": 4}, {"world_size": 8, "groups": 4}):
        for scale, factor in ((None, 1), ("linear", 4), ("sqrt", 2)):
            args = Namespace(lr=0.5, scale_lr=scale, warmup_steps=3, **groups)
            rates = [plumbing.learning_rate(args, step) for step in range(6)]
            assert rates == [0.5 * factor * share for share in (0.25, 0.5, 0.75, 1, 1, 1)]
            args.warmup_steps = 0
            assert plumbing.learning_rate(args, 0) == plumbing.learning_rate(args, 10**6) == 0.5 * factor


RATED = Namespace(lr=0.5, scale_lr="linear", warmup_steps=3, world_size=4)


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    """SGD with RATED's rate, and with a second group that has a tenth of it; a refusal raises."""

    def refuse(message: str) -> None:
        raise refusals.RefusedError(message)

    monkeypatch.setattr(plumbing.settings, "fail", refuse)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr_scale": 0.1}]
    return torch.optim.SGD(groups, RATED.lr)


def test_rates_of_groups(optimizer: torch.optim.Optimizer) -> None:
    """A group has the rate of the step, times lr_scale and the factor; that of a step may be set twice (DeepSpeed).

    A resumed run keeps the lr_scale of its checkpoint, and has its own --lr.
    """

    def rates(args: Namespace, step: int, factor: float) -> list[float]:
        plumbing.set_learning_rate(args, optimizer, step, factor)
        return [group["lr"] for group in optimizer.param_groups]

    for step, rate in ((0, 0.25), (0, 0.25), (1, 0.5), (2, 0.75), (3, 1), (4, 1)):
        assert rates(RATED, step, 0.5) == [rate, rate * 0.1]
    state = optimizer.state_dict()
    assert rates(RATED, 5, 0.1) == [0.2, 0.2 * 0.1]
    optimizer.load_state_dict(state)  # back to better weights, with the rates of then
    assert rates(RATED, 6, 0.5) == [1, 0.1]
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], 0.1)
    optimizer.load_state_dict(state)
    assert rates(Namespace(**vars(RATED) | {"lr": 0.1}), 5, 1) == [0.4, 0.4 * 0.1]


def plateau(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, and one of a scheduler that is not noticed before."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    plumbing.set_learning_rate(RATED, optimizer, 0)
    for loss in (1, 2):
        scheduler.step(loss)


def freed(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, and add weights with a rate of their own."""
    plumbing.set_learning_rate(RATED, optimizer, 0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})


# What each does with an optimizer, the step at which it is refused, and what the line says.
REPLACED = {
    "group": (lambda optimizer: optimizer.param_groups[1].update(lr=0.1), 0, "group 1 .* has the learning rate 0.1,"),
    "default": (lambda optimizer: optimizer.param_groups[0].update(lr=1e-3), 0, "group 0 .* the learning rate 0.001,"),
    "scheduler": (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 9), 0, "has a scheduler of PyTorch,"),
    "plateau": (plateau, 1, "group 0 .* has the learning rate 0.05,"),
    "new group": (freed, 1, "group 2 .* has the learning rate 0.1,"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_rates_without_effect(optimizer: torch.optim.Optimizer, name: str) -> None:
    """What train.py would replace without a word is refused: a rate of a group, a scheduler, also in a later step."""
    change, step, says = REPLACED[name]
    change(optimizer)
    with pytest.raises(refusals.RefusedError, match=f'{says} which set_learning_rate replaces: .*args.lr.*"lr_scale"'):
        plumbing.set_learning_rate(RATED, optimizer, step)


class KerasRate(float):
    """What Keras has as learning_rate of an optimizer without a schedule."""

    assigned = 0.0

    def assign(self, value: float) -> None:
        """Note the new rate."""
        self.assigned = value


@pytest.mark.usefixtures("optimizer")
def test_rate_of_keras() -> None:
    """Keras's optimizer has one rate, which is --lr at first; another, and a schedule, are refused."""
    rate = KerasRate(0.5)
    for step in (0, 1):
        plumbing.set_learning_rate(RATED, Namespace(learning_rate=rate), step, 0.5)
        assert rate.assigned == 0.25 * (step + 1)
    for wrong in (KerasRate(0.1), 0.5):
        with pytest.raises(refusals.RefusedError, match="has a schedule, or the learning rate 0"):
            plumbing.set_learning_rate(RATED, Namespace(learning_rate=wrong), 0)


def test_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --checkpoint-every N a process asks to save after each Nth step, with a time when that has passed.

    It is counted from the last save of the epoch, which also is where the process began: `seconds` of progress. A
    request to stop is above both. Without the flag nothing is asked for.
    """
    stops: list[bool] = []
    monkeypatch.setattr(plumbing.stopping, "stop_requested", lambda: bool(stops))

    def requests(every: int | timedelta | None, *moments: tuple[int, float]) -> list[int]:
        args = Namespace(checkpoint_every=every)
        return [plumbing.requested(args, {"step": step, "seconds": 100.0}, seconds) for step, seconds in moments]

    in_steps, in_time = [(step, 1e6) for step in range(6)], [(0, 100.0), (1, 159.9), (2, 160.1), (3, 1e6)]
    assert requests(3, *in_steps) == [0, 0, 1, 0, 0, 1] and requests(1, *in_steps) == [1] * 6
    assert requests(timedelta(minutes=1), *in_time) == [0, 0, 1, 1]
    assert requests(None, *in_steps) == [0] * 6
    stops.append(True)
    assert [*requests(3, *in_steps), *requests(timedelta(minutes=1), *in_time), *requests(None, *in_steps)] == [2] * 16


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.json has the commit of the program, and whether files differ from it; in a job what requeue.sh has noted."""
    commit = plumbing.records.commit
    monkeypatch.setattr(plumbing.records, "__file__", str(tmp_path / "plumbing" / "records.py"))
    assert commit() is None
    (tmp_path / "train.py").write_text("first")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in ("init --quiet", "add train.py", "commit --quiet --message=first"):
        subprocess.run([*git, *words.split()], check=True, timeout=300)
    assert re.fullmatch(r"[0-9a-f]{40}", clean := commit())
    (tmp_path / "train.py").write_text("second")
    assert commit() == f"{clean}-dirty"
    for noted, found in (("noted\n", "noted"), ("", None)):
        (tmp_path / ".commit").write_text(noted)
        assert commit() == found
    monkeypatch.setenv("PATH", "")
    (tmp_path / ".commit").unlink()
    assert commit() is None


# What a user writes in the place of the common flags, below the constants of minimal.py.
PARSER = """
argparse.ArgumentParser()
parser.set_defaults(epochs=EPOCHS, batch_size=BATCH_SIZE, seed=SEED, lr=LR)
parser.set_defaults(precision="fp32", timeout=300, output_dir=Path("."))
"""


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
    """Without plumbing/ and the calls to it, ddp_spawn's train.py still trains: its loss falls as before.

    In the place of the common flags it has the constants of minimal.py.
    """
    folder = copy_example(ROOT / "examples" / "ddp_spawn", tmp_path / "plain")
    shutil.rmtree(folder / "plumbing")
    text = text_of("ddp_spawn")
    (constants,) = re.findall(r"^EPOCHS, .*\n", text_of("ddp_spawn", "minimal.py"), re.MULTILINE)
    for old, new in (
        ("import os\n", "import argparse\nimport os\nfrom pathlib import Path\n"),
        ("\n\ndef parse_args():\n", f"\n{constants}\n\ndef parse_args():\n"),
        ("plumbing.arguments(__doc__, WEIGHT_DTYPES)", textwrap.indent(PARSER, "    ").strip()),
        ("plumbing.print_epoch(args, progress)", "print('row', row) if rank == 0 else 0"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
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
    for name in (*copies.FOLDERS, "examples", "harness"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=left_out)
    for name in ("noxfile.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


def test_sync(repository: Path) -> None:
    """`nox -s sync` fails on a changed, a missing and an extra file, names them, and --fix corrects them."""
    assert runs.nox(repository, "-s", "sync").returncode == 0
    copy = repository / "examples" / EXAMPLES[0]
    (copy / "plumbing" / "files.py").write_text((copy / "plumbing" / "files.py").read_text() + "\n")
    (copy / "common" / "digits.npz").unlink()
    (copy / "plumbing" / "extra.py").touch()
    failed = runs.nox(repository, "-s", "sync")
    assert failed.returncode != 0
    wrong = ("plumbing/files.py", "common/digits.npz", "plumbing/extra.py")
    assert all(f"{EXAMPLES[0]}/{name}" in failed.stderr for name in wrong)
    assert "data.py" not in failed.stderr and "nox -s sync -- --fix" in failed.stderr
    assert runs.nox(repository, "-s", "sync", "--", "--fix").returncode == 0
    assert copies.differences(repository) == [] and runs.nox(repository, "-s", "sync").returncode == 0


def test_sync_of_a_fix(repository: Path) -> None:
    """What is mended in the top-level plumbing/ is one file, and --fix writes it into all examples."""
    (repository / "plumbing" / "job.sh").write_text("# mended\n")
    assert copies.differences(repository) == [f"examples/{name}/plumbing/job.sh" for name in EXAMPLES]
    copies.fix(repository)
    assert copies.differences(repository) == []


@pytest.mark.parametrize("name", copies.FILES)
def test_sync_of_files(repository: Path, name: str) -> None:
    """A file that differs from the first example's of the same framework is named, and --fix writes that one's text.

    A changed source changes all others, but not those of another framework.
    """
    assert copies.differences(repository) == []
    example = "lora" if name == "tokenize_text.py" else "horovod_lightning"
    path = repository / "examples" / example / name
    (source,) = [source for copied, source in copies.sources(repository) if copied == path]
    before = path.read_text()
    path.write_text(f"{before}\n# changed\n")
    assert copies.differences(repository) == [f"examples/{example}/{name}"]
    copies.fix(repository)
    assert path.read_text() == before and copies.differences(repository) == []

    source.write_text(f"{before}\n# changed\n")
    wrong = copies.differences(repository)
    assert f"examples/{example}/{name}" in wrong
    assert ("examples/horovod_tensorflow/container.def" in wrong) == (name == "container.def")
    assert f"examples/horovod_tensorflow/{name}" not in wrong or name == "container.def"
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
    """A process that is killed while it saves, and a full disk, leave the file as it was: so write() of plumbing does.

    Checkpoints that a framework writes as a folder have tests of their own: test_killed_while_saving of deepspeed.
    """
    (tmp_path / "checkpoint.pt").write_text("the old")
    environment = clean_environment() | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", SAVE, how]
    run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == status, run.stderr
    assert (tmp_path / "checkpoint.pt").read_text() == "the old"
    if how != "killed":
        assert run.stderr.count("\n") == 1 and "cannot write checkpoint.pt" in run.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
