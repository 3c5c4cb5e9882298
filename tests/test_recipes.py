"""The recipes in each README, "Make it yours", and in four pages of docs/, applied to a copy as they stand."""

import ast
import copy
import re
import runpy
import shutil
import textwrap
from pathlib import Path

import pytest

from harness import outputs, readme, refusals, runs
from harness.edits import NOTE_USE, apply_diff, edit, note_use
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT

OWN = ("own_data", "own_model")  # files of the examples that train the ConvNet


# Random augmentation, of which each process that reads samples notes the numbers that it has drawn.
NOTE = """        with open(f"draws/{os.getpid()}", "a") as file:
            print(*draws, file=file, sep="\\n")
"""
DRAWS = {  # by what own_data.py computes with; without the sample that load() looks at
    "torch": (
        "        return torch.from_numpy(self.images[index])[None] / 255, int(self.labels[index])\n",
        "        draws = torch.randint(2**62, (int(bool(torch.utils.data.get_worker_info())),)).tolist()\n"
        f"{NOTE}        image = torch.from_numpy(self.images[index])[None] / 255\n"
        "        return image * (0.9 + sum(draws) / 2**63), int(self.labels[index])\n",
    ),
    "tensorflow": (
        '        return images, self.labels[indices].astype("int64")\n',
        "        draws = np.random.randint(2**62, size=len(indices) * (len(indices) > 1))\n"
        f'{NOTE}        return images, self.labels[indices].astype("int64")\n',
    ),
}


def augment_at_random(example: str, folder: Path) -> None:
    """Have own_data.py draw a number for each sample, and note it."""
    old, new = DRAWS["torch" if LAUNCHERS[example].pytorch else "tensorflow"]
    edit(folder / "own_data.py", old, new)
    edit(folder / "own_data.py", "from pathlib import Path\n", "import os\nfrom pathlib import Path\n")
    (folder / "draws").mkdir()


def assert_drawn_once(folder: Path, epochs: int) -> None:
    """Check that no process, and no worker of it, has drawn the numbers of another, or those of another epoch."""
    draws = [line for path in (folder / "draws").iterdir() for line in path.read_text().split()]
    assert len(draws) >= epochs * 1438 * 0.9 and len(set(draws)) == len(draws), (len(draws), len(set(draws)))


def make_it_yours(folder: Path) -> None:
    """Apply all recipes of an example's README to its copy, and write the data that own_data.py reads."""
    for text in readme.fences(folder / "README.md", "diff"):
        apply_diff(folder / "train.py", text)
    write_data(folder / "data")


def write_data(target: Path) -> None:
    """Write the digits in the form of own_data.py."""
    import numpy as np

    from common import data

    target.mkdir()
    for part, images in zip(("train", "test"), data.load("digits"), strict=True):
        arrays = {"images": images.images.squeeze(-1).numpy(), "labels": images.labels.numpy()}
        np.savez(target / f"{part}.npz", **arrays)


