"""Judge the facts that preflight.py has collected: each check becomes one row of the table.

A judge gets the reports of the tasks that have facts for its check, and returns (result, status, advice). FAIL is
for what breaks training, WARN for what only slows it down or breaks it by chance. Every row but `wheel` and `sizes`
can say one of the two.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = tuple  # (result, status, advice)
GRADIENTS, ETHERNET = 4.8, 130  # MB that the examples' ConvNet all-reduces in a step; MB/s that 1 GbE cannot reach
STAFF = "ask the cluster's staff"
# MB/s in one direction. Ethernet: what TCP can have of the line's rate, 1448 of the 1538 bytes that a frame takes there
# (IEEE 802.3 and the headers). InfiniBand: the rate of a port of four lanes (infinibandta.org/infiniband-roadmap).
# NVLink: half of the sum of both directions (nvidia.com/en-us/data-center/nvlink).
NETWORKS = [("1 GbE", 118), ("10 GbE", 1177), ("25 GbE", 2942), ("100 GbE", 11_768), ("InfiniBand HDR", 25_000)]
NETWORKS += [("InfiniBand NDR", 50_000), ("NVLink of an A100", 300_000), ("NVLink of an H100", 450_000)]

# The table "Which PyTorch" of the repository's docs/install.md: each wheel is (torch, torchvision,
# UV_TORCH_BACKEND). `pins` are those of every requirements.txt; of NVIDIA's the first row that fits counts.
RELEASES = json.loads(Path(__file__).with_name("releases.json").read_text())
PINS, CPU, AMD = (tuple(RELEASES[name]) for name in ("pins", "cpu", "amd"))
NVIDIA = [
    (row["driver_below"], row["capability_below"], row["wheel"] and tuple(row["wheel"])) for row in RELEASES["nvidia"]
]
BEFORE_TURING = re.compile(r"[VP]100|\b(P4|P40|M40)\b|TITAN V|GTX (9|10)\d\d")  # capability below 7.5


def few(faults: Iterable[str]) -> str:
    """Join faults, but not hundreds of them."""
    faults = list(dict.fromkeys(faults))
    return "; ".join(faults[:4]) + (f"; and {len(faults) - 4} more" if len(faults) > 4 else "")


def visible(text: str) -> str:
    """Spell out control characters, since some of the text is other programs', and a terminal would obey it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def judge_names(reports: list[dict], job: Any) -> Row:
    """FAIL where a node does not know a node's name, or takes it for a loopback address, 127.0.0.0/8 or ::1 (RFC 6890).

    Launchers meet by these names. Debian's installer writes a machine's own name beside 127.0.1.1 into /etc/hosts.
    """
    unknown, loopback = [], []
    for report in reports:
        for name, found in report["names"].items():
            if "error" in found:
                unknown.append(f"{report['node']} does not know {name}: {found['error']}")
            else:
                bad = [address for address in found if ipaddress.ip_address(address.split("%")[0]).is_loopback]
                loopback += [f"on {report['node']} {name} is {address}" for address in bad]
    if loopback:
        advice = f"{STAFF} to remove the line that does it (127.x.x.x) from /etc/hosts there: others wait forever"
        return few(loopback + unknown), "FAIL", advice
    if unknown:
        return few(unknown), "FAIL", f"{STAFF}: every node needs the names of all in DNS or /etc/hosts"
    return f"{len(reports)} nodes know all {len(job.nodes)} names", "ok", ""


def judge_connections(reports: list[dict], job: Any) -> Row:
    """FAIL where a node cannot connect to another over TCP under its name, within the 5 s of find_connections."""
    faults, pairs = [], 0
    for report in reports:
        for node, answer in report["connections"].items():
            pairs += 1
            if isinstance(answer, dict):
                faults.append(f"{report['node']} cannot connect to {node}: {answer['error']}")
            elif answer != node:
                faults.append(f"{report['node']} reaches {answer or 'another program'} under the name {node}")
    if faults:
        return few(faults), "FAIL", f"{STAFF}: nodes of a job need free TCP between them (name, firewall, dead link?)"
    return f"{pairs} ways between {len(reports)} nodes", "ok", ""


