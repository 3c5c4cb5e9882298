"""The checks themselves: that each can fail, and that what the documents say is what runs."""

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import outputs, refusals, runs
from tests.harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from tests.harness.processes import clean_environment


def nox(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nox in a copy of the repository."""
    command = [sys.executable, "-m", "nox", "--non-interactive", *arguments]
    environment = clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120)


def test_sync(tmp_path: Path) -> None:
    """`nox -s sync` fails on a changed, a missing and an extra file, names them, and --fix mends them."""
    for name in ("common", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("output", "data", ".venv"))
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    assert nox(tmp_path, "-s", "sync").returncode == 0
    copy = tmp_path / "examples" / EXAMPLES[0] / "common"
    (copy / "models.py").write_text((copy / "models.py").read_text() + "\n")
    (copy / "digits.npz").unlink()
    (copy / "extra.py").touch()
    failed = nox(tmp_path, "-s", "sync")
    assert failed.returncode != 0
    assert all(f"{EXAMPLES[0]}/common/{name}" in failed.stderr for name in ("models.py", "digits.npz", "extra.py"))
    assert "data.py" not in failed.stderr and "nox -s sync -- --fix" in failed.stderr
    assert nox(tmp_path, "-s", "sync", "--", "--fix").returncode == 0
    assert nox(tmp_path, "-s", "sync").returncode == 0


def test_old_python(tmp_path: Path) -> None:
    """An older Python gets one line from nox."""
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    script = "import sys; sys.version_info = (3, 10, 13); import runpy; runpy.run_path('noxfile.py')"
    command = [sys.executable, "-c", script]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert refused.stderr.splitlines() == ["noxfile.py: error: the examples need Python 3.11 to 3.13: run nox with one"]


def test_train_names_the_examples() -> None:
    """`nox -s train` with an unknown name lists the known ones."""
    refused = nox(ROOT, "-s", "train", "--no-install", "--", "no_such_example")
    assert refused.returncode != 0
    assert all(name in refused.stderr for name in ("no_such_example", *EXAMPLES))


def test_documents() -> None:
    """Each example has a row in the tests' table and in the README; the README's commands name real sessions."""
    readme = (ROOT / "README.md").read_text()
    assert sorted(LAUNCHERS) == EXAMPLES
    assert all(f"](examples/{example})" in readme for example in EXAMPLES)
    sessions = nox(ROOT, "--list").stdout
    documents = readme + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"nox -s \"?(\w+)", documents))
    assert named and all(re.search(rf"^[*-] {name}\b", sessions, re.MULTILINE) for name in named), (named, sessions)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", documents) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


@pytest.mark.parametrize("name", EXAMPLES)
def test_run_slurm_header(name: str) -> None:
    """run.slurm has no line that sbatch would ignore, and no value that stands for another place."""
    lines = (ROOT / "examples" / name / "run.slurm").read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and 40 <= len(lines) <= 110
    rulers = [line.split()[2] for line in lines if line.startswith("# ---- ")]
    assert rulers == ["1", "2", "3"]
    assert not [line for line in lines if re.match(r"#+\s+SBATCH|\s+#SBATCH", line)]
    options = {line.split()[1].split("=")[0] for line in lines if line.startswith("#SBATCH ")}
    assert options >= {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--requeue", "--signal", "--output"}
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]


SAME_IN_ALL = [
    r"^job=.*?(?=^checkpoint=)",
    r"^requeue\(\) {.*?^}\nwait_for\(\) {.*?^}\n",
    r"^step=.*?(?=^\[\[)",
    r"^exit .*",
]


@pytest.mark.parametrize("part", SAME_IN_ALL)
def test_one_requeue_block(part: str) -> None:
    """The parts of run.slurm that decide on a requeue and on the job's status are the same text in every example."""
    scripts = [(ROOT / "examples" / name / "run.slurm").read_text() for name in EXAMPLES]
    found = [re.findall(part, script, re.MULTILINE | re.DOTALL) for script in scripts]
    assert all(len(texts) == 1 for texts in found) and len({texts[0] for texts in found}) == 1, found


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
    refusals.assert_refused(runs.Run([sys.executable, "-c", good], tmp_path).wait(30), 2, "do y")
    raised = good.replace("sys.exit(2)", "print('Traceback', file=sys.stderr); sys.exit(2)")
    twice = good.replace("sys.exit(2)", "print('train.py: error: z', file=sys.stderr); sys.exit(2)")
    for bad in (raised, twice, good.replace("exit(2)", "exit(0)"), "import sys; sys.exit(2)"):
        with pytest.raises(AssertionError):
            refusals.assert_refused(runs.Run([sys.executable, "-c", bad], tmp_path).wait(30), 2, "do y")
    for file, theirs in (("launcher/api.py", True), ("/x/train.py", False), ("train.py", False)):
        report = f"print('Traceback', 'File {chr(34)}{file}{chr(34)}', file=sys.stderr); sys.exit(1)"
        run = runs.Run([sys.executable, "-c", good.replace("sys.exit(2)", report)], tmp_path).wait(30)
        with contextlib.nullcontext() if theirs else pytest.raises(AssertionError):
            refusals.assert_refused(run, 1, "do y")


def test_kill_finds_every_process(tmp_path: Path) -> None:
    """A grandchild in a session of its own, whose parent is gone, is found and ended; a hang is an error."""
    child = "import os, time; os.setsid(); print('ready', flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    run = runs.Run([sys.executable, "-c", parent], tmp_path)
    run.read_until("ready")
    run.process.wait(30)
    assert len(run.pids()) == 1
    with pytest.raises(AssertionError, match="hung for 0.5 s"):
        run.wait(0.5)
    assert run.pids() == []
