"""The reference run of an example: the default one, as a newcomer starts it, which others are compared with.

    python -m tests.reference EXAMPLE SHIPPED FOLDER

makes it for the copy of an example in SHIPPED, with what the example itself requires and nothing else installed.
`nox -s smoke` does so before it installs what the tests need, which could hide that the example lacks a requirement.
FOLDER keeps it for the tests.
"""

import sys
from pathlib import Path

from harness import readme
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference, keep


def reference(example: str, shipped: Path, kept: Path) -> Reference:
    """Run what the README says under "Run locally", word for word, in a fresh copy, unless `kept` has that already.

    Horovod, which install.sh installs, has to be there.
    """

    def make(folder: Path) -> Reference:
        copy_example(shipped, folder)
        commands = readme.until(f"examples/{example}/README.md", "...train.py...")
        assert commands[-1] == " ".join(LAUNCHERS[example].command(2)), "harness/launchers.py has another command"
        # nox has just run install.sh, for the environment that these commands share: it takes a quarter of a minute.
        run = readme.run_block([line for line in commands if line != "bash install.sh"], folder)
        return Reference(folder / "output", run.stdout, run.left)

    return keep(kept / f"reference-{example}", make)


if __name__ == "__main__":
    reference(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve())
