"""Read the commands in a README, and run them word for word without installing anything twice."""

import re
import shlex
import sysconfig
import textwrap
from pathlib import Path

from harness import runs
from harness.launchers import ROOT

PATTERNS = ("*.md", "[!.]*/*.md", "docs/dev/*.md", "examples/*/*.md")
DOCUMENTS = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]


def blocks(readme: Path) -> list[dict[str, str]]:
    """Return each fenced bash block of a README: its commands, those of several lines joined, and their comments."""
    joined = [re.sub(r"\\\n *", "", block) for block in fences(readme, "bash")]
    lines = [[line.partition(" #") for line in block.splitlines()] for block in joined]
    return [{command.strip(): comment.strip() for command, _, comment in block} for block in lines]


def fences(readme: Path, language: str) -> list[str]:
    """Return the text of each fenced block of a README in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", readme.read_text(), re.MULTILINE | re.DOTALL)


def indented(readme: Path, first: str) -> str:
    """Return the text of the one indented block of a README that begins with these words."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", readme.read_text(), re.MULTILINE)
    (block,) = (text for text in map(textwrap.dedent, found) if text.strip().startswith(first))
    return block


def tunnel(text: str) -> tuple[str, int, int]:
    """Return the ssh command that a program has printed, its port on the user's own computer, and that on the node."""
    command = re.search(r"^ +(ssh -N .*)$", text, re.MULTILINE)[1]
    local, port = re.search(r"-L (\d+):127\.0\.0\.1:(\d+) ", command).groups()
    return command, int(local), int(port)


def until(readme: Path, last: str) -> list[str]:
    """Return the commands of the first block that has the command `last`, up to and with that one."""
    block = next(list(block) for block in blocks(readme) if last in block)
    return block[: block.index(last) + 1]


def run_block(commands: list[str], folder: Path, **variables: str) -> runs.Run:
    """Run commands one after the other in one shell, and return the last one's run; all of them must succeed.

    An environment that they make sees the packages that these tests run with. So `pip install -r requirements.txt`
    finds each there, in its version, and it may ask no index for another.
    """
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    log = folder.parent / f"{folder.name}-setup.log"  # what all but the last one print
    log.touch()
    script = "".join(f"{{ {command}; }} >>{shlex.quote(str(log))} 2>&1\n" for command in commands[:-1]) + commands[-1]
    run = runs.Run(["bash", "-ec", script], folder, packages | variables).wait()
    assert run.status == 0, f"{commands}:\n{log.read_text()}\n{run.stdout}\n{run.stderr}"
    return run
