"""preflight/ on a healthy lab, and on labs broken on purpose: each fault must be named in its own row."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import readme
from harness.jobs import hand_over, sbatch
from harness.launchers import ROOT
from harness.processes import read_line, running, wait_until
from lab import Lab, Wanted, faults, why_not

FOLDER = ROOT / "preflight"
ROWS = ["answers", "python", "names", "port", "connections", "folder", "clocks", "gpus", "reduce", "network"]
# Instead of torch, which needs a core for seconds, where PyTorch is not what is tested: what preflight.py uses of it.
# Nothing is sent. WAIT is a file: torch is imported when it is gone.
STAND_IN = {
    "torch/__init__.py": """
import os, time
from types import SimpleNamespace
while os.path.exists(os.environ.get("WAIT", "")):
    open(os.environ["WAIT"] + os.environ["SLURMD_NODENAME"], "w").close()
    time.sleep(0.1)
__version__, version = "2", SimpleNamespace(cuda=os.environ.get("CUDA"), hip=None)
cuda, device = SimpleNamespace(device_count=lambda: 0), str
class ones:
    def __init__(self, size, device="cpu"):
        if "cuda" in device:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update")
        self.value = 1
    def __getitem__(self, index):
        return SimpleNamespace(item=lambda: self.value)
def tensor(values):
    one = ones(1)
    one.value = values[0]
    return one
""",
    "torch/distributed.py": """
import os, time
from types import SimpleNamespace
init_process_group, barrier = lambda *_, **__: None, lambda: None
isend, recv = lambda *_: SimpleNamespace(wait=lambda: None), lambda *_: time.sleep(0.03)
def all_gather_object(places, place):
    tasks = len(places) // int(os.environ["SLURM_JOB_NUM_NODES"])
    places[:] = [[f"node{rank // tasks + 1}", rank % tasks] for rank in range(len(places))]
def all_reduce(tensor, group=None):
    time.sleep(0.005)
    tensor.value = tensor.value and int(os.environ["WORLD_SIZE"])
