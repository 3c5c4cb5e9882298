"""What results.ipynb shows of a run: tables, curves and pictures, made from what train.py has written.

A run is a folder with metrics.csv: its figures, epoch by epoch. run.json beside it has what the run was: its settings,
starts and stops. Without it, only what metrics.csv says is shown.

Only NumPy, matplotlib and what is in this folder are imported here. What needs the model imports PyTorch or Keras when
it is called, because the environment of each example has its own packages only. It also imports the Python files that
lie beside the run's train.py, wherever below FOLDER that is: only for runs that you trust.
"""

import contextlib
import datetime
import functools
import importlib
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

import reader
import usage

COLUMNS = {"epoch", "train_loss", "test_loss", "seconds", "world_size"}  # what every example's metrics.csv has
# The third kind of column differs, and says what was learnt. By its name: the title of its axis, and a factor.
QUALITY = {"test_accuracy": ("test accuracy (%)", 100), "perplexity": ("perplexity", 1)}
FASHION = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")

OWN_MODEL = "If you have put in a model of your own, change _predict_convnet() in results.py, too"


class ResultsError(Exception):
    """Something has to be corrected; the message is one line that says what. A notebook shows that line only."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints in the place of a traceback."""
        return [f"results: error: {self}"]


class Text(str):
    """Text in Markdown: a notebook shows it formatted, print() as it is."""

    def _repr_markdown_(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False)
class Run(reader.Run):
    """The same with what the notebook shows; its name is short: the example and the job, such as ddp_spawn/1234."""

    example: Path | None  # the nearest folder above with a train.py
    modified: datetime.datetime  # when metrics.csv was written

    def column(self, name: str) -> list[float]:
        """Return a column of metrics.csv, one number for each epoch; raise KeyError if there is none of that name."""
        return [row[name] for row in self.rows]

    @property
    def quality(self) -> str | None:
        """The column that says what was learnt, or None if that is only the loss, as with fsdp."""
        return next((name for name in QUALITY if name in self.rows[-1]), None)

    @property
    def unit(self) -> str:
        """What the speed counts: tokens for language models, else samples."""
        return "tokens" if "tokens_per_second" in self.rows[-1] else "samples"

    @property
    def processes(self) -> str:
        """The number of processes; if it has changed on a resume, one after the other: "2, then 4"."""
        counts = [int(count) for count in self.column("world_size")]
        return ", then ".join(str(n) for i, n in enumerate(counts) if not i or n != counts[i - 1])

    @property
    def restarts(self) -> list[float]:
        """After how many epochs the run was continued, in order; 2.5 is in the middle of the third. [] if unknown."""
        steps, length = [start["step"] for start in self.facts.get("starts", [])], self.settings.get("steps_per_epoch")
        return [step / length for step in steps if step and length]

    @property
    def floor(self) -> float | None:
        """The entropy of a random source in nats per token, below which no loss can be; None if it is not known."""
        return self.settings.get("entropy")


# ---- Runs: find them, choose some, compare them ----


def find_runs(folder: str | Path) -> list[Run]:
    """Return every run below a folder, the newest first; raise ResultsError if there is none."""
    top = Path(folder).expanduser().resolve()
    if not top.is_dir():
        raise ResultsError(f"there is no folder {top}: set FOLDER to one with your runs in it")
    found, left_out = reader.find_runs(top, COLUMNS)
    if left_out:
        print(f"results: left out, as damaged or of another program: {'; '.join(left_out)}")
    if not found:
        raise ResultsError(
            f"no run below {top}: train.py writes metrics.csv after its first epoch. Start one, such as "
            "`python train.py --processes 2` in examples/ddp_spawn, or set FOLDER to where yours are"
        )
    runs = []
    for run in found:
        example = next((parent for parent in run.folder.parents if (parent / "train.py").exists()), None)
        modified = datetime.datetime.fromtimestamp((run.folder / "metrics.csv").stat().st_mtime)
        facts = vars(run) | {"name": _short_name(run, example), "example": example, "modified": modified}
        runs.append(Run(**facts))
    names = Counter(run.name for run in runs)
    for i, run in enumerate(found):
        if names[runs[i].name] > 1:  # two copies of an example, say
            runs[i] = replace(runs[i], name=run.name)
    return sorted(runs, key=lambda run: run.modified, reverse=True)


