"""sites/ on a real SLURM: a lab whose partitions imitate those of a cluster, and scripts that its sbatch accepts."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.jobs import on_this_machine_only
from harness.launchers import ROOT
from harness.processes import wait_until
from lab import Lab, LabError, Wanted, accounting, why_not
from sites import apply, systems
from sites.systems import Nodes

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a run.slurm of torchrun_multinode."""
    shutil.copy(ROOT / "examples" / "torchrun_multinode" / "run.slurm", tmp_path)
    return tmp_path


def started(project: Path, **wanted) -> Lab:
    """Return a lab, not yet up, that no other test of this machine has, and whose user is root: it runs no jobs."""
    share = on_this_machine_only(project, Path(sys.prefix), ROOT)
    return Lab(Wanted(name=f"sites{os.getpid()}", user="root", share=share, **wanted))


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


def imitation(name: str, project: Path, with_accounts: bool) -> Lab:
    """Return a lab, not yet up, with the partitions and GPUs of a system; with accounts, jobs need one."""
    known = [nodes for nodes in systems.find(name)[1].nodes if nodes.gpus]
    partitions = {}
    for nodes in (nodes for nodes in known if nodes.partition):
        most, time = nodes.max_nodes or "UNLIMITED", nodes.max_time or "UNLIMITED"
        limits = f"MaxNodes={most} MaxTime={time} OverSubscribe={'EXCLUSIVE' if nodes.whole else 'NO'}"
        partitions[nodes.partition] = f"PartitionName={nodes.partition} Nodes=ALL {limits} State=UP"
    conf = ["EnforcePartLimits=ALL", *partitions.values()]
    conf += ["AccountingStorageEnforce=associations,limits,qos"] if with_accounts else []
    gpus, kind = known[0].gpus, IMITATED[name][1]
    return started(project, cpus=256, gpus=gpus, gpu_type=kind, conf=conf, accounting=with_accounts)


def assert_accepted(name: str, lab: Lab, project: Path) -> None:
    """Check that sbatch takes the script with a system's lines, and that it looks at its GPUs."""
    lab.slurm("scontrol", "update", "NodeName=node[1-2]", "AvailableFeatures=gpu", "ActiveFeatures=gpu")
    sites(lab, project, "apply", name, "run.slurm", *IMITATED[name][0], "--write")
    assert accepted(lab, project) == ""
    text = (project / "run.slurm").read_text()
    ((option, value),) = (one for one in apply.header_of(text.split("\n")).items() if one[0] in apply.GPU_OPTIONS)
    more = f"{value.rpartition(':')[0]}:77".removeprefix(":")
    (project / "run.slurm").write_text(text.replace(f"{option}={value}", f"{option}={more}"))
    assert accepted(lab, project), "sbatch would take 77 GPUs: then this test shows nothing"
    (project / "run.slurm").write_text(text)


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("name", IMITATED)
def test_imitated(name: str, project: Path) -> None:
    """Where a system's partitions, GPUs and features are imitated, sbatch takes the script with its lines."""
    with imitation(name, project, with_accounts=False) as lab:
        assert_accepted(name, lab, project)


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("name", ["iris", "perlmutter"])
def test_imitated_with_qos(name: str, project: Path) -> None:
    """The same where QOS and accounts are in a database, and others are refused."""
    try:
        accounting.check()
    except LabError as error:
        pytest.skip(str(error))
    with imitation(name, project, with_accounts=True) as lab:
        add = ("sacctmgr", "--immediate", "add")
        for words in (["qos", "regular"], ["account", "p"], ["user", lab.user, "account=p", "qos=normal,regular"]):
            lab.slurm(*add, *words)
        shown = ("scontrol", "show", "assoc_mgr")
        wait_until(lambda: {"QOS=regular", "Account=p"} <= {*re.split(r"[\s(]", lab.slurm(*shown))}, 300, "the account")
        assert_accepted(name, lab, project)
        for option in ("--account=other", "--qos=other"):
            assert accepted(lab, project, option), f"sbatch would take {option}: then this test shows nothing"
