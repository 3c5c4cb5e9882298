"""How signals reach the processes of a step: as on clusters, where SLURM keeps each step in a cgroup.

There SIGKILL ends all processes of a step, also those that have left its session, and any other signal reaches only
those that slurmstepd itself has started, "tasks". The lab makes no cgroups, which look different on each machine, and
need not be writable. It uses proctrack/linuxproc, which follows parents, with two changes to slurmstepd.
"""

import os
import shutil
import sys
from pathlib import Path

from lab.base import SEARCH, output

# Each slurmd starts this for a step. A "subreaper" stays an ancestor of all that the step starts, even of processes
# that have lost their parent. So proctrack/linuxproc finds them, and ends them with the step.
STEPD = """#!{python} -IS
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
os.environ["LD_PRELOAD"] = "{preload}"
os.execv("{stepd}", sys.argv)
"""

# Preloaded into slurmstepd. It is the parent of tasks, and as a subreaper also of orphans: they are told apart by
# remembering what fork() has returned.
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
    /* SIGSTOP and SIGCONT reach all: a cluster freezes the cgroup of a suspended job, and thaws it. */
    int pass = pid <= 0 || number == 0 || number == SIGKILL || number == SIGSTOP || number == SIGCONT;
    for (unsigned i = 0; !pass && i < 65536 && i < count; i++) pass = tasks[i] == pid;
    return pass ? ((int (*)(pid_t, int))dlsym(RTLD_NEXT, "kill"))(pid, number) : 0;
}
"""


def write(folder: Path) -> None:
    """Write what slurmd starts for each step, instead of slurmstepd; raise LabError if it cannot be compiled."""
    source, preload = folder / "filter.c", folder / "filter.so"
    source.write_text(FILTER)
    output(["cc", "-O1", "-fPIC", "-shared", "-o", str(preload), str(source), "-ldl"])
    stepd = shutil.which("slurmstepd", path=SEARCH)
    python = os.path.realpath(sys.executable)  # not that of a virtual environment, which nodes may not have
    (folder / "slurmstepd").write_text(STEPD.format(python=python, stepd=stepd, preload=preload))
    (folder / "slurmstepd").chmod(0o755)
