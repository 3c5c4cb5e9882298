"""preflight/ on a healthy lab, and on labs broken on purpose: each fault must be named in its own row."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness import outputs, readme
from harness.jobs import hand_over, sbatch
from harness.launchers import ROOT
from harness.processes import read_line, running, wait_until
from lab import Lab, Wanted, faults, why_not

PYTHON = sys._base_executable  # type: ignore[attr-defined]  # not documented: the one below any environment
FOLDER = ROOT / "preflight"
ROWS = ["answers", "names", "connections", "cpus", "tasks", "limits", "shared", "port", "gpus", "wheel", "clock"]
ROWS += ["python", "reduce", "sizes", "network"]
# Real torch, but with other answers to what it would ask a driver; it is imported in place of this file.
TORCH = """
import sys
sys.path.remove({folder!r})
del sys.modules["torch"]
import torch
def lazy_init():
    raise {error}
torch.cuda._lazy_init, torch.cuda.device_count, torch.version.cuda = lazy_init, lambda: {count}, {cuda!r}
"""
# In the place of torch, which needs a core for seconds, where PyTorch is not what is tested: what preflight.py uses of
# it. Nothing is sent; in so many seconds as SECONDS says, something can happen while it is imported.
STAND_IN = {
    "__init__.py": """
import os, time
from types import SimpleNamespace
time.sleep(float(os.environ.get("SECONDS", 0)))
__version__, version = "2", SimpleNamespace(cuda=None, hip=None)
cuda, device = SimpleNamespace(device_count=lambda: 0), str
class ones:
    def __init__(self, size, device):
        if "cuda" in device:
            raise RuntimeError("Found no NVIDIA driver on your system")
        self.value = 1
    def __getitem__(self, index):
        return SimpleNamespace(item=lambda: self.value)
zeros = ones
""",
    "distributed.py": """
import time
from types import SimpleNamespace
def TCPStore(*_, **__):
    return SimpleNamespace(port=1)
def init_process_group(backend, world_size, **_):
    all_reduce.world = world_size
def all_reduce(tensor, group):
    time.sleep(0.005)
    tensor.value = all_reduce.world
""",
}
OLD_DRIVER = (  # what torch says, in full
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)

pytestmark = [pytest.mark.slurm]
needs_lab = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))


def nvidia_smi(driver: str, capability: str, name: str) -> str:
    """Return a script that answers for two GPUs; with no capability, it is one that does not know that field."""
    unknown = 'Field "compute_cap" is not a valid field to query.'
    return f"""case "$1" in
    --query-gpu=driver_version) line="{driver}" ;;
    --query-gpu=driver_version,name) line="{driver}, {name}" ;;
    --query-gpu=driver_version,compute_cap,name) line="{driver}, {capability}, {name}" ;;
    *) exit 9 ;;
    esac
    case "$1,{capability}" in *compute_cap*,) echo '{unknown}'; exit 2 ;; esac
    echo "$line"; echo "$line" """


def write_program(path: Path, script: str) -> None:
    """Write a program that is this shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def write_light(venv: Path, tools: Path) -> str:
    """Write an environment whose python has a stand-in for torch, in `tools`; return what that python does."""
    (tools / "torch").mkdir(parents=True)
    for name, text in STAND_IN.items():
        (tools / "torch" / name).write_text(text)
    python = f'PYTHONPATH={tools} exec {sys.executable} "$@"'
    write_program(venv / "bin" / "python", python)
    return python


class Run:
    """A finished job: its rows as {check: (result, status, advice)}, its whole log and its exit status."""

    def __init__(self, log: str, info: dict[str, str]) -> None:
        self.log, self.info = log, info
        self.status = int(info["ExitCode"].split(":")[0])
        cells = [[cell.strip() for cell in line.split(" |")] for line in log.splitlines() if " |" in line]
        self.rows = {row[0]: tuple(row[1:]) for row in cells if row[0] != "check"}
        self.failed = {name for name, row in self.rows.items() if row[1] == "FAIL"}


class Place:
    """A folder that the lab's nodes share, to submit from; and one with `light`, an environment without real torch."""

    def __init__(self, lab: Lab, folder: Path, tools: Path) -> None:
        self.lab, self.folder, self.light = lab, folder, tools / "light"
        self.light_python = write_light(self.light, tools)
        hand_over(tools)

    def submit(
        self, *options: str, venv: str | Path = sys.prefix, env: dict[str, str] | None = None, line: str = ""
    ) -> str:
        """Submit run.slurm, by a page's line, with `options` of sbatch; return the job's id."""
        own = readme.command("preflight/README.md", "VENV=... sbatch run.slurm", {"~/project/.venv": venv})
        words = sbatch(line or own, ["--cpus-per-task=2", *options])
        # ALLOW_CPU: here the lab's GPUs, which are stand-ins, shall be seen to be unusable.
        done = self.lab.run(words, cwd=self.folder, env={"ALLOW_CPU": "", **(env or {})})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def finish(self, job: str) -> Run:
        """Wait for a job and read its table."""
        info = self.lab.wait_for_job(job)
        return Run((self.folder / f"preflight-{job}.out").read_text(), info)

    def run(self, *options: str, **settings: Any) -> Run:
        """Submit and wait."""
        return self.finish(self.submit(*options, **settings))

    def environment(self, **programs: str) -> Path:
        """Make an environment for VENV whose programs are these shell scripts; `python` is ours if not named."""
        venv = Path(tempfile.mkdtemp(prefix="venv-", dir=self.folder))
        for name, script in {"python": f'exec {sys.executable} "$@"', **programs}.items():
            write_program(venv / "bin" / name, script)
        return hand_over(venv)


