"""The checks of this repository: `nox -l` lists them, `nox -s smoke` is what a newcomer runs."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("noxfile.py: error: the examples need Python 3.11 to 3.13: run nox with one")

import nox  # noqa: E402

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # where `nox` itself does not look for modules
import lab  # noqa: E402
from harness import copies, sessions  # noqa: E402
from harness.launchers import EXAMPLES, HOROVOD, LAUNCHERS, copy_example  # noqa: E402

if os.geteuid() == 0:
    os.umask(0o022)  # the lab's jobs, another user's, read the environments that root makes

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["sync", "lint", "repo", "smoke"]

temporary = tempfile.TemporaryDirectory(prefix="references-")
REFERENCES = os.environ.get("REFERENCES", temporary.name)  # of the reference runs: .ci/run's
# ddp_spawn comes first: the others are compared with its run, made with what it alone requires. Short checks come last.
IN_ORDER = sorted(EXAMPLES, key=lambda name: (name == "ddp_spawn", name), reverse=True)


def install(session: nox.Session, folder: Path) -> None:
    """Install what an example needs, as its README says."""
    session.install("-r", str(folder / "requirements.txt"))
    if (folder / "install.sh").exists():
        session.install("pip")  # install.sh calls it, and an environment made by uv has none
        session.run("bash", str(folder / "install.sh"), external=True)


def run_tests(session: nox.Session, example: str, kind: str) -> None:
    """Copy an example out of the repository, install it there, and run its tests of a kind."""
    if kind == "slurm" and (reason := lab.why_not()):
        session.skip(reason)
    if kind == "smoke" and example in HOROVOD:
        sessions.skip_without_compiler(session)
    with tempfile.TemporaryDirectory(prefix=f"{example}-") as place:
        folder = copy_example(ROOT / "examples" / example, Path(place, example))
        install(session, folder)
        # It trains before the tests' packages are there, which could hide that it lacks one. So
        # does --help, which also compiles the modules: jobs, another user's, could not keep them.
        if kind == "smoke":
            session.run("python", "-m", "tests.reference", example, str(folder), REFERENCES)
        elif not Path(session.virtualenv.location).is_symlink():  # .ci/run: to that of smoke
            session.run("python", str(folder / "train.py"), "--help", silent=True)
        if not LAUNCHERS[example].pytorch:  # the tests compute with it
            session.install("-r", "examples/ddp_spawn/requirements.txt")
        options = [f"--example={example}", f"--folder={folder}", f"--references={REFERENCES}"]
        options += [f"--basetemp={place}/tests"]  # pytest closes a default one to the lab
        sessions.pytest(session, kind, *options, *session.posargs)


def for_each_example(kind: str, what: str) -> None:
    """Add a session that runs the tests of a kind, for each example."""

    def run(session: nox.Session, example: str) -> None:
        run_tests(session, example, kind)

    run.__doc__ = what
    nox.session(nox.parametrize("example", IN_ORDER, ids=IN_ORDER)(run), name=kind)


for_each_example("smoke", "Train as the README says, and with minimal.py, on CPU over Gloo.")
for_each_example("checks", "Run all other tests; as root also those of SLURM.")
for_each_example("slurm", "Run those of SLURM alone: run.slurm, unmodified, on this machine.")
for_each_example("full", "Run the long tests, which the other sessions leave to this one.")


@nox.session
def train(session: nox.Session) -> None:
    """Train one example with 2 processes: `nox -s train -- ddp_spawn --epochs 3`."""
    example, *arguments = session.posargs or ["ddp_spawn"]
    if example not in EXAMPLES:
        session.error(f"there is no example {example!r}: choose from {', '.join(EXAMPLES)}")
    folder = ROOT / "examples" / example
    install(session, folder)
    if "--resume" not in arguments:  # a folder of its own: the others are of SLURM jobs
        shutil.rmtree(folder / "output" / "nox", ignore_errors=True)
    session.chdir(folder)
    if LAUNCHERS[example].prepare:
        session.run(*LAUNCHERS[example].prepare.split())
    session.run(*LAUNCHERS[example].command(2), "--output-dir", "output/nox", *arguments)


@nox.session
def verify(session: nox.Session) -> None:
    """Check a copy of an example from outside: `nox -s verify -- examples/ddp_spawn`."""
    if not session.posargs:
        session.error("name a folder with train.py and requirements.txt")
    install(session, Path(session.posargs[0]).resolve())
    session.run("python", "-m", "verify", *session.posargs)


@nox.session
def repo(session: nox.Session) -> None:
    """Run the tests of what belongs to no example (`-- -m "repo and full"`: the long ones)."""
    install(session, ROOT / "examples" / "ddp_spawn")
    sessions.pytest(session, "repo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure: `-- local` (benchmarks/measure.py)."""
    for example in EXAMPLES:
        if LAUNCHERS[example].pytorch:
            install(session, ROOT / "examples" / example)
    session.run("python", "-m", "benchmarks.measure", *(session.posargs or ["local"]))


@nox.session(python=False)
def sync(session: nox.Session) -> None:
    """Check that what several examples have is the same (`-- --fix` copies the sources again)."""
    if "--fix" in session.posargs:
        copies.fix(ROOT)
    if wrong := copies.differences(ROOT):
        where = "edit common/ or longrun/, or the first example of the same framework"
        session.error(f"differs: {', '.join(wrong)}; {where}, then: nox -s sync -- --fix")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and syntax: ruff, mypy, shellcheck, YAML, the hosted workflow."""
    session.install("-r", "tests/requirements-lint.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", ".")
    session.run("shellcheck", "--shell=bash", ".ci/run", *sessions.shell_scripts())
    session.run("yamllint", "--strict", ".")
    session.run("jactionlint", "--strict-exit", "--ignore=unpinned-images")  # Debian as it is today