def judge_cpus(reports: list[dict], job: Any) -> Row:
    """FAIL where a task may use fewer cores than it asked for; WARN where srun was not told, or where it asked for one.

    SLURM from 22.05 to 23.02 does not hand --cpus-per-task of #SBATCH on to srun (its release notes). With one core,
    what loads data waits for what trains.
    """
    asked = [int(report["CPUS_PER_TASK"] or 0) for report in reports]
    fewer = [f"{r['node']}: {r['cpus']} of {asked[0]}" for r in reports if r["cpus"] < asked[0]]
    if fewer:
        advice = "srun --cpus-per-task=... as in run.slurm; if that is there, " + STAFF + " about binding (TaskPlugin)"
        return f"fewer cores than asked: {few(fewer)}", "FAIL", advice
    if 0 in asked:
        return "srun was not told", "WARN", 'add --cpus-per-task="$SLURM_CPUS_PER_TASK" to srun'
    usable = f"{asked[0]} asked for, {min(r['cpus'] for r in reports)} usable"
    if 1 in asked:
        return usable, "WARN", "one core a task is slow: #SBATCH --cpus-per-task=4 or more"
    return usable, "ok", ""


def judge_tasks(reports: list[dict], job: Any) -> Row:
    """FAIL unless each node has a task, and as many as the pattern starts: one, or one a GPU, and the same on all.

    The examples' launchers count on that. WARN where there is one task in all, which has nobody to talk to.
    """
    pieces = re.findall(r"(\d+)(?:\(x(\d+)\))?", reports[0]["STEP_TASKS_PER_NODE"])  # 2(x3),1 is 2,2,2,1
    counts = [int(tasks) for tasks, times in pieces for _ in range(int(times or 1))]
    gpus = reports[0]["asked_gpus"]
    result = f"{','.join(map(str, counts[:8]))} on the {len(job.nodes)} nodes, {job.pattern}"
    if len(counts) < len(job.nodes):
        return result, "FAIL", "some nodes got no task: #SBATCH --ntasks-per-node=N instead of --ntasks"
    if job.pattern == "per-node" and set(counts) != {1}:
        advice = "#SBATCH --ntasks-per-node=1 and no --ntasks: torchrun or spawn starts the processes of a node"
        return result, "FAIL", advice + "; horovod_cpu and lightning: --pattern per-process"
    if len(set(counts)) > 1:
        return result, "FAIL", "#SBATCH --ntasks-per-node=N, the same for every node, instead of --ntasks"
    if job.pattern == "per-process" and gpus and counts[0] != gpus:
        return result, "FAIL", f"one task a GPU: #SBATCH --ntasks-per-node={gpus}"
    if sum(counts) == 1:
        return result, "WARN", "a single task finds little: #SBATCH --nodes=2"
    return result, "ok", ""


def judge_limits(reports: list[dict], job: Any) -> Row:
    """Name what a task may have too little of: open files, processes and threads, and locked memory where RDMA is.

    FAIL where the examples need more: two connections with each process, THREADS a process. WARN below what is enough
    for most: FEW_FILES, FEW_THREADS and, with RDMA, LITTLE_LOCKED, all below.
    """
    tasks = [int(number) for number in re.findall(r"(?<![\dx])\d+", reports[0]["STEP_TASKS_PER_NODE"] or "1")]
    each = max(*tasks, *(r["asked_gpus"] for r in reports))  # processes on a node: one a task, or one a GPU
    files = 2 * each * len(job.nodes) + 256  # rank 0 has a connection or two with every other process
    threads = max(tasks) * max(r["cpus"] for r in reports) + THREADS * each
    low: dict[str, list[str]] = {}  # what is too low where, by who can correct it
    fatal = False
    for r in reports:
        limits, node = r["limits"], r["node"]
        soft, hard = limits["files"]
        if 0 <= hard < max(files, FEW_FILES):
            low.setdefault(f"{STAFF}: LimitNOFILE of slurmd's service", []).append(f"{node}: {hard} open files")
            fatal |= hard < files
        soft, hard = limits["processes"]
        if 0 <= soft < max(threads, FEW_THREADS):
            own = hard < 0 or hard >= max(threads, FEW_THREADS)
            advice = "ulimit -Su $(ulimit -Hu) in run.slurm" if own else f"{STAFF}: LimitNPROC of slurmd's service"
            low.setdefault(advice, []).append(f"{node}: {soft} processes and threads")
            fatal |= soft < threads
        if 0 <= limits["pids"] < max(threads, FEW_THREADS):
            text = f"{node}: {limits['pids']} processes and threads in a control group"
            low.setdefault(f"{STAFF}: TasksMax of slurmd's service, pids.max of its cgroups", []).append(text)
            fatal |= limits["pids"] < threads
        soft, hard = limits["locked"]
        if limits.get("rdma") and 0 <= soft < LITTLE_LOCKED:
            own = hard < 0 or hard >= LITTLE_LOCKED
            advice = "ulimit -l $(ulimit -Hl) in run.slurm" if own else f"{STAFF}: LimitMEMLOCK=infinity of slurmd"
            low.setdefault(advice, []).append(f"{node}: {amount(soft)} of locked memory beside {limits['rdma'][0]}")
    if low:
        result = "too low: " + few(text for texts in low.values() for text in texts)
        return result, "FAIL" if fatal else "WARN", "; ".join(low)
    limits = reports[0]["limits"]
    (soft, hard), processes = limits["files"], [n for n in (limits["processes"][0], limits["pids"]) if n >= 0]
    result = f"{number_of(hard)} open files, {number_of(min(processes, default=-1))} processes and threads"
    return f"{result}, {amount(limits['locked'][0])} of locked memory", "ok", ""


