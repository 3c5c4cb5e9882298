"""What both halves of the lab use: the class that people call, and the keeper that runs inside."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # daemons are not on everybody's path
START_SECONDS = 60  # for each step of a start, which takes about one second, but machines may be busy


class LabError(Exception):
    """Something that the user can understand from one line."""


def output(words: Sequence[str], prefix: Sequence[str] = (), text: str = "") -> str:
    """Return what a command prints, given `text` to read; raise LabError, with its first complaint, if it fails."""
    line = [*prefix, *words]
    try:
        done = subprocess.run(line, input=text, capture_output=True, timeout=START_SECONDS, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(words)}: no answer within {START_SECONDS} s") from None
    if done.returncode != 0:
        complaint = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
        raise LabError(f"{' '.join(words)}: {complaint}")
    return done.stdout


def until(
    condition: Callable[[], bool],
    what: str,
    daemons: Mapping[str, subprocess.Popen[bytes]] | None = None,
    seconds: float = START_SECONDS,
    pause: float = 0.05,
) -> None:
    """Ask, each `pause` seconds, until a condition holds; raise LabError after `seconds`, or when a daemon ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        for name, daemon in (daemons or {}).items():
            if daemon.poll() is not None:
                raise LabError(f"{name} ended with status {daemon.returncode}, see {name}.out")
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s in vain until {what}")
        time.sleep(pause)


def inside(pid: int) -> list[str]:
    """Return the start of a command line that runs the rest in all namespaces of a process."""
    return ["nsenter", f"--target={pid}", "--pid", "--mount", "--uts", "--ipc", "--net"]
