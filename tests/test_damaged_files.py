"""Damaged files beside a good checkpoint begin anew, and a damaged checkpoint is never loaded, whatever Python is told.

The functions of plumbing/ are the same in all examples, so most are called right here.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import plumbing
from harness import outputs
from harness.launchers import ROOT
from harness.processes import wait_until
from harness.refusals import RefusedError
from harness.runs import Reference, Run

# ---- The record, run.json ----

GOOD = {"starts": [{"step": 0, "time": 1.0}], "stops": [], "command": ["train.py"]}
RECORDS: dict[str, bytes | None] = {
    "empty": b"",
    "cut": json.dumps(GOOD, indent=1).encode()[:60],
    "binary": bytes(range(256)),
    "zeros, as after a loss of power": bytes(300),
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "without starts": b'{"stops": []}',
    "starts are a text": b'{"starts": "abc", "stops": []}',
    "stops are numbers": b'{"starts": [], "stops": [1, 2]}',
    "starts are null": b'{"starts": null, "stops": []}',
    "another program's": b'{"loss": 0.5}',
    "nested without end": b"[" * 100_000,
    "a folder": None,
}


@pytest.mark.parametrize("case", RECORDS)
def test_damaged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """A run.json that cannot be read begins anew, with one line, and is kept; that of an earlier time is kept, too."""
    read_record = plumbing.records.read_record
    path, content = tmp_path / "run.json", RECORDS[case]
    for number in (1, 2):
        path.mkdir() if content is None else path.write_bytes(content)
        assert read_record(path) == {"starts": [], "stops": []}
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path} is damaged (") and line.endswith(f"the old one is run.json.damaged{number}")
        kept = path.with_name(f"run.json.damaged{number}")
        assert not path.exists() and (kept.is_dir() if content is None else kept.read_bytes() == content)


def test_good_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is good, and one that is not there, are as they are, without a word."""
    read_record = plumbing.records.read_record
    assert read_record(tmp_path / "run.json") == {"starts": [], "stops": []}
    (tmp_path / "run.json").write_text(json.dumps(GOOD))
    assert read_record(tmp_path / "run.json") == GOOD
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"] and not capsys.readouterr().err


# ---- The folder ----


LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
open("locked", "w").close()
input()
"""


def test_unfinished_files(tmp_path: Path) -> None:
    """What write() leaves when its run is killed goes with the next run that gets the lock; all else stays."""
    left = ["tmp.123.checkpoint.pt", "tmp.4.run.json", "tmp.link", "checkpoint/tmp.77.run.json", "tmp.9.metrics.csv"]
    own = ["tmp.txt", "tmp.123", "tmp.2024.csv", "tmp.x.checkpoint.pt", "checkpoint.pt", "mytmp.1.checkpoint.pt"]
    for name in (*left, *own, "other/tmp.1.run.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tmp.5.folder.pt").mkdir()
    words = [sys.executable, "-c", LOCKS, str(tmp_path / ".lock")]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.PIPE) as other:
        wait_until((tmp_path / "locked").exists, 300, "the other run's lock")
        assert "another run is writing" in plumbing.lock(tmp_path)
        assert all((tmp_path / name).exists() for name in (*left, *own))  # they are that run's
        other.communicate(b"\n", timeout=300)
    assert plumbing.lock(tmp_path) is None
    assert not any((tmp_path / name).exists() for name in left)
    assert all((tmp_path / name).exists() for name in (*own, "other/tmp.1.run.json", "tmp.5.folder.pt"))


def test_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a file's content is flushed to the disk before it gets its name: else a power failure leaves a part."""
    fsync, replace, calls = os.fsync, os.replace, []

    def flush(number: int) -> None:
        calls.append(f"flushed {os.fstat(number).st_size}")
        fsync(number)

    def name(source: Path, target: Path) -> None:
        calls.append(f"named {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", name)
    for path in (tmp_path / "checkpoint.pt", tmp_path / "checkpoint.pt"):
        plumbing.write(path, lambda file: file.write(b"x" * 100_001))
    assert calls == ["flushed 100001", "named checkpoint.pt"] * 2


def test_folder_that_is_gone(refusing: None, tmp_path: Path) -> None:
    """Where neither file nor folder answers, as with a stale handle of NFS, a save ends with one line."""
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match=r"cannot write .* \(\[Errno 20\] Not a directory"):
        plumbing.write(tmp_path / "file" / "checkpoint.pt", lambda file: file.write(b"x"))


