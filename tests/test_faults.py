"""verify/ finds the mistakes in tests/faults, each by the row that its patch names, and has no FAIL for tests/right.

The ranks are forked from a process that has imported PyTorch: see tests/forked.py.
"""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.launchers import ROOT, copy_example
from tests import forked
from verify import checks

FAULTS = sorted(ROOT.glob("tests/faults/*.patch"))
RIGHT = sorted(ROOT.glob("tests/right/*.patch"))
# These are tested each time, all of them by `nox -s full`.
ORDINARY = ("gan", "texts-as-dicts", "two-inputs", "masks", "regression")
STARTED = ("vocabulary-of-a-set",)  # not forked: forked processes have one order of all sets
pytestmark = pytest.mark.timeout(900)


def named(path: Path, name: str) -> str:
    """Return what a patch says about itself: the example that it changes, or the row that has to find it."""
    return next(line.partition(": ")[2] for line in path.read_text().splitlines() if line.startswith(f"{name}: "))


def first_of_each_row() -> set[Path]:
    return {path for row in checks.ROWS for path in [p for p in FAULTS if named(p, "row") == row][:1]}


def parameters(paths: list[Path], ordinary: set[Path]) -> list:
    """Return pytest's parameters for patches: those that are not ordinary are for `nox -s full`."""
    return [pytest.param(p, id=p.stem, marks=[] if p in ordinary else [pytest.mark.full]) for p in paths]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command of a client of forked.py."""
    with forked.launcher(str(tmp_path_factory.mktemp("s") / "s")) as command:
        yield command


def check(server: str, folder: Path, example: str, rows: list[str]) -> dict[str, tuple[str, str]]:
    """Return verify's verdict and text for each row about a copy of an example; no server: as its users start it."""
    launcher = "1 train.py --processes {n}" if example == "ddp_spawn" else "{n} train.py"
    launcher = f"{server} {launcher}" if server else None
    return {name: (verdict, text) for name, verdict, text in checks.check(folder, rows, launcher)}


def patched(path: Path, tmp_path: Path) -> tuple[str, Path]:
    """Return the example that a patch changes, and a copy of its folder with that change."""
    example = named(path, "example")
    folder = copy_example(ROOT / "examples" / example, tmp_path / example)
    run = subprocess.run(["patch", "-p1", "-i", str(path)], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0 and "fuzz" not in run.stdout, run.stdout + run.stderr
    return example, folder


def verdicts(launcher: str) -> dict[str, str]:
    """Return the verdict of each row that the table in verify's README has for a launcher."""
    page = (ROOT / "verify" / "README.md").read_text()
    line = re.search(rf"^\| [^|]*\b{launcher}\b[^|]* \| (.*) \|$", page, re.MULTILINE)
    words = {"ok": "ok", "-": "not checked"}
    return {row: words[cell] for row, cell in zip(checks.ROWS, line[1].split(" | "), strict=True)}


def test_each_row_has_a_fault() -> None:
    """There are 30 faults and 20 right programs or more, and each row has a fault to find."""
    assert len(FAULTS) >= 30 and len(RIGHT) >= 20
    assert {named(path, "row") for path in FAULTS} == set(checks.ROWS)


def test_page_has_what_is_tested() -> None:
    """Each diff in docs/your-data.md is part of the patch that is linked before it, and each right program is there."""
    page = (ROOT / "docs" / "your-data.md").read_text()
    assert {path.name for path in RIGHT} <= set(re.findall(r"tests/right/([\w-]+\.patch)", page))
    for before, after in itertools.pairwise(page.split("```diff\n")):
        *_, name = re.findall(r"tests/right/([\w-]+\.patch)\)", before)
        shown = after.partition("```")[0].splitlines()
        assert set(shown) <= set((ROOT / "tests" / "right" / name).read_text().splitlines()), name


@pytest.mark.parametrize(("name", "launcher"), [("ddp_spawn", "spawn"), ("torchrun_multinode", "torchrun")])
def test_all_rows(name: str, launcher: str, server: str, tmp_path: Path) -> None:
    """The rows have the verdicts that the README of verify shows: ok, or not checked for the reason given there."""
    folder = copy_example(ROOT / "examples" / name, tmp_path / name)
    rows = check(server, folder, name, checks.ROWS)
    assert {row: verdict for row, (verdict, _) in rows.items()} == verdicts(launcher), rows


@pytest.mark.parametrize("path", parameters(FAULTS, first_of_each_row()))
def test_found(path: Path, server: str, tmp_path: Path) -> None:
    """The row that a mistake names finds it; it is no mistake that ends train.py in its first run."""
    example, folder = patched(path, tmp_path)
    server = "" if path.stem in STARTED else server
    verdict, text = check(server, folder, example, [named(path, "row")])[named(path, "row")]
    assert verdict == "FAIL" and "train.py fails in the run" not in text, text


@pytest.mark.parametrize("path", parameters(RIGHT, {path for path in RIGHT if path.stem in ORDINARY}))
def test_right(path: Path, server: str, tmp_path: Path) -> None:
    """A right program has no FAIL in the two rows that compare most."""
    assert_no_fail(path, server, tmp_path, ["processes", "killed"])


@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in RIGHT if path.stem in ORDINARY], ids=lambda path: path.stem)
def test_right_in_all_rows(path: Path, server: str, tmp_path: Path) -> None:
    """A right program has no FAIL in any row."""
    assert_no_fail(path, server, tmp_path, checks.ROWS)


def assert_no_fail(path: Path, server: str, tmp_path: Path, rows: list[str]) -> None:
    example, folder = patched(path, tmp_path)
    found = check(server, folder, example, rows)
    assert [*found] == rows and "FAIL" not in [verdict for verdict, _ in found.values()], found
