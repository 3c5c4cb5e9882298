"""tests/constraints.txt pins what the pinned packages need, and .ci/run installs with it."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fake_gpus
from harness import readme
from harness.launchers import ROOT

CONSTRAINTS = ROOT / "tests" / "constraints.txt"
FILES = sorted(
    str(path.relative_to(ROOT)) for room in ("*", "examples/*") for path in ROOT.glob(f"{room}/requirements*.txt")
)
BUILD_TOOLS = {"setuptools", "wheel"}  # an install.sh has its own


def requirements(text: str) -> list[Requirement]:
    """Return what a requirements file asks for, without other files that it names."""
    lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-r "))]


def contradictions(constraints: str, wanted: str) -> list[str]:
    """Return the requirements that are not pinned exactly, or to no version among the constraints."""
    pins = defaultdict(set)
    for pin in requirements(constraints):
        pins[pin.name].add(str(pin.specifier))
    return [str(one) for one in requirements(wanted) if pins[one.name] != {str(one.specifier)}]


@pytest.mark.parametrize("file", FILES)
def test_requirements_agree(file: str) -> None:
    """The constraints have each package that we ask for, in the version that we ask for."""
    assert contradictions(CONSTRAINTS.read_text(), (ROOT / file).read_text()) == []


def test_constraints() -> None:
    """Both pip and uv can read the file, in which each package has a pin for every Python, and no build tool has."""
    pins = requirements(CONSTRAINTS.read_text())
    assert len(pins) > 100 and not BUILD_TOOLS & {pin.name for pin in pins}
    for pin in pins:
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)) and not pin.extras, pin


def test_fake_gpus() -> None:
    """They know the PyTorch that the examples pin."""
    assert f"torch=={fake_gpus.KNOWN}\n" in (ROOT / "examples" / "fsdp" / "requirements.txt").read_text()


def command() -> str:
    """Return the command, of whichever page, that writes the constraints."""
    return readme.command("*", "uv pip compile --quiet ...")


def test_command_reads_all() -> None:
    """The command reads all of our requirements, and leaves out what an install.sh has its own of."""
    words = shlex.split(command())
    assert {word for before, word in itertools.pairwise(words) if before == "--no-emit-package"} == BUILD_TOOLS
    read = {path for word in words for path in ROOT.glob(word) if re.search(r"requirements[-\w*]*\.txt$", word)}
    for path in list(read):
        read |= {(path.parent / name).resolve() for name in re.findall(r"^-r (.+)", path.read_text(), re.MULTILINE)}
    assert read == {ROOT / file for file in FILES}


def test_command(tmp_path: Path) -> None:
    """Without --upgrade the command changes nothing: the constraints are what it writes, and agree with each other."""
    copy = Path(shutil.copy(CONSTRAINTS, tmp_path))
    line = command().replace("--upgrade ", "").replace("tests/constraints.txt", str(copy))
    assert "--upgrade" in command() and str(copy) in line
    kept = {name: text for name, text in os.environ.items() if name not in ("UV_CONSTRAINT", "UV_TORCH_BACKEND")}
    environment = kept | {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", line], cwd=ROOT, env=environment, check=True, timeout=300)
    assert copy.read_text() == CONSTRAINTS.read_text()


@pytest.mark.parametrize(("words", "used"), [([], True), (["weekly"], False)])
def test_ci_run(tmp_path: Path, words: list[str], used: bool) -> None:
    """.ci/run gives the clone's file to pip and uv, but with `weekly` neither; without CI it asks to be told first."""
    if os.geteuid() > 0:
        pytest.skip("needs root: .ci/run installs packages")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    stub = tmp_path / "bin" / "git"  # it makes the clone, where the second half of the script starts
    stub.parent.mkdir()
    stub.write_text(
        '#!/bin/sh\nfor clone; do :; done\nmkdir -p "$clone/.ci" "$clone/tests"\n'
        f'cp {CONSTRAINTS} "$clone/tests"\n'
        "echo 'for name in PIP UV; do file=${name}_CONSTRAINT; file=${!file:-none}; echo $name ${file#$PWD/}; "
        '[[ $file == none ]] || test -s "$file"; done\' >"$clone/.ci/run"\n'
    )
    stub.chmod(0o755)
    (tmp_path / "bin" / "dpkg-query").write_text("#!/bin/sh\nprintf 'ii '\n")
    (tmp_path / "bin" / "dpkg-query").chmod(0o755)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "CI": "true"}
    command = ["bash", str(tmp_path / ".ci" / "run"), *words]
    environment |= {"UV_CONSTRAINT": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    file = "tests/constraints.txt" if used else "none"
    assert done.returncode == 0 and done.stdout == f"PIP {file}\nUV {file}\n", done.stdout + done.stderr