def _short_name(run: reader.Run, example: Path | None) -> str:
    """Return EXAMPLE/JOB for EXAMPLE/output/JOB, and EXAMPLE for EXAMPLE/output."""
    if not example:
        return run.name
    parts = run.folder.relative_to(example).parts
    return "/".join([example.name, *parts[parts[0] == "output" :]])


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Text:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return Text("\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines))


def show(runs: Sequence[Run]) -> Text:
    """Return a table of runs, with the number by which one is taken from the list."""
    head = ("number", "run", "epochs", "processes", "last epoch at", "run.json")
    rows = [
        (i, r.name, len(r.rows), r.processes, f"{r.modified:%Y-%m-%d %H:%M}", "yes" if r.facts else "not found")
        for i, r in enumerate(runs)
    ]
    return _table(head, rows)


def comparison(runs: Sequence[Run]) -> Text:
    """Return a table of what each run has reached at its end, and how fast.

    The time is that of all epochs' training, without start and evaluation. The speed is the median of the epochs, which
    a slow first epoch does not change.
    """
    head = ("run", "epochs", "processes", "training loss", "test loss", "best", "training time", "median speed")
    rows = []
    for run in runs:
        speed = statistics.median(run.column(f"{run.unit}_per_second"))
        time = f"{sum(run.column('seconds')):.1f} s"
        losses = [f"{run.rows[-1][name]:.4f}" for name in ("train_loss", "test_loss")]
        row = (run.name, len(run.rows), run.processes, *losses, _best(run), time, f"{speed:.0f} {run.unit}/s")
        rows.append(row)
    return _table(head, rows)


def used(run: Run) -> Text:
    """Return a table of what each node has used, or a sentence if that is not known."""
    if not run.facts:
        return Text(f"{run.name} has no run.json.")
    rows = reader.used_by_node(run.facts)
    return _table(reader.USED, rows) if rows else Text(f"{run.name} has not ended by itself yet: see `sacct -D`.")


def _best(run: Run) -> str:
    """Return the highest accuracy, or the lowest perplexity or test loss, with the first epoch that had it."""
    name = run.quality or "test_loss"
    rows = [row for row in run.rows if np.isfinite(row[name])] or run.rows  # nan would be the first and the last
    if name == "test_accuracy":
        best = max(rows, key=lambda row: row[name])
        return f"accuracy {best[name]:.2%}, epoch {best['epoch']:.0f}"
    best = min(rows, key=lambda row: row[name])
    return f"{name.replace('_', ' ')} {best[name]:.{2 if run.quality else 4}f}, epoch {best['epoch']:.0f}"


# ---- Figures of metrics.csv and run.json ----


def _finish(figure: Figure) -> Figure:
    """Return a figure that a notebook shows once: as a cell's value, not also as what pyplot has open."""
    plt.close(figure)
    return figure


def _epochs(axes: Axes, runs: Sequence[Run]) -> None:
    """Label the horizontal axis with whole epochs, also if there is only one."""
    axes.set_xlabel("epoch")
    axes.set_xlim(0.4, max(run.rows[-1]["epoch"] for run in runs) + 0.6)  # also a restart within the first is seen
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def _colours(runs: Sequence[Run]) -> dict[Run, str]:
    """Return a colour for each run, the same one in all figures of these runs; after ten they begin again."""
    return {run: f"C{number % 10}" for number, run in enumerate(runs)}


def learning_curves(runs: Sequence[Run]) -> Figure:
    """Return a figure of losses and of what was learnt, by epoch, with restarts and the floor of the loss marked.

    Each kind of run has a row of its own: losses of images and of language cannot be compared. Training losses are
    means over an epoch in which the model changes; test losses are of the model at the epoch's end.
    """
    kinds = {kind: [run for run in runs if run.quality == kind] for kind in (*QUALITY, None)}
    kinds = {kind: those for kind, those in kinds.items() if those}
    columns = 1 if set(kinds) == {None} else 2
    size = (5 + 2.5 * columns, 0.8 + 3.4 * len(kinds))
    figure, rows = plt.subplots(len(kinds), columns, figsize=size, squeeze=False, layout="constrained")
    colours = _colours(runs)
    for (kind, those), row in zip(kinds.items(), rows, strict=True):
        _plot_losses(row[0], those, colours)
        if kind:
            _plot_quality(row[1], those, colours)
        elif columns == 2:
            row[1].remove()
    handles = [_labelled(colours[run], "-", "o", run.name + _above_floor(run)) for run in runs]
    handles += [_labelled("0.3", "-", "o", "test"), _labelled("0.3", "--", "s", "training")]
    handles += [_labelled("0.3", ":", "", "restart")] * any(run.restarts for run in runs)
    handles += [_labelled("0.3", "-.", "", "floor: entropy of the source")] * any(run.floor for run in runs)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    if without := [run.name for run in runs if not run.facts]:
        note = f"no run.json of {', '.join(without)}: restarts, the floor and the settings are not known"
        figure.suptitle(note, fontsize="small", color="0.3")
    return _finish(figure)


def _labelled(colour: str, style: str, marker: str, label: str) -> Line2D:
    """Return a line for a legend."""
    return Line2D([], [], color=colour, linestyle=style, marker=marker, markersize=4, label=label)


def _plot_losses(axes: Axes, runs: Sequence[Run], colours: dict[Run, str]) -> None:
    """Draw the training and the test loss of each run, and the floor of language models."""
    for run in runs:
        epochs, colour = run.column("epoch"), colours[run]
        axes.plot(epochs, run.column("test_loss"), "o-", color=colour, markersize=4, gid="test_loss")
        axes.plot(epochs, run.column("train_loss"), "s--", color=colour, markersize=4, alpha=0.6, gid="train_loss")
    for floor in sorted({run.floor for run in runs if run.floor}):
        axes.axhline(floor, color="0.3", linestyle="-.", gid="floor")
    axes.set_ylabel("loss (nats per token)" if runs[0].unit == "tokens" else "loss (cross-entropy)")
    _epochs(axes, runs)
    _mark_restarts(axes, runs, colours)


def _plot_quality(axes: Axes, runs: Sequence[Run], colours: dict[Run, str]) -> None:
    """Draw what was learnt: accuracy or perplexity, the same for all of these runs."""
    name = runs[0].quality
    title, factor = QUALITY[name]
    for run in runs:
        values = [factor * value for value in run.column(name)]
        axes.plot(run.column("epoch"), values, "o-", color=colours[run], markersize=4, gid=name)
    axes.set_ylabel(title)
    _epochs(axes, runs)
    _mark_restarts(axes, runs, colours)


def _mark_restarts(axes: Axes, runs: Sequence[Run], colours: dict[Run, str]) -> None:
    """Draw a dotted line where a run was continued; within an epoch, in the middle between two points."""
    for run in runs:
        for epoch in sorted(set(run.restarts)):
            axes.axvline(epoch, color=colours[run] if len(runs) > 1 else "0.3", linestyle=":", gid="restart")


def _above_floor(run: Run) -> str:
    """Return by how much a run's test loss ends above its floor, in words, or nothing if it has none."""
    return f" ({run.rows[-1]['test_loss'] - run.floor:.4f} above the floor)" if run.floor else ""


def throughput(runs: Sequence[Run]) -> Figure:
    """Return a figure of the speed in each epoch, over all processes: samples/s and tokens/s on axes of their own."""
    units = sorted({run.unit for run in runs})
    figure, (row,) = plt.subplots(1, len(units), figsize=(10, 3.8), squeeze=False, layout="constrained")
    colours = _colours(runs)
    for unit, axes in zip(units, row, strict=True):
        those = [run for run in runs if run.unit == unit]
        for run in those:
            speeds, label = run.column(f"{unit}_per_second"), f"{run.name}: {run.processes} processes"
            axes.plot(run.column("epoch"), speeds, "o-", color=colours[run], markersize=4, label=label, gid=unit)
        axes.set_ylabel(f"{unit}/s, all processes together")
        axes.set_ylim(0, 1.1 * max(max(run.column(f"{unit}_per_second")) for run in those))
        _epochs(axes, those)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return _finish(figure)


PANELS = {"busy": "busy (%)", "memory_mb": "memory (MB)", "watts": "power (W)", "mhz": "clock (MHz)"}


def devices(run: Run) -> Figure | Text:
    """Return a figure of what GPUs and processors did, or a sentence if run.slurm has logged nothing.

    The time is in minutes since the first sample. A cross marks where a GPU was slower than it could be.
    """
    found, energy = usage.samples(run.folder), sum(float(row[-1]) for row in usage.devices(run.folder))
    if not found:
        return Text(f"{run.name} has no log of GPUs or processors: its job had none that say what they do.")
    first = min(one["time"] for those in found.values() for one in those)
    figure, rows = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for axes, (name, title) in zip(rows.flat, PANELS.items(), strict=True):
        for number, ((node, device), those) in enumerate(found.items()):
            known = [one for one in those if one[name] is not None]
            minutes, values = ([one[key] for one in known] for key in ("time", name))
            minutes = [(time - first) / 60 for time in minutes]
            label = f"{node} {device}" if name == "watts" else None  # the one that all of them have
            axes.plot(minutes, values, color=f"C{number % 10}", label=label, gid=name)
            slow = [i for i, one in enumerate(known) if one["slowed"]]
            axes.plot([minutes[i] for i in slow], [values[i] for i in slow], "x", color="black", gid=f"{name} slowed")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    for axes in rows[1]:
        axes.set_xlabel("minutes")
    figure.suptitle(f"{run.name}: {energy:.1f} Wh")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return _finish(figure)


# ---- Predictions of the image examples ----


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a run's model says of each of the N test images, for C classes."""

    dataset: str
    classes: tuple[str, ...]  # C names
    labels: np.ndarray  # (N,), int64
    logits: np.ndarray  # (N, C), float64
    image: Callable[[int], np.ndarray]  # the picture number i: (H, W), or in colour (H, W, 3), uint8

    @property
    def predicted(self) -> np.ndarray:
        """The most likely class of each image (N,)."""
        return self.logits.argmax(1)

    @property
    def log_probabilities(self) -> np.ndarray:
        """The logarithms of the probabilities that the model gives to the classes (N, C)."""
        shifted = self.logits - self.logits.max(1, keepdims=True)  # exp() of large logits would be infinite
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

    @property
    def losses(self) -> np.ndarray:
        """The cross-entropy of each image (N,): large where the model is sure, and wrong."""
        return -self.log_probabilities[np.arange(len(self.labels)), self.labels]

    @property
    def accuracy(self) -> float:
        """The share of the images that are classified correctly, from 0 to 1."""
        return float((self.predicted == self.labels).mean())


@functools.lru_cache(maxsize=4)
def predict(
    run: Run, dataset: str | None = None, data_dir: str | None = None, image_size: int | None = None
) -> Predictions:
    """Return what the model of a finished run of an image example says of the test images, computed anew, here.

    What is not given is taken from run.json, else it is train.py's default. `data_dir` is relative to the example's
    folder; torchrun_vision has no `dataset`, and only it has `image_size`. Raises ResultsError if this kernel lacks a
    package, if the data cannot be read, or if the accuracy is not the one in the last row of metrics.csv: then these
    are not the data that the run was tested with.
    """
    if reason := _no_images(run):
        raise ResultsError(reason)
    example, settings = run.example, run.settings
    dataset, data_dir = dataset or settings.get("dataset", "digits"), data_dir or settings.get("data_dir")
    try:
        with _modules_of(example):
            if (example / "image_files.py").exists():
                image_size = image_size or settings.get("image_size", 32)
                found = _predict_files(run, settings.get("model", "resnet18"), data_dir or "images", image_size)
            elif (example / "numpy_data.py").exists():
                found = _predict_keras(run, dataset, data_dir or "data")
            else:
                found = _predict_convnet(run, dataset, data_dir or "data")
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"this kernel ({sys.executable}) cannot import {error.name}: start the notebook with the environment of "
            f"{example.name}, in which its requirements.txt is installed"
        ) from None
    except ImportError as error:
        raise ResultsError(f"{error}. {OWN_MODEL}") from None
    except Exception as error:
        if type(error).__name__ != "DataError":  # each example has a class of its own of that name
            raise
        raise ResultsError(f"{error} (for other data pass dataset=... or data_dir=...)") from None
    _check(run, found)
    return found


