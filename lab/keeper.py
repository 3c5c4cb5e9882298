"""The process that a lab depends on: PID 1 of the lab's namespaces.

The kernel ends every process of a PID namespace together with its PID 1, and network and mount namespaces vanish with
their last process. So ending the keeper, in whatever way, ends the lab. Each node is another such set of namespaces
inside the keeper's, with a small PID 1 of its own.

`Lab.up` starts it with two arguments: the lab's folder, and a pidfd of the process that wants the lab. When that
process ends, the lab ends, too, unless the folder has a file named `detached`. One line comes back on standard output:
`ready` or `error: ...`.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.base import LabError, inside, output, until
from lab.config import HEAD, SPOOL, Plan

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE = 1, 4096, 16384, 1 << 18  # from <sys/mount.h>
# From <sched.h>: new mount, UTS, IPC, PID and network namespaces.
CLONE_ALL = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000


def main() -> None:
    """Start the keeper in namespaces of its own, and put down which process it is; arguments: see above."""
    folder, owner = Path(sys.argv[1]), int(sys.argv[2])
    os.chdir("/")
    os.umask(0o022)
    plan = Plan.load(folder)
    tmp = os.open("/tmp", os.O_PATH)  # the machine's, which another one is about to hide
    pid = spawn(lambda: keep(plan, owner, tmp))
    (folder / "keeper").write_text(str(pid))


def keep(plan: Plan, owner: int, tmp: int) -> None:
    """Do what PID 1 of the lab does: start everything, say so, wait for the owner's end, tidy up."""
    try:
        start(plan)
        answer = "ready"
    except (LabError, OSError) as error:
        answer = f"error: {error}"
    with contextlib.suppress(OSError):  # the owner may be gone already
        print(answer, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # from now on the kernel reaps for us
    select.select([owner], [], [])
    while (plan.folder / "detached").exists():
        signal.pause()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(-1, signal.SIGKILL)
        while True:  # fails when the last child is gone; before SIGCHLD was ignored, some may have been left to us
            os.wait()
    shutil.rmtree(f"/proc/self/fd/{tmp}/{plan.folder.name}", ignore_errors=True)


def start(plan: Plan) -> None:
    """Bring up network, nodes and daemons, and wait until every node is idle; raise LabError."""
    os.environ["SLURM_CONF"] = str(plan.folder / "slurm.conf")
    socket.sethostname(HEAD)
    cover_tmp(plan)
    # A mount on a file of the machine's own /etc is lost when that file is replaced, as installing packages does. So,
    # where the kernel can, the lab's files are mounted on a read-only view of /etc.
    with contextlib.suppress(LabError):
        mount("overlay", "/etc", "overlay", MS_RDONLY, f"lowerdir={plan.folder}/etc:/etc")
    cover_etc(plan, HEAD)
    for file in plan.gpu_files():
        file.symlink_to("/dev/null")
    # A machine may have none, or may permit no devices, as a container does.
    with contextlib.suppress(OSError, LabError):
        open_fuse()
    ip("link set lo up", "link add lab type bridge", "link set lab up")
    ip(f"address add {plan.addresses[HEAD]}/24 dev lab")

    daemons = {"munged": launch(plan, "munged", ["munged", "--foreground", *munge_options(plan.folder)])}
    until((plan.folder / "munge.socket").exists, "munged makes its socket", daemons)
    daemons["slurmctld"] = launch(plan, "slurmctld", ["slurmctld", "-D"])
    nodes = {node: spawn_node(plan, node) for node in plan.node_names}
    until(lambda: answers(["scontrol", "ping"]) != "", "slurmctld answers", daemons)
    for node, pid in nodes.items():
        daemons[node] = launch(plan, node, [*inside(pid), *plan.slurmd(node)])
    states = ["sinfo", "--noheader", "--Node", "--partition=lab", "--format=%T"]
    idle = ["idle"] * plan.nodes
    until(lambda: answers(states).split() == idle, "all nodes are idle", daemons)
    run_step(plan)
    until(lambda: answers(states).split() == idle, "all nodes are idle again", daemons)
    for log in (plan.folder / "logs").glob("*.log"):  # from now on these say everything
        log.with_suffix(".out").unlink(missing_ok=True)


def open_fuse() -> None:
    """Let everybody use /dev/fuse, as on clusters: Apptainer mounts images with it."""
    # It lies in the head's own /tmp, since other users of the machine can reach what is in the lab's folder.
    fuse = Path("/tmp/fuse")
    os.mknod(fuse, stat.S_IFCHR | 0o600, os.stat("/dev/fuse").st_rdev)
    fuse.chmod(0o666)
    mount(fuse, "/dev/fuse", flags=MS_BIND)


def run_step(plan: Plan) -> None:
    """Have the user run a step on each node, the lab's first job; raise LabError if that fails.

    A slurmd that has started may yet be unable to start a step, for instance where programs in /tmp cannot be executed.
    """
    who = plan.account
    user = ["setpriv", f"--reuid={who.uid}", f"--regid={who.gid}", "--init-groups"]
    count = [f"--nodes={plan.nodes}", f"--ntasks={plan.nodes}", "--ntasks-per-node=1"]
    try:
        output(["srun", "--quiet", "--job-name=lab", "--partition=lab", *count, "--chdir=/", "true"], user)
    except LabError as error:
        raise LabError(f"a step of user {who.user} fails: {error}") from None


def munge_options(folder: Path) -> list[str]:
    """Return the options for a munged with its own key: the machine's is left alone."""
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "state/munged.pid"}
    files["seed-file"] = "state/munged.seed"
    return [f"--{option}={folder}/{file}" for option, file in files.items()]


