"""tests/constraints.txt pins what the pinned packages need."""

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


def command() -> str:
    """Return the command that writes the constraints."""
    return readme.command("docs/maintaining.md", "uv pip compile --quiet ...")


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