def _no_images(run: Run) -> Text | None:
    """Return why there is nothing to predict for a run, in one sentence, or None if there is."""
    if run.quality != "test_accuracy":
        return Text(f"{run.name} is no image run: its metrics.csv has no column test_accuracy.")
    if not run.example:
        return Text(f"There is no train.py above {run.folder}: its models and data are not known.")
    if not any((run.folder / name).exists() for name in ("model.pt", "model.keras")):
        return Text(f"{run.name} has not finished yet: train.py writes its model after the last epoch.")
    return None


@contextlib.contextmanager
def _modules_of(example: Path) -> Iterator[None]:
    """Have `import` find the modules of one example; afterwards it is as if they had never been imported.

    Each example has a package `common` of its own, and Python would take the first one for all of them.
    """
    names = {path.stem for path in (*example.glob("*.py"), *(file.parent for file in example.glob("*/__init__.py")))}

    def take_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}

    others = take_out()
    sys.path.insert(0, str(example))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(example))
        take_out()
        sys.modules.update(others)


def _in(example: Path, data_dir: str) -> str:
    """Return a data folder as train.py sees it, which is started in the example's folder."""
    return str(example / Path(data_dir).expanduser())


def _names(dataset: str, classes: int) -> tuple[str, ...]:
    """Return the names of a ConvNet's classes."""
    return FASHION if dataset == "fashion_mnist" else tuple(str(number) for number in range(classes))


