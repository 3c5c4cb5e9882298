"""The process that a lab hangs on: PID 1 of the lab's namespaces.

The kernel ends every process of a PID namespace together with its PID 1, and network and mount namespaces
vanish with their last process. So ending the keeper, in whatever way, ends the lab. Each node is another
such set of namespaces inside the keeper's, with a small PID 1 of its own.

`Lab.up` starts it with two arguments: the lab's folder, and a pidfd of the process that wants the lab. When
that process ends, the lab ends too, unless the folder holds a file named `detached`. One line comes back on
standard output: `ready` or `error: ...`.
"""

import contextlib
import os
import pwd
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

from lab import accounting, tracking
from lab.base import LIBC, MS_BIND, MS_PRIVATE, MS_REC, LabError, check, find_process, inside, mount, output, until
from lab.config import HEAD, SPOOL, Plan

# From <sched.h>: new mount, UTS, IPC, PID and network namespaces; and a new cgroup namespace.
CLONE_ALL, CLONE_NEWCGROUP = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000, 0x02000000
MS_RDONLY = 1  # from <sys/mount.h>


def main() -> None:
    """Start the keeper in namespaces of its own, and put down which process it is; arguments: see above."""
    folder, owner = Path(sys.argv[1]), int(sys.argv[2])
    os.chdir("/")
    os.umask(0o022)
    plan = Plan.load(folder)
    hierarchy = tracking.hierarchy(plan.tracking)
    cgroups = held_open(hierarchy) / folder.name if hierarchy else None
    tmp = held_open("/tmp")
    pid = spawn(lambda: keep(plan, owner, cgroups, tmp))
    process = find_process(pid)
    (folder / "keeper").write_text(f"{pid} {process.start if process else 'ended'}")


def held_open(folder: str | Path) -> Path:
    """Hold a folder open that is about to be hidden; return a path to it, for the keeper and what it starts.

    That path has the keeper's number, since what it starts does not inherit its open files.
    """
    return Path(f"/proc/1/fd/{os.open(folder, os.O_PATH)}")


def keep(plan: Plan, owner: int, cgroups: Path | None, tmp: Path) -> None:
    """What PID 1 of the lab does: start everything, say so, wait for the owner's end, tidy up."""
    Path("/proc/self/comm").write_text("lab-keeper")
    try:
        start(plan, cgroups)
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
        if cgroups:
            tracking.thaw(cgroups)
        while True:  # fails when the last child is gone; before SIGCHLD was ignored, some may have been left to us
            os.wait()
    if cgroups:
        tracking.remove(cgroups)
    shutil.rmtree(plan.folder, ignore_errors=True)  # what is in it
    shutil.rmtree(tmp / plan.folder.name, ignore_errors=True)  # itself, in the machine's /tmp


def start(plan: Plan, cgroups: Path | None) -> None:
    """Bring up network, nodes and daemons, and wait until every node is idle; raises LabError."""
    os.environ["SLURM_CONF"] = str(plan.folder / "slurm.conf")
    socket.sethostname(plan.hostname(HEAD))
    cover_tmp(plan)
    keep_etc(plan)
    cover_etc(plan, HEAD)
    check_home(plan)
    for number in range(plan.gpus):
        device = plan.folder / f"gpu{number}"
        try:
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        except PermissionError:
            raise LabError("--gpus: this machine permits no devices, which stand for them; start it without") from None
        device.chmod(0o666)
    with contextlib.suppress(OSError):  # a machine may have none, or may permit no devices, as a container does
        open_fuse()
    ip("link set lo up", "link add lab type bridge", "link set lab up")
    ip(f"address add {plan.addresses[HEAD]}/24 dev lab")

    daemons = {"munged": launch(plan, "munged", ["munged", "--foreground", *munge_options(plan.folder)])}
    until((plan.folder / "munge.socket").exists, "munged makes its socket", daemons)
    if plan.accounting:
        start_accounting(plan, daemons)
    daemons["slurmctld"] = launch(plan, "slurmctld", ["slurmctld", "-D"])
    nodes = {node: spawn_node(plan, node, cgroups) for node in plan.node_names}
    until(lambda: answers(["scontrol", "ping"]) != "", "slurmctld answers", daemons)
    for node, pid in nodes.items():
        cgroup = cgroups / node if cgroups else None
        daemons[node] = launch(plan, node, [*inside(pid, cgroup), *plan.slurmd(node), "-D"])
    states = ["sinfo", "--noheader", "--Node", "--partition=lab", "--format=%T"]
    idle = ["idle"] * plan.nodes
    until(lambda: answers(states).split() == idle, "all nodes are idle", daemons)
    run_step(plan)
    until(lambda: answers(states).split() == idle, "all nodes are idle again", daemons)
    for log in (plan.folder / "logs").glob("*.log"):  # from now on these say everything
        log.with_suffix(".out").unlink(missing_ok=True)


def open_fuse() -> None:
    """Let everybody use /dev/fuse, as on clusters: containers mount their images with it."""
    # It lies in the head's own /tmp, since other users of the machine can reach what is in the lab's folder.
    fuse = Path("/tmp/fuse")
    os.mknod(fuse, stat.S_IFCHR | 0o600, os.stat("/dev/fuse").st_rdev)
    fuse.chmod(0o666)
    mount(fuse, "/dev/fuse", flags=MS_BIND)


