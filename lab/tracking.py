"""How a node's SLURM finds the processes of a step, and so which of them a signal reaches.

On clusters this is the business of `proctrack/cgroup`: SIGKILL ends everything that a step has started; any other
signal reaches only the processes that slurmstepd itself has started. The lab uses that plugin where it can. Every
node has a cgroup of its own, and sees it as the root of the hierarchy, thanks to a cgroup namespace.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lab.base import AS_BYTES, SEARCH, LabError

CGROUPS = {"cgroup-v2": ("cgroup2", ""), "cgroup-v1": ("cgroup", "freezer")}  # kind of file system, controller
MOUNT = Path("/sys/fs/cgroup")
# By preference. What each means is said by `lab status`.
MODES = {
    "cgroup-v2": "as on clusters, SLURM's proctrack/cgroup on cgroup v2: signals reach tasks only, SIGKILL reaches all",
    "cgroup-v1": "as on clusters, SLURM's proctrack/cgroup on cgroup v1: signals reach tasks only, SIGKILL reaches all",
    "filter": "like a cluster's, by a filter in slurmstepd: signals reach tasks only, SIGKILL reaches all",
    "linuxproc": "unlike most clusters', by proctrack/linuxproc: signals reach every process of a step, not tasks only",
}


def choose(wanted: str = "") -> list[str]:
    """The modes to try: the one that is wanted, or by preference those that should work here; raises LabError."""
    if wanted and wanted not in MODES:
        raise LabError(f"--tracking {wanted}: must be one of {' '.join(MODES)}")
    if wanted and (reason := why_not(wanted)):
        raise LabError(f"--tracking {wanted}: {reason}")
    return [wanted] if wanted else [mode for mode in MODES if not why_not(mode)]


def why_not(mode: str) -> str | None:
    """The reason why a mode does not work on this machine, or None if it does."""
    if mode == "filter":
        return None if shutil.which("cc", path=SEARCH) else "there is no C compiler named cc"
    if mode not in CGROUPS:
        return None
    plugin = f"cgroup_{mode[-2:]}.so"
    if not plugin_exists(plugin) or not plugin_exists("proctrack_cgroup.so"):
        return f"this SLURM has no {plugin}"
    parent = hierarchy(mode)
    if not parent:
        return f"{' '.join(CGROUPS[mode]).strip()} is not mounted on this machine"
    if not os.access(parent, os.W_OK):
        return f"{parent} is read-only"
    # The same hierarchy must be there for a new namespace to mount.
    if mode == "cgroup-v2" and len(Path("/proc/self/cgroup").read_text(**AS_BYTES).splitlines()) > 1:
        return "SLURM's plugin refuses a machine that has cgroup v1 as well"
    kind, controller = CGROUPS[mode]
    spaces = ["unshare", "--mount", "--cgroup", "--pid", "--fork", "mount", "-t", kind]
    options = ["-o", controller] if controller else []
    test = subprocess.run([*spaces, *options, "cgroup", "/sys"], capture_output=True, text=True, env={"PATH": SEARCH})
    return f"cannot mount {kind}: {test.stderr.strip()}" if test.returncode else None


def plugin_exists(name: str) -> bool:
    """Whether SLURM has a plugin, which lies in a folder beside that of its programs."""
    program = shutil.which("slurmd", path=SEARCH)
    prefix = Path(os.path.realpath(program)).parent.parent if program else Path("/usr")
    return any(next(prefix.glob(f"{folder}/{name}"), None) for folder in ("lib*/slurm*", "lib*/*/slurm*"))


def hierarchy(mode: str) -> Path | None:
    """Where this machine has mounted the hierarchy that a mode uses, if it uses any."""
    if mode not in CGROUPS:
        return None
    kind, controller = CGROUPS[mode]
    for line in Path("/proc/self/mounts").read_text(**AS_BYTES).splitlines():
        _, folder, found, options, *_ = line.split()
        if found == kind and (not controller or controller in options.split(",")):
            return Path(folder)
    return None


def settings(mode: str) -> dict[str, str]:
    """Lines for slurm.conf."""
    return {"ProctrackType": "proctrack/cgroup" if mode in CGROUPS else "proctrack/linuxproc"}


def cgroup_conf(mode: str) -> str:
    """The text of cgroup.conf. Without a plugin's name, slurmd looks for the machine's cgroups, and for systemd."""
    return "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n" if mode == "cgroup-v2" else "CgroupPlugin=cgroup/v1\n"


def leftovers(name: str) -> list[Path]:
    """The cgroups of a lab, in whichever hierarchy."""
    parents = [hierarchy(mode) for mode in CGROUPS]
    return [parent / name for parent in parents if parent and (parent / name).is_dir()]


def enter(node: Path) -> None:
    """Move this process to the cgroup of a node, which is made if need be."""
    node.mkdir(parents=True, exist_ok=True)
    (node / "cgroup.procs").write_text("0")


def mounts(mode: str, mount: Callable[..., None]) -> None:
    """Give a node the hierarchy, where SLURM looks for it; the node's cgroup is its root."""
    if mode == "cgroup-v2":
        mount("cgroup2", MOUNT, "cgroup2")
        (MOUNT / "system.slice").mkdir(exist_ok=True)  # systemd makes it elsewhere, and SLURM looks for it
    elif mode == "cgroup-v1":
        mount("tmpfs", MOUNT, "tmpfs", options="mode=755")
        (MOUNT / "freezer").mkdir()
        mount("cgroup", MOUNT / "freezer", "cgroup", options="freezer")


