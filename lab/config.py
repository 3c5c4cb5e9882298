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
from typing import Any, NamedTuple

from lab import accounting, tracking
from lab.base import AS_BYTES, LabError

HEAD = "head"  # where slurmctld and munged run, and where jobs are submitted
STUDENT = "lab-student"  # the name of a user that is made up inside the lab: nobody has it by chance
UIDS = range(61184, 65520)  # where a made-up user's number is looked for: systemd keeps these for users who come and go
NETWORK = "10.210.0"  # inside the lab's own network namespace, so every lab may use the same one
SPOOL = "spool"  # in the lab's folder; every node mounts a private file system on it
USER = "the owner of the current folder, or one made up if that is root"
HOME = "work in their real home folders (default: in empty ones, which end with the lab)"


def option(default: Any, text: str, **how: Any) -> Any:
    """A field of `Wanted`, with the words that make argparse's option of it."""
    shown = f"{text} (default: {default})" if default else text
    return field(default=default, metadata={"help": shown, **how})


class Account(NamedTuple):
    """Who runs commands and jobs in a lab."""

    user: str
    uid: int
    gid: int
    home: str
    root_home: str
    made_up: bool  # whether the user exists inside the lab only


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a lab: the parameters of `Lab`, and the options of `python -m lab up`.

    The current folder is always shared, besides `share`. A line of `conf` replaces the lab's own with the same key.
    """

    nodes: int = option(2, "how many nodes", type=int)
    cpus: int = option(4, "per node", type=int)
    gpus: int = option(0, "stand-ins per node", type=int)
    gpu_type: str = option("", "their name in SLURM, such as a100 (default: none)", metavar="NAME")
    name: str = "lab"
    share: Sequence[str | Path] = option((), "a folder in /tmp for all nodes", metavar="PATH", action="append")
    conf: Sequence[str] = option((), "a line for slurm.conf", metavar="KEY=VALUE", action="append")
    tracking: str = option("", f"whom signals reach: {' '.join(tracking.MODES)}", metavar="MODE")
    user: str = option("", f"who runs commands and jobs (default: {USER})", metavar="NAME")
    real_home: bool = option(False, f"let that user, and root, {HOME}", action="store_true")
    domain: str = option("", "of host names (for example: cluster.example)", metavar="NAME")
    accounting: bool = option(False, "with slurmdbd and MariaDB, so that sacct works", action="store_true")
    # What names resolve to in one place, such as {"node1": {"node1": "127.0.1.1"}}.
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot work; raises LabError."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", self.name):
            raise LabError(f"--name {self.name!r}: use at most 32 letters, digits, - and _")
        for what, low, high in ("nodes", 1, 64), ("cpus", 1, 256), ("gpus", 0, 16):
            value = getattr(self, what)
            if not isinstance(value, int) or not low <= value <= high:
                raise LabError(f"--{what} {value}: must be a number from {low} to {high}")
        if not re.fullmatch(r"\w*", self.gpu_type, re.ASCII):
            raise LabError(f"--gpu-type {self.gpu_type}: must be a name of letters, digits and _")
        for path in self.share:
            if os.path.abspath(path) == "/tmp" or not os.path.isdir(path):
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
        """node1, node2, ..."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        """The address of every node and of the head, by name."""
        nodes = {node: f"{NETWORK}.{number}" for number, node in enumerate(self.node_names, start=1)}
        return {**nodes, HEAD: f"{NETWORK}.254"}


def find_account(wanted: Wanted) -> Account:
    """Who runs the jobs: the user asked for, else the current folder's owner, else one made up.

    An owner who has no name on this machine gets one inside the lab. The user and root get empty home folders in
    the lab's folder, so that nothing in the lab changes what is in their own, unless these are asked for.
    """
    owner = 0 if wanted.user else os.stat(".").st_uid
    home, root_home, made_up = str(wanted.folder / "home"), str(wanted.folder / "root"), False
    try:
        entry = pwd.getpwuid(owner) if owner else pwd.getpwnam(wanted.user or STUDENT)
    except KeyError:
        if wanted.user not in ("", STUDENT):
            raise LabError(f"--user {wanted.user}: this machine has no such user") from None
        uid = owner or next(filter(nobodys, UIDS))
        entry, made_up = pwd.struct_passwd((STUDENT, "x", uid, uid, "", home, "/bin/sh")), True
    if wanted.real_home:
        home, root_home = entry.pw_dir, pwd.getpwnam("root").pw_dir
    if entry.pw_uid == 0:
        home = root_home
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, home, root_home, made_up)


@dataclass(frozen=True, kw_only=True)
class Plan(Wanted):
    """The settings of one lab, with nothing left open; `write` turns them into files, `load` reads them back."""

    account: Account

    @classmethod
    def make(cls, wanted: Wanted, mode: str) -> "Plan":
        """Decide what was left open: who works in the lab, and which folders of /tmp are shared; raises LabError."""
        share = [name for path in wanted.share for name in (os.path.abspath(path), os.path.realpath(path))]
        if os.getcwd() != "/tmp":
            share.append(os.getcwd())
        account = find_account(wanted)
        return cls(**vars(wanted) | {"share": share, "tracking": mode, "user": account.user}, account=account)

    @classmethod
    def load(cls, folder: Path) -> "Plan":
        """Read what `write` has written into a lab's folder."""
        settings = json.loads((folder / "lab.json").read_text())
        return cls(**settings | {"account": Account(*settings["account"])})

    def hostname(self, place: str) -> str:
        """What `hostname` prints there."""
        return f"{place}.{self.domain}" if self.domain else place

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
        who = self.account
        passwd = Path("/etc/passwd").read_text(**AS_BYTES)
        for name, uid, gid, home in {(who.user, who.uid, who.gid, who.home), ("root", 0, 0, who.root_home)}:
            if Path(home).is_relative_to(self.folder):
                passwd = f"{name}:x:{uid}:{gid}::{home}:{shell(name)}\n{passwd}"  # of several entries the first counts
                Path(home).mkdir(mode=0o700, exist_ok=True)
                os.chown(home, uid, gid)
        (self.folder / "passwd").write_text(passwd, **AS_BYTES)
        # SLURM asks `su - USER` for the login environment of a job with --export=NONE; su wants an entry here, too.
        names = [line.partition(":")[0] for line in passwd.splitlines()]
        with open(self.folder / "shadow", "wb", opener=lambda path, flags: os.open(path, flags, 0o400)) as shadow:
            shadow.write("".join(f"{name}:*:20000:0:99999:7:::\n" for name in names).encode(**AS_BYTES))
        group = f"{who.user}:x:{who.gid}:\n" if who.made_up else ""
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
        kind = f" Type={self.gpu_type}" if self.gpu_type else ""
        return f"AutoDetect=off\nName=gpu{kind} File={self.folder}/gpu{devices}\n" if self.gpus else ""

    def slurm_conf(self) -> str:
        """The text of slurm.conf; a line of `conf` replaces ours with the same key."""
        settings = SETTINGS | tracking.settings(self.tracking)
        settings |= {
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
        if self.accounting:
            settings |= accounting.settings(self.folder, self.addresses[HEAD])
        gres = ""
        if self.gpus:
            settings["GresTypes"] = "gpu"
            gres = f" Gres=gpu:{f'{self.gpu_type}:' if self.gpu_type else ''}{self.gpus}"
        lines = [f"{key}={value}" for key, value in settings.items()]
        for extra in self.conf:
            key = extra.partition("=")[0].strip().lower()
            lines = [line for line in lines if line.partition("=")[0].lower() != key]
        lines += [
            f"NodeName={node} NodeHostname={self.hostname(node)} NodeAddr={self.addresses[node]}"
            f" CPUs={self.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={self.cpus} ThreadsPerCore=1"
            f" RealMemory=1000000{gres} State=UNKNOWN"
            for node in self.node_names
        ]
        lines += ["PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP", *self.conf]
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
    # Everything below is about time, in seconds. After SIGTERM a job has what SLURM gives by default: JupyterLab alone
    # takes 5 s of it for a kernel that does not end. For the rest a real cluster waits longer.
    "KillWait": "30",
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
