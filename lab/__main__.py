"""Command line of the lab: `python -m lab --help`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lab import cluster, tracking, tree
from lab.base import LabError, locked
from lab.cluster import Lab, why_not


def up(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    who = {"user": args.user, "domain": args.domain, "real_home": args.real_home}
    how = {"tracking": args.tracking, "accounting": args.accounting}
    lab = Lab(args.nodes, args.cpus, args.gpus, args.name, args.share, args.conf, **who, **how)
    lab.up(detached=True)
    print(f"lab: {' '.join(lab.nodes)} idle after {time.monotonic() - begin:.1f} s; now try")
    print(f"    python -m lab run -- srun --nodes={args.nodes} hostname")


def down(args: argparse.Namespace) -> None:
    lab = Lab(name=args.name)
    with locked(cluster.LOCK, cluster.ANOTHER, cluster.LOCK_SECONDS):
        ended = lab.down(args.keep_logs)
    print(f"lab: {'ended' if ended else 'nothing was running'}")


def folder(args: argparse.Namespace) -> str:
    if not os.path.isdir(args.chdir):
        raise LabError(f"--chdir {args.chdir}: no such folder")
    return os.path.abspath(args.chdir)


def given(args: argparse.Namespace) -> list[str]:
    return args.command[1:] if args.command[:1] == ["--"] else args.command


def run(args: argparse.Namespace) -> None:
    words = given(args)
    if not words:
        raise LabError("run: which command? For example: python -m lab run -- sinfo")
    enter(args, words)


def shell(args: argparse.Namespace) -> None:
    enter(args, [os.environ.get("SHELL", "/bin/sh")])


def enter(args: argparse.Namespace, words: list[str]) -> None:
    lab, cwd = Lab.find(args.name), folder(args)
    if args.user not in ("", "root", lab.user):
        raise LabError(f"--user {args.user}: must be root, or {lab.user}, whom the lab was started for")
    if "root" not in (args.user, lab.user):
        lab.check_folder(words, args.node, cwd)
    command = lab.command(words, args.node, cwd, user=args.user)
    os.execvp(command[0], command)


def status(args: argparse.Namespace) -> None:
    lab = Lab.find(args.name)
    states = lab.states()
    for node in lab.nodes:
        limit = f"  slowed to {rate}" if (rate := lab.rate(node)) else ""
        print(f"{node}  {lab.addresses[node]}  {states[node]}  {len(lab.processes(node))} processes{limit}")
    print(f"user: {lab.user} ({lab.uid})")
    print(f"signals: {lab.tracking}: {tracking.MODES[lab.tracking]}")
    print(lab.run(["squeue"], cwd="/").stdout, end="")


def logs(args: argparse.Namespace) -> None:
    folder = Lab(name=args.name).folder / "logs"
    files = sorted(folder.glob(f"{args.which}.*" if args.which else "*"))
    if not files:
        raise LabError(f"no log of {args.which or 'a lab'} in {folder}")
    for file in files:
        text = file.read_text(errors="replace")
        if text:
            print(f"==> {file} <==\n{text}")


def fault(args: argparse.Namespace) -> None:
    lab = Lab.find(args.name)
    getattr(lab, args.action)(*args.words)
    print(f"lab: {args.action} {' '.join(args.words)}: done")


def in_tree(args: argparse.Namespace) -> None:
    tree.run(args.suite, given(args), Path(args.trees), args.clone, args.mirror)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lab", description="A throwaway SLURM of several nodes on one machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, function: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        if function is not in_tree:
            action.add_argument("--name", default="lab", help="which of several labs (default: %(default)s)")
        action.set_defaults(function=function)
        return action

    action = add("up", up, "start a lab and leave it running")
    action.add_argument("--nodes", type=int, default=2, help="default: %(default)s")
    action.add_argument("--cpus", type=int, default=4, help="per node (default: %(default)s)")
    action.add_argument("--gpus", type=int, default=0, help="stand-ins per node (default: %(default)s)")
    action.add_argument("--share", action="append", default=[], metavar="PATH", help="a folder in /tmp for all nodes")
    action.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a line for slurm.conf")
    action.add_argument(
        "--tracking", default="", metavar="MODE", help=f"whom signals reach: {' '.join(tracking.MODES)}"
    )
    who = "who runs commands and jobs (default: the owner of the current folder, or one made up if that is root)"
    action.add_argument("--user", default="", metavar="NAME", help=who)
    own = "let that user, and root, work in their real home folders (default: in empty ones, which end with the lab)"
    action.add_argument("--real-home", action="store_true", help=own)
    action.add_argument("--domain", default="", metavar="NAME", help="of host names (for example: cluster.example)")
    action.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB, so that sacct works")
    for name, function in ("run", run), ("shell", shell):
        action = add(name, function, f"{name} inside the lab, in the current folder")
        action.add_argument("--node", default="head", help="where (default: %(default)s)")
        action.add_argument(
            "--user", default="", metavar="NAME", help="root, or by default whom the lab was started for"
        )
        action.add_argument("--chdir", default=".", metavar="FOLDER", help="default: the current one")
        if name == "run":
            action.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    add("status", status, "show nodes and jobs")
    add("logs", logs, "show logs").add_argument("which", nargs="?", help="a node, slurmctld, munged or keeper")
    for name, words, text in (
        ("cut", "NODE", "take a node off the network"),
        ("slow", "NODE RATE", "limit a node's link in both directions (for example: slow node2 100mbit)"),
        ("heal", "NODE", "put it back, and remove the limit that `slow` has set"),
        ("unresolve", "NODE", "let the name of a node resolve to nothing"),
        ("resolve", "NODE", "let it resolve again"),
        ("stop", "NODE", "end the slurmd of a node"),
        ("start", "NODE", "start it again"),
        ("requeue", "JOB", "requeue a job, as preemption does"),
        ("timelimit", "JOB", "send SIGUSR1 to a job's batch shell, as near its time limit"),
    ):
        action = add(name, fault, text)
        for word in words.split():
            action.add_argument("words", action="append", metavar=word)
    action = add("tree", in_tree, "run a command, as root, in a whole other Debian with another SLURM")
    suites = "; ".join(f"{suite}: {text}" for suite, text in tree.SUITES.items())
    where = "in which root alone can make and change something (default: %(default)s)"
    action.add_argument("--trees", default=str(tree.default_folder()), metavar="FOLDER", help=where)
    action.add_argument("--clone", default="project", metavar="NAME", help="of this repository (default: %(default)s)")
    action.add_argument("--mirror", default="", metavar="URL", help="of Debian (default: what apt uses here)")
    action.add_argument("suite", metavar="SUITE", help=suites)
    action.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    add("down", down, "end the lab").add_argument("--keep-logs", action="store_true", help="leave its logs")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `lab logs | head`, and for what `run` starts
    try:
        if args.action != "up" and os.geteuid() != 0:
            raise LabError(str(why_not()))
        args.function(args)
    except LabError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
