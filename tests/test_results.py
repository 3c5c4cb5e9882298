"""runs/results.ipynb: it runs to its end on what each example has written, and shows the numbers that are there."""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from harness import outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT
from harness.processes import clean_environment
from harness.runs import Reference

if TYPE_CHECKING:  # each process of the tests imports this file, and few run a test of it
    import numpy as np
    from matplotlib.figure import Figure
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


def drawn(figure: "Figure", name: str) -> list[list[float]]:
    """Return the values of each curve of a figure that is called `name`, from left to right."""
    lines = [line for axes in figure.axes for line in axes.lines if line.get_gid() == name]
    return [[float(y) for y in line.get_ydata()] for line in lines]


def restarts(figure: "Figure") -> list[float]:
    """Return the places of the restarts in the first axes of a figure."""
    return [float(line.get_xdata()[0]) for line in figure.axes[0].lines if line.get_gid() == "restart"]


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
    assert shown == ([0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0] if images else [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]), shown
    row = outputs.read_metrics(finished / "output")[-1]
    text = texts(cells)
    assert f"| {row['test_loss']:.4f} |" in text and "`--profile`" in text and "| yes |" in text
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


def test_curves(example: str, results: ModuleType, finished: Path) -> None:
    """The curves are the columns of metrics.csv, and the floor is the entropy of the random source."""
    from common import data

    (run,) = results.find_runs(finished)
    rows, row = outputs.read_metrics(finished / "output"), LAUNCHERS[example]
    assert run.name == finished.name and run.rows == rows and run.restarts == [] and not run.profile
    figure = results.learning_curves([run])
    for name in ("train_loss", "test_loss"):
        assert drawn(figure, name) == [[each[name] for each in rows]]
    learnt = {"test_accuracy": 100, "perplexity": 1}
    for name, factor in learnt.items():
        expected = [[factor * each[name] for each in rows]] if name in rows[0] else []
        assert drawn(figure, name) == expected
    assert len(figure.axes) == 1 + bool(learnt.keys() & rows[0]) and restarts(figure) == []
    floor = data.markov_tokens(1000)[1] if row.first_line == "TinyGPT on a random source" else None
    assert drawn(figure, "floor") == ([[floor, floor]] if floor else []) and run.floor == floor
    if floor:
        assert f"({rows[-1]['test_loss'] - floor:.4f} above the floor)" in figure.legends[0].get_texts()[0].get_text()
    unit = "samples" if "tokens_per_second" not in rows[0] else "tokens"
    speed = results.throughput([run])
    assert drawn(speed, unit) == [[each[f"{unit}_per_second"] for each in rows]]
    assert speed.legends[0].get_texts()[0].get_text().endswith(": 2 processes")


@pytest.mark.runs("weekly")
@pytest.mark.only("ddp_spawn")
def test_resumed_and_profiled(example: str, results: ModuleType, folder: Path, reference: Reference) -> None:
    """A restart is marked where it was, the profile is the recorded one; two runs are shown at once."""
    runs.train(example, folder, 2, "--epochs", 1)
    (run,) = results.find_runs(folder)
    figure = results.learning_curves([run])
    (axes, *_) = figure.axes
    assert drawn(figure, "test_loss") == [run.column("test_loss")] and len(run.rows) == 1
    assert axes.lines[0].get_marker() == "o"  # one point, which is seen
    assert [tick for tick in axes.get_xticks() if 0.4 <= tick <= 1.6] == [1]
    runs.train(example, folder, 2, "--epochs", 2, "--resume")
    shutil.copytree(reference.output, folder / "output" / "1234")
    found = {run.name.removeprefix(folder.name): run for run in results.find_runs(folder)}
    assert set(found) == {"", "/1234"} and [found[name].restarts for name in ("", "/1234")] == [[1], []]
    shares = {"waits for data": 0.041, "computes": 0.959}  # as torchrun_vision records them, see test_profile.py
    profile = {"seconds": 0.1234, "shares": shares}
    stopped = found[""].facts["starts"] + [{"step": 16}]
    facts = found[""].facts | {"profile": profile, "starts": stopped}
    both = [dataclasses.replace(found[""], facts=facts), found["/1234"]]

    figure = results.learning_curves(both)
    assert restarts(figure) == [1, 16 / 11] and [len(values) for values in drawn(figure, "test_loss")] == [2, 5]
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "restart" and not figure.get_suptitle()
    (axes,) = results.profile_shares(both).axes
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert widths == {name: [100 * share] for name, share in shares.items()}, "only one of the two has a profile"
    assert axes.get_yticklabels()[0].get_text() == f"{both[0].name}\n0.123 s a step"
    assert [row.split(" | ")[1] for row in results.show(both).splitlines()[2:]] == [run.name for run in both]
    last = both[1].rows[-1]
    assert f"| 5 | 2 | {last['train_loss']:.4f} | {last['test_loss']:.4f} | accuracy 97." in results.comparison(both)


