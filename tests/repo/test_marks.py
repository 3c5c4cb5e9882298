"""What tests/conftest.py does: it refuses marks that mean nothing, permits few skips in CI, prints what runs where."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import EXAMPLES, LAUNCHERS, MINIMAL, ROOT
from harness.processes import finish
from harness.sessions import KINDS


def run_pytest(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as this repository has set it up, outside of CI if not told otherwise."""
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-q"]
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | variables
    command = [sys.executable, "-m", "pytest", *settings, *words]
    return finish(command, 300, cwd=ROOT, env=environment)


def run_file(path: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Write a file of tests, which tests/conftest.py is not above, and run it with that all the same."""
    path.write_text(f"import pytest\n\n{text}")
    return run_pytest("-p", "tests.conftest", path, **variables)


@pytest.mark.parametrize(
    ("file", "mark", "text"),
    [
        ("test_a.py", 'only("convnets")', "the mark only names no example and no clause: {'convnets'}"),
        ("test_a.py", 'runs("daily")', "the mark runs has {'daily'}"),
        ("test_a.py", "weakly", "'weakly' not found in `markers`"),
        ("test_fsdp.py", 'only("lora")', "test_fsdp.py is for tests of fsdp only"),
    ],
)
def test_wrong_marks(tmp_path: Path, file: str, mark: str, text: str) -> None:
    """A mark with a wrong name ends pytest, so that no test is left out by mistake."""
    test = "@pytest.mark.{}\ndef test(example):\n    pass\n"
    done = run_file(tmp_path / file, test.format(mark))
    assert done.returncode not in (0, 1, 5) and text in done.stdout + done.stderr, done.stdout + done.stderr
    assert "\n1 passed" in run_file(tmp_path / file, test.format('only("fsdp")')).stdout


SKIPS = """
@pytest.mark.skipif(True, reason="needs a GPU: none here")
def test_permitted():
    pass

@pytest.mark.skipif(True, reason="no time")
def test_by_mark():
    pass

def test_in_the_test():
    pytest.skip("it needs a GPU: none here")

@pytest.fixture
def skipping():
    pytest.skip("no luck")

def test_in_a_fixture(skipping):
    pass
"""


@pytest.mark.parametrize(("ci", "failed"), [("true", 3), ("1", 3), ("false", 0)])
def test_skips(tmp_path: Path, ci: str, failed: int) -> None:
    """In CI a skip fails, but for one whose reason begins as permitted; elsewhere each is a skip."""
    done = run_file(tmp_path / "test_a.py", SKIPS, CI=ci)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (failed|error|skipped|passed)", done.stdout)}
    assert sum(counts.get(word, 0) for word in ("failed", "error")) == failed and counts["skipped"] == 4 - failed
    assert done.returncode == bool(failed) and done.stdout.count("CI permits no such skip") >= failed, done.stdout


def test_matrix() -> None:
    """The table has a column for each example and one for the rest, and in it the session that runs a test."""
    files = [f"tests/{file}.py" for file in ("test_environments", "slurm/test_run_slurm", "repo/test_ci_run")]
    done = run_pytest("--collect-only", "--matrix", *files)
    lines = done.stdout.splitlines()
    columns = [line.lstrip("| ") for line in lines if re.fullmatch(r"(\|  )*\w+", line)]
    assert columns == [*EXAMPLES, "repo"], done.stdout
    rows = {}
    for line in filter(lambda line: "::" in line, lines):
        *cells, name = line.split()
        rows[name] = dict(zip(columns, cells, strict=True))
    weekly = dict.fromkeys(EXAMPLES, "w") | {"repo": "."}
    assert rows["test_environments.py::test_without_internet"] == weekly
    one = dict.fromkeys(EXAMPLES, "w") | {"torchrun_multinode": "J", "repo": "."}
    assert rows["slurm/test_run_slurm.py::test_help"] == one
    assert rows["slurm/test_run_slurm.py::test_refused"] == dict.fromkeys(EXAMPLES, "J") | {"repo": "."}
    of_none = {tuple(cells.items()) for name, cells in rows.items() if name.startswith("repo/")}
    assert of_none == {tuple((dict.fromkeys(EXAMPLES, ".") | {"repo": "r"}).items())}


def collected(kind: str, *paths: str) -> set[tuple[str, str]]:
    """Return the tests of all examples with marks that pytest would run: names, and the parameters of each."""
    done = run_pytest("--collect-only", "-m", kind, *(f"--example={name}" for name in EXAMPLES), *paths)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^tests/.*::(\w+)\[(.*)\]$", done.stdout, re.MULTILINE))


def test_smoke_and_checks() -> None:
    """Smoke and checks together are all tests of examples that are neither jobs nor weekly, and none is in both.

    Smoke's are in the files that it reads, and it has for each example what the front page promises.
    """
    smoke, checks = (collected(KINDS[kind].marks, *KINDS[kind].paths) for kind in ("smoke", "checks"))
    assert smoke | checks == collected("not slurm and not weekly and not gpu", "tests") and not smoke & checks
    assert smoke == collected("smoke", "tests")
    expected = {(test, name) for test in ("test_default_run", "test_readme_and_requirements") for name in EXAMPLES}
    expected |= {("test_same_bits_as_train", name) for name in MINIMAL}
    alike = [name for name in EXAMPLES if LAUNCHERS[name].convnet and LAUNCHERS[name].pytorch and name != "ddp_spawn"]
    expected |= {("test_same_bits_as_ddp_spawn", name) for name in alike}
    expected |= {("test_killed_and_resumed", name) for name in ("ddp_spawn", "torchrun_multinode")}
    assert smoke == expected
