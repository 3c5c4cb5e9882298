"""Every command in a README's bash blocks is run by a test, or says in its comment what it needs.

Word for word, but for more arguments: a name for the lab, fewer epochs, fewer processes in a job.
"""

import re
from pathlib import Path

import pytest

from tests.harness import outputs, readme
from tests.harness.launchers import LAUNCHERS, ROOT, copy_example

NEEDS = re.compile(r"# needs (the internet|a cluster|a GPU)\b")
LAB, HOROVOD_JOBS = "slurm/test_lab.py::", "slurm/test_horovod_cpu_jobs.py::"
NOTEBOOKS = "slurm/test_jupyter.py::"
APT = "sudo apt-get install --no-install-recommends slurm-wlm munge iproute2 openmpi-bin libpmix-dev"
RUN_BY = {  # README: command: the test that runs it, or the file that does
    "README.md": {
        'python3 -m venv .venv && .venv/bin/pip install -q "nox[uv]" && .venv/bin/nox -s train': "../.ci/run",
        'python3 -m venv .venv && .venv/bin/pip install -q "nox[uv]" && .venv/bin/nox -s smoke': "../.ci/run",
        "cp -r examples/ddp_spawn ~/project": "test_commands.py::test_copy_one_out",
        "cd ~/project": "test_commands.py::test_copy_one_out",
        "python3 -m venv .venv && source .venv/bin/activate && pip install -r requirements.txt": (
            "test_commands.py::test_copy_one_out"
        ),
        "python train.py --processes 2": "test_commands.py::test_copy_one_out",
        "python3 -m venv .venv": "test_environments.py::test_without_internet",
        ".venv/bin/pip install --no-index --find-links wheels --requirement requirements.txt": (
            "test_environments.py::test_without_internet"
        ),
        "python train.py --dataset fashion_mnist --data-dir data": "test_data_files.py::test_trains_on_idx_files",
        "cd preflight && VENV=~/project/.venv sbatch run.slurm": "slurm/test_preflight.py::test_healthy",
        "cd jupyter && VENV=../examples/ddp_spawn/.venv sbatch run.slurm": NOTEBOOKS + "test_only_for_its_owner",
        "python3 -m venv examples/ddp_spawn/.venv": LAB + "test_readme_of_the_repository",
        "examples/ddp_spawn/.venv/bin/pip install -r examples/ddp_spawn/requirements.txt": (
            LAB + "test_readme_of_the_repository"
        ),
        "sudo python3 -m lab up --nodes 2": LAB + "test_readme_of_the_repository",
        "sudo python3 -m lab run --chdir examples/ddp_spawn -- sbatch run.slurm": LAB + "test_readme_of_the_repository",
        "sudo python3 -m lab down": LAB + "test_readme_of_the_repository",
    },
    "preflight/README.md": {
        "VENV=~/project/.venv sbatch run.slurm": "slurm/test_preflight.py::test_healthy",
        "VENV=~/project/.venv sbatch run.slurm --pattern per-process": (
            "slurm/test_preflight.py::test_per_process_without_internet"
        ),
        "IMAGE=~/project/example.sif sbatch run.slurm": "slurm/test_preflight.py::test_image",
    },
    "jupyter/README.md": {
        "VENV=../examples/ddp_spawn/.venv sbatch run.slurm": NOTEBOOKS + "test_only_for_its_owner",
        "cat jupyter-*.out": NOTEBOOKS + "test_only_for_its_owner",
        "apptainer exec example.sif python3 -m venv --system-site-packages .venv": (
            "slurm/test_containers.py::test_notebook"
        ),
        "IMAGE=example.sif sbatch run.slurm": "slurm/test_containers.py::test_notebook",
    },
    "examples/ddp_spawn/README.md": {
        "python train.py --dataset fashion_mnist --data-dir data": "test_data_files.py::test_trains_on_idx_files",
    },
    "examples/deepspeed/README.md": {
        "deepspeed --num_gpus 2 --master_port 29501 train.py --output-dir output/own": (
            "test_deepspeed.py::test_stage_1_and_its_own_launcher"
        ),
        "sbatch run.slurm --zero-stage 3": "slurm/test_deepspeed_jobs.py::test_stage_3_on_two_nodes",
    },
    "examples/fsdp/README.md": {"python sample.py": "test_fsdp.py::test_metrics_and_sample"},
    "examples/horovod_cpu/README.md": {
        "NP=4 OMP_NUM_THREADS=2 bash mpirun_local.sh train_lm.py": (
            "test_horovod_cpu.py::test_mpirun_with_four_processes"
        ),
        'SCRIPT=train_lm.py sbatch run.slurm --text-file "$PWD/book.txt"': (
            HOROVOD_JOBS + "test_language_model_and_staged_images"
        ),
        "STAGE=1 DATA_DIR=data sbatch run.slurm --dataset mnist": (
            HOROVOD_JOBS + "test_language_model_and_staged_images"
        ),
        "salloc --nodes=2 --ntasks-per-node=2 --cpus-per-task=2": HOROVOD_JOBS + "test_in_an_allocation",
        "SLURM_PMIX_FENCE=ring srun --mpi=pmix --cpus-per-task=2 python train.py --epochs 2": HOROVOD_JOBS
        + "test_in_an_allocation",
    },
}


