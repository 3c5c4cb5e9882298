"""The lab seen from outside: start it, run commands in it, ask it, end it."""

import contextlib
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.base import SEARCH, LabError, inside, output, until
from lab.config import HEAD, Plan, Wanted

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
PROGRAMS = (*DAEMONS, *COMMANDS, "cc", "ip", "tc", "nsenter", "setpriv", "unshare")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge iproute2 gcc libc6-dev openmpi-bin libpmix-dev"
# The states that `scontrol show job` gives to a job that will not run again.
FAILED = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
FINISHED = ("COMPLETED", *FAILED)


def why_not() -> str | None:
    """Return the reason why no lab can start on this machine, in one line, or None if one can."""
    if sys.platform != "linux":
        return "a lab needs Linux"
    if os.geteuid() != 0:
        return "a lab needs root: run it with sudo"
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH)]
    if missing:
        return f"missing programs: {' '.join(missing)} ({INSTALL})"
    return why_no_namespaces()


@functools.cache  # several modules of tests ask, each worker of theirs, and a machine does not change its mind
def why_no_namespaces() -> str | None:
    """Return why this machine permits no namespaces with a network of their own, or None if it does."""
    spaces = ["--pid", "--fork", "--mount", "--net", "--ipc", "--uts", "--mount-proc"]
    for kind in ["bridge"], ["veth", "peer", "name", "eth0"]:
        test = ["unshare", *spaces, "ip", "link", "add", "lab", "type", *kind]
        done = subprocess.run(test, capture_output=True, text=True, env={"PATH": SEARCH})
        if done.returncode != 0:
            return f"this machine does not permit namespaces with a {kind[0]}: {done.stderr.strip()}"
    return None


