"""The checks themselves: that each can fail, and that what the documents say is what runs."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import copies, readme, runs
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from harness.processes import clean_environment, finish


def nox(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nox in a copy of the repository."""
    command = [sys.executable, "-m", "nox", "--non-interactive", *arguments]
    environment = clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    return finish(command, 300, cwd=repository, env=environment)


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
    refused = nox(ROOT, "-s", "train", "--no-install", "--", "no_such_example")
    assert refused.returncode != 0
    assert all(name in refused.stderr for name in ("no_such_example", *EXAMPLES))


def test_documents() -> None:
    """Each example has a row in README.md's table, in the order of names; documents name real sessions."""
    front_page = (ROOT / "README.md").read_text()
    assert sorted(LAUNCHERS) == EXAMPLES
    assert re.findall(r"^\| \[(\w+)\]\(examples/\1\) \|", front_page, re.MULTILINE) == EXAMPLES
    listed = nox(ROOT, "--list").stdout
    documents = "".join(path.read_text() for path in readme.DOCUMENTS)
    named = set(re.findall(r"nox -s \"?(\w+)", documents))
    assert named and all(re.search(rf"^[*-] {name}\b", listed, re.MULTILINE) for name in named), (named, listed)


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


def test_hosted_workflow(hosted: dict[str, Any]) -> None:
    """Each change is tested by .ci/run with the oldest and the newest Python, once a week with the long tests."""
    rows = hosted["jobs"]["checks"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == {"3.11", "3.12", "3.13"}
    assert hosted["jobs"]["checks"]["steps"][-1]["run"] == "bash .ci/run ${FULL:+full}"


def test_hosted_is_careful(hosted: dict[str, Any]) -> None:
    """Jobs can read only, end in time, and use actions of a named commit; a push ends what it has made stale."""
    assert hosted["permissions"] == {"contents": "read"}
    assert "github.ref" in hosted["concurrency"]["group"] and hosted["concurrency"]["cancel-in-progress"] is True
    assert all("timeout-minutes" in job and "permissions" not in job for job in hosted["jobs"].values())
    uses = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert uses and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) for use in uses), uses


# What people copy, or take to their cluster, and what it may import of the folders at the top.
ALONE = {
    "common": {"common"},
    "longrun": {"longrun"},
    "examples": {"common", "longrun"},
}
ALONE |= {
    "preflight": set(),
    "jupyter": set(),
    "runs": set(),
    "sweep": set(),
    "lab": {"lab"},
    "verify": {"verify"},
}


@pytest.mark.parametrize("folder", ALONE)
def test_stands_alone(folder: str) -> None:
    """What people copy, or take to their cluster, imports nothing of the folders that are ours."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for file in [*ROOT.glob(f"{folder}/*.py"), *ROOT.glob(f"{folder}/*/*.py")]:
        names: list[str] = []
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(str(node.module))
        assert {name.partition(".")[0] for name in names} & folders <= ALONE[folder], file


def test_sync(tmp_path: Path) -> None:
    """`nox -s sync` names a changed, a missing and an extra file, and --fix corrects them."""
    for name in ("common", "longrun", "examples", "harness", "lab"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("output", "data", ".venv"))
    for name in ("noxfile.py", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    assert nox(tmp_path, "-s", "sync").returncode == 0
    changed = []
    for name in EXAMPLES:
        files = [tmp_path / "examples" / name / file for file in ("longrun.py", "job.sh", "common/arrays.py")]
        changed += [file for file in files if file.exists()]  # fsdp has no common/
    for path in changed[:-1]:
        path.write_text("changed\n")
    changed[-1].unlink()
    extra = tmp_path / "examples" / "ddp_spawn" / "common" / "extra.py"
    extra.touch()
    wrong = {str(path.relative_to(tmp_path)) for path in [*changed, extra]}
    failed = nox(tmp_path, "-s", "sync")
    assert failed.returncode != 0 and "nox -s sync -- --fix" in failed.stderr
    assert {*copies.differences(tmp_path)} == wrong and all(name in failed.stderr for name in wrong)
    assert nox(tmp_path, "-s", "sync", "--", "--fix").returncode == 0
    assert copies.differences(tmp_path) == [] and not extra.exists()


LEAVES = {
    "with its output": "subprocess.Popen(['sleep', '600'])",
    "elsewhere": "subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL, start_new_session=True)",
}


@pytest.mark.parametrize("where", LEAVES)
def test_process_left(tmp_path: Path, where: str) -> None:
    """A run that ends well and leaves a process: an error that names it, and the end of that process."""
    run = runs.Run([sys.executable, "-c", f"import subprocess; {LEAVES[where]}; print('done')"], tmp_path)
    with pytest.raises(AssertionError, match=r"ended with 0, and 1 s later there were still \['sleep 600'\]:\ndone"):
        run.wait(leaves=1)
    assert run.pids() == []
