"""What only torchrun_vision promises: image files that may be damaged, loader workers, exact metrics, logs, weights."""

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from harness import edits, outputs, runs
from harness.runs import Reference

pytestmark = pytest.mark.only("torchrun_vision")


@pytest.fixture
def module(folder: Path) -> Callable[[str], ModuleType]:
    """A function that imports a module of the example's folder."""
    return lambda name: outputs.import_file(folder / f"{name}.py")


def classifier(name: str, classes: int) -> torch.nn.Module:
    """Return torchvision's model of this name, with random weights."""
    from torchvision import models  # here, since this file is read with every example, and some do without it

    return getattr(models, name)(num_classes=classes)


def test_exact_metrics(example: str, folder: Path, reference: Reference, module: Callable[[str], ModuleType]) -> None:
    """Test loss, top-1 and top-5 accuracy in metrics.csv are those of model.pt, computed here by one process.

    best.pt has the weights of the epoch with the highest accuracy: here of the last, or of the one that it says.
    """
    image_files = module("image_files")
    _, test_set, classes = image_files.load(folder / "images", 32)
    images, labels = (torch.stack(part) for part in zip(*[(i, torch.tensor(n)) for i, n in test_set], strict=True))
    assert len(classes) == 6 and len(labels) == 150 and images.shape[1:] == (3, 32, 32)
    rows = outputs.read_metrics(reference.output)
    best = max(rows, key=lambda row: row["test_accuracy"])
    for name, row in (("model.pt", rows[-1]), ("best.pt", best)):
        model = classifier("resnet18", 6).eval()
        model.load_state_dict(torch.load(reference.output / name, weights_only=True))
        with torch.no_grad():
            logits = model(image_files.normalise(images, torch.float32))
        found = logits.topk(5).indices == labels[:, None]
        assert row["test_accuracy"] == pytest.approx(found[:, 0].double().mean().item(), abs=1e-12)
        assert row["test_top5_accuracy"] == pytest.approx(found.sum().item() / 150, abs=1e-12)
        assert row["test_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


@pytest.mark.runs("weekly")  # torchrun_multinode has ordinary tests of the same functions
def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; resumed in another way, the same bits.

    The resumed run reads a tar of the folder, without loader workers, and computes its activations twice: an image is
    augmented alike by whichever process, and nothing else changes a bit either. Nothing is left of the tar's copy.
    """
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    with tarfile.open(folder / "images.tar", "w") as tar:
        tar.add(folder / "images", "images")
    shutil.rmtree(folder / "images")
    (folder / "disk").mkdir()
    arguments = "--resume --data-dir images.tar --workers 0 --gradient-checkpointing --log-to tensorboard"
    last = runs.train(example, folder, 2, *arguments.split(), TMPDIR=str(folder / "disk"))
    runs.assert_continued(folder / "output", step)
    assert "0 workers for each process" in last.stdout and not [*(folder / "disk").glob("*.tar*")]
    outputs.assert_same_run(folder / "output", reference.output)
    assert tensorboard_epochs(folder / "output" / "tensorboard") == [1, 2, 3, 4, 5]


def tensorboard_epochs(folder: Path) -> list[int]:
    """Return the steps at which TensorBoard would show a test accuracy."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("test_accuracy")]


def test_damaged_image_in_training(example: str, folder: Path) -> None:
    """A damaged file that a loader worker meets ends the run with one line, on however many processes."""
    (folder / "images" / "val" / "six" / "007.png").write_bytes(b"not an image")
    run = runs.start(example, folder, 2, "--epochs", 1).wait()
    lines = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert run.status == 1 and len(lines) == 1, run.stderr  # beside it the other process says that it lost this one
    assert "images/val/six/007.png is damaged (it cannot be decoded): replace it, or remove it; python" in lines[0]


@pytest.mark.runs("weekly")
def test_two_processes_as_one(example: str, folder: Path) -> None:
    """Without BatchNorm, 2 x 8 images a step are 1 x 16: the same weights, to 1e-9 in fp64, after an epoch.

    So the gradients are averaged; and an image's augmentation does not depend on the process that reads it.
    """
    arguments = "--model squeezenet1_1 --image-size 64 --epochs 1 --warmup-steps 0 --precision fp64"
    no_dropout = "import torchvision.models.squeezenet as s; s.nn.Dropout = lambda p: s.nn.Identity()\n"
    imports = "from torchvision import models\n"
    edits.edit(folder / "classifiers.py", imports, imports + no_dropout)
    for processes, batch_size in ((2, 8), (1, 16)):
        output = f"output/{processes}"
        runs.train(
            example,
            folder,
            processes,
            *arguments.split(),
            "--batch-size",
            batch_size,
            "--output-dir",
            output,
            seconds=600,
        )
    one, two = (outputs.read_model(folder / "output" / name) for name in "12")
    assert outputs.largest_difference(one, two) < 1e-9


NOTE = """    import hashlib
    statistics = b"".join(b.numpy().tobytes() for b in model.buffers() if b.is_floating_point())
    print(hashlib.sha256(statistics).hexdigest(), file=open(f"statistics-{dist.get_rank()}", "a"))
"""


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("averaged", [True, False])
def test_statistics(example: str, folder: Path, averaged: bool) -> None:
    """All processes evaluate with the same statistics of BatchNorm; without averaging them, they do not."""
    edits.edit(folder / "train.py", "    model.eval()\n", f"    model.eval()\n{NOTE}")
    if not averaged:
        path = folder / "train.py"
        path.write_text(
            re.sub(
                r"^        classifiers\.average_statistics\(.*$", "        pass", path.read_text(), flags=re.MULTILINE
            )
        )
    runs.train(example, folder, 2, "--epochs", 1, "--warmup-steps", 0)
    one, other = ((folder / f"statistics-{rank}").read_text() for rank in (0, 1))
    assert (one == other) == averaged
