"""docs/debugging.md: a debugger and TensorBoard on a node of the lab, through ssh, open to their owner alone."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness import readme
from harness.jobs import hand_over, submit, two_processes
from harness.launchers import ROOT, copy_example
from harness.notebooks import FOLDER, HEAD, NOBODY
from harness.processes import PIPES, read_line, running, wait_until
from lab import Lab

LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net/tcp has it
PAGE = ROOT / "docs" / "debugging.md"
pytestmark = [pytest.mark.slurm]
if not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
    pytestmark += [pytest.mark.skip(reason="not installed: sshd")]

# Prints what a server says first, when it is asked for a page, or why there is nothing.
ASK = """
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
    connection.sendall(b"GET /data/runs HTTP/1.0\\r\\n\\r\\n" if sys.argv[3:] else b"")
    print(connection.makefile("rb").read() if sys.argv[3:] else connection.recv(1000))
except OSError as error:
    print(error)
"""

# Attaches as an editor does, also to the processes that the first one starts, stops at a line, prints the name of
# the function and the value of an expression there, once or in each process, and lets them run on.
EDITOR = """
import json, socket, sys, threading
configuration, file, line, expression = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
found, others = [], []

def debug(settings):
    connection = socket.create_connection((settings["connect"]["host"], settings["connect"]["port"]), 300)
    stream, number, thread = connection.makefile("rwb"), 0, None
    def send(command, **arguments):
        nonlocal number
        number += 1
        text = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
        stream.write(b"Content-Length: %d\\r\\n\\r\\n" % len(text) + text)
        stream.flush()
    def stop_at(lines):
        send("setBreakpoints", source={"path": file}, breakpoints=[{"line": line} for line in lines])
    send("initialize", adapterID="debugpy", pathFormat="path")
    send("attach", **settings)
    while header := stream.readline():
        stream.readline()
        message = json.loads(stream.read(int(header.split()[1])))
        body, kind = message.get("body", {}), message.get("event") or message.get("command")
        if message["type"] == "response" and not message["success"]:
            sys.exit(f"{kind}: {message}")
        if kind == "initialized":
            stop_at([] if found else [line])
            send("configurationDone")
        elif kind == "debugpyAttach":
            others.append(threading.Thread(target=debug, args=[body]))
            others[-1].start()
        elif kind == "stopped":
            thread = body["threadId"]
            send("stackTrace", threadId=thread)
        elif kind == "stackTrace":
            found.append(body["stackFrames"][0]["name"])
            send("evaluate", expression=expression, frameId=body["stackFrames"][0]["id"])
        elif kind == "evaluate":
            found.append(body["result"])
            stop_at([])
            send("continue", threadId=thread)
        elif kind == "terminated":
            break

debug(configuration)
for other in others:
    other.join()
print(*found)
"""


def attach() -> dict:
    """Return the one configuration of the page's launch.json."""
    (configuration,) = json.loads(readme.indented(PAGE, '{\n  "version"'))["configurations"]
    return configuration


def ask(lab: Lab, uid: int, node: str, address: str, port: int, *path: str) -> str:
    """Return what a user gets as an answer from a port."""
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", sys.executable, "-c", ASK]
    return lab.run([*words, address, str(port), *path], node, "/", user="root").stdout.strip()


def assert_closed_to_others(lab: Lab, port: int, *path: str) -> None:
    """Check that a port of node1 hangs up on another user there, and cannot be reached from another node."""
    for _ in range(3):
        answer = ask(lab, NOBODY, "node1", "127.0.0.1", port, *path)
        assert answer == "b''" or "reset by peer" in answer
    assert "refused" in ask(lab, lab.uid, "node2", lab.addresses["node1"], port, *path)


def ports(lab: Lab, node: str = "node1") -> dict[int, str]:
    """Return the ports on which programs of the lab's user listen on a node, each with its address."""
    text = lab.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], node, "/").stdout
    rows = [line.split() for line in text.splitlines()]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and row[7] == str(lab.uid)]
    return {int(port, 16): address for address, port in found}


