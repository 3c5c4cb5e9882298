"""jupyter/run.slurm in the lab, opened as its README says: with ssh, and a real browser."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import readme
from harness.jobs import Job, hand_over, submit
from harness.launchers import ROOT
from harness.processes import read_line, running, wait_until
from lab import Lab
from tests.slurm import browser
from tests.slurm.conftest import HEAD
from tests.slurm.small import assert_refused

missing = [] if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") else ["openssh-server"]
missing += [] if browser.PROGRAM else ["chromium"]
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]

NOBODY = 65534  # the number of a user who is somebody else
# Asks for a path of a server, at a socket; prints the status, or why there is none.
ASK = """
import http.client, socket, sys
path, place, token = sys.argv[1:]
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
try:
    connection.sock.connect(path)
    connection.request("GET", place, headers={"Authorization": f"token {token}"} if token else {})
    print(connection.getresponse().status)
except OSError as error:
    print(error)
"""


class Server:
    """A job of jupyter/run.slurm that has started: what it tells its owner, and who gets an answer from it."""

    def __init__(self, job: Job) -> None:
        self.job, self.lab = job, job.lab
        job.wait_for_line("To end the job")
        self.tunnel = re.search(r"^ +(ssh .*)$", job.log, re.MULTILINE)[1]
        self.url = re.search(r"^ +(http://127.0.0.1:8888/lab\?token=\w+)$", job.log, re.MULTILINE)[1]
        self.token = self.url.partition("token=")[2]
        self.socket = re.search(r"-L 8888:(/dev/shm/jupyter-\w+/socket) ", self.tunnel)[1]
        self.node = job.shown["NodeList"]

    def ask(self, place: str = "/api/status", token: str = "", node: str = "", uid: int = 0) -> str:
        """Return the status, or the error, that a user of a node gets as an answer: by default the job's owner."""
        words = ["setpriv", f"--reuid={uid or self.lab.uid}", "--clear-groups", sys.executable, "-c", ASK]
        return self.lab.run([*words, self.socket, place, token], node or self.node, "/", user="root").stdout.strip()

    def ports(self) -> list[str]:
        """Return the addresses and ports on which programs of the job's owner listen on its node."""
        text = self.lab.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], self.node, "/").stdout
        rows = [line.split() for line in text.splitlines()]
        return [row[1] for row in rows if row[3] == "0A" and row[7] == str(self.lab.uid)]

    def cancel(self) -> None:
        """End the job, and check that it leaves nothing in its node's memory."""
        self.job.cancel()
        self.job.wait()
        assert self.lab.run(["ls", str(Path(self.socket).parent)], self.node, "/").returncode == 2


def start(lab: Lab, folder: Path, *options: str, line: str = "sbatch run.slurm", **variables: str) -> Job:
    """Submit a copy of jupyter/run.slurm, by a line of a page."""
    if not folder.exists():
        shutil.copytree(ROOT / "jupyter", folder)
    return submit(lab, "jupyter", folder, options=options, line=line, **variables)


ONE_PORT = """
import urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:8888/api/status", timeout=300)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def notebook(path: Path, *cells: str) -> Path:
    """Write a notebook of these cells."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    one = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    content = [one | {"id": f"cell{number}", "source": text} for number, text in enumerate(cells)]
    page = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": content}
    path.write_text(json.dumps(page))
    return hand_over(path)


def outputs(path: Path) -> list[str]:
    """Return what each cell of a notebook on the disk has printed, errors included."""
    try:
        cells = json.loads(path.read_text())["cells"]
    except json.JSONDecodeError:  # JupyterLab is just writing it
        return ["", "", ""]
    texts = [["".join(out.get("text", out.get("traceback", ""))) for out in cell["outputs"]] for cell in cells]
    return ["".join(text) for text in texts]


@contextlib.contextmanager
def browse(server: Server, path: str) -> Iterator[None]:
    """Run the ssh command that the user is told to run, word for word, and run a notebook's cells in the browser."""
    lab = server.lab
    with running(lab.command(server.tunnel.split(), HEAD, "/")) as tunnel:

        def forwarded() -> bool:
            assert tunnel.poll() is None, tunnel.communicate(timeout=300)[0]
            return lab.run([sys.executable, "-c", ONE_PORT], HEAD, "/", user="root").stdout == "403\n"

        wait_until(forwarded, 300, f"an answer through {server.tunnel}", pause=1)
        words = [sys.executable, "-m", "tests.slurm.browser", server.url, path]
        with running(lab.command(words, HEAD, ROOT, user="root")) as process:
            line = read_line(process, 500)
            assert line == "done\n", line + process.communicate(timeout=300)[0]
            yield


