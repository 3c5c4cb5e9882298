"""plumbing/checks.py: which data and models are the same, and which results cannot be right."""

import importlib.util
import math
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.launchers import ROOT


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, as new; the program that it is called by is ddp_spawn's train.py."""
    path = ROOT / "plumbing" / "checks.py"
    spec = importlib.util.spec_from_file_location("checks_of_examples", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "examples" / "ddp_spawn" / "train.py")])
    yield module


class Data:
    """Samples in memory; indexing with a list of indices returns a batch, as the examples' data sets do."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        if isinstance(self.inputs, dict):
            return {name: values[indices] for name, values in self.inputs.items()}, self.labels[indices]
        return self.inputs[indices], self.labels[indices]


class One(Data):
    """The same for a single index, and without labels in memory."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self.inputs, self.answers = inputs, labels

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not isinstance(index, int):
            raise TypeError("an index is a whole number")
        return self.inputs[index], self.answers[index]


class Augmented(Data):
    """Images with noise of a generator that nobody seeds."""

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        return self.inputs[indices] + np.random.default_rng().random((28, 28)), self.labels[indices]


class Mirrored(Data):
    """Images that a generator which nobody seeds mirrors every other time."""

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        mirrored = np.random.default_rng().random() < 0.5
        return self.inputs[indices][..., :: -1 if mirrored else 1], self.labels[indices]


class Flipped(Data):
    """Images with noise of the generator that all of a process share."""

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        return self.inputs[indices] + np.random.rand() + random.random(), self.labels[indices]


class Wrong(Data):
    """A data set whose files cannot be read."""

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        raise OSError("no such file")


class Lists(Data):
    """Images of different sizes, and dicts of boxes: a batch of them is two lists."""

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        boxes = [{"boxes": self.inputs[index][: index % 3, :4]} for index in indices]
        return [self.inputs[index][None, : 9 + index % 9] for index in indices], boxes


