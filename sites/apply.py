"""Write a system's lines into a run.slurm or minimal.slurm, at the lines marked EDIT and OPTION."""

import difflib
import os
import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from sites.systems import Nodes, SitesError, System

HEADER = re.compile(r"(#+)SBATCH +(.*?)(?: +# (.*))?")
MARK = re.compile(r"# .*\b(EDIT|OPTION)\b")
APPLIED = "# sites: "
GPU_OPTIONS = ("--gpus-per-node", "--gpus-per-task", "--gres", "--gpus")
SHORT = {
    "A": "account",
    "p": "partition",
    "t": "time",
    "N": "nodes",
    "c": "cpus-per-task",
    "q": "qos",
    "C": "constraint",
}
COLUMN, WIDTH = 33, 100  # where the comments of a header begin; of the comments that are added


@dataclass(frozen=True)
class Wanted:
    """What the user asks for; what is empty is not asked for."""

    gpus: int  # of each node; 0: nodes without GPUs
    nodes: int = 0
    gpu: str = ""
    partition: str = ""
    account: str = ""
    time: str = ""
    mem: str = ""
    cpus_per_task: int = 0
    venv: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot stand in a script; raises SitesError."""
        for option, pattern, form in (
            ("account", r"[\w.@:+][\w.@:+-]*", "a name"),
            ("partition", r"\w[\w.,-]*", "a name"),
            ("mem", r"[1-9]\d*[KMGT]?", "a size, such as 480G"),
            ("venv", r"[\w./$+@%,:=-]+", "a path without spaces, quotes and ~"),
            ("image", r"[\w./$+@%,:=-]+", "a path without spaces, quotes and ~"),
        ):
            value = getattr(self, option)
            if value and not re.fullmatch(pattern, value, re.ASCII):
                raise SitesError(f"--{option} {value}: must be {form}")
        if self.venv and self.image:
            raise SitesError("--venv and --image: run.slurm uses one of them, give one")
        if self.time:
            minutes(self.time, "--time")
        for option, value, least in (
            ("--gpus-per-node", self.gpus, 0),
            ("--nodes", self.nodes, 0),
            ("--cpus-per-task", self.cpus_per_task, 0),
        ):
            if value < least:
                raise SitesError(f"{option} {value}: must not be negative")


def minutes(time: str, where: str) -> float:
    """Return a time limit in minutes, as SLURM reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; raises SitesError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    if not match:
        raise SitesError(f"{where} {time}: must be a time as SLURM writes it, such as 01:00:00 or 1-12:00:00")
    days, *parts = (int(part) if part else 0 for part in match.groups())
    first, second, third = parts
    if match[1]:
        return days * 1440 + first * 60 + second + third / 60
    return first * 60 + second + third / 60 if match[4] else first + second / 60


def options(text: str) -> dict[str, str]:
    """Return the options of a line of the header, by their long names with dashes."""
    found = {}
    words = text.split()
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        name, is_there, value = word.partition("=")
        if re.fullmatch(r"-\w", name):
            name = f"--{SHORT.get(name[1], name[1])}"
        if name.startswith("--"):
            found[name] = following if not is_there and not following.startswith("-") else value
    return found


def header_of(lines: list[str]) -> dict[str, str]:
    """Return the options of a script that count: those on lines with one #."""
    found: dict[str, str] = {}
    for line in lines:
        match = HEADER.fullmatch(line)
        if match and match[1] == "#":
            found |= options(match[2])
    return found


def number_in(value: str) -> int:
    """Return the last number in the value of an option, such as 4 of `1-4`; 1 if there is none."""
    numbers = re.findall(r"\d+", value)
    return int(numbers[-1]) if numbers else 1


def marked(lines: list[str], name: str) -> str | None:
    """Return the line of the header that is marked and has this option, or None."""
    for line in lines:
        match = HEADER.fullmatch(line)
        if match and MARK.search(line) and name in options(match[2]):
            return line
    return None