def _predict_convnet(run: Run, dataset: str, data_dir: str) -> Predictions:
    """Predict with model.pt and the example's own common/, with PyTorch."""
    from common import data
    from common.models import ConvNet

    test_set = data.load(dataset, _in(run.example, data_dir))[1]
    model, dtype = _with_weights(ConvNet(), run, f"is not of the ConvNet in common/models.py. {OWN_MODEL}")
    read = getattr(test_set, "__getitems__", None) or getattr(test_set, "__getitem__")  # noqa: B009
    logits = _compute(model, (read(part)[0].to(dtype) for part in _parts(len(test_set))))
    pixels = test_set.images.squeeze(-1).numpy()
    return Predictions(dataset, _names(dataset, logits.shape[1]), test_set.labels.numpy(), logits, pixels.__getitem__)


def _predict_files(run: Run, name: str, data_dir: str, image_size: int) -> Predictions:
    """Predict with model.pt and the image files of torchrun_vision, transformed as in its test."""
    import torch
    from torchvision import models

    import image_files

    _, test_set = image_files.load(_in(run.example, data_dir), image_size, seed=0)
    names = test_set.classes
    other = f"is no {name} for the {len(names)} classes in {data_dir}: pass data_dir=..."
    model, dtype = _with_weights(models.get_model(name, num_classes=len(names)), run, other)

    def image(index: int) -> torch.Tensor:
        return test_set[index][0]

    with ThreadPoolExecutor() as threads:  # decoding does not hold Python's lock
        parts = (torch.stack([*threads.map(image, part)]) for part in _parts(len(test_set)))
        logits = _compute(model, (image_files.normalise(images, dtype) for images in parts))
    labels = np.asarray(test_set.targets)
    return Predictions(data_dir, tuple(names), labels, logits, lambda i: image(i).permute(1, 2, 0).numpy())


