"""Judge the facts that preflight.py has told: each check is one row of the table.

FAIL is for what breaks training. WARN is for what only slows it down, or breaks it by chance.
"""

import ipaddress
import json
import os
import signal
import statistics
import sys
from pathlib import Path

ETHERNET = 130  # MB/s that 1 GbE cannot reach: TCP has 118 of it (IEEE 802.3 and the headers)
STAFF = "ask the cluster's staff"
# The table "Which PyTorch" of docs/install.md: each wheel is torch, torchvision, UV_TORCH_BACKEND.
RELEASES = json.loads(Path(__file__).with_name("releases.json").read_text())


def few(faults):
    """Join faults, but not hundreds of them."""
    faults = list(dict.fromkeys(faults))
    more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
    return "; ".join(faults[:4]) + more


# A judge gets the facts of all tasks that have told its fact, and the names of the nodes. It
# returns a result, ok or WARN or FAIL, and an advice.


def judge_names(tasks, nodes):
    """FAIL where a node does not know a name, or takes it for a loopback address.

    Launchers meet by these names. Debian's installer writes a machine's own name beside 127.0.1.1
    into /etc/hosts.
    """
    unknown, loopback = [], []
    for task in tasks:
        for name, found in task["names"].items():
            if "error" in found:
                unknown.append(f"{task['node']} does not know {name}: {found['error']}")
                continue
            for address in found:
                if ipaddress.ip_address(address.split("%")[0]).is_loopback:
                    loopback.append(f"on {task['node']} {name} is {address}")
    if loopback:
        advice = f"{STAFF} to remove that line (127.x.x.x) from /etc/hosts there"
        return few(loopback + unknown), "FAIL", advice
    if unknown:
        advice = f"{STAFF}: every node needs the names of all in DNS or /etc/hosts"
        return few(unknown), "FAIL", advice
    return f"{len(tasks)} nodes know all {len(nodes)} names", "ok", ""


def judge_port(tasks, nodes):
    """FAIL where the port on which the examples' processes meet is taken."""
    result = f"{tasks[0]['port']} on {tasks[0]['node']}"
    if tasks[0]["port_problem"]:
        advice = "another program has it: submit again, a new job has another port"
        return f"{result}: {tasks[0]['port_problem']}", "FAIL", advice
    return f"{result} is free", "ok", ""


def judge_connections(tasks, nodes):
    """FAIL where a node cannot connect to another by its name, or reaches another node."""
    faults = []
    for task in tasks:
        for name, answer in task["connections"].items():
            if "error" in answer:
                faults.append(f"{task['node']} cannot connect to {name}: {answer['error']}")
            elif answer["node"] != name:
                faults.append(f"{task['node']} reaches {answer['node']} under the name {name}")
    if faults:
        advice = f"{STAFF}: nodes of a job need free TCP between them (name, firewall, dead link?)"
        return few(faults), "FAIL", advice
    return f"all {len(tasks)} nodes reach each other", "ok", ""


def judge_folder(tasks, nodes):
    """FAIL where a node does not see a file of another in the folder of the job."""
    faults = [f"{t['node']} does not see the files of {n}" for t in tasks for n in t["unseen"]]
    folders = sorted({task["folder"] for task in tasks})
    if faults or len(folders) > 1:
        advice = f"submit from a folder that all nodes share (not /tmp), or {STAFF}"
        return f"{few(faults)} in {few(folders)}", "FAIL", advice
    return f"{len(tasks)} nodes see each other's files", "ok", ""


def judge_clocks(tasks, nodes):
    """WARN where a clock is more than 1 s from that of the first node."""
    apart = {name: answer.get("apart", 0) for name, answer in tasks[0]["connections"].items()}
    wrong = [f"{node}: {seconds:.1f} s" for node, seconds in apart.items() if seconds > 1]
    if wrong:
        advice = f"{STAFF} (NTP): the times of files and logs mislead"
        return f"{few(wrong)} from {tasks[0]['node']}", "WARN", advice
    return f"at most {max(apart.values()):.1f} s apart", "ok", ""


def judge_python(tasks, nodes):
    """FAIL where nodes have other Pythons or releases of torch, or no torch."""
    found = {}
    for task in tasks:
        found.setdefault(task["python"], set()).add(task["node"])
    if len(found) > 1:
        result = few(f"{', '.join(sorted(where))}: {python}" for python, where in found.items())
        return result, "FAIL", "one environment, in a folder that all nodes share: see VENV"
    (result,) = found
    if "no torch" in result:
        return result, "FAIL", "install requirements.txt; see VENV and IMAGE in run.slurm"
    return result, "ok", ""


