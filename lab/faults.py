"""What can be broken in a lab, and mended, each by a command of `python -m lab`; raises LabError, in one line."""

import os
import re
import shutil
import signal

from lab.base import SEARCH, LabError, find_process, inside, output, until
from lab.cluster import Lab
from lab.config import HEAD
from lab.tracking import leftovers


def cut(lab: Lab, node: str) -> None:
    """Take a node off the network, as if its cable was pulled."""
    set_link(lab, node, "down")


def slow(lab: Lab, node: str, rate: str) -> None:
    """Limit a node's link in both directions (for example: slow node2 100mbit).

    The rate, a whole number and kbit, mbit or gbit, is one in bits a second, of what goes over the cable: TCP gets
    95 % of it. It adds no delay.
    """
    found = re.fullmatch(r"([0-9]{1,9})(kbit|mbit|gbit)", rate)
    bits = int(found[1]) * {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}[found[2]] if found else 0
    if not 1000 <= bits <= 10**12:
        raise LabError(f"slow: {rate}: must be a rate such as 100mbit, from 1kbit to 1000gbit")
    # What may be sent at once after a pause: too much, and a small message is not limited at all; too little, and
    # a busy machine does not reach the rate. A millisecond's worth did (measured from 10 Mbit/s to 5 Gbit/s).
    burst = max(16_000, bits // 8 // 1000)
    set_queue(lab, node, "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")


def rate_of(lab: Lab, node: str) -> str:
    """The rate to which `slow` has limited a node's link, as tc writes it, such as 100Mbit; or nothing."""
    lab.pid_of(node)  # refuses a wrong name
    tc = shutil.which("tc", path=SEARCH)
    shown = output([tc, "qdisc", "show", "dev", node], inside(lab.pid_of(HEAD))) if tc else ""
    found = re.search(r"^qdisc tbf .* rate (\S+)", shown)
    return found[1] if found else ""


def set_queue(lab: Lab, node: str, *words: str) -> None:
    """Have both ends of a node's cable send through another queue of the kernel's."""
    ends = {node: lab.pid_of(HEAD), "eth0": lab.pid_of(node)}
    tc = shutil.which("tc", path=SEARCH)
    if not tc:
        raise LabError("missing program: tc (apt-get install --no-install-recommends iproute2)")
    for device, pid in ends.items():
        output([tc, "qdisc", "replace", "dev", device, "root", *words], inside(pid))


def heal(lab: Lab, node: str) -> None:
    """Put a node back on the network, and remove the limit that `slow` has set."""
    set_link(lab, node, "up")
    if rate_of(lab, node):
        set_queue(lab, node, "noqueue")
    for pid in slurmds(lab, node):  # this makes it register; SLURM itself asks only every two minutes
        os.kill(pid, signal.SIGHUP)


def set_link(lab: Lab, node: str, state: str) -> None:
    """Plug in a node's cable, `up`, or pull it, `down`."""
    lab.pid_of(node)  # refuses a wrong name
    output(["ip", "link", "set", node, state], inside(lab.pid_of(HEAD)))


def stop_slurmd(lab: Lab, node: str) -> None:
    """End the slurmd of a node.

    Jobs on it run on, but SLURM cannot reach the node.
    """
    for pid in slurmds(lab, node):
        os.kill(pid, signal.SIGTERM)
    until(lambda: not slurmds(lab, node), f"slurmd of {node} has ended")


def start_slurmd(lab: Lab, node: str) -> None:
    """Start a node's slurmd again."""
    if slurmds(lab, node):
        raise LabError(f"slurmd of {node} is running")
    cgroup = next((cgroups / node for cgroups in leftovers(lab.folder.name)), None)
    variables = [f"SLURM_CONF={lab.folder}/slurm.conf", f"PATH={SEARCH}"]
    output(lab.plan.slurmd(node), [*inside(lab.pid_of(node), cgroup), "env", "--chdir=/", *variables])
    until(lambda: bool(slurmds(lab, node)), f"slurmd of {node} runs")


def slurmds(lab: Lab, node: str) -> list[int]:
    """The PIDs of a node's slurmd, which are none if it does not run."""
    found = {pid: find_process(pid) for pid in lab.processes(node)}
    return [pid for pid, process in found.items() if process and process.name == "slurmd"]


def requeue(lab: Lab, job: int | str) -> None:
    """Stop a job and put it back into the queue, as preemption does; it keeps its number."""
    lab.slurm("scontrol", "requeue", str(job))


def timelimit(lab: Lab, job: int | str) -> None:
    """Send SIGUSR1 to a job's batch shell, as near its time limit."""
    lab.slurm("scancel", "--signal=USR1", "--batch", str(job))


def unresolve(lab: Lab, node: str) -> None:
    """Let the name of a node, or of the head, resolve to nothing, everywhere.

    SLURM itself uses addresses.
    """
    change_names(lab, node, r"^(?!#)(?=.*\b{}$)", "#")


def resolve(lab: Lab, node: str) -> None:
    """Let the name of a node resolve again."""
    change_names(lab, node, r"^#(?=.*\b{}$)", "")


def change_names(lab: Lab, node: str, pattern: str, text: str) -> None:
    """Replace a pattern, {} in which is a node's name, in each line of all hosts files."""
    lab.pid_of(node)  # refuses a wrong name
    for file in lab.folder.glob("hosts.*"):  # changed in place, as they are mounted one by one
        file.write_text(re.sub(pattern.format(node), text, file.read_text(), flags=re.MULTILINE))