def make(name: str, nodes: int = 2, **settings: Any) -> Iterator[Place]:
    """Start a lab, of two nodes, with a copy of preflight/ in a folder that they share."""
    folder = Path(tempfile.mkdtemp(prefix="preflight-test-"))
    for file in FOLDER.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    hand_over(folder)
    tools = Path(tempfile.mkdtemp(prefix="preflight-tools-"))
    share = [folder, tools, *(path for path in (sys.prefix, sys.base_prefix) if path.startswith("/tmp/"))]
    try:
        # As on a real cluster, where SLURM itself takes minutes to notice a dead node.
        settings |= {"name": f"{name}{os.getpid()}", "share": share, "conf": ["SlurmdTimeout=300"]}
        with Lab(Wanted(nodes, cpus=4, gpus=2, **settings)) as lab:
            yield Place(lab, folder, tools)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(tools)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A healthy lab."""
    yield from make("prehealthy")


@pytest.fixture
def other_python(place: Place) -> Iterator[Callable[[str], Path]]:
    """Return a function that makes an environment whose `python` is another program on node2."""
    mounts = []

    def environment(command: str) -> Path:
        venv = place.environment(python=place.light_python, other=f'exec {command} "$@"')
        mount = ["mount", "--bind", str(venv / "bin/other"), str(venv / "bin/python")]
        place.lab.run(mount, node="node2", user="root", check=True)
        mounts.append(venv / "bin/python")
        return venv

    yield environment
    for mount in mounts:
        place.lab.run(["umount", str(mount)], node="node2", user="root", check=True)


@needs_lab
def test_healthy(place: Place) -> None:
    line = readme.command("preflight/README.md", "VENV=... sbatch run.slurm", {"~/project/.venv": sys.prefix})
    run = place.run(line=line, env={"SLURM_GPUS": "1"})  # of another job, in which this one was submitted
    assert {name: row[1] for name, row in run.rows.items()} == dict.fromkeys(ROWS, "ok"), run.log
    assert run.status == 0 and run.info["JobState"] == "COMPLETED"
    assert re.fullmatch(r"gloo \d+ MB/s, 2 tasks: \d+ ms for a step's 4.8 MB", run.rows["reduce"][0])
    assert re.fullmatch(r"gloo 1 KB in \d+\.\d\d ms, 1 MB \d+ MB/s,.* \d+ over a link", run.rows["sizes"][0]), run.log
    assert re.match(r"eth0 \d+ MB/s from node to node \(", run.rows["network"][0]), run.log
    assert run.rows["wheel"] == (f"no GPU in this job: the pins as they are, torch {PINS[0]}, cpu", "ok", "")
    assert not [name for name in os.listdir(place.folder) if name.startswith(".preflight")], "files are left"


@needs_lab
def test_per_process(place: Place) -> None:
    line = readme.command("preflight/README.md", "... --pattern per-process", {"~/project/.venv": sys.prefix})
    run = place.run("--ntasks-per-node=2", line=line)
    assert run.status == 0 and not run.failed, run.log
    assert "4 of 4" in run.rows["answers"][0] and "4 tasks" in run.rows["reduce"][0]


@needs_lab
def test_one_cpu(place: Place) -> None:
    run = place.run("--cpus-per-task=1", venv=place.light)
    assert run.rows["cpus"][1] == "WARN" and "--cpus-per-task" in run.rows["cpus"][2], run.log
    assert run.status == 1 and not run.failed  # a warning: not all is well


@needs_lab
def test_wrong_counts(place: Place) -> None:
    """Two faults in one job: fewer cores than it asks for, and GPUs that torch cannot see."""
    core = min(os.sched_getaffinity(0))
    venv = place.environment(python=f'exec taskset --cpu-list {core} {sys.executable} "$@"')
    run = place.run("--cpus-per-task=4", "--nodes=1", "--gpus-per-node=2", venv=venv)
    assert run.status == 1 and run.failed == {"cpus", "gpus"}, run.log
    assert "node1" in run.rows["cpus"][0]
    result, _, advice = run.rows["gpus"]
    assert "node1: 2 asked for, 0 in nvidia-smi (no driver), 0 usable in torch" in result
    assert "Found no NVIDIA driver" in result and "UV_TORCH_BACKEND=auto" in advice
    assert run.rows["wheel"] == ("unknown: nvidia-smi shows none of the GPUs asked for", "ok", "")


@needs_lab
@pytest.mark.parametrize(
    ("error", "build", "gpu", "backend"),
    [
        (RuntimeError(OLD_DRIVER), "CUDA 13.2", ("470.57.02", "", "Tesla T4"), "cu118"),
        (
            AssertionError("Torch not compiled with CUDA enabled"),
            "CPU only",
            ("550.54.15", "7.0", "Tesla V100-SXM2-16GB"),
            "cu126",
        ),
    ],
)
def test_torch_cannot_use_the_gpus(
    place: Place, error: Exception, build: str, gpu: tuple[str, str, str], backend: str
) -> None:
    """The driver shows two GPUs, and torch has no use for them: the driver is too old, or the wheel is for CPUs."""
    cuda = build.removeprefix("CUDA ") if "CUDA" in build else None
    venv = place.environment(**{"nvidia-smi": nvidia_smi(*gpu)})
    text = TORCH.format(folder=str(venv), error=repr(error), count=2 if cuda else 0, cuda=cuda)
    (venv / "torch.py").write_text(text)
    (venv / "bin/python").write_text(f'#!/bin/sh\nPYTHONPATH={venv} exec {sys.executable} "$@"\n')
    run = place.run("--nodes=1", "--gpus-per-node=2", venv=venv)
    assert run.failed == {"gpus"} and run.status == 1, run.log
    driver, capability, name = gpu
    start = f"node1: 2 asked for, 2 in nvidia-smi (driver {driver}), 0 usable in torch"
    assert re.match(rf"{re.escape(start)} \S+ \({build}\): {type(error).__name__}: ", run.rows["gpus"][0])
    assert str(error).split(".")[0] in run.rows["gpus"][0] and "http" not in run.rows["gpus"][0]
    torch, vision, _ = WHEELS[backend]
    command = f"UV_TORCH_BACKEND={backend} uv pip install"
    assert run.rows["gpus"][2] == f"{command} --reinstall torch=={torch} torchvision=={vision}"
    shown = f"2 {name} ({capability})" if capability else f"2 {name}"
    result, status, advice = run.rows["wheel"]
    assert result == f"{shown}, driver {driver}: torch {torch} and torchvision {vision}, {backend}" and status == "ok"
    assert f"{command} -r requirements.txt" in advice and run.rows["reduce"][1] == "ok"


@needs_lab
def test_refused(place: Place) -> None:
    """run.slurm says in one line that there is no environment, or image, or no number of cores of a task."""
    script = place.folder / "run.slurm"
    text = script.read_text()
    missing = place.submit(venv="nowhere")
    no_image = place.submit(env={"IMAGE": "nowhere.sif"})
    bare = place.environment(python3="exit 1", apptainer="exit 9")  # in place of an old one
    old = place.submit(env={"IMAGE": str(bare), "PATH": f"{bare}/bin:{os.environ['PATH']}"})
    header = "#SBATCH --cpus-per-gpu=2\n#SBATCH --gpus-per-node=2"
    script.write_text(text.replace("#SBATCH --cpus-per-task=4", header))
    try:
        words = ["sbatch", "--parsable", "run.slurm"]
        unbound = place.lab.run(words, cwd=place.folder, env={"VENV": sys.prefix}, check=True).stdout.strip()
    finally:
        script.write_text(text)
    lines = {
        missing: f"no {place.folder}/nowhere/bin/python: VENV",
        unbound: "no SLURM_CPUS_PER_TASK: ",
        no_image: f"no image {place.folder}/nowhere.sif",
        old: f"beside {bare} preflight.py needs a python3 of 3.8",
    }
    for job, line in lines.items():
        run = place.finish(job)
        assert run.status == 2 and run.log.startswith(f"run.slurm: error: {line}"), run.log
        assert run.log.count("\n") == 1


@needs_lab
def test_image(place: Place) -> None:
    """Torch is in the image only, and all the rest is as without; a stand-in for Apptainer, whose image is `python`."""
    stand_in = """echo "apptainer $*"
    while [ "$1" != "$IMAGE" ]; do [ "$1" != "${1#--pwd=}" ] && cd "${1#--pwd=}"; shift; done
    shift; exec "$@" """
    venv = place.environment(apptainer=stand_in, python3=f'exec {PYTHON} "$@"')
    (venv / "example.sif").touch()
    line = readme.command("preflight/README.md", "IMAGE=...", {"~/project": f"{venv}/nothing/.."})
    env = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VENV": "nowhere"}
    jobs = [place.submit(*options, line=line, env=env) for options in ((), ("--gpus-per-node=2", "--nodes=1"))]
    run, gpus = map(place.finish, jobs)
    assert run.status == 0 and {name: row[1] for name, row in run.rows.items()} == dict.fromkeys(ROWS, "ok"), run.log
    assert re.search(rf", torch {re.escape(version('torch'))}\S*, {venv}/example.sif$", run.rows["python"][0])
    options = f"--bind={place.folder} --pwd={place.folder} {venv}/example.sif python"
    assert run.log.count(f"apptainer --quiet exec {options} ") == 2
    assert gpus.failed == {"gpus"} and f"apptainer --quiet exec --rocm {options} " in gpus.log  # there is no nvidia-smi
    (venv / "bin/apptainer").write_text("#!/bin/sh\necho no such image >&2\nexit 255\n")
    run = place.run(line=line, env=env)
    assert run.failed == {"python", "reduce"} and "ended with status 255" in run.rows["python"][0], run.log


@needs_lab
@pytest.mark.parametrize(
    "options",
    [["--ntasks-per-node=2"], pytest.param(["--ntasks=3", "--ntasks-per-node=2"], marks=pytest.mark.runs("weekly"))],
)
def test_tasks_for_per_node(place: Place, options: list[str]) -> None:
    run = place.run(*options, venv=place.light)
    assert run.failed == {"tasks"} and run.status == 1, run.log
    assert "--ntasks-per-node=1" in run.rows["tasks"][2] and "--pattern per-process" in run.rows["tasks"][2]


@needs_lab
def test_too_few_files(place: Place) -> None:
    """A limit of each node's tasks is named; that they may lock little memory does not matter without InfiniBand."""
    run = place.run(venv=place.environment(python=f"ulimit -n 258; ulimit -l 64; {place.light_python}"))
    assert run.failed == {"limits"} and run.status == 1, run.log
    assert run.rows["limits"][0] == "too low: node1: 258 open files; node2: 258 open files"
    assert run.rows["limits"][2] == "ask the cluster's staff: LimitNOFILE of slurmd's service"


