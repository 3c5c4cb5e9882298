"""What docs/scale-model.md cites and recommends: its study on two nodes, and the environment that sbcast brings."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness import edits, outputs, readme
from harness.jobs import assert_completed, submit, two_processes
from harness.launchers import ROOT, copy_example
from harness.processes import clean_environment
from lab import Lab, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.runs("weekly"),
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]


def measure(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the study in the repository."""
    command = [sys.executable, "-m", "studies.step_model_check", *words]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


def test_step_model_check(example: str, tmp_path: Path) -> None:
    """Each way moves as many bytes as the model says, no step is shorter than its computing, and the link is found."""
    from studies.step_model_check import COMPUTING, WEIGHTS, read

    done = measure("--rates", "50mbit", "--nodes", "1", "2", "--rounds", "1", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row.way, row.nodes): row for row in read(tmp_path / "step_model_check.csv")}
    assert set(rows) == {(way, nodes) for way in ("DDP", "FSDP", "local SGD") for nodes in (1, 2)}
    for (way, nodes), row in rows.items():
        passes = {"DDP": 2, "FSDP": 4, "local SGD": 2 / 8}[way]
        assert row.sent_mb == pytest.approx(passes * (nodes - 1) / nodes * 4 * WEIGHTS / 1e6, rel=0.1, abs=0.01)
        assert row.seconds > 0.8 * COMPUTING and row.scatter > 0
        assert 0 < row.latency < 1 and row.bandwidth < 50e6 / 8
    assert (tmp_path / "step_model_check.md").read_text().partition("\n\n")[2] in done.stdout


def test_archive_on_each_node(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The page's recipe: each node trains with the environment that sbcast brought to its own disk, and removes it.

    The environment is a venv that finds the tests' packages by a .pth file, so that no gigabytes are copied.
    """
    folder = copy_example(source, tmp_path / example)
    (diff,) = readme.fences(ROOT / "docs" / "scale-model.md", "diff")
    edits.apply_diff(folder / "run.slurm", diff)
    venv = tmp_path / "venv"
    base = Path(sys.executable).resolve()
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True, timeout=300)
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(["tar", "-C", venv, "-cf", folder / "venv.tar", "."], check=True, timeout=300)
    shutil.rmtree(venv)
    note = "print('uses', __import__('socket').gethostname(), __import__('sys').prefix)\n"
    edits.edit(folder / "train.py", "\nimport torch\n", f"\nimport torch\n{note}")
    job = submit(lab, example, folder, options=two_processes(source))
    assert_completed(job, 5, processes=2)
    used = {tuple(line.split()[-2:]) for line in job.log.splitlines() if "uses node" in line}
    assert used == {(node, f"/tmp/venv-{job.id}") for node in lab.nodes}, job.log
    for node in lab.nodes:
        left = lab.run(["sh", "-c", f"ls -d /tmp/venv-{job.id}*"], node=node)
        assert left.returncode != 0 and not left.stdout, left.stdout
    assert outputs.read_metrics(job.output)[-1]["test_accuracy"] > 0.9


def test_bad_input(example: str, tmp_path: Path) -> None:
    """Without one node, or a rate, nothing is measured, and one line says why."""
    for words, message in (
        (("--nodes", "2", "4"), "--nodes: must be 1, for a step without an exchange, and some that are more"),
        (("--rates", "fast", "--nodes", "1", "2"), "slow: fast: must be a rate such as 100mbit"),
    ):
        refused = measure(*words, "--output", tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("error:") == 1 and message in refused.stderr
    assert not list(tmp_path.iterdir())