def judge_gpus(tasks, nodes):
    """FAIL where torch can compute on fewer GPUs than the job asked for."""
    of_nodes = {task["node"]: task["driver"] for task in tasks if "driver" in task}
    faults, drivers = [], []
    for task in tasks:
        driver, usable = of_nodes[task["node"]], task.get("usable", 0)
        if usable < task["asked_gpus"]:
            found = f"{usable} usable in {task.get('build', 'torch, see python')}"
            problem = f": {task['gpu_problem']}" if task.get("gpu_problem") else ""
            asked = f"{task['node']}: {task['asked_gpus']} asked for"
            faults.append(f"{asked}, {describe(driver)}, {found}{problem}")
            drivers.append(driver)
    if faults:
        return few(faults), "FAIL", advise_torch(drivers)
    asked, kinds = tasks[0]["asked_gpus"], few(map(describe, of_nodes.values()))
    return f"{asked} a node asked for and usable; {kinds}", "ok", ""


def describe(driver):
    """Return the GPUs and the driver of a node in words."""
    if driver["gpus"]:
        version, capability, name = driver["gpus"][0]
        known = f" ({capability})" if capability else ""
        return f"{len(driver['gpus'])} {name}{known}, driver {version}"
    return driver.get("problem") or ("AMD's driver" if driver["amd"] else "no driver")


def advise_torch(drivers):
    """Say which torch fits the nodes; where they differ, the oldest driver and GPU."""
    gpus = [gpu for driver in drivers for gpu in driver["gpus"]]
    if gpus:
        major = min(int(version.split(".")[0]) for version, _, _ in gpus)
        # A driver that does not know the capability is so old that it does not matter.
        capabilities = [float(known or 8) for _, known, _ in gpus]
        capability = min(capabilities) if min(capabilities) < 7.5 else max(capabilities)
        wheel = next(
            row["wheel"]
            for row in RELEASES["nvidia"]
            if major < row["driver_below"] and capability < row["capability_below"]
        )
        if not wheel:
            return f"{STAFF} for a newer driver: no PyTorch of today fits this one"
    elif any(driver["amd"] for driver in drivers):
        wheel = RELEASES["amd"]
    else:
        return f"{STAFF}: these nodes show no driver of a GPU"
    torch, vision, backend = wheel
    command = f"uv pip install --reinstall torch=={torch} torchvision=={vision}"
    if backend:
        command = f"UV_TORCH_BACKEND={backend} {command}"
    return f"these nodes need: {command} (docs/install.md); if it is there, {STAFF}"


def judge_reduce(tasks, nodes):
    """FAIL where an all-reduce over all tasks fails."""
    faults, speeds = [], {}
    for task in tasks:
        for backend, speed in task["reduce"].items():
            if isinstance(speed, dict):
                faults.append(f"{backend} on {task['node']}: {speed['error']}")
            else:
                speeds[backend] = min(speed, speeds.get(backend, speed))
    if faults:
        advice = "first correct the rows above; then see GLOO_SOCKET_IFNAME in run.slurm"
        return few(faults), "FAIL", advice
    result = ", ".join(f"{name} {speed:.0f} MB/s" for name, speed in speeds.items())
    result = f"{result} with {len(tasks)} tasks"
    return result, "ok", ""


def judge_mpi(tasks, nodes):
    """FAIL where MPI does not count all tasks of the job as one world."""
    wrong = [f"{t['node']}: {t['mpi']} of {t['tasks']}" for t in tasks if t["mpi"] != t["tasks"]]
    if wrong:
        advice = "srun's type does not fit this MPI: see `mpi` in run.slurm and `srun --mpi=list`"
        return f"processes that MPI counts: {few(wrong)}", "FAIL", advice
    return f"{tasks[0]['mpi']} processes in one world", "ok", ""


