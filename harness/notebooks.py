"""A job of jupyter/run.slurm in the lab: submit it, and ask its server as its owner or as somebody else."""

import re
import shutil
import sys
from pathlib import Path

from harness.jobs import Job, submit
from harness.launchers import ROOT
from lab import Lab

FOLDER = ROOT / "jupyter"
HEAD, NOBODY = "head", 65534  # the login node of the lab, and the number of a user who is somebody else

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
        shutil.copytree(FOLDER, folder)
    return submit(lab, "jupyter", folder, options=options, line=line, **variables)