# What is enough for most: data loaders open files and start threads, too. A process of PyTorch has some dozens of
# threads beside those that compute.
FEW_FILES, FEW_THREADS, THREADS = 4096, 4096, 64
LITTLE_LOCKED = 2**30  # bytes: InfiniBand's buffers are locked, and its makers ask for "unlimited"


def number_of(limit: int) -> str:
    """A limit in words; below 0 there is none."""
    return f"{limit}" if limit >= 0 else "any number of"


def amount(limit: int) -> str:
    """A limit in bytes, in words; below 0 there is none."""
    return "any amount" if limit < 0 else f"{limit >> 10} KB" if limit < 2**20 else f"{limit >> 20} MB"


def judge_shared(reports: list[dict], job: Any) -> Row:
    """FAIL where a node does not see a file of another in the job's folder within preflight.py's SHARED_SECONDS."""
    faults = [f"{r['node']} does not see the files of {n}" for r in reports for n in r["shared"]["unseen"]]
    folders = sorted({report["shared"]["folder"] for report in reports})
    if faults or len(folders) > 1:
        advice = "submit from a folder that all nodes share (/home or a project folder, not /tmp); else " + STAFF
        return f"{few(faults)} in {' and '.join(folders)}", "FAIL", advice
    return f"{len(reports)} nodes see each other's files", "ok", ""


def judge_port(reports: list[dict], job: Any) -> Row:
    """FAIL where the port of the examples' rendezvous is taken; WARN where the kernel may give it to any program.

    Those are the ports of the node's own /proc/sys/net/ipv4/ip_local_port_range; the examples take one below 30000.
    """
    low, high = reports[0]["ephemeral"]
    result = f"{job.port} on {reports[0]['node']}; ephemeral ports are {low}-{high}"
    if reports[0]["port_problem"]:
        advice = "another program has it: submit again, for another job id gives another port"
        return f"{result}; {reports[0]['port_problem']}", "FAIL", advice
    if low <= job.port <= high:
        return result, "WARN", f"programs get such ports by chance: submit again if it is taken, or {STAFF} why"
    return f"{result}; free", "ok", ""