def _predict_keras(run: Run, dataset: str, data_dir: str) -> Predictions:
    """Predict with model.keras and the data of horovod_tensorflow, with Keras."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # only errors, no notes on the processor
    os.environ["KERAS_BACKEND"] = "tensorflow"  # whatever ~/.keras/keras.json says
    import keras

    import numpy_data

    test_set = numpy_data.load(dataset, _in(run.example, data_dir))[1]
    model = keras.models.load_model(run.folder / "model.keras", compile=False)
    outputs = [model(test_set[part][0], training=False) for part in _parts(len(test_set))]
    logits = np.concatenate([keras.ops.convert_to_numpy(keras.ops.cast(output, "float64")) for output in outputs])
    pixels = test_set.images[..., 0]
    return Predictions(dataset, _names(dataset, logits.shape[1]), test_set.labels, logits, pixels.__getitem__)


def _parts(size: int) -> list[list[int]]:
    """Return the indices of all samples, in parts that fit into memory."""
    return [list(range(first, min(first + 256, size))) for first in range(0, size, 256)]


def _with_weights(model: Any, run: Run, otherwise: str) -> tuple:
    """Return a PyTorch model with the weights in model.pt, and their type; raise ResultsError if they do not fit."""
    import torch

    path = run.folder / "model.pt"
    weights = torch.load(path, map_location="cpu", weights_only=True)
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    try:
        model.to(dtype).load_state_dict(weights)
    except RuntimeError:
        raise ResultsError(f"{path} {otherwise}") from None
    return model, dtype


def _compute(model: Any, batches: Iterator[Any]) -> np.ndarray:
    """Return the logits (N, C) of a PyTorch model, on the GPU if there is one."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    with torch.inference_mode():
        return torch.cat([model(images.to(device)).double().cpu() for images in batches]).numpy()


