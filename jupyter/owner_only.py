"""Debug train.py, or show TensorBoard, at a port of this node that answers its owner alone: see docs/debugging.md.

    python owner_only.py --processes 1            train.py of this folder, which waits for your editor
    python owner_only.py tensorboard --logdir output

Neither has a password, and whoever reaches the port of a debugger runs programs as you. The port is open on the node's
loopback address only, where other users of the node still reach it. So each connection is closed at once unless the
process at its other end is yours, as the system says (/proc/net/tcp): what ssh forwards for you is.
"""

import contextlib
import getpass
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

PLAIN = socket.socket


class OwnersSocket(PLAIN):
    """A socket that accepts connections of this user's processes only."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Wait for a connection whose other end belongs to this user; close all others."""
        while True:
            connection, address = super().accept()
            if connection.family == socket.AF_UNIX or owner(connection) == os.getuid():
                return connection, address
            connection.close()


class AdaptersSocket(OwnersSocket):
    """The same for debugpy's adapter, which also tells train.py where it listens, and then hangs up.

    Of a connection that has been hung up nobody can say whose it was. So it waits until train.py has looked.
    """

    calls = False

    def connect(self, address: Any) -> None:
        """Connect, and remember that this end has called."""
        super().connect(address)
        self.calls = True

    def shutdown(self, how: int) -> None:
        """Say that no more comes, and wait until the other end has hung up."""
        super().shutdown(socket.SHUT_WR if self.calls else how)
        if self.calls:
            self.settimeout(30)
            with contextlib.suppress(OSError):
                self.recv(1)


def owner(connection: socket.socket) -> int | None:
    """Return the user whose process on this node is at the other end of a connection, if that can be told."""
    if connection.family != socket.AF_INET:
        return None
    try:
        ends = [connection.getpeername(), connection.getsockname()]
    except OSError:  # it has gone
        return None
    numbers = [int.from_bytes(socket.inet_aton(host), sys.byteorder) for host, _ in ends]
    wanted = [f"{number:08X}:{port:04X}" for number, (_, port) in zip(numbers, ends, strict=True)]
    for line in Path("/proc/net/tcp").read_text().splitlines():
        words = line.split()
        if words[1:3] == wanted:
            return int(words[7]) if int(words[9]) else None  # no inode: it is closed, and nobody's
    return None


def main() -> None:
    """Open the port, say how to reach it, and run what was asked for."""
    if sys.argv[1:2] == ["tensorboard"]:
        show_tensorboard(sys.argv[2:])
    else:
        debug(Path("train.py").resolve())


def show_tensorboard(arguments: list[str]) -> None:
    """Serve TensorBoard until a signal ends this process."""
    socket.socket = OwnersSocket
    try:
        from tensorboard import program
    except ImportError:
        fail(f"{sys.executable} has no tensorboard: pip install tensorboard")
    board = program.TensorBoard()
    # load_fast would start a second program, which opens another port, to everybody.
    board.configure(["tensorboard", *arguments, "--host=127.0.0.1", "--port=0", "--load_fast=false"])
    tell("TensorBoard", 6006, int(board.launch().rstrip("/").rpartition(":")[2]))
    signal.pause()


def debug(script: Path) -> None:
    """Run a script with the arguments of this one, and in one of its ranks wait for the editor first."""
    if not script.exists():
        fail(f"there is no {script}: start this in the folder of train.py")
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")  # torchrun's, or srun's
    if rank == os.environ.get("DEBUG_RANK", "0"):
        listen()
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def listen() -> None:
    """Start debugpy's adapter, a process of its own, with this file in it, and wait until an editor has attached."""
    socket.socket = OwnersSocket
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of Python's own, frozen modules
    try:
        import debugpy
    except ImportError:
        fail(f"{sys.executable} has no debugpy: pip install debugpy")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(__file__, f"{folder}/sitecustomize.py")  # Python imports it before all else
        debugpy.configure(pythonEnv={**os.environ, "PYTHONPATH": folder})  # of the adapter only
        _, port = debugpy.listen(("127.0.0.1", 0))
        if not Path(folder, "sitecustomize.used").exists():
            fail("debugpy's adapter was started without this file: its port would be open to others")
    socket.socket = PLAIN  # the sockets of train.py are its own affair
    tell("the debugger", 5678, port)
    debugpy.wait_for_client()


def tell(what: str, at: int, port: int) -> None:
    """Print the command that makes a port of this node one of the user's own computer."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    login = os.environ.get("LOGIN") or f"{getpass.getuser()}@{os.environ.get('SLURM_SUBMIT_HOST', 'login')}"
    way = f"-J {login} {login.partition('@')[0]}@{node}"
    print(f"{what} waits at 127.0.0.1:{at} of your own computer, when this runs there:", file=sys.stderr)
    print(f"    ssh -N -o ExitOnForwardFailure=yes -L {at}:127.0.0.1:{port} {way}", file=sys.stderr, flush=True)


def fail(reason: str) -> None:
    """Give up, with one line."""
    sys.stderr.write(f"owner_only.py: error: {reason}\n")
    os._exit(2)  # at once: debugpy's threads would go on


if __name__ == "__main__":
    main()
elif __name__ == "sitecustomize":
    socket.socket = AdaptersSocket
    Path(__file__).with_suffix(".used").touch()