def judge_gpus(reports: list[dict], job: Any) -> Row:
    """FAIL where torch, or without it the driver, finds fewer GPUs than asked for; WARN where it finds some unasked.

    NCCL needs to see the other GPUs of its node, which --gpus-per-task hides, and whole ones, not slices. ALLOW_CPU=1
    lets the examples train on the CPU all the same.
    """
    faults, advice, status = [], "", "ok"
    of_first = reports[0]["asked_gpus"]
    if of_first and os.environ.get("ALLOW_CPU") == "1" and not any(r.get("cuda") for r in reports):
        return f"{of_first} a node asked for, unusable; ALLOW_CPU=1 permits the CPU", "ok", ""
    asked_in_all = sum({r["node"]: r["asked_gpus"] for r in reports}.values())
    if asked_in_all > 1 and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return f"{asked_in_all} slices of GPUs (MIG)", "FAIL", "one slice with --nodes=1, or whole GPUs"
    wheels = {r["node"]: r["wheel"] for r in reports if "wheel" in r}  # the first task of a node has it
    for r in reports:
        asked, shown = r["asked_gpus"], len(r["gpus"])
        seen = r.get("cuda", shown)  # torch's count, else the driver's
        driver = f"driver {r['gpus'][0]}" if shown else "no driver"
        where = f"{r['node']}: {asked} asked for, {shown} in nvidia-smi ({driver}), {r.get('cuda', 'none')} usable in"
        where += f" torch {r['torch']} ({r['build']})" if "build" in r else " torch"
        where += f": {r['gpu_problem']}" if r.get("gpu_problem") else ""
        if asked > seen and seen and (r["GPUS_PER_TASK"] or "gpu" in (r["TRES_PER_TASK"] or "")):
            faults.append(where)
            advice, status = "#SBATCH --gpus-per-node=N; --gpus-per-task hides a node's GPUs from one another", "FAIL"
        elif asked > seen:
            faults.append(where)
            advice, status = gpu_advice(r, wheels.get(r["node"], {})), "FAIL"
        elif not asked and seen and status == "ok":
            faults.append(where)
            advice, status = "GPUs that were not asked for: #SBATCH --gpus-per-node=N", "WARN"
    if faults:
        return few(faults) + f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})", status, advice
    return f"{of_first} a node asked for and usable", "ok", ""


def gpu_advice(report: dict, found: dict) -> str:
    """Say which torch to install, if it is torch that keeps this task from its GPUs."""
    problem, build = report.get("gpu_problem", ""), report.get("build", "")
    wrong = "no kernel image" in problem or "too old" in problem or build == "CPU only"
    nvidia = found.get("gpus")
    amd = found.get("amd") and not nvidia
    if (wrong and report["gpus"] and nvidia) or (amd and not build.startswith("ROCm")):
        return install(fitting([found]))
    if wrong and report["gpus"]:  # and the row `wheel` knows nothing
        return 'a torch for that driver and GPU: the table "Which PyTorch" of the repository'
    if not (report["gpus"] or amd):
        command = "UV_TORCH_BACKEND=auto uv pip install --reinstall torch torchvision"
        return f"a torch for the node's GPUs: {command} there; if it finds no driver, {STAFF}"
    return f"{STAFF} about those nodes"


def fitting(nodes: list[dict]) -> tuple | None:
    """Return what fits these nodes; where they differ, what fits the oldest driver and GPU."""
    gpus = [gpu for found in nodes for gpu in found["gpus"]]
    if not gpus:
        return AMD if any(found["amd"] for found in nodes) else CPU
    driver = min(int(version.split(".")[0]) for version, _, _ in gpus)
    capabilities = [float(known or (7 if BEFORE_TURING.search(name) else 8)) for _, known, name in gpus]
    capability = min(capabilities) if min(capabilities) < 7.5 else max(capabilities)
    return next(wheel for above, limit, wheel in NVIDIA if driver < above and capability < limit)


def install(wheel: tuple | None, file: str = "") -> str:
    """Say how to install it: into an environment as it is, or by that file."""
    if not wheel:
        return f"{STAFF} for a newer driver"
    torch, vision, backend = wheel
    command = f"uv pip install --reinstall torch=={torch} torchvision=={vision}"
    if file:
        command = f"uv pip install -r {file}"
    if backend:
        command = f"UV_TORCH_BACKEND={backend} {command}"
    if file:
        command = f"pin these in {file}, then {command} (docs/install.md)"
    return f"the site's own image or module first; else {command}" if wheel == AMD else command