def _check(run: Run, found: Predictions) -> None:
    """Raise ResultsError unless the predictions have the accuracy in the last row of metrics.csv.

    As many images may be classified otherwise as have two logits on top that bf16, in which a run may have computed,
    can hardly tell apart: it rounds to 8 bits, in each layer. In fp32 that is seldom one.
    """
    second, first = np.sort(found.logits, 1)[:, -2:].T
    undecided = (first - second <= 2**-6 * np.abs(found.logits).max(1)).sum()
    wanted = run.rows[-1]["test_accuracy"]
    if abs(found.accuracy - wanted) * len(found.labels) > undecided + 0.01:
        raise ResultsError(
            f"the model of {run.name} classifies {found.accuracy:.2%} of {found.dataset} correctly, and the last row "
            f"of its metrics.csv says {wanted:.2%}: pass the data that it was tested with (dataset=..., data_dir=...), "
            "or wait if the run has been continued and has not finished yet"
        )


def confusion_matrix(found: Predictions) -> np.ndarray:
    """Return how many images of each class (row) were taken for each class (column): (C, C), int64."""
    size = len(found.classes)
    return np.bincount(found.labels * size + found.predicted, minlength=size**2).reshape(size, size)


def worst(found: Predictions, count: int = 12) -> np.ndarray:
    """Return the indices of at most `count` wrongly classified images, those with the largest loss first."""
    wrong = np.flatnonzero(found.predicted != found.labels)
    return wrong[np.argsort(-found.losses[wrong], kind="stable")][:count]


def confusion(
    run: Run, dataset: str | None = None, data_dir: str | None = None, image_size: int | None = None
) -> Figure | Text:
    """Return a figure of the confusion matrix, or a sentence if the run is not of images; raises what predict() does.

    The colour is the share of the row, so that a rare class is as visible as a frequent one.
    """
    if reason := _no_images(run):
        return reason
    found = predict(run, dataset, data_dir, image_size)
    matrix, size = confusion_matrix(found), len(found.classes)
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = float(np.clip(2.5 + 0.4 * size, 5, 11))
    figure, axes = plt.subplots(figsize=(side + 1, side), layout="constrained")
    picture = axes.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axes, shrink=0.8, label="share of the class's images (%)")
    if size <= 40:  # more do not fit
        turned = {"rotation": 45, "ha": "right"} if max(map(len, found.classes)) > 2 else {}
        axes.set_xticks(range(size), found.classes, **turned)
        axes.set_yticks(range(size), found.classes)
    if size <= 20:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, matrix[row, column], ha="center", va="center", color=colour, fontsize="small")
    axes.set(xlabel="predicted class", ylabel="true class")
    title = f"{run.name}: {found.accuracy:.2%} of {len(found.labels)} test images are correct"
    axes.set_title(title, fontsize="medium")
    return _finish(figure)


def mistakes(
    run: Run, dataset: str | None = None, data_dir: str | None = None, image_size: int | None = None, count: int = 12
) -> Figure | Text:
    """Return a figure of the `count` worst mistakes, or a sentence if there is none; raises what predict() does.

    The percentages are the probabilities that the model gives to the true class and to the one that it says.
    """
    if reason := _no_images(run):
        return reason
    found = predict(run, dataset, data_dir, image_size)
    indices = worst(found, count)
    if not len(indices):
        return Text(f"{run.name} makes no mistake on the {len(found.labels)} test images.")
    columns = 6
    lines = -(-len(indices) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(10, 2.2 * lines + 0.4), squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.axis("off")
    shares = np.exp(found.log_probabilities)
    for axes, i in zip(grid.flat, indices, strict=False):
        axes.imshow(found.image(int(i)), cmap="gray_r")
        true, taken = found.classes[found.labels[i]], found.classes[found.predicted[i]]
        own, most = shares[i, found.labels[i]], shares[i].max()
        axes.set_title(f"true: {true} ({own:.1%})\nmodel: {taken} ({most:.1%})", fontsize="small")
    wrong = int((found.predicted != found.labels).sum())
    figure.suptitle(f"{run.name}: the worst {len(indices)} of {wrong} mistakes", fontsize="medium")
    return _finish(figure)
