"""The reference run of an example: the default one, as a newcomer starts it, which others are compared with.

    python -m harness.reference EXAMPLE SHIPPED FOLDER

makes it for the copy of an example in SHIPPED, with what the example itself requires and nothing else installed.
`nox -s smoke` does so before it installs what the tests need: with that, a requirement that the example lacks would be
hidden. FOLDER keeps it for the tests.
"""

import argparse
from pathlib import Path

from harness import readme
from harness.launchers import LAUNCHERS, copy_example
from harness.runs import Reference, references


def reference(example: str, shipped: Path, kept: Path) -> Reference:
    """Run what the README says under "Run locally", word for word, in a fresh copy, unless `kept` has that already.

    Horovod, which install.sh installs, has to be there.
    """

    def make(folder: Path) -> list[Reference]:
        copy_example(shipped, folder)
        commands = readme.until(f"examples/{example}/README.md", "...train.py...")
        assert commands[-1] == " ".join(LAUNCHERS[example].command(2)), "harness/launchers.py has another command"
        # Which nox has just run, for the environment that these commands share: it takes a quarter of a minute.
        run = readme.run_block([command for command in commands if command != "bash install.sh"], folder)
        return [Reference(folder / "output", run.stdout, run.stderr, run.left)]

    return references(kept / f"reference-{example}", make)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=[*LAUNCHERS])
    parser.add_argument("shipped", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    reference(args.example, args.shipped.resolve(), args.folder.resolve())


if __name__ == "__main__":
    main()
