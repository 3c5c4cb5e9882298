"""Write runs to TensorBoard, MLflow or Weights & Biases, from the metrics.csv and run.json that train.py has written.

    python export.py ~/project/output --to tensorboard --store ~/tensorboard

takes every run below the folder, old and running. Repeated, it adds what is new, and nothing twice. It needs Python
3.11 and the package of that name (`pip install tensorboard`, `mlflow` or `wandb`), and no PyTorch, example or server.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from reader import Run, find_runs

TOOLS = ("tensorboard", "mlflow", "wandb")


def time_of(run: Run, row: dict[str, float]) -> float:
    """Return a moment for a row, in seconds since 1970: the start of the run and its epochs until then."""
    start = run.facts.get("starts", [{}])[0].get("time", 0)
    epochs = [one["seconds"] for one in run.rows if one["epoch"] <= row["epoch"]]
    return (start if isinstance(start, int | float) else 0) + sum(epochs)


def key_of(run: Run) -> str:
    """Return what is the same for the same folder in every call, and no other's."""
    return hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]


def folder_in(store: Path, run: Run) -> Path:
    """Return the folder of a run's event files: that of its name, or beside it if that is of another run so named."""
    owner = store / run.name / "exported_from"
    if owner.exists() and owner.read_text() != key_of(run):
        return store / f"{run.name}-{key_of(run)[:6]}"
    return owner.parent


def to_tensorboard(runs: list[Run], store: Path) -> dict[str, int]:
    """Append to one folder of event files for each run; what is there already is read back from these."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    added = {}
    for run in runs:
        folder = folder_in(store, run)
        there: set[tuple[str, int]] = set()
        if folder.exists():
            events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
            events.Reload()
            there = {(tag, one.step) for tag in events.Tags()["scalars"] for one in events.Scalars(tag)}
        new = [
            (row, name)
            for row in run.rows
            for name in row
            if name != "epoch" and (name, int(row["epoch"])) not in there
        ]
        if new:
            writer = EventFileWriter(str(folder))
            (folder / "exported_from").write_text(key_of(run))
            for row, name in new:
                summary = Summary(value=[Summary.Value(tag=name, simple_value=row[name])])
                writer.add_event(Event(wall_time=time_of(run, row), step=int(row["epoch"]), summary=summary))
            writer.close()
        added[str(folder.relative_to(store))] = len({row["epoch"] for row, _ in new})
    return added


def to_mlflow(runs: list[Run], store: Path) -> dict[str, int]:
    """Write to a file of SQLite in the folder, with a tag by which a run is found again."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    store.mkdir(parents=True, exist_ok=True)
    client, added = MlflowClient(f"sqlite:///{store.resolve()}/mlflow.db"), {}
    found = client.get_experiment_by_name("runs")
    artifacts = (store.resolve() / "artifacts").as_uri()
    experiment = found.experiment_id if found else client.create_experiment("runs", artifacts)
    for run in runs:
        those = client.search_runs([experiment], f"tags.exported_from = '{key_of(run)}'")
        tags = {"exported_from": key_of(run)}
        one = those[0] if those else client.create_run(experiment, run_name=run.name, tags=tags)
        there = {int(m.step) for m in client.get_metric_history(one.info.run_id, "train_loss")}
        new = [row for row in run.rows if int(row["epoch"]) not in there]
        known = one.data.params  # MLflow refuses another value; after a resume the first one stays
        params = [Param(k, str(v)[:500]) for k, v in run.settings.items() if k not in known]
        for begin in range(0, len(new), 100):  # MLflow takes at most 1,000 values at a time
            metrics = [
                Metric(name, row[name], int(1000 * time_of(run, row)), int(row["epoch"]))
                for row in new[begin : begin + 100]
                for name in row
                if name != "epoch"
            ]
            client.log_batch(one.info.run_id, metrics=metrics)
        client.log_batch(one.info.run_id, params=params[:100])
        client.update_run(one.info.run_id, status="FINISHED" if ended(run) else "RUNNING")
        added[run.name] = len(new)
    return added


def to_wandb(runs: list[Run], store: Path) -> dict[str, int]:
    """Write offline runs for `wandb sync`; each call adds one of the same id with the epochs that are new.

    What was written stands beside them, since an offline run cannot be opened again.
    """
    import wandb

    store.mkdir(parents=True, exist_ok=True)
    record = store / "exported.json"  # key: the last epoch
    try:
        done = {key: float(epoch) for key, epoch in json.loads(record.read_text()).items()} if record.exists() else {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        sys.exit(
            f"export.py: error: {record} is damaged ({error}): restore it, or move it away to write all runs again"
        )
    added = {}
    for run in runs:
        key = key_of(run)
        new = [row for row in run.rows if row["epoch"] > done.get(key, 0)]
        added[run.name] = len(new)
        if not new:
            continue
        silent = wandb.Settings(silent=True, console="off")
        options = {"project": "runs", "name": run.name, "id": key, "resume": "allow", "mode": "offline"}
        with wandb.init(**options, dir=str(store), config=run.settings, settings=silent) as log:
            for row in new:
                values = {name: value for name, value in row.items() if name != "epoch"}
                log.log(values | {"_timestamp": time_of(run, row)}, step=int(row["epoch"]))
        done[key] = new[-1]["epoch"]
        part = record.with_suffix(".part")
        part.write_text(json.dumps(done))
        part.replace(record)  # in one step
    return added


def ended(run: Run) -> bool:
    """Whether a run has done all epochs that its last start asked for."""
    return bool(run.settings) and run.rows[-1]["epoch"] >= run.settings.get("epochs", 0)


def main() -> None:
    """Read the command line, find the runs and write them."""
    parser = argparse.ArgumentParser("export.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="one with runs in it: every metrics.csv below it is one")
    parser.add_argument("--to", choices=TOOLS, required=True)
    parser.add_argument("--store", type=Path, required=True, help="the folder that is written, for all runs")
    args = parser.parse_args()
    if find_spec(args.to) is None:
        parser.error(f"--to {args.to} needs a package that is not installed: pip install {args.to}")
    runs, left_out = find_runs(args.folder, {"epoch", "train_loss", "seconds"})
    for file in left_out:
        print(f"export.py: left out, as damaged or of another program: {file}", file=sys.stderr)
    if not runs:
        parser.error(f"no run in {args.folder}: train.py writes metrics.csv after its first epoch")
    start = time.monotonic()
    added = {"tensorboard": to_tensorboard, "mlflow": to_mlflow, "wandb": to_wandb}[args.to](runs, args.store)
    for name, epochs in added.items():
        print(f"{name}: {epochs} new epochs" if epochs else f"{name}: nothing new")
    print(f"{len(runs)} runs in {args.store}, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