def describe(found: dict) -> str:
    """Say which GPUs a node has, and which PyTorch fits them."""
    kinds = Counter(f"{name} ({known})" if known else name for _, known, name in found["gpus"])
    what = " and ".join(f"{number} {kind}" for kind, number in kinds.items())
    what = f"{what}, driver {found['gpus'][0][0]}" if what else "AMD" if found["amd"] else "no GPU in this job"
    torch, vision, backend = fitting([found]) or ("", "", "")
    if not torch:
        return f"{what}: too old for any PyTorch of today"
    if torch == PINS[0]:
        return f"{what}: the pins as they are, torch {torch}{backend and f', {backend}'}"
    return f"{what}: torch {torch} and torchvision {vision}, {backend}"


def judge_wheel(reports: list[dict], job: Any) -> Row:
    """For information: which row of the table in docs/install.md fits the nodes."""
    known, texts = [], {}
    for r in reports:
        found = r["wheel"]
        if found["problem"] or (r["asked_gpus"] and not found["gpus"] and not found["amd"]):
            texts[r["node"]] = f"unknown: {found['problem'] or 'nvidia-smi shows none of the GPUs asked for'}"
        else:
            texts[r["node"]] = describe(found)
            known.append(found)
    different = set(texts.values())
    result = different.pop() if len(different) == 1 else few(f"{node}: {text}" for node, text in texts.items())
    wheel = fitting(known)
    if wheel in (PINS, CPU):
        return result, "ok", ""
    advice = install(wheel, "requirements.txt")
    if len({fitting([found]) for found in known}) > 1:
        advice = f"nodes of one kind (#SBATCH --constraint=NAME), or the oldest node's row: {advice}"
    return result, "ok", advice


def judge_clocks(reports: list[dict], job: Any) -> Row:
    """WARN where a clock is surely more than 1 s from task 0's, our choice: time stamps of logs have whole seconds."""
    apart = max(abs(report["clock"]["ahead"]) for report in reports)
    clocks = {report["node"]: report["clock"] for report in reports}
    wrong = [f"{node}: {c['ahead']:+.1f} s" for node, c in clocks.items() if abs(c["ahead"]) - c["doubt"] > 1]
    if wrong:
        return f"{few(wrong)} against {job.nodes[0]}", "WARN", f"{STAFF} (NTP): time stamps of files and logs mislead"
    return f"at most {apart:.3f} s apart", "ok", ""


def judge_python(reports: list[dict], job: Any) -> Row:
    """FAIL where nodes have different Pythons or versions of torch, or no torch: all processes must run one program."""
    nodes: dict[str, list[str]] = {}
    for report in reports:
        nodes.setdefault(report["python"], []).append(report["node"])
    if len(nodes) > 1:
        result = few(f"{', '.join(sorted(set(where)))}: {python}" for python, where in nodes.items())
        return result, "FAIL", "one environment in a folder that all nodes share; see VENV in run.slurm"
    if "no torch" in reports[0]["python"]:
        advice = "install requirements.txt on the login node; see VENV and IMAGE in run.slurm"
        return reports[0]["python"], "FAIL", advice
    return reports[0]["python"], "ok", ""


def judge_reduce(reports: list[dict], job: Any) -> Row:
    """FAIL where an all-reduce fails; WARN where a task sends fewer MB/s than ETHERNET, more than 1 GbE can carry.

    ETHERNET is above the 118 MB/s that TCP can have of 1 GbE (see NETWORKS), and far below what the next network has.
    """
    faults, speeds = [], {}
    for report in reports:
        for backend, speed in report["reduce"].items():
            if isinstance(speed, dict):
                faults.append(f"{backend} on {report['node']}: {speed['error']}")
            else:
                speeds[backend] = min(speed, speeds.get(backend, speed))
    if faults:
        advice = "first correct the rows above; else set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME (see run.slurm)"
        return few(faults), "FAIL", advice
    speed = speeds.get("nccl", speeds["gloo"])  # that of the backend that the examples use here
    result = ", ".join(f"{name} {speed:.0f} MB/s" for name, speed in speeds.items())
    result += f", {job.world} tasks: {GRADIENTS / speed * 1000:.0f} ms for a step's {GRADIENTS} MB"
    # Of N tasks in a ring, each sends 2 (N - 1) / N times the tensor.
    if min(len(job.nodes), job.world) > 1 and speed * 2 * (job.world - 1) / job.world < ETHERNET:
        advice = "no faster than 1 GbE (110 MB/s): is there a faster network? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        return result, "WARN", advice + " (see run.slurm)"
    return result, "ok", ""


