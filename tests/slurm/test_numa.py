"""NUMA=node and the like: torchrun keeps each process on the cores near its GPU.

The node is imitated: its GPUs, and what /sys says of them and of its CPUs. The program numactl is a stand-in.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import edits
from harness.jobs import Job, stub, submit
from lab import Lab

# A CPU is a thread of a core, and has the numbers of that core, and of its cache, NUMA node and processor.
Cpus = dict[int, tuple[int, int, int, int]]
IMITATED = """
import os
from pathlib import Path
from types import SimpleNamespace

from torch.numa import binding

root = str(Path(__file__).parent)
gpus = len(os.listdir(f"{root}/sys/bus/pci/devices"))
accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: "cuda", device_count=lambda: gpus)
module = SimpleNamespace(
    get_device_properties=lambda gpu: SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu, pci_device_id=0)
)
binding.torch = SimpleNamespace(accelerator=accelerator, get_device_module=lambda device: module)
binding.open = lambda path: open(root + path if path.startswith("/sys") else path)


class System:  # os, which finds the imitated files
    def __getattr__(self, name):
        return getattr(os, name)

    def listdir(self, path):
        return os.listdir(root + path if path.startswith("/sys") else path)


binding.os = System()
"""
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m torch.distributed.run" ] || exec {python} "$@"
shift 2
exec {python} {folder}/torchrun.py "$@"
"""
NUMACTL = """#!/bin/sh
cpus=${1#--physcpubind=}
shift
exec taskset --cpu-list "$cpus" "$@"
"""


def imitate(folder: Path, gpus: list[int], cpus: Cpus) -> Path:
    """Write what torchrun reads of a node whose GPUs are in these NUMA nodes, and how to import it; return the folder.

    It has the form of an environment, whose torchrun finds that node.
    """
    files: dict[str, object] = {"node/possible": ",".join(sorted({str(numa) for _, _, numa, _ in cpus.values()}))}
    for numa in {numa for _, _, numa, _ in cpus.values()}:
        files[f"node/node{numa}/cpulist"] = ",".join(str(cpu) for cpu, places in cpus.items() if places[2] == numa)
    for cpu, (core, cache, _, socket) in cpus.items():
        threads = ",".join(str(other) for other, places in cpus.items() if places[0] == core)
        sharing = ",".join(str(other) for other, places in cpus.items() if places[1] == cache)
        place = f"cpu/cpu{cpu}"
        files |= {f"{place}/topology/physical_package_id": socket, f"{place}/topology/thread_siblings_list": threads}
        for index, (level, kind, shared) in enumerate([(1, "Data", threads), (3, "Unified", sharing)]):
            values = {"level": level, "type": kind, "shared_cpu_list": shared}
            files |= {f"{place}/cache/index{index}/{name}": value for name, value in values.items()}
    paths = {f"sys/devices/system/{name}": text for name, text in files.items()}
    paths |= {f"sys/bus/pci/devices/0000:{gpu:02x}:00.0/numa_node": numa for gpu, numa in enumerate(gpus)}
    paths |= {"imitated.py": IMITATED, "bin/numactl": NUMACTL}
    paths["torchrun.py"] = "import imitated\nfrom torch.distributed.run import main\nmain()\n"
    paths["bin/python"] = PYTHON.format(python=sys.executable, folder=folder)
    for name, text in paths.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}")
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)
    return folder


LOOK = """
import os
os.write(1, f"{os.environ['LOCAL_RANK']} runs on {os.sched_getaffinity(0)}\\n".encode())
"""


