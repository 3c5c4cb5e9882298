"""runs/export.py: a run while it runs and after it, read back by the tool's own reader or from its own file."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import outputs, readme, runs
from harness.launchers import ROOT
from harness.runs import Reference

pytestmark = pytest.mark.only("lightning")  # whose environment has TensorBoard
PAGE = ROOT / "runs" / "README.md"


def export(top: Path, line: str, *, extra: Path | None = None) -> str:
    """Run the page's command for a tool in `top`, which has the runs in `output`; return what it prints."""
    line = readme.changed(line, {"REPOSITORY": ROOT})
    return readme.run_block([line], top, PYTHONPATH=str(extra or "")).stdout


def as_it_ran(reference: Reference, top: Path, epochs: int) -> list[dict[str, float]]:
    """Put a run below `top` as it was after some epochs; return the rows that it had."""
    output = top / "output" / "1234"
    if not output.exists():
        shutil.copytree(reference.output, output)
    lines = (reference.output / "metrics.csv").read_text().splitlines(keepends=True)
    (output / "metrics.csv").write_text("".join(lines[: epochs + 1]))
    return outputs.read_metrics(output)


def check(found: dict[str, dict[int, list[float]]], rows: list[dict[str, float]]) -> None:
    """Check that each column has each epoch's value once."""
    for name in set(rows[0]) - {"epoch"}:
        assert found[name] == {row["epoch"]: [pytest.approx(row[name], rel=1e-6)] for row in rows}, name


def collect(points: Iterator[tuple[str, int, float]]) -> dict[str, dict[int, list[float]]]:
    """Return the values of each name by their epochs."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, step, value in points:
        found.setdefault(name, {}).setdefault(step, []).append(value)
    return found


def test_tensorboard(example: str, reference: Reference, tmp_path: Path) -> None:
    """TensorBoard's reader finds each epoch once, also of a run that went on, and after a third call."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    total = len(outputs.read_metrics(reference.output))
    for epochs, says in ((2, "1234: 2 new epochs"), (total, f"1234: {total - 2} new epochs"), (total, "nothing new")):
        rows = as_it_ran(reference, tmp_path, epochs)
        line = readme.command("runs/README.md", "... --to tensorboard --store output/tensorboard")
        assert says in export(tmp_path, line)
        events = EventMultiplexer(size_guidance={"scalars": 0})
        events.AddRunsFromDirectory(str(tmp_path / "output" / "tensorboard")).Reload()
        tags = events.Runs()["1234"]["scalars"]
        check(collect((tag, one.step, one.value) for tag in tags for one in events.Scalars("1234", tag)), rows)


def test_two_runs_of_one_name(example: str, tmp_path: Path) -> None:
    """Runs of two projects that have one name are two in TensorBoard's store, also when they are written again."""
    changes = {"--store output": "--store ../all"}
    line = readme.command("runs/README.md", "... --to tensorboard --store output/tensorboard", changes)
    for says in ("1 new epochs", "nothing new"):
        for project, name in (("one", "7"), ("two", r"7-[0-9a-f]{6}")):
            (tmp_path / project / "output" / "7").mkdir(parents=True, exist_ok=True)
            (tmp_path / project / "output" / "7" / "metrics.csv").write_text("epoch,train_loss,seconds\n1,2.0,1.0\n")
            assert re.match(rf"{name}: {says}\n", export(tmp_path / project, line))
    assert len(list((tmp_path / "all").rglob("events*"))) == 2


def test_bad_input(example: str, tmp_path: Path) -> None:
    """A folder without runs, another program's file alone, and a package that is not there are one line each."""
    (tmp_path / "metrics.csv").write_text("a,b\n1,x\n")
    program = str(PAGE.with_name("export.py"))
    for words, says in (
        ([".", "--to", "tensorboard"], "no run in .: train.py writes metrics.csv"),
        (["none", "--to", "tensorboard"], "no run in none"),
        ([".", "--to", "mlflow"], "--to mlflow needs a package that is not installed: pip install mlflow"),
        ([".", "--to", "files"], "invalid choice: 'files'"),
    ):
        command = [sys.executable, program, *words, "--store", "store"]
        refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert refused.returncode == 2 and says in refused.stderr.splitlines()[-1], refused.stderr
        said = "export.py: left out, as damaged or of another program: metrics.csv (ValueError"
        assert (said in refused.stderr) == says.startswith("no run in .")
        assert not (tmp_path / "store").exists()


# Read by MLflow's client, and by W&B's messages from its files, for which it has no reader: blocks of 32 KiB of records
# with a head of 7 bytes, as in LevelDB's logs.
MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///output/mlflow/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("runs").experiment_id])
points = [[m.key, m.step, m.value] for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)]
print(json.dumps([points, run.data.params, run.info.run_name, run.info.status]))
"""
WANDB = """
import json, struct
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
points, runs, settings = [], set(), {}
for path in sorted(Path("output/wandb").glob("wandb/offline-run-*/*.wandb")):
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, part = Record.FromString(part), b""
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.run_id, record.run.display_name))
                settings |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                for one in record.history.item:
                    name = one.key or ".".join(one.nested_key)
                    points.append([name, record.history.step.num, float(one.value_json)])
((_, name),) = runs
print(json.dumps([points, settings, name, "FINISHED"]))
"""


@pytest.mark.runs("weekly")
@pytest.mark.parametrize(
    ("tool", "reader", "line"),
    [
        ("mlflow", MLFLOW, readme.command("runs/README.md", "... --to mlflow --store output/mlflow")),
        ("wandb", WANDB, readme.command("runs/README.md", "... --to wandb --store output/wandb")),
    ],
)
def test_mlflow_and_wandb(
    example: str, reference: Reference, tmp_path: Path, tool: str, reader: str, line: str
) -> None:
    """The same with MLflow and W&B: one run, its settings, and each epoch's values once."""
    pinned = re.search(rf"{tool}==[\d.]+", PAGE.read_text())[0]
    extra = tmp_path / "extra"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(extra), pinned]
    subprocess.run(install, check=True, timeout=400)
    total = len(outputs.read_metrics(reference.output))
    for epochs, says in ((2, "1234: 2 new epochs"), (total, f"1234: {total - 2} new epochs"), (total, "nothing new")):
        rows = as_it_ran(reference, tmp_path, epochs)
        assert says in export(tmp_path, line, extra=extra)
        read = runs.Run([sys.executable, "-c", reader], tmp_path, {"PYTHONPATH": str(extra)}).wait()
        points, settings, name, status = json.loads(read.stdout)
        check(collect(map(tuple, points)), rows)
        assert name == "1234" and float(settings["lr"]) == outputs.read_run(reference.output)["settings"]["lr"]
    assert status == "FINISHED"
