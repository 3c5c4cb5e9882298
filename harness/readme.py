"""Take commands from a page, and run them word for word without installing anything twice."""

import re
import shlex
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from harness import runs
from harness.launchers import ROOT

DOCUMENTS = sorted(path for pattern in ("*.md", "[!.]*/*.md", "examples/*/*.md") for path in ROOT.glob(pattern))


def fences(page: Path, language: str) -> list[str]:
    """Return the text of each fenced block of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[list[str]]:
    """Return the commands of each bash block of a page, those of several lines joined, without comments."""
    joined = [re.sub(r"\\\n *", "", text) for text in fences(page, "bash")]
    return [[line.partition(" #")[0].strip() for line in text.splitlines()] for text in joined]


def find(page: str, words: str) -> list[tuple[list[str], str]]:
    """Return each command of a page that is `words`, where "..." stands for any words, after its block."""
    pattern = re.compile(".*".join(map(re.escape, words.split("..."))))
    found = [(block, line) for block in blocks(ROOT / page) for line in block if pattern.fullmatch(line)]
    assert found, f"{page}: no command is {words!r}"
    return found


def command(page: str, words: str, changes: Mapping[str, object] | None = None) -> str:
    """Return the one command of a page that is `words`, with other words instead of some of its own."""
    found = find(page, words)
    assert len(found) == 1, f"{page}: not one command is {words!r}, but {found}"
    line = found[0][1]
    for old, new in (changes or {}).items():
        assert old in line, f"{line}: has no {old!r} to be changed"
        line = line.replace(old, str(new))
    return line


def block(page: str, words: str) -> list[str]:
    """Return all commands of the first block that has the command `words`."""
    return find(page, words)[0][0]


def until(page: str, words: str) -> list[str]:
    """Return the commands of the first block that has the command `words`, up to and with that one."""
    commands, last = find(page, words)[0]
    return commands[: commands.index(last) + 1]


def run_block(commands: list[str], folder: Path, **variables: str) -> runs.Run:
    """Run commands one after the other in one shell, and return the last one's run; all of them must succeed.

    An environment that they make sees the packages that these tests run with. So `pip install -r requirements.txt`
    finds each there, in its version, and it may ask no index for another.
    """
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    log = folder.parent / f"{folder.name}-setup.log"  # what all but the last one print
    log.touch()
    script = "".join(f"{{ {line}; }} >>{shlex.quote(str(log))} 2>&1\n" for line in commands[:-1]) + commands[-1]
    run = runs.Run(["bash", "-ec", script], folder, packages | variables).wait(400)
    assert run.status == 0, f"{commands}:\n{log.read_text()}\n{run.stdout}\n{run.stderr}"
    return run
