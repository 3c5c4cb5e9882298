"""jupyter/run.slurm in the lab, opened as its README says: with ssh, and a real browser."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from harness import browser, readme
from harness.jobs import Job, assert_completed, assert_refused, hand_over, two_processes
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.notebooks import ASK, FOLDER, HEAD, NOBODY, Server, start
from harness.processes import PIPES, read_line, running, wait_until
from lab import Lab, faults

needs = ("sshd", "openssl")
missing = [name for name in needs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
missing += [] if browser.PROGRAM else ["chromium"]
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]

HASHED = "sha1:67c9e60bb8b6:9ffede0825894254b2e042ea597d771089e11aed"  # of the password "sesame"


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
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = [["".join(out.get("text", out.get("traceback", ""))) for out in cell["outputs"]] for cell in cells]
    return ["".join(text) for text in texts]


def browse(lab: Lab, node: str, url: str, path: str, *options: str) -> contextlib.AbstractContextManager:
    """Open a notebook in the browser, at a place in the lab."""
    words = [sys.executable, "-m", "harness.browser", url, path, *options]
    return running(lab.command(words, node, ROOT, user="root"), **PIPES)


def assert_done(process: subprocess.Popen[str]) -> None:
    """Wait until the browser has done what it was asked for: it has limits of its own, 120 s for most of its steps."""
    line = read_line(process, 500)
    assert line == "done\n", line + process.communicate(timeout=300)[0]


@contextlib.contextmanager
def tunnel(server: Server) -> Iterator[None]:
    """Run the ssh command that the user is told to run, word for word, until the block ends."""
    lab = server.lab
    with running(lab.command(server.tunnel.split(), HEAD, "/"), **PIPES) as process:

        def forwarded() -> bool:
            assert process.poll() is None, process.communicate(timeout=300)[0]
            return lab.run([sys.executable, "-c", ASK, server.url, ""], HEAD, "/").stdout.strip().isdecimal()

        wait_until(forwarded, 300, f"an answer through {server.tunnel}", pause=1)
        yield


def seen_by_others(lab: Lab, node: str, token: str) -> str:
    """Return what another user of a node sees of a token: files and the like that contain it, or nothing.

    Installed packages are left out: /tmp may hold environments of many GB, which take minutes to read.
    """
    look = (
        "grep -rlsF --exclude-dir=site-packages -f - /tmp /dev/shm /run/user /proc/[0-9]*/cmdline /proc/[0-9]*/environ"
    )
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", f"{look}; true"]
    return lab.run(words, node, "/", user="root", input=token, timeout=300).stdout.strip()


def test_only_for_its_owner(lab: Lab, ssh: None, tmp_path: Path) -> None:
    """Two servers on one node, each opened by its own token only, through ssh and in a browser, which runs a cell."""
    folder = tmp_path / "jupyter"
    change = {"../examples/ddp_spawn/.venv": sys.prefix}
    line = readme.command("jupyter/README.md", "VENV=... sbatch run.slurm", change)
    jobs = [start(lab, folder, "--nodelist=node1", "--cpus-per-task=1", line=line) for _ in range(2)]
    one, two = (Server(job) for job in jobs)
    logs = lab.run(["bash", "-c", readme.command("jupyter/README.md", "cat ...")], "node1", folder)
    assert logs.stdout.count("JupyterLab is ready") == 2
    assert one.port != two.port and one.token != two.token and len(one.token) == 64
    assert one.connect.stat().st_mode & 0o777 == 0o600 and one.connect.stat().st_uid == lab.uid

    # Who has no token gets no answer; from another node there is nothing to connect to.
    for path in ("api/status", "api/contents", "api/kernels", "api/terminals"):
        assert one.ask(path) == "403", path
        assert one.ask(path, uid=NOBODY) == "403", path
    assert one.ask("lab") == one.ask("files/jupyter/run.slurm") == "302"  # to the page that asks for the token
    assert (one.ask(token=two.token), one.ask(token=lab.user), one.ask(token=one.token)) == ("403", "403", "200")
    assert "refused" in one.ask(token=one.token, node="node2", address=lab.addresses["node1"])

    # The browser at the user's end of the tunnel.
    page = notebook(
        folder / "first.ipynb",
        "print(6 * 7)",
        "import os, torch; print(os.getcwd(), torch.__version__)",
        "import debugpy",
    )
    picture = tmp_path / "page.png"
    with tunnel(one), browse(lab, HEAD, one.url, "jupyter/first.ipynb", "--picture", str(picture)) as process:
        assert_done(process)
        wait_until(lambda: outputs(page)[2], 300, "the saved notebook")
        assert outputs(page)[0] == "42\n" and str(folder) in outputs(page)[1]
        assert picture.read_bytes()[:4] == b"\x89PNG"
        # What the kernel is asked, and answers, goes through sockets in a private folder. It has one port, where it
        # takes the output of processes that a cell has forked, if they know a key, and gives nothing.
        kernel = lab.run(["sh", "-c", "cat /dev/shm/jupyter-*/runtime/kernel-*.json"], "node1", "/").stdout
        assert json.loads(kernel)["transport"] == "ipc"
        assert "switched off" in outputs(page)[2], "a debugger would open a port that runs what anybody sends"
        servers = {f"0100007F:{server.port:04X}" for server in (one, two)}
        assert one.listening() > servers and len(one.listening()) == 3
        for server in (one, two):
            assert not seen_by_others(lab, "node1", server.token)
        # The search finds what there is to find: a file, and a command line.
        lab.run(["sh", "-c", f"umask 022; echo {one.token} >/tmp/visible"], "node1", "/", check=True)
        wait = [sys.executable, "-c", "import time; time.sleep(1000)", one.token]
        with running(lab.command(wait, "node1", "/"), **PIPES):
            found = partial(seen_by_others, lab, "node1", one.token)
            wait_until(lambda: "/cmdline" in found(), 300, "the found command line", pause=1)
            assert found().startswith("/tmp/visible")
        lab.run(["rm", "/tmp/visible"], "node1", "/", check=True)
        for server in (one, two):
            for pid in server.job.processes():
                for file in ("cmdline", "environ"):
                    assert server.token.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()

    one.job.cancel()
    one.assert_nothing_left()
    assert two.ask(token=two.token) == "200", "the other server runs on"
    two.job.cancel()
    two.assert_nothing_left()


def test_listen_on_node(lab: Lab, ssh: None, tmp_path: Path) -> None:
    """Where no ssh to nodes is allowed: TLS on the node's own address, with a certificate that names itself."""
    server = Server(start(lab, tmp_path / "jupyter", "--nodelist=node1", LISTEN="node"))
    at = lab.addresses["node1"]
    assert server.scheme == "https" and server.address == at
    assert server.ask(node="node2", uid=NOBODY) == "403" and server.ask(node="node2", token=server.token) == "200"
    assert "refused" in server.ask(address="127.0.0.1")
    assert server.tunnel.endswith(f" {lab.user}@{HEAD}") and " -J " not in server.tunnel
    get = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"
    certificate = lab.run([sys.executable, "-c", get, at, str(server.port)], HEAD, "/").stdout
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.strip())).hexdigest().upper()
    assert f"SHA-256: {':'.join(re.findall('..', digest))}" in server.text
    page = notebook(tmp_path / "jupyter" / "first.ipynb", "print(6 * 7)")
    with tunnel(server), browse(lab, HEAD, server.url, "jupyter/first.ipynb") as process:
        assert_done(process)
        wait_until(lambda: outputs(page)[0] == "42\n", 300, "the saved notebook")
    server.job.cancel()
    server.assert_nothing_left()