@needs_lab
def test_folder_not_shared(place: Place) -> None:
    hide = ["mount", "-t", "tmpfs", "tmpfs", str(place.folder)]
    place.lab.run(hide, node="node2", cwd="/", user="root", check=True)
    try:
        run = place.run(venv=place.light)
    finally:
        place.lab.run(["umount", str(place.folder)], node="node2", user="root", check=True)
    assert run.failed == {"shared"} and run.status == 1, run.log
    assert "node2 does not see the files of node1" in run.rows["shared"][0]
    assert str(place.folder) in run.rows["shared"][0] and "share" in run.rows["shared"][2]


@needs_lab
def test_another_python(place: Place, other_python: Callable[[str], Path]) -> None:
    run = place.run(venv=other_python(PYTHON))
    assert run.failed >= {"python"} and run.status == 1, run.log
    assert f"node2: Python {sys.version.split()[0]}" in run.rows["python"][0]
    assert "VENV" in run.rows["python"][2]
    assert run.rows["names"][1] == run.rows["connections"][1] == run.rows["shared"][1] == "ok"


@needs_lab
def test_port_taken(place: Place) -> None:
    job = place.submit("--hold", venv=place.light)
    code = f"import socket, time; s = socket.create_server(('', {10000 + int(job) % 20000})); print(flush=True)"
    words = place.lab.command([sys.executable, "-c", code + "; time.sleep(1000)"], node="node1", cwd="/")
    with running(words) as other:
        read_line(other, 300)
        place.lab.run(["scontrol", "release", job], check=True)
        run = place.finish(job)
    assert run.failed == {"port"} and run.status == 1, run.log
    assert "node1" in run.rows["port"][0] and "submit again" in run.rows["port"][2]


