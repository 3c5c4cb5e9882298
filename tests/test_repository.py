"""The checks themselves: that each can fail, and that what the documents say is what runs."""

import ast
import contextlib
import difflib
import io
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import torch
import yaml

from tests.harness import outputs, readme, refusals, runs
from tests.harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from tests.harness.processes import clean_environment


def nox(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run nox in a copy of the repository."""
    command = [sys.executable, "-m", "nox", "--non-interactive", *arguments]
    environment = clean_environment() | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=120)


def test_sync(tmp_path: Path) -> None:
    """`nox -s sync` fails on a changed, a missing and an extra file, names them, and --fix corrects them."""
    for name in ("common", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("output", "data", ".venv"))
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    assert nox(tmp_path, "-s", "sync").returncode == 0
    copy = tmp_path / "examples" / EXAMPLES[0] / "common"
    (copy / "models.py").write_text((copy / "models.py").read_text() + "\n")
    (copy / "digits.npz").unlink()
    (copy / "extra.py").touch()
    without_torch = "horovod_tensorflow/common/models.py"  # that one has the data file only
    (tmp_path / "examples" / without_torch).write_text((ROOT / "common" / "models.py").read_text())
    failed = nox(tmp_path, "-s", "sync")
    assert failed.returncode != 0
    assert all(f"{EXAMPLES[0]}/common/{name}" in failed.stderr for name in ("models.py", "digits.npz", "extra.py"))
    assert without_torch in failed.stderr
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


def anchors(document: Path) -> set[str]:
    """Return the names under which the titles of a document can be linked to."""
    titles = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def check_links(document: Path) -> int:
    """Check that local links lead to what exists, and the others begin with https; return how many are local."""
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
    return len(local)


@pytest.mark.parametrize("document", readme.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    """Links in the repository lead to what exists, the others begin with https; an example has none that leaves it."""
    assert check_links(document) or document.parent != ROOT


def test_links_can_fail(tmp_path: Path) -> None:
    """A file or a title that is not there, http, and a name that is not defined are each noticed."""
    document = tmp_path / "README.md"
    good = "# A title\n[a](#a-title) [b](README.md) [c][d]\n\n[d]: https://example.org\n"
    document.write_text(good)
    assert check_links(document) == 2
    for old, new in (("#a-title", "#title"), ("README.md", "none.md"), ("https", "http"), ("[d]:", "[e]:")):
        document.write_text(good.replace(old, new))
        with pytest.raises(AssertionError):
            check_links(document)


def check_sites(text: str) -> None:
    """Check that each system's sheet has the seven facts, and each that is stated a link to where it was read."""
    sheets = re.findall(r"^\| fact \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(sheets) >= 12
    for sheet in sheets:
        rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in sheet.splitlines()]
        names = [row[0] for row in rows]
        assert names == ["header", "environment", "wheel", "network", "MPI", "local disk", "internet"], names
        assert all("](" in row[2] or "][" in row[2] for row in rows if not row[1].startswith("not found")), rows


def test_sites() -> None:
    """The sheets are complete; one without its sources, or without a fact, is noticed."""
    text = (ROOT / "sites" / "README.md").read_text()
    check_sites(text)
    no_source = re.sub(r"^(\| header \|.*\|).*\|$", r"\1 |", text, flags=re.MULTILINE)
    for bad in (no_source, text.replace("\n| MPI |", "\n| x |", 1)):
        with pytest.raises(AssertionError):
            check_sites(bad)


def test_hosted_workflow() -> None:
    """The hosted workflow has a job for each example, and one for the rest."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["checks"]["strategy"]["matrix"]["part"] == [*EXAMPLES, "rest"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_run_slurm_header(name: str) -> None:
    """run.slurm has no line that sbatch would ignore, and no value that stands for another place."""
    lines = (ROOT / "examples" / name / "run.slurm").read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and 40 <= len(lines) <= 131
    rulers = [line.split()[2] for line in lines if line.startswith("# ---- ")]
    assert rulers == ["1", "2", "3"]
    assert not [line for line in lines if re.match(r"#+\s+SBATCH|\s+#SBATCH", line)]
    options = {line.split()[1].split("=")[0] for line in lines if line.startswith("#SBATCH ")}
    assert options >= {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--requeue", "--signal", "--output"}
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]


RULER = "# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----"
# The most lines above the ruler and in the whole file, and the line by which training begins.
BOUNDS = {"ddp_spawn": (190, 487, 110), "deepspeed": (206, 488, 120)}
BOUNDS |= {"horovod_cpu": (205, 480, 110), "lightning": (212, 438, 110), "torchrun_multinode": (205, 536, 110)}
BOUNDS |= {"horovod_lightning": (265, 483, 110), "horovod_tensorflow": (205, 411, 110)}  # the first has the strategy
BOUNDS |= {"fsdp": (298, 699, 110)}  # two ways to divide a model, its initial values, the norm of its gradients
BOUNDS |= {"torchrun_vision": (275, 730, 110)}  # loaders, schedule, accuracy, all of which are its lesson
BOUNDS |= {"lora": (230, 615, 110)}  # the adapters, and the checks of a model that the user brings
# Functions below the ruler that differ from ddp_spawn's, and why.
DIFFERENT = {
    "deepspeed": {
        "check_args": "its launcher and its own arguments",
        "prepare_process": "DeepSpeed has to be set up",
        "load_data": "the config file has the number of batches in a step",
        "resume_settings": "the engine knows them",
        "read_checkpoint": "the checkpoint is a folder of shards",
        "broadcast_checkpoint": "reading needs the engine",
        "save_checkpoint": "all processes write shards",
        "print_header": "the config file and the nodes",
        "shut_down": "its tag",
    },
    "fsdp": {
        "check_args": "its launcher and its own arguments",
        "prepare_process": "signals, and other warnings",
        "load_data": "text, and several batches in a step",
        "resume_settings": "its own arguments",
        "read_checkpoint": "the checkpoint is a folder of shards",
        "broadcast_checkpoint": "all processes look for damaged shards",
        "save_checkpoint": "all processes write shards, in the background",
        "print_header": "the text, the mesh, and the position within an epoch",
        "print_epoch": "tokens, and the share of the peak",
    },
    "horovod_cpu": {
        "check_args": "its own arguments",
        "prepare_process": "Horovod has to be set up, instead of torch.distributed",
        "load_data": "all processes are connected by then",
        "resume_settings": "train_lm.py uses it, too",
        "save_checkpoint": "the watchdog",
        "print_header": "Horovod knows ranks and nodes, and train_lm.py uses it, too",
        "print_epoch": "Horovod knows the rank",
        "make_profiler": "all processes are connected by then",
        "report_profile": "Horovod instead of torch.distributed",
        "shares_of_a_step": "Horovod's exchange has no name: the optimizer waits for it",
        "print_usage": "Horovod instead of torch.distributed, no GPUs, and train_lm.py uses it, too",
        "shut_down": "Horovod instead of torch.distributed",
    },
    "horovod_lightning": {
        "check_args": "its own arguments",
        "prepare_process": "Horovod and Lightning have to be set up, instead of torch.distributed",
        "load_data": "all processes are connected by then, and several batches in a step",
        "resume_settings": "its own arguments",
        "read_checkpoint": "the file has another name",
        "broadcast_checkpoint": "Lightning broadcasts",
        "save_checkpoint": "Lightning saves",
        "print_header": "Horovod knows ranks and nodes",
        "print_epoch": "Horovod knows the rank",
        "print_usage": "Horovod instead of torch.distributed, and no GPUs",
        "shut_down": "Horovod instead of torch.distributed",
    },
    "horovod_tensorflow": {
        "check_args": "no GPUs",
        "prepare_process": "Horovod has to be set up, instead of torch.distributed",
        "load_data": "all processes are connected by then",
        "read_checkpoint": "NumPy's format instead of PyTorch's",
        "write": "Keras wants a file name that ends in .keras",
        "save_checkpoint": "NumPy's format instead of PyTorch's",
        "print_header": "Horovod knows ranks and nodes",
        "print_epoch": "Horovod knows the rank",
        "print_usage": "Horovod instead of torch.distributed, and no GPUs",
        "shut_down": "Horovod instead of torch.distributed",
    },
    "lightning": {
        "check_args": "the number of tasks",
        "prepare_process": "Lightning has to be set up",
        "read_checkpoint": "the file has another name",
        "broadcast_checkpoint": "Lightning broadcasts",
        "save_checkpoint": "Lightning saves",
        "print_header": "Lightning knows the device",
    },
    "lora": {
        "check_args": "its launcher and its own arguments",
        "prepare_process": "signals, and what transformers prints",
        "load_data": "a text and its tokenizer, and several batches in a step",
        "fix_summation_order": "the model returns its logits as a field",
        "resume_settings": "its own arguments, and the base model",
        "save_checkpoint": "the position within an epoch, and the adapters only",
        "print_header": "the model, what is exchanged, nodes, and the position within an epoch",
        "print_epoch": "perplexity and tokens",
    },
    "torchrun_multinode": {
        "check_args": "its launcher and its own arguments",
        "prepare_process": "signals",
        "load_data": "several batches in a step",
        "resume_settings": "several batches in a step",
        "save_checkpoint": "the position within an epoch",
        "print_header": "nodes, and the position within an epoch",
    },
    "torchrun_vision": {
        "check_args": "its launcher and its own arguments",
        "prepare_process": "signals, and other warnings",
        "load_data": "image files, and several batches in a step",
        "resume_settings": "its own arguments",
        "save_checkpoint": "the position within an epoch, the schedule and the scaler",
        "print_header": "the images, nodes, and the position within an epoch",
        "print_usage": "loader workers",
    },
}


def train_py(name: str) -> str:
    """Return the text of an example's train.py."""
    return (ROOT / "examples" / name / "train.py").read_text()


def halves(text: str) -> list[str]:
    """Return what stands above and below the ruler; raise AssertionError unless there is exactly one ruler."""
    parts = text.split(f"\n{RULER}\n")
    assert len(parts) == 2
    return parts


def lesson(text: str) -> str:
    """Return what stands above the ruler."""
    return halves(text)[0]


def functions(text: str) -> dict[str, str]:
    """Return the text of each function of a program, those in classes included."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def assert_readable(text: str, most_above: int, most: int, training_by: int) -> None:
    """Check that training begins early, that the lesson is short, and that functions and comments are, too."""
    lines = text.splitlines()
    assert len(lesson(text).splitlines()) <= most_above and len(lines) <= most
    starts = [i for i, line in enumerate(lines, 1) if re.match(r" *def (train_one_epoch|training_step)\(", line)]
    assert len(starts) == 1 and starts[0] < training_by
    too_long = {name: len(body.splitlines()) for name, body in functions(text).items() if body.count("\n") >= 50}
    assert not too_long
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    assert 0.08 <= len(commented) / len(lines) <= 0.15
    assert not re.search(r"# \w+:\s*$", text, re.MULTILINE), "a tag without words"


@pytest.mark.parametrize("name", EXAMPLES)
def test_lesson_first(name: str) -> None:
    """What a student has to read stands above the ruler, and is short."""
    assert_readable(train_py(name), *BOUNDS[name])


def test_keeps_memory() -> None:
    """Freed blocks of 64 MB stay with the process; without keep_memory() each comes anew, at a page fault per page.

    Each example calls it at its start; that it is the same text in all, another test holds.
    """
    found = {name: functions(train_py(name)) for name in EXAMPLES}
    assert all("    keep_memory()\n" in texts["prepare_process"] and "keep_memory" in texts for texts in found.values())
    faults = []
    for function in (found["ddp_spawn"]["keep_memory"], "def keep_memory():\n    pass"):
        program = f"import ctypes, resource\n{function}\nkeep_memory()\n" + (
            "libc = ctypes.CDLL(None)\n"
            "libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]\n"
            "libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]\n"
            "faults = []\n"
            "for _ in range(10):\n"
            "    block = libc.malloc(2**26)\n"
            "    ctypes.memset(block, 1, 2**26)\n"
            "    libc.free(block)\n"
            "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
            "print(faults[-1] - faults[0])\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        faults.append(int(done.stdout))
    assert faults[0] < 50 < 9 * 32 <= faults[1]  # 64 MB are 16,384 pages, or 32 huge ones


def test_lesson_first_can_fail() -> None:
    """A missing ruler, late training, a long function and a tag without words are each noticed."""
    text, bounds = train_py("ddp_spawn"), BOUNDS["ddp_spawn"]
    assert_readable(text, *bounds)
    long_main = text.replace("    # Train\n", "    # Train\n" + "    print()\n" * 5)
    late = text.replace("\n\n\ndef setup", "\n" * 40 + "def setup")
    bare = text.replace("# ddp: sum over all processes", "# ddp:", 1)
    for bad in (text.replace(RULER, ""), long_main, late, bare):
        with pytest.raises(AssertionError):
            assert_readable(bad, *bounds)


def changed_lines(one: str, other: str) -> int:
    """Return how many lines `diff` shows of two texts, removed and added ones together."""
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(one.splitlines(), other.splitlines(), n=0))[2:])


def test_diff_shows_the_launcher() -> None:
    """Above the ruler, ddp_spawn and torchrun_multinode differ in at most 90 lines."""
    assert 40 < changed_lines(lesson(train_py("ddp_spawn")), lesson(train_py("torchrun_multinode"))) <= 90


def test_same_learning_rate() -> None:
    """The function that scales and warms up the learning rate is the same text in all; fsdp counts groups."""
    found = [functions(lesson(train_py(name)))["learning_rate"] for name in EXAMPLES]
    assert {text.replace("args.groups", "args.world_size") for text in found} == {found[0]}


def test_diff_can_fail() -> None:
    """A changed line counts twice, as removed and added, and an added one once."""
    assert changed_lines("a\nb\n", "a\nc\nd\n") == 3 and changed_lines("a\n", "a\n") == 0


def other_texts(text: str, model: str) -> set[str]:
    """Return the names of the functions below the ruler that `model` has, too, with another text."""
    tails = [functions(halves(part)[1]) for part in (text, model)]
    return {name for name in tails[0].keys() & tails[1].keys() if tails[0][name] != tails[1][name]}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "ddp_spawn"])
def test_same_text_below_the_ruler(name: str) -> None:
    """Below the ruler, what ddp_spawn has, too, is the same text, except for the functions listed above."""
    assert other_texts(train_py(name), train_py("ddp_spawn")) == DIFFERENT[name].keys()


def test_same_text_can_fail() -> None:
    """One changed character in a function below the ruler is noticed, and one above it is not."""
    model = train_py("ddp_spawn")
    assert other_texts(model.replace("os.fsync", "os.fdatasync"), model) == {"write"}
    assert other_texts(model.replace("model.eval()", "model.train()", 1), model) == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_link_leaves_the_folder(name: str) -> None:
    """After `cp -r` no link of an example's README is dead: it points to the web, or into the folder."""
    folder = ROOT / "examples" / name
    text = (folder / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert any(link.startswith("https://") for link in links), "no link to any documentation"
    assert all(link.startswith("https://") or (folder / link).exists() for link in links), links
    assert "../" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)


SAME_IN_ALL = [
    r"^export IMAGE=.*?^export -f in_image",
    r"^job=.*?(?=^checkpoint=)",
    r"^requeue\(\) {.*?^}\nwait_for\(\) {.*?^}\n",
    r"^step=.*?(?=^\[\[)",
    r"^exit .*",
]


@pytest.mark.parametrize("part", SAME_IN_ALL)
def test_same_text_in_run_slurm(part: str) -> None:
    """What decides on the image, on a requeue and on the job's status is the same text in every run.slurm."""
    scripts = [(ROOT / "examples" / name / "run.slurm").read_text() for name in EXAMPLES]
    found = [re.findall(part, script, re.MULTILINE | re.DOTALL) for script in scripts]
    assert all(len(texts) == 1 for texts in found) and len({texts[0] for texts in found}) == 1, found


@pytest.mark.parametrize("name", ["in_image", "wait_for"])
def test_same_functions_in_jupyter(name: str) -> None:
    """jupyter/run.slurm enters an image, and waits in spite of signals, by the functions that the examples have."""
    function = re.compile(rf"^{name}\(\) {{.*?^}}$", re.MULTILINE | re.DOTALL)
    one, other = (function.findall((ROOT / place / "run.slurm").read_text()) for place in ("jupyter", "examples/lora"))
    assert len(one) == 1 and one == other


def check_definition(name: str, text: str) -> None:
    """Check that a container.def is short, and has all lines of ddp_spawn's, in their order."""
    lines, model = text.splitlines(), (ROOT / "examples" / "ddp_spawn" / "container.def").read_text().splitlines()
    assert len(lines) <= 30 and [line for line in lines if line in model] == model, name
    files = re.findall(r"^    (\S+[.]\w+) /opt/", text, re.MULTILINE)
    assert "requirements.txt" in files and all((ROOT / "examples" / name / file).exists() for file in files), name


@pytest.mark.parametrize("name", EXAMPLES)
def test_container_definitions(name: str) -> None:
    """Each container.def is ddp_spawn's with what else an example has to install; other changes are noticed."""
    text = (ROOT / "examples" / name / "container.def").read_text()
    check_definition(name, text)
    missing = text.replace("    req", "    none.txt /opt/none.txt\n    req", 1)
    for bad in (text + "\n" * 9, text.replace("%post", "%setup"), missing):
        with pytest.raises(AssertionError):
            check_definition(name, bad)


def test_environment_of_its_own() -> None:
    """`nox -s bench` asks for the environment of an example that cannot share the others', and refuses what is none."""
    measure = [sys.executable, "-m", "benchmarks.measure", "throughput", "--examples", "horovod_tensorflow"]
    for words, text in (((), "--venv horovod_tensorflow=FOLDER"), (("--venv", "horovod_tensorflow=/"), "NAME=FOLDER")):
        done = subprocess.run([*measure, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and text in done.stderr.splitlines()[-1], done.stderr


def test_same_install_sh() -> None:
    """The examples of Horovod install it by the same script; for TensorFlow some lines of it differ."""
    scripts = [path.read_text() for path in sorted(ROOT.glob("examples/*/install.sh"))]
    of_cpu, of_lightning, of_tensorflow = scripts
    assert of_lightning == of_cpu and changed_lines(of_cpu, of_tensorflow) <= 50
    change = re.search(r"^change\(\) .*?^}\n", of_cpu, re.MULTILINE | re.DOTALL)[0]
    assert change in of_tensorflow


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
