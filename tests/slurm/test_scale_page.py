"""What docs/scale-model.md recommends: the environment that sbcast brings."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness import edits, outputs, readme
from harness.jobs import assert_completed, submit, two_processes
from harness.launchers import ROOT, copy_example
from lab import Lab, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.runs("weekly"),
    pytest.mark.only("torchrun_multinode"),
    pytest.mark.skipif(bool(why_not()), reason=str(why_not())),
]


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
