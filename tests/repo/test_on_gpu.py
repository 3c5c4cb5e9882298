"""benchmarks/on_gpu.py: steps that end at their limit, results that are whole at any moment, and the table of them."""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_checks, gpu_figures, gpu_peers, gpu_steps, gpu_table, on_gpu
from benchmarks.gpu_steps import FAILED, LEFT_OUT, MEASURED, Results, Step
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT
from harness.processes import finish, wait_until

EMPTY: dict[str, str] = {}


def bench(folder: Path, **changes: Any) -> gpu_figures.Bench:
    """Return what the steps share, for a machine that is none."""
    given: dict[str, Any] = {"sizes": gpu_figures.FULL, "seconds": 5, "tiny": False}
    given |= {"peak": 989.4, "gpus": 1, "processes": 1}
    return gpu_figures.Bench(out=folder, work=folder, programs=folder, variables={}, cores=16, **(given | changes))


def test_step_over_its_limit(tmp_path: Path) -> None:
    """It is ended with all that it has started, also in another process group, and has a row that says so."""
    script = "import subprocess, time; subprocess.Popen(['sleep', '987'], start_new_session=True); time.sleep(987)"

    def run(limit: float) -> list[gpu_steps.Row]:
        done = gpu_steps.run([sys.executable, "-c", script], tmp_path, tmp_path / "log", limit, EMPTY)
        raise RuntimeError(done.why())

    step = Step("slow", "slow", limit=1.5, needs=0, rows=("one", "other"), run=run)
    rows = gpu_steps.carry_out(step, time.monotonic() + 60)
    assert [(row["name"], row["state"]) for row in rows] == [("one", FAILED), ("other", FAILED)]
    assert all("it was ended at its limit, 2 s" in row["reason"] for row in rows), rows
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x00987\x00" not in lines
    assert "ended at its limit" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (gpu_steps.LeftOut("there is no deepspeed"), LEFT_OUT, "there is no deepspeed"),
        (KeyError("tokens"), FAILED, "KeyError: 'tokens'"),
        (RuntimeError("it ended with 1: train.py: error: no"), FAILED, "RuntimeError: it ended with 1: "),
    ],
)
def test_fault_of_one_step(error: Exception, state: str, reason: str) -> None:
    """It becomes a row, and does not end the others."""

    def run(limit: float) -> list[gpu_steps.Row]:
        raise error

    (row,) = gpu_steps.carry_out(Step("bad", "bad", 10, 0, ("bad",), run), time.monotonic() + 60)
    assert row["state"] == state and row["reason"].startswith(reason)


def test_plan() -> None:
    """Each step and each row has a name of its own; every public script stands beside one figure."""
    plan = on_gpu.make_plan(bench(Path("/nowhere")))
    names = [step.name for step in plan]
    rows = [row for step in plan for row in step.rows]
    assert len(set(names)) == len(names) and len(set(rows)) == len(rows)
    measured = {name for name in EXAMPLES if LAUNCHERS[name].gpus}
    assert {figure.example for figure in gpu_figures.FIGURES} == measured
    assert set(gpu_checks.GOALS) <= {figure.name for figure in gpu_figures.FIGURES}
    beside = [name for name in names if name.startswith("script-")]
    assert sorted(beside) == sorted(f"script-{script.name}" for script in gpu_peers.SCRIPTS)


ABOUT = {"gpus": 1, "card": "NVIDIA H100 80GB HBM3", "driver": "580.159", "cuda": "13.0", "cores": 16}
ABOUT |= {"python": "3.12.3", "versions": {"torch": "2.11.0"}, "started": 1_795_750_000, "matmul_tflops": 790}
GPT: gpu_steps.Row = {"name": "fsdp GPT 124M bf16 --compile", "state": MEASURED, "value": 430_000.0, "unit": "tokens/s"}
GPT |= {"values": [425_000.0, 430_000.0, 431_000.0], "batch": 64, "peak_share": 0.372, "torch_mb": 41_000, "watt": 640}
PEER: gpu_steps.Row = {"name": "nanogpt beside GPT", "state": MEASURED, "value": 400_000.0}
PEER |= {"unit": "tokens/s", "beside": GPT["name"]}
TESTS: gpu_steps.Row = {"name": "tests fsdp", "state": FAILED, "reason": "test_mode: assert 1 | 2", "by_test": {}}
TESTS |= {"counts": {"passed": 3, "failed": 1, "skipped": 2, "not ended": 0}}


def results(folder: Path, rows: list[gpu_steps.Row], plan: list[str]) -> Path:
    """Write results into a folder of their own."""
    folder.mkdir()
    Results(folder / "results.json", about=ABOUT, plan=plan).add(rows)
    return folder


