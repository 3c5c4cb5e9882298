# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2024.4.15"]
# ///
"""The checks of this repository: `nox -l` lists them, `nox -s smoke` runs the tests on a laptop."""

import filecmp
import importlib.util
import re
import shutil
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("noxfile.py: error: the examples need Python 3.11 to 3.13: run nox with one")

import nox  # noqa: E402

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["sync", "lint", "smoke"]

ROOT = Path(__file__).resolve().parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/train.py"))
assert EXAMPLES, "no examples/*/train.py found"
# Other releases of PyTorch to test with, and the torchvision that belongs to each.
TORCHVISION = {"2.6.0": "0.21.0", "2.9.1": "0.24.1", "2.14.0": "0.29.0"}
every_example = nox.parametrize("example", EXAMPLES, ids=EXAMPLES)


def ours(module: str) -> ModuleType:
    """Import a module of this repository, which is not installed anywhere.

    The program `nox` leaves this folder off the path on which Python looks for modules, and a plain import at the top
    would also need the tests where only `sync` is asked for. So the module's package is loaded here, from its folder.
    """
    package = module.partition(".")[0]
    if package not in sys.modules:
        spec = PathFinder.find_spec(package, [str(ROOT)])
        sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[package])
    return importlib.import_module(module)


def install(session: nox.Session, folder: Path) -> None:
    """Install what an example needs, as its README says."""
    session.install("-r", str(folder / "requirements.txt"))
    if (folder / "install.sh").exists():
        session.install("pip")  # install.sh calls it, and an environment made by uv has none
        session.run("bash", str(folder / "install.sh"), external=True)


def uses_torch(folder: Path) -> bool:
    """Return whether an example is one of PyTorch's."""
    return "\ntorch==" in f"\n{(folder / 'requirements.txt').read_text()}"


def run_tests(session: nox.Session, example: str, marks: str, at_once: int) -> None:
    """Copy an example out of the repository, install it there, and run those of its tests that `marks` select.

    `-- --torch 2.9.1` takes another release of PyTorch; all else that follows `--` goes to pytest.
    """
    arguments = list(session.posargs)
    with tempfile.TemporaryDirectory(prefix=f"{example}-") as temporary:
        folder = ours("tests.harness.launchers").copy_example(ROOT / "examples" / example, Path(temporary, example))
        if "--torch" in arguments:
            release = arguments.pop(arguments.index("--torch") + 1)
            arguments.remove("--torch")
            if release not in TORCHVISION:
                session.error(f"--torch {release}: choose from {', '.join(TORCHVISION)}")
            pins = (folder / "requirements.txt").read_text()
            pins = re.sub(r"^torch==\S+", f"torch=={release}", pins, flags=re.MULTILINE)
            pins = re.sub(r"^torchvision==\S+", f"torchvision=={TORCHVISION[release]}", pins, flags=re.MULTILINE)
            (folder / "requirements.txt").write_text(pins)
        install(session, folder)
        if not uses_torch(folder):
            session.install("-r", "examples/ddp_spawn/requirements.txt")  # the tests compute with PyTorch
        session.install("-r", "tests/requirements.txt")
        if marks.startswith("slurm"):  # jobs are another user's, who could not keep the compiled modules
            session.run("python", str(folder / "train.py"), "--help", silent=True)
        options = [f"--example={example}", f"--folder={folder}", f"--numprocesses={at_once}", "--dist=worksteal"]
        options += ["--durations=10", "--durations-min=5"]
        session.run("pytest", "-m", marks, *options, *arguments)


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
    launcher = ours("tests.harness.launchers").LAUNCHERS[example]
    session.chdir(folder)
    if launcher.prepare:
        session.run(*launcher.prepare.split())
    session.run(*launcher.command(2), "--output-dir", "output/nox", *arguments)


@nox.session
@every_example
def smoke(session: nox.Session, example: str) -> None:
    """Copy each example out of the repository, run its README's command and its tests there, on CPU over Gloo."""
    run_tests(session, example, "not slurm and not faults and not gpu", at_once=3)


