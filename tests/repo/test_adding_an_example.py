"""CONTRIBUTING.md, "Add an example": who follows it has touched every place, and a step left out is noticed."""

import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, readme
from harness.launchers import ROOT, copy_repository
from harness.processes import clean_environment, finish
from tests.slurm import test_faults

NEW, OLD = "dummy", "torchrun_multinode"  # the new example, and the one whose folder it is copied from
COPY = readme.block("*", "cp -r examples/torchrun_multinode examples/NAME")
CHECK = readme.block("*", "nox -s sync")
# What takes long, and has nothing to do with examples that are added.
LONG = ("heavy_packages", "hosted", "without_plumbing", "sync_of", "keeps_memory", "can_fail", "test_refused")
ROW = re.compile(r"^\| \[(\w+)\]\(examples/\1\) \|.*\n", re.MULTILINE)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of this repository."""
    return copy_repository(tmp_path / "repository")


def run(command: str, repository: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a copy of the repository, with the programs of this environment."""
    environment = clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = f"{sysconfig.get_path('scripts')}:{environment['PATH']}"
    words = ["bash", "-c", command.replace("NAME", NEW)]
    return finish(words, 300, cwd=repository, env=environment)


def check(repository: Path, command: str, only: str = f"not ({' or '.join(LONG)})") -> subprocess.CompletedProcess[str]:
    """Run one of the commands that check a new example; of the tests, those that `only` selects."""
    if command.startswith("pytest"):
        command += f" -q -k '{only}' -p no:cacheprovider --basetemp='{repository.parent / 'temporary'}'"
    return run(command, repository)


def copy_folder(repository: Path) -> None:
    """Copy the folder."""
    assert run(COPY[0], repository).returncode == 0


def rename(repository: Path) -> None:
    """Put the new name into the folder."""
    assert run(COPY[1], repository).returncode == 0


def add_row(repository: Path) -> None:
    """Add a row to the tests' table: the copied example's, but that it is no launch pattern."""
    path = repository / Path(edits.__file__).with_name("launchers.py").relative_to(ROOT)
    row = re.search(rf'^    "{OLD}": Launcher\(\n(?:     .*\n)+    \),\n', path.read_text(), re.MULTILINE)[0]
    new = re.sub(r"^ +meets=.*\n", "", row.replace(OLD, NEW), flags=re.MULTILINE)
    edits.edit(path, row, new + row)


def add_row_to_readme(repository: Path) -> None:
    """Add a row to README.md's table, before the first name that comes after the new one."""
    text = (repository / "README.md").read_text()
    after = next(row for row in ROW.finditer(text) if row[1] > NEW)
    new = f"| [{NEW}](examples/{NEW}) | seeing that each list of examples has it |\n"
    (repository / "README.md").write_text(text[: after.start()] + new + text[after.start() :])


STEPS = (copy_folder, rename, add_row, add_row_to_readme)


def test_added(repository: Path) -> None:
    """After the steps all checks pass, and have looked at the new example; the table of faults is the same."""
    for step in STEPS:
        step(repository)
    for command in CHECK:
        done = check(repository, command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if command.startswith("pytest"):
            assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100, done.stdout
    sessions = run("nox --list", repository).stdout
    assert all(f"{session}({NEW})" in sessions for session in ("smoke", "checks", "slurm", "weekly", "gpu"))
    faults = run("python -c 'from tests.slurm.test_faults import table; print(table(), end=str())'", repository)
    assert faults.stdout == test_faults.table(), faults.stderr


@pytest.mark.parametrize("left_out", STEPS[1:], ids=lambda step: step.__name__)
def test_step_left_out(repository: Path, left_out: Callable[[Path], None]) -> None:
    """Without the new name in run.slurm, or without one of the two rows, the tests fail and name the example."""
    for step in STEPS:
        if step is not left_out:
            step(repository)
    done = check(repository, CHECK[-1], "documents or header")
    assert done.returncode != 0 and NEW in done.stdout + done.stderr, done.stdout + done.stderr