@pytest.mark.runs("weekly")
def test_time_limit(lab: Lab, tmp_path: Path) -> None:
    """Near the time limit the log says so; a running cell is interrupted, and what it then prints is saved."""
    text = "import time\ntry:\n    print('begun')\n    time.sleep(600)\nfinally:\n    print('saved', 6 * 7)"
    job = start(lab, tmp_path / "jupyter", "--signal=B:USR1@70")
    page = notebook(tmp_path / "jupyter" / "long.ipynb", text)
    server = Server(job)
    with browse(lab, server.node, server.local_url, "jupyter/long.ipynb", "--until", "begun") as process:
        assert_done(process)
        job.limit_time(65)
        server.assert_nothing_left()
    assert "the time limit is near: this job ends in" in job.log and "shutting down" in job.log
    assert job.shown["JobState"] == "COMPLETED", "it ended by itself, before SLURM had to"
    assert "begun\nsaved 42\n" in outputs(page)[0] and "KeyboardInterrupt" in outputs(page)[0]


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("how", ["down", "power"])
def test_node_taken_away(lab: Lab, tmp_path: Path, how: str) -> None:
    """A job whose node is taken away, or loses its power, starts again where it can; the old token is gone."""
    first = Server(start(lab, tmp_path / "jupyter"))
    down = ["scontrol", "update", f"NodeName={first.node}", "State=DOWN", "Reason=test"]
    try:
        if how == "down":  # by its administrators
            lab.run(down, cwd="/", user="root", check=True)
        else:
            faults.stop_slurmd(lab, first.node)
            for pid in [*first.job.processes(), *find_stepd(lab, first.job)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "refused" in first.ask(token=first.token), 300, "the end of the first server", pause=1)
        wait_until(lambda: first.job.log.count("JupyterLab is ready") == 2, 300, "a second start")
        second = Server(first.job)
        assert how == "down" or second.node != first.node
        assert second.token != first.token and first.token not in second.text
        assert second.ask(token=first.token) == "403"
        if how == "down":
            first.assert_node_clean()
        second.job.cancel()
        second.assert_nothing_left()
    finally:
        if how == "power":
            faults.start_slurmd(lab, first.node)
        lab.wait_for_node(first.node, "idle", "mixed", "allocated")


