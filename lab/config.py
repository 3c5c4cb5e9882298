"""What a lab looks like: its numbers, its names and addresses, and the files that SLURM reads."""

import contextlib
import grp
import json
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from lab import signals
from lab.base import LabError

HEAD = "head"  # where slurmctld and munged run, and where jobs are submitted
STUDENT = "lab-student"  # the name of a user that is made up inside the lab: nobody has it by chance
UIDS = range(61184, 65520)  # where a made-up user's number is looked for: systemd keeps these for users who come and go
NETWORK = "10.210.0"  # inside the lab's own network namespace, so every lab may use the same one
SPOOL = "spool"  # in the lab's folder; every node mounts a private file system on it


class Account(NamedTuple):
    """Who runs commands and jobs in a lab."""

    user: str
    uid: int
    gid: int
    home: str


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a lab: the parameters of `Lab`, and the options of `python -m lab up`.

    All nodes see the folders of `share`, which lie in /tmp, and the current folder. A line of `conf` is for slurm.conf,
    and replaces the lab's own with the same key. `hosts` has what names resolve to in one place, such as
    {"node1": {"node1": "127.0.1.1"}}.
    """

    nodes: int = 2
    cpus: int = 4
    gpus: int = 0
    name: str = "lab"
    share: Sequence[str | Path] = ()
    conf: Sequence[str] = ()
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot work; raise LabError."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", self.name):
            raise LabError(f"--name {self.name!r}: use at most 32 letters, digits, - and _")
        for what, low, high in ("nodes", 1, 64), ("cpus", 1, 256), ("gpus", 0, 16):
            value = getattr(self, what)
            if not low <= value <= high:
                raise LabError(f"--{what} {value}: must be a number from {low} to {high}")

    @property
    def folder(self) -> Path:
        """The only trace of a lab outside of its namespaces."""
        return Path("/tmp") / f"slurm-lab-{self.name}"

    @property
    def root_home(self) -> str:
        """The home folder of root inside."""
        return str(self.folder / "root")

    @property
    def node_names(self) -> list[str]:
        """node1, node2, ..."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        """The address of every node and of the head, by name."""
        nodes = {node: f"{NETWORK}.{number}" for number, node in enumerate(self.node_names, start=1)}
        return {**nodes, HEAD: f"{NETWORK}.254"}


def find_account(wanted: Wanted) -> Account:
    """Return who runs the jobs: the owner of the current folder, or a user who is made up if that is root.

    An owner who has no name on this machine gets one inside the lab. His home folder is an empty one in the lab's, so
    that nothing in the lab changes what is in his own.
    """
    home, owner = str(wanted.folder / "home"), os.stat(".").st_uid
    try:
        entry = pwd.getpwuid(owner) if owner else pwd.getpwnam(STUDENT)
    except KeyError:
        uid = owner or next(uid for uid in UIDS if is_nobodys(uid))
        return Account(STUDENT, uid, uid, home)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, home)


def is_nobodys(number: int) -> bool:
    """Return whether this machine has neither a user nor a group of this number.

    It asks for each number, as a directory of users, such as sssd, need not list all that it knows.
    """
    for find in pwd.getpwuid, grp.getgrgid:
        with contextlib.suppress(KeyError):
            find(number)
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Plan(Wanted):
    """The settings of one lab, with nothing left open; `write` turns them into files, `load` reads them back."""

    account: Account

    @classmethod
    def make(cls, wanted: Wanted) -> "Plan":
        """Decide what was left open: who works in the lab, and which folders of /tmp are shared."""
        for path in wanted.share:
            if os.path.abspath(path) == "/tmp" or not os.path.isdir(path):
                raise LabError(f"--share {path}: must be a folder, and not /tmp itself: every node has its own")
        folders = [*wanted.share, *([] if os.getcwd() == "/tmp" else [os.getcwd()])]
        share = [name for path in folders for name in (os.path.abspath(path), os.path.realpath(path))]
        return cls(**vars(wanted) | {"share": share}, account=find_account(wanted))

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        """Read what `write` has written into a lab's folder."""
        settings = json.loads((folder / "lab.json").read_text())
        return cls(**settings | {"account": Account(*settings["account"])})

    def write(self) -> None:
        """Fill the lab's folder, which exists and is empty, with all that its daemons read."""
        (self.folder / "lab.json").write_text(json.dumps(asdict(self), indent=1))
        for name in "logs", "state", "etc", SPOOL:
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(self.slurm_conf())
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else slurmd looks for the machine's
        (self.folder / "gres.conf").write_text(self.gres_conf())
        (self.folder / "nsswitch.conf").write_text(nsswitch_conf())
        for place in self.addresses:
            names = {"localhost": "127.0.0.1", **self.addresses, **self.hosts.get(place, {})}
            lines = [f"{address}\t{name}\n" for name, address in names.items()]
            (self.folder / f"hosts.{place}").write_text("".join(lines))
        secret(self.folder / "munge.key", os.urandom(128))
        signals.write(self.folder)
        self.write_users()

    def write_users(self) -> None:
        """Write the files that have the lab's user, and root, with home folders in the lab: the first entry counts."""
        who, root = self.account, Account("root", 0, 0, self.root_home)
        for one in who, root:
            Path(one.home).mkdir(mode=0o700)
            os.chown(one.home, one.uid, one.gid)
        entries = [f"{one.user}:x:{one.uid}:{one.gid}::{one.home}:/bin/bash\n" for one in (who, root)]
        self.put_before("passwd", entries)
        # The machine has the group of any other user.
        self.put_before("group", [f"{who.user}:x:{who.gid}:\n"] if who.user == STUDENT else [])
        # SLURM asks `su - USER` for the login environment of a job with --export=NONE, and su wants an entry here.
        shadow = [f"{one.user}:*:20000:0:99999:7:::\n" for one in (who, root)]
        secret(self.folder / "shadow", "".join(shadow).encode())

    def put_before(self, name: str, lines: list[str]) -> None:
        """Write lines, and then the machine's own file of that name in /etc."""
        (self.folder / name).write_bytes("".join(lines).encode() + Path("/etc", name).read_bytes())

    def slurmd(self, node: str) -> list[str]:
        """Return the command that is a node's slurmd."""
        return ["slurmd", "-D", "-N", node, "-d", str(self.folder / "slurmstepd")]

    def gpu_files(self) -> list[Path]:
        """Return the files that stand for GPUs: SLURM wants one for each that it counts."""
        return [self.folder / f"gpu{number}" for number in range(self.gpus)]

    def gres_conf(self) -> str:
        """Return the text of gres.conf."""
        return "AutoDetect=off\n" + "".join(f"Name=gpu File={file}\n" for file in self.gpu_files())

    def slurm_conf(self) -> str:
        """Return the text of slurm.conf; a line of `conf` replaces ours with the same key."""
        settings = SETTINGS | {
            "ClusterName": self.name,
            "SlurmctldHost": f"{HEAD}({self.addresses[HEAD]})",
            "AuthInfo": f"cred_expire=5,socket={self.folder}/munge.socket",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/{SPOOL}",
            "SlurmctldPidFile": f"{self.folder}/state/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/{SPOOL}/slurmd.pid",
            "SlurmctldLogFile": f"{self.folder}/logs/slurmctld.log",
            "SlurmdLogFile": f"{self.folder}/logs/%n.log",
        }
        replaced = {line.partition("=")[0].strip().lower() for line in self.conf}
        lines = [f"{key}={value}" for key, value in settings.items() if key.lower() not in replaced]
        lines += ["GresTypes=gpu"] if self.gpus else []
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines += [
            f"NodeName={node} NodeAddr={self.addresses[node]} CPUs={self.cpus} Boards=1 SocketsPerBoard=1"
            f" CoresPerSocket={self.cpus} ThreadsPerCore=1 RealMemory=1000000{gres} State=UNKNOWN"
            for node in self.node_names
        ]
        lines += ["PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP", *self.conf]
        return "\n".join(lines) + "\n"


