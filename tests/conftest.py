"""What the marks do, and the fixtures of all tests: the example, a copy of it, and its reference run."""

import os
import shlex
import signal
from pathlib import Path

import pytest
from filelock import FileLock

pytest.register_assert_rewrite("tests.harness")  # so that an assertion that fails there, too, shows its values
from tests.harness import readme, runs  # noqa: E402
from tests.harness.launchers import EXAMPLES, LAUNCHERS, ROOT, copy_example  # noqa: E402
from tests.harness.runs import Reference  # noqa: E402

# A shell lets what it starts with `&` ignore SIGINT, and so would everything that these tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Whose tests marked `thorough` are ordinary ones: the fastest to start; on SLURM the one that promises most.
THOROUGH, THOROUGH_ON_SLURM = "ddp_spawn", "torchrun_multinode"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--example", action="append", choices=EXAMPLES, help="test this example only (repeatable)")
    parser.addoption("--folder", type=Path, help="where a copy of the one example lies (default: this repository)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "example" in metafunc.fixturenames:
        metafunc.parametrize("example", metafunc.config.getoption("example") or EXAMPLES, scope="session")


def belongs(item: pytest.Item, first: bool) -> bool:
    """Whether a test runs with its example, see the mark `only`; one without an example runs with the first."""
    if "example" not in item.fixturenames:
        return first
    only = item.get_closest_marker("only")
    if only and not set(only.args) <= set(EXAMPLES):
        raise pytest.UsageError(f"{item.nodeid}: the mark only{only.args} names no example")
    return not only or item.callspec.params["example"] in only.args


@pytest.hookimpl(tryfirst=True)  # before pytest itself selects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Do what the marks say: leave out tests of other examples, put off long ones, skip what is not promised."""
    for item in items:
        chosen = THOROUGH_ON_SLURM if item.get_closest_marker("slurm") else THOROUGH
        if item.get_closest_marker("thorough") and item.callspec.params["example"] != chosen:
            item.add_marker("faults")
        if item.get_closest_marker("pattern") and not LAUNCHERS[item.callspec.params["example"]].pattern:
            item.add_marker("faults")
        for clause in item.iter_markers("clause"):
            if not getattr(LAUNCHERS[item.callspec.params["example"]], clause.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"this example does not keep the clause {clause.args[0]!r}"))
    first = EXAMPLES[0] in (config.getoption("example") or EXAMPLES)
    items[:] = [item for item in items if belongs(item, first)]


@pytest.fixture(scope="session")
def shipped(example: str, pytestconfig: pytest.Config) -> Path:
    """The folder that users copy."""
    return pytestconfig.getoption("folder") or ROOT / "examples" / example


@pytest.fixture(scope="session")
def source(example: str, shipped: Path, session_folder: Path) -> Path:
    """The folder that users copy, with the data that its README has them make, if there are such."""
    if not LAUNCHERS[example].prepare:
        return shipped
    folder = session_folder / "prepared" / example
    with FileLock(f"{session_folder / example}.lock"):
        if not folder.exists():
            copied = copy_example(shipped, folder.with_name(f"{example}-part"))
            runs.Run(shlex.split(LAUNCHERS[example].prepare), copied).wait(120)
            copied.rename(folder)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A fresh copy of the example's folder, outside the repository."""
    return copy_example(source, tmp_path / "copied")


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that is the same for all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def reference(example: str, shipped: Path, session_folder: Path) -> Reference:
    """Run what the README says under "Run locally", word for word, once, in a fresh copy."""

    def make(folder: Path) -> list[Reference]:
        copy_example(shipped, folder)
        local = " ".join(LAUNCHERS[example].command(2))
        run = readme.run_block(readme.until(folder / "README.md", local), folder)
        return [Reference(folder / "output", run.stdout, run.stderr)]

    return runs.references(session_folder / f"reference-{example}", make)[0]
