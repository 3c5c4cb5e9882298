"""What only horovod_tensorflow promises: its data, its order of samples, bf16, and what model.fit does."""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common import data
from harness import edits, outputs, runs, samples

pytestmark = pytest.mark.only("horovod_tensorflow")


@pytest.fixture
def numpy_data(source: Path) -> ModuleType:
    """The example's module that reads the data.

    Its download imports TensorFlow, after which the import of torchvision aborts the process: so that comes first.
    """
    import torchvision  # noqa: F401

    return outputs.import_file(source / "numpy_data.py")


def test_two_processes_as_one(example: str, folder: Path) -> None:
    """2 processes with batch 32 and 1 with batch 64 have the same loss in the first epoch, to 1e-4, in fp32.

    The model is one that only makes its weights when it is first called, and its regularizer is heeded: kernels begin
    with values of 0.0128 on average.
    """
    edits.edit(folder / "train.py", "            keras.Input((28, 28, 1)),\n", "")
    edits.edit(folder / "train.py", "Dense(128, ", "Dense(128, kernel_regularizer=keras.regularizers.L2(1.0), ")
    losses = []
    for processes, batch_size in ((2, 32), (1, 64)):
        words = f"--epochs 1 --batch-size {batch_size} --output-dir {processes}".split()
        runs.train(example, folder, processes, *words, SLURM_CPUS_PER_TASK="1")
        (row,) = outputs.read_metrics(folder / str(processes))
        assert row["world_size"] == processes
        losses.append(row["train_loss"])
        kernel = outputs.read_model(folder / str(processes))["layers/dense/vars/0"]
        assert kernel.abs().mean() < 0.006
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_same_digits(numpy_data: ModuleType, example: str) -> None:
    """Its digits are those of the other examples; 1 pixel in 3,000 is rounded to the next grey level."""
    for ours, theirs in zip(numpy_data.load("digits"), data.load("digits"), strict=True):
        difference = np.abs(ours.images.astype(int) - theirs.images.numpy())
        assert difference.max() <= 1 and difference.mean() < 1 / 3000
        assert ours.labels.tolist() == theirs.labels.tolist()
        images, labels = ours[[0, 5]]
        expected, _ = theirs[[0, 5]]
        assert images.shape == (2, 28, 28, 1) and images.dtype == np.float32 and labels.dtype == np.int64
        assert np.abs(images[..., 0] - expected[:, 0].numpy()).max() < 0.02
    train_set, test_set = numpy_data.load("synthetic", size=600)
    assert (len(train_set), len(test_set)) == (600, 100)


def test_idx_files(numpy_data: ModuleType, example: str, tmp_path: Path) -> None:
    """MNIST's files, where the other examples have them, are read; a damaged one is named, with what to do."""
    raw = samples.write_data(tmp_path, "mnist")
    ours, theirs = (module.load("mnist", str(tmp_path))[1] for module in (numpy_data, data))
    assert (ours.images == theirs.images.numpy()).all() and ours.labels.tolist() == theirs.labels.tolist()
    for file in numpy_data.FILES:
        content = (raw / file).read_bytes()
        for left in (0, 2, 6, 40):
            (raw / file).write_bytes(content[:left])
            with pytest.raises(numpy_data.DataError, match=r"MNIST/raw .*python numpy_data\.py mnist"):
                numpy_data.load("mnist", str(tmp_path))
        (raw / file).write_bytes(content)
    (raw / numpy_data.FILES[1]).write_bytes((raw / numpy_data.FILES[3]).read_bytes())
    with pytest.raises(numpy_data.DataError, match="do not belong together"):
        numpy_data.load("mnist", str(tmp_path))


FIT = "horovodrun --gloo -np 2 python fit.py"
DIFFERENCE = """
import tensorflow as tf

kernel = model.trainable_variables[0]
kernels = hvd.allgather(tf.reshape(getattr(kernel, "value", kernel) if keras.__name__ == "keras" else kernel, (1, -1)))
print("difference", np.abs(kernels[0] - kernels[1]).max() > 0)
"""


@pytest.mark.runs("weekly")
def test_model_fit(example: str, folder: Path, tmp_path: Path) -> None:
    """fit.py, with tf-keras, learns, and both processes have the same weights at the end.

    With Keras 3 each has its own, as the README warns: the day that this changes, the README has to.
    """
    packages = tmp_path / "packages"
    install = ["python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), "tf-keras==2.21.0"]
    assert " ".join(install[3:4] + install[-1:]) in (folder / "README.md").read_text()
    done = runs.Run(install, folder).wait()
    assert done.status == 0, done.stderr
    text = (folder / "fit.py").read_text()
    assert f"`{FIT}`" in (folder / "README.md").read_text() and FIT in text
    (folder / "fit.py").write_text(text + DIFFERENCE)
    three = text.replace('os.environ["TF_USE_LEGACY_KERAS"] = "1"', 'os.environ["KERAS_BACKEND"] = "tensorflow"')
    three = three.replace("import tf_keras as keras", "import keras").replace("callbacks = [", "callbacks = []\n[")
    three = three.replace("hvd.init()", "hvd.init()\nkeras.utils.set_random_seed(0)")
    (folder / "fit3.py").write_text(re.sub(r"^\[hvd.*\n", "", three, flags=re.MULTILINE) + DIFFERENCE)
    for script, difference in (("fit.py", "False"), ("fit3.py", "True")):
        command = FIT.replace("fit.py", script).split()
        run = runs.Run(command, folder, {"PYTHONPATH": str(packages)}).wait()
        assert run.status == 0, run.stderr
        accuracies = re.findall(r"test acc ([\d.]+)%", run.stdout)
        assert len(accuracies) == 2 and len(set(accuracies)) == 1 and float(accuracies[0]) > 85
        assert run.stdout.count(f"difference {difference}") == 2, run.stdout