SETTINGS = {
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "MpiDefault": "none",
    "ProctrackType": "proctrack/linuxproc",  # with the changes of signals.py
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SlurmdParameters": "config_overrides",  # nodes may claim more than the machine has
    "TmpFS": "/tmp",
    "ReturnToService": "2",  # a node that was away comes back by itself
    "JobRequeue": "1",
    "AccountingStorageType": "accounting_storage/none",
    "MailProg": "/bin/true",
    # Everything below is about time, in seconds. After SIGTERM a job has what SLURM gives by default: JupyterLab alone
    # takes 5 s of it for a kernel that does not end. For the rest a real cluster waits longer.
    "KillWait": "30",
    "SlurmdTimeout": "20",
    "MinJobAge": "3600",  # finished jobs stay visible in `scontrol show job`
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
}


def secret(file: Path, content: bytes) -> None:
    """Write a file that root alone can read."""
    file.touch(mode=0o400)
    file.write_bytes(content)


def nsswitch_conf() -> str:
    """Return the machine's nsswitch.conf with the hosts file as the only source of names, and users' files first.

    There is no DNS inside, and a resolver on the machine would answer with the machine's own names. A directory of
    users, such as sssd, would answer with the user's real home folder.
    """
    path = Path("/etc/nsswitch.conf")
    lines = path.read_text().splitlines() if path.exists() else []
    lines = [re.sub("^passwd:", "passwd: files", line) for line in lines if not line.startswith("hosts:")]
    return "\n".join([*lines, "hosts: files"]) + "\n"
