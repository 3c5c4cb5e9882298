"""Where PyTorch is a module of the site: what run.slurm and the pages say about it, with a stand-in for the module."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import edits, outputs, readme
from harness.jobs import Job, submit
from harness.launchers import copy_example
from harness.runs import Reference
from lab import Lab
from tests.slurm.small import assert_completed, two_processes

pytestmark = pytest.mark.slurm
SITE = "2.15.0+site"


def write_module(folder: Path) -> tuple[str, str]:
    """Write what a site's module offers; return what it puts before PATH, and before PYTHONPATH.

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
    return f"{folder}/bin", f"{folder}/site:{purelib}"


def prepare(source: Path, folder: Path, load: str, shell: dict[str, str]) -> Path:
    """Copy an example, make its environment on top of the module, and have train.py say which PyTorch it uses."""
    copy_example(source, folder)
    make = f"{load} && python -m venv --system-site-packages --without-pip .venv"
    subprocess.run(["bash", "-ec", make], cwd=folder, env=os.environ | shell, check=True, timeout=300)
    edits.edit(folder / "run.slurm", "# module load pytorch  ", f"{load}  ")
    note = "print('uses', torch.__version__, __import__('sys').prefix)\n"
    edits.edit(folder / "train.py", "\nimport torch\n", f"\nimport torch\n{note}")
    return folder


def assert_uses_module(job: Job, other: Path) -> None:
    """Check that a job has trained with the module's PyTorch in its own environment, to the bits of another job."""
    assert_completed(job, 5, processes=2)
    used = [line for line in job.log.splitlines() if "uses" in line]
    assert len(used) >= 2 and all(f"uses {SITE} {job.folder}/.venv" in line for line in used), job.log
    outputs.assert_same_run(job.output, other)


@pytest.mark.runs("full")
@pytest.mark.only("ddp_spawn", "lightning", "torchrun_multinode")  # run.slurm has the same line in the others
def test_site_module(
    example: str, source: Path, lab: Lab, two_process_job: Callable[[], Reference], tmp_path: Path
) -> None:
    """`module load pytorch` and a venv on top of it: the module's PyTorch trains, in that venv's Python."""
    programs, packages = write_module(tmp_path / "module")
    paths = f"export PATH={programs}:$PATH PYTHONPATH={packages}"
    shell = {"BASH_FUNC_module%%": f'() {{ [ "$*" = "load pytorch" ] && {paths}; }}'}
    folder = prepare(source, tmp_path / example, "module load pytorch", shell)
    job = submit(lab, example, folder, options=two_processes(source), VENV=".venv", **shell)
    assert_uses_module(job, two_process_job().output)


LMOD = Path("/usr/share/lmod/lmod/init/bash")


def write_tree(folder: Path, programs: str, packages: str) -> None:
    """Write the files of Lmod for three modules: a Python, a compiler, and a PyTorch that belongs to the compiler."""
    files = {
        "core/python/3.11.lua": f'prepend_path("PATH", "{programs}")',
        "core/gcc/13.lua": f'prepend_path("MODULEPATH", "{folder}/gcc")',
        "gcc/PyTorch/2.9.1.lua": f'load("python/3.11")\nprepend_path("PYTHONPATH", "{packages}")',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.mark.runs("full")
@pytest.mark.only("accelerate")
@pytest.mark.skipif(not LMOD.exists(), reason="needs Debian's package lmod")
def test_lmod(example: str, source: Path, lab: Lab, two_process_job: Callable[[], Reference], tmp_path: Path) -> None:
    """With a real Lmod: the page's commands say what the page says, and jobs load the modules.

    So they do with --export=NONE, where SLURM gives a job what the user's login shell has, and not what sbatch had.
    """
    programs, packages = write_module(tmp_path / "module")
    write_tree(tmp_path / "modules", programs, packages)
    core = str(tmp_path / "modules" / "core")
    shell = {"BASH_ENV": str(LMOD), "MODULEPATH": core, "LMOD_PAGER": "none"}

    def ask(command: str) -> str:
        words = ["bash", "-c", f"{command} 2>&1"]
        return subprocess.run(words, env=os.environ | shell, capture_output=True, text=True, timeout=300).stdout

    said = ask(readme.command("docs/on-your-cluster.md", "module avail python"))
    assert "python/3.11" in said and "PyTorch" not in said, said
    assert "PyTorch/2.9.1" in (said := ask(readme.command("docs/on-your-cluster.md", "module spider pytorch"))), said
    said = ask(readme.command("docs/on-your-cluster.md", "module spider PyTorch/2.9.1"))
    assert re.search(r"need to load all module.*\n\n +gcc/13", said), said
    assert ask(readme.command("docs/on-your-cluster.md", "module load python && python3 --version")).startswith(
        "Python 3.11"
    )
    assert "cannot be loaded" in ask("module load PyTorch") and not ask("module load gcc PyTorch")

    folder = prepare(source, tmp_path / example, "module load gcc PyTorch", shell)
    job = submit(lab, example, folder, options=two_processes(source), VENV=".venv", **shell)
    assert_uses_module(job, two_process_job().output)
    profile = Path(lab.home) / ".profile"
    profile.write_text(f"module use {core}\nexport ALLOW_CPU=1\n")  # the lab's GPUs are stand-ins
    try:
        alone = submit(lab, example, folder, options=(*two_processes(source), "--export=NONE"))
        assert_uses_module(alone, two_process_job().output)
    finally:
        profile.unlink()