def make_lock_folder(path: Path) -> None:
    (path / ".lock").mkdir(parents=True)


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "lock is a folder": (make_lock_folder, "Is a directory: "),
    "a file": (Path.touch, "File exists: "),
    "below a file": (lambda path: None, "Not a directory: "),
    "a link to nothing": (lambda path: path.symlink_to("/nonexistent/x"), "File exists: "),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folder_that_is_none(tmp_path: Path, case: str) -> None:
    """An --output-dir that cannot be one is refused with what is in the way."""
    make, says = FOLDERS[case]
    (tmp_path / "file").touch()
    folder = tmp_path / ("file/output" if case == "below a file" else "output")
    make(folder)
    error = plumbing.lock(folder)
    assert error.startswith(f"cannot write to --output-dir {folder} ({says}{tmp_path}"), error


# ---- The checkpoint ----


def save_torch(path: Path) -> None:
    """Write a checkpoint as train.py does, small."""
    import torch

    torch.save({"model": {"w": torch.arange(1000.0)}, "progress": {"history": []}, "settings": {"seed": 0}}, path)


def flip(path: Path) -> None:
    """Change a byte of a tensor's values: the archive stays one, and torch.load does not notice that."""
    data = bytearray(path.read_bytes())
    at = data.index(b"\x00\x00\x80\x3f\x00\x00\x00\x40")  # 1.0, 2.0
    data[at + 6] ^= 1
    path.write_bytes(data)


def flip_name(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-300] + bytes(byte ^ 32 for byte in data[-300:]))  # the archive's directory


