"""sites/: the page and its files, each system's lines in each example's script, what is refused, and new files."""

import dataclasses
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import readme
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from sites import apply, new, page, systems, toml
from sites.systems import SitesError, System

SYSTEMS = systems.all_systems()
SCRIPTS = [path for name in EXAMPLES for path in sorted((ROOT / "examples" / name).glob("*.slurm"))]
MULTINODE = ROOT / "examples" / "torchrun_multinode" / "run.slurm"


def sites(folder: Path, *words: str | Path, **how) -> subprocess.CompletedProcess[str]:
    """Run `python -m sites` in a folder as a user would, without a terminal."""
    path = {"PYTHONPATH": str(ROOT)} | how.pop("env", {})
    options = {"capture_output": True, "text": True, "timeout": 300, "stdin": subprocess.DEVNULL} | how
    return subprocess.run(
        [sys.executable, "-m", "sites", *map(str, words)], cwd=folder, env=os.environ | path, **options
    )


def refusal(folder: Path, *words: str | Path, **how) -> str:
    """Return the one line with which `python -m sites` refuses; the status is 2."""
    done = sites(folder, *words, **how)
    assert done.returncode == 2 and not done.stdout, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("sites: error: "), line
    return line


def sensible(system: System, script: Path) -> apply.Wanted:
    """Return what a student might ask of a system: all GPUs of two nodes where the script and the system have them."""
    example, nodes = script.parent.name, system.nodes[0]
    count = 1 if example == "ddp_spawn" or nodes.max_nodes == 1 else 2
    mem = "64G" if system.job.mem == "mandatory" else ""
    gpus = nodes.gpus if LAUNCHERS[example].gpus else 0
    if 0 < nodes.max_gpus < gpus * count:
        count = 1
    return apply.Wanted(gpus=gpus, nodes=count, account="proj-1", mem=mem)


# The page.


def test_page() -> None:
    """The page is what the files make; each fact but one that was not found has a source, each source a date."""
    assert page.PAGE.read_text() == page.text(), "python -m sites page"
    assert len(SYSTEMS) >= 13
    for name, system in SYSTEMS.items():
        assert [*system.facts][:2] == ["header", "environment"], name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", system.read), name
        for fact, one in system.facts.items():
            assert one.text and (one.sources or one.text.startswith("not found")), (name, fact)
        used = {source for fact in system.facts.values() for source in fact.sources} | {*system.about_sources}
        assert used == system.pages.keys(), name
        for one in system.pages.values():
            assert re.fullmatch(r"\d{4}(-\d\d-\d\d)?|no date", one.date), (name, one)
            assert one.title and re.match(r"https://\S+$", one.url), (name, one)


def without_fact(system: System) -> list[str]:
    """Return what `apply` would write for a system, names, options and numbers, and no fact of it says."""
    text = " ".join([*(fact.text for fact in system.facts.values()), *system.row.values(), system.about])
    job, words = system.job, {"", "0"}
    for line in [*job.modules, *job.image_modules]:
        words |= {word for word in line.split() if word not in ("module", "load", "ml")}
    words |= {job.nccl, job.gloo, job.mpi}
    for nodes in system.nodes:
        numbers = (nodes.gpus, nodes.max_gpus, nodes.cpus, nodes.cpus_per_gpu, nodes.mem_per_gpu)
        words |= {nodes.partition, nodes.mem, *map(str, numbers), str(nodes.max_nodes if nodes.max_nodes > 1 else 0)}
        words |= (
            {*nodes.gpu_option.split("{")[0].split("=", 1)} if nodes.gpu_option != systems.Nodes.gpu_option else set()
        )
    found = [word for word in words - {"", "0"} if word not in text]
    for line in [*job.options, *(option for nodes in system.nodes for option in nodes.options)]:
        for option, value in apply.options(line).items():
            forms = [f"-{letter} {value}" for letter, name in apply.SHORT.items() if f"--{name}" == option]
            found += [line] if not any(form in text for form in (f"{option}={value}", *forms)) else []
    return found


@pytest.mark.parametrize("name", SYSTEMS)
def test_lines_are_facts(name: str) -> None:
    """What `apply` writes stands in a fact; another partition, number or module would be noticed."""
    system = SYSTEMS[name]
    assert without_fact(system) == []
    for nodes in (systems.Nodes(partition="giant"), systems.Nodes(gpus=77), systems.Nodes(options=["--qos=giant"])):
        assert len(without_fact(dataclasses.replace(system, nodes=[nodes]))) == 1
    job = systems.Job(modules=["module load giant/1"], nccl="giant0")
    assert sorted(without_fact(dataclasses.replace(system, job=job))) == ["giant/1", "giant0"]


