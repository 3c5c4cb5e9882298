"""What only horovod_tensorflow promises: its data, its order of samples, bf16."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common import data
from harness import edits, outputs, runs
from tests import samples

pytestmark = pytest.mark.only("horovod_tensorflow")


@pytest.fixture
def numpy_data(source: Path) -> ModuleType:
    """The example's module that reads the data.

    Its download imports TensorFlow, after which the import of torchvision aborts the process: so that comes first.
    """
    import torchvision  # noqa: F401

    return outputs.import_file(source / "common" / "data.py")


def test_two_processes_as_one(example: str, folder: Path) -> None:
    """2 processes with batch 32 and 1 with batch 64 have the same loss in the first epoch, to 1e-4, in fp32.

    The model is one that only makes its weights when it is first called, and its regularizer is heeded: kernels begin
    with values of 0.0128 on average.
    """
    models = folder / "common" / "models.py"
    edits.edit(models, "            Input((28, 28, 1)),\n", "")
    edits.edit(models, "Dense(128, ", "Dense(128, kernel_regularizer=__import__('keras').regularizers.L2(1.0), ")
    losses = []
    for processes, batch_size in ((2, 32), (1, 64)):
        words = f"--epochs 1 --batch-size {batch_size} --output-dir {processes}".split()
        runs.train(example, folder, processes, *words, OMP_NUM_THREADS="1")
        (row,) = outputs.read_metrics(folder / str(processes))
        assert row["world_size"] == processes
        losses.append(row["train_loss"])
        kernel = outputs.read_model(folder / str(processes))["dense/kernel"]
        assert kernel.abs().mean() < 0.006
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_same_digits(numpy_data: ModuleType, example: str) -> None:
    """Its digits are those of the other examples; 1 pixel in 3,000 is rounded to the next grey level."""
    for ours, theirs in zip(numpy_data.load("digits"), data.load("digits"), strict=True):
        difference = np.abs(ours.images.astype(int) - theirs.images.numpy())
        assert difference.max() <= 1 and difference.mean() < 1 / 3000
        assert ours.labels.tolist() == theirs.labels.tolist()
        images, labels = ours[[0, 5]]
        expected, _ = theirs.__getitems__([0, 5])
        assert images.shape == (2, 28, 28, 1) and images.dtype == np.float32 and labels.dtype == np.int64
        assert np.abs(images[..., 0] - expected[:, 0].numpy()).max() < 0.02
    train_set, test_set = numpy_data.load("synthetic", size=600)
    assert (len(train_set), len(test_set)) == (600, 100)


def test_idx_files(numpy_data: ModuleType, example: str, tmp_path: Path) -> None:
    """MNIST's files, where the other examples have them, are read; a damaged one is named, with what to do."""
    raw = samples.write_data(tmp_path, "mnist")
    ours, theirs = (module.load("mnist", str(tmp_path))[1] for module in (numpy_data, data))
    assert (ours.images == theirs.images.numpy()).all() and ours.labels.tolist() == theirs.labels.tolist()
    files = sorted(path.name for path in raw.iterdir())
    for file in files:
        content = (raw / file).read_bytes()
        for left in (0, 2, 6, 40):
            (raw / file).write_bytes(content[:left])
            with pytest.raises(numpy_data.DataError, match=r"MNIST/raw .*python -m common\.data mnist"):
                numpy_data.load("mnist", str(tmp_path))
        (raw / file).write_bytes(content)
    test_labels, training_labels = [file for file in files if "labels" in file]
    (raw / training_labels).write_bytes((raw / test_labels).read_bytes())
    with pytest.raises(numpy_data.DataError, match="do not belong together"):
        numpy_data.load("mnist", str(tmp_path))
