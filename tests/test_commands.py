"""Every command in the bash blocks of a page is taken from it by a test, or run by .ci/run, or says what it needs.

A test takes a command by `command`, `until` or `block` of harness/readme.py, and runs it, so that what is run is what
the page says, but for the changes that stand beside the call. Here these calls are found in the code of the tests, and
made: what they ask for must be a literal. That a test runs a line which it has taken and uses is for its reader to see.
"""

import ast
import contextlib
import fnmatch
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from harness import launchers, readme
from harness.launchers import LAUNCHERS, ROOT, copy_example

NEEDS = re.compile(r"# needs (the internet|a cluster|a GPU)\b")
SOURCES = tuple(path.read_text() for room in ("tests", "harness") for path in (ROOT / room).rglob("*.py"))
DOCUMENTS = [str(path.relative_to(ROOT)) for path in readme.DOCUMENTS]


def packages() -> list[str]:
    """Return the Debian packages that .ci/run installs."""
    lists = re.findall(r"packages\+?=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    return " ".join(lists).split()


def test_packages_are_named() -> None:
    """Each Debian package that .ci/run installs is in an apt-get command of a page: else newcomers would lack it."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "lab/README.md", "docs/own-data.md"))
    named = " ".join(re.findall(r"apt-get install ([^`\n]+)", text)).split()
    assert packages() and not set(packages()).difference(named)
    assert set(readme.command("lab/README.md", "sudo apt-get install ...").split()[4:]) <= set(packages())


def used(sources: Iterable[str]) -> Iterator[ast.stmt]:
    """Yield the tests in these texts, and each function, class and value there whose name they use, if only by others.

    Of several with one name all are meant.
    """
    named = defaultdict(list)
    for node in (node for text in sources for node in ast.parse(text).body):
        names = [node] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else getattr(node, "targets", [])
        for name in names:
            named[getattr(name, "name", ast.unparse(name))].append(node)
    left = {name for name in named if name.startswith("test_")}
    while left:
        nodes = [node for name in left for node in named.pop(name)]
        yield from nodes
        words = {getattr(part, kind, "") for node in nodes for part in ast.walk(node) for kind in ("id", "attr", "arg")}
        left = words & named.keys()


def examples(node: ast.stmt) -> list[str]:
    """Return the examples with which a test runs, by its mark `only`: without that, and if it is no test, all."""
    marks = [mark for mark in getattr(node, "decorator_list", []) if ast.unparse(mark).startswith("pytest.mark.only(")]
    return eval(f"[{', '.join(map(ast.unparse, marks[0].args))}]", vars(launchers)) if marks else [*LAUNCHERS]


@functools.cache
def taken(sources: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return each command that the tests in these texts take, after its document; fail if there is none to take."""
    found = set()
    for node in used(sources):
        unused = {part.value for part in ast.walk(node) if isinstance(part, ast.Expr)}
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call) and part not in unused):
            room, _, function = ast.unparse(call.func).partition(".")
            if room != "readme" or function not in ("command", "until", "block"):
                continue
            names = {eval(ast.unparse(call.args[0]), {"example": name}) for name in examples(node)}
            there = set()
            for document in (name for name in DOCUMENTS if any(fnmatch.fnmatchcase(name, one) for one in names)):
                with contextlib.suppress(AssertionError):
                    lines = getattr(readme, function)(document, ast.literal_eval(call.args[1]))
                    there |= {(document, line) for line in ([lines] if isinstance(lines, str) else lines)}
            assert there, f"{ast.unparse(call)}: no such command"
            changes = [ast.literal_eval(key) for literal in call.args[2:] for key in getattr(literal, "keys", [])]
            assert all(old in line for old in changes for _, line in there), f"{there} has not all of {changes}"
            found |= there
    return found


def lacking(document: str, sources: tuple[str, ...] = SOURCES) -> set[str]:
    """Return the commands of a document that have no mark, and that neither .ci/run nor a test in these texts runs."""
    commands = {command: comment for block in readme.blocks(ROOT / document) for command, comment in block.items()}
    unmarked = {command for command, comment in commands.items() if not NEEDS.search(f"# {comment}")}
    pattern = re.search("grep -E -- '(.*)' README.md", (ROOT / ".ci" / "run").read_text())[1]
    by_ci_run = {line for line in (ROOT / "README.md").read_text().splitlines() if re.search(pattern, line)}
    return unmarked - by_ci_run - {command for name, command in taken(sources) if name == document}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command(document: str) -> None:
    """Each command is run by .ci/run, taken by a test, or marked."""
    assert not lacking(document), "no test takes it from the page, see harness/readme.py"
    languages = re.findall(r"^```(.+)$", (ROOT / document).read_text(), re.MULTILINE)
    assert set(languages) <= {"bash", "python", "diff", "mermaid"}, "a fence whose commands are not looked at"


def test_a_command_without_a_test() -> None:
    """It is noticed if none takes a command, or only what no test uses, and if a test takes one that is not there."""
    document, line = "examples/deepspeed/README.md", "sbatch run.slurm --zero-stage 3"
    assert lacking(document, tuple(text for text in SOURCES if f'"{line}"' not in text)) == {line}
    text = f'def test_it():\n    helper()\ndef helper():\n    return readme.command("{document}", "{line}")\n'
    assert taken((text,)) == {(document, line)}
    for old, new in (("    helper", "    other"), ("return ", "")):
        assert taken((text.replace(old, new),)) == set()
    with pytest.raises(AssertionError, match="stage 4'.: no such command"):
        taken((text.replace("stage 3", "stage 4"),))


@pytest.mark.only("ddp_spawn")
def test_copy_one_out(example: str, tmp_path: Path) -> None:
    """The README's block: what its last command needs is in a folder copied out of a clone of the repository.

    That command is the same as in ddp_spawn's README, so that it is the reference run, which trains in such a copy.
    """
    *commands, last = readme.until("README.md", "python train.py --processes 2")
    assert last == " ".join(LAUNCHERS[example].command(2))
    clone = tmp_path / "clone"
    copy_example(ROOT / "examples" / example, clone / "examples" / example)
    run = readme.run_block([*commands, f"{last} --help"], clone, HOME=str(tmp_path))
    assert run.stdout.startswith("usage: train.py") and (tmp_path / "project" / "train.py").exists()