def test_recipes_fit(example: str, folder: Path) -> None:
    """Each line that the recipes name is in train.py once, and what they make of it is Python that uses our files."""
    diffs = readme.fences(folder / "README.md", "diff")
    for text in diffs:
        apply_diff(folder / "train.py", text)
    assert diffs
    tree = ast.parse((folder / "train.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    for name in OWN if LAUNCHERS[example].convnet else ():
        assert name in imported and (folder / f"{name}.py").exists()
    for text in readme.fences(folder / "README.md", "python"):
        ast.parse(text)


@pytest.mark.only("ddp_spawn")
def test_own_data_py(example: str, folder: Path) -> None:
    """own_data.py reads batches, also an empty one, as deepspeed asks for; without its file there is one clear line."""
    from common import data

    module = runpy.run_path(str(folder / "own_data.py"))
    with pytest.raises(data.DataError, match=r"own_data\.py: .*train\.npz"):
        module["load"]("digits", folder / "data")
    write_data(folder / "data")
    train_set, test_set = module["load"]("digits", folder / "data")
    assert (len(train_set), len(test_set)) == (1438, 359)
    images, labels = test_set[[3, 5]]
    assert images.shape == (2, 1, 28, 28) and 0 <= images.min() < images.max() <= 1
    assert labels.tolist() == data.load("digits")[1].labels[[3, 5]].tolist()
    assert [part.shape for part in test_set[[]]] == [(0, 1, 28, 28), (0,)]


@pytest.mark.runs("one")
@pytest.mark.only("convnet")
def test_own_data_and_own_model(example: str, folder: Path) -> None:
    """With both recipes the example learns: a model with BatchNorm and dropout, single samples, loader workers.

    What these draw at random, such as for augmentation, differs in all processes and epochs, as nowhere by itself: each
    process has the same seed, from which its workers have theirs.
    """
    make_it_yours(folder)
    augment_at_random(example, folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    rows = outputs.read_metrics(folder / "output" / "whole")
    assert rows[-1]["test_accuracy"] > 0.8 and rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert_drawn_once(folder, 2)


@pytest.mark.runs("weekly")
@pytest.mark.only("convnet")
def test_recipes_resumed(example: str, folder: Path) -> None:
    """With both recipes, a run that was killed in its second epoch ends with the bits of an uninterrupted one.

    So it does with random augmentation, but for Lightning, and for Horovod, whose workers stay from epoch to epoch.
    """
    make_it_yours(folder)
    if LAUNCHERS[example].pytorch and not {"horovod", "lightning"} & {*example.split("_")}:
        augment_at_random(example, folder)
    runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/whole")
    run = runs.start(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed")
    run.read_epoch(1)
    run.kill()
    run.wait()
    run = runs.train(example, folder, 2, "--epochs", 2, "--output-dir", "output/killed", "--resume")
    assert "continuing after epoch 1 of 2" in run.stdout
    outputs.assert_same_run(folder / "output" / "killed", folder / "output" / "whole")


NAMES = ("own-data.md", "rare-classes-and-pairs.md", "more-state.md", "sequences-and-streams.md")
PAGES = [ROOT / "docs" / name for name in NAMES]
OWN_FILES = ROOT / "tests" / "own"
TEXT = "".join(page.read_text() for page in PAGES)
HEADED = re.compile(r"^For ((?:\w+(?:, | and )?)+)(?:, [^\n]*)?:\n\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INPUT = "The shape of the input"
KINDS = {  # folder of tests/own, or BORDER: the page's section, the column of metrics.csv, its bounds and epochs
    "masks": ("Masks: a class for each pixel", "test_iou", (0.8, 1), 15),
    "border": ("Masks with pixels that do not count", "test_iou", (0.7, 1), 15),
    "regression": ("Regression: a number for each sample", "test_rmse", (0.01, 0.4), 20),
    "texts": ("Texts: inputs by their names", "test_accuracy", (0.9, 1), 4),
    "several_labels": ("Several labels for each sample", "test_accuracy", (0.9, 1), 4),
    "rare": ("Rare classes: AUC, and a weighted sampler", "test_auc", (0.95, 1), 4),
    "pairs": ("Pairs: a loss that compares samples", "test_accuracy", (0.7, 1), 15),
    "boxes": ("Boxes: lists of images and of targets", "test_map", (0.6, 1), 15),
    "sequences": ("Sequences: a loss for each token", "test_accuracy", (0.95, 1), 8),
    "lines": ("Streams: shards of lines", "test_accuracy", (0.8, 1), 4),
    "stream": ("Streams that have no places", "test_accuracy", (0.8, 1), 4),
}
# Folders of tests/own, whose own_data.py is that of another: the section of the page, and that folder.
STATES = {
    "two_networks": ("A second network, with its optimizer", "rare"),
    "teacher": ("A teacher that follows, and a queue", "pairs"),
    "stages": ("Stages: layers that are frozen at first", "rare"),
}
BLOCKS = {  # which have the pages' Python
    **dict.fromkeys(("texts", "rare", "boxes", "sequences", "lines", "stream"), "own_data.py"),
    **dict.fromkeys(("pairs", *STATES), "own_model.py"),
}
NO_DIFF = ("texts", "lines")
# Two processes train them as one does.
PROCESSES_ALIKE = ("border", "rare", "pairs", "boxes", "sequences", "lines", "stream")
NAMED = {name for names, _ in HEADED.findall(TEXT) for name in re.findall(r"\w+", names)} & {*EXAMPLES}


def diffs_of(example: str, section: str) -> list[str]:
    """Return the diffs of a section of the pages that are for an example."""
    (text,) = re.findall(rf"^## {re.escape(section)}$(.*?)(?=^##? |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert len(HEADED.findall(text)) == text.count("```diff"), "a diff does not say for which examples it is"
    return [diff for names, diff in HEADED.findall(text) if example in re.findall(r"\w+", names)]


def diffs_for(example: str, kind: str) -> list[str]:
    """Return the diffs for this kind of data or state and an example; none if the pages have none."""
    diffs = diffs_of(example, (KINDS | STATES)[kind][0])
    return diffs_of(example, KINDS["masks"][0]) + diffs if kind == "border" and diffs else diffs


# The masks, where the border of a disc has no class, as in Pascal VOC, nor has the upper half of every second image, so
# that processes have other numbers of pixels that count; and a model that two processes train as one does.
DISC = "            image[kind, mask > 0] += 120\n"
FIRST, SECOND = ("nn.Conv2d(inputs, outputs, 3, padding=1), ", "nn.Conv2d(outputs, outputs, 3, padding=1), ")
BORDER = [
    (
        "own_data.py",
        DISC,
        f"{DISC}            distance = (rows - row) ** 2 + (columns - column) ** 2\n"
        "            mask[(distance >= (radius - 1) ** 2) & (distance < (radius + 1) ** 2)] = 255\n"
        "        self.labels[::2, :16] = 255\n",
    ),
    ("own_data.py", "LABEL_SHAPE, CLASSES)", "LABEL_SHAPE, CLASSES, ignored=255)"),
    ("own_model.py", f"{FIRST}nn.BatchNorm2d(", f"{FIRST}nn.GroupNorm(2, "),
    ("own_model.py", f"{SECOND}nn.BatchNorm2d(", f"{SECOND}nn.GroupNorm(2, "),
    ("own_model.py", "nn.Dropout(0.1)", "nn.Dropout(0)"),
]


def with_input(example: str, kind: str) -> list[str]:
    """Return the diffs for this kind after that for the shape of the input, unless they have their own line for it."""
    return (diffs_of(example, INPUT) if kind not in ("boxes", "stream") else []) + diffs_for(example, kind)


def use_own_files(folder: Path, kind: str) -> None:
    """Apply the README's diffs to a copy, with own data and an own model of this kind, and no loader workers."""
    for text in readme.fences(folder / "README.md", "diff"):
        apply_diff(folder / "train.py", text)
    own = ["masks" if kind == "border" else kind]
    if kind in STATES:
        own.insert(0, STATES[kind][1])
    for name in own:
        for file in (OWN_FILES / name).glob("*.py"):
            shutil.copy(file, folder)
    if kind == "border":
        for name, old, new in BORDER:
            edit(folder / name, old, new)
    text = (folder / "train.py").read_text()
    text = re.sub(r'"num_workers": \d[^}]*}', '"num_workers": 0}', text)
    text = text.replace('    workers["multiprocessing_context"] = "spawn"\n', "")
    (folder / "train.py").write_text(text.replace('loading["num_workers"] = 2', 'loading["num_workers"] = 0'))


def measured(folder: Path, kind: str) -> dict[str, float]:
    """Return loss and metric of model.pt over the test set, in one process, as they are defined."""
    import torch
    from torch.nn import functional as F

    data, model = (runpy.run_path(str(folder / f"{name}.py")) for name in OWN)
    model = model["OwnModel"]()
    model.load_state_dict(outputs.read_model(folder / "output"))
    _, test_set = data["load"]("digits", "data")
    inputs, labels = test_set[list(range(len(test_set)))]
    assert kind == "boxes" or len(inputs) == len(labels) == len(test_set)  # Inputs may be labels, which are counted
    with torch.no_grad():
        logits = model.eval()(inputs)
    if kind == "boxes":
        precision = runpy.run_path(str(folder / "own_model.py"))["average_precision"](logits, labels)
        return {"test_loss": 1 - precision, "test_map": precision}
    if kind == "sequences":  # without padding
        logits, labels = logits.transpose(1, 2)[labels >= 0], labels[labels >= 0]
    if kind == "regression":
        errors = (logits - labels).double()
        return {"test_loss": errors.square().mean().item(), "test_rmse": errors.square().mean().sqrt().item()}
    if kind == "several_labels":
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        return {"test_loss": loss.item(), "test_accuracy": ((logits > 0) == (labels > 0)).double().mean().item()}
    if kind == "pairs":
        similar, own = logits[:, 0] @ logits[:, 1].T, torch.arange(len(logits))
        loss, found = F.cross_entropy(similar * 10, own), similar.max(1).values == similar.diag()
        return {"test_loss": loss.item(), "test_accuracy": found.double().mean().item()}
    found, loss = logits.argmax(1), F.cross_entropy(logits, labels, ignore_index=255).item()
    if kind == "rare":  # AUC: how often a sample of the rare class has the higher score of two
        scores = logits.softmax(1)[:, 1].double()
        higher = (scores[labels == 1][:, None] - scores[labels == 0]).sign()
        return {"test_loss": loss, "test_auc": (higher.mean().item() + 1) / 2}
    if kind not in ("masks", "border"):
        return {"test_loss": loss, "test_accuracy": (found == labels).double().mean().item()}
    found = found.where(labels != 255, 255)
    areas = [((found == n) & (labels == n), (found == n) | (labels == n)) for n in range(data["CLASSES"])]
    overlaps = [(both.sum() / either.sum()).item() for both, either in areas]
    accuracy = (found == labels).double().mean().item()
    return {"test_loss": loss, "test_iou": sum(overlaps) / len(overlaps), "test_accuracy": accuracy}


@pytest.mark.parametrize("kind", [*KINDS, *STATES])
def test_page_fits(example: str, folder: Path, kind: str) -> None:
    """The page's diffs apply, after the README's, to each example that they name, and what they make is Python."""
    diffs = with_input(example, kind)
    assert bool(diffs) <= (example in NAMED)
    if not diffs:
        return
    use_own_files(folder, kind)
    for text in diffs:
        apply_diff(folder / "train.py", text)
    ast.parse((folder / "train.py").read_text())
    if kind in BLOCKS:  # the page's Python is that of the test
        blocks = [block for page in PAGES for block in readme.fences(page, "python")]
        assert len(blocks) == len(BLOCKS)
        if kind in STATES:  # methods, which the page has without their class
            blocks = [textwrap.indent(block.replace("\n\n\n", "\n\n"), "    ") for block in blocks]
        assert any(block in (folder / BLOCKS[kind]).read_text() for block in blocks)


@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
@pytest.mark.runs("one")
@pytest.mark.parametrize(
    "kind", ["texts", *(pytest.param(kind, marks=pytest.mark.runs("weekly")) for kind in KINDS if kind != "texts")]
)
def test_own_kind(example: str, folder: Path, kind: str) -> None:
    """The page's diffs train a model of each kind: the metric is far above chance, and is that of the model.

    The numbers of all processes' shards are those that one process computes from model.pt; the printed lines name them.
    Data of another size are refused at a resume.
    """
    _, column, (least, most), epochs = KINDS[kind]
    diffs = diffs_for(example, kind)
    if not diffs and kind not in NO_DIFF:
        return
    use_own_files(folder, kind)
    for text in with_input(example, kind):
        apply_diff(folder / "train.py", text)
    if column not in (folder / "train.py").read_text():  # masks without the second diff
        column, least = "test_accuracy", 0.95
    run = runs.train(example, folder, 2, "--epochs", epochs, "--batch-size", 16, "--lr", 0.005)
    row, right = outputs.read_metrics(folder / "output")[-1], measured(folder, kind)
    assert least < row[column] <= most, row
    assert not {"test_accuracy", "test_iou", "test_rmse", "test_auc", "test_map"} & row.keys() - {column}
    assert row["test_loss"] == pytest.approx(right["test_loss"], rel=1e-5)
    assert row[column] == pytest.approx(right[column], rel=1e-5)
    percent = f"acc {row[column]:.2%}" if column == "test_accuracy" else ""
    number = f"{column.removeprefix('test_').upper().replace('IOU', 'IoU').replace('MAP', 'mAP')} {row[column]:.4f}"
    assert f"finished: test {percent or number}, model" in run.stdout
    line = {"test_accuracy": f"| test acc {row[column]:7.2%} |"}.get(column)
    assert (line or f"| {column.replace('_', ' ')} {row[column]:.4f} |") in run.stdout, run.stdout
    assert ("test acc" in run.stdout) == (column == "test_accuracy")
    if kind in PROCESSES_ALIKE and LAUNCHERS[example].fp64:
        for processes in (1, 2):
            words = ("--epochs", 1, "--batch-size", 32 // processes, "--precision", "fp64")
            runs.train(example, folder, processes, *words, "--output-dir", f"output/{processes}")
        one, two = (outputs.read_model(folder / "output" / number) for number in "12")
        assert outputs.largest_difference(one, two) < 1e-9
    if kind != "regression":
        return
    edit(folder / "own_data.py", "ROWS = 1280", "ROWS = 1281")
    before = (folder / "output" / "metrics.csv").read_bytes()
    more = runs.start(example, folder, 1, "--epochs", epochs + 1, "--batch-size", 32, "--resume").wait()
    refusals.assert_refused(more, LAUNCHERS[example].status_after_bad_input, "1280", "1281", "output")
    assert (folder / "output" / "metrics.csv").read_bytes() == before


@pytest.mark.only("ddp_spawn", "torchrun_multinode")
@pytest.mark.runs("weekly")
@pytest.mark.parametrize("kind", [*STATES, "stream"])
def test_more_state(example: str, folder: Path, kind: str) -> None:
    """Interrupted in the third of four epochs, a run ends with the bits of one that ran through; a checkpoint has all.

    torchrun_multinode stops after the third batch of that epoch; in ddp_spawn a process kills itself there. A stream
    is read up to its place.
    """
    use_own_files(folder, kind)
    for text in with_input(example, kind):
        apply_diff(folder / "train.py", text)
    if kind == "stream":
        (folder / "used.py").write_text(NOTE_USE)
        batch = "                yield default_collate("
        note = "                __import__('used').note(self.epoch, [number])\n"
        edit(folder / "own_data.py", batch, note + batch)
    else:
        note_use(folder, LAUNCHERS[example])
    words = ("--epochs", 4, "--batch-size", 32, "--lr", 0.005)
    whole = runs.train(example, folder, 2, *words, "--output-dir", "output/whole", NUMBER="1")
    ends = {"NUMBER": "2", "END_IN": "2"} | ({"STEPS": "1"} if example == "torchrun_multinode" else {})
    first = runs.start(example, folder, 2, *words, "--output-dir", "output/cut", **ends).wait(leaves=60)
    (folder / runs.STOP).unlink(missing_ok=True)
    last = runs.train(example, folder, 2, *words, "--output-dir", "output/cut", "--resume", NUMBER="3")
    assert "continuing after epoch 2 of 4" in last.stdout and "finished" not in first.stdout, last.stdout
    assert ("stopped by a signal after step 3 of epoch 3" in first.stdout) == (example == "torchrun_multinode")
    outputs.assert_same_run(folder / "output" / "cut", folder / "output" / "whole")
    for run in (whole, first, last):
        assert "more-state.md" not in run.stdout, run.stdout


@pytest.mark.only("ddp_spawn")
def test_by_length(example: str, folder: Path) -> None:
    """In an epoch each sample is in one step, of samples of similar lengths, the same for any number of processes."""
    use_own_files(folder, "sequences")
    data = runpy.run_path(str(folder / "own_data.py"))
    train_set, _ = data["load"]("digits", "data")
    steps: dict[int, list[list[int]]] = {}
    for processes in (1, 2, 4):
        parts = []
        for rank in range(processes):
            sampler = data["ByLength"](train_set, processes, rank, 3, 24)
            sampler.set_epoch(1)
            parts.append(list(sampler))
            assert len(sampler) // (24 // processes) == len(parts[-1]) // (24 // processes) == 800 // 24
        size = 24 // processes
        steps[processes] = [sorted(sum((part[n * size : (n + 1) * size] for part in parts), [])) for n in range(33)]
    assert steps[1] == steps[2] == steps[4] and len({index for step in steps[1] for index in step}) == 33 * 24
    spread = [max(lengths) - min(lengths) for lengths in ([train_set.lengths[i] for i in step] for step in steps[1])]
    assert sum(spread) / len(spread) < 3
    sampler.set_epoch(2)
    assert list(sampler) != parts[-1]


@pytest.mark.only("ddp_spawn")
def test_lines(example: str, folder: Path) -> None:
    """Each line of each shard is read as it is, by its number, whatever the order in which the files are named.

    One of the shards has no line, as those of Spark often have none.
    """
    use_own_files(folder, "lines")
    data = runpy.run_path(str(folder / "own_data.py"))
    data["load"]("digits", folder / "data")
    (folder / "data" / "train-0b.jsonl").touch()
    train_set, _ = data["load"]("digits", folder / "data")
    paths = sorted((folder / "data").glob("train-*"))
    lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    for found in (train_set, data["Lines"](reversed(paths))):
        assert [found.line(index) for index in range(len(found))] == lines and len(lines) == 761
        sent = copy.copy(found)  # as to a loader worker: without the files, which are mapped there
        assert found.files and not sent.files and sent.line(5) == lines[5]


@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
@pytest.mark.runs("weekly")
def test_mask_buffer(example: str, folder: Path) -> None:
    """A model with BatchNorm, and a buffer of the largest negative numbers, learns with the README's recipe alone.

    The ordinary run of "texts" above has such a buffer, too.
    """
    use_own_files(folder, "mask_buffer")
    write_data(folder / "data")
    runs.train(example, folder, 2, "--epochs", 5, "--batch-size", 16, "--lr", 0.002)
    rows, weights = outputs.read_metrics(folder / "output"), outputs.read_model(folder / "output")
    assert rows[-1]["test_accuracy"] > 0.6 and all(row["train_loss"] < 10 for row in rows)
    assert weights["later"].min() == -3.4028234663852886e38 and weights["later"].max() == 0


# What is left as it was: what the line says, with {line} for the place in train.py.
FORGOTTEN = {
    "masks": (["test_accuracy", "from 0 to 1", "labels.numel()", "train.py:"], [INPUT]),
    "regression": (["train_loss", "exactly 0", "mse_loss", "train.py:"], [INPUT]),
    "masks without its shape": (["fix_summation_order", "(1, 1, 28, 28)", "own_model.py", "edit that line"], []),
}
*OTHERS, LAST = FORGOTTEN  # the last needs no epoch


@pytest.mark.only("ddp_spawn")
@pytest.mark.parametrize("what", [LAST, *(pytest.param(name, marks=pytest.mark.runs("weekly")) for name in OTHERS)])
def test_forgotten(example: str, folder: Path, what: str) -> None:
    """Who forgets the page's lines gets one line that names the line of train.py to change, and no finished run."""
    says, sections = FORGOTTEN[what]
    use_own_files(folder, what.split()[0])
    for section in sections:
        for text in diffs_of(example, section):
            apply_diff(folder / "train.py", text)
    run = runs.start(example, folder, 1, "--epochs", 3, "--batch-size", 64).wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *says)
    assert not (folder / "output" / "model.pt").exists()


def test_diff_that_does_not_apply(tmp_path: Path) -> None:
    """A recipe for lines that are not in train.py, or there twice, or that changes nothing, is noticed."""
    (tmp_path / "train.py").write_text("a\nb\na\n")
    for text in ("-c\n+d\n", "-a\n+d\n", " a\n+d\n", " b\n", "b\n+c\n", " a\n c\n+d\n"):
        with pytest.raises(AssertionError):
            apply_diff(tmp_path / "train.py", text)
    apply_diff(tmp_path / "train.py", "-b\n+d\n+e\n")
    assert (tmp_path / "train.py").read_text() == "a\nd\ne\na\n"
    apply_diff(tmp_path / "train.py", " d\n-e\n+f\n f\n+g\n")
    assert (tmp_path / "train.py").read_text() == "a\nd\nf\ng\na\n"