def arrays(count: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels."""
    generator = np.random.default_rng(seed)
    return generator.random((count, 28, 28)).astype("float32"), generator.integers(10, size=count)


X, Y = arrays()
IDS = np.random.default_rng(1).integers(300, size=(200, 16))
MASKS = np.random.default_rng(2).integers(2, size=(200, 28, 28))
OTHER, PIXELS = arrays(seed=5)[0], (X * 250).astype("uint8")


def changed(labels: np.ndarray, place: int, value: float) -> np.ndarray:
    """Return labels of which one is another."""
    labels = labels.copy()
    labels[place] = value
    return labels


# The training set of the first run, that of the resumed one, and what the message has to say.
ANOTHER_SET: dict[str, tuple[Any, Any, str]] = {
    "fewer samples": (Data(X, Y), Data(X[:100], Y[:100]), "200 training samples, now 100"),
    "more samples": (Data(X, Y), Data(*arrays(300)), "200 training samples, now 300"),
    "one more": (Data(X, Y), Data(*arrays(201)), "200 training samples, now 201"),
    "one other label": (Data(X, Y), Data(X, changed(Y, 7, 10)), "other labels of the 200 training samples"),
    "other order": (Data(X, Y), Data(X[::-1].copy(), Y[::-1].copy()), "other labels"),
    "other images, same labels": (Data(X, Y), Data(OTHER, Y), "other training samples: "),
    "scaled twice": (Data(X, Y), Data(X / 255, Y), "other training samples: 64 of 64"),
    "other normalisation": (Data(X, Y), Data(X - 0.5, Y), "other training samples"),
    "other type": (Data(X, Y), Data(X.astype("float64"), Y), "(28, 28) float32 with labels () int64, now (28, 28) fl"),
    "other size": (Data(X, Y), Data(X[:, :14], Y), "(28, 28) float32 with labels () int64, now (14, 28) float32"),
    "another text": (Data({"ids": IDS}, Y), Data({"ids": IDS + 1}, Y), "other training samples: 64 of 64"),
    "another input": (Data({"ids": IDS}, Y), Data({"ids": IDS, "mask": IDS}, Y), "{ids: (16,) int64}"),
    "other masks": (One(X, MASKS), One(X, 1 - MASKS), "other training samples"),
    "a regression": (Data(X, Y / 7), Data(X, changed(Y / 7, 3, 99.0)), "other labels"),
    "labels not in memory": (One(X, Y.tolist()), One(X, (Y + 1).tolist()), "other training samples: 64 of 64"),
    "images of different sizes": (Lists(X, Y.tolist()), Lists(OTHER, Y.tolist()), "other training samples: 64 of 64"),
    "unreadable, of another class": (One(X, Y), Wrong(X, Y), ""),
}


@pytest.mark.parametrize("case", ANOTHER_SET)
@pytest.mark.parametrize("part", ["training", "test"])
def test_another_data_set(checks: ModuleType, case: str, part: str) -> None:
    """A data set that differs in number, form, labels or content is another one, and the message says in what."""
    before, after, text = ANOTHER_SET[case]
    same = Data(X, Y)
    pairs = [(one, same) if part == "training" else (same, one) for one in (before, after)]
    found = compared(checks, *pairs)
    if text:
        assert len(found) == 1 and text.replace("training", part) in found[0], found
    else:  # nothing can be compared but the number and the name
        assert found == [f"{part} samples of One, now Wrong"]


def compared(checks: ModuleType, first: tuple[Any, Any], second: tuple[Any, Any]) -> list[str]:
    """Return how the second pair of data sets differs from the first; all samples are read, however slowly."""
    vars(checks)["SECONDS"] = 60
    checks.look_at_data(Namespace(data_dir="data"), *first, True)
    old = dict(checks.facts)
    checks.facts.clear()
    checks.look_at_data(Namespace(data_dir="elsewhere"), *second, True)
    return checks.differences(old, "checkpoint.pt")


SAME_SET: dict[str, tuple[Any, Any]] = {
    "the same": (Data(X, Y), Data(X.copy(), Y.copy())),
    "rounded otherwise": (Data(X, Y), Data(X * np.float32(1 + 1e-6), Y)),
    "pixels rounded otherwise": (Data(PIXELS, Y), Data(PIXELS + (X > 0.9), Y)),
    "augmented without a seed": (Augmented(X, Y), Augmented(X, Y)),
    "mirrored every other time": (Mirrored(X, Y), Mirrored(X, Y)),
    "augmented with common numbers": (Flipped(X, Y), Flipped(X, Y)),
    "a list of labels": (Data(X, Y), Data(X, np.asarray(Y.tolist()))),
    "labels as 32 bits": (One(X, Y.tolist()), One(X, Y.tolist())),
    "inputs as a dict": (Data({"a": IDS, "b": X}, Y), Data({"b": X, "a": IDS}, Y)),
    "unreadable": (Wrong(X, Y), Wrong(X, Y)),
    "one sample": (Data(X[:1], Y[:1]), Data(X[:1], Y[:1])),
    "with NaN in it": (Data(X * np.nan, Y), Data(X * np.nan, Y)),
}


@pytest.mark.parametrize("case", SAME_SET)
def test_same_data_set(checks: ModuleType, case: str) -> None:
    """What is the same, but for rounding or random augmentation, is not refused."""
    before, after = SAME_SET[case]
    assert compared(checks, (before, before), (after, after)) == []


def test_reading_changes_nothing(checks: ModuleType) -> None:
    """Reading leaves random generators where they were, also those of the data set, and opens no file of it."""
    import torch

    class Lazy(Data):
        file: str | None = None
        generator, torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(4)

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.generator, self.torch_generator = np.random.default_rng(3), torch.Generator().manual_seed(4)

        def __getitem__(self, indices: Any) -> tuple[Any, Any]:
            self.file = self.file or "open"
            noise = (
                self.generator.random() + torch.rand(1, generator=self.torch_generator).item() + torch.rand(1).item()
            )
            return self.inputs[indices] + noise, self.labels[indices]

    data = Lazy(X, Y)
    subset = torch.utils.data.Subset(data, range(100))

    def states() -> list[Any]:
        own = [str(data.generator.bit_generator.state), data.torch_generator.get_state().tolist()]
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), *own]

    before = states()
    checks.look_at_data(Namespace(data_dir="x"), data, subset, True)
    assert states() == before and data.file is None
    assert len(checks.facts["data"]["test"]["read"]) == 64 and checks.facts["data"]["test"]["samples"] == 100


def test_cost(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops after 0.6 s a set, however slow its files are; what is in memory takes one look at 64 samples."""
    clock: Any = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(checks, "time", clock)

    class Slow(One):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            clock.now += 0.0625
            return super().__getitem__(index)

    for data, seconds, samples in ((Slow(X, Y), 1.75, 4), (One(*arrays(12_000)), 0.0, 64)):
        clock.now = 0.0
        checks.look_at_data(Namespace(), data, data, True)
        assert clock.now == pytest.approx(seconds)  # of both sets, 4 and 2 samples, each read twice, and one
        assert len(checks.facts["data"]["training"]["read"]) == samples


class Drawing(Data):
    """Parts of an image at random places, drawn with a generator that it keeps."""

    def __init__(self, seed: int, anew: bool = False) -> None:
        super().__init__(X, Y)
        self.generator, self.anew = np.random.default_rng(seed), anew

    def __getitem__(self, indices: Any) -> tuple[Any, Any]:
        if self.anew:
            self.generator = np.random.default_rng(indices)
        return self.inputs[self.generator.integers(len(self), size=len(indices))], self.labels[indices]


def stream(rank: int | None, **attributes: Any) -> Any:
    """Return a stream that begins with the sample of this number, or with one that is drawn at random."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            first = int(torch.randint(100, ())) if rank is None else rank
            yield from zip(X[first:], Y[first:], strict=True)

    made = Stream()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class StandIn:
    """A data set that has all of another one but cannot be copied: its copy asks for what it does not have yet."""

    def __init__(self, dataset: Data) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


OWN_DRAWS: dict[str, tuple[list[Callable[[], Any]], str]] = {  # the sets of both processes: what the message says
    "a generator": ([lambda: Drawing(3), lambda: Drawing(3)], "Drawing keeps the generator generator, with which all"),
    "of each rank": ([lambda: Drawing(0), lambda: Drawing(1)], ""),
    "for each sample": ([lambda: Drawing(3, anew=True), lambda: Drawing(3, anew=True)], ""),
    "none": ([lambda: Flipped(X, Y), lambda: Flipped(X, Y)], ""),
    "a stream": ([lambda: stream(0), lambda: stream(0)], "Stream is a stream, of which all processes read the same"),
    "its parts": ([lambda: stream(0), lambda: stream(1)], ""),
    "a random stream": ([lambda: stream(None), lambda: stream(None)], ""),
    "a stream that goes on": ([lambda: stream(0, source=iter([])), lambda: stream(0, source=iter([]))], ""),
    "a stand-in for another": ([lambda: StandIn(Data(X, Y)), lambda: StandIn(Data(X, Y))], ""),
}


@pytest.mark.parametrize(("sets", "says"), OWN_DRAWS.values(), ids=OWN_DRAWS)
def test_own_draws(checks: ModuleType, sets: list[Callable[[], Any]], says: str) -> None:
    """What all processes would draw alike is found, unless one is alone or all share a model; nothing is drawn."""
    draws, before = [], np.random.get_state()[1].tolist()
    for make in sets:
        data = make()
        state = str(getattr(data, "generator", None))
        checks.own["draws"].clear()
        checks.note_own_draws(data)
        draws.append(dict(checks.own["draws"]))
        assert str(getattr(data, "generator", None)) == state and np.random.get_state()[1].tolist() == before
    message = checks.repeated(Namespace(world_size=2), draws)
    assert says in (message or "") and bool(message) == bool(says)
    assert not checks.repeated(Namespace(world_size=1), draws[:1])
    assert not checks.repeated(Namespace(world_size=2, groups=1), draws)


OTHER_SETS = {  # the training set of rank 1, where rank 0 has Data(X, Y): what the message says
    "the same": (Data(X + 1, Y), ""),
    "fewer": (Data(X[1:], Y[1:]), "rank 1 has 199 training samples, and rank 0 200, so some are read twice"),
    "another order": (Data(X, np.roll(Y, 1)), "rank 1 has other training samples than rank 0, or in another order, so"),
    "no labels": (One(X, Y), ""),
}


@pytest.mark.parametrize(("data", "says"), OTHER_SETS.values(), ids=OTHER_SETS)
def test_other_sets(checks: ModuleType, data: Any, says: str) -> None:
    """Processes that have divided or shuffled their data in different ways are refused."""
    sets = []
    for number in range(2):
        checks.look_at_data(Namespace(), data if number else Data(X, Y), Data(X, Y), False)
        sets.append(dict(checks.own["sets"]))
    message = checks.other_sets(sets)
    assert says in (message or "") and bool(message) == bool(says)


class Masks(One):
    """The same, with a label for each pixel."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.inputs[index]


class OwnLabels(One):
    """Samples that a generator makes, which nothing knows of: they are others each time."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], np.random.default_rng().integers(1000)


WITHOUT_LABELS = {  # what both processes have, without labels in memory: what the message says
    "another order": ([One(X, Y), One(X, np.roll(Y, 1))], "other training samples than rank 0"),
    "numbers in another order": ([One(X, X[:, 0, 0]), One(X, np.roll(X[:, 0, 0], 1))], "other training samples than"),
    "the same": ([One(X, Y), One(X + 1, Y)], ""),
    "masks, which may be augmented": ([Masks(X, Y), Masks(X + 1, Y)], ""),
    "made at random": ([OwnLabels(X, Y), OwnLabels(X, Y)], ""),
}


@pytest.mark.parametrize(("parts", "says"), WITHOUT_LABELS.values(), ids=WITHOUT_LABELS)
def test_other_sets_without_labels(checks: ModuleType, parts: list[Any], says: str) -> None:
    """Where the labels are not in memory, some are read in each process, and compared."""
    sets = []
    for part in parts:
        checks.look_at_data(Namespace(), part, part, False)
        sets.append(dict(checks.own["sets"]))
    message = checks.other_sets(sets)
    assert says in (message or "") and bool(message) == bool(says)


def test_draw_apart(checks: ModuleType) -> None:
    """Processes that have seeded random and np.random alike draw other numbers, and the same in each run."""
    draws = []
    for number in (0, 1, 2, 1):
        with checks.same_random_numbers():
            checks.seed(5)
            checks.draw_apart(number)
            draws.append((random.random(), np.random.rand()))
    assert draws[1] == draws[3]
    assert all(len(set(numbers)) == 3 for numbers in zip(*draws[:3], strict=True))


def test_streams_that_are_explained(checks: ModuleType) -> None:
    """What PyTorch says of a stream with a sampler, and of one for a sampler, gets a line that names the page."""
    import torch

    for make in (
        lambda: torch.utils.data.DataLoader(stream(0), sampler=range(3), batch_size=None),
        lambda: torch.utils.data.DistributedSampler(stream(0), 2, 0, drop_last=True),
    ):
        with pytest.raises((TypeError, ValueError)) as found:
            make()
        assert "docs/sequences-and-streams.md" in checks.explain(found.value)
    assert (ROOT / "docs" / "sequences-and-streams.md").exists()


def test_spread(checks: ModuleType) -> None:
    """The samples that are read are spread over the set, however few they are, and none is read twice."""
    for count in (1, 2, 5, 64, 65, 1000, 10**9):
        places = checks.spread(count)
        assert len(set(places)) == len(places) == min(count, 64) and all(0 <= place < count for place in places)
    assert checks.spread(1000)[:4] == [0, 500, 250, 750]


def models() -> dict[str, Callable[[], Any]]:
    """Return models, each of which is another one than the first."""
    from torch import nn

    class Net(nn.Sequential):
        pass

    class Other(nn.Sequential):
        pass

    return {
        "first": lambda: Net(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)),
        "more classes": lambda: Net(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 12)),
        "another name": lambda: Other(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)),
        "wider": lambda: Net(nn.Linear(8, 65), nn.ReLU(), nn.Linear(65, 10)),
        "another layer": lambda: Net(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        "without a bias": lambda: Net(nn.Linear(8, 64, bias=False), nn.ReLU(), nn.Linear(64, 10)),
        "names shifted": lambda: Net(nn.ReLU(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)),
        "another type": lambda: Net(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 10)).double(),
        "transposed": lambda: Net(nn.Linear(64, 8), nn.ReLU(), nn.Linear(10, 64)),
    }


@pytest.mark.parametrize("case", list(models()))
def test_another_model(checks: ModuleType, case: str) -> None:
    """A model with other weights, or of another class, is another one; with other values it is the same."""
    args = Namespace()
    checks.look_at_model(args, models()["first"]())
    old = dict(checks.facts)
    checks.facts.clear()
    checks.look_at_model(args, models()[case]())
    found = checks.differences(old, "checkpoint.pt")
    if case == "first":
        assert found == []
    elif case == "another name":
        assert found == ["the model Net, now Other"]
    else:
        assert len(found) == 1 and found[0].startswith("a model Net of "), found


def test_checkpoint_without_a_fingerprint(checks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """That of an older train.py is not refused; one line says that it was not compared."""
    checks.look_at_data(Namespace(), Data(X, Y), Data(X, Y), True)
    assert checks.differences(None, Path("output/checkpoint.pt")) == []
    assert capsys.readouterr().out.startswith("output/checkpoint.pt is from an older train.py")


def test_names(checks: ModuleType) -> None:
    """The first line of a run names --dataset or the text if that is read, else the class and the folder of yours."""
    theirs = type("Images", (Data,), {"__module__": "common.data"})(X, Y)
    from torch.utils.data import Subset

    args = Namespace(dataset="digits", data_dir="cells")
    assert checks.name_of_data(args, theirs) == checks.name_of_data(args, Subset(theirs, range(3))) == "digits"
    assert checks.name_of_data(args, Data(X, Y)) == checks.name_of_data(args, Subset(Data(X, Y), [1])) == "Data (cells)"
    assert checks.name_of_data(Namespace(text_file=None), theirs) == "a random source"
    assert checks.name_of_data(Namespace(text_file="a.txt"), theirs) == "a.txt"
    assert checks.name_of_data(Namespace(), Data(X, Y)) == "Data"


def rows(**values: float) -> dict[str, Any]:
    """Return the progress at the end of the first epoch of 11 steps, with these metrics."""
    row = {"epoch": 1, "train_loss": 1.5, "test_loss": 1.2, "test_accuracy": 0.5, "seconds": 1.0} | values
    return {"step": 11, "history": [row]}


# Which progress is refused, and what the message says; None: it is not.
RESULTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "masks": (rows(test_accuracy=297.9756), "test_accuracy of epoch 1 is 297.98, and has to be from 0 to 1"),
    "which line": (rows(test_accuracy=1.01), "in the place of len(labels), see train.py:"),
    "negative": (rows(test_accuracy=-0.2), "has to be from 0 to 1"),
    "no accuracy at all": (rows(test_accuracy=math.nan), "test_accuracy of epoch 1 is nan"),
    "no AUC": (rows(test_auc=math.nan), "test_auc of epoch 1 is nan"),
    "top-5": (rows(test_top5_accuracy=5.0), "test_top5_accuracy"),
    "test loss": (rows(test_loss=math.nan), "test_loss of epoch 1 is nan"),
    "train loss": (rows(train_loss=math.inf), "train_loss of epoch 1 is inf"),
    "validation loss": (rows(val_loss=-math.inf), "val_loss of epoch 1 is -inf"),
    "one output": (rows(train_loss=0.0), "train_loss of epoch 1 is exactly 0"),
    "no number": (rows(note="warm", test_bleu=None, test_top5_accuracy=7.0), "test_top5_accuracy of ep"),  # type: ignore[arg-type]
    "of each class": (rows(test_iou=[0.5, 0.25]), "test_iou of epoch 1 is no single number"),  # type: ignore[arg-type]
    "an array": (rows(test_iou=np.ones(3)), "each of its numbers a name of its own, such as test_iou_0"),  # type: ignore[arg-type]
    "short": ({**rows(), "step": 8}, "epoch 1 has taken 8 of 11 steps"),
    "no step": ({**rows(), "step": 0}, "epoch 1 has taken 0 of 11 steps"),
    "right": (rows(), None),
    "all right": (rows(test_accuracy=1.0), None),
    "none right": (rows(test_accuracy=0.0), None),
    "rounded": (rows(test_accuracy=1 + 1e-12), None),
    "negative loss": (rows(train_loss=-3.0, test_loss=-4.0), None),
    "other metrics": (rows(perplexity=math.inf, r2=-7.0, test_error=12.0), None),
    "within an epoch": ({**rows(test_accuracy=0.5), "step": 15}, None),
    "before the first epoch ends": ({"step": 5, "history": []}, None),
    "exactly 0 later": ({"step": 22, "history": [*rows()["history"], *rows(train_loss=0.0)["history"]]}, None),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results(checks: ModuleType, case: str) -> None:
    """Metrics outside of their range, and epochs that are too short, are refused; what can be right is not."""
    progress, text = RESULTS[case]
    message, switch = judged(checks, progress, [{"weights": True}] * 2)
    assert message is text is None or (text in message and (switch is None) == ("ALLOW_NAN" not in message))


def test_long_epoch(checks: ModuleType) -> None:
    """An epoch that ends after more steps than were counted is refused; a save within the next epoch is not."""
    for before, refused in (({"step": 0, "history": []}, True), (rows(), False), ({"step": 30, **rows()}, False)):
        checks.note_saved(before)
        message, _ = judged(checks, rows() | {"step": 12})
        assert (message is not None) == refused and (not refused or "has taken 12 of 11 steps: does a l" in message)


def judged(checks: ModuleType, progress: dict[str, Any], reports: Any = ({"weights": True},)) -> Any:
    """Return what is said of a run with epochs of 11 steps."""
    args = Namespace(steps_per_epoch=11, output_dir="output")
    epochs = len(progress["history"])
    return checks.judge(args, progress, (epochs, progress["step"] - 11 * epochs), reports)


def test_own_loss_of_0(checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A train loss of exactly 0 is refused only where train.py calls cross_entropy."""
    (tmp_path / "train.py").write_text("loss = F.mse_loss(logits, labels)  # not F.cross_entropy(logits, labels)\n")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert judged(checks, rows(train_loss=0.0)) == (None, None)


def test_weights(checks: ModuleType) -> None:
    """Weights that are not finite are noticed even where the loss still is, as after a gradient that was not."""
    import torch

    model, args = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), Namespace()
    assert checks.own_report(args, model)["weights"]
    frozen = torch.nn.Parameter(torch.full((2,), math.nan), requires_grad=False)
    model.register_parameter("frozen", frozen)
    assert checks.own_report(args, model)["weights"]
    for value in (math.nan, math.inf, -math.inf):
        model[1].bias.data[1] = value
        assert not checks.own_report(args, model)["weights"]
    message, switch = judged(checks, {"step": 5, "history": []}, [{"weights": True}, {"weights": False}])
    assert "weights are not finite after step 5" in message and switch == "ALLOW_NAN"


