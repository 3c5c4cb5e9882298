"""Flags in the running text of a README or of docs/: the program that the text speaks of has them, by its `--help`.

Commands in bash blocks are run by tests: see test_commands.py. Here are the flags in sentences, tables and examples.
"""

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import readme
from harness.launchers import EXAMPLES, ROOT
from lab import Wanted

PARSER = re.compile(r"ArgumentParser\(|plumbing\.arguments\(")  # a file that has it is a program with flags
FLAG = re.compile(r"(?<![\w-])(?<!\bno `)--[a-z][a-z0-9_-]*")
# Prints the `--help` of programs, one after the other, without the packages that they import: to load those would take
# a minute, and no environment has all of them. In the place of each there is something that can be called and combined.
PRINT_HELP = """
import importlib.abc, importlib.machinery, os, runpy, sys, types

class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Nothing,), {})

class Nothing(metaclass=Meta):
    def __init__(self, *_, **__):
        pass
    def __init_subclass__(cls, **_):
        pass
    def __call__(self, given=None, *_, **__):  # a decorator, for instance
        return given
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()
    def __iter__(self):
        return iter(())
    def __add__(self, _):
        return self
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__

class Package(types.ModuleType):
    __version__ = "0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Nothing,), {})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or os.path.exists(top) or os.path.exists(f"{top}.py"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Package(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
for program in sys.argv[1:]:
    print("### ", program, flush=True)
    sys.argv = [program, "--help"]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit:
        pass
"""
# Of programs that are not ours, and of DeepSpeed, which adds its own to train.py.
FOREIGN = {
    "SLURM": "account array batch bind-to chdir comment constraint cpu-bind cpus-per-gpu cpus-per-task dependency "
    "distribution exclude exclusive export format gpu-bind gpus gpus-per-node gpus-per-task gres gres-flags hint jobid "
    "job-name kill-on-bad-exit me mem mem-per-cpu mem-per-gpu mpi network no-kill no-requeue nodelist nodes ntasks "
    "ntasks-per-node open-mode output overlap partition pty qos requeue signal start step threads-per-core time tmp "
    "tres-per-task wait",
    "launchers": "enable_cpu_affinity gloo local_addr max-restarts module nnodes nproc-per-node rdzv-backend "
    "rdzv-endpoint standalone",
    "pip, uv, venv": "compile-bytecode find-links force-reinstall index-url no-build-isolation no-cache-dir no-deps "
    "no-index prefix reinstall requirement system-site-packages upgrade",
    "containers": "bind container-image container-writable fakeroot image nv pid privileged rocm",
    "nox": "environment force-python no-download peers",
    "others": "arch backend-store-uri bandwidth dereference latency listen local-dir logdir login version yes",
}
OWN = ["lab", "preflight", "sweep", "jupyter", "runs", "benchmarks", "studies", "tests", "harness"]


@functools.cache
def flags() -> dict[str, dict[str, set[str]]]:
    """Return the flags of each program of each example, as its `--help` names them."""
    found: dict[str, dict[str, set[str]]] = {}
    for example in EXAMPLES:
        folder = ROOT / "examples" / example
        files = [*sorted(folder.glob("*.py")), *sorted(folder.glob("more/*.py"))]
        programs = [str(path.relative_to(folder)) for path in files if PARSER.search(path.read_text())]
        words = [sys.executable, "-S", "-c", PRINT_HELP, *programs]
        done = subprocess.run(words, cwd=folder, env={"COLUMNS": "200"}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        parts = dict(part.split("\n", 1) for part in done.stdout.split("### ")[1:])
        found[example] = {name.strip(): set(re.findall(r"^ +(--[\w-]+)", text, re.M)) for name, text in parts.items()}
        assert len(found[example]["train.py"]) > 12, f"{example}: {done.stdout}{done.stderr}"
    return found


@functools.cache
def others() -> dict[str, set[str]]:
    """Return the flags of programs that are no example's, by their names: the other rooms', and what is not ours."""
    found = {f"of {name}": {f"--{word}" for word in words.split()} for name, words in FOREIGN.items()}
    for path in [ROOT / "noxfile.py", *(path for room in OWN for path in (ROOT / room).rglob("*.py"))]:
        if path != Path(__file__):
            found.setdefault(path.stem, set()).update(re.findall(r"\"(--[a-z][\w-]*)[\"=]", path.read_text()))
    names = [field.name.replace("_", "-") for field in dataclasses.fields(Wanted)]
    found["config"] |= {f"--{name}" for name in names}  # of the lab, which makes its flags of these
    return found


def wrong(text: str, own: str = "") -> list[str]:
    """Return which flags of a text belong to no program that it speaks of.

    What all examples have needs no name. What some have needs the name of one of those in its section or at the page's
    beginning; in an example's own README that is named already.
    """
    found = []
    common = set.intersection(*(programs["train.py"] for programs in flags().values()))
    beginning, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for section in [beginning, *sections]:
        named = {name for name in [*EXAMPLES, *others()] if re.search(rf"\b{name}\b", beginning + section)} | {own}
        for flag in FLAG.findall(re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)):
            owners = {name for name, programs in flags().items() if any(flag in has for has in programs.values())}
            rooms = {name for name, has in others().items() if flag in has}
            if flag not in common and not (owners | rooms) & named and (owners or not rooms):
                found.append(f"{flag}: of {', '.join(sorted(owners)) or 'no program'}")
    return found


@pytest.mark.parametrize("document", readme.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_in_running_text(document: Path) -> None:
    """Each flag belongs to a program that the text speaks of."""
    own = document.parent.name if document.parent.parent.name == "examples" else ""
    assert wrong(document.read_text(), own) == []


def test_remedies_for_memory() -> None:
    """Each example that docs/out-of-memory.md names beside a flag has that flag."""
    checked = 0
    for part in re.split(r"[;|\n]", (ROOT / "docs" / "out-of-memory.md").read_text()):
        named = set(re.findall(r"`(--[a-z_-]+)", part))
        for example in re.findall(r"\]\(\.\./examples/(\w+)", part):
            text = (ROOT / "examples" / example / "train.py").read_text()
            text += (ROOT / "plumbing" / "settings.py").read_text()
            assert [flag for flag in named if f'"{flag}"' not in text] == [], (example, part)
            checked += len(named)
    assert checked > 10
