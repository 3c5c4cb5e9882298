"""What only horovod_cpu promises: the same bits as ddp_spawn, its own arguments, train_lm.py, install.sh."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness import edits, outputs, readme, runs
from harness.launchers import LAUNCHERS, MPI_AS_ROOT
from harness.processes import wait_until
from harness.runs import Reference

pytestmark = pytest.mark.only("horovod_cpu")

DEVANAGARI = "धर्मक्षेत्रे कुरुक्षेत्रे समवेता युयुत्सवः।\nमामकाः पाण्डवाश्चैव किमकुर्वत सञ्जय॥\n"


def lm(folder: Path, processes: int, arguments: str, **environment: str) -> runs.Run:
    """Start train_lm.py with horovodrun."""
    command = f"horovodrun --gloo -np {processes} python more/train_lm.py {arguments}"
    return runs.Run(command.split(), folder, environment)


def test_without_a_launcher(example: str, folder: Path) -> None:
    """`python train.py` trains as one process on all cores, over Gloo and no network."""
    run = runs.Run(["python", "train.py", "--epochs", "1"], folder).wait()
    assert run.status == 0, run.stderr
    threads = len(os.sched_getaffinity(0))
    assert f"1 processes on 1 node, gloo on cpu, {threads} thread" in run.stdout
    assert outputs.read_metrics(folder / "output")[0]["world_size"] == 1


@pytest.mark.runs("weekly")
def test_optimizer_without_state(example: str, folder: Path) -> None:
    """SGD without momentum has no state to send: a resumed run takes no step more than an uninterrupted one."""
    adam, sgd = "AdamW(model.parameters(), args.lr)", "SGD(model.parameters(), 0.05, weight_decay=0.1)"
    edits.edit(folder / "train.py", adam, sgd)
    words = ["--output-dir", "output/two", "--lr", 0.05]
    runs.train(example, folder, 2, "--epochs", 2, "--lr", 0.05, "--output-dir", "output/whole")
    runs.train(example, folder, 2, "--epochs", 1, *words)
    runs.train(example, folder, 2, "--epochs", 2, *words, "--resume")
    outputs.assert_same_run(folder / "output" / "two", folder / "output" / "whole")


@pytest.mark.runs("weekly")
@pytest.mark.parametrize(("processes", "batch_size", "batches"), [(3, 50, 1), (2, 7, 3)])
def test_sizes_that_do_not_divide(example: str, folder: Path, processes: int, batch_size: int, batches: int) -> None:
    """All ranks take the same number of steps, and no rank waits for another at the end of an epoch."""
    arguments = f"--epochs 2 --batch-size {batch_size} --gradient-accumulation-steps {batches} --timeout 60"
    runs.train(example, folder, processes, *arguments.split())
    steps = 1438 // processes // (batch_size * batches)
    for row in outputs.read_metrics(folder / "output"):
        assert round(row["samples_per_second"] * row["seconds"]) == processes * steps * batch_size * batches


@pytest.mark.runs("weekly")  # torchrun_multinode has an ordinary one
def test_gradient_accumulation(example: str, folder: Path) -> None:
    """Two batches of 16 that make one step are one batch of 32, exactly (fp64)."""
    for output, arguments in (
        ("one", "--batch-size 32"),
        ("two", "--batch-size 16 --batches-per-allreduce 2"),
    ):  # Horovod's name of it
        runs.train(example, folder, 2, *f"--epochs 1 --precision fp64 --output-dir {output} {arguments}".split())
    assert outputs.largest_difference(outputs.read_model(folder / "one"), outputs.read_model(folder / "two")) < 1e-9


@pytest.mark.runs("weekly")
def test_fp16_allreduce(example: str, folder: Path, reference: Reference) -> None:
    """Gradients sent as 16-bit numbers train as well; the weights stay fp32, and a resume needs the same flag."""
    runs.train(example, folder, 2, "--fp16-allreduce")
    assert outputs.read_metrics(folder / "output")[-1]["test_accuracy"] > 0.95
    assert outputs.largest_difference(outputs.read_model(folder / "output"), outputs.read_model(reference.output)) > 0
    run = runs.start(example, folder, 2, "--resume").wait()
    assert run.status != 0 and "fp16_allreduce True" in run.stderr


def test_lm_learning_rate(example: str, folder: Path) -> None:
    """train_lm.py scales and warms up, too; a step is what makes the gradients of several batches one."""
    edits.note_rates(folder, LAUNCHERS[example])
    (folder / "text").write_text("abc " * 500)
    arguments = "--text-file text --context 16 --batch-size 4 --gradient-accumulation-steps 2 --epochs 2 --lr 0.001"
    run = lm(folder, 2, f"{arguments} --scale-lr linear --warmup-steps 9").wait()
    assert run.status == 0, run.stderr
    rates = edits.noted_rates(folder)
    assert len(rates) == 2 * 7  # 112 windows of 16 tokens, 2 processes, 8 samples a step
    assert rates == [0.002 * min(1, (step + 1) / 10) for step in range(14)]


@pytest.mark.runs("weekly")
def test_threads(example: str, folder: Path) -> None:
    """The processes share the cores of the machine; the user's OMP_NUM_THREADS is kept."""
    cores = len(os.sched_getaffinity(0))
    for variables, threads in (({}, max(1, cores // 2)), ({"OMP_NUM_THREADS": "3"}, 3)):
        run = runs.start(example, folder, 2, "--output-dir", f"output/{threads}", **variables)
        assert f" {threads} thread" in run.read_until("ConvNet on digits")
        run.end()


@pytest.mark.runs("weekly")
def test_lm_reaches_the_floor(example: str, folder: Path) -> None:
    """The default run ends within 5 % of the source's entropy, in under two minutes on two cores."""
    run = lm(folder, 2, "").wait()
    assert run.status == 0, run.stderr
    output = folder / "output" / "lm"
    loss, floor = outputs.read_metrics(output)[-1]["test_loss"], outputs.read_run(output)["settings"]["entropy"]
    assert 0.99 * floor < loss < 1.05 * floor
    line = f"test loss {loss:.4f} (floor {floor:.4f}) | perplexity {math.exp(loss):.2f} per byte"
    assert re.search(re.escape(line) + r" \| +\d+ tokens/s \|", run.stdout) and "sample: " in run.stdout


@pytest.mark.runs("weekly")
def test_lm_on_devanagari(example: str, folder: Path) -> None:
    """A text of three bytes a letter: it trains, is killed, resumes to the same bits, and prints a line."""
    (folder / "gita.txt").write_text(DEVANAGARI * 100, encoding="utf-8")
    arguments = "--text-file gita.txt --context 32 --epochs 3 --output-dir"
    whole = lm(folder, 2, f"{arguments} whole").wait()
    assert whole.status == 0, whole.stderr
    run = lm(folder, 2, f"{arguments} resumed")
    run.read_epoch(1)
    run.kill()
    run.wait()
    resumed = lm(folder, 2, f"{arguments} resumed --resume").wait()
    assert resumed.status == 0 and "continuing after epoch" in resumed.stdout, resumed.stderr
    outputs.assert_same_run(folder / "resumed", folder / "whole")
    samples = [re.search("^sample: (.+)$", run.stdout, re.MULTILINE) for run in (whole, resumed)]
    assert all(samples) and samples[0][1] == samples[1][1]
    assert re.search("[\u0900-\u097f]", samples[0][1]), samples[0][1]


BAD = {
    "--text-file none.txt": ["none.txt", "No such file"],
    "--text-file empty.txt": ["empty.txt", "empty"],
    "--text-file short.txt": ["longer text"],
    "--text-file train.py --batch-size 4000": ["4000"],
    "--context 0": ["--context", "1 or more"],
}


def test_lm_bad_input(example: str, folder: Path) -> None:
    """Bad input ends with one clear line. One process imports torch and forks for each, which takes no time."""
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("short")
    (folder / "each.py").write_text(
        "import os, sys\n"
        "from more import train_lm\n"
        f"for words in {list(BAD)}:\n"
        "    if child := os.fork():\n"
        "        print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "    else:\n"
        "        sys.argv = ['train_lm.py', *words.split()]\n"
        "        train_lm.main(train_lm.parse_args())\n"
        "        os._exit(0)\n"
    )
    run = runs.Run(["python", "-u", "each.py"], folder).wait()
    assert run.stdout == "status 2\n" * len(BAD) and "Traceback" not in run.stderr, run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("train_lm.py: error: ")]
    for line, texts in zip(lines, BAD.values(), strict=True):
        assert all(text in line for text in texts), lines


# In the environment of a test that installs: Python says that its headers are where there are none.
NO_HEADERS = """
import sysconfig
real = sysconfig.get_path
sysconfig.get_path = lambda name, *more, **others: "/none" if name == "include" else real(name, *more, **others)
"""
TOOLS = "bash sh env cat basename grep head tr mkdir mktemp mv cp rm sed tail tar gzip nproc uname"


@pytest.mark.parametrize(
    ("missing", "texts"),
    [
        ("torch", ["torch", "pip install -r requirements.txt"]),
        ("c++", ["no C++ compiler", "g++"]),
        ("cmake", ["no cmake", "apt-get install cmake"]),
        ("make", ["no make", "apt-get install make"]),
        ("Python.h", ["no Python.h", f"apt-get install python3.{sys.version_info[1]}-dev", "conda"]),
        ("network", ["download failed", "login node"]),
    ],
)
def test_install_errors(example: str, folder: Path, tmp_path: Path, missing: str, texts: list[str]) -> None:
    """install.sh says in one line what is missing and what to install, and leaves no wheel behind."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = shutil.which("python")
    (programs / "python").write_text(f'#!/bin/sh\nexec {python} {"-S" * (missing == "torch")} "$@"\n')
    (programs / "python").chmod(0o755)
    for name in [*TOOLS.split(), *{"c++", "cmake", "make", "uv"} - {missing}]:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    (programs / "sitecustomize.py").write_text(NO_HEADERS * (missing == "Python.h"))
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    nowhere |= {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    variables = {"PATH": str(programs), "PYTHONPATH": str(programs)} | nowhere
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = runs.Run(["bash", "install.sh"], folder, variables).wait()
    errors = [line for line in run.stderr.splitlines() if line.startswith("install.sh: error: ")]
    assert run.status == 1 and len(errors) == 1, run.stderr
    assert all(text in errors[0] for text in texts), errors
    assert not list(tmp_path.glob("cache/**/*.whl"))
    assert ("building" in run.stdout) == (missing == "network"), "it has begun before it looked for all that it needs"


def test_install_from_a_wrong_file(example: str, folder: Path, tmp_path: Path) -> None:
    """A file that is not there, another one, and a source without what builds it: one line each, and no wheel."""
    (folder / "horovod-0.27.0.tar.gz").touch()
    (folder / "horovod-0.28.1.tar.gz").touch()
    texts = {
        "none.whl": ["there is no none.whl"],
        "horovod-0.27.0.tar.gz": ["horovod-0.27.0.tar.gz is neither Horovod's source, horovod-0.28.1.tar.gz, nor"],
        "horovod-0.28.1.tar.gz": [f"{folder} does not have all", "pip download --no-deps", "horovod==0.28.1"],
    }
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_FIND_LINKS": ""}
    for file, words in texts.items():
        run = runs.Run(["bash", "install.sh", file], folder, variables).wait()
        errors = [line for line in run.stderr.splitlines() if line.startswith("install.sh: error: ")]
        assert run.status == 1 and len(errors) == 1, run.stderr
        assert all(word in errors[0] for word in words), errors
    assert not list(tmp_path.glob("cache/**/*.whl"))


def shell_function(script: Path, *names: str) -> str:
    """Return the text of functions that a shell script defines."""
    return "".join(re.search(rf"^{name}\(\) {{.*?^}}\n", script.read_text(), re.M | re.S)[0] for name in names)


def test_install_changes_what_is_there(example: str, source: Path, tmp_path: Path) -> None:
    """A line that install.sh wants to change is changed; without it, as in another release, it ends and says where."""
    change = shell_function(source / "install.sh", "fail", "change") + "set -eu; version=1; change 'a const b;' 'a b;' "
    for name, text in (("one.h", "a const b;\nrest\n"), ("none.h", "a b;\nrest\n"), ("two.h", "a const b;\n" * 2)):
        (tmp_path / name).write_text(text)
    done = subprocess.run(["bash", "-c", change + "one.h"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (tmp_path / "one.h").read_text() == "a b;\nrest\n", done.stderr
    for name in ("none.h", "two.h"):
        done = subprocess.run(["bash", "-c", change + name], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and done.stderr.startswith(f"install.sh: error: {name} of Horovod"), done.stderr
        assert done.stderr.count("\n") == 1 and "a const b;" in done.stderr


def test_install_takes_uv_from_the_environment(example: str, source: Path, tmp_path: Path) -> None:
    """An environment without pip that holds uv as a module only is as good as one with uv on the PATH."""
    text = (source / "install.sh").read_text()
    choice = text[text.index("uv=(uv)\n") : text.index("\nmpi=")]
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1 $2" = "-m uv" ]\n')
    (tmp_path / "python").chmod(0o755)
    script = f'set -eu\npython={tmp_path}/python\n{choice}\necho "${{install[@]}}"'
    bash = shutil.which("bash")
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, timeout=300, env={"PATH": "/nowhere"})
    python = tmp_path / "python"
    assert done.stdout == f"{python} -m uv pip install --quiet --python {python}\n", done.stderr


def test_conda_environment(example: str, source: Path) -> None:
    """environment.yml has a supported Python and all that install.sh may ask for, by the names in its messages."""
    environment = yaml.safe_load((source / "more" / "environment.yml").read_text())
    script, guide = (source / "install.sh").read_text(), (source / "README.md").read_text()
    *items, pip = environment["dependencies"]
    packages = {name: version for name, _, version in (item.partition("=") for item in items)}
    first, last = map(int, re.search(r"Python 3\.(\d+) to 3\.(\d+)", guide).groups())
    assert first <= int(re.fullmatch(r"3\.(\d+)", packages["python"])[1]) <= last
    wanted = set(re.findall(r"conda install ([\w-]+)", script))
    assert {"cmake", "make", "cxx-compiler"} <= wanted <= set(packages)
    assert "mpicxx" in script and {"openmpi", "pip"} <= set(packages)
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert f"conda activate {environment['name']} && bash install.sh" in guide
    assert pip == {"pip": ["-r ../requirements.txt"]} and (source / "requirements.txt").exists()


def test_launcher_killed(example: str, folder: Path) -> None:
    """SIGTERM to horovodrun alone: no worker outlives it, and nothing says that the run has finished.

    Its own status does not count, and may be 0: two threads of horovodrun wait for the same shell, and the one that
    comes second no longer learns how it ended.
    """
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_epoch(1)
    os.kill(run.process.pid, signal.SIGTERM)
    wait_until(lambda: not run.workers(), 60, "the end of the processes that have lost horovodrun")
    run.wait(leaves=60)
    assert "finished" not in run.stdout


@pytest.mark.runs("weekly")
def test_mpirun_with_four_processes(example: str, folder: Path) -> None:
    """The README's command for MPI and the language model: NP processes of OMP_NUM_THREADS threads."""
    line = readme.command("examples/horovod_cpu/README.md", "... bash more/mpirun_local.sh ...")
    run = readme.run_block([f"{line} --epochs 1"], folder, **MPI_AS_ROOT)
    assert "4 processes on 1 node, mpi on cpu, 2 threads each" in run.stdout
