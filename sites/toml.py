"""Write the part of TOML that the files of systems need; Python itself can only read it."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

BARE = re.compile(r"[A-Za-z0-9_-]+")
WIDTH = 110  # of a line of text, in columns


def quoted(text: str) -> str:
    """Return a text as a TOML string of one line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    for character, name in (("\n", "n"), ("\t", "t"), ("\r", "r")):
        escaped = escaped.replace(character, f"\\{name}")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04x}", escaped) + '"'


def folded(text: str) -> str:
    """Return a text as a TOML string, over several lines if it is long.

    A backslash at the end of a line removes the line's end and the spaces after it, so that lines are cut after a
    single space only.
    """
    short = quoted(text)
    if len(short) < WIDTH or re.search(r"\s\s|[\t\r\n\v\f\x1c-\x1f\x85]|^\s|\s$", text):
        return short
    inner = short[1:-1]
    if '""' not in text and not text.endswith('"'):  # three of them would end it
        inner = re.sub(r"\\(.)", lambda match: match[1] if match[1] == '"' else match[0], inner)
    lines = textwrap.wrap(inner, WIDTH, break_long_words=False, break_on_hyphens=False)
    return '"""\\\n' + "".join(f"{line} \\\n" for line in lines[:-1]) + lines[-1] + '"""'


def key(name: str) -> str:
    """Return a key, in quotes if it needs them."""
    return name if BARE.fullmatch(name) else quoted(name)


def value(thing: Any) -> str:
    """Return a text, a number, a truth value, or a list of these; raises TypeError for anything else."""
    if isinstance(thing, bool):
        return str(thing).lower()
    if isinstance(thing, int):
        return str(thing)
    if isinstance(thing, str):
        return folded(thing)
    if isinstance(thing, list):
        short = ", ".join(value(one) for one in thing)
        if len(short) < WIDTH and "\n" not in short:
            return f"[{short}]"
        return "[\n" + "".join(f"    {value(one)},\n" for one in thing) + "]"
    raise TypeError(f"no TOML for {type(thing).__name__}")


def is_table(thing: Any) -> bool:
    """Whether a value is a table, or a list of tables, which are written below the other values."""
    return isinstance(thing, Mapping) or (isinstance(thing, list) and thing != [] and isinstance(thing[0], Mapping))


def lines(table: Mapping[str, Any], path: str, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table, which is at the dotted path."""

    def comment(name: str) -> Iterator[str]:
        if name in comments:
            yield from textwrap.wrap(comments[name], WIDTH, initial_indent="# ", subsequent_indent="# ")

    for name, thing in table.items():
        if not is_table(thing):
            yield from comment(f"{path}{key(name)}")
            yield f"{key(name)} = {value(thing)}"
    for name, thing in table.items():
        if not is_table(thing):
            continue
        inner = f"{path}{key(name)}"
        tables = [thing] if isinstance(thing, Mapping) else thing
        for number, one in enumerate(tables):
            if one is thing and one and all(isinstance(part, Mapping) for part in one.values()):
                yield from lines(one, f"{inner}.", comments)  # it has tables alone, whose heads name it
                continue
            yield ""
            if number == 0:
                yield from comment(inner)
            yield f"[{inner}]" if one is thing else f"[[{inner}]]"
            yield from lines(one, f"{inner}.", comments)


def dumps(table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return the text of a TOML file, with comments above the keys and tables that their dotted names name.

    `tomllib.loads` gives the same table back. Raises TypeError for what it cannot write, such as a float.
    """
    return "\n".join(lines(table, "", comments or {})).lstrip("\n") + "\n"