def spawn_node(plan: Plan, node: str) -> int:
    """Make one node, with its files, a cable to the bridge and an address; return its PID 1."""
    pid = spawn(lambda: keep_node(plan, node))
    ip(f"link add {node} type veth peer name eth0 netns {pid}", f"link set {node} master lab up")
    ip("link set lo up", f"address add {plan.addresses[node]}/24 dev eth0", "link set eth0 up", pid=pid)
    name = Path(f"/proc/{pid}/comm")
    # It takes its name last, when its files are in place.
    until(lambda: name.exists() and name.read_text() == f"lab-{node}\n", f"{node} has its files, see keeper.log")
    return pid


def keep_node(plan: Plan, node: str) -> None:
    """Do what PID 1 of a node does: give the node its own files, then stay and let the kernel reap."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output is for the keeper's answer
    socket.sethostname(node)
    cover_tmp(plan)
    mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
    mount("tmpfs", plan.folder / SPOOL, "tmpfs", options="mode=755")
    cover_etc(plan, node)
    Path("/proc/self/comm").write_text(f"lab-{node}")
    while True:
        signal.pause()


def cover_tmp(plan: Plan) -> None:
    """Give this mount namespace a /tmp of its own, with the folders in it that are shared."""
    # They are held open, for the new /tmp is about to hide them.
    folders = sorted({*map(str, plan.share), str(plan.folder)})
    shared = {folder: os.open(folder, os.O_PATH) for folder in folders if folder.startswith("/tmp/")}
    mount("tmpfs", "/tmp", "tmpfs", options="mode=1777")
    for folder, handle in shared.items():
        os.makedirs(folder, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", folder, flags=MS_BIND | MS_REC)
        os.close(handle)


def cover_etc(plan: Plan, place: str) -> None:
    """Put our files over some of /etc, in this mount namespace only."""
    files = {"passwd": "passwd", "group": "group", "shadow": "shadow", "nsswitch.conf": "nsswitch.conf"}
    for ours, theirs in {**files, f"hosts.{place}": "hosts"}.items():
        if Path("/etc", theirs).exists():
            mount(plan.folder / ours, f"/etc/{theirs}", flags=MS_BIND)
    if os.path.isdir("/run/nscd"):  # its socket: it would answer from the machine's own files
        mount("tmpfs", "/run/nscd", "tmpfs", options="mode=755")


def spawn(work: Callable[[], None]) -> int:
    """Run `work` as PID 1 of new namespaces and return its PID as seen from here; raise LabError."""
    reader, writer = os.pipe()
    between = os.fork()  # a process in between, since unshare moves only children to a new PID namespace
    if between == 0:
        try:
            check(LIBC.unshare(CLONE_ALL), "new namespaces")
            child = os.fork()
            if child:
                os.write(writer, str(child).encode())
            else:
                mount("none", "/", flags=MS_REC | MS_PRIVATE)
                mount("proc", "/proc", "proc")
                mount("sysfs", "/sys", "sysfs")  # shows the interfaces of the new network namespace
                work()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    pid = os.read(reader, 32)
    os.close(reader)
    if not pid:
        raise LabError("cannot make namespaces, see keeper.log")
    return int(pid)


def check(result: int, what: str) -> None:
    """Raise LabError if a call of the C library failed."""
    if result != 0:
        raise LabError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2) itself: unlike the program, it takes /proc/self/fd/N for a folder that is hidden by now."""
    words = os.fsencode(source), os.fsencode(target), kind.encode(), flags, options.encode()
    check(LIBC.mount(*words), f"mount {source} on {target}")


def ip(*lines: str, pid: int | None = None) -> None:
    """Change the network here, or where a process is."""
    output(["ip", "-batch", "-"], inside(pid) if pid else [], text="\n".join(lines) + "\n")


def answers(words: Sequence[str]) -> str:
    """Return what a SLURM command prints, or nothing if it fails, as it does while its daemon starts."""
    with contextlib.suppress(LabError):
        return output(words)
    return ""


def launch(plan: Plan, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a daemon; what it prints goes to a log, too, for it may fail before it opens its own."""
    with open(plan.folder / "logs" / f"{name}.out", "wb") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