@needs_lab
def test_one_gigabit(place: Place) -> None:
    """Every node sends no more than 1 GbE would."""
    shape = ["qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "900mbit", "burst", "256kb", "latency", "50ms"]
    try:
        for node in place.lab.nodes:
            done = place.lab.run(["tc", *shape], node=node, user="root")
            if done.returncode != 0:
                pytest.skip(f"this machine cannot slow down a network: {done.stderr}")
        run = place.run()
    finally:
        for node in place.lab.nodes:
            place.lab.run(["tc", "qdisc", "del", "dev", "eth0", "root"], node=node, user="root")
    assert not run.failed and run.status == 1, run.log
    result, status, advice = run.rows["reduce"]
    assert status == "WARN" and "no faster than 1 GbE" in advice and "GLOO_SOCKET_IFNAME" in advice


@pytest.fixture(scope="module")
def three() -> Iterator[Place]:
    """A healthy lab of three nodes."""
    yield from make("prethree", nodes=3)


@needs_lab
def test_slow_node(three: Place) -> None:
    """The link of one of three nodes is slow: it is named, and the others are not."""
    faults.slow(three.lab, "node3", "100mbit")
    try:
        run = three.run("--nodes=3", venv=three.light)
    finally:
        faults.heal(three.lab, "node3")
    result, status, advice = run.rows["network"]
    assert status == "WARN" and "--exclude" in advice and not run.failed, run.log
    assert (speed := re.match(r"node3 has (\d+) MB/s at most, to and from any other; else eth0 \d+ MB/s", result)), (
        run.log
    )
    assert 0 < int(speed[1]) <= 12.5  # 100 Mbit/s is 12.5 MB/s; how much less it is depends on the machine


@needs_lab
def test_wrong_interface(three: Place) -> None:
    """Host names lead to a slow network beside a fast one: that is named, and chosen the row is well."""
    nodes = ("node1", "node2")
    first, second = (str(three.lab.pid_of(node)) for node in nodes)
    cable = ["ip", "link", "add", "ib0", "type", "veth", "peer", "name", "ib0", "netns", second]
    subprocess.run(["nsenter", f"--target={first}", "--net", *cable], check=True, timeout=300)
    try:
        for number, node in enumerate(nodes, 1):
            for words in (f"address add 10.211.0.{number}/24 dev ib0", "link set ib0 up"):
                three.lab.run(["ip", *words.split()], node=node, user="root", check=True)
            faults.slow(three.lab, node, "50mbit")
        run = three.run("--nodelist=node[1-2]", venv=three.light)
        chosen = three.run("--nodelist=node[1-2]", venv=three.light, env={"GLOO_SOCKET_IFNAME": "ib0"})
    finally:
        three.lab.run(["ip", "link", "delete", "ib0"], node="node1", user="root")
        for node in nodes:
            faults.heal(three.lab, node)
    result, status, advice = run.rows["network"]
    assert status == "WARN" and "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in advice, run.log
    found = re.fullmatch(r"a job runs over eth0, (\d+) MB/s, while ib0 has (\d+)", result)
    assert found and 0 < int(found[1]) <= 6.25 and int(found[2]) > 2 * int(found[1]), run.log
    assert chosen.rows["network"][1] == "ok" and chosen.rows["network"][0].startswith("ib0 "), chosen.log


@needs_lab
def test_cut_off(place: Place) -> None:
    """The cable of node2 is pulled while its task imports torch."""
    job = place.submit(venv=place.light, env={"SECONDS": "10"})
    log, marker = place.folder / f"preflight-{job}.out", place.folder / f".preflight-{job}.0" / "node2"
    try:
        wait_until(marker.exists, 300, "the file of node2")
        faults.cut(place.lab, "node2")
        start = time.monotonic()
        wait_until(lambda: "preflight: FAIL" in log.read_text(), 300, "the table")
        print(f"named after {time.monotonic() - start:.0f} s")
    finally:
        faults.heal(place.lab, "node2")
    run = place.finish(job)
    place.lab.wait_for_node("node2", "idle")
    assert {"answers", "reduce"} <= run.failed and run.status != 0, run.log
    assert "node2" in run.rows["answers"][0] and "--exclude" in run.rows["answers"][2]


@needs_lab
def test_cancelled(place: Place) -> None:
    """What ends a job early ends srun too, so the table goes to a file of its own."""
    job = place.submit(venv=place.light, env={"SECONDS": "30"})
    wait_until((place.folder / f".preflight-{job}.0" / "node2").exists, 300, "the file of node2")
    place.lab.run(["scancel", job], check=True)
    place.lab.wait_for_job(job)
    text = (place.folder / f"preflight-{job}-early.out").read_text()
    assert "ended early by SLURM" in text and "preflight: FAIL: answers" in text
    assert not list(place.folder.glob(".preflight*"))


@needs_lab
def test_bad_option(place: Place) -> None:
    run = place.run(line=f"VENV={place.light} sbatch run.slurm --pattern diagonal")
    assert run.status == 2
    assert run.log.count("preflight.py: error: ") == 1 and "Traceback" not in run.log


@needs_lab
@pytest.mark.parametrize("where", ["node1", pytest.param("node2", marks=pytest.mark.runs("weekly"))])
def test_loopback_answer(where: str) -> None:
    """On a node, the name of node1 is a loopback address: its own line in /etc/hosts, or another node's."""
    for place in make(f"preloop{where[-1]}", hosts={where: {"node1": "127.0.1.1"}}):
        run = place.run(venv=place.light)
    assert run.failed >= {"names"} and run.status == 1, run.log
    assert f"on {where} node1 is 127.0.1.1" in run.rows["names"][0]
    assert "/etc/hosts" in run.rows["names"][2]
    if where == "node2":
        assert "node2 cannot connect to node1" in run.rows["connections"][0]
    assert run.rows["shared"][1] == run.rows["python"][1] == "ok"


# Without a lab: what no lab can show.


def load(name: str) -> ModuleType:
    """Import a module of preflight/, which is no package."""
    return outputs.import_file(FOLDER / f"{name}.py")


@pytest.fixture(scope="module")
def verdict() -> ModuleType:
    """The module that judges."""
    return load("verdict")


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    """The module that collects the facts."""
    return load("preflight")


@pytest.fixture
def job() -> SimpleNamespace:
    """What the judges want to know of a job."""
    return SimpleNamespace(nodes=["node1", "node2"], world=2, port=10007, pattern="per-node")


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, preflight: ModuleType) -> SimpleNamespace:
    """A job of 3 tasks, all on this machine, whose task 0 has a free port."""
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    monkeypatch.setattr(preflight, "ROUNDS", {"hello": 8})  # so that a guest gives up soon
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return SimpleNamespace(id=7, rank=1, world=3, nodes=["node1"], port=port, token=b"0123456789abcdef")


