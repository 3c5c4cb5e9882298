"""Command line of the lab: `python -m lab --help`."""

import argparse
import dataclasses
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lab import cluster, faults, tracking, tree
from lab.base import LabError, locked
from lab.cluster import Lab, why_not
from lab.config import Wanted

OPTIONS = {option.name: option for option in dataclasses.fields(Wanted)}
TO_NODES = (faults.cut, faults.slow, faults.heal, faults.unresolve, faults.resolve)
FAULTS = (*TO_NODES, faults.stop_slurmd, faults.start_slurmd, faults.requeue, faults.timelimit)


def up(args: argparse.Namespace) -> None:
    """Start a lab and leave it running."""
    begin = time.monotonic()
    lab = Lab(Wanted(**{name: value for name, value in vars(args).items() if name in OPTIONS}))
    lab.up(detached=True)
    print(f"lab: {' '.join(lab.nodes)} idle after {time.monotonic() - begin:.1f} s; now try")
    print(f"    python -m lab run -- srun --nodes={len(lab.nodes)} hostname")


def down(args: argparse.Namespace) -> None:
    """End the lab."""
    lab = Lab(Wanted(name=args.name))
    with locked(cluster.LOCK, cluster.ANOTHER, cluster.LOCK_SECONDS):
        ended = lab.down(args.keep_logs)
    print(f"lab: {'ended' if ended else 'nothing was running'}")


def given(args: argparse.Namespace) -> list[str]:
    """The command after `--`."""
    return args.command[1:] if args.command[:1] == ["--"] else args.command


def run(args: argparse.Namespace) -> None:
    """Run a command inside the lab, in the current folder."""
    words = given(args)
    if not words:
        raise LabError("run: which command? For example: python -m lab run -- sinfo")
    enter(args, words)


def shell(args: argparse.Namespace) -> None:
    """Run a shell inside the lab, in the current folder."""
    enter(args, [os.environ.get("SHELL", "/bin/sh")])


def enter(args: argparse.Namespace, words: list[str]) -> None:
    """Become a command inside; raises LabError if it cannot work there."""
    lab, cwd = Lab.find(args.name), os.path.abspath(args.chdir)
    if not os.path.isdir(cwd):
        raise LabError(f"--chdir {args.chdir}: no such folder")
    if args.user not in ("", "root", lab.user):
        raise LabError(f"--user {args.user}: must be root, or {lab.user}, whom the lab was started for")
    if "root" not in (args.user, lab.user):
        lab.check_folder(words, args.node, cwd)
    command = lab.command(words, args.node, cwd, user=args.user)
    os.execvp(command[0], command)


def status(args: argparse.Namespace) -> None:
    """Show nodes and jobs."""
    lab = Lab.find(args.name)
    states = lab.states()
    for node in lab.nodes:
        limit = f"  slowed to {rate}" if (rate := faults.rate_of(lab, node)) else ""
        print(f"{node}  {lab.addresses[node]}  {states[node]}  {len(lab.processes(node))} processes{limit}")
    print(f"user: {lab.user} ({lab.uid})")
    print(f"signals: {lab.tracking}: {tracking.MODES[lab.tracking]}")
    print(lab.run(["squeue"], cwd="/").stdout, end="")


def logs(args: argparse.Namespace) -> None:
    """Show logs."""
    folder = Lab(Wanted(name=args.name)).folder / "logs"
    files = sorted(folder.glob(f"{args.which}.*" if args.which else "*"))
    if not files:
        raise LabError(f"no log of {args.which or 'a lab'} in {folder}")
    for file in files:
        text = file.read_text(errors="replace")
        if text:
            print(f"==> {file} <==\n{text}")


def fault(args: argparse.Namespace) -> None:
    """Break or mend something, by the function in faults.py that the command is named for."""
    lab = Lab.find(args.name)
    args.inflict(lab, *args.words)
    print(f"lab: {args.action} {' '.join(args.words)}: done")


def in_tree(args: argparse.Namespace) -> None:
    """Run a command, as root, in a whole other Debian with another SLURM."""
    tree.run(args.suite, given(args), Path(args.trees), args.clone, args.mirror)


def parse_args() -> argparse.Namespace:
    """Read the command line. Each command's help is the first line of what its function says of itself."""
    parser = argparse.ArgumentParser(prog="lab", description="A throwaway SLURM of several nodes on one machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, function: Callable[..., None]) -> argparse.ArgumentParser:
        text = str(function.__doc__).partition("\n")[0].rstrip(".")
        action = actions.add_parser(name, help=text, description=text)
        if function is not in_tree:
            action.add_argument("--name", default="lab", help="which of several labs (default: %(default)s)")
        action.set_defaults(function=function)
        return action

    action = add("up", up)
    for option in OPTIONS.values():
        if option.metadata:  # what is not given keeps the default of `Wanted`
            name = f"--{option.name.replace('_', '-')}"
            action.add_argument(name, default=argparse.SUPPRESS, **option.metadata)
    for name, function in ("run", run), ("shell", shell):
        action = add(name, function)
        action.add_argument("--node", default="head", help="where (default: %(default)s)")
        action.add_argument("--user", default="", metavar="NAME", help="root; default: whom the lab was started for")
        action.add_argument("--chdir", default=".", metavar="FOLDER", help="default: the current one")
        if name == "run":
            action.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    add("status", status)
    add("logs", logs).add_argument("which", nargs="?", help="a node, slurmctld, munged or keeper")
    for inflict in FAULTS:
        action = add(inflict.__name__.replace("_", "-"), inflict)
        action.set_defaults(function=fault, inflict=inflict)
        for word in inspect.getfullargspec(inflict).args[1:]:  # after the lab
            action.add_argument("words", action="append", metavar=word.upper())
    action = add("tree", in_tree)
    suites = "; ".join(f"{suite}: {text}" for suite, text in tree.SUITES.items())
    where = "in which root alone can make and change something (default: %(default)s)"
    action.add_argument("--trees", default=str(tree.default_folder()), metavar="FOLDER", help=where)
    action.add_argument("--clone", default="project", metavar="NAME", help="of this repository (default: %(default)s)")
    action.add_argument("--mirror", default="", metavar="URL", help="of Debian (default: what apt uses here)")
    action.add_argument("suite", metavar="SUITE", help=suites)
    action.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    add("down", down).add_argument("--keep-logs", action="store_true", help="leave its logs")
    return parser.parse_args()


def main() -> int:
    """Do what is asked and return the exit status; what the user can understand is one line."""
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
