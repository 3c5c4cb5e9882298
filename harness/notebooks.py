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

# Asks for a path of a server without being sent elsewhere; prints the status, or why there is none.
ASK = """
import ssl, sys, urllib.error, urllib.request
address, token = sys.argv[1:]
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None
handlers = [urllib.request.HTTPSHandler(context=ssl._create_unverified_context()), Stay]
request = urllib.request.Request(address, headers={"Authorization": f"token {token}"} if token else {})
try:
    print(urllib.request.build_opener(*handlers).open(request, timeout=300).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""


class Server:
    """A job of jupyter/run.slurm that has started: what it tells its owner, and who gets an answer from it."""

    def __init__(self, job: Job) -> None:
        self.job, self.lab = job, job.lab
        job.wait_for_line("JupyterLab is ready")
        self.connect = Path(re.findall(r"How to open it:  cat (\S+)$", job.log, re.MULTILINE)[-1])
        self.text = self.connect.read_text()
        self.tunnel = re.search(r"^ +(ssh .*)$", self.text, re.MULTILINE)[1]
        self.url = re.search(r"^ +(https?://127.0.0.1:8888/lab\?token=\w+)$", self.text, re.MULTILINE)[1]
        self.scheme, self.token = self.url.partition(":")[0], self.url.partition("token=")[2]
        self.address, port = re.search(r"-L 8888:([\d.]+):(\d+) ", self.tunnel).groups()
        self.port = int(port)
        self.local_url = self.url.replace("8888", port)  # for a browser on the node itself
        self.node = self.job.shown["NodeList"]
        lines = [line for pid, line in self.lab.processes(self.node).items() if pid in self.job.processes()]
        self.private = next(filter(None, (re.search(r"--private=(/dev/shm/jupyter-\w+) ", line) for line in lines)))[1]

    def ask(self, path: str = "api/status", token: str = "", node: str = "", uid: int = 0, address: str = "") -> str:
        """Return the status, or the error, that a user of a node gets as an answer: by default the job's owner."""
        words = ["setpriv", f"--reuid={uid or self.lab.uid}", "--clear-groups", sys.executable, "-c", ASK]
        url = f"{self.scheme}://{address or self.address}:{self.port}/{path}"
        return self.lab.run([*words, url, token], node or self.node, "/", user="root").stdout.strip()

    def listening(self) -> set[str]:
        """Return the addresses and ports on which programs of the job's owner listen on its node."""
        text = self.lab.run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], self.node, "/").stdout
        rows = [line.split() for line in text.splitlines()]
        return {row[1] for row in rows if row[3] == "0A" and row[7] == str(self.lab.uid)}

    def assert_nothing_left(self) -> None:
        """Check that the job's node has no process, port or file of it any more, and that nobody finds a token."""
        self.job.wait()
        assert not self.connect.exists()
        self.assert_node_clean()
        assert self.token not in self.job.log

    def assert_node_clean(self) -> None:
        """Check that the server's private folder on its node is gone, and that nothing answers at its port."""
        assert self.lab.run(["ls", self.private], self.node, "/").returncode == 2
        assert "refused" in self.ask(token=self.token)


def start(lab: Lab, folder: Path, *options: str, line: str = "sbatch run.slurm", **variables: str) -> Job:
    """Submit a copy of jupyter/run.slurm, by a line of a page."""
    if not folder.exists():
        shutil.copytree(FOLDER, folder)
        shutil.copytree(ROOT / "plumbing", folder.parent / "plumbing", dirs_exist_ok=True)
    return submit(lab, "jupyter", folder, options=options, line=line, **variables)
