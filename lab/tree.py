"""A whole other Debian in a folder, entered like a machine: to see whether something works with another SLURM.

A tree is made once, by debootstrap, in some minutes, and kept. What is committed in the repository is cloned into it
each time; what git ignores there stays from time to time. Nothing else of the machine changes: the tree's mounts are in
a mount namespace that ends with the command.

What is in a tree is run as root. Therefore it is kept where root alone can put something, and refused elsewhere.
"""

import glob
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.base import AS_TEXT, LIBC, MS_BIND, MS_PRIVATE, MS_REC, SEARCH, LabError, check, locked, mount, output
from lab.config import STUDENT

SUITES = {
    "trixie": "SLURM 24.11, Open MPI 5.0, PMIx 5, Python 3.13, GCC 14, Apptainer 1.4",
    "sid": "SLURM 26.05, Open MPI 6.0rc, Python 3.14, Apptainer 1.4",
}
PACKAGES = (
    *("ca-certificates", "python3", "python3-venv", "python3-pip", "python3-dev", "git", "procps"),
    *("slurm-wlm", "munge", "iproute2", "openmpi-bin", "libopenmpi-dev", "libpmix-dev", "g++", "make", "cmake"),
)
APPTAINER = ("apptainer", "squashfuse", "fuse3", "debootstrap")
# Debian has Apptainer in sid alone, but trixie, whose SLURM has PMIx, can run it. Nothing else is taken from there.
FROM_SID = ("trixie",)
PIN = "Package: *\nPin: release n=sid\nPin-Priority: 100\n"
SETTINGS = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", "/root/.config/pip/pip.conf")
CERTIFICATES = SETTINGS[1]
ENVIRONMENT = {
    "HOME": "/root",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
}
GIT = ("git", "-c", "safe.directory=*")  # the repository may be another user's
LOCK_SECONDS = 1800  # making a tree takes some minutes
CLONE_NEWNS, MNT_DETACH = 0x00020000, 2  # from <sched.h> and <sys/mount.h>


