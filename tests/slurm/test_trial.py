"""preflight/trial.slurm on the lab: a good trial, and trials of clusters with faults, each of which the report names.

A program without PyTorch stands in the place of the examples' train.py, but for a weekly trial with the real ones.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness import edits, outputs, readme
from harness.jobs import SETTINGS, hand_over, on_this_machine_only, sbatch
from harness.launchers import ROOT, copy_example
from harness.processes import wait_until
from lab import Lab, Wanted, faults, why_not
from tests.repo.test_preflight import write_light

pytestmark = [pytest.mark.slurm]
needs_lab = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
EXAMPLES = ("srun_multinode", "ddp_spawn")
# It writes what a run writes; its losses do not depend on the number of processes, and its model on nothing but the
# number of epochs. Every process says first where it is; the others wait for rank 0.
STUB = r"""
import json, os, pathlib, sys, time
words = sys.argv
output = pathlib.Path(words[words.index("--output-dir") + 1])
epochs, start = int(words[words.index("--epochs") + 1]), os.environ.get("SLURM_RESTART_COUNT", "0")
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
here = [rank] if "RANK" in os.environ else [0, 1]
world = world if "RANK" in os.environ else 2
(output / f"part-{rank}").write_text(json.dumps([os.uname().nodename, here]))
(output / f"part-{rank}").rename(output / f"here-{start}-{rank}")
over, checkpoint = output / f"over-{start}", output / "checkpoint.pt"
while rank and not over.exists():
    time.sleep(0.05)
if rank:
    sys.exit()
while len(known := list(output.glob(f"here-{start}-*"))) < (world if "RANK" in os.environ else 1):
    time.sleep(0.05)
ranks = {}
for host, numbers in (json.loads(path.read_text()) for path in known):
    ranks.setdefault(host, []).extend(numbers)
rows = json.loads(checkpoint.read_text()) if checkpoint.exists() else []  # FAULT: what is read
(output / "run.json").write_text(json.dumps({"starts": [{"step": 11 * len(rows), "ranks": ranks}]}))
columns = ["epoch", "train_loss", "test_loss", "test_accuracy", "samples_per_second", "world_size"]
for epoch in range(len(rows) + 1, epochs + 1):
    time.sleep(0.1)
    loss = 2 / epoch  # FAULT: the loss
    rows.append([epoch, loss, loss, 0.9, 1000 * world, world])
    text = "\n".join(",".join(map(str, row)) for row in [columns, *rows])
    for name, text in {"metrics.csv": text, "checkpoint.pt": json.dumps(rows)}.items():
        (output / "part").write_text(text)
        (output / "part").rename(output / name)
    if os.path.exists(os.environ.get("STOP_FILE", "")):
        (output / "stopped").touch()
        break
else:
    (output / "model.pt").write_text(str(rows[-1][:3]))
over.touch()
"""


def copy_repository(folder: Path, *examples: str) -> Path:
    """Copy what a trial needs of the repository: preflight, and these examples."""
    shutil.copytree(ROOT / "preflight", folder / "preflight", ignore=shutil.ignore_patterns("*.out", "__pycache__"))
    for name in examples:
        copy_example(ROOT / "examples" / name, folder / "examples" / name)
    return folder


def with_stub(folder: Path) -> Path:
    """Copy what a trial needs, with the stub in two examples, and with one that VENV cannot run."""
    copy_repository(folder, *EXAMPLES, "horovod_cpu")
    for name in EXAMPLES:
        (folder / "examples" / name / "train.py").write_text(STUB)
    return folder


class Place:
    """A lab, and a folder that its nodes share, with a copy of the repository and an environment without PyTorch."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        write_light(folder / "light", folder / "tools")

    def submit(self, repository: Path, *options: str, venv: str | Path = "", **variables: str) -> str:
        """Submit a trial by the page's line; return the job's id."""
        changes = {"~/project/.venv": venv or self.folder / "light"}
        words = sbatch(
            readme.command("preflight/README.md", "... trial.slurm", changes), ["--cpus-per-task=2", *options]
        )
        hand_over(self.folder, self.lab)
        return self.lab.run(words, cwd=repository / "preflight", env=variables, check=True).stdout.strip()

    def finish(self, repository: Path, job: str) -> tuple[dict[str, dict], str, dict[str, str]]:
        """Wait for a trial; return the rows of its report by check, its text, and what SLURM says of the job."""
        info = self.lab.wait_for_job(job, seconds=600)
        print((repository / "preflight" / f"trial-{job}.out").read_text())
        text = (repository / "preflight" / f"trial-{job}.txt").read_text()
        print(text)
        assert len(text.splitlines()) <= 150
        assert_no_names(text, self, info)
        return rows_of(text), text, info