@nox.session
@every_example
def slurm(session: nox.Session, example: str) -> None:
    """Start a SLURM of two nodes on this machine and submit each example's run.slurm, unmodified (needs root)."""
    if reason := ours("lab").why_not():
        session.skip(reason)
    run_tests(session, example, "slurm and not faults", at_once=3)


@nox.session
@every_example
def gpu(session: nox.Session, example: str) -> None:
    """Train each example on this machine's GPUs, resume it, and compare it with a run on the CPU (NVIDIA only)."""
    if not shutil.which("nvidia-smi"):
        session.skip("there is no nvidia-smi: it needs a machine with NVIDIA GPUs")
    run_tests(session, example, "gpu", at_once=1)


@nox.session
@every_example
def faults(session: nox.Session, example: str) -> None:
    """Run the long tests of each example: ten kills at random moments, and what `smoke` and `slurm` leave to it."""
    run_tests(session, example, "faults", at_once=2)


def measure(session: nox.Session, *arguments: str) -> None:
    """Install what all examples of PyTorch need together, and run a module of benchmarks/."""
    for example in EXAMPLES:
        if uses_torch(ROOT / "examples" / example):
            install(session, ROOT / "examples" / example)
    session.install("-r", "tests/requirements.txt", "-r", "benchmarks/requirements.txt")
    session.run("python", "-m", *arguments)


@nox.session
def compare(session: nox.Session) -> None:
    """Train with every example and compare weights, losses and costs: results/local.* (`-- --slurm`: job.*)."""
    arguments = [word for word in session.posargs if word != "--slurm"]
    measure(session, "benchmarks.measure", "job" if "--slurm" in session.posargs else "local", *arguments)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure every example against a bare loop, on an idle machine (`-- --peers`: against public scripts)."""
    arguments = [word for word in session.posargs if word != "--peers"]
    module = ["benchmarks.peers"] if "--peers" in session.posargs else ["benchmarks.measure", "throughput"]
    measure(session, *module, *arguments)


def left_out(copy: Path) -> list[str]:
    """Return patterns of what an example's common/ does not have: the modules, if it does not use PyTorch."""
    return ["__pycache__", *["*.py"] * (not uses_torch(copy.parent))]


def files(tree: Path, without: list[str]) -> set[str]:
    """Return the files of a folder, relative to it, but for those that match one of the patterns."""
    found = [file for file in tree.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {str(file.relative_to(tree)) for file in found if not any(map(file.match, without))}


def differences(copy: Path) -> list[str]:
    """Return the files in which an example's common/ differs from the top-level one, missing and extra ones too."""
    wanted = files(ROOT / "common", left_out(copy))
    same, _, _ = filecmp.cmpfiles(ROOT / "common", copy, wanted, shallow=False)
    return sorted(str((copy / name).relative_to(ROOT)) for name in (wanted | files(copy, [])).difference(same))


@nox.session(python=False)
def sync(session: nox.Session) -> None:
    """Check that every example's common/ is a copy of the top-level one; `nox -s sync -- --fix` makes it one."""
    copies = [ROOT / "examples" / example / "common" for example in EXAMPLES]
    if "--fix" in session.posargs:
        for copy in copies:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(ROOT / "common", copy, ignore=shutil.ignore_patterns(*left_out(copy)))
    if wrong := [name for copy in copies for name in differences(copy)]:
        session.error(f"differs from the top-level common/: {', '.join(wrong)}; edit there, then: nox -s sync -- --fix")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and syntax: ruff, ruff format, shellcheck, bash -n, YAML."""
    session.install("-r", "tests/requirements-lint.txt")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    scripts = [".ci/run", *map(str, Path().glob("examples/*/*.s*h")), *map(str, Path().glob("*/*.slurm"))]
    scripts += map(str, Path().glob("examples/*/*.slurm"))
    session.run("shellcheck", *scripts)
    for script in scripts:
        session.run("bash", "-n", script, external=True, silent=True)
    session.run("yamllint", "--strict", ".")
