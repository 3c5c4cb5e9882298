# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2024.4.15"]
# ///
"""The checks of this repository: `nox -l` lists them, `nox -s smoke` runs the tests on a laptop."""

import functools
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("noxfile.py: error: the examples need Python 3.11 to 3.13: run nox with one")

import nox  # noqa: E402

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # where `nox` itself does not look for modules
from harness import copies  # noqa: E402
from harness.launchers import EXAMPLES, LAUNCHERS, copy_example  # noqa: E402

if os.geteuid() == 0:
    os.umask(0o022)  # the lab's jobs, another user's, read the environments that root makes

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["sync", "lint", "repo", "smoke"]

every_example = nox.parametrize("example", EXAMPLES, ids=EXAMPLES)


def install(session: nox.Session, folder: Path) -> None:
    """Install what an example needs, as its README says."""
    session.install("-r", str(folder / "requirements.txt"))
    if (folder / "install.sh").exists():
        session.install("pip")  # install.sh calls it, and an environment made by uv has none
        session.run("bash", str(folder / "install.sh"), external=True)


class Kind(NamedTuple):
    """What pytest is told to run: tests with which marks, in which files, and how many at once."""

    marks: str
    paths: list[str]
    at_once: int


KINDS = {
    "smoke": Kind("not slurm and not weekly and not gpu", ["--ignore=tests/slurm", "tests"], at_once=3),
    "slurm": Kind("slurm and not weekly", ["tests/slurm"], at_once=3),
    "weekly": Kind("weekly and not gpu", ["tests"], at_once=2),
    "gpu": Kind("gpu", ["tests/test_gpu.py"], at_once=1),
}


@functools.cache
def references() -> tempfile.TemporaryDirectory:
    """Return the folder of the reference runs, which is removed when nox ends."""
    return tempfile.TemporaryDirectory(prefix="references-")


def releases() -> dict[str, str]:
    """Return other releases of PyTorch to test with, and the torchvision of each: preflight's, and one more."""
    table = json.loads((ROOT / "preflight" / "releases.json").read_text())
    wheels = [row["wheel"] for row in table["nvidia"] if row["wheel"]] + [table["tested_besides"]]
    return {torch: torchvision for torch, torchvision, _ in wheels}


def other_release(session: nox.Session, folder: Path) -> list[str]:
    """Have requirements.txt pin the PyTorch of `-- --torch 2.9.1`; return what else follows `--`, which is pytest's."""
    arguments = list(session.posargs)
    if "--torch" not in arguments:
        return arguments
    at = arguments.index("--torch")
    release = "".join(arguments[at + 1 : at + 2])
    if release not in releases():
        session.error(f"--torch {release}: choose from {', '.join(releases())}")
    pins = (folder / "requirements.txt").read_text()
    pins = re.sub(r"^torch==\S+", f"torch=={release}", pins, flags=re.MULTILINE)
    pins = re.sub(r"^torchvision==\S+", f"torchvision=={releases()[release]}", pins, flags=re.MULTILINE)
    (folder / "requirements.txt").write_text(pins)
    return arguments[:at] + arguments[at + 2 :]


def run_tests(session: nox.Session, example: str, kind: str) -> None:
    """Copy an example out of the repository, install it there, and run its tests of a kind."""
    if sys.platform != "linux":
        session.error("the tests find the processes of a run in /proc, so they need Linux; `train` does not")
    with tempfile.TemporaryDirectory(prefix=f"{example}-") as temporary:
        folder = copy_example(ROOT / "examples" / example, Path(temporary, example))
        arguments = other_release(session, folder)
        install(session, folder)
        # Before the tests' packages are there, which could hide that the example lacks one. It also compiles the
        # modules: processes that start together would each do so, and jobs, another user's, could not keep them.
        session.run("python", str(folder / "train.py"), "--help", silent=True)
        if kind == "smoke":
            session.run("python", "-m", "harness.reference", example, str(folder), references().name)
        if not LAUNCHERS[example].pytorch:
            session.install("-r", "examples/ddp_spawn/requirements.txt")  # the tests compute with PyTorch
        session.install("-r", "tests/requirements.txt")
        options = [f"--example={example}", f"--folder={folder}", f"--references={references().name}"]
        pytest(session, KINDS[kind], *options, *arguments)


def pytest(session: nox.Session, kind: Kind, *arguments: str) -> None:
    """Run pytest with several processes, which take work from each other."""
    options = [f"--numprocesses={kind.at_once}", "--dist=worksteal", "--durations=10", "--durations-min=5"]
    session.run("pytest", "-m", kind.marks, *options, *kind.paths, *arguments)


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
    launcher = LAUNCHERS[example]
    session.chdir(folder)
    if launcher.prepare:
        session.run(*launcher.prepare.split())
    session.run(*launcher.command(2), "--output-dir", "output/nox", *arguments)


@nox.session
@every_example
def smoke(session: nox.Session, example: str) -> None:
    """Copy each example out of the repository, run its README's command and its tests there, on CPU over Gloo."""
    run_tests(session, example, "smoke")