def cut(length: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_program(content: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        import torch

        torch.save(content, path)

    return save


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "flipped in the directory": flip_name,
    "empty": cut(0),
    "cut in the middle": cut(2000),
    "cut in the directory": cut(-30),
    "a folder": make_folder,
    "a text": lambda path: path.write_text("not found"),
    "a pickle that calls": lambda path: path.write_bytes(pickle.dumps(print)),
    "another program's weights": other_program({"w": 1}),
    "another program's list": other_program([1, 2]),
    "another program's object": other_program(Path("x")),
    "a state dict with half of it": other_program({"progress": {"history": []}}),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_damaged_checkpoint(tmp_path: Path, case: str) -> None:
    """With PYTHONOPTIMIZE=1, as without, a checkpoint that has changed, or is none, is not loaded, and says why."""
    load = plumbing.checkpoints.load_checkpoint
    save_torch(path := tmp_path / "checkpoint.pt")
    assert load(path)["settings"] == {"seed": 0}
    CHECKPOINTS[case](path)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - read_checkpoint prints any in one line
        load(path)
    assert "\n" not in repr(raised.value) and len(repr(raised.value)) < 200, raised.value
    if "another" in case or "half" in case:
        assert "it is of another program" in str(raised.value)


@pytest.mark.usefixtures("refusing")
def test_objects_are_refused_when_saved(tmp_path: Path) -> None:
    """A checkpoint that --resume would not read is not written: it would be of no use after hours of training."""
    import numpy as np

    args = SimpleNamespace(output_dir=tmp_path, scale_lr=None, seed=0, steps_per_epoch=1)
    progress = {"step": 1, "history": [{"epoch": 1, "test_f1": 0.5}]}
    plumbing.write_checkpoint(args, {"model": {}, "progress": progress})
    for value, name in ((np.float64(0.5), "numpy._core.multiarray.scalar"), (Path("x"), "pathlib.PosixPath")):
        bad = {"step": 2, "history": [{"epoch": 1, "test_f1": value}]}
        with pytest.raises(RefusedError, match=rf"checkpoint\.pt cannot have .*{name}.*float\(\)"):
            plumbing.write_checkpoint(args, {"model": {}, "progress": bad})
        assert plumbing.load_checkpoint(tmp_path / "checkpoint.pt")["progress"] == progress


def refuse(message: str | None) -> None:
    """Raise ValueError if there is a message."""
    if message:
        raise ValueError(message)


def test_damaged_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise one of many files: archives of PyTorch, other files by their checksum, and run.json.

    Of two processes each looks at its part, and at no other. A run.json without a checksum is of an older train.py.
    """
    from plumbing import shards

    looked: list[str] = []
    folder = tmp_path / "checkpoint" / "epoch1"
    folder.mkdir(parents=True)
    names = [f"shard{number}.pt" for number in range(5)]
    for name in names:
        save_torch(folder / name)
    (folder / ".metadata").write_text("sizes")
    opened = shards.zipfile.ZipFile
    counting = SimpleNamespace(ZipFile=lambda path: looked.append(path.name) or opened(path))
    monkeypatch.setattr(shards, "zipfile", counting)
    monkeypatch.setattr(shards, "gather", lambda own: [own])
    monkeypatch.setattr(shards, "accept", refuse)
    args = SimpleNamespace(output_dir=tmp_path, world_size=2)
    files = {name: None for name in names} | {".metadata": zlib.crc32(b"sizes")}
    found = {"tag": "epoch1", "files": files}
    for rank in range(2):
        monkeypatch.setattr(shards.dist, "get_rank", lambda rank=rank: rank)
        assert shards.check(args, found) == folder
    assert sorted(looked) == names
    flip(folder / "shard3.pt")
    with pytest.raises(ValueError, match="shard3.pt: .*has changed"):
        shards.check(args, found)
    save_torch(folder / "shard3.pt")
    (folder / ".metadata").write_text("Sizes")
    with pytest.raises(ValueError, match=".metadata has changed"):
        for rank in range(2):
            monkeypatch.setattr(shards.dist, "get_rank", lambda rank=rank: rank)
            shards.check(args, found)

    load = plumbing.checkpoints.load_checkpoint
    run = {"tag": "epoch1", "progress": {"step": 11}, "files": {}}
    text = json.dumps(run | {"checksum": zlib.crc32(json.dumps(run).encode())})
    (tmp_path / "run.json").write_text(text)
    assert load(tmp_path / "run.json") == run
    (tmp_path / "run.json").write_text(text.replace("11", "12"))
    with pytest.raises(ValueError, match="it has changed"):
        load(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match="made by an older train.py"):
        load(tmp_path / "run.json")


def test_damaged_arrays(tmp_path: Path) -> None:
    """Likewise the checkpoint of horovod_tensorflow, in NumPy's format."""
    import numpy as np

    load = plumbing.checkpoints.load_checkpoint
    path, run = tmp_path / "checkpoint.npz", {"progress": {"history": []}, "settings": {}}
    np.savez(path, w=np.arange(1000, dtype=np.float32), run=json.dumps(run))
    assert load(path)["progress"] == {"history": []}
    flip(path)
    with pytest.raises(ValueError, match="has changed"):
        load(path)


@pytest.mark.runs("one")
def test_resume_beside_damaged_files(example: str, folder: Path, reference: Reference) -> None:
    """A finished run goes on beside files that are damaged: these are made anew, and the old record is kept."""
    output = folder / "output"
    shutil.copytree(reference.output, output)
    before = outputs.read_model(output)
    rows, run = (output / "metrics.csv").read_text(), (output / "run.json").read_text()
    (output / "metrics.csv").write_text(rows[:-30])
    (output / "run.json").write_text(run[:-30])
    (output / "tmp.1.checkpoint.pt").write_text("half")
    for path in output.glob("model.*"):
        if path.suffix != ".json":
            path.write_text("")
    words = [*reference_command(example), "--resume"]
    again = Run(words, folder, {"PYTHONOPTIMIZE": "1"}).wait()
    assert again.status == 0 and again.stderr.count("is damaged (") == 1, again.stderr
    assert (output / "metrics.csv").read_text() == rows
    assert (output / "run.json.damaged1").read_text() == run[:-30] and not (output / "tmp.1.checkpoint.pt").exists()
    assert len(outputs.read_run(output)["starts"]) == 1
    assert (
        outputs.read_model(output).keys() == before.keys()
        and outputs.largest_difference(outputs.read_model(output), before) == 0
    )


def reference_command(example: str) -> list[str]:
    """Return the command of the reference run."""
    from harness.launchers import LAUNCHERS

    return LAUNCHERS[example].command(2)


# ---- What the programs of runs/ read ----

HEAD = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size\n"
ROWS = [f"{epoch},1.5,1.25,0.5,100.0,2.0,2\n" for epoch in (1, 2)]
# What is in the file, how many rows are used, and what the line says; None: no line.
METRICS: dict[str, tuple[str | bytes | None, int, str | None]] = {
    "good": (HEAD + "".join(ROWS), 2, None),
    "cut in a number": ((HEAD + "".join(ROWS))[:-5], 1, "its last row was cut off"),
    "cut before the line's end": ((HEAD + "".join(ROWS))[:-1], 1, "its last row was cut off"),
    "cut in the first row": ((HEAD + ROWS[0])[:-4], 0, "its last row was cut off"),
    "empty": ("", 0, "it is empty"),
    "binary": (bytes(range(256)), 0, "UnicodeDecodeError"),
    "zeros": (bytes(500), 0, ""),
    "a row too short": (HEAD + "1,2\n" + ROWS[1], 0, "TypeError"),
    "a row too long": (HEAD + "1,2,3,4,5,6,7,8\n", 0, "TypeError"),
    "a word": (HEAD + ROWS[0].replace("1.5", "one"), 0, "ValueError"),
    "no epoch": (HEAD + ROWS[0].replace("1,", "nan,", 1), 0, "ValueError"),
    "another program's": ("step,loss\n1,2\n", 0, ""),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, ModuleType]:
    """The modules of runs/ that read what a run has written."""
    return {name: outputs.import_file(ROOT / "runs" / f"{name}.py") for name in ("reader", "usage", "results")}


def found_by(programs: dict[str, ModuleType], top: Path) -> list[tuple[list[Any], list[str]]]:
    """Return the runs that the reader finds, with the files that it leaves out, and the same of the notebook."""
    by_reader = programs["reader"].find_runs(top, {"epoch", "train_loss", "seconds"})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runs = programs["results"].find_runs(top)
    return [by_reader, (runs, said.getvalue().splitlines())]


def put(path: Path, content: str | bytes | None) -> None:
    """Write a file, or make a folder in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", METRICS)
def test_damaged_metrics(tmp_path: Path, programs: dict[str, ModuleType], case: str) -> None:
    """The reader takes whole rows of metrics.csv, no part of a number; it and the notebook name what is left out."""
    content, count, says = METRICS[case]
    put(tmp_path / "a" / "metrics.csv", content)
    put(tmp_path / "b" / "metrics.csv", HEAD + "".join(ROWS))
    for runs, lines in found_by(programs, tmp_path):
        assert {run.name: len(run.rows) for run in runs} == ({"a": count} if count else {}) | {"b": 2}
        assert len(lines) == (says is not None), lines
        assert all("a/metrics.csv" in line and says in line for line in lines), lines


USED = {"host": "n1", "seconds": 10.0, "core_seconds": 15.0, "cores": 2, "mb": 100}
RUN: dict[str, Any] = {"starts": [{"step": 0, "time": 1.8e9}], "settings": {}}
RUN |= {"stops": [{"step": 4, "time": 1.8e9, "used": [USED]}]}
RUNS = RECORDS | {
    "a stop without what was used": json.dumps(RUN | {"stops": [{"step": 1, "time": 1}]}).encode(),
    "no time was used": json.dumps(RUN | {"stops": [RUN["stops"][0] | {"used": [USED | {"seconds": 0}]}]}).encode(),
    "no steps in an epoch": json.dumps(RUN | {"starts": [{"step": 3}], "settings": {"steps_per_epoch": 0}}).encode(),
    "settings are a list": json.dumps(RUN | {"settings": [1]}).encode(),
    "profile is a list": json.dumps(RUN | {"profile": [1]}).encode(),
    "a share is a word": json.dumps(RUN | {"profile": {"shares": {"computes": "half"}}}).encode(),
}


@pytest.mark.parametrize("case", RUNS)
def test_damaged_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], programs: dict[str, ModuleType], case: str
) -> None:
    """A damaged run.json is named in one line; the rows of metrics.csv and the logs of devices are shown without it."""
    put(tmp_path / "a" / "metrics.csv", HEAD + "".join(ROWS))
    put(tmp_path / "a" / "run.json", RUNS[case])
    for (run,), (line,) in found_by(programs, tmp_path):
        assert len(run.rows) == 2 and run.facts == {} and run.settings == {}
        assert "a/run.json" in line
    with pytest.raises(SystemExit, match="is no --output-dir of a run"):
        programs["usage"].report(tmp_path / "a")
    put(tmp_path / "a" / "usage-n1.txt", "\n1800000000.00 1.0\n0, 90, 30000, 300.00, 1700, 0x0000000000000004\n")
    put(tmp_path / "a" / "usage-n2.txt", None)  # a folder
    programs["usage"].report(tmp_path / "a")
    said = capsys.readouterr()
    assert "n1    gpu0" in said.out and "run.json: left out (" in said.err and "usage-n2.txt cannot be read" in said.err


def test_good_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], programs: dict[str, ModuleType]) -> None:
    """Nothing is said of good files."""
    put(tmp_path / "metrics.csv", HEAD + "".join(ROWS))
    put(tmp_path / "run.json", json.dumps(RUN))
    for (run,), lines in found_by(programs, tmp_path):
        assert run.facts["stops"] == RUN["stops"] and not lines
    programs["usage"].report(tmp_path)
    assert "1.5 of 2" in capsys.readouterr().out
