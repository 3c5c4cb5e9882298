"""Write the file of a system by asking its SLURM, 22.05 to 26.05; what SLURM cannot know is left empty."""

import datetime
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from sites import toml
from sites.systems import FOLDER, SitesError

SECONDS = 60  # that a command of SLURM may take
# A group of nodes that are alike: partition, their number, CPUs, threads of a core, memory in MB, GRES, their names.
COLUMNS = "%R|%D|%c|%Z|%m|%G|%N"
GPU = re.compile(r"gpu(?::(?P<type>[^:(,=]+))?:(?P<count>\d+)")
# Above which key which comment stands, in the file that is written.
COMMENTS = {
    "read": "Filled in by `python -m sites new`; what is empty, SLURM does not know: look at the site's pages.",
    "facts.environment.text": "The modules and images of the site, and whether pip and conda are allowed.",
    "facts.wheel.text": "What `nvidia-smi` on a GPU node says of the driver, and `uname -m` of the processor.",
    "facts.network.text": "Of the machine where this ran: the nodes that train may have others. See them in a job.",
    "facts.internet.text": "Whether nodes that train reach it, and by which proxy.",
    "pages.slurm.url": "The address of the site's pages on jobs.",
    "nodes": "Of these the first is taken that can have a job: put the one that you use first. SLURM does not know how "
    'much memory a job should ask for: mem is that of a node, such as "480G", mem_per_gpu a number of GB.',
    "job.account": '"mandatory", if jobs without --account are refused.',
    "job.modules": 'Lines that load them, such as ["module load python cuda"].',
    "job.nccl": "The interface of the fast network, if NCCL chooses a wrong one; gloo is the same for Gloo.",
    "job.mpi": "The type for `srun --mpi`, for MPI.",
}


class Group(NamedTuple):
    """Nodes of a partition that are alike."""

    partition: str
    number: int
    cpus: int  # logical ones, with threads
    threads: int  # of a core
    memory: int  # MB
    gpus: dict[str, int]  # of a node, by the names of their types; "" has no name
    nodes: str