@contextlib.contextmanager
def tunnel(lab: Lab, command: str, local: int) -> Iterator[None]:
    """Run the printed ssh command, word for word, until the block ends."""
    with running(lab.command(command.split(), HEAD, "/"), **PIPES) as process:

        def forwarded() -> bool:
            assert process.poll() is None, process.communicate(timeout=300)[0]
            return local in ports(lab, HEAD)  # not by connecting: debugpy may miss an editor that comes just after that

        wait_until(forwarded, 300, command, pause=1)
        yield


@pytest.mark.runs("weekly")
@pytest.mark.only("ddp_spawn", "torchrun_multinode")
def test_debugger(example: str, source: Path, lab: Lab, ssh: None, tmp_path: Path) -> None:
    """`SCRIPT=owner_only.py sbatch run.slurm --epochs 1 --timeout 3600`: stops in train.py, for its owner only.

    With ddp_spawn the line is reached in processes that train.py has started.
    """
    repository, project = tmp_path / "repository", tmp_path / "project"
    shutil.copytree(FOLDER, repository / "jupyter")
    copy_example(source, project)
    readme.run_block(readme.until("docs/debugging.md", "cd ~/project"), repository, HOME=str(tmp_path))
    assert (project / "owner_only.py").exists()
    options = (*two_processes(source), "--gpus-per-node=0", "--cpus-per-task=2")
    job = submit(lab, example, project, options=options, line=readme.command("docs/debugging.md", "... sbatch ..."))
    job.wait_for_line("ssh -N")
    command, local, port = readme.tunnel(job.log)
    configuration = attach()
    assert local == configuration["connect"]["port"]
    # The adapter has two ports on the loopback address: for editors, and for the processes that train.py starts. Those
    # open to other nodes are of srun and of torchrun.
    mine = {number for number, address in ports(lab).items() if address == LOOPBACK}
    assert len(mine) == 2 and port in mine
    for number in mine:
        assert_closed_to_others(lab, number)
    text = (project / "train.py").read_text().splitlines()
    line = next(number for number, words in enumerate(text, 1) if ".backward()" in words)
    (paths,) = configuration["pathMappings"]
    paths |= {"localRoot": "/home/me/project", "remoteRoot": str(project)}
    editor = [sys.executable, "-c", EDITOR, json.dumps(configuration), "/home/me/project/train.py", str(line)]
    with tunnel(lab, command, local):
        found = lab.run([*editor, "args.timeout"], HEAD, "/", timeout=300)
    assert set(found.stdout.split()) == {"train_one_epoch", "3600"}, found.stderr + job.log
    job.wait()
    assert job.shown["JobState"] == "COMPLETED" and "finished: " in job.log, job.log


@pytest.mark.runs("weekly")
@pytest.mark.only("lightning")
def test_tensorboard(example: str, lab: Lab, ssh: None, tmp_path: Path) -> None:
    """The page's `srun --cpus-per-task=2 --time=02:00:00`: TensorBoard has a run, for its owner only."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "output" / "run")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    shutil.copy(FOLDER / "owner_only.py", tmp_path)
    line = readme.command(
        "docs/debugging.md", "srun ...", {".venv/bin/python": sys.executable, "srun": "srun --nodelist=node1"}
    )
    with running(lab.command(line.split(), HEAD, hand_over(tmp_path)), **PIPES) as process:
        text = ""
        while "ssh -N" not in text:
            text += read_line(process, 300)
        command, local, port = readme.tunnel(text)
        assert local == 6006 and ports(lab) == {port: LOOPBACK}
        assert_closed_to_others(lab, port, "runs")
        with tunnel(lab, command, local):
            found = partial(ask, lab, lab.uid, HEAD, "127.0.0.1", local, "runs")
            wait_until(lambda: '["run"]' in found(), 300, "the run", pause=1)
    wait_until(lambda: not lab.run(["squeue", "--noheader"], HEAD, "/").stdout, 300, "the end of srun's job", pause=1)
