"""The lab seen from outside: start it, run commands in it, break it, end it."""

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

from lab.accounting import check as check_accounting
from lab.base import AS_TEXT, SEARCH, LabError, find_process, inside, locked, output, until, usual_umask
from lab.config import HEAD, Plan, Wanted
from lab.tracking import choose, leftovers, remove, thaw

DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
COMMANDS = ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
PROGRAMS = (*DAEMONS, *COMMANDS, "ip", "mount", "nsenter", "setpriv", "unshare")
# Labs start and end one after the other: else two could take one folder for a stale one.
LOCK, LOCK_SECONDS = Path("/run/slurm-lab.lock"), 300
ANOTHER = "another lab has started or ended"  # what is waited for
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge iproute2 openmpi-bin libpmix-dev"
# The states that `scontrol show job` gives to a job that will not run again.
FAILED = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
FINISHED = ("COMPLETED", *FAILED)


def why_not() -> str | None:
    """The reason why no lab can start on this machine, in one line, or None if one can."""
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
    """The reason why this machine permits no namespaces with a network of their own, or None if it does."""
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
        self._wanted = wanted or Wanted()
        self.folder = self._wanted.folder  # settings, logs and state
        self.nodes = self._wanted.node_names
        self.addresses = self._wanted.addresses  # of the nodes and of the head

    def _use(self, plan: Plan) -> None:
        """Know what has been decided for a lab that is up, or is about to be."""
        self.plan = plan
        self.tracking = plan.tracking  # one of tracking.MODES
        self.user, self.uid, self.gid, self.home, *_ = plan.account

    @classmethod
    def find(cls, name: str = "lab") -> "Lab":
        """The running lab of that name; raises LabError if there is none."""
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

        Detached, it outlives this process, which ignores Ctrl-C from then on.

        After a failure, Ctrl-C included, nothing runs on; after a LabError the logs stay in the lab's folder.
        """
        reason = why_not()
        if reason:
            raise LabError(reason)
        if self._wanted.accounting:
            check_accounting()
        with locked(LOCK, ANOTHER, LOCK_SECONDS):
            if self._running():
                raise LabError(f"a lab named {self._wanted.name} is running; end it first: python -m lab down")
            modes = choose(self._wanted.tracking)
            for mode in modes:
                self.down()  # what is left of one whose keeper was killed, or of the last attempt
                self._use(Plan.make(self._wanted, mode))
                try:
                    self._start(detached)
                    break
                except LabError as error:
                    self.down(keep_logs=True)
                    # SLURM may dislike a machine's cgroups for reasons of its own: then the next mode may do.
                    if mode == modes[-1] or not re.match(r"node\d+ |a step |cannot make namespaces", str(error)):
                        raise LabError(f"{error}; logs are in {self.folder}/logs") from None
                except BaseException:
                    self.down()
                    raise
        return self

    def _start(self, detached: bool) -> None:
        with usual_umask():
            self.folder.mkdir()
            self.folder.chmod(0o711)  # munged wants every user to reach its socket
            self.plan.write()
            self._start_keeper()
            if detached:
                # From here on it stays, and a Ctrl-C must not say otherwise
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                (self.folder / "detached").touch()

    def _start_keeper(self) -> None:
        """Start the process that the lab hangs on, and wait until it says that the lab is ready."""
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
        """The keeper's PID on this machine, or None if it has ended, or if the folder is somebody else's."""
        try:
            if self.folder.lstat().st_uid != os.geteuid():
                return None
            pid, start = (self.folder / "keeper").read_text().split()
        except (OSError, ValueError):
            return None
        process = find_process(int(pid))
        return int(pid) if process and process.start == start else None

    def _running(self) -> int | None:
        """The keeper's PID, or None if it has ended or is about to: it leaves its namespaces first."""
        pid = self._keeper()
        return pid if os.path.exists(f"/proc/{pid}/ns/ipc") else None

    def down(self, keep_logs: bool = False) -> bool:
        """End the lab with all its processes, and remove its folder; returns False if none was running."""
        pid = self._keeper()
        with contextlib.suppress(ProcessLookupError):
            if pid:
                handle = os.pidfd_open(pid)
                if self._keeper() == pid:  # then the handle is not that of a later process
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    for lab in leftovers(self.folder.name):
                        thaw(lab)
                # The kernel reports the end of a PID 1 only after the end of all others.
                if not select.select([handle], [], [], 60)[0]:
                    raise LabError(f"processes of the lab do not end; its keeper is process {pid}")
                os.close(handle)
        for lab in leftovers(self.folder.name):  # all that the keeper made before its end
            until(lambda lab=lab: remove(lab), f"{lab} can be removed, since no process is left in it")
        self._remove_folder(keep_logs)
        return pid is not None

    def _remove_folder(self, keep_logs: bool = False) -> None:
        if not os.path.lexists(self.folder):
            return
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.geteuid():
            raise LabError(f"{self.folder} is not a lab's folder: move it away")
        if not keep_logs:
            shutil.rmtree(self.folder)
            return
        for entry in self.folder.iterdir():
            if entry.name != "logs":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    # Commands inside.

    def command(
        self,
        words: Sequence[str],
        node: str = HEAD,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        user: str = "",
    ) -> list[str]:
        """The command line, for subprocess or exec, that runs `words` inside: on the head, or on one node.

        It is run by the lab's user, or by root. It keeps the current folder, and the environment with `env` added,
        but without TMPDIR, which names a folder that nodes do not have, and what another SLURM may have set.
        """
        # If nsenter is killed, for example after a time-out, the command must not run on.
        start = [*inside(self.pid_of(node)), "setpriv", "--pdeathsig", "TERM"]
        variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        if "root" in (user, self.user):
            variables |= {"HOME": self.plan.account.root_home, "USER": "root", "LOGNAME": "root"}
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        else:
            start += [f"--reuid={self.uid}", f"--regid={self.gid}", "--init-groups"]
            variables |= {"HOME": self.home, "USER": self.user, "LOGNAME": self.user}
        if self._wanted.gpus:  # stand-ins: on a cluster the examples would refuse to train on CPU here
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
        options = {"capture_output": True, "timeout": timeout, **AS_TEXT} | options
        return subprocess.run(self.command(words, node, cwd, env, user), **options)

    def check_folder(self, words: Sequence[str], node: str, cwd: str) -> None:
        """Raise LabError if a command cannot work in a folder, for a reason that a user of the lab can correct."""
        status = self.run(["test", "-w", "."], node, cwd).returncode
        if status == 0:
            return
        help = f"start the lab with --user root, or use a folder of {self.user}'s own, such as {self.home}"
        if status != 1 and self.run(["true"], node, cwd, user="root").returncode != 0:
            raise LabError(f"{cwd} is not there inside: start the lab in it, or with --share {cwd}")
        if status != 1:
            raise LabError(f"user {self.user} cannot enter {cwd}: {help}")
        files = (Path(cwd, word) for word in words[1:] if not word.startswith("-"))
        script = next(filter(Path.is_file, files), None)
        text = " ".join(words) + (script.read_text(errors="replace") if script else "")
        # A job's output goes to the folder where it was submitted, unless it says otherwise.
        if words[0] == "sbatch" and not re.search(r"\s(-o|--output|-D|--chdir)[ =]*/", text):
            raise LabError(f"user {self.user} cannot write to {cwd}, where the job's output goes: {help}")

    def slurm(self, *words: str) -> str:
        """The output of a SLURM command; raises LabError if it fails."""
        return output(words, self.command([], cwd="/", user="root"))

    def states(self) -> dict[str, str]:
        """What SLURM says about each node: idle, allocated, down* (the star: it does not answer), ..."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_node(self, node: str, *states: str, seconds: float = 300) -> None:
        """Wait, at most so many seconds, until SLURM gives one of these states to a node; raises LabError."""
        self._wait(lambda: self.states()[node], f"{node} is", states, seconds)

    def job(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, NodeList, StdOut, ..."""
        text = self.slurm("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", text.splitlines()[0]))

    def wait_for_job(self, job: int | str, *states: str, seconds: float = 300) -> dict[str, str]:
        """Wait, at most so many seconds, for one of these states of a job, by default its end; returns `job(job)`."""
        self._wait(lambda: self.job(job)["JobState"], f"job {job} is", states or FINISHED, seconds)
        return self.job(job)

    def _wait(self, ask: Callable[[], str], what: str, wanted: Sequence[str], seconds: float) -> None:
        # Each question costs several processes, so it is not asked too often.
        until(lambda: ask() in wanted, f"{what} {' or '.join(wanted)}", seconds=seconds, pause=1)

    def processes(self, node: str | None = None) -> dict[int, str]:
        """Command lines of all processes of the lab, of one node, or of the head, by this machine's PIDs."""
        places = [node] if node else [HEAD, *self.nodes]
        spaces = {os.readlink(f"/proc/{self.pid_of(place)}/ns/pid") for place in places}
        found = {}
        for pid in pids():
            with contextlib.suppress(OSError):  # it may have ended
                if os.readlink(f"/proc/{pid}/ns/pid") in spaces:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text(**AS_TEXT).replace("\0", " ").strip()
        return found

    def pid_of(self, place: str) -> int:
        """The PID 1 of the head or of a node, as this machine numbers it; raises LabError."""
        top = self._running()
        if not top:
            raise LabError(f"no lab named {self._wanted.name} is running; start one: python -m lab up")
        if place == HEAD:
            return top
        for pid in pids():
            process = find_process(pid)
            if process and (process.name, process.parent) == (f"lab-{place}", top):
                return pid
        raise LabError(f"no such node: {place}; there are {' '.join(self.nodes)}")


def pids() -> list[int]:
    """All processes of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
