"""What several parts of the lab use: the client that people call, and the keeper that runs inside."""

import contextlib
import ctypes
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # daemons are not on everybody's path
LIBC = ctypes.CDLL(None, use_errno=True)
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18  # from <sys/mount.h>
START_SECONDS = 60  # for each step of a start, which takes about one second, but machines may be busy

# Names of jobs, processes and folders may have bytes of any encoding. An odd one of somebody else's is shown with a
# question mark, and does not end the lab; in a file that is written again it stays as it was.
AS_TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}
AS_BYTES: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}

Daemons = Mapping[str, subprocess.Popen[bytes]]


class LabError(Exception):
    """Something that the user can understand from one line."""


@contextlib.contextmanager
def locked(file: Path, what: str, seconds: float) -> Iterator[None]:
    """Hold the lock on a file, which is made if need be; raises LabError.

    It waits at most `seconds` until somebody else has done `what`. Root alone can open the file: whoever can open a
    file can lock it, and so keep others waiting.
    """
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LabError(f"cannot lock {file}: {error.strerror}") from None
    try:
        until(lambda: lock(handle), f"{what} (see who has {file} open: fuser {file})", seconds=seconds)
        yield
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Lock an open file, unless somebody else holds the lock; return whether that was possible."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def usual_umask() -> Iterator[None]:
    """Let all users read what root makes, and only root change it, whatever umask root's shell has."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def output(words: Sequence[str], prefix: Sequence[str] = (), text: str = "") -> str:
    """What a command prints, given `text` to read; raises LabError, with its first complaint, if it fails."""
    line, seconds = [*prefix, *words], START_SECONDS
    try:
        done = subprocess.run(line, input=text, capture_output=True, timeout=seconds, **AS_TEXT)
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(words)}: no answer within {seconds} s") from None
    if done.returncode != 0:
        complaint = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[0]
        raise LabError(f"{' '.join(words)}: {complaint}")
    return done.stdout


def until(
    condition: Callable[[], bool],
    what: str,
    daemons: Daemons | None = None,
    seconds: float = START_SECONDS,
    pause: float = 0.05,
) -> None:
    """Ask, each `pause` seconds, until a condition holds; raises LabError after `seconds`, or when a daemon ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        for name, daemon in (daemons or {}).items():
            if daemon.poll() is not None:
                raise LabError(f"{name} ended with status {daemon.returncode}, see {name}.out")
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:g} s in vain until {what}")
        time.sleep(pause)


class Process(NamedTuple):
    """A running process: its short name, its parent, and when it started, in clock ticks since boot."""

    name: str
    parent: int
    start: str


def find_process(pid: int) -> Process | None:
    """The process with this PID, or None if there is none, or only its exit status is left."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(**AS_TEXT)  # the kernel cuts names after 15 bytes
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else Process(name, int(fields[1]), fields[19])


def inside(pid: int, cgroup: Path | None = None) -> list[str]:
    """The start of a command line that runs the rest in all namespaces of a process, and in its cgroup.

    That can be joined only from outside its namespace, and only by what has the right PID: SLURM since 24.11 refuses
    a cgroup with a process from another PID namespace, such as an nsenter that waits for its child.
    """
    enter = ["nsenter", f"--target={pid}"]
    others = ["--cgroup", "--mount", "--uts", "--ipc", "--net"]
    if not cgroup:
        return [*enter, "--pid", *others]
    # First into the PID namespace alone, where a shell moves itself, the right PID by now, to the cgroup.
    to_cgroup = [*enter, "--pid", "sh", "-c", 'echo 0 >"$0" && exec "$@"', f"{cgroup}/cgroup.procs"]
    return [*to_cgroup, *enter, *others]


def check(result: int, what: str) -> None:
    """Raise LabError if a call of the C library failed."""
    if result != 0:
        raise LabError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2) itself: unlike the program, it takes /proc/self/fd/N for a folder that is hidden by now."""
    words = os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode()
    check(LIBC.mount(*words), f"mount {source} on {target}")
