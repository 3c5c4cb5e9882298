"""Command line of the lab: `python -m lab --help`."""

import argparse
import inspect
import os
import signal
import sys
import time
from pathlib import Path

from lab import faults
from lab.base import LabError
from lab.cluster import Lab, why_not
from lab.config import Wanted

FAULTS = (faults.cut, faults.slow, faults.heal, faults.unresolve, faults.requeue, faults.timelimit)


def up(args: argparse.Namespace) -> None:
    """Start a lab and leave it running."""
    begin = time.monotonic()
    lab = Lab(Wanted(args.nodes, args.cpus, args.gpus, args.name, args.share, args.conf))
    lab.up(detached=True)
    print(f"lab: {' '.join(lab.nodes)} idle after {time.monotonic() - begin:.1f} s; now try")
    print(f"    python -m lab run -- srun --nodes={len(lab.nodes)} hostname")


def down(args: argparse.Namespace) -> None:
    """End the lab."""
    print(f"lab: {'ended' if Lab(Wanted(name=args.name)).down() else 'nothing was running'}")


def run(args: argparse.Namespace) -> None:
    """Run a command inside the lab, in the current folder."""
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise LabError("run: which command? For example: python -m lab run -- sinfo")
    enter(args, words)


def shell(args: argparse.Namespace) -> None:
    """Run a shell inside the lab, in the current folder."""
    enter(args, [os.environ.get("SHELL", "/bin/sh")])


def enter(args: argparse.Namespace, words: list[str]) -> None:
    """Become a command inside; raise LabError if the folder cannot be entered there."""
    lab, cwd = Lab.find(args.name), os.path.abspath(args.chdir)
    user = "root" if args.root else ""
    if lab.run(["true"], args.node, cwd, user=user).returncode != 0:
        share = f"start the lab in it, or with --share {cwd}"
        raise LabError(f"{cwd} is not there inside ({share}), or user {user or lab.user} cannot enter it")
    if words[0] == "sbatch" and lab.run(["test", "-w", "."], args.node, cwd, user=user).returncode != 0:
        print(f"lab: user {lab.user} cannot write to {cwd}: a job's log needs another place", file=sys.stderr)
    command = lab.command(words, args.node, cwd, user=user)
    os.execvp(command[0], command)


def status(args: argparse.Namespace) -> None:
    """Show nodes and jobs."""
    lab = Lab.find(args.name)
    states = lab.states()
    for node in lab.nodes:
        print(f"{node}  {lab.addresses[node]}  {states[node]}  {len(lab.processes(node))} processes")
    print(f"user: {lab.user} ({lab.uid})")
    print(lab.slurm("squeue"), end="")


def logs(args: argparse.Namespace) -> None:
    """Show logs."""
    folder = Lab(Wanted(name=args.name)).folder / "logs"
    files = sorted(folder.glob(f"{args.which}.*"))
    if not files:
        raise LabError(f"no log of {args.which} in {folder}")
    for file in files:
        print(f"==> {file} <==\n{Path(file).read_text(errors='replace')}")


def fault(args: argparse.Namespace) -> None:
    """Break or mend something, by the function in faults.py that the command is named for."""
    args.inflict(Lab.find(args.name), *args.words)
    print(f"lab: {args.action} {' '.join(args.words)}: done")


def parse_args() -> argparse.Namespace:
    """Read the command line. Each command's help is the first line of its function's docstring."""
    parser = argparse.ArgumentParser(prog="lab", description="A throwaway SLURM of several nodes on one machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {}
    for function in (up, run, shell, status, logs, down, *FAULTS):
        text = str(function.__doc__).partition("\n")[0].rstrip(".")
        action = actions.add_parser(function.__name__, help=text, description=text)
        action.add_argument("--name", default="lab", help="which of several labs (default: %(default)s)")
        action.set_defaults(function=function)
        parsers[function.__name__] = action

    add = parsers["up"].add_argument
    add("--nodes", type=int, default=2, help="how many nodes (default: %(default)s)")
    add("--cpus", type=int, default=4, help="per node (default: %(default)s)")
    add("--gpus", type=int, default=0, help="stand-ins per node (default: %(default)s)")
    add("--share", default=[], metavar="FOLDER", action="append", help="one in /tmp for all nodes (repeatable)")
    add("--conf", default=[], metavar="KEY=VALUE", action="append", help="a line for slurm.conf (repeatable)")
    for name in "run", "shell":
        add = parsers[name].add_argument
        add("--node", default="head", help="where (default: %(default)s)")
        add("--root", action="store_true", help="as root (default: as the lab's ordinary user)")
        add("--chdir", default=".", metavar="FOLDER", help="default: the current one")
    parsers["run"].add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    parsers["logs"].add_argument("which", nargs="?", default="*", help="a node, slurmctld, munged or keeper")
    for inflict in FAULTS:
        parsers[inflict.__name__].set_defaults(function=fault, inflict=inflict)
        for word in inspect.getfullargspec(inflict).args[1:]:  # after the lab
            parsers[inflict.__name__].add_argument("words", action="append", metavar=word.upper())
    return parser.parse_args()


def main() -> int:
    """Do what is asked and return the exit status; what the user can understand is one line."""
    args = parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `lab logs | head`, and for what `run` starts
    try:
        if os.geteuid() != 0:
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