def test_weights_of_two_processes(checks: ModuleType) -> None:
    """Weights that differ by more than rounding are refused, with the name of the first; parts of a weight differ."""
    import torch

    def say(*models: Any) -> tuple[str | None, str | None]:
        checksums = {checks.own_report(Namespace(), model)["checksum"] for model in models}
        assert len(checksums) == 1 + (models[0] is not models[1])
        return checks.judge_weights([checks.extremes(model) for model in models])

    def holds(values: torch.Tensor, **options: Any) -> Any:
        model = torch.nn.Module()
        model.scale = torch.nn.Parameter(values, **options)
        return model

    values = torch.tensor([-0.5, 0.5, 1.0])
    first, coarse = holds(values), holds(values.bfloat16())
    right = [(first, first), (first, holds(values * (1 + 3e-6))), (coarse, holds(values.bfloat16() * 1.01))]
    assert [say(*models) for models in right] == [(None, None)] * 3
    wrong = [holds(values * (1 + 3e-4)), holds(-values), holds(values * 0), holds(values, requires_grad=False)]
    wrong.append(holds(torch.tensor([-0.5, 0.4, 1.0])))  # as nn.Embedding(max_norm=1) makes rows smaller that it reads
    of_keras = [SimpleNamespace(path="scale", numpy=(values * factor).numpy) for factor in (1, 2)]
    pairs = [(first, other) for other in wrong] + [(other, first) for other in wrong]
    keras = [SimpleNamespace(trainable_variables=[variable]) for variable in of_keras]
    for models in [*pairs, keras]:
        message, switch = say(*models)
        assert "scale of rank 1 differs from that of rank 0: " in message and f"{switch}=1" in message
    parts = [holds(values), holds(values[:2])]
    for part in parts:
        part.scale.to_local = part.scale.detach  # as that of a DTensor
    assert len({checks.own_report(Namespace(), part)["checksum"] for part in parts}) == 1
    assert checks.judge_weights([checks.extremes(part) for part in parts]) == (None, None)