def run_step(plan: Plan) -> None:
    """Have the user run a step on each node, the lab's first job; raises LabError if that fails.

    A slurmd that has started may yet be unable to start a step, for instance where programs in /tmp cannot be executed.
    """
    who = plan.account
    user = ["setpriv", f"--reuid={who.uid}", f"--regid={who.gid}", "--init-groups"] if who.uid else []
    count = [f"--nodes={plan.nodes}", f"--ntasks={plan.nodes}", "--ntasks-per-node=1"]
    try:
        output(["srun", "--quiet", "--job-name=lab", "--partition=lab", *count, "--chdir=/", "true"], user)
    except LabError as error:
        raise LabError(f"a step of user {plan.user} fails with --tracking {plan.tracking}: {error}") from None


def start_accounting(plan: Plan, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
    """Start the database and slurmdbd, and make the cluster known to it, with an account for the user."""
    output(accounting.install(plan.folder))
    os.environ.update(accounting.environment(plan.folder))
    daemons["database"] = launch(plan, "database", accounting.database(plan.folder))
    until((plan.folder / "database" / "socket").exists, "the database makes its socket", daemons)
    daemons["slurmdbd"] = launch(plan, "slurmdbd", ["slurmdbd", "-D"])
    add = ["sacctmgr", "--immediate", "add", "cluster", plan.name]
    until(lambda: answers(add) != "", "slurmdbd answers", daemons)
    output([*add[:3], "account", "lab"])
    output([*add[:3], "user", plan.user, "account=lab"])


def munge_options(folder: Path) -> list[str]:
    """For a munged of our own, with its own key: the machine's is left alone."""
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "state/munged.pid"}
    files["seed-file"] = "state/munged.seed"
    return [f"--{option}={folder}/{file}" for option, file in files.items()]


def spawn_node(plan: Plan, node: str, cgroups: Path | None) -> int:
    """Make one node, with its files, a cable to the bridge and an address; return its PID 1."""
    pid = spawn(lambda: keep_node(plan, node), cgroups / node if cgroups else None)
    ip(f"link add {node} type veth peer name eth0 netns {pid}", f"link set {node} master lab up")
    ip("link set lo up", f"address add {plan.addresses[node]}/24 dev eth0", "link set eth0 up", pid=pid)

    def settled() -> bool:  # it takes its name last, when its files are in place
        process = find_process(pid)
        if process is None:
            raise LabError(f"{node} could not be made, see keeper.log")
        return process.name == f"lab-{node}"

    until(settled, f"{node} has its files")
    return pid


def keep_node(plan: Plan, node: str) -> None:
    """What PID 1 of a node does: give the node its own files, then stay and let the kernel reap."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output is for the keeper's answer
    socket.sethostname(plan.hostname(node))
    tracking.mounts(plan.tracking, mount)
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


def keep_etc(plan: Plan) -> None:
    """Cover /etc, where the kernel can, with a read-only view of itself, for the lab's files to be mounted on.

    A mount on a file of the machine's own /etc is lost when that file is replaced, as installing packages does.
    """
    with contextlib.suppress(LabError):
        mount("overlay", "/etc", "overlay", MS_RDONLY, f"lowerdir={plan.folder}/etc:/etc")


def cover_etc(plan: Plan, place: str) -> None:
    """Put our files over some of /etc, in this mount namespace only."""
    for name in "passwd", "group", "shadow":
        if os.path.exists(f"/etc/{name}"):
            mount(plan.folder / name, f"/etc/{name}", flags=MS_BIND)
    if os.path.isdir("/run/nscd"):  # its socket: it would answer from the machine's own files
        mount("tmpfs", "/run/nscd", "tmpfs", options="mode=755")
    mount(plan.folder / f"hosts.{place}", "/etc/hosts", flags=MS_BIND)
    if os.path.exists("/etc/nsswitch.conf"):
        mount(plan.folder / "nsswitch.conf", "/etc/nsswitch.conf", flags=MS_BIND)


def check_home(plan: Plan) -> None:
    """Refuse a machine that would let the lab's user or root work in another home folder than they should."""
    for user, home in (plan.user, plan.account.home), ("root", plan.account.root_home):
        try:
            found = pwd.getpwnam(user).pw_dir
        except KeyError:
            found = "none"
        if found != home:
            raise LabError(f"the home folder of {user} inside is {found}, not {home}: see passwd in /etc/nsswitch.conf")


def spawn(work: Callable[[], None], cgroup: Path | None = None) -> int:
    """Run `work` as PID 1 of new namespaces and return its PID as seen from here; raises LabError.

    The cgroup, made if need be, becomes the root of its cgroup namespace.
    """
    reader, writer = os.pipe()
    between = os.fork()  # a process in between, since unshare moves only children to a new PID namespace
    if between == 0:
        try:
            if cgroup:
                tracking.enter(cgroup)
            check(LIBC.unshare(CLONE_ALL | (CLONE_NEWCGROUP if cgroup else 0)), "new namespaces")
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


def ip(*lines: str, pid: int | None = None) -> None:
    """Change the network here, or where a process is."""
    output(["ip", "-batch", "-"], inside(pid) if pid else [], text="\n".join(lines) + "\n")


def answers(words: Sequence[str]) -> str:
    """What a SLURM command prints, or nothing if it fails, as it does while its daemon starts."""
    with contextlib.suppress(LabError):
        return output(words)
    return ""


def launch(plan: Plan, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a daemon; what it prints goes to a log too, for it may fail before it opens its own."""
    with open(plan.folder / "logs" / f"{name}.out", "wb") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/")