def between(speed: float) -> str:
    """Say which networks give less, and which more, than so many MB/s."""
    slower = [f"{name} {most:,}" for name, most in NETWORKS if most <= speed]
    faster = [f"{name} {most:,}" for name, most in NETWORKS if most > speed]
    return " and ".join(["at most:", *slower[-1:], *faster[:1]]).replace("at most: and", "at most:")


def judge_network(reports: list[dict], job: Any) -> Row:
    """Name slow nodes, slow pairs and a faster interface, by what nodes have sent to each other; see README.md.

    WARN where another interface has twice the rate, where a node or a pair has half of the usual rate, or where that is
    less than 30 % of what the interface says (of 10 Gbit/s at most). These bounds are ours: rates of one link differ by
    less from one try to the next.
    """
    if len(reports) < 2:
        return "one node: no network", "ok", ""
    used = Counter(report["network"]["used"] for report in reports).most_common(1)[0][0]
    rates: dict[str, dict[tuple, float]] = {}  # by interface, and by the two nodes: the slower direction counts
    faults = []
    for report in reports:
        for node, found in report["network"]["rates"].items():
            for name, rate in found.items():
                pair = tuple(sorted((report["node"], node)))
                if not isinstance(rate, dict):
                    of_pair = rates.setdefault(name, {})
                    of_pair[pair] = min(rate, of_pair.get(pair, rate))
                elif name == used:
                    faults.append(f"{report['node']} to {node} over {name}: {rate['error']}")
    if faults:
        return few(faults), "WARN", f"{STAFF} about these ways, or choose another interface: GLOO_SOCKET_IFNAME"
    if not any(report["network"]["interfaces"] for report in reports):
        return "not measured: it needs IPv4, of which no node has an address", "ok", ""
    if not rates.get(used):
        names = ", ".join(sorted({name for report in reports for name in report["network"]["interfaces"]}))
        advice = "an interface that all nodes have: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME (see run.slurm)"
        return f"not measured over {used or 'any interface'}; there are {names or 'none'}", "WARN", advice
    usual, best = usual_rate(rates[used]), {name: usual_rate(pairs) for name, pairs in rates.items()}
    result = f"{used} {usual:.0f} MB/s from node to node ({between(usual)})"
    better = max(best, key=lambda name: best[name])
    if better != used and best[better] > 2 * usual:
        advice = f"export GLOO_SOCKET_IFNAME={better} NCCL_SOCKET_IFNAME={better} (see run.slurm)"
        return f"a job runs over {used}, {usual:.0f} MB/s, while {better} has {best[better]:.0f}", "WARN", advice
    slow = slow_ways(rates[used])
    if slow:
        return f"{few(slow)}; else {result}", "WARN", f"sbatch --exclude=... and {STAFF} about the link (cable, port)"
    mbit = min(report["network"]["interfaces"][used]["mbit"] for report in reports)  # 0: unknown
    if usual < 0.3 * min(mbit, 10_000) / 8:  # one stream of TCP need not fill a faster one
        return (
            f"{result}, but {used} is one of {mbit} Mbit/s",
            "WARN",
            f"{STAFF}: a switch, a cable or a setting is slow",
        )
    return result, "ok", ""


def best_rates(rates: dict[tuple, float]) -> dict[str, float]:
    """Return the best rate of each node: that of a node with a slow link is slow, whoever is at the other end."""
    nodes = {node for pair in rates for node in pair}
    return {node: max(rate for pair, rate in rates.items() if node in pair) for node in nodes}


def usual_rate(rates: dict[tuple, float]) -> float:
    """The median of the nodes' best rates: what a node of this job has, though some may be slow."""
    return statistics.median_high(best_rates(rates).values())


def slow_ways(rates: dict[tuple, float]) -> list[str]:
    """Return nodes which with any other have less than half of what is usual, and pairs that alone are so slow."""
    best, usual = best_rates(rates), usual_rate(rates)
    nodes = sorted(node for node, rate in best.items() if rate < usual / 2)  # of two nodes, none: both have one rate
    found = [f"{node} has {best[node]:.0f} MB/s at most, to and from any other" for node in nodes]
    for pair, rate in sorted(rates.items()):
        if rate < usual / 2 and not set(pair).intersection(nodes):
            found.append(f"{pair[0]} and {pair[1]} have {rate:.0f} MB/s")
    return found