def test_table(tmp_path: Path) -> None:
    """The page gets date, card and releases, tests, figures beside public scripts, and what is missing, by name."""
    missing = {"name": "NCCL all-reduce", "state": LEFT_OUT, "reason": "there is one GPU"}
    plan = [row["name"] for row in (GPT, PEER, TESTS, missing)] + ["lora"]
    folder = results(tmp_path / "one", [GPT, PEER, TESTS, missing], plan)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{gpu_table.BEGIN}\nold\n{gpu_table.END}\nafter\n")
    gpu_table.fill([folder], page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "27 November 2026; 1 x NVIDIA H100 80GB HBM3; driver 580.159, CUDA 13.0; 16 cores, Python 3.12.3" in text
    assert "| fsdp GPT 124M bf16 --compile | 64 | 430,000 (425,000 to 431,000) tokens/s | 37.2% |" in text
    assert "| nanogpt beside GPT |  | 400,000 tokens/s |  | 1.07 |" in text
    assert "| fsdp | 3 | 1 | 2 | test_mode: assert 1 / 2 |" in text
    assert "* NCCL all-reduce: there is one GPU\n* lora: the run was ended before it\n" in text
    gpu_table.fill([folder], page)
    assert page.read_text() == text, "written twice it is the same"


REFUSED = {
    "--tiny": "--out FOLDER is missing",
    "--out results --sources nowhere": "--sources nowhere: there is no such folder",
    "--out results --wheels nowhere": "--wheels nowhere: there is no such folder",
    "--out results --only fspd": "there is no step fspd: see --list",
    "--out results --wheels old": "--wheels: dill-0.4.1-py39-none-any.whl is for another Python than this 3.",
    "--out results --wheels other": "--wheels: x-1-cp39-cp39-manylinux_2_17_x86_64.whl is for another Python",
    "--out done": "--out done has results of an earlier run: give another folder",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refuses(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Arguments that cannot be right get one line, before anything is run."""
    monkeypatch.chdir(tmp_path)
    for folder, name in (("old", "dill-0.4.1-py39-none-any"), ("other", "x-1-cp39-cp39-manylinux_2_17_x86_64")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.whl").touch()
        (tmp_path / folder / "a-1-py3-none-any.whl").touch()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "results.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *words.split()])
    with pytest.raises(SystemExit) as refused:
        on_gpu.main()
    assert refused.value.code == 2 and REFUSED[words] in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "done" / "results.json").read_text() == "{}"


# What a machine without a GPU lacks, by the reasons of the rows that are left out there.
NO_GPU = {"power": "there is no nvidia-smi", "two GPUs": "there is no GPU", "NCCL all-reduce": "there is no GPU"}


def sources() -> list[str]:
    """Return the argument for the public scripts, if their folder is named in the variable SOURCES."""
    return ["--sources", os.environ["SOURCES"]] if os.environ.get("SOURCES") else []


def unfilled(folder: Path) -> dict[str, str]:
    """Return the rows that were not measured, without those that cannot be in this environment."""
    about, rows = gpu_table.load([folder])
    absent = [name for name in gpu_checks.PACKAGES if not find_spec(name)]
    lacks = [f"no {name} here" for name in absent] + ["no --sources with"] * (not sources())
    lacks += [f"has no {name}" for name in gpu_figures.NEWER]
    return {
        row["name"]: row["reason"]
        for row in rows
        if row["state"] != MEASURED and not any(text in row["reason"] for text in lacks)
    }


@pytest.mark.runs("weekly")
@pytest.mark.timeout(1200)
def test_tiny(tmp_path: Path) -> None:
    """On the CPU every row is filled but for those that need a GPU, by name, in four minutes on two idle cores."""
    words = [sys.executable, "-m", "benchmarks.on_gpu", "--out", str(tmp_path / "out"), "--tiny", *sources()]
    done = finish([*words, "--minutes", "17"], 1100, cwd=ROOT)
    left = unfilled(tmp_path / "out")
    assert all(left.pop(name).startswith(reason) for name, reason in NO_GPU.items()) and not left, left
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out" / "table.md").read_text() in done.stdout


@pytest.mark.runs("weekly")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed(number: signal.Signals, tmp_path: Path) -> None:
    """Killed in the middle, what was measured is on disk, whole; asked to end, it ends what runs and writes a table."""
    out = tmp_path / "out"
    path, words = out / "results.json", ["--only", "small", "preflight", "--at-once", "1", "--work", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--out", str(out), "--tiny", *words]
    # With TMPDIR each of its processes names tmp_path in its environment, by which those that are left are found.
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {"TMPDIR": str(tmp_path)}, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **options) as run:
        try:
            wait_until(lambda: path.exists() and "ddp_spawn ConvNet" in path.read_text(), 300, "the plan")
            wait_until(lambda: '"name": "ddp_spawn ConvNet bf16"' in path.read_text(), 400, "a figure")
            wait_until(lambda: len(list(out.glob("*ConvNet*.log"))) > 1, 300, "the next figure")
            run.send_signal(number)
            run.wait(300)
        finally:
            run.kill()
            left = marked(tmp_path)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    about, rows = gpu_table.load([out])
    found = {row["name"]: row for row in rows}
    assert found["sanity"]["state"] == found["ddp_spawn ConvNet bf16"]["state"] == MEASURED
    assert found["preflight"]["reason"] == "the run was ended before it"
    if number == signal.SIGTERM:
        assert run.returncode == 128 + number and not left
        assert "the run was ended before it" in (out / "table.md").read_text()


def marked(folder: Path) -> list[int]:
    """Return the ids of all processes that belong to a step, and to a run with this temporary folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "environ").read_text(errors="replace")
        except OSError:  # it has ended, or is not ours
            continue
        if gpu_steps.MARKER in text and str(folder) in text:
            found.append(int(path.name))
    return found
