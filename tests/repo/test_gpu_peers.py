"""benchmarks/gpu_peers.py, and the edits of public scripts, with stand-ins for the scripts and no network."""

import dataclasses
import hashlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_peers
from benchmarks.edits import CannotRun, Edit, Source, edited
from harness.launchers import EXAMPLES

THEIRS = "import sys\n\ndevice = 'cuda'\nsteps = 1000  # many\nprint(device, steps)\n"
EDITS = [
    Edit(3, 10, 4, "cpu"),
    Edit(4, 8, 4, "2"),
    Edit(4, 12, 8, ""),  # to the end of the line, which stays
    Edit(5, 0, 0, "print('before')\n"),
    Edit(1, 0, 11, ""),
]


def sha256(text: str) -> str:
    """Return a text's checksum."""
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("order", [1, -1])
def test_edits(order: int) -> None:
    """Places are those of the published file, whatever the order of the edits and what they add or remove."""
    text = edited("train.py", THEIRS, Source(sha256(THEIRS), EDITS[::order]))
    assert text == "\ndevice = 'cpu'\nsteps = 2\nprint('before')\nprint(device, steps)\n"
    assert edited("train.py", THEIRS, Source(sha256(THEIRS))) == THEIRS


@pytest.mark.parametrize(
    "text",
    ["", THEIRS + "\n", THEIRS.replace("\n", "\r\n"), THEIRS.replace("1000", "1001"), "# a line more\n" + THEIRS],
)
def test_another_file(text: str) -> None:
    """A file with another checksum is refused, in one line that names it and both checksums."""
    with pytest.raises(CannotRun) as error:
        edited("sub/train.py", text, Source(sha256(THEIRS), EDITS))
    message = str(error.value)
    assert "sub/train.py is not the file that our edits were written for" in message and "\n" not in message
    assert sha256(text)[:12] in message and sha256(THEIRS)[:12] in message


def script(**changes: Any) -> gpu_peers.Script:
    """Return a public script that is the one above."""
    one = gpu_peers.Script(
        "theirs",
        "some/scripts",
        "0" * 40,
        "fsdp",
        "bf16",
        "tokens/s",
        {"sub/theirs.py": Source(sha256(THEIRS), EDITS)},
        lambda folder, sizes: [sys.executable, "theirs.py"],
    )
    return dataclasses.replace(one, **changes)