def ask(*words: str) -> str:
    """Return what a command of SLURM prints, on both outputs; raises SitesError if it fails."""
    if not shutil.which(words[0]):
        raise SitesError(f"there is no {words[0]} here: run this on a login node of a cluster with SLURM")
    # The settings of a user or site may change what is printed.
    changing = ("SINFO_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_CLUSTERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        raise SitesError(f"{' '.join(words)} did not answer in {SECONDS} s: try again later") from None
    except OSError as error:
        raise SitesError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise SitesError(f"{' '.join(words)} failed: {lines[-1]}")
    return done.stdout + done.stderr


def pairs(text: str) -> dict[str, str]:
    """Return the KEY=VALUE of a line of `scontrol --oneliner show`, or of the lines of its `show config`."""
    return {key: value for key, value in re.findall(r"(?:^|\s)([A-Z][\w/:]*)[ \t]*=[ \t]*(\S*)", text)}


def gpus_of(gres: str) -> dict[str, int]:
    """Return the GPUs of a node by type, from `gpu:a100:4(S:0-1),nvme:1`; `(null)` has none."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        if match := GPU.fullmatch(part.strip()):
            name = match["type"] or ""
            found[name] = found.get(name, 0) + int(match["count"])
    return {name: count for name, count in found.items() if count}


def groups_of(text: str) -> list[Group]:
    """Return the groups in what sinfo prints for COLUMNS; of equal ones of a partition, the sum."""
    found: dict[tuple, Group] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 7 or not cells[1].isdigit():
            continue  # a message, not a row
        cpus, threads, memory = (int(re.sub(r"\D.*", "", cell) or 0) for cell in cells[2:5])
        group = Group(cells[0], int(cells[1]), cpus, max(threads, 1), memory, gpus_of(cells[5]), cells[6])
        key = (*group[:1], *group[2:5], tuple(group.gpus.items()))
        if key in found:
            group = group._replace(number=group.number + found[key].number, nodes=found[key].nodes)
        found[key] = group
    return list(found.values())


def mpi_types(text: str) -> list[str]:
    """Return the types in what `srun --mpi=list` prints, before and since SLURM 22.05."""
    words = re.findall(r"^(?:srun: |\s*)(\w+)$", re.sub(r".*\bare\.\.\.", "", text), re.MULTILINE)
    if specific := re.search(r"specific pmix plugin versions available: (.*)", text):
        words += re.split(r"[,\s]+", specific[1].strip())
    return list(dict.fromkeys(filter(None, words)))


def interfaces() -> list[str]:
    """Return the network interfaces of this machine that are up, with an IPv4 address each."""
    program = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not program:
        return []
    done = subprocess.run([program, "-4", "-o", "address"], capture_output=True, text=True, timeout=SECONDS)
    found = re.findall(r"^\d+: (\S+)\s+inet (\S+?)/", done.stdout, re.MULTILINE)
    return [f"{name} ({address})" for name, address in found if name != "lo"]


def limit(value: str) -> str:
    """Return a limit as SLURM prints it, or nothing if it has none."""
    return "" if value.upper() in ("", "UNLIMITED", "INFINITE", "NONE", "N/A", "(NULL)") else value


def default_memory(shown: dict[str, str]) -> str:
    """Return the default memory of jobs in words, from a partition or the configuration; or nothing."""
    per_gpu = re.search(r"DefMemPerGPU=(\d+)", shown.get("JobDefaults", ""))
    for key, what in (("DefMemPerCPU", "per CPU"), ("DefMemPerNode", "per node")):
        if limit(shown.get(key, "")):
            return f"{shown[key]} MB {what}"
    return f"{per_gpu[1]} MB per GPU" if per_gpu else ""


def entry(group: Group, gpu: str, kinds: int, partition: dict[str, str], effective: int) -> dict[str, Any]:
    """Return a table of `[[nodes]]`: a group's nodes with GPUs of one type; `kinds` are those of the partition."""
    gpus = group.gpus.get(gpu, 0)
    cores = (effective or group.cpus) // group.threads
    found: dict[str, Any] = {"partition": group.partition}
    if gpus:
        found |= {"gpu": gpu} if gpu else {}
        found["gpus"] = gpus
        if kinds > 1 and gpu:
            found["gpu_option"] = f"--gpus-per-node={gpu}:{{gpus}}"
        found["cpus_per_gpu"] = max(cores // sum(group.gpus.values()), 1)
    else:
        found["cpus"] = cores
    found["max_nodes"] = group.number
    exclusive = partition.get("OverSubscribe", partition.get("Shared", "")).upper().startswith("EXCLUSIVE")
    found |= {"whole": True} if exclusive and not gpus else {}  # fewer GPUs than a node has can be asked for
    found |= {"options": ["--hint=nomultithread"]} if group.threads > 1 else {}  # so that a CPU is a core
    found |= {"max_time": limit(partition.get("MaxTime", ""))} if limit(partition.get("MaxTime", "")) else {}
    return found


def describe(group: Group, partition: dict[str, str], config: dict[str, str]) -> str:
    """Return what SLURM says of a group of nodes, in words."""
    gpus = " and ".join(f"{count} GPUs {name}".strip() for name, count in group.gpus.items()) or "no GPUs"
    nodes = f"{group.number} node{'s' * (group.number != 1)}"
    words = [f"`{group.partition}`: {nodes} with {gpus}, {group.cpus // group.threads} cores"]
    words += [f"{group.threads} threads each"] if group.threads > 1 else []
    words.append(f"{group.memory} MB")
    words.append(f"at most {limit(partition.get('MaxTime', '')) or 'any time'}")
    if memory := default_memory(partition) or default_memory(config):
        words.append(f"by default {memory}")
    for key in ("AllowAccounts", "AllowQos", "AllowGroups"):
        value = partition.get(key, "ALL")
        words += [f"{key} {value}"] if value not in ("ALL", "") else []
    return ", ".join(words)


def partitions() -> dict[str, dict[str, str]]:
    """Return what SLURM says of each partition, the default one first."""
    shown = [pairs(line) for line in ask("scontrol", "--oneliner", "show", "partition").splitlines()]
    shown.sort(key=lambda one: one.get("Default") != "YES")
    return {one["PartitionName"]: one for one in shown if "PartitionName" in one}


def effective_cpus(group: Group) -> int:
    """Return the logical CPUs of a node that jobs can have, without those kept for the system; 0 if it is not said."""
    first = ask("scontrol", "show", "hostnames", group.nodes).split()[:1]
    shown = pairs(ask("scontrol", "--oneliner", "show", "node", *first)) if first else {}
    return int(shown["CPUEfctv"]) if shown.get("CPUEfctv", "").isdigit() else 0


def table_of(name: str) -> dict[str, Any]:
    """Return the table of the cluster where this runs; raises SitesError."""
    groups = groups_of(ask("sinfo", "--noheader", "--exact", f"--format={COLUMNS}"))
    known, config = partitions(), pairs(ask("scontrol", "show", "config"))
    if not groups:
        raise SitesError("sinfo lists no nodes: is there a partition that you may use?")
    order = [one for one in known if known[one].get("State", "UP") == "UP"]
    groups = sorted((one for one in groups if one.partition in order), key=lambda one: order.index(one.partition))
    nodes = []
    for group in groups:
        kinds = {gpu for one in groups if one.partition == group.partition for gpu in one.gpus}
        effective = effective_cpus(group)
        for gpu in group.gpus or [""]:
            found = entry(group, gpu, len(kinds), known[group.partition], effective)
            # Those that differ in nothing else, such as memory alone, can be in one job.
            alike = [one for one in nodes if one | {"max_nodes": 0} == found | {"max_nodes": 0}]
            if alike:
                alike[0]["max_nodes"] += found["max_nodes"]
            else:
                nodes.append(found)
    for found in nodes:
        at_most = known[found["partition"]].get("MaxNodes", "")
        found["max_nodes"] = min(found["max_nodes"], int(at_most) if at_most.isdigit() else found["max_nodes"])
    try:
        types = mpi_types(ask("srun", "--mpi=list"))
    except SitesError:
        types = []
    own, today = interfaces(), datetime.date.today().isoformat()
    cluster, version = config.get("ClusterName", "?"), config.get("SLURM_VERSION", "?")
    facts = {
        "header": "; ".join(describe(group, known[group.partition], config) for group in groups),
        "environment": "",
        "wheel": "",
        "network": f"interfaces of {socket.gethostname()}: {', '.join(own)}" if own else "",
        "MPI": f"`srun --mpi=list`: {' '.join(types)}; default: {config.get('MpiDefault', '?')}" if types else "",
        "local disk": f"SLURM's TmpFS is `{config['TmpFS']}`" if limit(config.get("TmpFS", "")) else "",
        "internet": "",
        "data sets": "",
    }
    return {
        "read": today,
        "name": name,
        "title": f"{name} (cluster {cluster})",
        "facts": {fact: {"text": text, "sources": ["slurm"] if text else []} for fact, text in facts.items()},
        "nodes": nodes,
        "job": {
            "account": "",
            "modules": [],
            "nccl": "",
            "gloo": "",
            "mpi": "pmix" if "pmix" in types else "",
            "hints": [],
        },
        "pages": {"slurm": {"title": f"sinfo, scontrol and srun of SLURM {version}", "url": "", "date": today}},
    }


def text_of(name: str) -> str:
    """Return the text of the file of the cluster where this runs; raises SitesError."""
    return toml.dumps(table_of(name), COMMENTS)


def check_name(name: str, path: Path) -> None:
    """Raise SitesError for a name that cannot be a file's, before SLURM is asked, and for a file that is there."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise SitesError(f"{name}: a name has letters, digits, - and _ only")
    if (FOLDER / f"{name.lower()}.toml").exists():
        raise SitesError(f"{name}: sites/systems has a system of that name: take another")
    if path.exists():
        raise SitesError(f"{path} is there already: move it away, or give --output")
