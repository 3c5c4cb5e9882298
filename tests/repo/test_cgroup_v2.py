"""The lab's mode cgroup-v2 under a Linux of its own, which has no other cgroups, whatever this machine has."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from harness.launchers import ROOT
from harness.processes import finish

LINUX = shutil.which("linux.uml")  # the kernel as a program (Debian: user-mode-linux), with its modules beside it
MODULES = "lib/crc-ccitt net/llc/llc net/802/stp net/ipv6/ipv6 net/bridge/bridge drivers/net/veth fs/overlayfs/overlay"
FINIT_MODULE = 313  # the system call's number on x86-64: not all machines have a program for it
TESTS = "test_signals_reach_tasks_only or test_suspended_job_ends_with_its_lab"

# What that Linux runs first. It sees this machine's files and can change none of them: what is written to /tmp is in
# its memory.
INIT = """#!/bin/sh
export PATH={path} HOME=/root PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc || exit  # without it, what is written there would be meant for this machine
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
{python} - {modules} <<'END'
import ctypes, sys
for name in sys.argv[1:]:
    with open(name) as file:
        if ctypes.CDLL(None, use_errno=True).syscall({call}, file.fileno(), b"", 0):
            print(name, "cannot be loaded:", ctypes.get_errno())
END
mkdir /run/upper /run/work /run/shm
chmod 1777 /run/upper
mount -t overlay -o lowerdir=/tmp,upperdir=/run/upper,workdir=/run/work overlay /tmp
mkdir /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ln -s /proc/self/fd /dev/fd
cd {root}
{python} -m pytest -q --color=no -p no:cacheprovider -m repo tests/repo/test_lab.py -k "cgroup-v2 and ({tests})"
echo the tests ended with $?
echo o >/proc/sysrq-trigger
sleep 60
"""


@pytest.mark.runs("full")
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not LINUX, reason="cgroup-v2: needs a Linux that is a program: apt-get install user-mode-linux")
@pytest.mark.skipif(os.geteuid() != 0, reason="cgroup-v2: needs root")
def test_cgroup_v2(tmp_path: Path) -> None:
    """Where a kernel has cgroup v2 alone, signals reach tasks only, and a suspended job ends with its lab."""
    (folder,) = Path(LINUX).resolve().parents[1].glob("lib/uml/modules/*")
    modules = shlex.join(str(folder / "kernel" / f"{name}.ko") for name in MODULES.split())
    init = tmp_path / "init"
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    python, root = shlex.quote(sys.executable), shlex.quote(str(ROOT))
    own = {"path": shlex.quote(path), "python": python, "root": root, "modules": modules}
    text = INIT.format(call=FINIT_MODULE, tests=TESTS, **own)
    init.write_text(text)
    init.chmod(0o755)
    words = "mem=3G root=/dev/root rootfstype=hostfs rootflags=/ ro con=null con0=null,fd:1 quiet"
    done = finish([LINUX, *words.split(), f"init={init}"], 1000, env={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert "the tests ended with 0" in done.stdout and re.search(r"\b2 passed", done.stdout), done.stdout + done.stderr