def until_closed(connection: socket.socket) -> bytes:
    """Return what the other end sends until it closes the connection."""
    connection.settimeout(10)
    received = b""
    try:
        while piece := connection.recv(4096):
            received += piece
    except ConnectionResetError:  # it has not read all that was sent
        pass
    return received


def test_strangers_post_nothing(preflight: ModuleType, loopback: SimpleNamespace) -> None:
    """Task 0 hangs up on whoever does not know the secret, does not tell it, and takes nothing from them."""
    head = preflight.Head(loopback)
    facts = json.dumps(["hello", 1, {"node": "node1"}]).encode()
    greeting = b""
    for text in (facts, b"0" * 64 + b" " + facts, b" " + facts, loopback.token + b" " + facts, b"\xff\0", b""):
        with socket.create_connection(("127.0.0.1", loopback.port), timeout=300) as stranger:
            stranger.sendall(text + b"\n")
            greeting = until_closed(stranger)
            assert b"time" in greeting and loopback.token not in greeting
    with socket.create_connection(("127.0.0.1", loopback.port), timeout=300) as stranger:
        stranger.sendall(greeting)  # signed, but nothing that a task posts
        until_closed(stranger)
    assert not head.posts and not head.connections and head.lost <= {-1}


def test_guests_of_another_job(preflight: ModuleType, loopback: SimpleNamespace) -> None:
    """A task of another job gives up, and so does one of this job at the port of a stranger, who learns no secret."""
    head = preflight.Head(loopback)
    with pytest.raises(ConnectionError, match="cannot reach task 0"):
        preflight.Guest(SimpleNamespace(**{**vars(loopback), "token": b"another"}))
    assert not head.posts
    heard = []

    def pretend(connection: socket.socket) -> None:
        with connection:
            connection.sendall(json.dumps({"job": loopback.id, "time": 0}).encode() + b"\n")
            heard.append(until_closed(connection))

    loopback.port = preflight.listen(0, pretend)
    with pytest.raises(ConnectionError, match="cannot reach task 0"):
        preflight.Guest(loopback)
    assert heard and not any(heard)


def test_guests_of_this_job(preflight: ModuleType, loopback: SimpleNamespace) -> None:
    """Those who know the secret exchange their facts, as the tasks that this job has and as no other."""
    head = preflight.Head(loopback)
    for rank in (-1, 0, 3, "1", None, [1]):
        guest = preflight.Guest(SimpleNamespace(**{**vars(loopback), "rank": rank}))
        with pytest.raises(ConnectionError):
            guest.exchange("hello", {"node": "node9"})
        assert not head.posts and not head.connections and head.lost <= {-1}
    answers = {}
    guests = {rank: preflight.Guest(SimpleNamespace(**{**vars(loopback), "rank": rank})) for rank in (1, 2)}
    work = [
        threading.Thread(target=lambda rank=rank: answers.update({rank: guests[rank].exchange("hello", rank * 10)}))
        for rank in guests
    ]
    for thread in work:
        thread.start()
    facts = {0: 0, 1: 10, 2: 20}
    assert head.exchange("hello", 0) == facts
    for thread in work:
        thread.join(300)
    assert answers == {1: facts, 2: facts}


@pytest.mark.parametrize(
    ("asked", "per_task", "driver", "cuda", "status", "advice"),
    [
        (4, None, 4, 4, "ok", ""),
        (0, None, 0, 0, "ok", ""),
        (4, "1", 1, 1, "FAIL", "#SBATCH --gpus-per-node"),
        (4, None, 4, 0, "FAIL", "cluster's staff about"),
        (4, None, 4, "no kernel image is available", "FAIL", "Which PyTorch"),
        (4, "1", 4, 4, "ok", ""),
        (0, None, 4, 4, "WARN", "#SBATCH --gpus-per-node"),
    ],
)
def test_gpus(
    verdict: ModuleType,
    job: SimpleNamespace,
    asked: int,
    per_task: str | None,
    driver: int,
    cuda: int | str,
    status: str,
    advice: str,
) -> None:
    report = {"node": "node1", "asked_gpus": asked, "GPUS_PER_TASK": per_task, "TRES_PER_TASK": None}
    torch = {"torch": "2.15.0", "build": "CUDA 13.2", "cuda": 0, "gpu_problem": cuda}
    torch |= {"cuda": cuda, "gpu_problem": ""} if isinstance(cuda, int) else {}
    row = verdict.judge("gpus", [report | torch | {"gpus": ["580.65"] * driver}], job)
    assert row[1] == status and advice in row[2]


