"""Ranks that start fast: a server that has imported PyTorch forks them, as torchrun would start them.

    server: python tests/forked.py SOCKET MODULE...
    client: python tests/forked.py SOCKET N train.py FLAGS   (a launcher for verify)

A client's ranks have its folder, variables, output and arguments. The ranks end when one fails or the client is gone.
"""

import contextlib
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def launcher(path: str, *modules: str) -> Iterator[str]:
    """Start a server that has imported modules beside PyTorch; yield the command of its clients."""
    words = [sys.executable, __file__, path]
    modules = ("torch._dynamo", *modules)  # which the first optimizer would import
    with subprocess.Popen([*words, *modules], stdout=subprocess.PIPE, text=True) as process:
        assert "ready\n" in iter(process.stdout.readline, "")  # after what modules print
        yield " ".join([words[0], "-S", *words[1:]])  # without the hook, which would import PyTorch
        process.kill()


def client(path: str, words: list[str]) -> int:
    """Have the server start words[1:] as words[0] ranks; return the first status that is not 0, or 0."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"."], [1, 2])
        request = {"processes": int(words[0]), "words": words[1:], "folder": os.getcwd(), "variables": dict(os.environ)}
        server.sendall(json.dumps(request).encode() + b"\n")
        return int(server.recv(16) or 1)


def serve(path: str, modules: list[str]) -> None:
    """Import modules, and answer clients until this process is killed."""
    for name in modules:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for answer()
        for number in range(10**9):
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return answer(connection, number)
            connection.close()


def answer(connection: socket.socket, number: int) -> None:
    """Start the ranks of one client, wait for them, and tell the client their status."""
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    request = json.loads(connection.makefile().readline())
    port = free_port(10_000 + (os.getppid() * 37 + number * 11) % 20_000)
    ranks = []
    for rank in range(request["processes"]):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            connection.close()
            return start(request, outputs, rank, port)
    left, status = set(ranks), 0
    while left and not status:
        if select.select([connection], [], [], 0.02)[0]:
            status = 1  # the client is gone
        for pid in list(left):
            ended, how = os.waitpid(pid, os.WNOHANG)
            left -= {ended}
            status = status or (ended and os.waitstatus_to_exitcode(how))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        connection.send(str(abs(status)).encode())


def free_port(port: int) -> int:
    """Return a port from `port` on that nobody has; those above 32,767 are taken by connections."""
    for candidate in range(port, port + 1000):
        with socket.socket() as one:
            try:
                one.bind(("", candidate))
                return candidate
            except OSError:
                continue
    raise OSError("no free port")


def start(request: dict, outputs: list[int], rank: int, port: int) -> None:
    """Become a rank: run the program as `python train.py FLAGS` would."""
    import numpy
    import torch
    from torch import multiprocessing

    for target, output in enumerate(outputs, 1):
        os.dup2(output, target)
    os.chdir(request["folder"])
    size = request["processes"]
    os.environ.clear()
    os.environ |= request["variables"] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)):
        os.environ[name] = str(value)
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    random.seed()  # otherwise ranks that forget to seed have the server's numbers
    numpy.random.seed()
    # mp.spawn would import torch again.
    multiprocessing.spawn = lambda *words, **named: multiprocessing.start_processes(
        *words, **named, start_method="fork"
    )
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if os.path.exists(hook := os.path.join(folder, "sitecustomize.py")):
            runpy.run_path(hook)
    sys.argv = request["words"]
    sys.path[0] = os.getcwd()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[2].isdigit():
        sys.exit(client(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1], sys.argv[2:])
