"""Accounting as on a cluster, so that `sacct` works: slurmdbd, and a MariaDB with its data in the lab's folder.

Nothing of the machine's own MariaDB is read or changed. The database listens on a socket in the lab's folder only, and
knows who asks from that; so there is no password.
"""

import shutil
from pathlib import Path

from lab.base import SEARCH, LabError
from lab.tracking import plugin_exists

PROGRAMS = ("mariadb-install-db", "mariadbd", "slurmdbd", "sacct", "sacctmgr")
INSTALL = "apt-get install --no-install-recommends slurmdbd mariadb-server"


def check() -> None:
    """Raise LabError if this machine lacks a program that accounting needs."""
    missing = [program for program in PROGRAMS if not shutil.which(program, path=SEARCH)]
    if not plugin_exists("accounting_storage_mysql.so"):
        missing.append("accounting_storage_mysql.so")
    if missing:
        raise LabError(f"--accounting: missing programs: {' '.join(missing)} ({INSTALL})")


def settings(folder: Path, address: str) -> dict[str, str]:
    """Lines for slurm.conf; slurmdbd runs at the address."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": address,
        "AccountingStoragePass": f"{folder}/munge.socket",  # for munge, the password is its socket
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=5",
    }


def write(folder: Path, head: str, address: str) -> None:
    """Write slurmdbd.conf, and make the database's folder."""
    lines = {
        "DbdHost": head,
        "DbdAddr": address,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge.socket",
        "LogFile": f"{folder}/logs/slurmdbd.log",
        "PidFile": f"{folder}/state/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
    }
    file = folder / "slurmdbd.conf"
    file.touch(mode=0o600)  # slurmdbd insists
    file.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    (folder / "database").mkdir(mode=0o700)


def install(folder: Path) -> list[str]:
    """The command that fills the database's folder."""
    options = ["--skip-test-db", "--auth-root-authentication-method=socket", "--auth-root-socket-user=root"]
    return ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={folder}/database", *options]


def database(folder: Path) -> list[str]:
    """The command that is the database."""
    places = [f"--datadir={folder}/database", f"--socket={folder}/database/socket", "--skip-networking"]
    return ["mariadbd", "--no-defaults", "--user=root", *places, "--innodb-lock-wait-timeout=900"]


def environment(folder: Path) -> dict[str, str]:
    """What slurmdbd needs to find the database."""
    return {"MYSQL_UNIX_PORT": f"{folder}/database/socket"}
