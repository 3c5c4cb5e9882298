"""What the marks do, and the fixtures of all tests: the example, a copy of it, and its reference run."""

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("harness")  # so that an assertion that fails there, too, shows its values
from harness import runs  # noqa: E402
from harness.jobs import CPUS, GPUS, NODES, on_this_machine_only  # noqa: E402
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT, Launcher, copy_example  # noqa: E402
from harness.processes import ASK_SLURM, wait_until  # noqa: E402
from harness.runs import Reference  # noqa: E402
from harness.sessions import in_ci  # noqa: E402
from lab import Lab, Wanted, why_not  # noqa: E402
from tests import lazy_dynamo  # noqa: E402
from tests.reference import reference as make_reference  # noqa: E402

# A shell lets what it starts with `&` ignore SIGINT, and so would everything that these tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

WHEN = ("smoke", "checks", "full")  # the words of the mark `runs`
CLAUSES = {field.name for field in dataclasses.fields(Launcher) if field.type is bool}

# Where CI=true is set, as in .ci/run, a skip would look like a pass. These reasons alone are permitted there.
PERMITTED_SKIPS = (
    r"needs (Apptainer .*|an ordinary user .*): ",  # full: few releases of Debian have it
)


def ci_with(*names: str) -> pytest.MarkDecorator:
    """A mark: `.ci/run` runs the test with these examples, and `nox -s full` with the others.

    It is for tests of what is the same code in several examples, such as longrun.py, or is tested in other ways.
    """
    assert {*names} < {*EXAMPLES}, names  # with no name left, the mark would mean all
    return pytest.mark.runs("full", *(name for name in EXAMPLES if name not in names))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--example", action="append", choices=EXAMPLES, help="test this example only (repeatable)")
    parser.addoption("--folder", type=Path, help="where a copy of the one example lies (default: this repository)")
    parser.addoption("--references", type=Path, help="the folder where tests.reference has left reference runs")


def pytest_configure(config: pytest.Config) -> None:
    """Where `nox -s checks` runs, or `slurm`, let processes start in half of the time."""
    if "not full" in config.option.markexpr and not hasattr(config, "workerinput"):  # not in a worker of xdist
        lazy_dynamo.switch_on()


def pytest_unconfigure(config: pytest.Config) -> None:
    if "not full" in config.option.markexpr and not hasattr(config, "workerinput"):
        lazy_dynamo.switch_off()