@pytest.mark.parametrize(("asked", "nodes", "status"), [(1, 1, "ok"), (2, 1, "FAIL"), (1, 2, "FAIL")])
def test_slices(
    verdict: ModuleType, job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: int, nodes: int, status: str
) -> None:
    """Of a GPU's slices (MIG), of which a process sees the first, a job can have one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(["MIG-0f0f0f0f-0000-0000-0000-000000000000"] * asked))
    report = {"asked_gpus": asked, "GPUS_PER_TASK": None, "TRES_PER_TASK": None, "cuda": 1, "gpus": ["580.65"]}
    report |= {"torch": "2.15.0", "build": "CUDA 13.2", "gpu_problem": ""}
    row = verdict.judge("gpus", [report | {"node": f"node{number}"} for number in range(nodes)], job)
    assert row[1] == status and ("one slice with --nodes=1" in row[2]) == (status == "FAIL")


ENOUGH = {"files": (1024, 524288), "locked": (8 << 20, 8 << 20), "processes": (127000, 127000), "pids": -1}
FILES, THREADS_ADVICE = "LimitNOFILE of slurmd's service", "LimitNPROC of slurmd's service"
LIMITS: dict[str, tuple[dict[str, Any], str, list[str]]] = {  # what differs from that; the status; what the row says
    "usual": ({}, "ok", ["524288 open files, 127000 processes and threads, 8 MB of locked memory"]),
    "none": (
        {"files": (-1, -1), "processes": (-1, -1), "locked": (-1, -1)},
        "ok",
        ["any number of open files, any number of processes and threads, any amount of locked memory"],
    ),
    "few files": ({"files": (256, 1024)}, "WARN", ["too low: node1: 1024 open files", FILES]),
    "soft only": ({"files": (64, 4096)}, "ok", ["4096 open files"]),
    "too few files": ({"files": (271, 271)}, "FAIL", ["271 open files", FILES]),
    "few processes": ({"processes": (1024, 2048)}, "WARN", ["1024 processes and threads", THREADS_ADVICE]),
    "few, by oneself": ({"processes": (1024, 16384)}, "WARN", ["1024 proc", "ulimit -Su $(ulimit -Hu) in run.slurm"]),
    "few, without a hard limit": ({"processes": (1024, -1)}, "WARN", ["ulimit -Su $(ulimit -Hu) in run.slurm"]),
    "too few processes": ({"processes": (259, 259)}, "FAIL", ["259 processes and threads", THREADS_ADVICE]),
    "none at all": ({"processes": (0, 0)}, "FAIL", ["0 processes and threads"]),
    "a control group": ({"processes": (-1, -1), "pids": 1000}, "WARN", ["1000 processes", "TasksMax"]),
    "a small control group": ({"processes": (-1, -1), "pids": 100}, "FAIL", ["100 processes", "TasksMax"]),
    "a large control group": ({"pids": 9000}, "ok", ["9000 processes and threads"]),
    "locked": ({"rdma": ["mlx5_0"]}, "WARN", ["8 MB of locked memory beside mlx5_0", "LimitMEMLOCK=infinity"]),
    "64 KB": ({"rdma": ["mlx5_0"], "locked": (65536, 65536)}, "WARN", ["64 KB of locked memory", "LimitMEMLOCK"]),
    "locked, by oneself": (
        {"rdma": ["mlx5_0"], "locked": (65536, -1)},
        "WARN",
        ["64 KB of locked memory", "ulimit -l $(ulimit -Hl) in run.slurm"],
    ),
    "enough for RDMA": ({"rdma": ["mlx5_0"], "locked": (2**37, 2**37)}, "ok", ["131072 MB of locked memory"]),
    "RDMA without a limit": ({"rdma": ["hfi1_0"], "locked": (-1, -1)}, "ok", ["any amount of locked memory"]),
    "two": ({"files": (99, 99), "pids": 3000}, "FAIL", ["99 open files; node1: 3000 proc", "LimitNOFILE", "TasksMax"]),
}


@pytest.mark.parametrize("case", LIMITS)
def test_limits(verdict: ModuleType, job: SimpleNamespace, case: str) -> None:
    """What is too low is named with the node, and with who can correct it: 2 nodes with 4 GPUs and 4 cores each."""
    other, status, texts = LIMITS[case]
    report = {"asked_gpus": 4, "cpus": 4, "STEP_TASKS_PER_NODE": "1(x2)"}
    reports = [report | {"node": "node1", "limits": ENOUGH | other}, report | {"node": "node2", "limits": ENOUGH}]
    row = verdict.judge("limits", reports, job)
    assert row[1] == status and all(text in f"{row[0]} {row[2]}" for text in texts), row
    assert "node2" not in row[0]


def addresses() -> list[str]:
    """Return addresses of this machine: a container may have none of IPv6."""
    found = ["127.0.0.1", "localhost"]
    for address in ("::1", "::ffff:127.0.0.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as query:
            query.bind((address, 0))
            found.append(address)
    return found


@pytest.mark.parametrize("address", addresses())
def test_either_network(
    preflight: ModuleType, loopback: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Tasks reach task 0, and nodes each other, over IPv4 or IPv6: a cluster may have either alone."""
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", address)
    head = preflight.Head(loopback)
    guest = preflight.Guest(loopback)
    preflight.send(guest.connection, loopback.token, ["hello", 1, "here"])
    wait_until(lambda: head.posts["hello"], 300, "what the guest has posted")
    assert head.posts["hello"] == {1: "here"}
    port = preflight.listen(0, preflight.tell_node)
    with socket.create_connection((address, port), timeout=300) as connection:
        assert connection.makefile().readline() == f"{preflight.NODE}\n"


