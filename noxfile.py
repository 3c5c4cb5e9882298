# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2024.4.15"]
# ///
"""The checks of this repository: `nox -l` lists them, `nox -s smoke` shows on a laptop that the examples work."""

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

# ddp_spawn comes first, since the others are compared with its run: so that has its own requirements and no more.
IN_ORDER = sorted(EXAMPLES, key=lambda name: name != "ddp_spawn")
every_example = nox.parametrize("example", IN_ORDER, ids=IN_ORDER)


def install(session: nox.Session, folder: Path) -> None:
    """Install what an example needs, as its README says."""
    variables = {}
    row = LAUNCHERS.get(folder.name)  # none: `verify` of a user's folder
    if session.name.startswith(("train", "smoke", "verify")) and row and row.pytorch:
        uv = nox.virtualenv.UV if session.venv_backend == "uv" else ""
        variables, why = sessions.build_of_torch(uv, folder / "requirements.txt")
        session.log(f"PyTorch: {why}")
    session.install("-r", str(folder / "requirements.txt"), env=variables)
    if (folder / "install.sh").exists():
        session.install("pip")  # install.sh calls it, and an environment made by uv has none
        session.run("bash", str(folder / "install.sh"), external=True)


def run_tests(session: nox.Session, example: str, kind: str) -> None:
    """Copy an example out of the repository, install it there, and run its tests of a kind."""
    if sys.platform != "linux":
        session.error("the tests find the processes of a run in /proc, so they need Linux; `train` does not")
    if kind == "slurm" and (reason := lab.why_not()):
        session.skip(reason)
    with tempfile.TemporaryDirectory(prefix=f"{example}-") as temporary:
        folder = copy_example(ROOT / "examples" / example, Path(temporary, example))
        arguments = sessions.other_release(session, folder)
        install(session, folder)
        # It trains before the tests' packages are there, which could hide that the example lacks one. So does --help,
        # which also compiles the modules: jobs, another user's, could not keep them.
        if kind == "smoke":
            session.run("python", "-m", "harness.reference", example, str(folder), sessions.references())
        elif not Path(session.virtualenv.location).is_symlink():  # `.ci/run` links to that in which smoke has trained
            session.run("python", str(folder / "train.py"), "--help", silent=True)
        if not LAUNCHERS[example].pytorch:
            session.install("-r", "examples/ddp_spawn/requirements.txt")  # the tests compute with PyTorch
        options = [f"--example={example}", f"--folder={folder}", f"--references={sessions.references()}"]
        pytest(session, kind, *options, *arguments, example=example)


def pytest(session: nox.Session, kind: str, *arguments: str, example: str = "") -> None:
    """Run the tests of a kind, several at once, which take work from each other, with what they need."""
    marks, paths, requirements, at_once = sessions.KINDS[kind]
    session.install("-r", f"tests/{requirements}")
    options = [f"--numprocesses={at_once}", "--dist=worksteal"] if at_once > 1 else []
    session.run("pytest", "-m", marks, *options, "--durations=10", "--durations-min=5", *paths, *arguments)


@nox.session
def train(session: nox.Session) -> None:
    """Train one example with 2 processes: `nox -s train -- ddp_spawn --epochs 3` (no name: ddp_spawn)."""
    arguments = list(session.posargs)
    example = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "ddp_spawn"
    if example not in EXAMPLES:
        session.error(f"there is no example {example!r}: choose from {', '.join(EXAMPLES)}")
    folder = ROOT / "examples" / example
    install(session, folder)
    if "--resume" not in arguments:
        shutil.rmtree(folder / "output" / "nox", ignore_errors=True)  # its own: the others are of SLURM jobs
    session.chdir(folder)
    if LAUNCHERS[example].prepare:
        session.run(*LAUNCHERS[example].prepare.split())
    session.run(*LAUNCHERS[example].command(2), "--output-dir", "output/nox", *arguments)


@nox.session
@every_example
def smoke(session: nox.Session, example: str) -> None:
    """Copy each example out of the repository; train as its README says and with minimal.py, on CPU over Gloo."""
    python = session.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    named = any(f"({example})" in word for word in sys.argv)
    if example in HOROVOD and not (named or sessions.in_ci() or sessions.horovod_is_built(example, python)):
        session.skip(f"it compiles Horovod, in 2 to 8 minutes, if asked: nox -s 'smoke({example})'")
    run_tests(session, example, "smoke")


@nox.session
@every_example
def checks(session: nox.Session, example: str) -> None:
    """Run all other tests of each example that need no SLURM."""
    run_tests(session, example, "checks")


@nox.session
@every_example
def slurm(session: nox.Session, example: str) -> None:
    """Start a SLURM of two nodes on this machine and submit each example's run.slurm, unmodified (needs root)."""
    run_tests(session, example, "slurm")


@nox.session
@every_example
def weekly(session: nox.Session, example: str) -> None:
    """Run the long tests of each example: ten kills at random moments, and what the other sessions leave to it."""
    run_tests(session, example, "weekly")


@nox.session
def verify(session: nox.Session) -> None:
    """Check a copy of an example from outside: `nox -s verify -- examples/ddp_spawn`; see verify/README.md."""
    folder = next((Path(word).resolve() for word in session.posargs if Path(word).is_dir()), None)
    if not folder or not (folder / "requirements.txt").exists():
        session.error("name a folder with train.py and requirements.txt: nox -s verify -- examples/ddp_spawn")
    install(session, folder)
    session.run("python", "-m", "verify", *session.posargs)


@nox.session
def repo(session: nox.Session) -> None:
    """Run the tests of what belongs to no example (`-- -m "repo and weekly"`: the long ones)."""
    install(session, ROOT / "examples" / "ddp_spawn")
    pytest(session, "repo", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure all examples of PyTorch: `-- throughput`, `-- local` or, as root, `-- job` (benchmarks/measure.py)."""
    for example in EXAMPLES:
        if LAUNCHERS[example].pytorch:
            install(session, ROOT / "examples" / example)
    session.run("python", "-m", "benchmarks.measure", *(session.posargs or ["throughput"]))


@nox.session(python=False)
def sync(session: nox.Session) -> None:
    """Check that what several examples have is the same: common/, longrun/ and two files (`-- --fix`)."""
    if "--fix" in session.posargs:
        copies.fix(ROOT)
    if wrong := copies.differences(ROOT):
        where = "Edit the top-level common/ or longrun/, or the file in the first example of the same framework"
        session.error(f"differs: {', '.join(wrong)}. {where}, then: nox -s sync -- --fix")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and syntax: ruff, mypy, shellcheck, YAML, the hosted workflow."""
    session.install("-r", "tests/requirements-lint.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", ".")
    session.run("shellcheck", "--shell=bash", *sessions.shell_scripts())
    session.run("yamllint", "--strict", ".")
    session.run("jactionlint", "--strict-exit", "--ignore=unpinned-images")  # each Debian as it is today