def test_rest_of_a_shard(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills up DeepSpeed's last shards may be no number; what a process has of a weight may not."""
    import torch

    for rank, finite in enumerate((False, True, True)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        model = torch.nn.Linear(2, 2, bias=False)  # 4 values, in shards of 3
        model.weight.ds_tensor = torch.tensor([1.0, math.nan, math.nan])
        model.weight.ds_tensor.ds_numel, model.weight.ds_numel, model.weight.ds_process_group = 3, 4, None
        assert checks.own_report(Namespace(), model)["weights"] == finite


def test_gradients_of_two_processes(checks: ModuleType) -> None:
    """Where processes have got gradients of other weights, which ZeRO would mix up, the first is named."""
    import torch

    def extremes_after(*parts: int) -> dict[str, Any]:
        checks.gradients.clear()
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        torch.nn.init.ones_(model[0].weight.requires_grad_(False))
        model[1].weight.allreduce = False  # an expert of DeepSpeed, of which each process has others
        checks.count_gradients(model)
        for part in parts:
            model[part](torch.ones(1)).backward()
        return {name: bounds for name, bounds in checks.extremes(model).items() if name in checks.gradients}

    assert len(extremes_after()) == 4
    assert checks.judge_weights([extremes_after(0, 2), extremes_after(2, 0)]) == (None, None)
    message, switch = checks.judge_weights([extremes_after(0, 2), extremes_after(0, 1)])
    assert message.startswith("the number of gradients of 1.bias of rank 1 differs from that of rank 0: use all")
    assert "--zero-stage 0" in message and switch == "ALLOW_OTHER_WEIGHTS"


# The losses of an epoch's batches, batches of a step, and the step of the first that is not finite; None: all are.
LOSSES: dict[str, tuple[list[float], int, int | None]] = {
    "the first": ([math.nan, 1, 1, 1], 1, 1),
    "in the middle": ([1, 2, math.inf, 1, 1, 1], 1, 3),
    "the last": ([1, 2, 3, -math.inf], 1, 4),
    "again and again": ([1, math.nan, math.inf, 1], 1, 2),
    "accumulated": ([1, 1, 1, 1, math.nan, 1], 2, 3),
    "accumulated, the second": ([1, 1, 1, math.nan, 1, 1], 2, 2),
    "none": ([1, 0, -5, 1e30], 1, None),
    "large": ([3e38, 3e38], 1, None),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_losses(checks: ModuleType, case: str, kind: str) -> None:
    """The first loss that is not finite is found with its step and samples; the next epoch counts anew."""
    import torch
    from torch.utils.data import BatchSampler, DataLoader

    values, batches, step = LOSSES[case]
    model, args = torch.nn.Linear(2, 2), Namespace(gradient_accumulation_steps=batches)
    samples = [20 + place for place in range(2 * len(values))]
    loader = DataLoader(range(1000), sampler=BatchSampler(samples, 2, drop_last=True), batch_size=None)
    for _ in range(2):
        for value in values:
            checks.note_loss(loader, torch.tensor(value) if kind == "tensor" else value)
        report = checks.own_report(args, model)
        checks.forget_losses()
        progress = {"step": 11 + len(values) // batches, "history": rows()["history"]}
        message, switch = judged(checks, progress, [{"weights": True}, report])
        if step is None:
            assert "steps_ago" not in report and message is None
            continue
        first = next(place for place, value in enumerate(values) if not math.isfinite(value))
        assert f"the loss of rank 1 is not finite in step {step} of epoch 2, samples {20 + 2 * first}," in message
        assert switch == "ALLOW_NAN" and "ALLOW_NAN=1" in message


def test_samples_of_a_batch(checks: ModuleType) -> None:
    """The samples of a batch are named for each kind of loader whose order can be repeated, and no others."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    data = range(100)
    state = torch.get_rng_state()
    assert checks.samples_of(DataLoader(data, batch_size=4), 2) == "samples 8, 9, 10, 11"
    assert checks.samples_of(DataLoader(data, sampler=[[5], [7, 8]], batch_size=None), 1) == "samples 7, 8"
    assert checks.samples_of(np.arange(12).reshape(-1, 3), 1) == "samples 3, 4, 5"
    sampler = DistributedSampler(data, 2, 1, seed=3)
    ours = f"samples {', '.join(map(str, list(sampler)[4:8]))}"
    assert checks.samples_of(DataLoader(data, batch_size=4, sampler=sampler), 1) == ours
    assert checks.samples_of(DataLoader(data, batch_size=4, shuffle=True), 1) == "unknown samples"
    assert checks.samples_of(iter([1, 2]), 0) == "unknown samples"
    files = Namespace(paths=np.array([b"a.jpg", b"b.jpg", b"c.jpg"]))
    seeded = Namespace(batch_sampler=[[(0, 9)], [(2, 9), (1, 9)]], dataset=files)
    assert checks.samples_of(seeded, 1) == "files c.jpg, b.jpg"
    assert checks.samples_of([list(range(100))], 0).endswith("62, 63 and 36 more")
    assert torch.equal(torch.get_rng_state(), state)


# Labels, the shape of the model's output, what stands in train.py, and whether it is refused.
CROSS, OWN = "loss = F.cross_entropy(logits, labels)", "loss = F.mse_loss(logits.squeeze(1), labels)"
CLASSES: dict[str, tuple[Any, tuple[int, ...], str, bool]] = {
    "from 1": (Y + 1, (1, 10), CROSS, True),
    "-1 for none": (Y - 1, (1, 10), CROSS, True),
    "255": (changed(Y, 3, 255), (1, 10), CROSS, True),
    "fewer outputs": (Y, (1, 5), CROSS, True),
    "one output": (Y % 2, (1, 1), CROSS, True),
    "as bytes": ((Y + 1).astype("uint8"), (1, 10), CROSS, True),
    "they fit": (Y, (1, 10), CROSS, False),
    "more outputs": (Y, (1, 1000), CROSS, False),
    "-100, which is left out": (changed(Y, 3, -100), (1, 10), CROSS, False),
    "ignored": (changed(Y, 3, 255), (1, 10), "F.cross_entropy(logits, labels, ignore_index=255)", False),
    "a regression": (Y, (1, 1), OWN, False),
    "yes or no": (Y % 2, (1, 1), "F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())", False),
    "an embedding": (Y * 100, (1, 128), "loss = triplet(logits, labels)", False),
    "masks": (MASKS * 255, (1, 2, 28, 28), CROSS, False),
    "several of them": (MASKS[:, 0], (1, 28), CROSS, False),
    "shares": (np.eye(10)[Y], (1, 10), CROSS, False),
    "real numbers": (Y / 3, (1, 1), OWN, False),
}


@pytest.mark.parametrize("case", CLASSES)
def test_labels_and_outputs(checks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    """Class labels for which the model has no output are refused before the first step; other targets are not."""
    labels, shape, text, refused = CLASSES[case]
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    inputs = np.zeros((len(labels), 2))
    checks.look_at_data(Namespace(), Data(inputs, labels), Data(inputs, labels), False)
    message = checks.wrong_output(np.zeros(shape))
    assert (message is not None) == refused, message
    assert not refused or f"the model has {shape[1]} outputs: cross_entropy (train.py:1)" in message


def test_softmax_in_the_model(checks: ModuleType) -> None:
    """A model that ends in softmax is refused, since cross_entropy computes it as well; other outputs are not."""
    import torch

    inputs = np.zeros((len(Y), 2))
    checks.look_at_data(Namespace(), Data(inputs, Y), Data(inputs, Y), False)
    logits = torch.randn(1, 10, requires_grad=True)
    for output in (logits, logits.log_softmax(1), logits.sigmoid(), logits * math.nan):
        assert checks.wrong_output(output) is None
    assert "add up to 1, as softmax makes them" in checks.wrong_output(logits.softmax(1))


class OnDisk(list):
    """Labels that h5py or zarr would read from the disk."""

    chunks = (64,)

    def __getitem__(self, _: Any) -> Any:
        raise AssertionError("they are not read")


CODES = [0, 1, 2, 30]


class Mapped(One):
    """A data set that has other labels in memory than its samples, as torchvision's with a target_transform."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, label = super().__getitem__(index)
        return inputs, CODES.index(label)


def test_labels_that_reading_changes(checks: ModuleType) -> None:
    """Labels are those of the samples; what reading changes, or what has to be read from the disk, is not looked at."""
    mapped = Mapped(np.zeros((36, 2)), CODES * 9)
    mapped.labels = np.array(CODES * 9)
    for data, noted in ((mapped, {}), (Data(X, Y), {"least": 0, "most": 9})):
        checks.look_at_data(Namespace(), data, data, False)
        assert checks.labels_of_all == noted
    assert checks.labels_in_memory(Data(X, OnDisk(Y.tolist()))) is None


def test_exceptions_that_are_explained(checks: ModuleType) -> None:
    """What a label outside of the classes raises, found in the first step, gets an understandable line; others none."""
    import torch
    from torch.nn import functional as F

    with pytest.raises(IndexError) as found:
        F.cross_entropy(torch.zeros(2, 10), torch.tensor([1, 10]))
    assert "the label 10 is outside of the classes" in checks.explain(found.value)
    masks = torch.full((1, 4, 4), 255)
    with pytest.raises(IndexError) as found:
        F.cross_entropy(torch.zeros(1, 2, 4, 4), masks)
    assert "the label 255 is outside of the classes" in checks.explain(found.value)
    keras = "Received a label value of 10 which is outside the valid range of [0, 10).  Label values: 1 10"
    assert "the label 10" in checks.explain(ValueError(keras))
    assert "CUDA_LAUNCH_BLOCKING=1" in checks.explain(RuntimeError("CUDA error: device-side assert triggered\n..."))
    for error in (IndexError("list index out of range"), ValueError("x"), RuntimeError("Connection closed by peer")):
        assert checks.explain(error) is None


COMPILER = {  # what a line must have of what PyTorch raises: the name in its text, and the text
    "No working C++": ("_inductor", "InvalidCxxCompiler: No working C++ compiler found in ...: (None, 'g++')"),
    "Python.h": ("_inductor", "C++ compile error\n\nCommand:\ng++ a.cpp\n\nOutput:\na.cpp:1: fatal error: Python.h: N"),
    "TritonMissing": ("_dynamo", "backend='inductor' raised:\nTritonMissing: Cannot find a working triton"),
    "cuda.h": ("_dynamo", "backend='inductor' raised:\nCalledProcessError\nmain.c:1:10: fatal error: cuda.h: No"),
    "Read-only file system": ("_inductor", "OSError: [Errno 30] Read-only file system: '/tmp/torchinductor_me'"),
    "fake tensors": ("_dynamo", "Dynamo failed to run FX node with fake tensors: got RuntimeError(shapes)"),
}


@pytest.mark.parametrize("expected", COMPILER)
def test_compiler_fails(checks: ModuleType, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    """What PyTorch's compiler raises becomes one line with the reason, only where --compile was asked for."""
    module, text = COMPILER[expected]
    error = type("InductorError", (RuntimeError,), {"__module__": f"torch.{module}.exc"})(text)
    monkeypatch.setattr("sys.argv", ["train.py", "--compile"])
    message = checks.explain(error)
    assert message.startswith("--compile: PyTorch cannot compile the model (") and expected in message, message
    assert "\n" not in message and "raised:" not in message
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert checks.explain(error) is None