def find_stepd(lab: Lab, job: Job) -> list[int]:
    """Return the ids of the slurmstepd of a job."""
    return [pid for pid, line in lab.processes().items() if line.startswith("slurmstepd") and f"[{job.id}." in line]


def test_settings_of_a_guide(lab: Lab, tmp_path: Path) -> None:
    """A token that others can guess, copied from a guide into the user's settings or environment, opens nothing."""
    own = Path(lab.home, ".jupyter")
    lab.run(["mkdir", "-p", str(own)], cwd="/", check=True)
    text = f"c.IdentityProvider.token = c.ServerApp.token = '{lab.user}'\nc.ServerApp.ip = '0.0.0.0'\n"
    text += f"c.PasswordIdentityProvider.hashed_password = '{HASHED}'\nc.KernelManager.transport = 'tcp'\n"
    site = Path(lab.home, ".local", "etc", "jupyter")
    lab.run(["mkdir", "-p", str(site)], cwd="/", check=True)
    for folder in (own, site):
        for name in ("jupyter_server_config", "jupyter_lab_config"):
            lab.run(["sh", "-c", f"cat >{folder}/{name}.py"], cwd="/", input=text, check=True)
    try:
        server = Server(start(lab, tmp_path / "jupyter", JUPYTER_TOKEN=lab.user))
        assert server.ask(token=lab.user) == "403" and server.ask(token=server.token) == "200"
        assert server.listening() == {f"0100007F:{server.port:04X}"}
        server.job.cancel()
        server.assert_nothing_left()
    finally:
        lab.run(["rm", "-r", str(own), str(site)], cwd="/", check=True)


def test_bad_input(lab: Lab, tmp_path: Path) -> None:
    """Each mistake is one line in the log, and the job fails at once."""
    folder = tmp_path / "jupyter"
    plain = tmp_path / "plain"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(plain)], check=True, timeout=300)
    cases: dict[str, Mapping[str, str]] = {
        "LISTEN=all: must be loopback or node": {"LISTEN": "all"},
        "LOGIN=cluster: must be USER@HOST": {"LOGIN": "cluster"},
        "there is no folder nowhere": {"FOLDER": "nowhere"},
        f"there is no {tmp_path}/none/bin/python": {"VENV": f"{tmp_path}/none"},
        "it has no jupyterlab": {"VENV": str(plain)},
    }
    jobs = {text: start(lab, folder, "--cpus-per-task=1", **variables) for text, variables in cases.items()}
    for text, job in jobs.items():
        assert_refused(job, text)


# What a notebook that trains prints, by the example whose environment has what it needs: the README's cell for it, and
# one that the README says does not work.
TRAINING = {
    "ddp_spawn": ("# PyTorch", "sum over all processes: 3.0", "mp.spawn(work, (2, port), nprocs=2)", "ProcessExited"),
    "lightning": ("# Lightning", "processes: 2", "L.Trainer(accelerator='cpu', devices=2, strategy='ddp')", "Misconf"),
    "lora": ("# accelerate", "processes: 2", "raise ValueError('only this cell')", "only this cell"),
}


@pytest.mark.runs("weekly")  # the ordinary tests open servers and run cells
@pytest.mark.only(*TRAINING)
def test_training_from_a_notebook(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's launchers work in a notebook inside an allocation, or fail as it says; so do `!...` and sbatch."""
    title, printed, wrong, error = TRAINING[example]
    cell = next(text for text in readme.fences(FOLDER / "README.md", "python") if text.startswith(title))
    copied = copy_example(source, tmp_path / "project")
    hand_over(tmp_path)
    server = Server(start(lab, tmp_path / "jupyter", "--nodelist=node1"))
    local = shlex.join(LAUNCHERS[example].command(2))
    submitted = f"!sbatch --parsable {shlex.join(two_processes(source))} run.slurm --epochs 1"
    cells = [cell, f"%cd ../project\n!{local} --epochs 1", submitted, wrong]
    page = notebook(tmp_path / "jupyter" / "train.ipynb", *cells)
    with browse(lab, server.node, server.local_url, "jupyter/train.ipynb") as process:
        assert_done(process)
        wait_until(
            lambda: error in outputs(page)[-1], 300, f"{error} in the saved notebook"
        )  # an earlier save may lack it
    found = outputs(page)
    assert printed in found[0] and "finished: " in found[1] and error in found[3], found
    job = Job(lab, example, copied, found[2].strip())
    assert_completed(job, 1, processes=2)
    server.job.cancel()