def judge_network(tasks, nodes):
    """WARN about slow nodes, by what all have sent to each other, and about a slow network.

    A node is slow if it has less than half of what is usual with every other node.
    """
    best = {}
    for task in tasks:
        for other, rate in task["rates"].items():
            for node in task["node"], other:
                best[node] = max(rate, best.get(node, 0))
    usual = statistics.median_high(best.values())
    result = f"{usual:.0f} MB/s from node to node"
    slow = [f"{node} has {best[node]:.0f} MB/s at most" for node in best if best[node] < usual / 2]
    if slow:
        advice = f"sbatch --exclude=... and {STAFF} about the link (cable, port)"
        return f"{few(slow)}, to and from any other; else {result}", "WARN", advice
    common = set.intersection(*(set(task["interfaces"]) for task in tasks if "interfaces" in task))
    if usual < ETHERNET:
        advice = "no faster than 1 GbE: try GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in run.slurm"
        return f"{result}; interfaces of all nodes: {', '.join(sorted(common))}", "WARN", advice
    return result, "ok", ""


CHECKS = {  # the row, the fact that it needs, and who judges
    "python": ("python", judge_python),
    "names": ("names", judge_names),
    "port": ("port", judge_port),
    "connections": ("connections", judge_connections),
    "folder": ("unseen", judge_folder),
    "clocks": ("connections", judge_clocks),
    "gpus": ("asked_gpus", judge_gpus),
    "reduce": ("reduce", judge_reduce),
    "network": ("rates", judge_network),
    "mpi": ("mpi", judge_mpi),
}


def judge_answers(tasks, nodes, lacking):
    """FAIL where a task has not told all its facts."""
    silent = sorted(set(nodes) - {task["node"] for task in tasks})
    began = {name for task in tasks for name in task["done"]} | {"nodes", "torch"}
    faults = [f"{node} has no {lacks}" for node, lacks in lacking.items()]
    faults += [f"silent: {node}" for node in silent if node not in lacking]
    for task in tasks:
        faults += [f"{task['node']}: {why}" for why in task["done"].values() if why]
        late = sorted(began - set(task["done"]))
        faults += [f"{task['node']} did not end with: {', '.join(late)}"] if late else []
    if lacking:
        return few(faults), "FAIL", "put the environment into a folder that all nodes share"
    if faults:
        advice = f"see its lines above; if none, it is cut off: sbatch --exclude=... and {STAFF}"
        return few(faults), "FAIL", advice
    return f"{len(tasks)} tasks on {len(nodes)} nodes", "ok", ""


def judge_all(tasks, nodes, lacking):
    """Return the rows, by check. A judge that fails becomes a row, too."""
    rows = {"answers": judge_answers(tasks, nodes, lacking)}
    for name, (fact, judge) in CHECKS.items():
        have = [task for task in tasks if fact in task]
        if not have and name == "mpi":  # no Horovod
            continue
        if len(nodes) == 1 and name in ("names", "connections", "clocks", "network"):
            rows[name] = ("one node", "ok", "")
        elif not have:
            rows[name] = ("nothing was found out", "FAIL", "correct the rows above, submit again")
        else:
            try:
                rows[name] = judge(have, nodes)
            except Exception as error:
                text = f"cannot be judged: {type(error).__name__}: {error}"
                rows[name] = (text, "FAIL", "a fault of verdict.py: please report it")
    return rows


def read(lines):
    """Return the facts of each task, and what a node lacks. Print all lines that are not facts."""
    tasks, lacking = {}, {}
    for line in lines:
        if not line.startswith("preflight {"):
            print(line, end="", flush=True)
            continue
        told = json.loads(line.partition(" ")[2])
        node = told["node"]
        if "lacks" in told:
            lacking[node] = told["lacks"]
            continue
        task = tasks.setdefault(told.pop("rank"), {"done": {}})
        for name, fact in told.items():
            if isinstance(fact, dict):
                task.setdefault(name, {}).update(fact)
            else:
                task[name] = fact
    return [tasks[rank] for rank in sorted(tasks)], lacking


def main():
    """Read facts from standard input until all programs have ended. Print the table."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # at scancel it still prints what is known
    tasks, lacking = read(sys.stdin)
    rows = judge_all(tasks, sys.argv[1:], lacking)
    width = min(60, max(len(result) for result, _, _ in rows.values()))
    lines = [f"{'check':11} | {'result':{width}} |      | advice"]
    lines.append("-" * len(lines[0]))
    for name, (result, status, advice) in rows.items():
        lines.append(f"{name:11} | {result:{width}} | {status:4} | {advice}".rstrip())
    faults = []
    for status in "FAIL", "WARN":
        names = [name for name, row in rows.items() if row[1] == status]
        faults += [f"{status}: {', '.join(names)}"] if names else []
    lines.append(f"preflight: {'; '.join(faults) or 'all is well'}\n")
    os.write(1, "\n".join(["", *lines]).encode())
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
