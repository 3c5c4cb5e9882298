"""runs/results.ipynb: it runs to its end on what each example has written, and shows the numbers that are there."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
from base64 import b64decode
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from harness import outputs
from harness.launchers import LAUNCHERS, ROOT
from harness.processes import clean_environment
from harness.runs import Reference

if TYPE_CHECKING:  # each process of the tests imports this file, and few run a test of it
    import numpy as np
    from nbformat import NotebookNode

NOTEBOOK = ROOT / "runs" / "results.ipynb"
# What is asked at the end of the notebook, in its kernel: only there is the example's framework imported.
PROBE = """
import json
found = results.predict(chosen[0])
print(json.dumps({
    "labels": found.labels.tolist(), "logits": found.logits.tolist(), "losses": found.losses.tolist(),
    "matrix": results.confusion_matrix(found).tolist(), "worst": results.worst(found, 10**6).tolist(),
    "shapes": [found.image(i).shape for i in (0, len(found.labels) - 1)], "classes": found.classes,
}))
"""


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The module of the notebook."""
    return outputs.import_file(NOTEBOOK.with_suffix(".py"))


@pytest.fixture
def finished(example: str, folder: Path, reference: Reference) -> Path:
    """A copy of the example's folder with the reference run in it."""
    shutil.copytree(reference.output, folder / "output")
    return folder


def execute(folder: Path, home: Path, *more: str) -> "list[NotebookNode]":
    """Run the notebook with the runs in `folder`, then the cells `more`, in this environment; return its code cells.

    The last one of `more` may fail. `home` is for what IPython writes.
    """
    import nbformat
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert 'FOLDER = ".."\n' in first.source
    first.source = first.source.replace('FOLDER = ".."', f"FOLDER = {str(folder)!r}")
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in more]
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))  # this Python, not one in ~/.local
    client = NotebookClient(notebook, timeout=300, km=manager, resources={"metadata": {"path": NOTEBOOK.parent}})
    try:
        client.execute(env=clean_environment() | {"IPYTHONDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"})
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell: "NotebookNode") -> "list[np.ndarray]":
    """Return the pictures that a cell shows, (H, W, 4) from 0 to 1; none may be empty."""
    from matplotlib.image import imread

    shown = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    decoded = [imread(io.BytesIO(b64decode(png))) for png in shown]
    assert all(picture.shape[0] > 150 and picture[..., :3].std() > 0.02 for picture in decoded)
    return decoded


def texts(cells: "list[NotebookNode]") -> str:
    """Return all text that cells show as Markdown."""
    shown = [output.get("data", {}).get("text/markdown", "") for cell in cells for output in cell.outputs]
    return "\n".join(shown)


def test_shipped_notebook() -> None:
    """It is valid, and has no outputs, no numbers of executions, a general kernel, and short cells with texts."""
    import nbformat

    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor, notebook.metadata.kernelspec.name) == (4, 5, "python3")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert all(len(cell.source.splitlines()) <= 6 for cell in code)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells) > 12


@pytest.mark.runs("one")  # that the files of all others have the same form, test_default_run shows
def test_notebook(example: str, finished: Path, tmp_path: Path) -> None:
    """Each cell runs in a kernel, says nothing on stderr, and shows what the run has; the numbers are the run's."""
    images = LAUNCHERS[example].metric == "test_accuracy"
    cells = execute(finished, tmp_path / "ipython", *[PROBE] * images, "results.find_runs('nowhere')")
    *cells, last = cells
    ((name, trace),) = [(output.ename, output.traceback) for output in last.outputs]
    assert name == "ResultsError" and len(trace) == 1 and "there is no folder" in trace[0], trace
    wrong = [output for cell in cells for output in cell.outputs if output.output_type == "error" or "name" in output]
    assert not [output for output in wrong if output.get("name") != "stdout"], wrong
    shown = [len(pictures(cell)) for cell in cells]
    assert shown == ([0, 0, 1, 1, 0, 0, 0, 1, 1, 0] if images else [0, 0, 1, 1, 0, 0, 0, 0, 0]), shown
    row = outputs.read_metrics(finished / "output")[-1]
    text = texts(cells)
    assert f"| {row['test_loss']:.4f} |" in text and "| yes |" in text
    assert ("no image run" in text) == (not images)
    node = rf"\| {os.uname().nodename} \| 2 \| \d:\d\d:\d\d \| \d+\.\d of \d+ \| \d+ \| 0 \| \d+ \|"
    assert re.search(node, text), text
    if images:
        ((output,),) = [cell.outputs for cell in cells[-1:]]
        check_predictions(json.loads(output.text), row)


