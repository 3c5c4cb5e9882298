"""How bad input has to end: with one clear line and the right status."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.harness.runs import Run


def assert_refused(run: Run, status: int, *texts: str) -> None:
    """Check that bad input ended a run with `status` and one clear line, without a traceback.

    A launcher that makes a status of its own, other than train.py's 2, may add its own traceback, with no file of ours.
    """
    lines = {line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")}
    assert len(lines) == 1, f"not one error line but {len(lines)}:\n{run.stdout}\n{run.stderr}"
    assert all(text in min(lines) for text in texts), f"{texts} not in {lines}"
    ours = r'File "(.*/)?(train|train_lm|data|models)\.py"'
    assert not re.search("Traceback" if status == 2 else ours, run.stderr), run.stderr
    assert run.status == status, f"status {run.status}, not {status}"


def assert_arguments_refused(
    folder: Path, texts: Mapping[str, list[str]], call: str = "train.parse_args()", **environment: str
) -> None:
    """Check that train.py refuses each of these command lines with status 2 and one line that has all of its texts.

    One process here, without a launcher, goes through all of them: a start for each would take minutes. `call` is what
    has to refuse them, in an environment with these variables, too.
    """
    (folder / "each.py").write_text(
        "import os, sys, train\n"
        "os._exit = sys.exit\n"
        f"for words in {list(texts)}:\n"
        "    sys.argv = ['train.py', *words.split()]\n"
        "    try:\n"
        f"        {call}\n"
        "    except SystemExit as end:\n"
        "        print('status', end.code)\n"
    )
    run = Run(["python", "each.py"], folder, environment).wait(120)
    assert run.stdout == "status 2\n" * len(texts), run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    for line, (words, expected) in zip(lines, texts.items(), strict=True):
        assert all(text in line for text in expected), f"{words}: {line}"
