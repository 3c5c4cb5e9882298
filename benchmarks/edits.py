"""Edits of a public script: by line and column of the very file that they were written for, whose checksum is known.

So nothing of the script stands here, and a script that is another one is refused instead of half edited.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


class CannotRun(Exception):
    """A script gives no figure; the message is one line that says why."""


@dataclass(frozen=True)
class Edit:
    """So many characters from a place on are removed, and the text takes their place."""

    line: int  # of the file as it is published, from 1
    column: int  # from 0
    removed: int  # characters, of which the end of a line is one
    text: str


@dataclass(frozen=True)
class Source:
    """A file of a public repository, and its edits."""

    sha256: str
    edits: Sequence[Edit] = ()


def edited(path: str, text: str, source: Source) -> str:
    """Return a file's text after the edits; raise CannotRun if it is not the one that they were written for."""
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != source.sha256:
        raise CannotRun(
            f"cannot run: {path} is not the file that our edits were written for: "
            f"its SHA-256 is {found[:12]}, not {source.sha256[:12]}"
        )
    lines = [line + "\n" for line in text.split("\n")]
    # The last place first: so the edits before it still find theirs.
    for edit in sorted(source.edits, key=lambda edit: (edit.line, edit.column), reverse=True):
        if not 0 < edit.line <= len(lines) or not 0 <= edit.column < len(lines[edit.line - 1]):
            raise ValueError(f"{path} has no line {edit.line}, column {edit.column}")
        start = sum(map(len, lines[: edit.line - 1])) + edit.column
        text = text[:start] + edit.text + text[start + edit.removed :]
    return text
