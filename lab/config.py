"""What a lab looks like: its numbers, its names and addresses, and the files that SLURM reads."""

import contextlib
import grp
import json
import os
import pwd
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab import accounting, tracking
from lab.base import AS_BYTES, LabError

HEAD = "head"  # where slurmctld and munged run, and where jobs are submitted
STUDENT = "lab-student"  # the name of a user that is made up inside the lab: nobody has it by chance
UIDS = range(61184, 65520)  # where a made-up user's number is looked for: systemd keeps these for users who come and go
NETWORK = "10.210.0"  # inside the lab's own network namespace, so every lab may use the same one
SPOOL = "spool"  # in the lab's folder; every node mounts a private file system on it


@dataclass(frozen=True)
class Plan:
    """The settings of one lab; `write` turns them into files, `load` reads them back."""

    name: str = "lab"
    nodes: int = 2
    cpus: int = 4
    gpus: int = 0
    share: list[str] = field(default_factory=list)
    extra_conf: list[str] = field(default_factory=list)
    hosts: dict[str, dict[str, str]] = field(default_factory=dict)
    tracking: str = "linuxproc"
    user: str = ""
    uid: int = 0
    gid: int = 0
    home: str = ""
    root_home: str = ""
    made_up: bool = False  # whether the user exists inside the lab only
    real_home: bool = False
    domain: str = ""
    accounting: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work; raises LabError."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", self.name):
            raise LabError(f"--name {self.name!r}: use at most 32 letters, digits, - and _")
        for what, low, high in ("nodes", 1, 64), ("cpus", 1, 256), ("gpus", 0, 16):
            value = getattr(self, what)
            if not isinstance(value, int) or not low <= value <= high:
                raise LabError(f"--{what} {value}: must be a number from {low} to {high}")
        for path in self.share:
            if path == "/tmp" or not os.path.isdir(path):
                raise LabError(f"--share {path}: must be a folder, and not /tmp itself: every node has its own")
        if not re.fullmatch(r"([a-z0-9][a-z0-9-]*(\.[a-z0-9][a-z0-9-]*)*)?", self.domain):
            raise LabError(f"--domain {self.domain}: must look like cluster.example")
        for place in self.hosts:
            if place not in [HEAD, *self.node_names]:
                raise LabError(f"hosts: no such node: {place}")

    @property
    def folder(self) -> Path:
        """The only trace of a lab outside its namespaces."""
        return Path("/tmp") / f"slurm-lab-{self.name}"

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        """The address of every node and of the head, by name."""
        nodes = {node: f"{NETWORK}.{number}" for number, node in enumerate(self.node_names, start=1)}
        return {**nodes, HEAD: f"{NETWORK}.254"}

    def hostname(self, place: str) -> str:
        """What `hostname` prints there."""
        return f"{place}.{self.domain}" if self.domain else place

    def account(self) -> dict[str, str | int | bool]:
        """Fields for who runs the jobs: the user asked for, else the current folder's owner, else one made up.

        An owner who has no name on this machine gets one inside the lab. The user and root get empty home folders in
        the lab's folder, so that nothing in the lab changes what is in their own, unless these are asked for.
        """
        owner = 0 if self.user else os.stat(".").st_uid
        home, root_home, made_up = str(self.folder / "home"), str(self.folder / "root"), False
        try:
            entry = pwd.getpwuid(owner) if owner else pwd.getpwnam(self.user or STUDENT)
        except KeyError:
            if self.user not in ("", STUDENT):
                raise LabError(f"--user {self.user}: this machine has no such user") from None
            uid = owner or next(filter(nobodys, UIDS))
            entry, made_up = pwd.struct_passwd((STUDENT, "x", uid, uid, "", home, "/bin/sh")), True
        if self.real_home:
            home, root_home = entry.pw_dir, pwd.getpwnam("root").pw_dir
        return {
            "user": entry.pw_name,
            "uid": entry.pw_uid,
            "gid": entry.pw_gid,
            "home": home if entry.pw_uid else root_home,
            "root_home": root_home,
            "made_up": made_up,
        }

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        return cls(**json.loads((folder / "lab.json").read_text()))

    def write(self) -> None:
        """Fill the lab's folder, which exists and is empty, with all that its daemons read."""
        (self.folder / "lab.json").write_text(json.dumps(asdict(self), indent=1))
        for name in "logs", "state", "etc", SPOOL:
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "slurm.conf").write_text(self.slurm_conf())
        (self.folder / "cgroup.conf").write_text(tracking.cgroup_conf(self.tracking))
        (self.folder / "gres.conf").write_text(self.gres_conf())
        (self.folder / "nsswitch.conf").write_text(nsswitch_conf(), **AS_BYTES)
        for place in self.addresses:
            (self.folder / f"hosts.{place}").write_text(self.hosts_file(place))
        with open(self.folder / "munge.key", "wb", opener=lambda path, flags: os.open(path, flags, 0o400)) as key:
            key.write(os.urandom(128))
        tracking.write(self.tracking, self.folder)
        if self.accounting:
            accounting.write(self.folder, HEAD, self.addresses[HEAD])
        passwd = Path("/etc/passwd").read_text(**AS_BYTES)
        for name, uid, gid, home in {(self.user, self.uid, self.gid, self.home), ("root", 0, 0, self.root_home)}:
            if Path(home).is_relative_to(self.folder):
                passwd = f"{name}:x:{uid}:{gid}::{home}:{shell(name)}\n{passwd}"  # of several entries the first counts
                Path(home).mkdir(mode=0o700, exist_ok=True)
                os.chown(home, uid, gid)
        (self.folder / "passwd").write_text(passwd, **AS_BYTES)
        group = f"{self.user}:x:{self.gid}:\n" if self.made_up else ""
        (self.folder / "group").write_text(group + Path("/etc/group").read_text(**AS_BYTES), **AS_BYTES)

    def slurmd(self, node: str) -> list[str]:
        """The command that starts a node's slurmd."""
        return ["slurmd", "-N", node, *tracking.slurmd_options(self.tracking, self.folder)]

    def hosts_file(self, place: str) -> str:
        """The hosts file seen at `place`: real addresses, except where the user asked for others."""
        names = {"localhost": "127.0.0.1", **self.addresses, **self.hosts.get(place, {})}
        long = {name: f"{self.hostname(name)} " for name in self.addresses if self.domain}
        return "".join(f"{address}\t{long.get(name, '')}{name}\n" for name, address in names.items())

    def gres_conf(self) -> str:
        """SLURM wants a device for every GPU that it counts; these stand for them."""
        devices = f"[0-{self.gpus - 1}]" if self.gpus > 1 else "0"
        return f"AutoDetect=off\nName=gpu File={self.folder}/gpu{devices}\n" if self.gpus else ""

    def slurm_conf(self) -> str:
        """The text of slurm.conf; a line of `extra_conf` replaces ours with the same key."""
        settings = (
            SETTINGS
            | tracking.settings(self.tracking)
            | {
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
        )
        if self.accounting:
            settings |= accounting.settings(self.folder, self.addresses[HEAD])
        gres = ""
        if self.gpus:
            settings["GresTypes"] = "gpu"
            gres = f" Gres=gpu:{self.gpus}"
        lines = [f"{key}={value}" for key, value in settings.items()]
        for extra in self.extra_conf:
            key = extra.partition("=")[0].strip().lower()
            lines = [line for line in lines if line.partition("=")[0].lower() != key]
        lines += [
            f"NodeName={node} NodeHostname={self.hostname(node)} NodeAddr={self.addresses[node]}"
            f" CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1"
            f" RealMemory=1000000{gres} State=UNKNOWN"
            for node in self.node_names
        ]
        lines += ["PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP", *self.extra_conf]
        return "\n".join(lines) + "\n"


SETTINGS = {
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "MpiDefault": "none",
    "TaskPlugin": "task/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SlurmdParameters": "config_overrides",  # nodes may claim more than the machine has
    "TmpFS": "/tmp",
    "ReturnToService": "2",  # a node that was away comes back by itself
    "JobRequeue": "1",
    "AccountingStorageType": "accounting_storage/none",
    "MailProg": "/bin/true",
    # Everything below is about time, in seconds: a real cluster waits longer.
    "KillWait": "5",
    "SlurmdTimeout": "20",
    "MinJobAge": "3600",  # finished jobs stay visible in `scontrol show job`
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
}


def nobodys(number: int) -> bool:
    """Whether this machine has neither a user nor a group of this number.

    Each number is asked for: a directory of users, such as sssd, knows those that it leaves out of a list of all.
    """
    for find in pwd.getpwuid, grp.getgrgid:
        with contextlib.suppress(KeyError):
            find(number)
            return False
    return True


def shell(user: str) -> str:
    """The shell of a user of this machine, or one for a user who is made up."""
    try:
        return pwd.getpwnam(user).pw_shell
    except KeyError:
        return "/bin/sh"


def nsswitch_conf() -> str:
    """The machine's nsswitch.conf, with the hosts file as the only source of names, and the files of users first.

    There is no DNS inside, and a resolver on the machine would answer with the machine's own names. A directory of
    users, such as sssd, would answer with the user's real home folder.
    """
    path = Path("/etc/nsswitch.conf")
    lines = path.read_text(**AS_BYTES).splitlines() if path.exists() else []
    lines = [re.sub("^passwd:", "passwd: files", line) for line in lines if not line.startswith("hosts:")]
    return "\n".join([*lines, "hosts: files"]) + "\n"
