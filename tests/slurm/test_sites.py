"""sites/ on a real SLURM: a lab whose partitions imitate those of a cluster, and scripts that its sbatch accepts."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.jobs import hand_over, on_this_machine_only
from harness.launchers import ROOT
from lab import Lab, LabError, Wanted, accounting, why_not
from sites import apply, systems
from sites.systems import Nodes

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of the lab's user with a run.slurm of torchrun_multinode."""
    shutil.copy(ROOT / "examples" / "torchrun_multinode" / "run.slurm", tmp_path)
    return hand_over(tmp_path)


def started(project: Path, **wanted) -> Lab:
    """Return a lab, not yet up, that no other test of this machine has."""
    share = on_this_machine_only(project, Path(sys.prefix), ROOT)
    return Lab(Wanted(name=f"sites{os.getpid()}", share=share, **wanted))


def sites(lab: Lab, project: Path, *words: str) -> str:
    """Run `python -m sites` on the lab's head, as its user; return what it prints."""
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = lab.run([sys.executable, "-m", "sites", *words], cwd=project, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accepted(lab: Lab, project: Path, *options: str) -> str:
    """Return why sbatch would not take the script of a folder, or nothing."""
    done = lab.run(["sbatch", "--test-only", *options, "run.slurm"], cwd=project)
    return "" if done.returncode == 0 else done.stderr


def test_new(project: Path) -> None:
    """The file of a cluster has its partitions, GPUs, limits and MPI types; sbatch takes a script with its lines."""
    partitions = [
        "PartitionName=gpu Nodes=ALL MaxTime=2-00:00:00 MaxNodes=2 DefMemPerCPU=1000 State=UP",
        "PartitionName=short Nodes=node1 MaxTime=00:15:00 OverSubscribe=EXCLUSIVE State=UP",
        "PartitionName=closed Nodes=ALL State=DOWN",
    ]
    with started(project, cpus=64, gpus=4, gpu_type="a100", conf=partitions) as lab:
        sites(lab, project, "new", "mine")
        system = systems.read(project / "mine.toml")
        usual: dict[str, Any] = {"gpu": "a100", "gpus": 4, "cpus_per_gpu": 16}
        assert system.nodes == [
            Nodes("lab", max_nodes=2, **usual),
            Nodes("gpu", max_nodes=2, max_time="2-00:00:00", **usual),
            Nodes("short", max_nodes=1, max_time="00:15:00", **usual),
        ]
        assert "by default 1000 MB per CPU" in system.facts["header"].text
        version = lab.slurm("sinfo", "--version").split()[1]
        assert version in system.pages["slurm"].title and lab.plan.name in system.title
        listed = lab.run(["srun", "--mpi=list"], cwd="/")
        types = system.facts["MPI"].text.partition("`: ")[2].partition(";")[0].split()
        assert {"none", "pmi2"} <= {*types} and all(name in listed.stdout + listed.stderr for name in types)
        assert (system.job.mpi == "pmix") == ("pmix" in types)
        assert lab.addresses["head"] in system.facts["network"].text
        assert not lab.run(["squeue", "--noheader"], cwd="/", check=True).stdout, "it starts no job"

        words = ["--nodes", "2", "--gpus-per-node", "4", "--partition", "gpu", "--account", "mine", "--write"]
        sites(lab, project, "apply", "mine", "run.slurm", *words)
        header = apply.header_of((project / "run.slurm").read_text().split("\n"))
        assert (header["--gpus-per-node"], header["--cpus-per-task"], header["--nodes"]) == ("4", "64", "2")
        assert accepted(lab, project) == ""
        for option in ("--partition=other", "--gpus-per-node=5", "--gpus-per-node=h100:4"):
            assert accepted(lab, project, option), f"sbatch would take {option}: then this test shows nothing"


IMITATED = {  # a system: what is asked of it, and the GPUs' name in its SLURM
    "alps": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], ""),
    "frontier": (["--nodes", "2", "--gpus-per-node", "8", "--account", "p"], ""),
    "iris": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], ""),
    "kestrel": (["--nodes", "1", "--gpus-per-node", "3", "--account", "p", "--mem", "64G"], ""),
    "lumi": (["--nodes", "2", "--gpus-per-node", "8", "--account", "p"], ""),
    "mahuika": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], "a100"),
    "olivia": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], ""),
    "pelle": (["--nodes", "1", "--gpus-per-node", "10", "--account", "p"], "l40s"),
    "perlmutter": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], ""),
    "roihu": (["--nodes", "2", "--gpus-per-node", "2", "--account", "p"], "gh200"),
    "snellius": (["--nodes", "2", "--gpus-per-node", "4", "--account", "p"], ""),
}


@pytest.fixture
def imitation(name: str, project: Path) -> Iterator[Lab]:
    """A lab with the partitions, GPUs, QOS and features of a system, where jobs need an account."""
    try:
        accounting.check()
    except LabError as error:
        pytest.skip(str(error))
    system, (_, kind) = systems.find(name)[1], IMITATED[name]
    known = [nodes for nodes in system.nodes if nodes.gpus]
    partitions = {}
    for nodes in (nodes for nodes in known if nodes.partition):
        most, time = nodes.max_nodes or "UNLIMITED", nodes.max_time or "UNLIMITED"
        share = "EXCLUSIVE" if nodes.whole else "NO"
        limits = f"MaxNodes={most} MaxTime={time} OverSubscribe={share}"
        partitions[nodes.partition] = f"PartitionName={nodes.partition} Nodes=ALL {limits} State=UP"
    conf = ["AccountingStorageEnforce=associations,limits,qos", "EnforcePartLimits=ALL", *partitions.values()]
    with started(project, cpus=256, gpus=known[0].gpus, gpu_type=kind, conf=conf, accounting=True) as lab:
        add = ["sacctmgr", "--immediate", "add"]
        for words in (["qos", "regular"], ["account", "p"], ["user", lab.user, "account=p", "qos=normal,regular"]):
            lab.slurm(*add, *words)
        lab.slurm("scontrol", "update", "NodeName=ALL", "AvailableFeatures=gpu", "ActiveFeatures=gpu")
        yield lab


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("name", IMITATED)
def test_imitated(name: str, imitation: Lab, project: Path) -> None:
    """Where a system's partitions, GPUs, features and QOS are imitated, sbatch takes the script with its lines.

    It does not take another account, nor more GPUs than a node has.
    """
    sites(imitation, project, "apply", name, "run.slurm", *IMITATED[name][0], "--write")
    assert accepted(imitation, project) == ""
    assert "account" in accepted(imitation, project, "--account=other")
    text = (project / "run.slurm").read_text()
    for option in apply.GPU_OPTIONS:
        if value := apply.header_of(text.split("\n")).get(option):
            more = value.rpartition(":")[0] + ":77" if ":" in value else "77"
            (project / "run.slurm").write_text(text.replace(f"{option}={value}", f"{option}={more}"))
    assert accepted(imitation, project), "sbatch would take 77 GPUs: then this test shows nothing"
