"""What can be broken in a lab, and mended, each by a command of `python -m lab`; raises LabError, in one line."""

import re
import shutil

from lab.base import SEARCH, LabError, inside, output
from lab.cluster import Lab
from lab.config import HEAD, SPOOL


def cut(lab: Lab, node: str) -> None:
    """Take a node off the network, as if its cable was pulled."""
    set_link(lab, node, "down")


def heal(lab: Lab, node: str) -> None:
    """Put a node back on the network, and remove the limit that `slow` has set."""
    set_link(lab, node, "up")
    set_queue(lab, node, "noqueue")
    # This makes its slurmd register; SLURM itself asks only every two minutes.
    register = f"kill -HUP $(cat {lab.folder}/{SPOOL}/slurmd.pid)"
    output(["sh", "-c", register], inside(lab.pid_of(node)))


def slow(lab: Lab, node: str, rate: str) -> None:
    """Limit a node's link in both directions (for example: slow node2 100mbit).

    The rate, a whole number and kbit, mbit or gbit, is one in bits a second, of what goes over the cable: TCP gets
    95 % of it. It adds no delay.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,8})(kbit|mbit|gbit)", rate)
    if not found:
        raise LabError(f"slow: {rate}: must be a rate such as 100mbit")
    bits = int(found[1]) * {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}[found[2]]
    # What may be sent at once after a pause: too much, and a small message is not limited at all; too little, and
    # a busy machine does not reach the rate. A millisecond's worth did (measured from 10 Mbit/s to 5 Gbit/s).
    burst = max(16_000, bits // 8 // 1000)
    set_queue(lab, node, "tbf", "rate", rate, "burst", str(burst), "latency", "50ms")


def set_link(lab: Lab, node: str, state: str) -> None:
    """Plug in a node's cable, `up`, or pull it, `down`."""
    lab.pid_of(node)  # refuses a wrong name
    output(["ip", "link", "set", node, state], inside(lab.pid_of(HEAD)))


def set_queue(lab: Lab, node: str, *words: str) -> None:
    """Have both ends of a node's cable send through another queue of the kernel's."""
    tc = str(shutil.which("tc", path=SEARCH))
    for device, place in (("eth0", node), (node, HEAD)):
        output([tc, "qdisc", "replace", "dev", device, "root", *words], inside(lab.pid_of(place)))


def requeue(lab: Lab, job: int | str) -> None:
    """Stop a job and put it back into the queue, as preemption does; it keeps its number."""
    lab.slurm("scontrol", "requeue", str(job))


def timelimit(lab: Lab, job: int | str) -> None:
    """Send SIGUSR1 to a job's batch shell, as near its time limit."""
    lab.slurm("scancel", "--signal=USR1", "--batch", str(job))


def unresolve(lab: Lab, node: str) -> None:
    """Let the name of a node, or of the head, resolve to nothing, everywhere; SLURM itself uses addresses."""
    lab.pid_of(node)  # refuses a wrong name
    for file in lab.folder.glob("hosts.*"):  # changed in place, as they are mounted one by one
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if line.split()[1] != node))