def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script comes from a clone, with or without a work tree, or from the folder that `export` made of one."""
    place, tree = "some+scripts", tmp_path / "tree"
    (tree / place / "sub").mkdir(parents=True)
    (tree / place / "sub" / "theirs.py").write_text(THEIRS)
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "The script"]):
        subprocess.run(["git", "-C", tree / place, *words], check=True, capture_output=True, timeout=300)
    words = ["git", "-C", str(tree / place), "rev-parse", "HEAD"]
    one = script(commit=subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout.strip())
    (tree / place / "sub" / "theirs.py").write_text("changed since")
    words = ["git", "clone", "--bare", str(tree / place), str(tmp_path / "bare" / place / "repo")]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    monkeypatch.setattr(gpu_peers, "SCRIPTS", (one,))
    gpu_peers.export(tmp_path / "bare", tmp_path / "plain")
    for name in ("tree", "bare", "plain"):
        command = one.prepare(tmp_path / name, tmp_path / "run" / name, gpu_peers.TINY)
        done = subprocess.run(command, cwd=tmp_path / "run" / name, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, "before\ncpu 2\n"), done.stderr
    for missing in (dataclasses.replace(one, commit="1" * 40), dataclasses.replace(one, repository="no/body")):
        with pytest.raises(CannotRun, match=r"neither sub/theirs.py nor a clone with commit [01-9a-f]{12}$"):
            missing.prepare(tmp_path / "bare", tmp_path / "run" / "none", gpu_peers.TINY)
    (tmp_path / "plain" / place / "sub" / "theirs.py").write_text("another")
    with pytest.raises(CannotRun, match="not the file"):
        one.prepare(tmp_path / "plain", tmp_path / "run" / "other", gpu_peers.TINY)
    with pytest.raises(CannotRun, match="not the file"):
        gpu_peers.export(tmp_path / "plain", tmp_path / "again")


@pytest.mark.parametrize(
    ("clocks", "expected"),
    [
        ([(0, 0), (100, 1000), (101, 2000)], 1000),  # the first interval does not count
        ([(0, 0), (100, 1000), (101, 2000), (103, 3000), (104, 4000)], 1000),  # the median, not the mean
        ([(0, 100), (9, 200), (10, 300), (50, 100), (52, 200)], 75),  # a second epoch: what lies between is left out
        ([(0, 0), (1, 1000)], None),
        ([], None),
        ([(0, 1000), (1, 1000), (2, 1000)], None),
    ],
)
def test_speed(clocks: list[tuple[float, int]], expected: float | None) -> None:
    """The speed follows from the times that a script prints between its own lines."""
    log = "".join(f"iter 3: loss 1.0, time 5ms\rclock: {time + 0.25} {units}\nEpoch 1\n" for time, units in clocks)
    if expected is None:
        with pytest.raises(CannotRun, match=f"printed the time {len(clocks)} times"):
            script().speed(log)
    else:
        assert script().speed(log) == pytest.approx(expected)


def make_images(folder: Path, classes: int) -> Path:
    """Make a folder of images, in this case empty files."""
    for part, count in (("train", 3), ("val", 1)):
        for number in range(classes * count):
            path = folder / part / f"class{number % classes}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return folder


def test_commands(tmp_path: Path) -> None:
    """Each script gets the sizes, and its data; one process needs no launcher, and several have torchrun."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 300}')
    sizes = dataclasses.replace(gpu_peers.TINY, images=make_images(tmp_path / "images", 5), model=model)
    for processes in (1, 2):
        for one in gpu_peers.SCRIPTS:
            folder = tmp_path / f"{one.name}{processes}"
            folder.mkdir()
            command = one.arrange(folder, dataclasses.replace(sizes, processes=processes))
            flags = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(command)))
            start = command[: command.index(Path(one.file).name)]
            assert ("--nproc-per-node=2" in start) == (processes == 2) and ("python" in start) == (processes == 1)
            if one.beside == "fsdp":
                assert flags["compile"] == str("--compile" in one.variant) and flags["n_embd"] == "64"
                assert flags["gradient_accumulation_steps"] == str(processes)
                assert (folder / "data" / "random" / "train.bin").stat().st_size == 4_000_000
            elif one.beside == "torchrun_vision":
                assert ("--amp" in command) == (one.variant == "bf16") and flags["batch-size"] == "16"
                links = list((folder / "images" / "train").glob("class*/*.jpg"))
                # 4 rounds of the loader's worker, of 2 steps each
                assert len(links) == 4 * 2 * 16 * processes and all(link.is_file() for link in links)
                assert len(list((folder / "images" / "val").glob("class*/*.jpg"))) == 5
            else:
                assert flags["lora_r"] == "16" and flags["device_map"] == "cpu"
                lines = (folder / "samples" / "train.jsonl").read_text().splitlines()
                assert len(lines) == 8 * 4 * processes + 16
    few = dataclasses.replace(sizes, images=make_images(tmp_path / "few", 4))
    with pytest.raises(CannotRun, match="shows the accuracy of 5 classes, and .*few has 4"):
        next(one for one in gpu_peers.SCRIPTS if one.beside == "torchrun_vision").arrange(tmp_path, few)


def test_scripts() -> None:
    """Each script is pinned, stands beside an example, and prints the time once in a loop."""
    assert len({one.name for one in gpu_peers.SCRIPTS}) == len(gpu_peers.SCRIPTS)
    for one in gpu_peers.SCRIPTS:
        assert re.fullmatch("[0-9a-f]{40}", one.commit) and one.beside in EXAMPLES
        assert all(re.fullmatch("[0-9a-f]{64}", source.sha256) for source in one.files.values())
        edits = [edit for source in one.files.values() for edit in source.edits]
        assert sum(edit.text.count("clock: ") for edit in edits) == 1
