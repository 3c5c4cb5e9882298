"""What a pinned package says is deprecated, and that the example's own code calls: a later release will lack it."""

from pathlib import Path

import pytest

from harness import readme, runs

# Python runs this first in each process. It notes each deprecation of a function that a file of the example calls, also
# where a filter, or a logger's level, would hide it. What one package calls in another is not ours.
HOOK = """
import logging, os, sys, warnings

FOLDER = os.environ["NOTE_FOLDER"]
DECORATED = ("warnings", "typing_extensions")  # by deprecated(), whose caller is the next frame
NOT_ASKED = {*DECORATED, "functools", "contextlib", "logging"}
warn, log = warnings.warn, logging.Logger.warning


def note(message):
    frame = sys._getframe(2)
    names = []
    while frame and not frame.f_code.co_filename.startswith(FOLDER):
        names.append(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    # Between the caller and the warning are frames of the package that warns alone.
    warns = set() if names[0] in DECORATED else {names[0]}
    if frame and set(names) - NOT_ASKED <= warns:
        with open(os.path.join(FOLDER, "deprecated"), "a") as file:
            place = f"{os.path.relpath(frame.f_code.co_filename, FOLDER)}:{frame.f_lineno}"
            file.write(f"{place}: {' '.join(str(message).split())[:300]}\\n")


def noting_warn(message, category=None, stacklevel=1, *args, **words):
    kind = type(message) if isinstance(message, Warning) else category
    if kind and issubclass(kind, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
        note(message)
    return warn(message, category, stacklevel + 1, *args, **words)


def noting_log(self, message, *args, **words):
    if "deprecated" in str(message):
        note(message)
    return log(self, message, *args, **words)


warnings.warn, logging.Logger.warning = noting_warn, noting_log
"""


# torchvision's decoders shall go some day. TorchCodec, which is to replace them, fits one release of PyTorch each.
PERMITTED = ("The image decoding and encoding capabilities of TorchVision are deprecated",)


@pytest.fixture
def variables(folder: Path, tmp_path: Path) -> dict[str, str]:
    """The variables with which each Python process notes what is deprecated, in `folder`/deprecated."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    return {"PYTHONPATH": str(tmp_path / "hook"), "NOTE_FOLDER": f"{folder}/"}


@pytest.mark.runs("full")
def test_nothing_deprecated(example: str, folder: Path, variables: dict[str, str]) -> None:
    """An epoch, a resume and the pattern alone call nothing that a pinned package says will go."""
    assert runs.start(example, folder, 2, "--epochs", 1, **variables).wait().status == 0
    assert runs.start(example, folder, 2, "--epochs", 2, "--resume", **variables).wait().status == 0
    if (folder / "minimal.py").exists():
        line = readme.command(f"examples/{example}/README.md", "... minimal.py")
        assert runs.Run(line.split(), folder, variables).wait().status == 0
    noted = folder / "deprecated"
    lines = noted.read_text().splitlines() if noted.exists() else []
    assert not [line for line in lines if not any(words in line for words in PERMITTED)], lines
