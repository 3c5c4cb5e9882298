"""The checks themselves: that each can fail, and that what the documents say is what runs."""

import ast
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import measure
from harness import edits, outputs, readme, refusals, runs, sessions
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from harness.processes import clean_environment
from lab import tree
from lab.base import SEARCH, LabError


def test_old_python(tmp_path: Path) -> None:
    """An older Python gets one line from nox."""
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    script = "import sys; sys.version_info = (3, 10, 13); import runpy; runpy.run_path('noxfile.py')"
    command = [sys.executable, "-c", script]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0
    assert refused.stderr.splitlines() == ["noxfile.py: error: the examples need Python 3.11 to 3.13: run nox with one"]


def test_train_names_the_examples() -> None:
    """`nox -s train` with an unknown name lists the known ones."""
    refused = runs.nox(ROOT, "-s", "train", "--no-install", "--", "no_such_example")
    assert refused.returncode != 0
    assert all(name in refused.stderr for name in ("no_such_example", *EXAMPLES))


def test_documents() -> None:
    """Each example has a row in README.md's table, in the order of names; documents name real sessions."""
    front_page = (ROOT / "README.md").read_text()
    assert sorted(LAUNCHERS) == EXAMPLES
    assert re.findall(r"^\| \[(\w+)\]\(examples/\1\) \|", front_page, re.MULTILINE) == EXAMPLES
    listed = runs.nox(ROOT, "--list").stdout
    documents = "".join(path.read_text() for path in readme.DOCUMENTS)
    named = set(re.findall(r"nox -s \"?(\w+)", documents))
    assert named and all(re.search(rf"^[*-] {name}\b", listed, re.MULTILINE) for name in named), (named, listed)


def unheld(text: str) -> list[str]:
    """Return which promises of the front page name no function that holds them, or one that is not where they say."""
    section = text.partition("\n## What every example promises\n")[2].partition("\n## ")[0]
    wrong = []
    for promise in re.split(r"^\* ", section, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[(\w+)\]\((\w+/[\w/]+\.py)\)", promise)
        if not links or not all(f"\ndef {name}(" in (ROOT / file).read_text() for name, file in links):
            wrong.append(promise)
    return wrong


def test_promises() -> None:
    """Each promise of the front page leads to the test that holds it; one without, and a wrong name, are noticed."""
    text = (ROOT / "README.md").read_text()
    assert text.count("](tests/") > 5 and unheld(text) == []
    (wrong,) = unheld(text.replace("[test_killed_and_resumed]", "[test_killed]"))
    assert wrong.startswith("**Killed at any moment")
    assert unheld(text.replace("## The rooms", "* It is fast.\n\n## The rooms")) == ["It is fast.\n"]


NARROW = ("environments", "faults", "glossary", "on-your-cluster")
# The most lines of the pages that are read on a login node, in `less`; the pages in docs/ have no bound.
PAGES = {"README.md": 130} | dict.fromkeys(f"docs/{name}.md" for name in NARROW)
WIDTH = 120


def assert_fits(text: str, most: int | None, width: int = WIDTH) -> None:
    """Check that a page is short and narrow; the addresses of links, and lines that are a picture, may be longer."""
    lines = text.splitlines()
    assert most is None or len(lines) <= most
    shown = [re.sub(r"\]\([^)]*\)", "]", line) for line in lines if not re.fullmatch(r"!\[.*\]\(.*\)", line)]
    assert [line for line in shown if len(line) > width] == []


@pytest.mark.parametrize(("file", "most"), PAGES.items(), ids=PAGES)
def test_pages_are_short(file: str, most: int | None) -> None:
    """The front page is one that is read to its end, and no line of it, or of what it links to first, is cut off."""
    assert_fits((ROOT / file).read_text(), most)


def test_diffs_of_pages_fit() -> None:
    """Each line that a page's diff removes stands in an example, or in a diff of that page before.

    The tests that apply the diffs to jobs are weekly.
    """
    files = [path for name in ("*/*.py", "*/*.slurm") for path in (ROOT / "examples").glob(name)]
    ours = {line.strip() for path in files for line in path.read_text().splitlines()}
    removed = 0
    for page in readme.DOCUMENTS:
        known = set(ours)
        for line in "".join(readme.fences(page, "diff")).splitlines():
            if line.startswith("-"):
                removed += 1
                assert line[1:].strip() in known, f"{page}: {line}"
            known.add(line[1:].strip())
    assert removed > 20


def test_overview() -> None:
    """CONTRIBUTING.md has at most 100 lines of 100 columns, rows of tables apart, and leads to all of docs/dev/."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert_fits(re.sub(r"^\|.*", "", text, flags=re.MULTILINE), 100, width=100)
    pages = {str(path.relative_to(ROOT)) for path in readme.DOCUMENTS if path.parent == ROOT / "docs" / "dev"}
    assert set(re.findall(r"\]\((docs/dev/[\w-]+\.md)\)", text)) == pages


def test_index() -> None:
    """docs/index.md leads to all pages beside it, and the front page leads to docs/index.md."""
    linked = re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs" / "index.md").read_text())
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == {*linked, "index.md"}
    assert "](docs/index.md)" in (ROOT / "README.md").read_text()


def anchors(document: Path) -> set[str]:
    """Return the names under which the titles of a document can be linked to."""
    titles = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", readme.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    """Links in the repository lead to what exists, the others begin with https; an example has none that leaves it."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^\]]+)\]", text)) == set(named)
    links = [*re.findall(r"\]\(([^)]+)\)", text), *named.values()]
    local = [link for link in links if "://" not in link]
    assert all(link.startswith("https://") for link in links if link not in local), links
    for link in local:
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists() and (not anchor or anchor in anchors(target)), link
        assert not document.is_relative_to(ROOT / "examples") or target.is_relative_to(document.parent), link
    assert local or document.parent != ROOT


WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


@pytest.fixture
def hosted() -> dict[str, Any]:
    """The hosted workflow."""
    return yaml.safe_load(WORKFLOW.read_text())


def found(hosted: dict[str, Any], event: str, output: Path) -> dict[str, str]:
    """Return what the first job of the hosted workflow hands on after an event."""
    assert set(hosted["jobs"]["parts"]["outputs"]) == {"weekly", "jobs"}
    (step,) = [step for step in hosted["jobs"]["parts"]["steps"] if step.get("id") == "find"]
    environment = os.environ | {"GITHUB_OUTPUT": str(output), "GITHUB_EVENT_NAME": event}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=environment, check=True, timeout=300)
    return dict(line.split("=", 1) for line in output.read_text().splitlines())


def test_hosted_workflow(hosted: dict[str, Any], tmp_path: Path) -> None:
    """Each change is tested with the oldest SLURM and Python, and weekly each part with each of both."""
    parts, pythons = {*EXAMPLES, "rest"}, {"3.11", "3.12", "3.13"}
    assert hosted["jobs"]["checks"]["strategy"]["matrix"] == {"include": "${{ fromJSON(needs.parts.outputs.jobs) }}"}
    assert hosted["jobs"]["checks"]["container"]["image"] == "debian:${{ matrix.debian }}"
    jobs = {}
    for event, word in {"push": "", "pull_request": "", "schedule": "weekly", "workflow_dispatch": "weekly"}.items():
        output = found(hosted, event, tmp_path / event)
        jobs[event] = {(row["debian"], row["python"], row["part"]) for row in json.loads(output["jobs"])}
        assert output["weekly"] == word and {part for _, _, part in jobs[event]} == parts
    assert jobs["push"] == jobs["pull_request"] and jobs["schedule"] == jobs["workflow_dispatch"]
    assert {("bookworm", "3.11", part) for part in parts} <= jobs["push"] & jobs["schedule"]
    assert {python for _, python, part in jobs["push"] if part == "rest"} == pythons
    assert {(python, part) for _, python, part in jobs["schedule"]} == {
        (python, part) for python in pythons for part in parts
    }
    # Horovod needs SLURM's PMIx plugin, which sid's lacks.
    expected = {(suite, part) for suite in ("bookworm", *tree.SUITES) for part in parts}
    expected -= {("sid", part) for part in parts if part.startswith("horovod_")}
    assert {(debian, part) for debian, _, part in jobs["schedule"]} == expected
    text = " ".join((ROOT / "docs" / "dev" / "checks.md").read_text().split())
    named = re.search(r"Debian bookworm \(SLURM [\d.]+\), weekly also (\w+) \(([\d.]+)\) and (\w+) \(([\d.]+)\)", text)
    releases = dict(zip(named.groups()[::2], named.groups()[1::2], strict=True))
    assert {suite: re.match(r"SLURM ([\d.]+)", what)[1] for suite, what in tree.SUITES.items()} == releases