""",
    "horovod/__init__.py": "",
}

pytestmark = [pytest.mark.slurm]
needs_lab = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))


class Run:
    """A printed table: its rows as {check: (result, status, advice)}, and its whole log."""

    def __init__(self, log: str, status: int, state: str = "") -> None:
        self.log, self.status, self.state = log, status, state
        cells = [[cell.strip() for cell in (line + " |").split(" |")] for line in log.splitlines() if " | " in line]
        self.rows = {row[0]: tuple(row[1:4]) for row in cells if row[0] != "check"}
        self.failed = {name for name, row in self.rows.items() if row[1] == "FAIL"}
        self.warned = {name for name, row in self.rows.items() if row[1] == "WARN"}


class Place:
    """A folder that the lab's nodes share, to submit from, with `light`, an environment without real torch."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.light = self.environment()

    def environment(self, **programs: str) -> Path:
        """Make an environment of stand-ins, and of programs that are these shell scripts."""
        venv = Path(tempfile.mkdtemp(prefix="venv-", dir=self.folder))
        for name, text in STAND_IN.items():
            (venv / name).parent.mkdir(exist_ok=True)
            (venv / name).write_text(text)
        (venv / "bin").mkdir()
        for name, script in {"python": f'PYTHONPATH={venv} exec {sys.executable} "$@"', **programs}.items():
            (venv / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (venv / "bin" / name).chmod(0o755)
        return hand_over(venv)

    def submit(self, *options: str, line: str = "sbatch run.slurm", **variables: str | Path) -> str:
        """Submit run.slurm, by a line of a page; return the job's id."""
        env = {"VENV": self.light, **variables}
        words = sbatch(line, ["--cpus-per-task=2", *options])
        done = self.lab.run(words, cwd=self.folder, env={name: str(value) for name, value in env.items()})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def finish(self, job: str) -> Run:
        """Wait for a job and read its table."""
        info = self.lab.wait_for_job(job)
        log = (self.folder / f"preflight-{job}.out").read_text()
        assert not list(self.folder.glob(".preflight*")), "files are left"
        return Run(log, int(info["ExitCode"].split(":")[0]), info["JobState"])

    def run(self, *options: str, **settings: Any) -> Run:
        """Submit and wait."""
        return self.finish(self.submit(*options, **settings))


def make(name: str, **settings: Any) -> Iterator[Place]:
    """Start a lab of three nodes, with a copy of preflight/ in a folder that they share."""
    folder = Path(tempfile.mkdtemp(prefix="preflight-test-"))
    for file in FOLDER.glob("*.*"):
        shutil.copy(file, folder)
    share = [folder, *(path for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/"))]
    # As on a real cluster, where SLURM itself takes minutes to notice a dead node.
    settings |= {"name": f"{name}{os.getpid()}", "share": share, "conf": ["SlurmdTimeout=300"]}
    try:
        with Lab(Wanted(3, cpus=4, gpus=2, **settings)) as lab:
            yield Place(lab, hand_over(folder))
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A healthy lab."""
    yield from make("prehealthy")


@needs_lab
def test_healthy(place: Place) -> None:
    """With real torch, by the page's line; and what an outer job has left does not matter."""
    line = readme.command("preflight/README.md", "VENV=... sbatch run.slurm", {"~/project/.venv": sys.prefix})
    run = place.run(line=line, SLURM_GPUS="1")
    assert {name: row[1] for name, row in run.rows.items()} == dict.fromkeys(ROWS, "ok"), run.log
    assert run.status == 0 and run.state == "COMPLETED" and "preflight: all is well" in run.log
    assert re.fullmatch(r"gloo \d+ MB/s with 2 tasks", run.rows["reduce"][0])
    assert re.fullmatch(r"\d+ MB/s from node to node", run.rows["network"][0])


@needs_lab
@pytest.mark.parametrize(("kind", "status"), [("pmix", "ok"), ("none", "FAIL")])
def test_mpi(place: Place, kind: str, status: str) -> None:
    """Where there is Horovod, MPI has to count all tasks; without PMIx each is alone in a world of its own."""
    script = place.folder / "run.slurm"
    text = script.read_text()
    script.write_text(text.replace("mpi=pmix ", f"mpi={kind} "))
    try:
        job = place.submit("--ntasks-per-node=2", OMPI_MCA_mpi_yield_when_idle="1")
    finally:
        script.write_text(text)
    run = place.finish(job)
    assert run.rows["mpi"][1] == status and run.failed == ({"mpi"} if status == "FAIL" else set()), run.log
    assert ("4 processes in one world" if status == "ok" else "node1: 0 of 4") in run.rows["mpi"][0]
    assert run.rows["answers"][0] == "4 tasks on 2 nodes"


@needs_lab
def test_torch_cannot_use_the_gpus(place: Place) -> None:
    """The driver is too old for torch: the row names it, and the PyTorch that fits."""
    smi = """case "$1" in
    *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;;
    *) echo '470.57.02, Tesla T4'; echo '470.57.02, Tesla T4' ;;
    esac"""
    venv = place.environment(**{"nvidia-smi": smi})
    path = f"{venv}/bin:{os.environ['PATH']}"
    run = place.run("--nodes=1", "--gpus-per-node=2", VENV=venv, CUDA="13.2", PATH=path)
    assert run.failed == {"gpus"} and run.status == 1, run.log
    result, _, advice = run.rows["gpus"]
    found = "node1: 2 asked for, 2 Tesla T4, driver 470.57.02, 0 usable in torch 2 (CUDA 13.2): RuntimeError: "
    assert result == found + "The NVIDIA driver on your system is too old (found version 11040)"
    assert "UV_TORCH_BACKEND=cu118 uv pip install --reinstall torch==2.6.0 torchvision==0.21.0" in advice


@needs_lab
def test_refused(place: Place) -> None:
    """run.slurm says in one line that there is no environment, or image."""
    jobs = {
        f"no {place.folder}/nowhere/bin/python: VENV": place.submit(VENV="nowhere"),
        "no image nowhere.sif": place.submit(IMAGE="nowhere.sif"),
    }
    for line, job in jobs.items():
        run = place.finish(job)
        assert run.status == 2 and run.log.startswith(f"run.slurm: error: {line}"), run.log
        assert run.log.count("\n") == 1


@needs_lab
def test_image(place: Place) -> None:
    """All runs in the image: a stand-in for Apptainer, whose image is the environment."""
    venv = place.environment(apptainer='while [ "$1" != "$IMAGE" ]; do shift; done; shift; exec "$IMAGE/bin/$@"')
    line = readme.command("preflight/README.md", "IMAGE=...", {"~/project/example.sif": venv})
    run = place.run(line=line, VENV="nowhere", PATH=f"{venv / 'bin'}:{os.environ['PATH']}")
    assert run.status == 0 and {row[1] for row in run.rows.values()} == {"ok"}, run.log


@needs_lab
@pytest.mark.parametrize("hidden", ["folder", "environment"])
def test_not_shared(place: Place, hidden: str) -> None:
    """Node2 does not see the folder that the job was submitted from, or the environment."""
    venv = place.environment()
    path = place.folder if hidden == "folder" else venv
    setting = {"VENV": Path(sys.prefix)} if hidden == "folder" else {"VENV": venv}
    hide = ["mount", "-t", "tmpfs", "tmpfs", str(path)]
    place.lab.run(hide, node="node2", cwd="/", user="root", check=True)
    try:
        run = place.run(**setting)
    finally:
        place.lab.run(["umount", str(path)], node="node2", user="root", check=True)
    if hidden == "folder":
        assert run.failed == {"folder"}, run.log
        assert "node2 does not see the files of node1" in run.rows["folder"][0]
        assert str(place.folder) in run.rows["folder"][0] and "share" in run.rows["folder"][2]
    else:
        assert "answers" in run.failed and run.status == 1, run.log
        assert f"node2 has no {venv}/bin/python" in run.rows["answers"][0] and "share" in run.rows["answers"][2]


@needs_lab
def test_another_python(place: Place) -> None:
    """Node2 has an environment of the same name without torch."""
    venv = place.environment()
    other = place.environment(python=f'exec {sys._base_executable} -I "$@"')  # type: ignore[attr-defined]
    mount = ["mount", "--bind", str(other), str(venv)]
    place.lab.run(mount, node="node2", user="root", check=True)
    try:
        run = place.run(VENV=venv)
    finally:
        place.lab.run(["umount", str(venv)], node="node2", user="root", check=True)
    assert run.failed >= {"python"} and run.status == 1, run.log
    assert re.search("node2: .*, no torch: ModuleNotFoundError", run.rows["python"][0]) and "VENV" in run.log
    assert run.rows["names"][1] == run.rows["connections"][1] == run.rows["folder"][1] == "ok"


@needs_lab
def test_port_taken(place: Place) -> None:
    job = place.submit("--hold")
    code = f"import socket, time; s = socket.create_server(('', {10000 + int(job) % 20000})); print(flush=True)"
    words = place.lab.command([sys.executable, "-c", code + "; time.sleep(1000)"], node="node1", cwd="/")
    with running(words) as other:
        read_line(other, 300)
        place.lab.run(["scontrol", "release", job], check=True)
        run = place.finish(job)
    assert run.failed == {"port"} and run.status == 1, run.log
    assert "node1" in run.rows["port"][0] and "submit again" in run.rows["port"][2]


@needs_lab
def test_slow_node(place: Place) -> None:
    """The link of one of three nodes is slow: it is named, and the others are not."""
    faults.slow(place.lab, "node3", "100mbit")
    try:
        run = place.run("--nodes=3", VENV=sys.prefix)
    finally:
        faults.heal(place.lab, "node3")
    result, status, advice = run.rows["network"]
    assert status == "WARN" and "--exclude" in advice and not run.failed, run.log
    found = re.fullmatch(r"node3 has (\d+) MB/s at most, to and from any other; else \d+ MB/s from .*", result)
    assert found and 0 < int(found[1]) <= 13, run.log


@needs_lab
def test_wrong_interface(place: Place) -> None:
    """Host names lead to a slow network beside a fast one: the row says so, and is ok with the other one."""
    nodes = ("node1", "node2")
    first, second = (str(place.lab.pid_of(node)) for node in nodes)
    cable = ["ip", "link", "add", "ib0", "type", "veth", "peer", "name", "ib0", "netns", second]
    subprocess.run(["nsenter", f"--target={first}", "--net", *cable], check=True, timeout=300)
    try:
        for number, node in enumerate(nodes, 1):
            for words in (f"address add 10.211.0.{number}/24 dev ib0", "link set ib0 up"):
                place.lab.run(["ip", *words.split()], node=node, user="root", check=True)
            faults.slow(place.lab, node, "200mbit")
        run = place.run(VENV=sys.prefix)
        chosen = place.run(VENV=sys.prefix, GLOO_SOCKET_IFNAME="ib0")
    finally:
        place.lab.run(["ip", "link", "delete", "ib0"], node="node1", user="root")
        for node in nodes:
            faults.heal(place.lab, node)
    result, status, advice = run.rows["network"]
    assert status == "WARN" and "GLOO_SOCKET_IFNAME" in advice and not run.failed, run.log
    assert re.fullmatch(r"\d+ MB/s from node to node; interfaces of all nodes: eth0, ib0", result)
    assert chosen.status == 0, chosen.log


@needs_lab
@pytest.mark.parametrize("what", [pytest.param("cut", marks=pytest.mark.full), "cancelled"])
def test_ended_early(place: Place, what: str) -> None:
    """The cable of node2 is pulled, or the job cancelled, while torch is imported: the table comes all the same."""
    wait = place.folder / "wait"
    wait.touch()
    job = place.submit(WAIT=wait)
    log = place.folder / f"preflight-{job}.out"
    try:
        wait_until(lambda: all(Path(f"{wait}node{n}").exists() for n in (1, 2)), 300, "the import on both nodes")
        if what == "cut":
            faults.cut(place.lab, "node2")
            wait.unlink()
        else:
            place.lab.run(["scancel", job], check=True)
        wait_until(lambda: "preflight: FAIL" in log.read_text(), 400, "the table")
    finally:
        for file in place.folder.glob("wait*"):
            file.unlink()
        faults.heal(place.lab, "node2")
    run = place.finish(job)
    place.lab.wait_for_node("node2", "idle")
    assert "answers" in run.failed and run.rows["connections"][1] == "ok", run.log
    if what == "cut":
        assert "node2 did not end with: torch" in run.rows["answers"][0] and "--exclude" in run.rows["answers"][2]
        assert "node1 did not" not in run.rows["answers"][0]


@needs_lab
def test_loopback_answer() -> None:
    """On node1 its own name is a loopback address, by a line in /etc/hosts."""
    for place in make("preloop", hosts={"node1": {"node1": "127.0.1.1"}}):
        run = place.run()
    assert run.failed == {"names"} and run.status == 1, run.log
    assert "on node1 node1 is 127.0.1.1" in run.rows["names"][0]
    assert "/etc/hosts" in run.rows["names"][2]


# Without a lab: facts that no lab can show.

GOOD = {
    "python": "python",
    "names": {"node1": ["10.0.0.1"], "node2": ["10.0.0.2"]},
    "port": 10007,
    "port_problem": "",
    "unseen": [],
    "folder": "/home",
    "asked_gpus": 0,
    "driver": {"gpus": [], "amd": False},
    "build": "torch 2 (CUDA 13.2)",
    "reduce": {"gloo": 900},
    "interfaces": ["eth0"],
    "done": {"nodes": "", "torch": ""},
}


def judge(first: dict[str, Any] | None = None, **second: Any) -> Run:
    """Return the table of two nodes that have told GOOD and other facts."""
    lines = []
    for rank, changed in enumerate((first or {}, second)):
        node, neighbour = f"node{rank + 1}", f"node{2 - rank}"
        facts = GOOD | {"connections": {neighbour: {"node": neighbour, "apart": 0}}, "rates": {neighbour: 900}}
        lines.append(f"preflight {json.dumps(facts | {'rank': rank, 'node': node} | changed)}\n")
    words = [sys.executable, str(FOLDER / "verdict.py"), "node1", "node2"]
    done = subprocess.run(words, input="".join(["a warning\n", *lines]), capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("a warning\n") and not done.stderr, done.stderr
    return Run(done.stdout, done.returncode)


def test_all_is_well() -> None:
    run = judge()
    assert {name: row[1] for name, row in run.rows.items()} == dict.fromkeys(ROWS, "ok") and run.status == 0, run.log


@pytest.mark.parametrize(
    ("row", "status", "text", "fact"),
    [
        ("names", "FAIL", "node2 does not know node1: no", {"names": {"node1": {"error": "no"}}}),
        ("connections", "FAIL", "cannot connect to node1: no", {"connections": {"node1": {"error": "no"}}}),
        ("connections", "FAIL", "node2 reaches node2 under", {"connections": {"node1": {"node": "node2", "apart": 0}}}),
        ("clocks", "WARN", "node2: 90.0 s", {"first": {"connections": {"node2": {"node": "node2", "apart": 90}}}}),
        ("gpus", "FAIL", "node2: 2 asked for, no driver, 1 usable", {"asked_gpus": 2, "usable": 1}),
        ("reduce", "FAIL", "gloo on node2: refused", {"reduce": {"gloo": {"error": "refused"}}}),
        ("answers", "FAIL", "node2 did not end with: torch", {"done": {"nodes": ""}}),
        ("answers", "FAIL", "node2: OSError", {"done": {"nodes": "", "torch": "OSError"}}),
        ("names", "FAIL", "cannot be judged: AttributeError", {"names": 3}),
    ],
)
def test_facts(row: str, status: str, text: str, fact: dict[str, Any]) -> None:
    run = judge(**fact)
    assert run.rows[row][1] == status and text in run.log and run.status == 1, run.log
    assert run.failed | run.warned == {row}, run.log


def advice(driver: str, capability: str) -> str:
    """Return the advice for a node whose GPUs have this driver and compute capability."""
    gpus = {"gpus": [[driver, capability, "GPU"]], "amd": False}
    return judge(asked_gpus=1, usable=0, driver=gpus).rows["gpus"][2]


def test_advice_is_the_page_and_the_pins() -> None:
    """The table of docs/install.md names the same builds for the same drivers and GPUs, and the examples' pins."""
    section = (ROOT / "docs" / "install.md").read_text().split("\n## Which PyTorch\n")[1].split("\n## ")[0]
    named = set()
    for what, torch, vision, build in re.findall(r"^\| (.+) \| ([\d.]+).* \| ([\d.]+).* \| (.+) \|$", section, re.M):
        backend = re.search(r"`([\w.]+)`", build)
        named.add((torch, vision, backend[1] if backend else ""))
        drivers = re.search(r"driver (\d+) (?:to (\d+)|or newer)", what)
        capability = "7.0" if "V100" in what else "10.0" if "B200" in what else "9.0"
        for driver in filter(None, drivers.groups() if drivers else ()):
            command = f"uv pip install --reinstall torch=={torch} torchvision=={vision}"
            command = f"UV_TORCH_BACKEND={backend[1]} {command}" if backend else f": {command}"
            assert command in advice(f"{driver}.1", capability), what
    assert "newer driver" in advice("440.33", "7.0")
    table = json.loads((FOLDER / "releases.json").read_text())
    assert named == {tuple(row["wheel"]) for row in table["nvidia"] if row["wheel"]} | {
        tuple(table["amd"]),
        tuple(table["cpu"]),
    }
    files = [file.read_text() for file in ROOT.glob("examples/*/requirements.txt")]
    pins = {match for text in files for match in re.findall(r"^(torch(?:vision)?)==(\S+)", text, re.MULTILINE)}
    assert pins == set(zip(("torch", "torchvision"), table["pins"], strict=False))
