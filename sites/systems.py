"""Read the files of systems, `sites/systems/NAME.toml`, and refuse what they must not have."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).resolve().parent / "systems"
# The facts of a system, in the order in which a job script needs them; the first two are always there.
FACTS = ("header", "environment", "wheel", "network", "MPI", "local disk", "internet", "data sets")
# The columns of the table of all systems, by the keys of `row`.
COLUMNS = {
    "gpus": "GPUs per node",
    "header": "header for GPUs",
    "environment": "environment",
    "network": "network",
    "mpi": "MPI for `srun`",
    "disk": "local disk",
    "data": "data sets",
}
T = TypeVar("T")


class SitesError(Exception):
    """What is wrong and what to do, in one line for the user."""


@dataclass(frozen=True)
class Page:
    """A page that was read: its title, its address, and the date of its last change, "no date" if it has none."""

    title: str
    url: str
    date: str


@dataclass(frozen=True)
class Fact:
    """What pages say, as Markdown; `sources` are keys of `pages`, `read` is when, if not as the rest of the file."""

    text: str
    sources: list[str] = field(default_factory=list)
    read: str = ""


@dataclass(frozen=True)
class Nodes:
    """A partition's nodes of one kind, and what a job asks of them. What is empty or 0 is not known, or no limit."""

    partition: str = ""  # empty: none has to be named
    gpu: str = ""  # the name of its GPUs, for --gpu
    gpus: int = 0  # of a node
    whole: bool = False  # a job gets whole nodes
    gpu_option: str = "--gpus-per-node={gpus}"  # {gpus}: of a node; {gpus_per_task}: of a task
    cpus_per_gpu: int = 0
    cpus: int = 0  # of a node, for jobs that take all its GPUs
    mem_per_gpu: int = 0  # in GB
    mem: str = ""  # of a node, for jobs that take all its GPUs
    max_nodes: int = 0  # of a job
    max_gpus: int = 0  # of a job, on all its nodes
    max_time: str = ""  # as SLURM writes it
    options: list[str] = field(default_factory=list)  # of sbatch, besides those of the system
    note: str = ""

    @property
    def name(self) -> str:
        """The partition with the GPU's name, for messages."""
        return " ".join(word for word in (self.partition or "its nodes", self.gpu and f"with {self.gpu}") if word)


@dataclass(frozen=True)
class Job:
    """What every job script of a system gets."""

    account: str = ""  # "mandatory"
    mem: str = ""  # "mandatory", or "none": it must not be given with GPUs
    options: list[str] = field(default_factory=list)  # of sbatch
    modules: list[str] = field(default_factory=list)  # lines of the shell
    image_modules: list[str] = field(default_factory=list)  # the same, in the place of these, for --image
    nccl: str = ""  # NCCL_SOCKET_IFNAME
    gloo: str = ""  # GLOO_SOCKET_IFNAME
    mpi: str = ""  # the type for srun
    hints: list[str] = field(default_factory=list)  # comments in the script


@dataclass(frozen=True)
class System:
    """A system: its facts with their sources, and the lines that follow from them."""

    name: str
    title: str
    read: str  # when the pages were read
    facts: dict[str, Fact]
    pages: dict[str, Page]
    row: dict[str, str] = field(default_factory=dict)  # of the table of all systems
    about: str = ""
    about_sources: list[str] = field(default_factory=list)
    nodes: list[Nodes] = field(default_factory=list)
    job: Job = field(default_factory=Job)


def made(kind: type[T], table: Any, where: str, **parts: Any) -> T:
    """Return a table of a file as one of the classes above; `parts` of it have been made already.

    Raises SitesError for a key that is missing, unknown, or of another type.
    """
    if not isinstance(table, Mapping):
        raise SitesError(f"{where} must be a table")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(table.keys() - known.keys()):
        raise SitesError(f"{where}: unknown key {unknown[0]}; known are {', '.join(known)}")
    for name, one in known.items():
        if name not in {**table, **parts} and one.default is MISSING and one.default_factory is MISSING:
            raise SitesError(f"{where}: the key {name} is missing")
        if name in table and name not in parts:
            check_type(table[name], str(one.type), f"{where}: {name}")
    return kind(**{**table, **parts})


def check_type(value: Any, kind: str, where: str) -> None:
    """Raise SitesError if a value is not of the type that a field names."""
    words = {
        "str": ("a text", lambda: isinstance(value, str)),
        "int": ("a number", lambda: type(value) is int and value >= 0),
        "bool": ("true or false", lambda: isinstance(value, bool)),
        "list[str]": ("a list of texts", lambda: isinstance(value, list) and all(isinstance(x, str) for x in value)),
        "dict[str, str]": ("a table of texts", lambda: all(isinstance(x, str) for x in dict(value).values())),
    }
    kind = kind.removeprefix("<class '").removesuffix("'>")
    text, right = words[kind]
    if not right():
        raise SitesError(f"{where} must be {text}, not {value!r}")


def read(path: Path) -> System:
    """Read the file of a system; raises SitesError."""
    table, where = load(path), str(path)
    facts = {name: made(Fact, one, f"{where}: facts.{name}") for name, one in tables(table, "facts", where).items()}
    pages = {name: made(Page, one, f"{where}: pages.{name}") for name, one in tables(table, "pages", where).items()}
    if list(facts) != [name for name in FACTS if name in facts]:
        raise SitesError(f"{where}: its facts must be some of these, in this order: {', '.join(FACTS)}")
    listed = table.get("nodes", [])
    if not isinstance(listed, list):
        raise SitesError(f"{where}: nodes must be a list: [[nodes]]")
    nodes = [made(Nodes, one, f"{where}: nodes, entry {number}") for number, one in enumerate(listed, 1)]
    for one in nodes:
        try:
            one.gpu_option.format(gpus=1, gpus_per_task=1)
        except (KeyError, IndexError, ValueError):
            raise SitesError(f"{where}: gpu_option {one.gpu_option!r} must have {{gpus}} in it") from None
    job = made(Job, table.get("job", {}), f"{where}: job")
    system = made(System, table, where, facts=facts, pages=pages, nodes=nodes, job=job)
    for name in [name for fact in facts.values() for name in fact.sources] + system.about_sources:
        if name not in pages:
            raise SitesError(f"{where}: pages.{name}, the source of a fact, is missing")
    return system


def load(path: Path) -> dict[str, Any]:
    """Read a TOML file; raises SitesError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SitesError(f"{path} cannot be read: {error}") from None


def tables(table: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return the tables in a table; raises SitesError."""
    found = table.get(name, {})
    if not isinstance(found, Mapping):
        raise SitesError(f"{where}: {name} must be tables: [{name}.NAME]")
    return found


def all_systems() -> dict[str, System]:
    """Return all systems by the names of their files, in the order of these; raises SitesError."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml"))}


def find(name: str) -> tuple[Path, System]:
    """Return a system with its file, by that file's name: one in the current folder, or of ours; raises SitesError."""
    ours = FOLDER / f"{name.lower()}.toml"
    for path in (Path(name), Path(f"{name}.toml"), ours):
        if path.suffix == ".toml" and path.is_file():
            return path, read(path)
    names = " ".join(sorted(path.stem for path in FOLDER.glob("*.toml")))
    raise SitesError(f"{name}: no such system; there are {names}, and the files that `python -m sites new` writes")
