"""Take commands from a page, and run them word for word without installing anything twice.

A test that runs a command takes it from its page, by `command`, `until` or `block`, and tests/test_commands.py finds
those that no test takes. Who only looks at commands reads them by `blocks`, which does not count.
"""

import fnmatch
import re
import shlex
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import runs
from harness.launchers import ROOT
from verify import checks

PATTERNS = ("*.md", "[!.]*/*.md", "examples/*/*.md")
DOCUMENTS = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]


def blocks(readme: Path) -> list[dict[str, str]]:
    """Return each fenced bash block of a README: its commands, those of several lines joined, and their comments."""
    joined = [re.sub(r"\\\n *", "", block) for block in fences(readme, "bash")]
    lines = [[line.partition(" #") for line in block.splitlines()] for block in joined]
    return [{command.strip(): comment.strip() for command, _, comment in block} for block in lines]


def fences(readme: Path, language: str) -> list[str]:
    """Return the text of each fenced block of a README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)


def verdicts(launcher: str) -> dict[str, str]:
    """Return the verdict of each row that the table in verify's README has for a launcher."""
    line = re.search(rf"^\| {launcher} \| (.*) \|$", (ROOT / "verify" / "README.md").read_text(), re.MULTILINE)
    assert line, f"the README of verify has no row for {launcher}"
    words = {"ok": "ok", "-": "not checked"}
    return {row: words[cell] for row, cell in zip(checks.ROWS, line[1].split(" | "), strict=True)}


def tunnel(text: str) -> tuple[str, int, int]:
    """Return the ssh command that a program has printed, its port on the user's own computer, and that on the node."""
    command = re.search(r"^ +(ssh -N .*)$", text, re.MULTILINE)[1]
    local, port = re.search(r"-L (\d+):127\.0\.0\.1:(\d+) ", command).groups()
    return command, int(local), int(port)


def matching(document: str, words: str) -> Iterator[tuple[list[str], str]]:
    """Yield each command that is `words`, with its block, in the documents of that name; "..." stands for any words.

    The name, from the repository on, may be a pattern, such as "*": then it does not matter where the command stands.
    """
    pattern = re.compile(".*".join(map(re.escape, words.split("..."))))
    for path in DOCUMENTS:
        if fnmatch.fnmatchcase(str(path.relative_to(ROOT)), document):
            for block in map(list, blocks(path)):
                yield from ((block, command) for command in block if pattern.fullmatch(command))


def first(document: str, words: str) -> tuple[list[str], str]:
    """Return the first command that is `words`, after the block that it is in."""
    found = next(matching(document, words), None)
    assert found, f"{document}: no command is {words!r}"
    return found


def changed(command: str, changes: Mapping[str, object]) -> str:
    """Return a command with other words in the place of some of its own, which must be there."""
    for old, new in changes.items():
        assert old in command, f"{command}: has no {old!r} to be changed"
        command = command.replace(old, str(new))
    return command


def command(document: str, words: str, changes: Mapping[str, object] | None = None) -> str:
    """Return the one command of a document that is `words`, with the changes that a test has to make in it."""
    found = [command for _, command in matching(document, words)]
    assert len(found) == 1, f"{document}: not one command is {words!r}, but {found}"
    return changed(found[0], changes or {})


def until(document: str, words: str) -> list[str]:
    """Return the commands of the first block that has the command `words`, up to and with that one."""
    found, last = first(document, words)
    return found[: found.index(last) + 1]


def block(document: str, words: str) -> list[str]:
    """Return all commands of the first block that has the command `words`."""
    return first(document, words)[0]


def run_block(commands: list[str], folder: Path, **variables: str) -> runs.Run:
    """Run commands one after the other in one shell, and return the last one's run; all of them must succeed.

    An environment that they make sees the packages that these tests run with. So `pip install -r requirements.txt`
    finds each there, in its version, and it may ask no index for another.
    """
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    log = folder.parent / f"{folder.name}-setup.log"  # what all but the last one print
    log.touch()
    script = "".join(f"{{ {command}; }} >>{shlex.quote(str(log))} 2>&1\n" for command in commands[:-1]) + commands[-1]
    run = runs.Run(["bash", "-ec", script], folder, packages | variables).wait(400)
    assert run.status == 0, f"{commands}:\n{log.read_text()}\n{run.stdout}\n{run.stderr}"
    return run