def test_hosted_commands(hosted: dict[str, Any]) -> None:
    """What the workflow asks nox for: the releases of PyTorch that it knows, with the examples that claim them.

    What it asks .ci/run for, test_ci_run.py shows.
    """
    pins = (ROOT / "examples" / "ddp_spawn" / "requirements.txt").read_text()
    others = {release for release in sessions.releases() if f"torch=={release}\n" not in pins}
    assert set(hosted["jobs"]["releases"]["strategy"]["matrix"]["torch"]) == others
    (script,) = [step["run"] for step in hosted["jobs"]["releases"]["steps"] if "--torch" in step.get("run", "")]
    ask = script[script.index("names=") : script.index(".venv/bin/nox")] + "printf '%s ' \"${sessions[@]}\""
    asked = subprocess.run(["bash", "-ec", ask], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    claims = [name for name in EXAMPLES if "(tested: 2.6," in (ROOT / "examples" / name / "README.md").read_text()]
    assert claims and asked.stdout.split() == [f"{kind}({name})" for name in claims for kind in ("smoke", "checks")]


def test_hosted_is_careful(hosted: dict[str, Any]) -> None:
    """Jobs can read only, end in time, and use actions of a named commit; a push ends what it has made stale."""
    assert hosted["permissions"] == {"contents": "read"}
    assert "github.ref" in hosted["concurrency"]["group"] and hosted["concurrency"]["cancel-in-progress"] is True
    assert all("timeout-minutes" in job and "permissions" not in job for job in hosted["jobs"].values())
    uses = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert uses and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) for use in uses), uses


# Which other rooms the modules of a room may import. The folder of an example has its own common/.
ARROWS: dict[str, set[str]] = {
    "common": set(),
    "plumbing": set(),
    "examples": {"common", "plumbing"},
    "preflight": set(),
    "jupyter": set(),
    "runs": {"common"},  # that of the run's example
    "sweep": set(),
    "sites": set(),
    "lab": set(),
    "fake_gpus": set(),
    "harness": {"common", "lab"},
    "benchmarks": {"common", "harness", "lab", "plumbing"},
    "studies": {"benchmarks", "common", "harness", "lab", "plumbing"},
    "tests": {"benchmarks", "common", "fake_gpus", "harness", "lab", "plumbing", "sites", "studies"},
    "noxfile.py": {"harness", "lab"},
}


def test_picture_of_rooms() -> None:
    """CONTRIBUTING.md's list has each room; the picture's arrows are permitted imports, and lead to all that are."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (picture,) = re.findall(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    drawn: dict[str, set[str]] = {room: set() for room in ARROWS}
    for start, ends in re.findall(r"^ *(\S+) --> (.+)$", picture, re.MULTILINE):
        drawn[start] |= set(ends.split(" & "))
        assert drawn[start] <= ARROWS[start], start
    for room, rooms in ARROWS.items():
        reached = {room}
        while more := set().union(*(drawn[one] for one in reached)) - reached:
            reached |= more
        assert rooms <= reached, room
    in_groups = re.findall(r"^\* \*\*[\w ]+\*\*: (.*)\.$", text.partition("## The rooms")[2], re.MULTILINE)
    rooms = sorted(room for group in in_groups for room in group.split(", "))
    assert rooms == sorted({*ARROWS, "docs"}), rooms


@pytest.mark.parametrize("room", ARROWS)
def test_rooms(room: str) -> None:
    """Rooms import each other in one direction; each package at the top has a row."""
    files = [ROOT / room] if room.endswith(".py") else [*ROOT.glob(f"{room}/*.py"), *ROOT.glob(f"{room}/*/*.py")]
    assert files and set(ARROWS) >= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for file in files:
        names: list[str] = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
        imported = {name.partition(".")[0] for name in names} & ARROWS.keys()
        assert imported <= {room, *ARROWS[room]}, file


COLLECT = """
import sys, pytest
status = pytest.main(["--collect-only", "-qq", "--example=ddp_spawn", "tests"])
print("status", int(status), *sorted({"torch", "matplotlib", "nbformat", "PIL", "yaml"} & sys.modules.keys()))
"""


def test_collected_without_heavy_packages() -> None:
    """Each process of an example's tests reads all their files, which takes no PyTorch and no other large package.

    The plumbing takes NumPy, which is imported in a tenth of a second.
    """
    words = [sys.executable, "-c", COLLECT]
    done = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "status 0", done.stdout + done.stderr


def train_py(name: str) -> str:
    """Return the text of an example's train.py."""
    return (ROOT / "examples" / name / "train.py").read_text()