# Applying.


def assert_only_marked(old: str, new: str) -> None:
    """Check that each line of a script that has no mark is there still, in its order."""
    matcher = difflib.SequenceMatcher(None, old.split("\n"), new.split("\n"), autojunk=False)
    for kind, start, end, *_ in matcher.get_opcodes():
        gone = old.split("\n")[start:end] if kind in ("replace", "delete") else []
        assert all(re.search(r"# .*(EDIT|OPTION)", line) for line in gone), gone


def findings(folder: Path) -> list[tuple[str, int, int]]:
    """Return what shellcheck says of the scripts in a folder: file, line, code."""
    files = sorted(path.name for path in folder.iterdir())
    # 2154: variables of job.sh, which is not followed; the others as in .shellcheckrc
    words = ["shellcheck", "--norc", "--shell=bash", "--format=json", "--exclude=SC1091,SC2016,SC2154,SC2329", *files]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return [(one["file"], one["line"], one["code"]) for one in json.loads(done.stdout)]


def test_every_system_and_script(tmp_path: Path) -> None:
    """Each system's lines in each example's scripts: bash and shellcheck accept them, and only marked lines change."""
    for name, system in SYSTEMS.items():
        for script in SCRIPTS:
            old, wanted = script.read_text(), sensible(system, script)
            text, _ = apply.edited(old, system, wanted, f"{name}.toml")
            assert_only_marked(old, text)
            edited = tmp_path / f"{name}-{script.parent.name}-{script.name}"
            edited.write_text(text)
            header = apply.header_of(text.split("\n"))
            assert header["--account"] == "proj-1" and "NAME" not in header.values()
            assert header["--nodes"] == str(wanted.nodes)
            asked = [header[option] for option in apply.GPU_OPTIONS if option in header]
            each = wanted.gpus // (int(header["--ntasks-per-node"]) if "--gpus-per-task" in header else 1)
            assert [value.rpartition(":")[2] for value in asked] == ([str(each)] if wanted.gpus else [])
            lines = text.split("\n")
            said = " ".join(line.removeprefix("# sites:") for line in lines if line.startswith("# sites:"))
            assert system.name in said and system.read in said and "Nobody of this project has tried them" in said
            first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
            assert all(number < first for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert len([*tmp_path.iterdir()]) == len(SYSTEMS) * len(SCRIPTS)
    checked = 'for file; do bash -n "$file" || exit; done'
    subprocess.run(["bash", "-c", checked, "bash", *sorted(tmp_path.iterdir())], check=True, timeout=300)
    assert findings(tmp_path) == []


def header_and_text(name: str, script: str, **wanted) -> tuple[dict[str, str], str]:
    """Return what the header of an example's script asks for after `apply`, and the whole script."""
    text, _ = apply.edited((ROOT / "examples" / script).read_text(), SYSTEMS[name], apply.Wanted(**wanted), "a.toml")
    return apply.header_of(text.split("\n")), text


def test_lines() -> None:
    """What stands in the scripts for some systems, as their facts say it."""
    header, text = header_and_text("lumi", "torchrun_multinode/run.slurm", gpus=8, nodes=4, account="project_1")
    assert (
        header.items()
        >= {
            "--partition": "standard-g",
            "--gpus-per-node": "8",
            "--cpus-per-task": "56",
            "--mem": "480G",
            "--nodes": "4",
            "--ntasks-per-node": "1",
            "--time": "01:00:00",
        }.items()
    )
    assert "\nmodule load lumi-aif-singularity-bindings  # OPTION" in text
    header, _ = header_and_text("lumi", "torchrun_multinode/run.slurm", gpus=2, nodes=1)
    assert (header["--partition"], header["--cpus-per-task"], header["--mem"]) == ("small-g", "14", "120G")
    assert "--account" not in header
    header, text = header_and_text("frontier", "lightning/run.slurm", gpus=8, nodes=2, account="abc123")
    assert (header["--ntasks-per-node"], header["--cpus-per-task"]) == ("8", "7")
    assert header["--network"] == "disable_rdzv_get" and header["--partition"] == "batch"
    assert "\nexport NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3  # OPTION" in text
    header, _ = header_and_text("roihu", "fsdp/run.slurm", gpus=4, nodes=2, account="p")
    assert header["--gres"] == "gpu:gh200:4" and "--gpus-per-node" not in header and "--mem" not in header
    assert (header["--partition"], header["--cpus-per-task"]) == ("gpularge", "288")
    header, _ = header_and_text("roihu", "fsdp/run.slurm", gpus=4, nodes=1, account="p")
    assert header["--partition"] == "gpumedium"
    header, _ = header_and_text("perlmutter", "ddp_spawn/run.slurm", gpus=4)
    assert (header["--qos"], header["--constraint"], header["--cpus-per-task"]) == ("regular", "gpu", "128")
    header, _ = header_and_text("snellius", "lora/run.slurm", gpus=2, gpu="A100")
    assert (header["--partition"], header["--cpus-per-task"]) == ("gpu_a100", "36")
    header, text = header_and_text("lumi", "horovod_cpu/run.slurm", gpus=0, image="/images/h.sif")
    assert "\nmpi=pmi2   " in text and '\nIMAGE="${IMAGE:-/images/h.sif}"' in text and "--gpus-per-node" not in header
    _, text = header_and_text("iris", "horovod_cpu/run.slurm", gpus=0)
    assert "\nmpi=pmix   " in text
    header, text = header_and_text("pelle", "ddp_spawn/minimal.slurm", gpus=10, account="p", venv="$HOME/env")
    assert header["--gpus"] == "l40s:10" and header["--hint"] == "nomultithread"
    assert '\nml Miniforge3\nsource "$HOME/env/bin/activate" || exit 2  # EDIT' in text
    header, _ = header_and_text("alps", "deepspeed/run.slurm", gpus=4)
    assert header["--gpus-per-task"] == "4" and "--partition" not in header
    header, text = header_and_text("iris", "torchrun_vision/run.slurm", gpus=4, time="1-00:00:00", cpus_per_task=3)
    assert (header["--time"], header["--cpus-per-task"]) == ("1-00:00:00", "3")
    assert "tools/Apptainer" not in text
    _, text = header_and_text("iris", "torchrun_vision/run.slurm", gpus=4, image="a.sif")
    assert "\nmodule load tools/Apptainer" in text


def test_preflight_and_jupyter() -> None:
    """The same command edits the scripts of preflight, with its one task per node, and of jupyter."""
    for script in ("preflight/run.slurm", "preflight/trial.slurm", "jupyter/run.slurm"):
        old = (ROOT / script).read_text()
        text, _ = apply.edited(old, SYSTEMS["snellius"], apply.Wanted(gpus=4), "snellius.toml")
        assert_only_marked(old, text)
        header = apply.header_of(text.split("\n"))
        assert (header["--gpus-per-node"], header["--ntasks-per-node"], header["--cpus-per-task"]) == ("4", "1", "64")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a run.slurm of torchrun_multinode, as it is copied."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(MULTINODE, folder)
    return folder


LUMI = ("--nodes", "2", "--gpus-per-node", "8", "--account", "project_1")


def test_nothing_is_written_unasked(project: Path) -> None:
    """Without --write and without a terminal the difference is shown, and nothing is written."""
    script = project / "run.slurm"
    done = sites(project, "apply", "lumi", script, *LUMI)
    assert done.returncode == 0 and "\n+#SBATCH --partition=standard-g " in done.stdout, done
    assert done.stdout.endswith("sites: nothing was written; --write writes it\n")
    assert [*project.iterdir()] == [script] and script.read_bytes() == MULTINODE.read_bytes()


@pytest.mark.parametrize(("answer", "written"), [("y\n", True), ("n\n", False), ("\n", False), ("\4", False)])
def test_question(project: Path, answer: str, written: bool) -> None:
    """On a terminal it asks; only yes writes. The end of input is no."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "sites", "apply", "lumi", "run.slurm", *LUMI]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    with subprocess.Popen(
        words, cwd=project, env=environment, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        os.write(ours, answer.encode())
        printed, _ = process.communicate(timeout=300)
    os.close(ours)
    os.close(theirs)
    assert "write this? [y/N]" in printed and printed.index("+#SBATCH --part") < printed.index("write this?")
    assert ("partition=standard-g" in (project / "run.slurm").read_text()) == written, printed
    assert (project / "run.slurm.before-sites").exists() == written
    assert written or "nothing was written" in printed


def test_written(project: Path) -> None:
    """What was shown is written, to the file behind a link, with its mode; a copy is kept, and no copy is lost."""
    script, link = project / "run.slurm", project / "link"
    script.chmod(0o750)
    link.symlink_to("run.slurm")
    (project / "run.slurm.before-sites").write_text("mine")
    done = sites(project, "apply", "lumi", "link", *LUMI, "--write")
    assert done.returncode == 0 and "run.slurm.before-sites-2" in done.stdout, done
    assert link.is_symlink() and script.stat().st_mode & 0o777 == 0o750
    assert (project / "run.slurm.before-sites").read_text() == "mine"
    kept = project / "run.slurm.before-sites-2"
    assert kept.read_bytes() == MULTINODE.read_bytes()
    assert len([*project.iterdir()]) == 4, "no temporary file is left"
    text, _ = apply.edited(MULTINODE.read_text(), SYSTEMS["lumi"], apply.Wanted(8, 2, account="project_1"), "lumi.toml")
    assert script.read_text() == text
    again = refusal(project, "apply", "roihu", "run.slurm", "--gpus-per-node", "4", "--account", "p", "--write")
    assert "has been edited already (lines for LUMI" in again and script.read_text() == text


def test_changed_meanwhile(project: Path) -> None:
    """A script that has changed since it was shown is not overwritten, and bytes that are no UTF-8 stay as they are."""
    script = project / "run.slurm"
    with pytest.raises(SitesError, match="has changed meanwhile"):
        apply.write(script, "another text", "new")
    assert script.read_bytes() == MULTINODE.read_bytes()
    script.write_bytes(MULTINODE.read_bytes() + b"# caf\xe9\n")
    assert sites(project, "apply", "lumi", script, *LUMI, "--write").returncode == 0
    assert script.read_bytes().endswith(b"# caf\xe9\n")


def test_folder_that_cannot_be_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new script cannot be put in its place, the old one is there, and no part of the new."""

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(SitesError, match="No space left on device"):
        apply.write(project / "run.slurm", MULTINODE.read_text(), "new")
    assert {path.name for path in project.iterdir()} == {"run.slurm", "run.slurm.before-sites"}
    assert (project / "run.slurm").read_bytes() == MULTINODE.read_bytes()


REFUSED = {  # what is asked of which system, for torchrun_multinode's run.slurm if not another; what the line says
    "roihu --nodes 2 --gpus-per-node 5 --account p": "no 2 nodes of 5 GPUs: gpumedium with gh200 has 4 GPUs a node",
    "roihu --nodes 2 --gpus-per-node 3 --account p": "gpularge with gh200 gives whole nodes of 4 GPUs",
    "roihu --nodes 2 --gpus-per-node 4": "wants an account: give --account NAME",
    "roihu --nodes 2 --gpus-per-node 4 --account p --mem 10G": "the memory follows the GPUs",
    "roihu --nodes 2 --gpus-per-node 4 --account p --partition gputest": "gputest with gh200 gives at most 00:15:00",
    "roihu --nodes 2 --gpus-per-node 4 --account p --partition tiny": "the file knows of nodes with GPUs: gpularge",
    "pelle --nodes 2 --gpus-per-node 2 --account p": "gpu with l40s gives at most 1 node",
    "pelle --nodes 1 --gpus-per-node 1 --account p --time 3-0": "gives at most 2-00:00:00, and --time is 3-0",
    "iris --nodes 5 --gpus-per-node 4": "gpu with v100 gives at most 4 nodes",
    "olivia --nodes 9 --gpus-per-node 4": "accel with gh200 gives at most 32 GPUs a job",
    "kestrel --nodes 1 --gpus-per-node 4": "give --mem SIZE",
    "kestrel --nodes 2 --gpus-per-node 2 --mem 9G": "debug with h100 has 1 GPUs a node",
    "alps --nodes 1 --gpus-per-node 2": "its nodes with gh200 gives whole nodes of 4 GPUs",
    "lumi --nodes 2 --gpus-per-node -1": "must not be negative",
    "lumi --nodes 2 --gpus-per-node 8 --account a;b": "--account a;b: must be a name",
    "lumi --nodes 2 --gpus-per-node 8 --time soon": "--time soon: must be a time as SLURM writes it",
    "lumi --nodes 2 --gpus-per-node 8 --mem much": "--mem much: must be a size",
    "lumi --nodes 2 --gpus-per-node 8 --venv $(rm)": "must be a path without",
    "lumi --nodes 2 --gpus-per-node 8 --venv a --image b": "run.slurm uses one of them",
    "lumi --gpus-per-node 8 --gpu a100": "--gpu a100: the file knows of nodes with GPUs: none",
    "atlantis --nodes 2 --gpus-per-node 8": "no such system; there are alps alvis",
    "lumi ddp_spawn/run.slurm --nodes 2 --gpus-per-node 8": "has --nodes=1 on a line that is not marked",
    "lumi horovod_cpu/run.slurm --nodes 2 --gpus-per-node 8": "trains on CPUs, and has no marked line for GPUs",
    "lumi fsdp/minimal.slurm --gpus-per-node 8 --image a.sif": "has no line for an image",
    "lumi fsdp/train.py --gpus-per-node 8": "it is not a run.slurm or minimal.slurm of an example",
    "lumi fsdp/nothing.slurm --gpus-per-node 8": "nothing.slurm cannot be read: No such file or directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(tmp_path: Path, words: str) -> None:
    """What a system or a script does not have is refused with one line that names the script and why."""
    name, *rest = words.split()
    script = rest.pop(0) if "/" in rest[0] else "torchrun_multinode/run.slurm"
    copied = tmp_path / Path(script).name
    if (ROOT / "examples" / script).exists():
        shutil.copy(ROOT / "examples" / script, copied)
    assert REFUSED[words] in refusal(tmp_path, "apply", name, copied, *rest, "--write")
    assert {path.name for path in tmp_path.iterdir()} <= {copied.name}


def test_other_scripts(project: Path) -> None:
    """A script without marks, with Windows line ends, or with no header at all is refused, and stays as it is."""
    text, script = MULTINODE.read_text(), project / "run.slurm"
    for changed, reason in (
        (re.sub("EDIT|OPTION", "X", text), "has no lines marked EDIT"),
        (text.replace("\n", "\r\n"), "line ends of Windows"),
        ("#!/bin/bash\nsrun hostname\n", "not a run.slurm"),
        ("", "not a run.slurm"),
    ):
        script.write_bytes(changed.encode())
        assert reason in refusal(project, "apply", "lumi", script, *LUMI, "--write")
        assert script.read_bytes() == changed.encode()


def test_own_values_stay(project: Path) -> None:
    """A value that the user has set on a marked line stays, if nothing else was asked for."""
    text = MULTINODE.read_text().replace("##SBATCH --account=NAME  ", "#SBATCH --account=mine  ")
    text = text.replace("#SBATCH --time=01:00:00", "#SBATCH --time=00:05:00")
    text = text.replace("##SBATCH --mem=16G", "#SBATCH --mem=99G")
    new_text, notes = apply.edited(text, SYSTEMS["iris"], apply.Wanted(gpus=4), "iris.toml")
    header = apply.header_of(new_text.split("\n"))
    assert (header["--account"], header["--time"], header["--mem"]) == ("mine", "00:05:00", "99G") and notes == []
    new_text, _ = apply.edited(new_text.replace("# sites:", "#"), SYSTEMS["iris"], apply.Wanted(gpus=0), "iris.toml")
    assert "\n##SBATCH --gpus-per-node=4 " in new_text, "switched off again"


def test_options() -> None:
    """The options of a header are read however they are written."""
    written = "-A me -p gpu --mem 16G --exclusive --gres=gpu:a100:2 -C volta32"
    assert apply.options(written) == {
        "--account": "me",
        "--partition": "gpu",
        "--mem": "16G",
        "--exclusive": "",
        "--gres": "gpu:a100:2",
        "--constraint": "volta32",
    }


def test_times() -> None:
    """Time limits are read as SLURM reads them."""
    for text, expected in (
        ("90", 90),
        ("1:30", 1.5),
        ("01:30:30", 90.5),
        ("2-0", 2880),
        ("1-2:30", 1590),
        ("1-00:00:30", 1440.5),
        ("UNLIMITED", float("inf")),
    ):
        assert apply.minutes(text, "time") == expected
    for bad in ("", "1:2:3:4", "1-", "-5", "1h"):
        with pytest.raises(SitesError):
            apply.minutes(bad, "time")


# The files.


TEXTS = st.text() | st.text(st.sampled_from('ab \\"\n'), max_size=400)


def tables_of(values: st.SearchStrategy) -> st.SearchStrategy:
    """A strategy for tables and lists of tables that have such values."""
    tables = st.dictionaries(TEXTS, values, max_size=4)
    return tables | st.lists(tables, min_size=1, max_size=3)


def test_writer() -> None:
    """What the writer writes, Python's own reader reads back: the files of systems, and comments that are wrapped."""
    for path in [*systems.FOLDER.glob("*.toml"), page.OTHERS]:
        table = tomllib.loads(path.read_text())
        assert tomllib.loads(toml.dumps(table)) == table and list(tomllib.loads(toml.dumps(table))["pages"])
    written = toml.dumps({"a": 1, "t": {"b": 2}, "l": [{"c": 3}, {"c": 4}]}, {"a": "A", "t.b": "B", "l": "L " * 80})
    assert tomllib.loads(written)["l"][1] == {"c": 4} and written.startswith("# A\na = 1") and "\n# B\nb" in written
    assert max(map(len, written.splitlines())) <= 120
    with pytest.raises(TypeError):
        toml.dumps({"a": 1.5})


VALUES = st.recursive(TEXTS | st.integers(0) | st.booleans() | st.lists(TEXTS), tables_of, max_leaves=9)


@given(st.dictionaries(TEXTS, VALUES))
@settings(max_examples=50, deadline=None)
def test_writer_of_any_text(table: dict) -> None:
    """Whatever the texts are, in keys as well, they come back as they were."""
    assert tomllib.loads(toml.dumps(table)) == table


BAD_FILES = {
    "not toml": ("name = ", "cannot be read"),
    "no name": ('title = "t"\nread = "2026-01-01"\n', "key name is missing"),
    "unknown key": ('name = "n"\ntitel = "t"\n', "unknown key titel"),
    "wrong type": ('name = "n"\ntitle = "t"\nread = "r"\n[[nodes]]\ngpus = "4"\n', "gpus must be a number, not '4'"),
    "no such source": ('name = "n"\ntitle = "t"\nread = "r"\n[facts.header]\ntext = "x"\nsources = ["s"]\n', "pages.s"),
    "unknown fact": ('name = "n"\ntitle = "t"\nread = "r"\n[facts.weather]\ntext = "x"\n', "in this order"),
    "a bad option": ('name = "n"\ntitle = "t"\nread = "r"\n[[nodes]]\ngpu_option = "--x={gpu}"\n', "must have {gpus}"),
    "no list": ('name = "n"\ntitle = "t"\nread = "r"\nnodes = 5\n', "[[nodes]]"),
    "a negative number": ('name = "n"\ntitle = "t"\nread = "r"\n[[nodes]]\nmax_nodes = -1\n', "must be a number"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(project: Path, name: str) -> None:
    """A mistake in a file of one's own is one line that names the file and the key."""
    text, reason = BAD_FILES[name]
    (project / "mine.toml").write_text(text)
    line = refusal(project, "apply", "mine", "run.slurm", "--gpus-per-node", "1")
    assert "mine.toml" in line and reason in line


# Files of one's own.

CONFIG = """Configuration data as of 2026-11-20T10:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = {cluster}
DefMemPerNode           = UNLIMITED
Epilog                  =
MpiDefault              = {default}
SLURM_VERSION           = {version}
TmpFS                   = /scratch/local

Slurmctld(primary) at head is UP
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts={accounts} AllowQos=ALL Default={default} QoS=N/A "
    "DefaultTime=NONE MaxNodes={nodes} MaxTime={time} MinNodes=0 Nodes=n[1-9] OverSubscribe={share} State={state} "
    "TotalCPUs=1 TotalNodes=1 SelectTypeParameters=NONE JobDefaults={defaults} DefMemPerCPU={memory} "
    "MaxMemPerNode=UNLIMITED TRES=cpu=1,mem=1M"
)


def partition(name: str, **values: str) -> str:
    """Return a partition as `scontrol --oneliner show partition` prints it."""
    usual = {"accounts": "ALL", "default": "NO", "nodes": "UNLIMITED", "time": "UNLIMITED", "share": "NO"}
    usual |= {"state": "UP", "defaults": "(null)", "memory": "UNLIMITED"}
    return PARTITION.format(name=name, **usual | values)


# A cluster with SLURM 22.05 and one of its successors: what its commands print.
OLD = {
    "sinfo": """
cpu|200|128|1|256000|(null)|c[001-200]
cpu|40|128|1|512000|(null)|f[01-40]
gpu|30|64|1|515000|gpu:a100:4(S:0-1)|g[01-30]
gpu|4|64|1|1030000|gpu:a100:4(S:0-1)|g[33-36]
gpu|2|64|1|515000|gpu:a100:4(S:2-3)|g[31-32]
gpu|6|96|2|1030000|gpu:h100:2(S:0-1),nvme:1|h[1-6]
debug|1|64|1|515000|gpu:a100:4(S:0-1)|g01
dead|1|64|1|515000|gpu:a100:8|x1
""",
    "partition": "\n".join(
        [
            partition("gpu", nodes="8", time="2-00:00:00", memory="4000", accounts="physics,chemistry"),
            partition("cpu", default="YES", share="EXCLUSIVE", time="7-00:00:00"),
            partition("debug", time="00:30:00", defaults="DefCpuPerGPU=8,DefMemPerGPU=100000"),
            partition("dead", state="DOWN"),
        ]
    ),
    "config": CONFIG.format(cluster="old", default="pmi2", version="22.05.8"),
    "node": "NodeName=c001 Arch=x86_64 CPUAlloc=0 CPUEfctv=120 CPUTot=128 Gres=(null)",
    "mpi": "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v3,pmix_v4",
}
NEW = {
    "sinfo": "batch|100|288|1|870000|gpu:gh200:4|n[1-100]\n",
    "partition": partition("batch", default="YES", time="1-00:00:00"),
    "config": CONFIG.format(cluster="new", default="pmix", version="26.05.1"),
    "node": "NodeName=n1 Arch=aarch64 CPUAlloc=0 CPUEfctv=288 CPUTot=288 Gres=gpu:gh200:4 Comment=(null)",
    "mpi": "MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n\tpmix",
}
SAYS = """#!/bin/bash
folder="${{0%/*}}"
case "${{0##*/}} $*" in
    sinfo*) cat "$folder/sinfo.txt" ;;
    *"show partition") cat "$folder/partition.txt" ;;
    *"show config") cat "$folder/config.txt" ;;
    *"show hostnames"*) echo "${{@: -1}}" | sed 's/\\[0*\\([0-9]*\\).*/\\1/' ;;
    *"show node"*) cat "$folder/node.txt" ;;
    "srun --mpi=list") cat "$folder/mpi.txt" {output} ;;
    *) echo "{name}: error: unexpected: $*" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A function that puts SLURM's commands, which say what was recorded, first into PATH; it returns that."""

    def make(recorded: dict[str, str], output: str = "") -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in recorded.items():
            (folder / f"{name}.txt").write_text(text.lstrip("\n"))
        for name in ("sinfo", "scontrol", "srun"):
            (folder / name).write_text(SAYS.format(name=name, output=output))
            (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    return make


def test_new(project: Path, cluster: Callable[..., dict[str, str]]) -> None:
    """Partitions, GPUs, limits, memory and MPI types are in the file; what SLURM does not know is empty.

    Its lines come into a script as those of the known systems.
    """
    done = sites(project, "new", "mine", env=cluster(OLD))
    assert done.returncode == 0, done.stderr
    text = (project / "mine.toml").read_text()
    system = systems.read(project / "mine.toml")
    usual: dict[str, Any] = {"cpus_per_gpu": 30, "max_time": "2-00:00:00", "max_nodes": 8}  # for jobs: 120 CPUs
    of_h100 = {"max_nodes": 6, "options": ["--hint=nomultithread"]}  # with two threads a core
    assert system.nodes == [  # the default partition first, and one that is down not at all
        systems.Nodes(partition="cpu", cpus=120, max_nodes=240, max_time="7-00:00:00", whole=True),
        systems.Nodes("gpu", "a100", 4, gpu_option="--gpus-per-node=a100:{gpus}", **usual),
        systems.Nodes("gpu", "h100", 2, gpu_option="--gpus-per-node=h100:{gpus}", **usual | of_h100),
        systems.Nodes("debug", "a100", 4, cpus_per_gpu=30, max_nodes=1, max_time="00:30:00"),
    ]
    header = system.facts["header"].text
    assert (
        "`gpu`: 32 nodes with 4 GPUs a100, 64 cores, 515000 MB, at most 2-00:00:00, by default 4000 MB per CPU"
        in header
    )
    assert "AllowAccounts physics,chemistry" in header and "by default 100000 MB per GPU" in header
    assert "6 nodes with 2 GPUs h100, 48 cores, 2 threads each" in header and "dead" not in header
    assert "none pmi2 pmix pmix_v3 pmix_v4; default: pmi2" in system.facts["MPI"].text and system.job.mpi == "pmix"
    assert "/scratch/local" in system.facts["local disk"].text and "22.05.8" in system.pages["slurm"].title
    for fact in ("environment", "wheel", "internet"):
        assert system.facts[fact].text == ""
        assert re.search(r"^# .+\ntext = \"\"", text.partition(f"[facts.{fact}]")[2].lstrip("\n"))
    assert re.search(r"^# .+\nmodules = \[\]\n", text, re.MULTILINE)

    words = ["--nodes", "2", "--gpus-per-node", "4", "--account", "physics", "--write"]
    done = sites(project, "apply", "mine", "run.slurm", *words)
    assert done.returncode == 0, done.stderr
    header = apply.header_of((project / "run.slurm").read_text().split("\n"))
    assert (header["--partition"], header["--gpus-per-node"], header["--cpus-per-task"]) == ("gpu", "a100:4", "120")
    assert_only_marked(MULTINODE.read_text(), (project / "run.slurm").read_text())
    shutil.copy(MULTINODE, project / "run.slurm")
    line = refusal(project, "apply", "mine", "run.slurm", "--nodes", "2", "--gpus-per-node", "3", "--gpu", "h100")
    assert "gpu with h100 has 2 GPUs a node" in line
    assert "is there already" in refusal(project, "new", "mine") and (project / "mine.toml").read_text() == text


@pytest.mark.parametrize("output", ["", ">&2"])
def test_new_of_newer_slurm(project: Path, cluster: Callable[..., dict[str, str]], output: str) -> None:
    """With one kind of nodes the option has no type; SLURM's list of MPI types is read from either output."""
    done = sites(project, "new", "mine", "--output", "other.toml", env=cluster(NEW, output))
    assert done.returncode == 0, done.stderr
    system = systems.read(project / "other.toml")
    assert system.nodes == [systems.Nodes("batch", "gh200", 4, cpus_per_gpu=72, max_nodes=100, max_time="1-00:00:00")]
    assert "none cray_shasta pmi2 pmix; default: pmix" in system.facts["MPI"].text
    assert "cluster new" in system.title and "26.05.1" in system.pages["slurm"].title


def test_forms_of_slurm() -> None:
    """GRES, MPI types and settings as different releases write them."""
    for gres, gpus in (
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:2(S:0),gpu:v100:2(S:1),nvme:1", {"a100": 2, "v100": 2}),
        ("gpu:8(S:0-3)", {"": 8}),
        ("gpu:tesla:2,gpu:kepler:2", {"tesla": 2, "kepler": 2}),
        ("gpu:nvidia_h200_nvl_4g.71gb:7(S:0,1),shard:8", {"nvidia_h200_nvl_4g.71gb": 7}),
        ("(null)", {}),
        ("gpu:0", {}),
        ("craynetwork:4,gpu:nvidia_h100:4(IDX:0-3)", {"nvidia_h100": 4}),
    ):
        assert new.gpus_of(gres) == gpus, gres
    broken = "MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v5\n"
    broken += "srun: error:  mpi/pmix_v5: init: (null) [0]: mpi_pmix.c:193: pmi/pmix: can not load PMIx library\n"
    assert new.mpi_types(broken) == ["none", "pmix", "pmix_v5"]
    assert new.mpi_types("srun: MPI types are...\nsrun: none\nsrun: pmix\n") == ["none", "pmix"]
    assert new.pairs("A = \nBcd                     = (null)\nSLURM_VERSION = 25.11.0\n")["SLURM_VERSION"] == "25.11.0"
    assert (
        new.pairs("PartitionName=a AllowQos=ALL JobDefaults=DefMemPerGPU=5 State=UP")["JobDefaults"] == "DefMemPerGPU=5"
    )
    assert new.groups_of("sinfo: error: slow\na|2|64+|1|1000+|gpu:2|n[1-2]\n")[0][1:6] == (2, 64, 1, 1000, {"": 2})


def test_new_refused(project: Path, cluster: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    """Without SLURM, with a SLURM that does not answer, and with a wrong name: one line, and no file."""
    (tmp_path / "empty").mkdir()
    assert "there is no sinfo here: run this on a login node" in refusal(
        project, "new", "mine", env={"PATH": str(tmp_path / "empty")}
    )
    variables = cluster(OLD)
    for name, reason in {"../x": "letters, digits", "lumi": "has a system of that name"}.items():
        assert reason in refusal(project, "new", name, env=variables)
    assert "cannot be written" in refusal(project, "new", "mine", "--output", "no/mine.toml", env=variables)
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\necho slurm_load_partitions: Unable to contact >&2; exit 1\n")
    assert "failed: slurm_load_partitions: Unable to contact" in refusal(project, "new", "mine", env=variables)
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\n")
    assert "sinfo lists no nodes" in refusal(project, "new", "mine", env=variables)
    assert {path.name for path in project.iterdir()} == {"run.slurm"}


# The commands of its README.


def test_commands_of_readme(tmp_path: Path, cluster: Callable[..., dict[str, str]]) -> None:
    """What the README has people type works, in a copy of sites/, whose page stays as it is."""
    shutil.copytree(ROOT / "sites", tmp_path / "sites", ignore=shutil.ignore_patterns("__pycache__"))
    commands = [
        readme.command("sites/README.md", "python -m sites apply lumi ...", {"project_NUMBER": "p --write"}),
        readme.command("sites/README.md", "python -m sites new mycluster"),
        readme.command("sites/README.md", "python -m sites apply mycluster ...", {"--nodes": "--write --nodes"}),
        readme.command("sites/README.md", "python -m sites page"),
    ]
    path = f"{cluster(OLD)['PATH'].partition(':')[0]}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": ""}
    for command in commands:
        (tmp_path / "project").mkdir(exist_ok=True)
        shutil.copy(MULTINODE, tmp_path / "project")
        words = ["bash", "-c", command]
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, (command, run.stderr)
    assert (tmp_path / "sites" / "systems.md").read_text() == page.PAGE.read_text()