@pytest.mark.runs("one")
def test_what_a_run_has_used(example: str, finished: Path) -> None:
    """usage.py prints one line for this machine: its figures are the sums of what both processes have written."""
    output = (finished / "output").rename(finished / "1234")
    line = readme.command(
        "runs/README.md",
        "python usage.py ...",
        {"usage.py": NOTEBOOK.with_name("usage.py"), "~/project/output": finished},
    )
    run = readme.run_block([line], finished)
    head, line = run.stdout.splitlines()
    used = outputs.read_run(output)["stops"][-1]["used"]
    _, host, processes, time, cores, memory, gpu, read = re.split("  +", line)
    assert head.startswith("until  ") and (host, processes, gpu) == (used[0]["host"], "2", "0")
    assert int(memory) == sum(one["mb"] for one in used) and int(read) == sum(one["read_mb"] for one in used)
    hours, minutes, seconds = map(int, time.split(":"))
    longest = max(one["seconds"] for one in used)
    assert abs(hours * 3600 + minutes * 60 + seconds - longest) <= 0.5
    mean, given = map(float, cores.split(" of "))
    assert abs(mean - sum(one["core_seconds"] for one in used) / longest) < 0.06 and 0 < mean <= given + 0.1


READ = """
from plumbing import records
records.end = lambda status: None
records.record = lambda args, progress, what, facts: print("MB:", facts["used"][0]["read_mb"])
records.finish(None, None, "begins")
with open("large", "rb") as file:
    while file.read(1 << 20):
        pass
records.finish(None, None, "ends")
"""


@pytest.mark.runs("one")
def test_what_is_read(example: str, folder: Path) -> None:
    """What a process reads from files is counted, also if that was in memory already."""
    (folder / "large").write_bytes(bytes(40 << 20))
    run = runs.Run(["python", "-c", READ], folder).wait()
    before, after = map(int, re.findall(r"^MB: (\d+)$", run.stdout, re.MULTILINE))
    assert 40 <= after - before <= 42 and run.status == 0, run.stderr


LOG = """
1800000000.00 1234.0
0, 90, 30000, 300.00, 1700, 0x0000000000000001
1000000,262143328850,package-0

1800000060.00 1234.0
0, 50, 30000, 240.00, 1500, 0x0000000000000040
7201000000,262143328850,package-0

1800000120.00 1234.0
0, 100, 300"""