def check_predictions(found: dict[str, list], row: dict[str, float]) -> None:
    """Check what the notebook's kernel says of the test images: against the run, and against PyTorch."""
    import numpy as np
    import torch
    from torch.nn import functional as F

    labels, logits = torch.tensor(found["labels"]), torch.tensor(found["logits"], dtype=torch.float64)
    losses, wrong = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) != labels
    assert math.isclose(losses.mean().item(), row["test_loss"], rel_tol=1e-4)
    assert losses.tolist() == pytest.approx(found["losses"])
    matrix = np.array(found["matrix"])
    assert matrix.sum() == len(labels) and matrix.sum(1).tolist() == torch.bincount(labels).tolist()
    assert matrix.trace() / matrix.sum() == pytest.approx(row["test_accuracy"], abs=1e-9)
    assert len(found["classes"]) == len(matrix) == logits.shape[1]
    assert sorted(found["worst"]) == wrong.nonzero().flatten().tolist() != []
    assert (losses[found["worst"]].diff() <= 0).all()
    assert all(shape in ([28, 28], [32, 32, 3]) for shape in found["shapes"])


@pytest.mark.only("ddp_spawn")
def test_refusals(
    example: str, results: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other data, a missing package, no run and no model are each said in one line; no run.json, in the figure."""
    import torch
    from matplotlib.figure import Figure

    (run,) = results.find_runs(finished)

    def refused(*words: str, **arguments: str) -> None:
        with pytest.raises(results.ResultsError) as error:
            results.predict(run, **arguments)
        assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)

    refused("of synthetic correctly", "97.77%", dataset="synthetic")
    refused("no mnist in", str(finished / "nowhere"), dataset="mnist", data_dir="nowhere")
    refused("unknown data set 'cifar'", dataset="cifar")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # what Python does where it is not installed
        refused("cannot import torch", f"environment of {finished.name}")
    weights = torch.load(finished / "output" / "model.pt", weights_only=True)
    torch.save({f"own.{name}": weight for name, weight in weights.items()}, finished / "output" / "model.pt")
    refused("model.pt is not of the ConvNet", "change _predict_convnet()")
    torch.save(weights, finished / "output" / "model.pt")
    with pytest.raises(results.ResultsError, match=r"^no run below [^\n]*python train.py --processes 2[^\n]*$"):
        results.find_runs(tmp_path / "copied" / "common")
    for content in ("{", "{}", None):
        (finished / "output" / "run.json").write_text(content) if content else (
            finished / "output" / "run.json"
        ).unlink()
        (run,) = results.find_runs(finished)
        assert (run.facts, run.restarts, run.floor) == ({}, [], None)
    assert results.learning_curves([run]).get_suptitle().startswith(f"no run.json of {run.name}: restarts")
    assert "not found" in results.show([run]) and isinstance(results.confusion(run), Figure)
    (finished / "output" / "model.pt").unlink()
    assert "has not finished yet" in results.confusion(run) == results.mistakes(run)


@pytest.mark.only("ddp_spawn")
def test_which_runs(example: str, results: ModuleType, finished: Path) -> None:
    """All runs below a folder are found, once, and nothing that only looks like one; names are told apart."""
    output = finished / "output"
    for name in ("9_2", "7"):
        shutil.copytree(output, output / name, ignore=shutil.ignore_patterns("9_2"))
    assert {run.name.partition("/")[2] for run in results.find_runs(finished)} == {"", "7", "9_2"}
    (output / "metrics.csv").unlink()
    (output / "7" / "metrics.csv").write_text("epoch,step,train_loss\n1,,2.0\n")  # Lightning's own logger
    (finished / ".venv" / "lib").mkdir(parents=True)
    shutil.copy(output / "9_2" / "metrics.csv", finished / ".venv" / "lib")
    (finished / "loop").symlink_to(finished)
    (run,) = results.find_runs(finished)
    assert run.name.partition("/")[2] == "9_2"
    rows = [row | {"world_size": count} for row, count in zip(run.rows, (2, 2, 4, 4, 2), strict=True)]
    assert dataclasses.replace(run, rows=rows).processes == "2, then 4, then 2"
    shutil.copytree(finished, finished.parent / "other" / finished.name, symlinks=True)
    found = {run.name for run in results.find_runs(finished.parent)}
    assert found == {f"{folder}copied/output/9_2" for folder in ("", "other/")}
