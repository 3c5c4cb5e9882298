"""Command line of sites: `python -m sites --help`."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (a login node's own is older)
    sys.exit("sites: error: needs Python 3.11 or newer, such as a module `python` of your site has")

import argparse
from pathlib import Path

from sites import apply, new, page
from sites.systems import SitesError, find


def apply_command(args: argparse.Namespace) -> None:
    """Write a system's lines into a run.slurm or minimal.slurm, after it has shown them and asked."""
    source, system = find(args.system)
    given = {name: value for name, value in vars(args).items() if name in apply.Wanted.__dataclass_fields__}
    wanted = apply.Wanted(**given)
    script = args.script
    old = apply.read_script(script)
    try:
        text, notes = apply.edited(old, system, wanted, source.name)
    except SitesError as error:
        raise SitesError(f"{script}: {error}") from None
    print(apply.diff(old, text, str(script)).encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    for note in notes:
        print(f"sites: note: {note}")
    if not args.write:
        if not sys.stdin.isatty():
            print("sites: nothing was written; --write writes it")
            return
        if input("sites: write this? [y/N] ").strip().lower() not in ("y", "yes"):
            print("sites: nothing was written")
            return
    copy = apply.write(script, old, text)
    print(f"sites: {script} has these lines now; {copy.name} beside it is as it was")


def new_command(args: argparse.Namespace) -> None:
    """Write a file for the cluster where this runs, from what its SLURM says."""
    path = args.output or Path(f"{args.name}.toml")
    new.check_name(args.name, path)
    text = new.text_of(args.name)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SitesError(f"{path} is there already: move it away, or give --output") from None
    except OSError as error:
        raise SitesError(f"{path} cannot be written: {error.strerror}") from None
    command = f"python -m sites apply {path} SCRIPT --nodes 2 --gpus-per-node 4"
    print(f"sites: wrote {path}; fill in what is empty in it, then such as: {command}")


def page_command(args: argparse.Namespace) -> None:
    """Write sites/systems.md from the files of systems."""
    page.PAGE.write_text(page.text(), encoding="utf-8")
    print(f"sites: wrote {page.PAGE}")


def parse_args() -> argparse.Namespace:
    """Read the command line. Each command's help is what its function says of itself."""
    description = "Known clusters, and the lines of a run.slurm that each of them needs."
    parser = argparse.ArgumentParser(prog="python -m sites", description=description)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, function) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
        text = str(function.__doc__).rstrip(".")
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.set_defaults(function=function)
        return action

    one = add("apply", apply_command)
    one.add_argument("system", metavar="NAME", help="of a file in sites/systems, or a file that `new` has written")
    one.add_argument("script", type=Path, metavar="SCRIPT", help="run.slurm or minimal.slurm of a copied example")
    one.add_argument("--gpus-per-node", dest="gpus", required=True, metavar="N", help="0: nodes without", type=int)
    one.add_argument("--nodes", default=0, metavar="N", help="default: as the script has it", type=int)
    one.add_argument(
        "--cpus-per-task", default=0, metavar="N", help="default: as the file of the system says", type=int
    )
    for option, text in (
        ("gpu", "which GPUs, where there are several kinds, such as a100"),
        ("partition", "default: the first in the file that can have such a job"),
        ("account", "whom the job is charged to"),
        ("time", "such as 02:00:00; default: as the script has it"),
        ("mem", "memory of each node, such as 64G; default: as the file of the system says"),
        ("venv", "a venv or conda environment, in the place of .venv"),
        ("image", "an Apptainer image, in the place of a venv"),
    ):
        one.add_argument(f"--{option}", default="", help=text)
    one.add_argument("--write", action="store_true", help="write without a question")
    one = add("new", new_command)
    one.add_argument("name", metavar="NAME", help="of the system, for the name of the file")
    one.add_argument("--output", type=Path, metavar="FILE", help="default: NAME.toml in the current folder")
    add("page", page_command)
    return parser.parse_args()


def main() -> int:
    """Do what is asked and return the exit status; what is wrong is one line."""
    args = parse_args()
    try:
        args.function(args)
    except SitesError as error:
        print(f"sites: error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print("\nsites: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