V100, H100, B200 = ("7.0", "Tesla V100-SXM2-32GB"), ("9.0", "NVIDIA H100 80GB HBM3"), ("10.0", "NVIDIA B200")
# The rows of the table that nodes are looked up in, by UV_TORCH_BACKEND; the versions stand there.
TABLE = load("verdict")
WHEELS = {wheel[2]: wheel for *_, wheel in TABLE.NVIDIA if wheel}
CU118, CU126, CU128 = (WHEELS[backend] for backend in ("cu118", "cu126", "cu128"))
ROCM, PINS, CPU = TABLE.AMD, TABLE.PINS, TABLE.CPU
MADE_FOR = {"V100": "7.0", "B200": "10.0"}  # GPUs that the table in docs/install.md names, among others


def node(*gpus: tuple[str, str, str], amd: bool = False, problem: str = "", name: str = "node1") -> dict[str, Any]:
    """Return the report of a node with GPUs, each (driver, capability, name)."""
    found = {"gpus": [list(gpu) for gpu in gpus], "amd": amd, "problem": problem}
    return {"node": name, "asked_gpus": len(gpus), "wheel": found}


@pytest.mark.parametrize(
    ("report", "wheel", "what"),
    [
        (node(amd=True), ROCM, "AMD"),
        (node(), CPU, "no GPU in this job"),
        (node(("440.33.01", "", "Tesla V100-PCIE-16GB")), None, "1 Tesla V100-PCIE-16GB, driver 440.33.01"),
        (node(("450.80.02", *V100)), CU118, "1 Tesla V100-SXM2-32GB (7.0), driver 450.80.02"),
        (node(("580.95.05", "", "GTX 1080 Ti")), CU126, "1 GTX 1080 Ti, driver 580.95.05"),
        (node(("580.95.05", "", "GTX 1650")), PINS, "1 GTX 1650, driver 580.95.05"),
        (node(*[("550.54.15", *H100)] * 2), CU126, "2 NVIDIA H100 80GB HBM3 (9.0), driver 550.54.15"),
        (node(("615.10", *B200), amd=True), PINS, "1 NVIDIA B200 (10.0), driver 615.10"),
        (
            node(("580.95.05", *H100), ("580.95.05", *V100)),
            CU126,
            "1 NVIDIA H100 80GB HBM3 (9.0) and 1 Tesla V100-SXM2-32GB (7.0), driver 580.95.05",
        ),
    ],
)
def test_wheel(
    verdict: ModuleType, job: SimpleNamespace, report: dict[str, Any], wheel: tuple | None, what: str
) -> None:
    """Each row of the table, for information; the advice is a command with that row's backend, or none."""
    text, status, advice = verdict.judge("wheel", [report, report | {"node": "node2"}], job)
    assert verdict.fitting([report["wheel"]]) == wheel and status == "ok"
    if wheel is None:
        assert text == f"{what}: too old for any PyTorch of today" and "cluster's staff" in advice
    elif wheel in (PINS, CPU):
        assert text.startswith(f"{what}: the pins as they are, torch {wheel[0]}") and not advice
        assert text.endswith(", cpu") == (wheel == CPU)
    else:
        assert text == f"{what}: torch {wheel[0]} and torchvision {wheel[1]}, {wheel[2]}"
        assert f"UV_TORCH_BACKEND={wheel[2]} uv pip install -r requirements.txt" in advice
        assert ("the site's own image or module first" in advice) == (wheel == ROCM)