def part_of(path: Path) -> str:
    """Return the name of a file of tests without what its kind of tests adds: that of an example, if it is for one."""
    name = path.stem.removeprefix("test_")
    return name.removesuffix("_jobs").removesuffix("_sharded").removesuffix("_formats")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --example leave files of other examples, and of none, unread: to import them all takes seconds."""
    chosen = config.getoption("example")
    named = part_of(collection_path)
    others = chosen and (collection_path.name == "repo" or (named in EXAMPLES and named not in chosen))
    return True if others else None  # None: as pytest itself decides


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "example" in metafunc.fixturenames:
        metafunc.parametrize("example", metafunc.config.getoption("example") or EXAMPLES, scope="session")


def belongs(item: pytest.Item) -> bool:
    """Whether a test runs with its example: with each, or as its marks `only` say."""
    example, row = item.callspec.params["example"], LAUNCHERS[item.callspec.params["example"]]
    for mark in item.iter_markers("only"):
        if wrong := set(mark.args) - {*EXAMPLES, *CLAUSES}:
            raise pytest.UsageError(f"{item.nodeid}: the mark only names no example and no clause: {wrong}")
        of_row = any(getattr(row, name) for name in CLAUSES.intersection(mark.args))
        if example not in mark.args and not of_row:
            return False
    named = part_of(item.path)
    if named in EXAMPLES and named != example:
        raise pytest.UsageError(f"{item.nodeid}: {item.path.name} is for tests of {named} only")
    return True


def when_it_runs(item: pytest.Item) -> set[str]:
    """Return the words of the mark `runs` that count for a test, with its example if it has one."""
    marks = {(when, *names) for when, *names in (mark.args for mark in item.iter_markers("runs"))}
    if wrong := {word for when, *names in marks for word in (when, *names)} - {*WHEN, *EXAMPLES}:
        raise pytest.UsageError(f"{item.nodeid}: the mark runs has {wrong}")
    example = item.callspec.params["example"] if "example" in item.fixturenames else None
    return {when for when, *names in marks if not names or example in names}


@pytest.hookimpl(tryfirst=True)  # before pytest itself selects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Do what the marks say: leave out tests of other examples, and mark the long ones and what belongs to none.

    Tests that wait come first: at the end of a session the other cores would wait for them.
    """
    chosen = []
    for item in items:
        of_example = "example" in item.fixturenames
        if not (belongs(item) if of_example else not config.getoption("example")):
            continue
        chosen.append(item)
        when = when_it_runs(item)
        if "full" in when:
            item.add_marker("full")
        elif "smoke" in when and "checks" not in when:
            item.add_marker("smoke")
        if not of_example:
            item.add_marker("repo")
    items[:] = sorted(chosen, key=lambda item: not item.get_closest_marker("waits"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI make a skip a failure, but for those that are permitted."""
    report = yield
    if report.skipped and in_ci():
        *_, reason = report.longrepr
        if not any(re.match(pattern, reason.removeprefix("Skipped: ")) for pattern in PERMITTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{reason}: CI permits no such skip, see PERMITTED_SKIPS in tests/conftest.py"
    return report


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
    with runs.locked(Path(f"{session_folder / example}.lock")):
        if not folder.exists():
            copied = copy_example(shipped, folder.with_name(f"{example}-part"))
            run = runs.Run(shlex.split(LAUNCHERS[example].prepare), copied).wait()
            assert run.status == 0, run.stderr
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
def lab(session_folder: Path) -> Iterator[Lab]:
    """A running lab that ends with this process, whatever happens to it."""
    if reason := why_not():
        pytest.skip(reason)
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    with Lab(Wanted(NODES, CPUS, GPUS, name=f"test{os.getpid()}", share=shared)) as lab:
        assert Path(lab.home).is_relative_to(lab.folder), "tests write to the user's home folder"
        python = lab.run([sys.executable, "--version"], cwd="/")
        assert python.returncode == 0, f"user {lab.user}, who runs jobs, cannot use {sys.executable}: {python.stderr}"
        yield lab


@pytest.fixture(autouse=True)
def no_job_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the jobs that a test has left in the lab, which would hinder those that follow, and call it a failure."""
    lab = request.getfixturevalue("lab") if "lab" in request.fixturenames else None
    yield
    if not lab:
        return
    words = ["squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING", "--format=%i %j %T"]
    if left := lab.run(words, cwd="/", check=True).stdout.strip():
        lab.run(["scancel", *(line.split()[0] for line in left.splitlines())], cwd="/", user="root")
        wait_until(lambda: not lab.run(["squeue", "--noheader"], cwd="/").stdout, 300, f"the end of {left}", ASK_SLURM)
        pytest.fail(f"left in the lab: {left}")


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    """End the runs that a test has not waited for, and call that a failure."""
    yield
    if left := list(runs.STARTED):
        for run in left:
            with contextlib.suppress(AssertionError):  # the others are to be ended all the same
                run.end()
        pytest.fail(f"left running: {[run.command for run in left]}")


@pytest.fixture(scope="session")
def kept(pytestconfig: pytest.Config, session_folder: Path) -> Path:
    """The folder of the reference runs: `nox -s smoke` makes them before the tests, each once for all examples."""
    return pytestconfig.getoption("references") or session_folder


@pytest.fixture(scope="session")
def reference(example: str, shipped: Path, kept: Path) -> Reference:
    """What the README says under "Run locally", run word for word, once, in a fresh copy."""
    return make_reference(example, shipped, kept)


@pytest.fixture(scope="session")
def ddp_spawn_output(kept: Path) -> Path:
    """The output folder of ddp_spawn's default run, which other examples are compared with."""
    return make_reference("ddp_spawn", ROOT / "examples" / "ddp_spawn", kept).output