PROCESSES = (ROOT / "plumbing" / "processes.py").read_text()


def functions(text: str) -> dict[str, str]:
    """Return the text of each function of a program, those in classes included."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def blocks_anew(function: str, block: int, *python: str) -> float:
    """Return how often a Python gets the pages of a block anew from the kernel when it takes and frees it nine times.

    `function` is the text of a keep_memory(), which is called before. The program asks for no huge pages (prctl's 41
    is PR_SET_THP_DISABLE), so that a block has the same number of pages each time, whatever their size here.
    """
    program = f"import ctypes, resource\n{function}\nkeep_memory()\n" + (
        "libc = ctypes.CDLL(None)\n"
        "assert libc.prctl(41, 1, 0, 0, 0) == 0\n"
        "libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]\n"
        "libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]\n"
        "faults = []\n"
        "for _ in range(10):\n"
        f"    block = libc.malloc({block})\n"
        f"    ctypes.memset(block, 1, {block})\n"
        "    libc.free(block)\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
        f"print((faults[-1] - faults[0]) * resource.getpagesize() / {block})\n"
    )
    words = [*python, "-c", program]
    return float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout)


NOTHING_KEPT = "def keep_memory():\n    pass"


def test_keeps_memory() -> None:
    """Freed blocks of 64 MB stay with the process; without keep_memory() each comes anew from the kernel.

    Each example calls it at its start.
    """
    for name in EXAMPLES:
        module = re.search(r"^    (\w+)\.prepare_process\(args\)$", train_py(name), re.MULTILINE)[1]
        path = ROOT / "examples" / name / f"{module}.py"
        text = PROCESSES if module == "plumbing" else path.read_text()
        assert re.search(r"^    (processes\.)?keep_memory\(\)$", functions(text)["prepare_process"], re.MULTILINE), name
    kept = blocks_anew(functions(PROCESSES)["keep_memory"], 2**26, sys.executable)
    assert kept < 1 and blocks_anew(NOTHING_KEPT, 2**26, sys.executable) >= 9


@pytest.mark.parametrize("largest", [2**25, 2**30, 0])
def test_keeps_memory_as_far_as_glibc_permits(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glibc that refuses a threshold gets one that it accepts, or is left as it is: its own rule is better than none.

    glibc up to 2.34 refuses M_MMAP_THRESHOLD (-3) above 32 MiB, and each setting switches its own rule off.
    """
    accepted = {}

    def mallopt(setting: int, value: int) -> int:
        if setting == -3 and value > largest:
            return 0
        accepted[setting] = value
        return 1

    libc = types.SimpleNamespace(mallopt=mallopt, gnu_get_libc_version=None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    exec(functions(PROCESSES)["keep_memory"] + "\nkeep_memory()", {"ctypes": ctypes})
    assert accepted == ({-3: largest, -1: 2**31 - 1} if largest else {})


def why_no_old_debian() -> str | None:
    """Say why Debian 11 cannot be installed in a folder, or return None."""
    if os.geteuid() != 0 or not shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin"):
        return "needs root and debootstrap"
    try:
        tree.find_mirror()
    except LabError as error:
        return str(error)
    return None


@pytest.mark.runs("weekly")
@pytest.mark.skipif(bool(why_no_old_debian()), reason=f"Debian 11: {why_no_old_debian()}")
def test_keeps_memory_with_old_glibc(tmp_path: Path) -> None:
    """The same for blocks of 16 MB with the glibc of Debian 11, older than RHEL 9's, and the Python of that Debian."""
    words = ["debootstrap", "--variant=minbase", "--include=python3", "bullseye", str(tmp_path / "tree")]
    words.append(tree.find_mirror())
    subprocess.run(words, env=os.environ | {"PATH": SEARCH}, check=True, capture_output=True, timeout=400)
    python = ["chroot", str(tmp_path / "tree"), "python3"]
    ask = [*python, "-c", "import platform; print(*platform.libc_ver())"]
    version = subprocess.run(ask, capture_output=True, timeout=300)
    assert version.stdout == b"glibc 2.31\n"
    kept = blocks_anew(functions(PROCESSES)["keep_memory"], 2**24, *python)
    # all that this glibc accepts of 1 GB
    once = NOTHING_KEPT.replace("pass", "ctypes.CDLL(None).mallopt(-1, 2**31 - 1)")
    assert kept < 1 and blocks_anew(once, 2**24, *python) >= 9
    shutil.rmtree(tmp_path / "tree")


EACH_STEP = ("train_one_epoch", "evaluate", "on_device", "normalise", "training_step", "validation_step")


def blocking_copies(text: str) -> list[str]:
    """Return what a program copies to a device in each step, and waits for, as the lines of its source."""
    found = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and function.name in EACH_STEP:
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                keywords, what = {keyword.arg for keyword in call.keywords}, ast.unparse(call.func)
                moved = what.endswith(".to") and ast.unparse(call.args[0]) in ("device", "accelerator.device")
                made = what == "torch.tensor" and "device" in keywords
                if made or (moved and "non_blocking" not in keywords):
                    found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("name", [name for name in EXAMPLES if LAUNCHERS[name].gpus])
def test_no_step_waits_for_a_copy(name: str) -> None:
    """Batches come from pinned memory, and no step waits until its own is on the GPU; a copy that blocks is noticed."""
    for path in (ROOT / "examples" / name).glob("*.py"):
        if path.name != "minimal.py":  # which leaves it to train.py
            assert blocking_copies(path.read_text()) == [], path.name
    text = train_py(name)
    loaders = re.findall(r"DataLoader\(.*\)", text)
    assert loaders and "pin_memory" in text and all(re.search("pin_memory|[*][*]", loader) for loader in loaders), (
        loaders
    )
    blocking = text.replace(", non_blocking=True", "")
    assert blocking == text or blocking_copies(blocking)  # Lightning copies by itself


@pytest.mark.parametrize("name", EXAMPLES)
def test_container_definitions(name: str) -> None:
    """Each container.def is short, and has all lines of ddp_spawn's, in their order."""
    model, text = ((ROOT / "examples" / one / "container.def").read_text() for one in ("ddp_spawn", name))
    lines = text.splitlines()
    assert len(lines) <= 30 and [line for line in lines if line in model.splitlines()] == model.splitlines(), name
    files = re.findall(r"^    (\S+[.]\w+) /opt/", text, re.MULTILINE)
    assert "requirements.txt" in files and all((ROOT / "examples" / name / file).exists() for file in files), name


def test_environment_of_its_own() -> None:
    """`nox -s bench` asks for the environment of an example that cannot share the others', and refuses what is none.

    It knows by train.py which examples train the same model, since on a cluster it has nothing else.
    """
    convnets = [name for name in EXAMPLES if LAUNCHERS[name].convnet]
    assert convnets == measure.EXAMPLES and [name for name in convnets if LAUNCHERS[name].pytorch] == measure.ALIKE
    command = [sys.executable, "-m", "benchmarks.measure", "throughput", "--examples", "horovod_tensorflow"]
    for words, text in (((), "--venv horovod_tensorflow=FOLDER"), (("--venv", "horovod_tensorflow=/"), "NAME=FOLDER")):
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and text in done.stderr.splitlines()[-1], done.stderr


def test_install_sh_of_tensorflow() -> None:
    """The script that installs Horovod is that for PyTorch, which `nox -s sync` holds, with few other lines."""
    of_cpu, _, of_tensorflow = (path.read_text() for path in sorted(ROOT.glob("examples/*/install.sh")))
    assert edits.changed_lines(of_cpu, of_tensorflow) <= 50
    change = re.search(r"^change\(\) .*?^}\n", of_cpu, re.MULTILINE | re.DOTALL)[0]
    assert change in of_tensorflow


def wheel_rows(text: str) -> list[list[str]]:
    """Return the rows of the table of an example's README that says which PyTorch fits a node: their cells."""
    head = r"^\| no GPU, AMD, V100, an NVIDIA driver below 580 \|.*\n\|---.*\n((?:\|.*\n)+)"
    (rows,) = re.findall(head, text, re.MULTILINE)
    return [[cell.strip(" `") for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


def test_which_pytorch() -> None:
    """Each example that uses GPUs has the same five rows in its README, which preflight proposes, too."""
    releases = json.loads((ROOT / "preflight" / "releases.json").read_text())
    wheels = [row["wheel"] for row in releases["nvidia"] if row["wheel"]] + [releases["amd"], releases["cpu"]]
    proposed = {tuple(wheel) for wheel in wheels if wheel != releases["pins"]}
    names = [name for name in EXAMPLES if LAUNCHERS[name].gpus]
    tables = [wheel_rows((ROOT / "examples" / name / "README.md").read_text()) for name in names]
    for rows in tables:
        assert len(rows) == 5 and rows == tables[0]
        assert {tuple(row[1:]) for row in rows} == proposed


def write_output(folder: Path, weight: float, epochs: int) -> Path:
    """Write a small model.pt and metrics.csv."""
    folder.mkdir()
    torch.save({"fc.weight": torch.tensor([1.0, weight])}, folder / "model.pt")
    rows = [f"{epoch},0.5,{epoch * 10}" for epoch in range(1, epochs + 1)]
    (folder / "metrics.csv").write_text("\n".join(["epoch,train_loss,seconds", *rows]) + "\n")
    return folder


def test_comparison_can_fail(tmp_path: Path) -> None:
    """The last bit of one weight, the sign of a zero, and a missing row are each noticed."""
    reference = write_output(tmp_path / "reference", 0.0, 2)
    outputs.assert_same_run(write_output(tmp_path / "same", 0.0, 2), reference)
    for name, weight, epochs in (("bit", 1e-45, 2), ("sign", -0.0, 2), ("row", 0.0, 1)):
        with pytest.raises(AssertionError):
            outputs.assert_same_run(write_output(tmp_path / name, weight, epochs), reference)


def test_refusal_can_fail(tmp_path: Path) -> None:
    """A traceback, a missing line, two different lines or another status do not pass for a refusal."""
    good = "import sys; print('train.py: error: no x: do y', file=sys.stderr); sys.exit(2)"
    refusals.assert_refused(runs.Run([sys.executable, "-c", good], tmp_path).wait(), 2, "do y")
    raised = good.replace("sys.exit(2)", "print('Traceback', file=sys.stderr); sys.exit(2)")
    twice = good.replace("sys.exit(2)", "print('train.py: error: z', file=sys.stderr); sys.exit(2)")
    for bad in (raised, twice, good.replace("exit(2)", "exit(0)"), "import sys; sys.exit(2)"):
        with pytest.raises(AssertionError):
            refusals.assert_refused(runs.Run([sys.executable, "-c", bad], tmp_path).wait(), 2, "do y")
    for file, theirs in (("launcher/api.py", True), ("/x/train.py", False), ("train.py", False)):
        report = f"print('Traceback', 'File {chr(34)}{file}{chr(34)}', file=sys.stderr); sys.exit(1)"
        run = runs.Run([sys.executable, "-c", good.replace("sys.exit(2)", report)], tmp_path).wait()
        with contextlib.nullcontext() if theirs else pytest.raises(AssertionError):
            refusals.assert_refused(run, 1, "do y")


REFUSES = """
import os, sys, tempfile
def parse_args():
    for number in range({"--twice": 2, "--silent": 0}.get(sys.argv[1], 1)):
        print(f"train.py: error: no x: do y {number}", file=sys.stderr, flush=True)
    if sys.argv[1] == "--leaves":
        tempfile.mkdtemp()
    if sys.argv[1] == "--raises":
        print("Traceback", file=sys.stderr, flush=True)
    os._exit(0 if sys.argv[1] == "--passes" else 2)
"""


def test_refusals_in_one_process_can_fail(tmp_path: Path) -> None:
    """Of several cases each has to have one line of its own, and the status; no traceback is shown, nothing is left."""
    (tmp_path / "train.py").write_text(REFUSES)
    good = {"--good": ["do y"], "--good 2": ["no x"]}
    refusals.assert_arguments_refused(tmp_path, good)
    for bad in ("--twice", "--silent", "--passes", "--leaves", "--raises", "--good 3"):
        with pytest.raises(AssertionError):
            refusals.assert_arguments_refused(tmp_path, {**good, bad: ["do z" if bad == "--good 3" else "do y"]})
    with pytest.raises(AssertionError):
        refusals.assert_arguments_refused(tmp_path, {"--silent": ["do y"], "--twice": ["do y"]})
