"""Real input: MNIST and FashionMNIST through torchvision's own files, reader and downloader."""

import functools
import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from harness import outputs, readme, runs
from harness.launchers import LAUNCHERS
from tests import refusals, samples

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where its package dataset-fashion-mnist has the files


@pytest.fixture
def data() -> ModuleType:
    """The module that reads the data sets. It imports PyTorch, which takes seconds, where no other test needs it."""
    from common import data

    return data


@pytest.mark.only("ddp_spawn")
def test_trains_on_idx_files(example: str, folder: Path) -> None:
    """A few hundred images in torchvision's format are read, learnt and evaluated exactly."""
    samples.write_data(folder / "data", "fashion_mnist")
    line = readme.command("docs/your-data.md", "python train.py --dataset fashion_mnist ...")
    readme.run_block([f"{line} --epochs 4 --batch-size 16"], folder)
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_accuracy"] > 0.8 and rows[-1]["train_loss"] < 0.5
    outputs.assert_exact_metrics(folder / "output", "fashion_mnist", str(folder / "data"))


@pytest.mark.only("ddp_spawn")
def test_truncated_idx_file(example: str, folder: Path) -> None:
    """A truncated file ends the run with the folder and the command that downloads it again."""
    path = samples.write_data(folder / "data", "mnist") / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    run = runs.start(example, folder, 2, "--dataset", "mnist").wait()
    refusals.assert_refused(
        run, LAUNCHERS[example].status_after_bad_input, "data/MNIST/raw", "python -m common.data mnist --data-dir data"
    )


@pytest.mark.parametrize("name", samples.CLASSES)
def test_reads_idx_files(data: ModuleType, tmp_path: Path, name: str) -> None:
    """The bytes of the files are the images and labels of the data set, for mnist and fashion_mnist alike."""
    samples.write_data(tmp_path, name)
    train_set, test_set = data.load(name, str(tmp_path))
    assert (len(train_set), len(test_set)) == (samples.SIZES["train"], samples.SIZES["t10k"])
    assert train_set.images.numpy().tobytes() == samples.idx_files()["train-images-idx3-ubyte"][16:]
    assert bytes(test_set.labels.tolist()) == samples.idx_files()["t10k-labels-idx1-ubyte"][8:]


@pytest.mark.full
@pytest.mark.timeout(1600)
@pytest.mark.only("ddp_spawn", "horovod_tensorflow")
def test_fashion_mnist(example: str, folder: Path) -> None:
    """On FashionMNIST itself, as Debian packages it, five epochs come to the accuracy that RESULTS.md names."""
    if not DEBIAN.exists():
        pytest.skip(f"needs the Debian package dataset-fashion-mnist: there is no {DEBIAN}")
    arguments = ("--dataset", "fashion_mnist", "--data-dir", str(DEBIAN), "--epochs", "5")
    runs.train(example, folder, 2, *arguments, seconds=1500)
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_accuracy"] > 0.915 and len(rows) == 5


@pytest.mark.parametrize("file", ["train-images", "train-labels", "t10k-images", "t10k-labels"])
@pytest.mark.parametrize("left", [0, 2, 6, 40])
def test_damaged_idx_files(data: ModuleType, tmp_path: Path, file: str, left: int) -> None:
    """Whichever file is cut off, and wherever, the error says where it is and how to download it again."""
    path = next(samples.write_data(tmp_path, "mnist").glob(f"{file}*"))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(data.DataError, match=r"MNIST/raw .*python -m common\.data mnist"):
        data.load("mnist", str(tmp_path))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve MNIST's packed files on loopback; yield the address and the folder they lie in."""
    folder = tmp_path / "served"
    folder.mkdir()
    for file, content in samples.idx_files().items():
        (folder / f"{file}.gz").write_bytes(gzip.compress(content))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", folder
        server.shutdown()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: tuple[str, Path]) -> Path:
    """Make `python -m common.data mnist --data-dir data` use the local server; return the folder it runs in."""
    from torchvision import datasets

    address, served = server
    checksums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in served.iterdir()]
    monkeypatch.setattr(datasets.MNIST, "mirrors", [address])
    monkeypatch.setattr(datasets.MNIST, "resources", checksums)
    monkeypatch.setattr("sys.argv", ["common.data", "mnist", "--data-dir", "data"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_download(data: ModuleType, command: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The download command fetches files that can be read; a second time it finds them and leaves them."""
    for _ in range(2):
        data.main()
        assert "mnist is in data/MNIST" in capsys.readouterr().out
        assert [path.name for path in (command / "data").iterdir()] == ["MNIST"]
    for file, content in samples.idx_files().items():
        assert (command / "data" / "MNIST" / "raw" / file).read_bytes() == content
    assert len(data.load("mnist", "data")[0]) == samples.SIZES["train"]


@pytest.mark.parametrize("fault", ["another content", "gone"])
def test_download_refused(
    data: ModuleType, command: Path, server: tuple[str, Path], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a wrong checksum or a missing file the command fails in one line and leaves nothing half-written."""
    file = server[1] / "t10k-labels-idx1-ubyte.gz"
    if fault == "gone":
        file.unlink()
    else:
        file.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(SystemExit) as ended:
        data.main()
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1 and "mnist was not downloaded" in errors[0]
    assert list((command / "data").iterdir()) == []