def packages() -> list[str]:
    """Return the Debian packages that .ci/run installs."""
    lists = re.findall(r"packages\+?=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    return " ".join(lists).split()


def test_packages_are_named() -> None:
    """The READMEs name every Debian package that .ci/run installs: else a newcomer's machine would lack it."""
    named = {word for name in ("", "lab/") for word in re.findall(r"[\w+.-]+", (ROOT / name / "README.md").read_text())}
    assert packages() and not set(packages()) - named


def run_by(file: str) -> dict[str, str]:
    """Return what runs each command of a README."""
    table = dict(RUN_BY.get(file, {}))
    if file == "lab/README.md":
        table = {command: LAB + "test_readme" for block in readme.blocks(ROOT / file)[1:] for command in block}
    if file in ("README.md", "lab/README.md"):
        table[APT] = "../.ci/run"
    if file.startswith("examples/"):
        local = " ".join(LAUNCHERS[Path(file).parent.name].command(2))
        table |= dict.fromkeys(readme.until(ROOT / file, local), "conftest.py::reference")
        if not any(command.startswith("sbatch") for command in table):
            table["sbatch run.slurm"] = "slurm/conftest.py::reference_job"
    return table


@pytest.mark.parametrize("file", [str(path.relative_to(ROOT)) for path in readme.DOCUMENTS])
def test_every_command(file: str) -> None:
    """Each command has a test, which exists, or a mark; and what is in the table is in the README."""
    commands = {command: comment for block in readme.blocks(ROOT / file) for command, comment in block.items()}
    tests = run_by(file)
    assert set(tests) == {command for command, comment in commands.items() if not NEEDS.search(f"# {comment}")}
    for command, test in tests.items():
        path, _, name = test.partition("::")
        text = (ROOT / "tests" / path).read_text()
        if name:
            assert f"def {name}(" in text, command
        elif command == APT:
            assert set(command.split()[4:]) <= set(packages())
        else:
            assert re.search(re.search("grep -E -- '(.*)' README.md", text)[1], command)
    languages = re.findall(r"^```(.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert set(languages) <= {"bash", "python", "diff"}, "a fence in another language, whose commands are not looked at"


def test_a_command_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that the table lacks, and one whose test does not exist, are each noticed."""
    table = RUN_BY["README.md"]
    for changed in ({**table, "cd ~/project": "test_commands.py::test_gone"}, {"cd ~/project": table["cd ~/project"]}):
        monkeypatch.setitem(RUN_BY, "README.md", changed)
        with pytest.raises(AssertionError):
            test_every_command("README.md")


@pytest.mark.only("ddp_spawn")
def test_copy_one_out(example: str, tmp_path: Path) -> None:
    """The README's block: a folder copied out of a clone of the repository trains."""
    clone = tmp_path / "clone"
    copy_example(ROOT / "examples" / example, clone / "examples" / example)
    run = readme.run_block(readme.until(ROOT / "README.md", "python train.py --processes 2"), clone, HOME=str(tmp_path))
    assert "finished: test acc" in run.stdout
    assert outputs.read_metrics(tmp_path / "project" / "output")[-1]["world_size"] == 2
    assert not (clone / "examples" / example / "output").exists()
