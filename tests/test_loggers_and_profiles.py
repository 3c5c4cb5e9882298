"""docs/loggers-and-profiles.md, as it stands: each epoch is logged once after a kill, and each rank has a profile."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import outputs, readme, runs
from harness.edits import apply_diff, edit
from harness.launchers import HOROVOD, ROOT

from .test_export import WANDB, check, collect

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.only("accelerate", "ddp_spawn", "deepspeed", "horovod_cpu", "lightning", "torchrun_multinode"),
]
PAGE = ROOT / "docs" / "loggers-and-profiles.md"
TOOLS = ("tensorboard", "mlflow", "wandb")
PINS = [re.search(rf"{name}==[\d.]+", (ROOT / "runs" / "README.md").read_text())[0] for name in TOOLS]
# All three loggers in one run. Rank 0 dies when the checkpoint of epoch 2 is written, before its row is logged.
OWN_LOGGER = """
import os, signal
import logger0, logger1, logger2, plumbing

def log(args, progress):
    if len(progress["history"]) == 2 and not args.resume and plumbing.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for one in (logger0, logger1, logger2):
        one.log(args, progress)
"""
MLFLOW = """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///output/mlflow.db")
(run,) = client.search_runs(["0"])
points = [[m.key, m.step, m.value] for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)]
print(json.dumps([points, run.data.params, run.data.tags["run"], run.info.status]))
"""
TENSORBOARD = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("output/tensorboard", size_guidance={"scalars": 0})
events.Reload()
points = [[tag, one.step, one.value] for tag in events.Tags()["scalars"] for one in events.Scalars(tag)]
print(json.dumps(points))
"""
# The reader of TensorBoard's plugin for profiles.
PROFILES = """
import json, os
from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader
run = RunLoader("run", os.path.abspath("output/profile"), io.Cache()).load()
found = {profile.worker: profile for profile in run.profiles.values()}
together = found.pop("All", None)
steps = {worker: len(profile.overview["steps"]["rows"]) for worker, profile in sorted(found.items())}
print(json.dumps([steps, [*together.comm_ops["data"]] if together else []]))
"""


def extra_packages(folder: Path, *pins: str) -> dict[str, str]:
    """Install packages into a folder of their own, as who follows the page adds them; return the variable for it."""
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(folder), *pins]
    subprocess.run(install, check=True, timeout=400)
    return {"PYTHONPATH": str(folder)}


def read(program: str, folder: Path, variables: dict[str, str]) -> Any:
    """Return what a program prints as JSON."""
    return json.loads(runs.Run([sys.executable, "-c", program], folder, variables).wait().stdout.splitlines()[-1])


@pytest.mark.timeout(900)
def test_loggers(example: str, folder: Path, tmp_path: Path) -> None:
    """TensorBoard, MLflow and W&B have each epoch once, in one run, although rank 0 died between save and log."""
    variables = extra_packages(tmp_path / "extra", *PINS) | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    after_each, after_all, in_lightning, _ = readme.fences(PAGE, "diff")
    for number, text in enumerate(readme.fences(PAGE, "python")[:3]):
        (folder / f"logger{number}.py").write_text(text)
    (folder / "own_logger.py").write_text(OWN_LOGGER)
    apply_diff(folder / "train.py", in_lightning if example == "lightning" else after_each)
    apply_diff(folder / "train.py", after_all)
    edit(folder / "train.py", "\nimport plumbing\n", "\nimport own_logger\nimport plumbing\n")
    assert runs.start(example, folder, 2, "--epochs", 3, **variables).wait(leaves=60).status != 0
    number = outputs.read_run(folder / "output")["id"]
    assert runs.start(example, folder, 2, "--epochs", 3, "--resume", **variables).wait().status == 0
    rows = outputs.read_metrics(folder / "output")
    assert [row["epoch"] for row in rows] == [1, 2, 3] and outputs.read_run(folder / "output")["id"] == number

    check(collect(map(tuple, read(TENSORBOARD, folder, variables))), rows)
    points, settings, name, status = read(MLFLOW, folder, variables)
    check(collect(map(tuple, points)), rows)
    assert (name, status, settings["seed"]) == (number, "FINISHED", "0")
    reader = WANDB.replace('"output/wandb"', '"output"').replace("display_name", "run_id")
    points, settings, name, _ = read(reader, folder, variables)
    # Each start's part has all rows until then, under the same steps.
    check(collect(iter({tuple(point) for point in points})), rows)
    assert name == number and settings["seed"] == 0


@pytest.mark.timeout(900)
def test_profile(example: str, folder: Path, tmp_path: Path) -> None:
    """Each process has recorded five steps, which TensorBoard's plugin reads; gradients are averaged in them."""
    if example == "lightning":
        apply_diff(folder / "train.py", readme.fences(PAGE, "diff")[-1])
    else:
        (folder / "own_profile.py").write_text(readme.fences(PAGE, "python")[3])
        edit(folder / "train.py", "\nimport plumbing\n", "\nimport own_profile\nimport plumbing\n")
        (line,) = re.findall(r"^    for .* in .*\btrain_loader\b.*:\n", (folder / "train.py").read_text(), re.MULTILINE)
        edit(folder / "train.py", line, line.replace("train_loader", "own_profile.steps(args, train_loader)"))
    runs.train(example, folder, 2, "--epochs", 1)
    variables = extra_packages(tmp_path / "extra", "torch-tb-profiler==0.4.3")
    steps, communicate = read(PROFILES, folder, variables)
    if example == "lightning":  # which also records a step of the validation, in files of their own
        steps = {name: count for name, count in steps.items() if "training_step" in name}
    assert [*steps.values()] == [5, 5]
    # The plugin compares the messages of ranks, one file each, and knows only those of torch.distributed.
    assert communicate == ([] if example in (*HOROVOD, "lightning") else [*steps])