@pytest.mark.slurm
@pytest.mark.only("deepspeed", "fsdp", "lora", "torchrun_multinode", "torchrun_vision")
@pytest.mark.runs("one")
def test_job(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """Each process runs on the CPU near its GPU, here in turn; without NUMA= on all."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cpus = {first: (0, 0, 0, 0), second: (1, 1, 1, 1)}
    venv = imitate(tmp_path / "venv", [1, 0], cpus)
    options = ("--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2")
    jobs = {
        name: submit(
            lab, example, stub(source, tmp_path / name / example, LOOK), options=options, VENV=str(venv), **more
        )
        for name, more in {"bound": {"NUMA": "node"}, "free": {}}.items()
    }
    ran = {}
    for name, job in jobs.items():
        assert job.wait().shown["JobState"] == "COMPLETED", job.log
        ran[name] = {rank: ast.literal_eval(found) for rank, found in re.findall(r"(\d) runs on (\{.*\})", job.log)}
    assert ran["bound"] == {"0": {second}, "1": {first}}
    assert ran["free"].keys() == {"0", "1"} and all(found >= {first, second} for found in ran["free"].values())


@pytest.mark.slurm
@pytest.mark.only("deepspeed", "fsdp", "lora", "torchrun_multinode", "torchrun_vision")
@pytest.mark.runs("one")
def test_refused(lab: Lab, example: str, source: Path, tmp_path: Path) -> None:
    """Another word, no GPUs, no numactl, a PyTorch that is too old: one line each, before any process starts."""
    (tmp_path / "old" / "torch").mkdir(parents=True)
    (tmp_path / "old" / "torch" / "__init__.py").touch()
    gpus = ("--gpus-per-node=1",)
    cases: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
        "word": (gpus, {"NUMA": "near"}, "NUMA=near: it has to be node, socket, exclusive or core-complex"),
        "no GPUs": ((), {"NUMA": "node"}, "this job has no GPUs"),
        "numactl": (gpus, {"NUMA": "node"}, "NUMA=node needs the program numactl"),
        "old": (gpus, {"NUMA": "node", "PYTHONPATH": str(tmp_path / "old")}, "NUMA=node needs PyTorch 2.9 or newer"),
    }
    jobs: dict[str, Job] = {}
    for name, (options, variables, _) in cases.items():
        folder = stub(source, tmp_path / name / example)
        edits.edit(folder / "plumbing" / "job.sh", "shutil.which('numactl')", "shutil.which('no-numactl')")
        jobs[name] = submit(lab, example, folder, options=options, **variables)
    for name, (_, _, text) in cases.items():
        assert jobs[name].wait().shown["JobState"] == "FAILED", name
        errors = [line for line in jobs[name].log.splitlines() if "error" in line]
        assert len(errors) == 1 and errors[0].startswith("run.slurm: error:") and text in errors[0], jobs[name].log
        assert "started" not in jobs[name].log, jobs[name].log


# Two processors of two NUMA nodes of four cores of two threads; two cores share a cache. As Linux numbers them.
MACHINE: Cpus = {core + more: (core, core // 2, core // 4, core // 8) for more in (0, 16) for core in range(16)}
RULES = """
import json
import sys

import imitated

answers = {}
imitated.System.sched_getaffinity = lambda self, thread: allowed
for name, allowed in {"all": {*range(32)}, "some": {*range(4), *range(16, 20)}}.items():
    for mode in imitated.binding.AffinityMode:
        for gpu in range(4):
            try:
                options = imitated.binding.NumaOptions(mode)
                found = imitated.binding._get_validated_logical_cpus_to_bind_to(device_index=gpu, numa_options=options)
                answers[f"{name} {mode.value} {gpu}"] = sorted(found)
            except (RuntimeError, ValueError, ZeroDivisionError) as error:
                answers[f"{name} {mode.value} {gpu}"] = str(error)
print(json.dumps(answers))
"""


@pytest.mark.only("torchrun_multinode")
@pytest.mark.runs("weekly")
def test_rules(example: str, tmp_path: Path) -> None:
    """The words mean what docs/on-your-cluster.md says, also where the job has the cores of one NUMA node alone."""
    folder = imitate(tmp_path / "node", [3, 3, 0, 2], MACHINE)
    (folder / "rules.py").write_text(RULES)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    words = [sys.executable, str(folder / "rules.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)

    def threads(*cores: int) -> list[int]:
        return sorted([*cores, *(core + 16 for core in cores)])

    last, first = threads(*range(12, 16)), threads(*range(4))
    assert [answers[f"all node {gpu}"] for gpu in range(4)] == [last, last, first, threads(*range(8, 12))]
    assert [answers[f"all exclusive {gpu}"] for gpu in range(3)] == [threads(12, 13), threads(14, 15), first]
    assert [answers[f"all core-complex {gpu}"] for gpu in range(3)] == [threads(12, 13), threads(14, 15), threads(0, 1)]
    assert answers["all socket 3"] == threads(*range(8, 16)) and answers["all socket 2"] == threads(*range(8))
    assert answers["some node 2"] == answers["some exclusive 2"] == first
    assert answers["some node 0"] == answers["some node 3"] == "Must bind to a non-empty set of CPU indices"
    assert answers["some exclusive 0"].startswith("There are only 0 physical cores on numa_node_index=3")
    assert "empty" in answers["some socket 2"] and "zero" in answers["some core-complex 0"]