def judge_sizes(reports: list[dict], job: Any) -> Row:
    """For information: the time of a small all-reduce, and MB/s of larger ones."""
    texts = []
    for backend, seconds in reports[0]["sizes"].items():
        found = {int(size): value for size, value in seconds.items()} or {1024: float("nan")}
        parts = [f"{backend} 1 KB in {found[min(found)] * 1000:.2f} ms"]
        parts += [f"{name_of(size)} {size / found[size] / 1e6:.0f} MB/s" for size in found if size in LARGE]
        largest = max(found)
        link = largest / found[largest] / 1e6 * 2 * (job.world - 1) / job.world  # "bus bandwidth", see README.md
        texts.append(f"{', '.join(parts)}, {link:.0f} over a link")
    return "; ".join(texts) or "not tried, see reduce", "ok", ""


LARGE = [2**20, 2**24, 2**28, 2**30]  # bytes of the all-reduces that are shown


def name_of(size: int) -> str:
    """A size in bytes, in words."""
    return f"{size >> 30} GB" if size >= 2**30 else f"{size >> 20} MB"


CHECKS = {
    "names": judge_names,
    "connections": judge_connections,
    "cpus": judge_cpus,
    "tasks": judge_tasks,
    "limits": judge_limits,
    "shared": judge_shared,
    "port": judge_port,
    "gpus": judge_gpus,
    "wheel": judge_wheel,
    "clock": judge_clocks,
    "python": judge_python,
    "reduce": judge_reduce,
    "sizes": judge_sizes,
    "network": judge_network,
}


def judge(name: str, reports: list[dict], job: Any) -> Row:
    """Return the row of one check; whatever goes wrong becomes a row too."""
    have = [report for report in reports if name in report]
    if not have:
        return "nothing was found out", "FAIL", "correct the other rows, then submit again"
    failed = [r for r in have if isinstance(r[name], dict) and "error" in r[name]]
    if failed:
        return few(f"{r['node']}: {r[name]['error']}" for r in failed), "FAIL", f"{STAFF} about those nodes"
    try:
        return CHECKS[name](have, job)
    except Exception as error:
        return f"cannot be judged: {type(error).__name__}: {error}", "FAIL", "a fault of preflight.py: please report it"


def table(reports: dict[int, dict], silent: set[int], job: Any, why: str = "") -> tuple[str, int]:
    """Return the table and the exit status; `silent` are tasks, `why` says what ended the job early."""
    nodes = {reports[rank]["node"] for rank in silent if rank in reports}
    if silent - set(reports):  # they never spoke: of which nodes?
        nodes |= set(job.nodes) - {report["node"] for report in reports.values()}
    answers = f"{job.world - len(silent)} of {job.world} tasks"
    rows = {"answers": (answers, "ok", "")}
    if silent or why:
        advice = f"see its lines above; if none, it is dead or cut off: sbatch --exclude=... and {STAFF}"
        rows["answers"] = (f"{answers}; silent: {few(sorted(nodes)) or 'none'}{why and '; '}{why}", "FAIL", advice)
    for name in CHECKS:
        rows[name] = judge(name, list(reports.values()), job)
    rows = {name: tuple(map(visible, row)) for name, row in rows.items()}
    width = min(60, max(len(row[0]) for row in rows.values()))
    header = f"{'check':11} | {'result':{width}} |      | advice"
    lines = [f"{name:11} | {result:{width}} | {status:4} | {advice}" for name, (result, status, advice) in rows.items()]
    failed = [name for name, row in rows.items() if row[1] == "FAIL"]
    warned = [name for name, row in rows.items() if row[1] == "WARN"]
    faults = [f"{status}: {', '.join(names)}" for status, names in (("FAIL", failed), ("WARN", warned)) if names]
    verdict = f"preflight: {'; '.join(faults) or 'all is well'}"
    text = "\n".join(["", header, "-" * len(header), *(line.rstrip() for line in lines), verdict, ""])
    return text, 1 if faults else 0