@pytest.mark.only("ddp_spawn")
def test_devices(example: str, results: ModuleType, finished: Path) -> None:
    """The curves are the samples in the log, in minutes, and the energy is that of all devices together."""
    (run,) = results.find_runs(finished)
    assert "has no log" in results.devices(run)
    (finished / "output" / "usage-node1.txt").write_text(LOG)  # the last line is cut off, as by a kill
    figure = results.devices(run)
    assert figure.get_suptitle() == f"{run.name}: 6.0 Wh"  # a minute at 240 W and 120 W
    expected = {"busy": [90, 50], "memory_mb": [30000, 30000], "watts": [300, 240], "mhz": [1700, 1500]}
    for name, values in expected.items():
        others = [120.0] if name == "watts" else []
        assert drawn(figure, name) == [values, others] and drawn(figure, f"{name} slowed") == [values[1:], []]
    assert [list(line.get_xdata()) for line in figure.axes[2].lines if line.get_gid() == "watts"] == [[0, 1], [1]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["node1 gpu0", "node1 cpu0"]


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
        assert (run.facts, run.restarts, run.floor, run.profile) == ({}, [], None, {})
    assert results.learning_curves([run]).get_suptitle().startswith(f"no run.json of {run.name}: restarts")
    assert "not found" in results.show([run]) and isinstance(results.confusion(run), Figure)
    (finished / "output" / "model.pt").unlink()
    assert "has not finished yet" in results.confusion(run) == results.mistakes(run)


@pytest.mark.only("ddp_spawn")
def test_best_of_some(example: str, results: ModuleType) -> None:
    """An epoch whose figure is not a number, as ALLOW_NAN=1 permits, is not the best one, unless there is no other."""
    values = [math.nan, 0.5, 0.7]
    for quality, best in (("test_accuracy", "accuracy 70.00%, epoch 3"), (None, "test loss 0.5000, epoch 2")):
        rows = [{"epoch": epoch, quality or "test_loss": value} for epoch, value in enumerate(values, 1)]
        assert results._best(SimpleNamespace(quality=quality, rows=rows)) == best
        assert "nan" in results._best(SimpleNamespace(quality=quality, rows=rows[:1]))


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


@pytest.mark.only("ddp_spawn")
def test_check_of_predictions(example: str, results: ModuleType, finished: Path) -> None:
    """One image more or less is refused, unless the model can hardly decide there, as bf16 could not."""
    import numpy as np

    (run,) = results.find_runs(finished)
    logits = np.eye(10)[np.arange(100) % 10] * 8.0
    found = results.Predictions("data", tuple("0123456789"), np.arange(100) % 10, logits, lambda i: logits)
    for accuracy, undecided in ((1.0, False), (0.99, False), (0.99, True), (0.98, True)):
        logits[0, 1] = 7.99 if undecided else 0
        other = dataclasses.replace(run, rows=[*run.rows, run.rows[-1] | {"test_accuracy": accuracy}])
        refused = accuracy < (0.99 if undecided else 1)
        with pytest.raises(results.ResultsError) if refused else contextlib.nullcontext():
            results._check(other, found)


@pytest.mark.only("ddp_spawn")
def test_modules_of_an_example(example: str, results: ModuleType, folder: Path) -> None:
    """Within the context `common` is the example's, afterwards what it was before."""
    importlib.import_module("common.data")
    before = sys.modules["common"], sys.modules["common.data"], list(sys.path)
    with results._modules_of(folder):
        from common import data

        assert Path(data.__file__).is_relative_to(folder) and data is not before[1]
    assert (sys.modules["common"], sys.modules["common.data"], sys.path) == before


@pytest.mark.only("torchrun_vision")
@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities:DeprecationWarning")
def test_images_in_a_tar(example: str, results: ModuleType, finished: Path) -> None:
    """Images in a tar give the same predictions; those of other classes are refused in one line."""
    subprocess.run(["tar", "-cf", "images.tar", "images"], cwd=finished, check=True, timeout=300)
    for part in ("train", "val"):
        (finished / "images" / part / "six").rename(finished / f"{part}-six")
    (run,) = results.find_runs(finished)
    assert results.predict(run, data_dir="images.tar").accuracy == run.rows[-1]["test_accuracy"]
    with pytest.raises(results.ResultsError, match=r"is no resnet18 for the 5 classes in images: pass data_dir"):
        results.predict(run)
