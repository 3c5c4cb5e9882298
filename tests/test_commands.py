"""Every command in the bash blocks of a README or of docs/ names a test that runs it, or its comment what it needs.

What is held here: each command is in the table, and the test that it names exists. That this test runs the command, be
it with fewer epochs or a name for the lab, is for its reader to see: whoever changes a command has to look there.
"""

import re
from pathlib import Path

import pytest

from harness import readme
from harness.launchers import HOROVOD, LAUNCHERS, MINIMAL, ROOT, copy_example

NEEDS = re.compile(r"# needs (the internet|a cluster|a GPU)\b")
LAB, HOROVOD_JOBS = "repo/test_lab.py::", "slurm/test_horovod_cpu_jobs.py::"
PREFLIGHT, MODEL = "repo/test_preflight.py::test_", "repo/test_step_model.py::test_"
LARGE = "test_large_data.py::test_"
PINS, MINIMAL_PY = "repo/test_pins.py::test_command", "test_minimal.py::test_same_bits_as_train"
NOTEBOOKS, ADDING = "slurm/test_jupyter.py::", "repo/test_adding_an_example.py::test_added"
DEBUGGING = "slurm/test_debugging.py::test_"
APT = "sudo apt-get install --no-install-recommends slurm-wlm munge iproute2 openmpi-bin libpmix-dev"
RUN_BY = {  # document: command: the test that runs it, or the file that does
    "README.md": {
        'python3 -m venv .venv && .venv/bin/pip install -q "nox[uv]" && .venv/bin/nox -s train': "../.ci/run",
        'python3 -m venv .venv && .venv/bin/pip install -q "nox[uv]" && .venv/bin/nox -s smoke': "../.ci/run",
        "cp -r examples/ddp_spawn ~/project": "test_commands.py::test_copy_one_out",
        "cd ~/project": "test_commands.py::test_copy_one_out",
        "python3 -m venv .venv && source .venv/bin/activate && pip install -r requirements.txt": (
            "test_commands.py::test_copy_one_out"
        ),
        "python train.py --processes 2": "../harness/reference.py::reference",
        "python train.py --dataset fashion_mnist --data-dir data": "test_data_files.py::test_trains_on_idx_files",
        "cd preflight && VENV=~/project/.venv sbatch run.slurm": PREFLIGHT + "healthy",
        "VENV=~/project/.venv sbatch run.slurm": NOTEBOOKS + "test_only_for_its_owner",
        "sudo python3 -m lab up --nodes 2": LAB + "test_from_nothing_to_a_job",
        "sudo python3 -m lab run --chdir examples/ddp_spawn -- sbatch run.slurm": LAB + "test_from_nothing_to_a_job",
        "sudo python3 -m lab down": LAB + "test_from_nothing_to_a_job",
    },
    "docs/environments.md": {
        "python3 -m venv .venv": "test_environments.py::test_without_internet",
        ".venv/bin/pip install --no-index --find-links wheels --requirement requirements.txt": (
            "test_environments.py::test_without_internet"
        ),
        "source .venv/bin/activate && bash install.sh wheels/horovod-0.28.1.tar.gz": (
            "test_environments.py::test_without_internet"
        ),
    },
    "docs/out-of-memory.md": {
        "python -m benchmarks.largest_batch ddp_spawn --limit 1200": "test_largest_batch.py::test_on_the_cpu",
    },
    "docs/scale.md": {
        "python -m studies.step_model": MODEL + "page",
        "python -m studies.step_model --parts 7B --nodes 1 64 1000": MODEL + "page",
        "python -m studies.step_model --cluster ethernet --nodes 1 2 8 64 1000": MODEL + "page",
        "python -m studies.step_model --published": MODEL + "page",
        "torchrun --nproc-per-node=2 -m studies.step_model --measure here.json": MODEL + "own_figures",
        "python -m studies.step_model --cluster here.json": MODEL + "own_figures",
    },
    "docs/horovod.md": {
        "HOROVOD_TIMELINE=timeline.json "
        "horovodrun --gloo -np 2 python train.py --epochs 1 --output-dir output/timeline": (
            "test_horovod_switches.py::test_timeline"
        ),
        "viewer/bin/tensorboard --logdir output/profile": "test_horovod_tensorflow.py::test_profile_in_tensorboard",
    },
    "docs/sweeps.md": {
        "cd sweep": "slurm/test_sweep.py::test_eight_trials",
        "VENV=../examples/torchrun_multinode/.venv sbatch --array=1-2 sweep.slurm torchrun_multinode "
        "--vary lr=log:1e-4:1 --vary batch-size=32,64 --trials 8 --startup 3 --warmup 1 -- --epochs 3": (
            "slurm/test_sweep.py::test_eight_trials"
        ),
        "../examples/torchrun_multinode/.venv/bin/python sweep.py show output/torchrun_multinode": (
            "slurm/test_sweep.py::test_eight_trials"
        ),
    },
    "docs/using-the-model.md": {
        "python hugging_face.py export --output-dir output --folder gpt": "test_fsdp.py::test_hugging_face",
        "python hugging_face.py import --output-dir imported --folder gpt": "test_fsdp.py::test_hugging_face",
        "torchrun --standalone --nproc-per-node=2 predict.py --images images/val": "test_predict.py::test_predictions",
    },
    "docs/debugging.md": {
        "cp jupyter/owner_only.py ~/project": DEBUGGING + "debugger",
        "cd ~/project": DEBUGGING + "debugger",
        "SCRIPT=owner_only.py sbatch run.slurm --epochs 1 --timeout 3600": DEBUGGING + "debugger",
        "srun --cpus-per-task=2 --time=02:00:00 .venv/bin/python owner_only.py tensorboard --logdir output": (
            DEBUGGING + "tensorboard"
        ),
    },
    "docs/large-data.md": {
        "python write_tokens.py model text.txt tokens.bin": LARGE + "mapped_tokens",
        "torchrun --standalone --nproc-per-node=2 train.py --text-file tokens.bin": LARGE + "mapped_tokens",
        "mkdir tars": LARGE + "several_tars",
        "for class in $(ls images/train); do tar -cf tars/$class.tar images/train/$class images/val/$class; done": LARGE
        + "several_tars",
        "torchrun --standalone --nproc-per-node=2 train.py --data-dir tars": LARGE + "order_of_several_tars",
    },
    "preflight/README.md": {
        "VENV=~/project/.venv sbatch run.slurm": PREFLIGHT + "healthy",
        "VENV=~/project/.venv sbatch run.slurm --pattern per-process": PREFLIGHT + "per_process",
        "IMAGE=~/project/example.sif sbatch run.slurm": PREFLIGHT + "image",
    },
    "jupyter/README.md": {
        "VENV=../examples/ddp_spawn/.venv sbatch run.slurm": NOTEBOOKS + "test_only_for_its_owner",
        "cat jupyter-*.out": NOTEBOOKS + "test_only_for_its_owner",
        "apptainer exec example.sif python3 -m venv --system-site-packages .venv": (
            "slurm/test_containers.py::test_notebook"
        ),
        "IMAGE=example.sif sbatch run.slurm": "slurm/test_containers.py::test_notebook",
    },
    "runs/README.md": {
        "python usage.py ~/project/output/1234": "test_results.py::test_what_a_run_has_used",
        "python REPOSITORY/runs/export.py output --to tensorboard --store output/tensorboard": (
            "test_export.py::test_tensorboard"
        ),
        "python REPOSITORY/runs/export.py output --to mlflow --store output/mlflow": (
            "test_export.py::test_mlflow_and_wandb"
        ),
        "python REPOSITORY/runs/export.py output --to wandb --store output/wandb": (
            "test_export.py::test_mlflow_and_wandb"
        ),
    },
    "CONTRIBUTING.md": {
        'python3 -m venv .venv && .venv/bin/pip install -q "nox[uv]" && .venv/bin/nox -s smoke': "../.ci/run",
        "cp -r examples/torchrun_multinode examples/NAME": ADDING,
        "sed -i 's/torchrun_multinode/NAME/' examples/NAME/run.slurm examples/NAME/README.md": ADDING,
        "nox -s sync": ADDING,
        "ruff check .": ADDING,
        'pytest -m "repo and not weekly" tests/test_commands.py tests/repo/test_{repository,form,pictures}.py': ADDING,
    },
    "docs/dev/pins.md": {
        "uv pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate "
        '--no-emit-package setuptools --no-emit-package wheel --custom-compile-command "see docs/dev/pins.md" '
        "--output-file tests/constraints.txt examples/*/requirements.txt tests/requirements*.txt "
        "benchmarks/requirements-peers.txt": PINS,
    },
    "examples/deepspeed/README.md": {
        "deepspeed --num_gpus 2 --master_port 29501 train.py --deepspeed --deepspeed_config ds_config.json "
        "--output-dir output/own": "test_deepspeed.py::test_stage_1_and_its_own_launcher",
        "sbatch run.slurm --zero-stage 3": "slurm/test_deepspeed_jobs.py::test_stage_3_on_two_nodes",
    },
    "examples/fsdp/README.md": {"python sample.py": "test_fsdp.py::test_metrics_and_sample"},
    "examples/horovod_cpu/README.md": {
        "NP=4 OMP_NUM_THREADS=2 bash more/mpirun_local.sh more/train_lm.py": (
            "test_horovod_cpu.py::test_mpirun_with_four_processes"
        ),
        'SCRIPT=more/train_lm.py sbatch run.slurm --text-file "$PWD/book.txt"': (
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
    """Each Debian package that .ci/run installs is in an apt-get command of a README: else newcomers would lack it."""
    text = "".join((ROOT / name / "README.md").read_text() for name in ("", "lab/"))
    named = " ".join(re.findall(r"apt-get install ([^`\n]+)", text)).split()
    assert packages() and not set(packages()).difference(named)


def run_by(file: str) -> dict[str, str]:
    """Return what runs each command of a document."""
    table = dict(RUN_BY.get(file, {}))
    if file == "lab/README.md":
        first, *others = readme.blocks(ROOT / file)
        table = {command: LAB + "test_readme" for block in others for command in block}
        table |= dict.fromkeys(first, LAB + "test_from_nothing_to_a_job") | {APT: "../.ci/run"}
    if file.startswith("examples/"):
        local = " ".join(LAUNCHERS[Path(file).parent.name].command(2))
        table |= dict.fromkeys(readme.until(ROOT / file, local), "../harness/reference.py::reference")
        if Path(file).parent.name in HOROVOD:
            table["LAUNCH=gloo sbatch run.slurm"] = "slurm/test_jobs.py::test_gloo_instead_of_mpi"
        if not any(command.startswith("sbatch") for command in table):
            table["sbatch run.slurm"] = "slurm/conftest.py::reference_job"
        commands = [command for block in readme.blocks(ROOT / file) for command in block]
        table |= {command: MINIMAL_PY for command in commands if command.endswith(" minimal.py")}
        if Path(file).parent.name in MINIMAL:
            table["sbatch minimal.slurm"] = "slurm/test_minimal_jobs.py::test_minimal_job"
    return table


@pytest.mark.parametrize("file", [str(path.relative_to(ROOT)) for path in readme.DOCUMENTS])
def test_every_command(file: str) -> None:
    """Each command has a test that exists, or a mark; and what is in the table is in the document."""
    commands = {command: comment for block in readme.blocks(ROOT / file) for command, comment in block.items()}
    tests = run_by(file)
    assert set(tests) == {command for command, comment in commands.items() if not NEEDS.search(f"# {comment}")}
    for command, test in tests.items():
        path, _, name = test.partition("::")
        if name:
            text = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^ *def {name}\(", text, re.MULTILINE), f"{command}: no {test}"
            assert "sbatch" not in command or path.startswith(("slurm/", "repo/")), f"{command}: {test} submits nothing"
        elif command == APT:
            assert set(command.split()[4:]) <= set(packages())
        else:
            text = (ROOT / "tests" / path).read_text()
            assert re.search(re.search("grep -E -- '(.*)' README.md", text)[1], command)
    languages = re.findall(r"^```(.+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert set(languages) <= {"bash", "python", "diff", "mermaid"}, "a fence whose commands are not looked at"


@pytest.mark.parametrize(
    ("file", "command"),
    [("README.md", "cd ~/project"), ("examples/deepspeed/README.md", "sbatch run.slurm --zero-stage 3")],
)
def test_a_command_without_a_test(file: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that the table lacks, and one whose test does not exist, are each noticed."""
    assert {ROOT / file, *(ROOT / "docs").glob("*.md")} <= set(readme.DOCUMENTS)
    table = RUN_BY[file]
    gone = {name: test for name, test in table.items() if name != command}
    for changed in ({**table, command: "test_commands.py::test_gone"}, gone):
        monkeypatch.setitem(RUN_BY, file, changed)
        with pytest.raises(AssertionError):
            test_every_command(file)


@pytest.mark.only("ddp_spawn")
def test_copy_one_out(example: str, tmp_path: Path) -> None:
    """The README's block: what its last command needs is in a folder copied out of a clone of the repository.

    That command is the same as in ddp_spawn's README, so that it is the reference run, which trains in such a copy.
    """
    *commands, last = readme.until(ROOT / "README.md", "python train.py --processes 2")
    assert last in readme.until(ROOT / "examples" / example / "README.md", " ".join(LAUNCHERS[example].command(2)))
    clone = tmp_path / "clone"
    copy_example(ROOT / "examples" / example, clone / "examples" / example)
    run = readme.run_block([*commands, f"{last} --help"], clone, HOME=str(tmp_path))
    assert run.stdout.startswith("usage: train.py") and (tmp_path / "project" / "train.py").exists()