def test_only_for_its_owner(lab: Lab, ssh: None, tmp_path: Path) -> None:
    """Two servers on one node, each at its socket, for its owner only; and through ssh, in a browser, it runs cells."""
    folder = tmp_path / "jupyter"
    line = readme.command("jupyter/README.md", "VENV=... sbatch run.slurm", {"../examples/ddp_spawn/.venv": sys.prefix})
    jobs = [start(lab, folder, "--nodelist=node1", "--cpus-per-task=1", line=line) for _ in range(2)]
    one, two = (Server(job) for job in jobs)
    logs = lab.run(["bash", "-c", readme.command("jupyter/README.md", "cat ...")], "node1", folder)
    assert logs.stdout.count("JupyterLab is ready") == 2 and one.socket != two.socket

    mode = lab.run(["stat", "--format=%a %u", one.socket], "node1", "/", user="root").stdout
    assert mode == f"600 {lab.uid}\n"
    for place in ("/api/status", "/api/kernels", "/lab", "/files/jupyter/run.slurm"):
        assert "Permission denied" in one.ask(place, one.token, uid=NOBODY), place
    assert "No such file" in one.ask(token=one.token, node="node2")
    # The owner's own computer may have other users.
    assert (one.ask(), one.ask(token=two.token), one.ask(token=one.token)) == ("403", "403", "200")
    assert not one.ports()

    cells = ["print(6 * 7)", "import os, torch; print(os.getcwd(), torch.__version__)", "import debugpy"]
    page = notebook(folder / "first.ipynb", *cells)
    with browse(one, "jupyter/first.ipynb"):
        wait_until(lambda: outputs(page)[2], 300, "the saved notebook")
        assert outputs(page)[0] == "42\n" and str(folder) in outputs(page)[1]
        assert "switched off" in outputs(page)[2], "a debugger would open a port that runs what anybody sends"
        # Where a kernel takes the output of processes that a cell has forked, if they know a key; it gives nothing.
        assert len(one.ports()) == 1
        found = lab.run(["sh", "-c", f"cat {Path(one.socket).parent}/kernel-*.json"], "node1", "/").stdout
        assert json.loads(found)["transport"] == "ipc"

    one.cancel()
    assert two.ask(token=two.token) == "200", "the other server runs on"
    two.cancel()


def test_settings_of_a_guide(lab: Lab, tmp_path: Path) -> None:
    """An address and a token that others can guess, in the user's settings, open no port and no way for others."""
    own = Path(lab.home, ".jupyter")
    lab.run(["mkdir", "-p", str(own)], cwd="/", check=True)
    text = f"c.IdentityProvider.token = c.ServerApp.token = '{lab.user}'\nc.ServerApp.ip = '0.0.0.0'\n"
    text += "c.KernelManager.transport = 'tcp'\nc.ServerApp.allow_remote_access = True\n"
    for name in ("jupyter_server_config", "jupyter_lab_config"):
        lab.run(["sh", "-c", f"cat >{own}/{name}.py"], cwd="/", input=text, check=True)
    try:
        server = Server(start(lab, tmp_path / "jupyter"))
        assert "Permission denied" in server.ask(token=lab.user, uid=NOBODY) and not server.ports()
        assert (server.ask(token=lab.user), server.ask(token=server.token)) == ("403", "200")
        server.cancel()
    finally:
        lab.run(["rm", "-r", str(own)], cwd="/", check=True)


def test_bad_input(lab: Lab, tmp_path: Path) -> None:
    """Each mistake is one line in the log, and the job fails at once."""
    plain = tmp_path / "plain"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(plain)], check=True, timeout=300)
    hand_over(tmp_path)
    cases = {
        "there is no folder nowhere": {"FOLDER": "nowhere"},
        f"{tmp_path}/none has no jupyterlab": {"VENV": f"{tmp_path}/none"},
        f"{plain} has no jupyterlab": {"VENV": str(plain)},
    }
    jobs = {text: start(lab, tmp_path / "jupyter", "--cpus-per-task=1", **case) for text, case in cases.items()}
    for text, job in jobs.items():
        assert_refused(job, text)