def run(suite: str, command: list[str], trees: Path, clone: str = "project", mirror: str = "") -> None:
    """Become a command in the tree of a suite, in the clone of the current repository; raises LabError."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", suite) or not re.fullmatch(r"[\w-]+", clone):
        raise LabError(f"{suite} {clone}: a suite of Debian, and a name for the clone, in letters and digits")
    if not command:
        raise LabError(f"tree: which command? For example: python -m lab tree {suite} -- sinfo --version")
    os.umask(0o022)  # for the clone, and for the command: another user runs jobs in it
    top = output([*GIT, "rev-parse", "--show-toplevel"]).strip()
    tree = open_folder(trees) / suite
    with locked(tree.parent / ".lock", "another tree has been made", LOCK_SECONDS):
        for path in tree, tree / "complete", log_of(tree), tree / clone:
            check_owner(path)
        if not is_complete(tree):
            make(suite, tree, mirror or find_mirror())
        update(Path(top), tree / clone)
    enter(tree, f"/{clone}")
    try:
        os.execvpe(command[0], command, os.environ | ENVIRONMENT)
    except FileNotFoundError:
        raise LabError(f"there is no program {command[0]} in {tree}") from None


def default_folder() -> Path:
    """Where trees are kept unless somebody says otherwise."""
    return Path(os.environ.get("TREES") or "/var/lib/slurm-lab")


def open_folder(trees: Path) -> Path:
    """Make the folder of trees if need be, for root alone, and return its whole path.

    Raises LabError if others can put something into it, or can put another folder in its place: who could do that would
    be root. A folder such as /tmp above it is allowed, in which everybody can make folders but remove only his own.
    """
    trees = Path(os.path.abspath(trees))
    for path in [*reversed(trees.parents), trees]:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise LabError(f"cannot make {path}: {error.strerror}") from None
        check_owner(path, sticky=path != trees)
    return trees


def check_owner(path: Path, sticky: bool = False) -> None:
    """Raise LabError if there is something at a path that is a link, not root's, or open for others to write to.

    With `sticky` it may be a folder to which others can write, if they cannot remove what is root's.
    """
    if not os.path.lexists(path):
        return
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        problem = "is a link"
    elif found.st_uid != 0:
        problem = f"belongs to user {found.st_uid}, not to root"
    elif found.st_mode & 0o022 and not (sticky and found.st_mode & stat.S_ISVTX):
        problem = "can be written to by others than root"
    else:
        return
    raise LabError(f"{path} {problem}: trees are run as root; name a folder of root's alone with --trees or TREES")


def log_of(tree: Path) -> Path:
    """Where the making of a tree is logged."""
    return tree.with_name(f"{tree.name}.log")


def why_not(suite: str) -> str | None:
    """Say why there can be no tree of a suite in the default folder, or return None."""
    if is_complete(default_folder() / suite):
        return None
    try:
        find_mirror()
    except LabError as error:
        return str(error)
    return None if shutil.which("debootstrap", path=SEARCH) else "missing programs: debootstrap"


def find_mirror(apt: str = "/etc/apt") -> str:
    """The first mirror of Debian that apt has been told; raises LabError."""
    for name in [f"{apt}/sources.list", *sorted(glob.glob(f"{apt}/sources.list.d/*"))]:
        if os.path.exists(name):
            found = re.findall(r"^(?:URIs:|deb\s).*?(https?://\S+)", Path(name).read_text(**AS_TEXT), re.MULTILINE)
            mirrors = [url for url in found if url.rstrip("/").endswith("/debian")]
            if mirrors:
                return mirrors[0]
    raise LabError("apt knows no mirror of Debian on this machine: name one with --mirror URL")


def make(suite: str, tree: Path, mirror: str) -> None:
    """Make a tree; raises LabError."""
    if not shutil.which("debootstrap", path=SEARCH):
        raise LabError("missing programs: debootstrap (apt-get install debootstrap)")
    print(f"lab: making {tree}, once; this takes some minutes", flush=True)
    if tree.exists():
        shutil.rmtree(tree)  # one that was left half made
    with open(log_of(tree), "w") as log:

        def step(words: Sequence[str], inside: bool = False) -> None:
            move = (lambda: enter(tree, "/")) if inside else None
            env = os.environ | (ENVIRONMENT if inside else {"PATH": SEARCH})
            if subprocess.run(words, stdout=log, stderr=log, env=env, preexec_fn=move).returncode:
                last = Path(log.name).read_text(errors="replace").splitlines()[-1:]
                raise LabError(f"{words[0]}: {' '.join(last)}; see {log.name}")

        step(["debootstrap", "--variant=minbase", suite, str(tree), mirror])
        copy_settings(tree, SETTINGS)
        if suite in FROM_SID:
            (tree / "etc/apt/sources.list.d/sid.list").write_text(f"deb {mirror} sid main\n")
            (tree / "etc/apt/preferences.d/sid").write_text(PIN)
        step(["apt-get", "-o", "Acquire::Check-Valid-Until=false", "update", "-qq"], inside=True)
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends"]
        step([*install, *PACKAGES, *(APPTAINER if suite in SUITES else ())], inside=True)
        step(["useradd", "--create-home", STUDENT], inside=True)  # who may build images: he gets subordinate user ids
        copy_settings(tree, [CERTIFICATES])  # the package ca-certificates has written its own
    (tree / "complete").write_text(STUDENT)


def is_complete(tree: Path) -> bool:
    """Whether a tree has been made to its end, and with the user who runs jobs today."""
    complete = tree / "complete"
    return complete.exists() and complete.read_text() == STUDENT


def copy_settings(tree: Path, names: Sequence[str]) -> None:
    """Copy what the machine needs to reach package indexes, as far as it is there."""
    for name in names:
        if os.path.exists(name):
            target = tree / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # if it is a link, it leads to a file of the machine
            shutil.copy(name, target)


def update(repository: Path, clone: Path) -> None:
    """Bring what is committed in a repository into its clone, which is made if need be.

    It goes through a file: git would not read another user's repository for root, and a clone cannot be told to.
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = f"{folder}/bundle"
        output([*GIT, "-C", str(repository), "bundle", "create", "--quiet", bundle, "HEAD"])
        if (clone / ".git").is_dir():
            output(["git", "-C", str(clone), "fetch", "--quiet", bundle, "HEAD"])
            output(["git", "-C", str(clone), "reset", "--quiet", "--hard", "FETCH_HEAD"])
        else:
            output(["git", "clone", "--quiet", bundle, str(clone)])


def enter(tree: Path, folder: str) -> None:
    """Give this process a mount namespace in which the tree is everything, and go to a folder in it."""
    names = {path: path.read_bytes() for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"))}
    check(LIBC.unshare(CLONE_NEWNS), "a new mount namespace")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount(tree, tree, flags=MS_BIND)
    for name in "dev", "sys":
        mount(f"/{name}", tree / name, flags=MS_BIND | MS_REC)
    mount("proc", tree / "proc", "proc")
    mount("tmpfs", tree / "run", "tmpfs")
    os.chdir(tree)
    # Not chroot: programs in it could not make user namespaces.
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount the machine's files")  # pivot_root has put them on top of the tree
    os.chdir(folder)
    for path, text in names.items():  # from inside, where a link cannot lead out of the tree
        path.unlink(missing_ok=True)
        path.write_bytes(text)
        path.chmod(0o644)