def thaw(lab: Path) -> None:
    """Let frozen processes of a lab run, so that they can end: with cgroup v1, SIGKILL does not end them else."""
    for state in lab.rglob("freezer.state"):
        with contextlib.suppress(OSError):  # the root has none, and a step's may be gone by now
            state.write_text("THAWED")


def remove(lab: Path) -> bool:
    """Remove a lab's cgroups; returns False if there still is a process in one."""
    try:
        for parent, folders, _ in os.walk(lab, topdown=False):
            for folder in folders:
                os.rmdir(os.path.join(parent, folder))
        lab.rmdir()
    except FileNotFoundError:
        return not lab.exists()
    except OSError:
        return False
    return True


# The nodes' slurmstepd is started by this. A "subreaper" stays an ancestor of whatever its step starts,
# even of processes that left their session or lost their parent: proctrack/linuxproc follows parents, and so
# ends them with the step, as a cgroup would.
STEPD = """#!{python} -IS
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
if "{preload}":
    os.environ["LD_PRELOAD"] = "{preload}"
os.execv("{stepd}", sys.argv)
"""

# Preloaded into slurmstepd by the mode `filter`. Tasks are the processes that slurmstepd has forked. It is the parent
# of orphans too, as it is a subreaper, so they are told apart by remembering what fork() returned.
FILTER = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static pid_t tasks[65536];
static atomic_uint count;

__attribute__((constructor)) static void begin(void) { unsetenv("LD_PRELOAD"); }

pid_t fork(void) {
    pid_t pid = ((pid_t (*)(void))dlsym(RTLD_NEXT, "fork"))();
    if (pid > 0) tasks[atomic_fetch_add(&count, 1) % 65536] = pid;
    return pid;
}

int kill(pid_t pid, int number) {
    /* SIGSTOP and SIGCONT reach all: in their place a cgroup is frozen, and thawed. */
    int pass = pid <= 0 || number == 0 || number == SIGKILL || number == SIGSTOP || number == SIGCONT;
    for (unsigned i = 0; !pass && i < 65536 && i < count; i++) pass = tasks[i] == pid;
    return pass ? ((int (*)(pid_t, int))dlsym(RTLD_NEXT, "kill"))(pid, number) : 0;
}
"""


def write(mode: str, folder: Path) -> None:
    """Write what slurmd starts for each step, in the place of slurmstepd, unless cgroups are used."""
    if mode in CGROUPS:
        return
    preload = ""
    if mode == "filter":
        (folder / "filter.c").write_text(FILTER)
        preload = f"{folder}/filter.so"
        words = ["cc", "-O1", "-fPIC", "-shared", "-o", preload, str(folder / "filter.c"), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": SEARCH})
        if done.returncode:
            raise LabError(f"--tracking filter: cannot compile it: {done.stderr.strip().splitlines()[-1]}")
    # Not the Python of a virtual environment, which nodes may not have.
    python, stepd = os.path.realpath(sys.executable), shutil.which("slurmstepd", path=SEARCH)
    (folder / "slurmstepd").write_text(STEPD.format(python=python, stepd=stepd, preload=preload))
    (folder / "slurmstepd").chmod(0o755)


def slurmd_options(mode: str, folder: Path) -> list[str]:
    """What slurmd is started with."""
    return [] if mode in CGROUPS else ["-d", str(folder / "slurmstepd")]