def why_not(nodes: Nodes, wanted: Wanted, count: int, time: str) -> str:
    """Return why a job cannot have these nodes, or nothing; `count` is the number of nodes."""
    name, total = nodes.name, count * wanted.gpus
    reasons = {
        f"{name} has {nodes.gpus} GPUs a node": wanted.gpus > nodes.gpus,
        f"{name} gives whole nodes of {nodes.gpus} GPUs": nodes.whole and wanted.gpus != nodes.gpus,
        f"{name} gives at most {nodes.max_nodes} node{'s' * (nodes.max_nodes != 1)}": 0 < nodes.max_nodes < count,
        f"{name} gives at most {nodes.max_gpus} GPUs a job": 0 < nodes.max_gpus < total,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    if nodes.max_time and minutes(time, "--time") > minutes(nodes.max_time, f"max_time of {name}"):
        return f"{name} gives at most {nodes.max_time}, and --time is {time}"
    return ""


def choose(system: System, wanted: Wanted, count: int, time: str) -> Nodes:
    """Return the first nodes of a system's file on which such a job can run; raises SitesError with each reason."""
    kind = [nodes for nodes in system.nodes if bool(nodes.gpus) == bool(wanted.gpus)]
    for option, of_nodes in (
        ("partition", sorted({nodes.partition for nodes in kind})),
        ("gpu", sorted({nodes.gpu for nodes in kind})),
    ):
        asked = getattr(wanted, option)
        if asked and asked.lower() not in map(str.lower, of_nodes):
            known = ", ".join(filter(None, of_nodes)) or "none"
            with_gpus = "with" if wanted.gpus else "without"
            raise SitesError(f"{system.name}: --{option} {asked}: the file knows of nodes {with_gpus} GPUs: {known}")
        kind = [nodes for nodes in kind if not asked or getattr(nodes, option).lower() == asked.lower()]
    if not kind:
        if wanted.gpus:
            raise SitesError(f"{system.name}: the file has no nodes with GPUs for this")
        return Nodes()  # without GPUs, whose partition was not found
    reasons = []
    for nodes in kind:
        reason = why_not(nodes, wanted, count, time)
        if not reason:
            return nodes
        reasons.append(reason)
    asked = f"{count} node{'s' * (count != 1)} of {wanted.gpus} GPUs" if wanted.gpus else f"{count} nodes"
    raise SitesError(f"{system.name}: no {asked}: {'; '.join(dict.fromkeys(reasons))}")


def cores(nodes: Nodes, wanted: Wanted) -> int:
    """Return the cores of a node that a job takes, or 0 if the file does not say."""
    if nodes.cpus_per_gpu:
        return nodes.cpus_per_gpu * wanted.gpus
    return nodes.cpus if wanted.gpus == nodes.gpus and (nodes.gpus or nodes.whole) else 0


def memory(nodes: Nodes, wanted: Wanted) -> str:
    """Return the memory of a node that a job asks for, or nothing if the file does not say."""
    if nodes.mem_per_gpu:
        return f"{nodes.mem_per_gpu * wanted.gpus}G"
    return nodes.mem if wanted.gpus == nodes.gpus else ""


def plan(lines: list[str], system: System, wanted: Wanted) -> tuple[dict[str, str], list[str]]:
    """Return the options for the header by their names, and what the user should know.

    Raises SitesError for what the script or the system does not have.
    """
    job, now, notes = system.job, header_of(lines), []
    count = wanted.nodes or number_in(now.get("--nodes", "1"))
    time = wanted.time or now.get("--time", "0")
    nodes = choose(system, wanted, count, time)
    if wanted.gpus and not any(marked(lines, option) for option in GPU_OPTIONS):
        raise SitesError("this script trains on CPUs, and has no marked line for GPUs: give --gpus-per-node 0")
    if job.account == "mandatory" and not wanted.account and "--account" not in now:
        raise SitesError(f"{system.name} wants an account: give --account NAME")
    if job.mem == "mandatory" and not wanted.mem and "--mem" not in now:
        raise SitesError(f"{system.name} gives little memory if none is asked for: give --mem SIZE, of each node")
    if job.mem == "none" and wanted.gpus and wanted.mem:
        raise SitesError(f"{system.name}: no --mem: the memory follows the GPUs")
    tasks = number_in(now.get("--ntasks-per-node", "1"))
    chosen: dict[str, str] = {}
    if wanted.nodes:
        chosen["--nodes"] = str(wanted.nodes)
    per_process = "as many as GPUs" in (marked(lines, "--ntasks-per-node") or "")
    if per_process and wanted.gpus:
        tasks = wanted.gpus
        chosen["--ntasks-per-node"] = str(tasks)
    each = wanted.cpus_per_task or cores(nodes, wanted) // tasks
    if each:
        chosen["--cpus-per-task"] = str(each)
    else:
        notes.append("cores: the file does not say how many: look at --cpus-per-task")
    if wanted.time:
        chosen["--time"] = wanted.time
    if wanted.gpus:
        option = nodes.gpu_option.format(gpus=wanted.gpus, gpus_per_task=max(wanted.gpus // tasks, 1))
        chosen |= options(option)
    if nodes.partition:
        chosen["--partition"] = nodes.partition
    elif not wanted.gpus:
        notes.append("partition: the file has none for nodes without GPUs: look at the site's pages")
    if wanted.account:
        chosen["--account"] = wanted.account
    elif "--account" not in now:
        notes.append("account: none was given, and many sites want one: --account NAME")
    if wanted.mem or memory(nodes, wanted):
        chosen["--mem"] = wanted.mem or memory(nodes, wanted)
    for option in [*(job.options if wanted.gpus else []), *nodes.options]:
        chosen |= options(option)
    if nodes.note:
        notes.append(nodes.note)
    for name in chosen:
        if name in now and chosen[name] != now[name] and not marked(lines, name):
            line = f"{name}={now[name]} on a line that is not marked EDIT or OPTION, so it has to stay"
            raise SitesError(f"{name} {chosen[name]}: this script has {line}")
    return chosen, notes


def header_line(words: str, comment: str) -> str:
    """Return a line of the header, with its comment where those of the others begin."""
    return f"{f'#SBATCH {words}':<{COLUMN - 2}}  # {comment}"


def new_header(line: str, left: dict[str, str], no_gpus: bool) -> str:
    """Return a marked line of the header with the options in `left` that belong there, and take these out of it."""
    match = HEADER.fullmatch(line)
    assert match
    names = options(match[2])
    if any(name in GPU_OPTIONS for name in names):
        if no_gpus:
            return line if match[1] != "#" else f"#{line}"
        names = dict.fromkeys(GPU_OPTIONS, "")
    own = {name: left.pop(name) for name in names if name in left}
    if not own:
        return line
    if match[1] == "#":  # what the line has already stays
        own = {name: value for name, value in options(match[2]).items() if name not in GPU_OPTIONS} | own
    words = " ".join(f"{name}={value}" if value else name for name, value in own.items())
    return header_line(words, match[3]) if f"#SBATCH {words}" != line.partition(" # ")[0].rstrip() else line


def new_command(line: str, system: System, wanted: Wanted, modules: list[str]) -> list[str]:
    """Return what a marked line below the header becomes; `modules` is emptied once they are written."""
    job = system.job
    start, mark, comment = line.partition("  # ")
    comment = mark + comment
    if re.match(r"(# )?(module load|ml) ", start) and modules:
        *others, last = modules
        modules.clear()
        return [*others, f"{last:<{COLUMN - 2}}{comment}"]
    if match := re.fullmatch(r'(VENV|IMAGE)="\$\{(VENV|IMAGE):-[^}]*\}" *', start):
        path = {"VENV": wanted.venv, "IMAGE": wanted.image}[match[1]]
        changed = f'{match[1]}="${{{match[1]}:-{path}}}"'
        return [f"{changed:<{COLUMN - 2}}{comment}"] if path else [line]
    if re.fullmatch(r"source \S+/bin/activate \|\| exit 2 *", start):
        if wanted.image:
            raise SitesError("this script has no line for an image: take run.slurm, or give --venv")
        before = [*modules]
        modules.clear()
        if wanted.gpus and (job.nccl or job.gloo):
            before.append(interfaces(job.nccl, job.gloo))
        return [*before, f'source "{wanted.venv}/bin/activate" || exit 2{comment}' if wanted.venv else line]
    if wanted.gpus and re.match(r"(# )?export .*\b(NCCL|GLOO)_SOCKET_IFNAME=", start):
        names = [name for name in ("NCCL", "GLOO") if f"{name}_SOCKET_IFNAME" in start]
        asked = interfaces(*(getattr(job, name.lower()) if name in names else "" for name in ("NCCL", "GLOO")))
        return [asked + comment] if asked else [line]
    if re.fullmatch(r"mpi=\w+ *", start) and job.mpi:
        return [f"{f'mpi={job.mpi}':<{COLUMN - 2}}{comment}"]
    return [line]


def interfaces(nccl: str, gloo: str) -> str:
    """Return the line that names the interfaces of NCCL and Gloo, or nothing if there are none."""
    names = {"NCCL_SOCKET_IFNAME": nccl, "GLOO_SOCKET_IFNAME": gloo}
    words = " ".join(f"{name}={value}" for name, value in names.items() if value)
    return f"export {words}" if words else ""


def said(system: System, source: str, notes: list[str]) -> list[str]:
    """Return the comments that say what was done, and what the facts are worth."""
    texts = [
        f"lines for {system.name}, by `python -m sites apply` from {source}. Facts read on {system.read}.",
        f"Nobody of this project has tried them on {system.name}: submit preflight first.",
        *(f"{text.rstrip('.')}." for text in [*system.job.hints, *notes]),
    ]
    wrapped = (
        textwrap.wrap(text, WIDTH - len(APPLIED), break_long_words=False, break_on_hyphens=False) for text in texts
    )
    return [APPLIED + line for lines in wrapped for line in lines]


def edited(text: str, system: System, wanted: Wanted, source: str) -> tuple[str, list[str]]:
    """Return a script with the lines of a system, and what the user should know; `source` names the system's file.

    Marked lines change, and lines are added: every other line stays as it is. Raises SitesError.
    """
    if "\r" in text:
        raise SitesError("it has line ends of Windows, which sbatch refuses: convert it with dos2unix")
    lines = text.split("\n")
    if done := next((line for line in lines if line.startswith(APPLIED)), ""):
        raise SitesError(f"it has been edited already ({done.removeprefix(APPLIED)}): take the file from before that")
    heads = [number for number, line in enumerate(lines) if HEADER.fullmatch(line)]
    if not heads or not any(marked(lines, name) for name in ("--time", "--account", "--partition")):
        raise SitesError("it is not a run.slurm or minimal.slurm of an example: its header has no lines marked EDIT")
    left, notes = plan(lines, system, wanted)
    modules = ((wanted.image and system.job.image_modules) or system.job.modules) if wanted.gpus else []
    unwritten = [*modules]
    body: list[str] = []
    for number, line in enumerate(lines):
        if number in heads and MARK.search(line):
            body.append(new_header(line, left, no_gpus=not wanted.gpus))
        elif number > heads[-1] and MARK.search(line):
            body += new_command(line, system, wanted, unwritten)
        else:
            body.append(line)
        if number == heads[-1]:
            body += [
                header_line(f"{name}={value}" if value else name, f"{system.name} asks for it")
                for name, value in left.items()
            ]
    for option, path in (("--venv", wanted.venv), ("--image", wanted.image)):
        if path and path not in "\n".join(body):
            raise SitesError(f"{option} {path}: this script has no line for it that is marked")
    if unwritten:
        notes.append(f"modules: the script has no marked line for them: {'; '.join(unwritten)}")
    if system.job.mpi and re.search(r"^srun.*--mpi=(?!\$)", text, re.MULTILINE):
        notes.append(f"MPI: the pages have {system.job.mpi}, and --mpi at srun is not marked here: look at it")
    first = heads[0]
    return "\n".join([*body[:first], *said(system, source, notes), *body[first:]]), notes


def diff(old: str, new: str, name: str) -> str:
    """Return the unified diff of two texts."""
    lines = difflib.unified_diff(old.split("\n"), new.split("\n"), name, f"{name}, edited", n=1, lineterm="")
    return "\n".join(lines)


def read_script(path: Path) -> str:
    """Return the text of a script, whatever bytes are in it; raises SitesError."""
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise SitesError(f"{path} cannot be read: {error.strerror}") from None


def keep_copy(path: Path, text: str) -> Path:
    """Keep a script's text beside it, in a file that was not there before, or that has the same text; return that."""
    content = text.encode("utf-8", "surrogateescape")
    for number in range(1, 100):
        copy = path.with_name(f"{path.name}.before-sites" + (f"-{number}" if number > 1 else ""))
        if copy.exists() and copy.read_bytes() == content:
            return copy
        try:
            with open(copy, "xb") as file:
                file.write(content)
                os.fsync(file.fileno())
            copy.chmod(path.stat().st_mode & 0o777)
            return copy
        except FileExistsError:
            continue
    raise SitesError(f"{path.name}.before-sites and 98 more are there already: move them away")


def write(path: Path, old: str, new: str) -> Path:
    """Replace a script by its new text at once, after a copy was kept; return the copy. Raises SitesError."""
    path = path.resolve()  # not a link to it
    if read_script(path) != old:
        raise SitesError(f"{path.name} has changed meanwhile, and nothing was written: try again")
    temporary = None
    try:
        copy = keep_copy(path, old)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            temporary = Path(file.name)
            file.write(new.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            temporary.unlink(missing_ok=True)
        raise SitesError(f"{path} cannot be written: {error.strerror}") from None
    return copy