@nox.session
@every_example
def slurm(session: nox.Session, example: str) -> None:
    """Start a SLURM of two nodes on this machine and submit each example's run.slurm, unmodified (needs root)."""
    from lab import why_not

    if reason := why_not():
        session.skip(reason)
    run_tests(session, example, "slurm")


@nox.session
@every_example
def weekly(session: nox.Session, example: str) -> None:
    """Run the long tests of each example: ten kills at random moments, and what `smoke` and `slurm` leave to it."""
    run_tests(session, example, "weekly")


@nox.session
@every_example
def gpu(session: nox.Session, example: str) -> None:
    """Train each example on this machine's GPUs, resume it, and compare it with a run on the CPU (NVIDIA only)."""
    if not shutil.which("nvidia-smi"):
        session.skip("there is no nvidia-smi: it needs a machine with NVIDIA GPUs")
    run_tests(session, example, "gpu")


@nox.session
def repo(session: nox.Session) -> None:
    """Run the tests of what belongs to no example (`-- --weekly`: the long; `-- --matrix`: print what runs where)."""
    install(session, ROOT / "examples" / "ddp_spawn")
    session.install("-r", "tests/requirements.txt")
    if "--matrix" in session.posargs:
        session.run("pytest", "--collect-only", "--quiet", *session.posargs, success_codes=[0, 5])
        return
    marks = "repo and weekly" if "--weekly" in session.posargs else "repo and not weekly"
    pytest(session, Kind(marks, [], at_once=3), *[word for word in session.posargs if word != "--weekly"])


def measure(session: nox.Session, *arguments: str) -> None:
    """Install what all examples of PyTorch need together, and run a module of benchmarks/."""
    for example in EXAMPLES:
        if LAUNCHERS[example].pytorch:
            install(session, ROOT / "examples" / example)
    session.install("-r", "tests/requirements.txt", "-r", "benchmarks/requirements.txt")
    session.run("python", "-m", *arguments)


def own_environment(session: nox.Session, example: str) -> Path:
    """Make an environment, once, for an example that cannot share one with the others; return its folder."""
    folder = Path(session.virtualenv.location).resolve().with_name(f"bench-{example}")
    source = ROOT / "examples" / example
    if not (folder / "made").exists():
        session.run("python", "-m", "venv", "--clear", str(folder))
        session.run(f"{folder}/bin/pip", "install", "-q", "-r", f"{source}/requirements.txt", external=True)
        # By `env`, since nox puts the session's own environment before a PATH that it is given.
        path = (f"PATH={folder}/bin:{os.environ['PATH']}", f"VIRTUAL_ENV={folder}")
        session.run("env", *path, "bash", f"{source}/install.sh", external=True)
        (folder / "made").touch()
    return folder


@nox.session
def compare(session: nox.Session) -> None:
    """Train with every example and compare weights, losses and costs: results/local.* (`-- --slurm`: job.*)."""
    arguments = [word for word in session.posargs if word != "--slurm"]
    measure(session, "benchmarks.measure", "job" if "--slurm" in session.posargs else "local", *arguments)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure every example against a bare loop, on an idle machine (`-- --peers`: against public scripts)."""
    arguments = [word for word in session.posargs if word != "--peers"]
    if "--peers" not in session.posargs:
        measure(session, "benchmarks.measure", "throughput", *arguments)
        return
    session.install("-r", "benchmarks/requirements-peers.txt")
    alone = [name for name in EXAMPLES if not LAUNCHERS[name].pytorch]
    venvs = [f"--venv={name}={own_environment(session, name)}" for name in alone]
    measure(session, "benchmarks.peers", *venvs, *arguments)


@nox.session(python=False)
def sync(session: nox.Session) -> None:
    """Check that what several examples have is the same: common/, plumbing/, four files (`-- --fix`)."""
    if "--fix" in session.posargs:
        copies.fix(ROOT)
    if wrong := copies.differences(ROOT):
        session.error(
            f"differs: {', '.join(wrong)}. Edit the top-level common/ or plumbing/, or the file in the first example "
            "of the same framework, then: nox -s sync -- --fix"
        )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and syntax: ruff, mypy, shellcheck, bash -n, YAML, the hosted workflow."""
    session.install("-r", "tests/requirements-lint.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", ".")
    scripts = [".ci/run", *map(str, Path().glob("plumbing/*.sh")), *map(str, Path().glob("*/*.slurm"))]
    scripts += map(str, Path().glob("examples/*/*.sh"))
    scripts += map(str, Path().glob("examples/*/more/*.sh"))
    scripts += map(str, Path().glob("examples/*/*.slurm"))
    session.run("shellcheck", "--shell=bash", *scripts)
    for script in scripts:
        session.run("bash", "-n", script, external=True, silent=True)
    session.run("yamllint", "--strict", ".")
    session.run("jactionlint", "--strict-exit")  # with the scripts of its steps, by shellcheck