class Lab:
    """One lab. As a context manager it is up inside the block, and vanishes with this process in any case.

    Methods raise LabError, whose text is one line for the user. Times are in seconds.
    """

    def __init__(self, wanted: Wanted | None = None) -> None:
        self.wanted = wanted or Wanted()
        self.folder = self.wanted.folder  # settings, logs and state
        self.nodes = self.wanted.node_names
        self.addresses = self.wanted.addresses  # of the nodes and of the head

    def _use(self, plan: Plan) -> None:
        """Know who works in a lab that is up, or is about to be."""
        self.user, self.uid, self.gid, self.home = plan.account

    @classmethod
    def find(cls, name: str = "lab") -> "Lab":
        """Return the running lab of that name; raise LabError if there is none."""
        named = cls(Wanted(name=name))
        named.pid_of(HEAD)
        plan = Plan.load(named.folder)
        lab = cls(plan)
        lab._use(plan)
        return lab

    def __enter__(self) -> "Lab":
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    # Up and down.

    def up(self, detached: bool = False) -> "Lab":
        """Start the lab and return when every node is idle and has run a step of the user's.

        Detached, it outlives this process. After a failure, Ctrl-C included, nothing runs on; after a LabError the logs
        stay in the lab's folder.
        """
        reason = why_not()
        if reason:
            raise LabError(reason)
        if self._keeper():
            raise LabError(f"a lab named {self.wanted.name} is running; end it first: python -m lab down")
        self.down()  # what is left of one whose keeper was killed, or that did not start
        mask = os.umask(0o022)  # all users read what root makes here
        try:
            plan = Plan.make(self.wanted)
            self.folder.mkdir()
            self.folder.chmod(0o711)  # munged wants every user to reach its socket
            plan.write()
            self._start_keeper()
            self._use(plan)
            if detached:
                (self.folder / "detached").touch()
        except LabError as error:
            self._kill()
            raise LabError(f"{error}; logs are in {self.folder}/logs") from None
        except BaseException:
            self.down()
            raise
        finally:
            os.umask(mask)
        return self

    def _start_keeper(self) -> None:
        """Start the process that the lab depends on, and wait until it says that the lab is ready."""
        owner = os.pidfd_open(os.getpid())
        with open(self.folder / "logs" / "keeper.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", "from lab.keeper import main; main()", str(self.folder), str(owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).resolve().parent.parent,
                env={"PATH": SEARCH, "LANG": "C.UTF-8"},
                pass_fds=[owner],
                start_new_session=True,  # Ctrl-C is for us alone
            )
        os.close(owner)
        assert process.stdout is not None
        try:
            answer = process.stdout.readline().strip()
        finally:
            process.stdout.close()
            process.wait()  # now the keeper's PID is on record, so that `down` can find it
        if answer != "ready":
            raise LabError(answer.removeprefix("error: ") or "the keeper ended, see keeper.log")

    def _keeper(self) -> int | None:
        """Return the keeper's PID on this machine, or None if it has ended, or if the folder is somebody else's."""
        try:
            if self.folder.lstat().st_uid != os.geteuid():
                return None
            pid = int((self.folder / "keeper").read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if os.fsencode(self.folder) in words else None  # not a later process with the same number

    def _kill(self) -> bool:
        """End the lab with all its processes; return False if none was running."""
        pid = self._keeper()
        with contextlib.suppress(ProcessLookupError):
            if pid:
                handle = os.pidfd_open(pid)
                if self._keeper() == pid:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                # The kernel reports the end of a PID 1 only after the end of all others.
                if not select.select([handle], [], [], 60)[0]:
                    raise LabError(f"processes of the lab do not end; its keeper is process {pid}")
                os.close(handle)
        return pid is not None

    def down(self) -> bool:
        """End the lab with all its processes, and remove its folder; return False if none was running."""
        ended = self._kill()
        if os.path.lexists(self.folder):
            if self.folder.is_symlink() or self.folder.stat().st_uid != os.geteuid():
                raise LabError(f"{self.folder} is not a lab's folder: move it away")
            shutil.rmtree(self.folder)
        return ended

    # Commands inside.

    def command(
        self,
        words: Sequence[str],
        node: str = HEAD,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> list[str]:
        """Return the command line, for subprocess or exec, that runs `words` inside: on the head, or on one node.

        The lab's user runs it, or root. It keeps the current folder, and the environment with `env` added, but without
        TMPDIR, which names a folder that nodes do not have, and what another SLURM may have set.
        """
        # If nsenter is killed, for example after a time-out, the command must not run on.
        start = [*inside(self.pid_of(node)), "setpriv", "--pdeathsig", "TERM"]
        variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        if user == "root":
            variables |= {"HOME": self.wanted.root_home, "USER": "root", "LOGNAME": "root"}
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        else:
            start += [f"--reuid={self.uid}", f"--regid={self.gid}", "--init-groups"]
            variables |= {"HOME": self.home, "USER": self.user, "LOGNAME": self.user}
        if self.wanted.gpus:  # stand-ins: on a cluster the examples would refuse to train on CPU here
            variables["ALLOW_CPU"] = "1"
        variables |= env or {}
        foreign = [f"--unset={name}" for name in os.environ if name == "TMPDIR" or name.startswith(("SLURM_", "XDG_"))]
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [*start, "env", f"--chdir={cwd or os.getcwd()}", *foreign, *settings, *words]

    def run(
        self,
        words: Sequence[str],
        node: str = HEAD,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout: float | None = 120,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and wait; its output is captured as text.

        `options` go to subprocess.run, and so does `timeout`, after which that raises TimeoutExpired.
        """
        defaults = {"capture_output": True, "timeout": timeout, "text": True, "errors": "replace"}
        return subprocess.run(self.command(words, node, cwd, env, user), **defaults | options)

    def slurm(self, *words: str) -> str:
        """Return the output of a SLURM command, run by root; raise LabError if it fails."""
        return output(words, self.command([], cwd="/", user="root"))

    def states(self) -> dict[str, str]:
        """Return what SLURM says about each node: idle, allocated, down* (the star: it does not answer), ..."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_node(self, node: str, *states: str, seconds: float = 300) -> None:
        """Wait, at most so many seconds, until SLURM gives one of these states to a node; raise LabError."""
        self._wait(lambda: self.states()[node], f"{node} is", states, seconds)

    def job(self, job: int | str) -> dict[str, str]:
        """Return what `scontrol show job` says: JobState, ExitCode, Restarts, NodeList, StdOut, ..."""
        text = self.slurm("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", text.splitlines()[0]))

    def wait_for_job(self, job: int | str, *states: str, seconds: float = 300) -> dict[str, str]:
        """Wait, at most so many seconds, for one of these states of a job, by default its end; return `job(job)`."""
        self._wait(lambda: self.job(job)["JobState"], f"job {job} is", states or FINISHED, seconds)
        return self.job(job)

    def _wait(self, ask: Callable[[], str], what: str, wanted: Sequence[str], seconds: float) -> None:
        # Each question costs several processes, so it is not asked too often.
        until(lambda: ask() in wanted, f"{what} {' or '.join(wanted)}", seconds=seconds, pause=1)

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Return the command lines of all processes of the lab, or of one node, by this machine's PIDs."""
        places = [node] if node else [HEAD, *self.nodes]
        spaces = {os.readlink(f"/proc/{self.pid_of(place)}/ns/pid") for place in places}
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may have ended
                if os.readlink(folder / "ns" / "pid") in spaces:
                    line = (folder / "cmdline").read_text(errors="replace")
                    found[int(folder.name)] = line.replace("\0", " ").strip()
        return found

    def pid_of(self, place: str) -> int:
        """Return the PID 1 of the head or of a node, as this machine numbers it; raise LabError."""
        top = self._keeper()
        if not top:
            raise LabError(f"no lab named {self.wanted.name} is running; start one: python -m lab up")
        if place == HEAD:
            return top
        for pid in Path(f"/proc/{top}/task/{top}/children").read_text().split():
            with contextlib.suppress(OSError):  # it may have ended
                if Path(f"/proc/{pid}/comm").read_text() == f"lab-{place}\n":
                    return int(pid)
        raise LabError(f"no such node: {place}; there are {' '.join(self.nodes)}")
