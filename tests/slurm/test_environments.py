"""Where PyTorch is a module of the site: what run.slurm says about it, with a stand-in for such a module."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, outputs
from harness.jobs import assert_completed, submit, two_processes
from harness.launchers import copy_example
from harness.runs import Reference
from lab import Lab

pytestmark = pytest.mark.slurm
SITE = "2.15.0+site"


def write_module(folder: Path) -> dict[str, str]:
    """Write what a site's module offers; return the variables with which a login shell makes `module` known to jobs.

    It is a Python, found by PATH, and another PyTorch, found by PYTHONPATH: the installed one under another version, so
    that no gigabytes have to be downloaded. Like a site's it comes with its own torchrun, which starts its own Python.
    """
    purelib = Path(sysconfig.get_path("purelib"))
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "bin" / "torchrun").write_text(f"#!{folder}/bin/python\nfrom torch.distributed.run import main\nmain()\n")
    (folder / "bin" / "torchrun").chmod(0o755)
    (folder / "site" / "torch").mkdir(parents=True)
    for file in (purelib / "torch").iterdir():
        (folder / "site" / "torch" / file.name).symlink_to(file)
    version = folder / "site" / "torch" / "version.py"
    text = version.read_text()
    version.unlink()
    version.write_text(f"{text}\n__version__ = {SITE!r}\n")
    paths = f"export PATH={folder}/bin:$PATH PYTHONPATH={folder}/site:{purelib}"
    return {"BASH_FUNC_module%%": f'() {{ [ "$*" = "load pytorch" ] && {paths}; }}'}


@pytest.mark.runs("weekly")
@pytest.mark.only("pytorch")
def test_site_module(
    example: str, source: Path, lab: Lab, two_process_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """`module load pytorch` and a venv on top of it: the module's PyTorch trains, in that venv's Python."""
    module = write_module(tmp_path / "module")
    folder = copy_example(source, tmp_path / example)
    make = "module load pytorch && python -m venv --system-site-packages --without-pip .venv"
    subprocess.run(["bash", "-ec", make], cwd=folder, env=os.environ | module, check=True, timeout=300)
    edits.edit(folder / "run.slurm", "# module load pytorch  ", "module load pytorch  ")
    note = "print('uses', torch.__version__, __import__('sys').prefix)\n"
    edits.edit(folder / "train.py", "\nimport torch\n", f"\nimport torch\n{note}")
    variables = {"VENV": ".venv", **module}
    job = submit(lab, example, folder, options=two_processes(source), **variables)
    assert_completed(job, 5, processes=2)
    used = [line for line in job.log.splitlines() if "uses" in line]
    assert len(used) >= 2 and all(f"uses {SITE} {folder}/.venv" in line for line in used), job.log
    outputs.assert_same_run(job.output, two_process_job().output)
