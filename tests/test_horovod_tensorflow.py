"""What only horovod_tensorflow promises: its data, its order of samples, bf16, and what model.fit does."""

import gzip
import hashlib
import itertools
import json
import re
import textwrap
import urllib.parse
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from common import data
from harness import edits, outputs, readme, runs, samples
from harness.launchers import ROOT
from harness.processes import wait_until
from harness.runs import Reference

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


@pytest.mark.runs("weekly")  # on a processor without AVX512-BF16 it takes minutes
def test_bf16_and_order(example: str, folder: Path, reference: Reference) -> None:
    """bf16 ends within one point of fp32's accuracy, with other weights, which it leaves in fp32.

    In each epoch the processes see different samples, of which there are equally many for each, in another order; they
    evaluate each test sample once.
    """
    line = "        batch = self.images[indices]"
    note = "        print(*indices, file=open('seen-%d-%d' % (len(self), os.getpid()), 'a'))\n"
    edits.edit(folder / "numpy_data.py", line, note + line)
    runs.train(example, folder, 2, "--precision", "bf16", seconds=900)
    seen = []
    for path in folder.glob("seen-1438-*"):
        batches = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        steps = 1438 // 2 // 64
        assert len(batches) == 5 * steps and {len(batch) for batch in batches} == {64}
        seen.append([sum(batches[epoch * steps : (epoch + 1) * steps], []) for epoch in range(5)])
    assert len(seen) == 2
    for one, other in zip(*seen, strict=True):
        assert len({*one, *other}) == 2 * steps * 64
    assert len({tuple(indices) for process in seen for indices in process}) == 10
    evaluated = [word for path in folder.glob("seen-359-*") for word in path.read_text().split()]
    assert sorted(map(int, evaluated)) == sorted(list(range(359)) * 5)
    weights = outputs.read_model(folder / "output")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert outputs.largest_difference(weights, outputs.read_model(reference.output)) > 1e-4
    bf16, fp32 = (outputs.read_metrics(output)[-1]["test_accuracy"] for output in (folder / "output", reference.output))
    assert abs(bf16 - fp32) <= 0.01


def test_seeds_of_dropout(example: str, source: Path) -> None:
    """By the recipe all layers, processes and epochs draw others: a Keras seed has two numbers, and counts the second.

    So none of the first numbers may be there twice.
    """
    lines = "".join(readme.fences(source / "README.md", "diff")).splitlines()
    added = [line.removeprefix("+") for line in lines if "draws" in line or "seed_generator" in line]
    firsts = []
    for epoch, rank in itertools.product(range(3), range(2)):
        seeds = [SimpleNamespace(path="seed_generator/state", assign=lambda pair: firsts.append(pair[0]))] * 2
        names = {"np": np, "args": SimpleNamespace(seed=0, world_size=2), "model": SimpleNamespace(variables=seeds)}
        exec(textwrap.dedent("\n".join(added)), names | {"epoch": epoch, "rank": rank})
    assert len(firsts) == len(set(firsts)) == 12


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


def test_download(
    numpy_data: ModuleType,
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The README's command fetches files that can be read, and leaves them the next time.

    After a wrong checksum it fails in one line and leaves nothing. The files come from a server on loopback.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["numpy_data.py", "mnist", "--data-dir", "data"])
    with samples.served(tmp_path / "served") as address:
        packed = [tmp_path / "served" / f"{file}.gz" for file in numpy_data.FILES]
        sums = [hashlib.md5(path.read_bytes()).hexdigest() for path in packed]
        monkeypatch.setitem(numpy_data.DOWNLOADS, "mnist", (address, " ".join([*sums[:3], "0" * 32])))
        with pytest.raises(SystemExit):
            numpy_data.main()
        assert "mnist was not downloaded" in capsys.readouterr().err and not list((tmp_path / "data").iterdir())
        monkeypatch.setitem(numpy_data.DOWNLOADS, "mnist", (address, " ".join(sums)))
        for _ in range(2):
            numpy_data.main()
            assert "mnist is in data/MNIST" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]
    assert len(numpy_data.load("mnist", "data")[0]) == samples.SIZES["train"]


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


PAGE = ROOT / "docs" / "horovod.md"


def get(address: str, **query: str) -> bytes:
    """Return what a server on loopback answers, also where a proxy is set."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address}?{urllib.parse.urlencode(query)}", timeout=300) as answer:
        content = answer.read()
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


@pytest.mark.runs("weekly")
def test_profile_in_tensorboard(example: str, folder: Path) -> None:
    """The recipe of docs/horovod.md, and its viewer: TensorBoard has the convolutions and all-reduces of an epoch."""
    (recipe,) = (text for text in readme.fences(PAGE, "diff") if "tf.profiler" in text)
    edits.apply_diff(folder / "train.py", recipe)
    runs.train(example, folder, 2, "--epochs", 2)
    install, show = readme.block("docs/horovod.md", "viewer/bin/tensorboard ...")
    done = runs.Run(["bash", "-ec", install], folder).wait(400)
    assert done.status == 0, done.stderr
    viewer = runs.Run(["bash", "-ec", f"exec {show} --port 0 2>&1"], folder)
    address = re.search(r"http://localhost:\d+/", viewer.read_until("http://localhost:"))[0] + "data/plugin/profile"
    wait_until(lambda: json.loads(get(f"{address}/runs")), 300, "the profile in TensorBoard")
    (run,) = json.loads(get(f"{address}/runs"))
    found = {}
    for tool in json.loads(get(f"{address}/run_tools", run=run)):
        (host, *_) = json.loads(get(f"{address}/hosts", run=run, tag=tool))
        found[tool] = get(f"{address}/data", run=run, tag=tool, host=host["hostname"])
    viewer.end()
    for word in (b"Conv2D", b"HorovodAllreduce"):
        assert any(word in content for content in found.values()), {tool: len(found[tool]) for tool in found}