def rows_of(text: str) -> dict[str, dict]:
    """Return the rows of a report by check."""
    return {row["check"]: row for row in json.loads(text.partition("The same as data:\n")[2])["rows"]}


def assert_no_names(text: str, place: Place, info: dict[str, str]) -> None:
    """Check that nothing stands in a report that says whose it is, or where."""
    names = [place.lab.user, place.lab.home, str(place.folder), place.lab.folder.name.removeprefix("slurm-")]
    names += [info["Partition"], "cluster.example", *place.lab.addresses.values(), os.uname().nodename]
    assert {name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)} == set()


def make(name: str, **settings: Any) -> Iterator[Place]:
    """Start a lab of two nodes, with fully qualified names."""
    folder = Path(tempfile.mkdtemp(prefix="trial-"))
    share = [folder, *on_this_machine_only(Path(sys.prefix), Path(sys.base_prefix))]
    try:
        with Lab(Wanted(2, 4, name=f"{name}{os.getpid()}", share=share, domain="cluster.example", **settings)) as lab:
            yield Place(lab, folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A healthy cluster."""
    yield from make("trial")


@pytest.fixture
def badly_named() -> Iterator[Place]:
    """A cluster whose first node resolves its own name to a loopback address."""
    yield from make("trialnames", hosts={"node1": {"node1": "127.0.1.1"}})


@pytest.fixture
def trial() -> ModuleType:
    """The module trial of preflight/."""
    return outputs.import_file(ROOT / "preflight" / "trial.py")


@needs_lab
def test_good_trial(place: Place) -> None:
    """All that is promised is tried, and said in a report without names; a page draws it."""
    repository = with_stub(place.folder / "good")
    other = {"SLURM_MEM_PER_CPU": "100"}  # of an interactive job in which somebody submits this one
    job = place.submit(repository, "--mem=1000", **other)
    rows, text, info = place.finish(repository, job)
    states = {name: row["state"] for name, row in rows.items() if not name.startswith("preflight ")}
    assert states == {
        "srun_multinode, 2-nodes": "ok",
        "srun_multinode, 1-node": "ok",
        "srun_multinode, 1-process": "ok",
        "kill and resume": "ok",
        "notice before the time limit": "ok",
        "ddp_spawn, 1-node": "ok",
        "horovod_cpu": "left out",
        "requeue": "ok",
    }, text
    assert rows["horovod_cpu"]["result"] == "VENV has no horovod.torch"
    assert {row["state"] for name, row in rows.items() if name.startswith("preflight ")} == {"ok"}, text
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1")
    for name in ("kill and resume", "notice before the time limit"):
        assert "to the bits of the undisturbed run" in rows[name]["result"]
    speeds = (
        "samples/s of a small model: 1-process 1000 (1.00 times), 1-node 2000 (2.00 times), 2-nodes 4000 (4.00 times)"
    )
    assert speeds in text
    line = readme.command("preflight/README.md", "python trial.py --draw trial-JOBID.txt", {"JOBID": job})
    done = subprocess.run(line.split(), cwd=repository / "preflight", capture_output=True, text=True, timeout=300)
    page = (repository / "preflight" / f"trial-{job}.html").read_text()
    assert done.returncode == 0 and page.count("<rect") == 3 and page.count("<tr") == len(rows), done
    assert_no_names(page, place, info)


@needs_lab
def test_faults(badly_named: Place) -> None:
    """Loopback names, a forbidden requeue, a lost checkpoint, wrong numbers, an error: the report names each."""
    repository = with_stub(badly_named.folder / "faulty")
    stub = repository / "examples" / "srun_multinode" / "train.py"
    edits.edit(stub, "json.loads(checkpoint.read_text()) if checkpoint.exists() else []", "[]")
    edits.edit(stub, "loss = 2 / epoch", "loss = 2 / epoch + world / 40")  # a gradient that is not averaged over nodes
    stub = repository / "examples" / "ddp_spawn" / "train.py"
    edits.edit(stub, "import json", "sys = __import__('sys'); sys.exit(f'Error: {__file__} not for user') #")
    rows, text, info = badly_named.finish(repository, badly_named.submit(repository, "--no-requeue"))
    states = {name: row["state"] for name, row in rows.items() if row["state"] != "ok"}
    assert states == {
        "preflight names": "FAIL",
        "srun_multinode, 1-node": "FAIL",
        "srun_multinode, 1-process": "FAIL",
        "kill and resume": "FAIL",
        "notice before the time limit": "FAIL",
        "ddp_spawn, 1-node": "FAIL",
        "horovod_cpu": "left out",
        "requeue": "WARN",
    }, text
    assert "node1 is 127.0.1.1" in rows["preflight names"]["result"]
    assert "a step is not the same there" in rows["srun_multinode, 1-node"]["result"]
    assert "began anew" in rows["kill and resume"]["result"]
    assert any("train.py not for user" in line for line in rows["ddp_spawn, 1-node"]["log"])
    assert "disabled" in rows["requeue"]["log"][0], "SLURM's words"
    assert (info["JobState"], info["Restarts"]) == ("FAILED", "0")


@needs_lab
def test_asked_to_end(place: Place) -> None:
    """Near its time limit a trial ends its step, whose tasks end too, and names what it has left out."""
    repository = with_stub(place.folder / "long")
    edits.edit(repository / "examples" / "srun_multinode" / "train.py", "time.sleep(0.1)", "time.sleep(100)")
    job = place.submit(repository)
    log = repository / "preflight" / f"trial-{job}" / "srun_multinode" / "output" / "2-nodes" / "here-0-0"
    wait_until(log.exists, 300, "the first run")
    faults.timelimit(place.lab, job)
    rows, text, info = place.finish(repository, job)
    left = {row["result"] for name, row in rows.items() if not name.startswith("preflight ")}
    assert left == {"SLURM has asked the job to end", "VENV has no horovod.torch"} and "requeue" in rows, text
    assert info["Restarts"] == "0"
    assert not place.lab.run(["squeue", "--noheader", "--steps"], cwd="/").stdout


def test_no_names(trial: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, paths and addresses are replaced wherever they stand; what only looks like them stays."""
    said = {"USER": "jane", "HOME": "/home/jane", "SLURM_JOB_ACCOUNT": "p-12", "SLURM_JOB_PARTITION": "fast"}
    said |= {
        "SLURM_CLUSTER_NAME": "orion",
        "SLURM_SUBMIT_HOST": "login3.orion.example",
        "VENV": "/proj/p-12/jane/.venv",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    clean = trial.cleaner(trial.known_names(["cn-007", "cn-008"]))
    for text, cleaned in {
        "cn-007.orion.example: cannot reach cn-008 (10.3.4.5:1234)": "node1.DOMAIN: cannot reach node2 (ADDRESS:1234)",
        "ctl at cn-123, login7.orion.example": "ctl at NODE, NODE",
        "no /proj/p-12/jane/.venv/bin/python for jane_dft, breakfast": "no ... for USER_dft, breakfast",
        "'/scratch/jane/a b', ~/x/y.py": "'...', .../y.py",
        "/scratch/smith-cancer, '/scratch/Jane Doe/x y.py', /x/Jane Doe/y.pt is": "..., '.../x y.py', .../y.pt is",
        "PYTHONPATH=/a/b:/home/jane/secret, nfs:/export/labs/x": "PYTHONPATH=...:..., nfs:...",
        "bind /data/p:/data/q, file:///scratch/x/y.pt, -I/opt/x": "bind ...:..., file:.../y.pt, -I...",
        "$HOME/x/j.doe, ~doe/z, 2001:db8::1, [fe80::1]:9": "..., ..., ADDRESS, [ADDRESS]:9",
        "fe80::1ff:fe23:4567:890a, aa:bb:cc:dd:ee:ff at 12:30:45": "ADDRESS, ADDRESS at 12:30:45",
        "mail jane@orion.example on fast of p-12": "mail EMAIL on PARTITION of ACCOUNT",
        "127.0.1.1, 4 MB/s, 3/4 or and/or, https://pytorch.org": "127.0.1.1, 4 MB/s, 3/4 or and/or, https://pytorch.org",
    }.items():
        assert clean([{"log": text}])[0]["log"] == cleaned


def test_names_like_the_stand_ins(trial: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a report is written, hosts that are called node2 and node3 are its node1 and node2."""
    monkeypatch.setattr(trial, "describe", lambda *_: "a cluster")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "ok")
    job = trial.Trial("1", ["node2", "node3"], 4, 0, 0, tmp_path / "trial-1")
    job.work.mkdir()
    job.rows = [trial.row("one", "ok", "node2 is slower than node3")]
    for _ in range(3):
        job.write([])
    assert rows_of((tmp_path / "trial-1.txt").read_text())["one"]["result"] == "node1 is slower than node2"
    assert rows_of((tmp_path / "trial-1.txt").read_text())["one"]["state"] == "ok"


RIGHT = {"epoch": [1, 2, 3, 4], "train_loss": [2, 1, 0.5, 0.4], "test_accuracy": [0.3, 0.6, 0.7, 0.8]}
RIGHT |= {"world_size": [2, 2, 2, 2]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"epoch": [1, 2, 4, 5]}, "has not the epochs"),
        ({"train_loss": [2, 1, float("nan"), 0.4]}, "epoch 3 says"),
        ({"train_loss": [0.4, 1, 0.5, 0.4]}, "has not learnt"),
        ({"test_accuracy": [0.3, 0.6, 0.7, 1.1]}, "epoch 4 says"),
        ({"test_accuracy": [0.3, 0.1, 0.1, 0.1]}, "has not learnt"),
        ({"world_size": [1, 1, 1, 1]}, "epoch 1 says"),
    ],
)
def test_figures_that_cannot_be_right(
    trial: ModuleType, tmp_path: Path, changes: dict[str, list[float]], problem: str
) -> None:
    """What metrics.csv says is judged."""
    output = tmp_path / "ddp_spawn" / "output" / "1-node"
    output.mkdir(parents=True)
    columns = RIGHT | changes
    with open(output / "metrics.csv", "w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    (output / "run.json").write_text(json.dumps({"starts": [{"ranks": {"a": [0, 1]}}]}))
    job = trial.Trial("1", ["a"], 4, 0, 0, tmp_path)
    found = trial.wrong(job, output, 1, 2)
    assert problem in found and bool(problem) == bool(found)
    (output / "run.json").write_text(json.dumps({"starts": [{"ranks": {"a": [0], "b": [1]}}]}))
    assert trial.wrong(job, output, 1, 2)


@pytest.mark.parametrize(
    ("gpus", "nodes", "processes", "tasks", "numbers"),
    [
        (0, 2, 2, 2, ("4", "2(x2)", "4", "0")),  # srun_multinode
        (0, 2, 2, 1, ("2", "1(x2)", "8", "0")),  # torchrun_multinode
        (0, 1, 2, 1, ("1", "1", "8", "0")),  # ddp_spawn
        (0, 1, 1, 1, ("1", "1", "4", "0")),  # one process has the cores that it has beside others
        (4, 2, 4, 4, ("8", "4(x2)", "2", "4")),
        (4, 2, 4, 1, ("2", "1(x2)", "8", "4")),
        (4, 1, 1, 1, ("1", "1", "2", "1")),
        (1, 1, 1, 1, ("1", "1", "8", "1")),
    ],
)
def test_steps_as_jobs(
    trial: ModuleType, tmp_path: Path, gpus: int, nodes: int, processes: int, tasks: int, numbers: tuple[str, ...]
) -> None:
    """A run.slurm sees the numbers of a job of its own: tasks, cores and GPUs."""
    job = trial.Trial("1", ["a", "b"], 8, gpus, 0, tmp_path)
    env = trial.environment(job, tmp_path, nodes, processes, tasks, 0)
    names = ("NTASKS", "TASKS_PER_NODE", "CPUS_PER_TASK", "GPUS_ON_NODE")
    assert tuple(env[f"SLURM_{name}"] for name in names) == numbers
    assert (env["SLURM_JOB_NUM_NODES"], env["SLURM_JOB_NODELIST"]) == (str(nodes), "a,b" if nodes == 2 else "a")


def test_whole_nodes(trial: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole nodes, which have more GPUs, a job counts those that it has asked for, since its steps get no others."""
    monkeypatch.chdir(tmp_path)
    variables = {"JOB_ID": "1", "JOB_NODELIST": "a", "GPUS_ON_NODE": "4", "CPUS_PER_TASK": "4", "RESTART_COUNT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = {}
    for asked in ("TresPerNode=gres:gpu:a100:2", "TresPerNode=gres/gpu:2", "TresPerTask=cpu=4"):
        shown = f"JobId=1 JobName=x\n   EndTime=1793514600 Deadline=N/A\n   {asked}\n   WorkDir=/gpu:1\n"
        monkeypatch.setattr(trial, "ask", lambda *_, shown=shown: shown)
        job = trial.read_job()
        found[asked] = job.gpus
        assert job.end == 1793514600 - trial.RESERVE
        (tmp_path / "trial-1").rmdir()
    assert list(found.values()) == [2, 2, 4], found


def test_time_that_is_left(trial: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is begun if what is left is enough for the longest so far; the requeue comes in any case, once."""
    monkeypatch.setattr(trial, "describe", lambda *_: "a cluster")
    done = []

    def step(name: str) -> list[dict]:
        done.append(name)
        return [trial.row(name, "ok", "", seconds=50)]

    names = ("one", "two", "three", "requeue")
    monkeypatch.setattr(trial, "steps", lambda _: [(name, lambda name=name: step(name)) for name in names])
    job = trial.Trial("1", ["a", "b"], 4, 0, time.time() + 60, tmp_path / "trial-1")
    job.work.mkdir()
    trial.work(job)
    assert done == ["one", "requeue"]
    rows = rows_of((tmp_path / "trial-1.txt").read_text())
    assert [row["state"] for row in rows.values()] == ["ok", "left out", "left out", "ok"]
    assert rows["two"]["result"] == "60 s were left, a run may need 65 s"
    trial.work(job)  # as after a requeue
    assert done == ["one", "requeue"]
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert trial.ask("printenv", "SLURM_TIME_FORMAT") == "%s\n", "in which the end of the job is read"


def test_started_otherwise() -> None:
    """Outside of a job it ends with one line."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    words = [sys.executable, str(ROOT / "preflight" / "trial.py")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr == "trial.py: error: this is not a SLURM job; submit it: sbatch trial.slurm\n"


def test_draw_another_file(tmp_path: Path) -> None:
    """What is no report is refused with one line."""
    for text in ("", "The same as data:\n{}\n"):
        (tmp_path / "trial-1.txt").write_text(text)
        words = [sys.executable, str(ROOT / "preflight" / "trial.py"), "--draw", str(tmp_path / "trial-1.txt")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and done.stderr.startswith("trial.py: error: ") and done.stderr.count("\n") == 1


@needs_lab
@pytest.mark.runs("weekly")
@pytest.mark.timeout(1200)
def test_real_trial(place: Place) -> None:
    """The examples themselves train, with PyTorch: the same bits after a kill and a notice, and speeds."""
    examples = ("srun_multinode", "torchrun_multinode", "ddp_spawn")
    repository = copy_repository(place.folder / "real", *examples)
    rows, text, info = place.finish(repository, place.submit(repository, venv=sys.prefix, **SETTINGS))
    assert {row["state"] for row in rows.values()} <= {"ok", "WARN"}, text
    assert {f"{name}, 1-node" for name in examples} <= set(rows)
    for name in ("kill and resume", "notice before the time limit"):
        assert re.fullmatch(r"continued after step \d+, to the bits of the undisturbed run", rows[name]["result"]), text
    found = [re.search(r"first losses differ by ([\d.]+)%", row["result"]) for row in rows.values()]
    shares = [float(one[1]) for one in found if one]
    assert len(shares) == 3 and max(shares) < 0.1, "a tenth of what is permitted"
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1")