def test_wheel_is_the_page_and_the_pins(verdict: ModuleType) -> None:
    """docs/install.md names the same builds for the same drivers and GPUs; the pins are those of the examples."""
    page = ROOT / "docs" / "install.md"
    section = page.read_text().split("\n## Which PyTorch\n")[1].split("\n## ")[0]
    (install,) = re.findall(r"^(UV_TORCH_BACKEND=cu126 .*?) +#", section, re.MULTILINE)
    assert f"{install} ({page.relative_to(ROOT)})" in verdict.install(CU126, "requirements.txt")
    named = set()
    for row in re.findall(r"^\| (?!node|---)(.+) \| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE):
        backend = re.search(r"`([\w.]+)`", row[3])
        assert backend or row[3] == "PyPI's", row
        wheel = (*(re.match(r"[\d.]+(?=,|$)", version)[0] for version in row[1:3]), backend[1] if backend else "")
        named.add(wheel)
        drivers = re.search(r"driver (\d+) (?:to (\d+)|or newer)", row[0])
        gpu = next((name for name in MADE_FOR if name in row[0]), "H100")
        for driver in filter(None, drivers.groups() if drivers else [None]):
            assert verdict.fitting([node((f"{driver}.1", MADE_FOR.get(gpu, "9.0"), gpu))["wheel"]]) == wheel, row
    assert named == {wheel for _, _, wheel in verdict.NVIDIA if wheel} | {verdict.AMD, verdict.CPU}
    files = [file.read_text() for file in ROOT.glob("examples/*/requirements.txt")]
    pins = {match for text in files for match in re.findall(r"^(torch(?:vision)?)==(\S+)", text, re.MULTILINE)}
    assert pins == {("torch", verdict.PINS[0]), ("torchvision", verdict.PINS[1])}


@pytest.mark.parametrize(
    ("nodes", "world", "speed", "status"),
    [(2, 2, 117, "WARN"), (8, 8, 60, "WARN"), (1, 2, 99, "ok"), (2, 2, 1100, "ok")],
)
def test_slow_network(
    verdict: ModuleType, job: SimpleNamespace, nodes: int, world: int, speed: float, status: str
) -> None:
    """What 1 GbE gives is a warning: 117 MB/s between two nodes, and about half of it in a ring of many."""
    job.nodes, job.world = [f"node{n}" for n in range(nodes)], world
    row = verdict.judge("reduce", [{"node": "node1", "reduce": {"gloo": speed}}], job)
    assert row[1] == status and f"{4800 / speed:.0f} ms for a step's 4.8 MB" in row[0]
    assert verdict.judge("reduce", [{"node": "node1", "reduce": {"gloo": 60, "nccl": 1100}}], job)[1] == "ok"


def network(
    rates: dict[tuple[str, str], float | None], other: float = 0, mbit: int = 0, used: str = "eth0"
) -> list[dict]:
    """Return the reports of nodes that have sent to each other at these rates, and at another over ib0."""
    reports = {}
    for pair, rate in rates.items():
        for node, target in (pair, pair[::-1]):
            facts = {"interfaces": {name: {"mbit": mbit} for name in ("eth0", "ib0")}, "used": used, "rates": {}}
            report = reports.setdefault(node, {"node": node, "network": facts})
            over = {"eth0": {"error": "TimeoutError: timed out"} if rate is None else rate}
            report["network"]["rates"][target] = over | ({"ib0": other} if other else {})
    return list(reports.values())


EVEN = {("node1", "node2"): 900.0, ("node1", "node3"): 950.0, ("node2", "node3"): 1000.0}
NETWORKS: dict[str, tuple[list[dict], str, list[str]]] = {  # reports, status, what is said
    "even": (network(EVEN), "ok", ["eth0 1000 MB/s from node to node (at most: 1 GbE 118 and 10 GbE 1,177)"]),
    "a bit slower": (network(EVEN | {("node1", "node2"): 600.0}), "ok", ["eth0 1000"]),
    "slow pair": (network(EVEN | {("node1", "node2"): 100.0}), "WARN", ["node1 and node2 have 100 MB/s; else eth0"]),
    "slow node": (
        network(
            {pair: rate / (10 if "node3" in pair else 1) for pair, rate in EVEN.items()}
            | {("node1", "node4"): 900.0, ("node2", "node4"): 900.0, ("node3", "node4"): 90.0}
        ),
        "WARN",
        ["node3 has 100 MB/s at most, to and from any other; else eth0"],
    ),
    "two nodes": (network({("node1", "node2"): 5.0}), "ok", ["eth0 5 MB/s from node to node (at most: 1 GbE 118)"]),
    "other interface": (
        network(EVEN, other=3000.0),
        "WARN",
        ["over eth0, 1000 MB/s, while ib0 has 3000", "IFNAME=ib0"],
    ),
    "about as fast": (network(EVEN, other=1500.0), "ok", ["eth0 1000"]),
    "slower than its name": (
        network({("node1", "node2"): 110.0}, mbit=10_000),
        "WARN",
        ["eth0 is one of 10000 Mbit/s"],
    ),
    "one stream is not all": (network({("node1", "node2"): 2000.0}, mbit=200_000), "ok", ["eth0 2000 MB/s"]),
    "no answer": (network({("node1", "node2"): None}), "WARN", ["node1 to node2 over eth0: TimeoutError"]),
    "not there": (network(EVEN, used="ib7"), "WARN", ["not measured over ib7; there are eth0, ib0"]),
    "one node": ([{"node": "node1", "network": {"interfaces": {}, "used": "", "rates": {}}}], "ok", ["one node"]),
    "IPv6 alone": (
        [{"node": f"node{n}", "network": {"interfaces": {}, "used": "", "rates": {}}} for n in (1, 2)],
        "ok",
        ["not measured: it needs IPv4"],
    ),
}


@pytest.mark.parametrize(("reports", "status", "texts"), NETWORKS.values(), ids=NETWORKS)
def test_network(verdict: ModuleType, job: SimpleNamespace, reports: list[dict], status: str, texts: list[str]) -> None:
    """A slow node is named once, not with each of its pairs; of two nodes none is the slow one."""
    row = verdict.judge("network", reports, job)
    assert row[1] == status and all(text in f"{row[0]} {row[2]}" for text in texts), row
    assert ("node4" in row[0]) is False


def test_sizes(verdict: ModuleType, job: SimpleNamespace) -> None:
    """The times of an all-reduce become a time for the smallest, MB/s for others, and what a link carries for it."""
    job.world = 4
    seconds = {1024: 0.0002, 4096: 0.0003, 2**20: 0.002, 2**28: 0.5}
    row = verdict.judge("sizes", [{"node": "node1", "sizes": {"gloo": seconds}}], job)
    assert row == ("gloo 1 KB in 0.20 ms, 1 MB 524 MB/s, 256 MB 537 MB/s, 805 over a link", "ok", "")
    assert verdict.judge("sizes", [{"node": "node1", "sizes": {}}], job)[1] == "ok"


def test_a_check_that_raises_is_a_row(verdict: ModuleType, job: SimpleNamespace) -> None:
    good = {"node": "node1", "connections": {"node2": "node2"}}
    broken = {"node": "node2", "connections": {"error": "OSError: no luck"}}
    assert verdict.judge("connections", [good, broken], job)[:2] == ("node2: OSError: no luck", "FAIL")
    result, status, _ = verdict.judge("names", [{"node": "node1", "names": 3}], job)
    assert status == "FAIL" and "AttributeError" in result
    assert verdict.judge("names", [], job)[1] == "FAIL"


def test_silent_tasks_are_named(verdict: ModuleType, job: SimpleNamespace) -> None:
    """A task that never spoke can only be known by its node, one that was lost later by its own report."""
    text, status = verdict.table({0: {"node": "node1"}}, {1}, job)
    assert status == 1 and "1 of 2 tasks; silent: node2" in text
    text, status = verdict.table({0: {"node": "node1"}, 1: {"node": "node2"}}, {1}, job, "scancel")
    assert status == 1 and "silent: node2; scancel" in text
