"""benchmarks/peers.py with stand-ins, which train nothing, for the public scripts, GitHub and our example."""

import csv
import dataclasses
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks import peers, public_scripts
from benchmarks.edits import Edit, Source
from harness import outputs
from harness.launchers import EXAMPLES, LAUNCHERS, ROOT

# A public script, whose clock tells what it is told: 100 s for the first epoch, then 1, then 4.
THEIRS = """\
import sys, time
time.perf_counter = iter([0.0, 100.0, 100.0, 101.0, 200.0, 204.0]).__next__
DEVICE, large = "cuda", bytearray(b"x") * 200_000_000
assert DEVICE == "cpu", "no GPU | here"
assert open("data/MNIST/raw/t10k-labels-idx1-ubyte", "rb").read()[:8] == bytes([0, 0, 8, 1, 0, 0, 0, 50])
for epoch in range(int(sys.argv[1])):
    train = True
"""
# An example of ours: 1250, 625 and 937.5 images/s in the second epoch of its runs in fp32, in bf16 twice that.
OURS = """\
import argparse, pathlib, re
parser = argparse.ArgumentParser()
for name in ("processes", "epochs", "batch-size"):
    parser.add_argument(f"--{{name}}", type=int)
for name in ("dataset", "data-dir", "precision"):
    parser.add_argument(f"--{{name}}")
args = parser.parse_args()
images = pathlib.Path(args.data_dir, "MNIST", "raw", "train-images-idx3-ubyte")
assert (args.processes, args.batch_size, args.dataset, images.stat().st_size) == (2, 64, "mnist", 16 + 300 * 784)
counter = pathlib.Path({counter!r} + args.precision)
number = len(counter.read_text()) if counter.exists() else 0
counter.write_text("x" * (number + 1))
speed = [1250, 625, 937.5][number] * (2 if args.precision == "bf16" else 1)
pathlib.Path("output").mkdir()
lines = ["epoch,samples_per_second", "1,1"] + [f"{{epoch}},{{speed}}" for epoch in range(2, args.epochs + 1)]
pathlib.Path("output", "metrics.csv").write_text("\\n".join(lines) + "\\n")
"""
CLOCK = public_scripts.clock("True", "250")
DEVICE = Edit(3, 17, 4, "cpu")
CLOCKS = [Edit(7, 0, 0, f"    {CLOCK}"), Edit(8, 0, 0, f"    {CLOCK}")]


def git(folder: Path, *words: str) -> str:
    """Run git as somebody, and return what it has printed."""
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    line = ["git", *who, "-C", str(folder), *words]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in GitHub's place: it has one repository, of which the benchmark knows a commit that is not the last."""
    folder = tmp_path / "github" / "some" / "scripts"
    folder.mkdir(parents=True)
    git(folder, "init")
    (folder / "sub").mkdir()
    (folder / "sub" / "theirs.py").write_text(THEIRS)
    git(folder, "add", ".")
    git(folder, "commit", "-m", "The script")
    commit = git(folder, "rev-parse", "HEAD").strip()
    git(folder, "rm", "-r", "sub")
    git(folder, "commit", "-m", "Now it is gone")

    def files(*edits: Edit, text: str = THEIRS) -> dict[str, Source]:
        return {"sub/theirs.py": Source(hashlib.sha256(text.encode()).hexdigest(), edits)}

    good = public_scripts.Peer(
        "some/scripts", commit, ("ddp_spawn",), "python theirs.py {epochs}", files(DEVICE, *CLOCKS)
    )

    def change(**changes: Any) -> public_scripts.Peer:
        return dataclasses.replace(good, **changes)

    table = {
        "good": good,
        "fails": change(files=files(*CLOCKS)),
        "changed": change(files=files(DEVICE, *CLOCKS, text=THEIRS.replace("sys", "os"))),
        "silent": change(files=files(DEVICE)),
        "unknown": change(command="no-such-launcher theirs.py"),
    }
    monkeypatch.setattr(peers, "PEERS", table)
    monkeypatch.setattr(peers, "GITHUB", f"file://{tmp_path}/github")
    monkeypatch.setattr(peers, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    ours = tmp_path / "examples" / "ddp_spawn"
    ours.mkdir(parents=True)
    (ours / "train.py").write_text(OURS.format(counter=f"{tmp_path}/counter-"))
    return tmp_path / "github"


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Call the benchmark's main() as `python -m benchmarks.peers` would."""
    monkeypatch.setattr(sys, "argv", ["peers.py", *map(str, words)])
    peers.main()


def test_table(github: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios follow from the printed times, round by round; a script that gives no figure has a row that says why.

    A script's epochs but the first are 1 s and 4 s long, for 250 images of each of 2 processes: 500 and 125 images/s,
    of which the median is 312.5.
    """
    output = tmp_path / "results"
    words = ["--rounds", 3, "--images", 300, "--precisions", "fp32", "bf16", "--output", output]
    call(monkeypatch, *words)
    table = (output / "peers.md").read_text()
    rows = {}
    for line in re.findall(r"^\| some/scripts@.*$", table, re.MULTILINE):
        title, *row = [cell.strip() for cell in line.strip("|").split("|")]
        commit = peers.PEERS["good"].commit
        assert title == f"some/scripts@{commit[:7]}: sub/theirs.py"
        rows.setdefault(row[-1].partition(" ")[0], []).append(row)
    speeds = [row[:1] + row[2:4] + row[5:6] for row in rows[""]]  # without memory
    assert speeds == [
        ["312 images/s", "ddp_spawn, fp32", "938 images/s", "3.000 (2.00 to 4.00)"],
        ["312 images/s", "ddp_spawn, bf16", "1875 images/s", "6.000 (4.00 to 8.00)"],
    ]
    with open(output / "peers.csv", newline="") as file:
        found = list(csv.DictReader(file))
    runs = [(row["name"], row["precision"], float(row["per_second"])) for row in found]
    ours = [1250, 625, 937.5]
    three = [[("good", "fp32", 312.5), ("ddp_spawn", "fp32", x), ("ddp_spawn", "bf16", 2 * x)] for x in ours]
    assert runs == sum(three, [])  # in turn, and each once in a round
    # Memory is that of the largest process, not of the one that starts it: the script had a block of 200 MB, ours none.
    memory = {row["name"]: float(row["peak_mb"]) for row in found}
    assert 200 < memory["good"] < 300 and 5 < memory["ddp_spawn"] < 100
    theirs, ours, ratio = (float(rows[""][0][column].split()[0]) for column in (1, 4, 6))
    assert abs(theirs - memory["good"]) < 20 and abs(ours - memory["ddp_spawn"]) < 20 and ratio < 0.5

    remarks = {name: rows[name][0][-1] for name in ("fails", "changed", "silent", "unknown")}
    assert all(rows[name][0][:4] == ["", "", "ddp_spawn, fp32", "938 images/s"] for name in remarks)
    assert remarks["fails"] == "fails failed: AssertionError: no GPU / here (see peers-fails.log)"
    assert "assert DEVICE" in (output / "peers-fails.log").read_text()
    assert "sub/theirs.py is not the file that our edits were written for: its SHA-256 is " in remarks["changed"]
    assert remarks["silent"] == "silent failed: it printed the time 0 times in 3 epochs"
    assert re.match("unknown failed: .*no-such-launcher.*No such file", remarks["unknown"]), remarks["unknown"]


def test_our_example_fails(github: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example of ours that fails has a remark, too, and no figure from an earlier run."""
    (tmp_path / "examples" / "ddp_spawn" / "train.py").write_text("import horovod_of_tomorrow\n")
    call(monkeypatch, "--only", "good", "--rounds", 2, "--images", 300, "--output", tmp_path / "results")
    (row,) = [line for line in (tmp_path / "results" / "peers.md").read_text().splitlines() if "theirs.py" in line]
    cells = [cell.strip() for cell in row.split("|")]
    why = "ddp_spawn failed: ModuleNotFoundError: No module named 'horovod_of_tomorrow' (see peers-ddp_spawn.log)"
    assert cells[2] == "312 images/s" and cells[4:] == ["ddp_spawn, fp32", why, ""], row


def test_sources(github: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A commit is fetched once, or found in a clone of either place; what is not there is said in one line."""

    def refused(*words: object) -> str:
        with pytest.raises(SystemExit) as error:
            call(monkeypatch, "--only", "good", *words)
        message = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
        assert error.value.code != 0 and "\n" not in message
        return message

    peer, place = peers.PEERS["good"], "some+scripts"
    assert peers.find_clones(["good"], None) == {"good": tmp_path / "cache" / place}
    monkeypatch.setattr(peers, "GITHUB", f"file://{tmp_path}/nowhere")
    assert peers.git(peers.find_clones(["good"], None)["good"], "show", f"{peer.commit}:sub/theirs.py").stdout == THEIRS
    shutil.rmtree(tmp_path / "cache")
    message = refused()
    assert "cannot fetch" in message and "nowhere/some/scripts" in message and "--sources" in message

    bare, tree = tmp_path / "bare" / place / "repo", tmp_path / "tree" / place
    git(tmp_path, "clone", "--bare", str(github / "some" / "scripts"), str(bare))
    git(tmp_path, "clone", str(github / "some" / "scripts"), str(tree))
    for clone, sources in ((bare, tmp_path / "bare"), (tree, tmp_path / "tree")):
        assert peers.find_clones(["good"], sources) == {"good": clone}
    assert "there is no such folder" in refused("--sources", tmp_path / "none")
    git(tmp_path, "init")  # a repository above the folder is not mistaken for one in it
    (tmp_path / "empty" / place).mkdir(parents=True)
    for sources in (github, tmp_path / "empty"):
        assert f"{sources}/{place} at {peer.commit}: git clone them there" in refused("--sources", sources)
    monkeypatch.setitem(peers.PEERS, "good", dataclasses.replace(peer, commit="0" * 40))
    assert " at 000" in refused("--sources", tmp_path / "tree") and "--only" not in refused("--sources", sources)
    monkeypatch.setitem(peers.PEERS, "good", peer)
    both = [*sources_of_two(monkeypatch, peer), "--sources", tmp_path / "tree"]
    message = refused(*both)  # one line names all that are missing, and what can be measured all the same
    assert all(f"/{name}+scripts at {'1' * 40}" in message for name in ("other", "third"))
    assert f"{place} at" not in message and message.endswith("or measure the others: --only good")
    message = refused(*both[:-2])
    assert all(f"nowhere/{name}/scripts at {'1' * 40} (fatal: " in message for name in ("other", "third"))
    monkeypatch.setitem(peers.PEERS, "good", dataclasses.replace(peer, commit="0" * 40))
    assert "must be a second" in refused("--epochs", 1)
    assert "too few" in refused("--images", 127)


def sources_of_two(monkeypatch: pytest.MonkeyPatch, peer: public_scripts.Peer) -> list[str]:
    """Put two scripts of repositories that are nowhere into the table; return the words that ask for all three."""
    for name in ("other", "third"):
        missing = dataclasses.replace(peer, repository=f"{name}/scripts", commit="1" * 40)
        monkeypatch.setitem(peers.PEERS, name, missing)
    return ["--only", "good", "other", "third"]


def test_clock_in_a_loop() -> None:
    """In a loop over the steps of all epochs the clock gives each epoch's beginning and end, as around an epoch."""
    inside = public_scripts.clock("rank == 0", "8 * steps", "step", "steps")
    script = f"rank, steps = 0, 5\nfor step in range(15):\n    {inside}{public_scripts.clock('rank == 0', '8 * steps')}"
    args = Mock(epochs=3, processes=2)
    for rank, times in ((0, 6), (1, 0)):
        done = subprocess.run([sys.executable, "-c", script.replace("rank, steps = 0", f"rank, steps = {rank}")],
                              capture_output=True, text=True, check=True, timeout=300)  # fmt: skip
        ticks = re.findall(r"clock: ([\d.]+) (\d+) samples", done.stdout)
        assert len(ticks) == times and {size for _, size in ticks} <= {"40"}
        if ticks:
            assert peers.clocked(done.stdout, args) > 0 and ticks[1] == ticks[2] and ticks[3] == ticks[4]


def test_rows_of_the_benchmark() -> None:
    """Each script prints the time where an epoch begins and where it ends.

    Two examples, which came later, lack one, and so does that which runs another one's lines.
    """
    rows, later = list(peers.PEERS.values()), {"accelerate", "horovod_lightning"}
    later |= {name for name in EXAMPLES if LAUNCHERS[name].twin}
    assert {name for peer in rows for name in peer.ours} == set(EXAMPLES).difference(later)
    for peer in rows:
        assert re.fullmatch("[0-9a-f]{40}", peer.commit)
        assert all(re.fullmatch("[0-9a-f]{64}", source.sha256) for source in peer.files.values())
        edits = [edit for source in peer.files.values() for edit in source.edits]
        assert sum(edit.text.count("clock: ") for edit in edits) == 2
        assert all(edit.removed or edit.text for edit in edits)
    commits = {(peer.repository, peer.commit) for peer in rows}
    assert len(commits) == len({repository for repository, _ in commits})  # a repository is fetched at one commit
    assert set(public_scripts.WORKS) <= {name for peer in rows for name in peer.ours}


def test_session(tmp_path: Path) -> None:
    """`nox -s bench -- --peers` runs this benchmark with a second environment, and without --peers the other one."""
    noxfile = outputs.import_file(ROOT / "noxfile.py")
    session = Mock(posargs=["--rounds", "7"])
    noxfile.bench(session)
    session.run.assert_called_with("python", "-m", "benchmarks.measure", "throughput", "--rounds", "7")
    folder = tmp_path / "bench-horovod_tensorflow"
    venv = f"--venv=horovod_tensorflow={folder}"
    for made in (False, True):  # the second time it is there
        session = Mock(posargs=["--peers", "--rounds", "7"], virtualenv=Mock(location=str(tmp_path / "bench")))
        session.run.side_effect = lambda *words, **_: folder.mkdir() if "venv" in words else None
        noxfile.bench(session)
        session.run.assert_called_with("python", "-m", "benchmarks.peers", venv, "--rounds", "7")
        builds = [call for call in session.run.call_args_list if f"{ROOT}/examples/horovod_tensorflow/" in str(call)]
        assert len(builds) == (0 if made else 2)
        for call in builds:  # `env PATH=...`, since nox puts its own environment before a PATH in its argument env
            pip, *words = call.args
            assert pip == f"{folder}/bin/pip" or words[0].startswith(f"PATH={folder}/bin:")
        session.install.assert_any_call("-r", "benchmarks/requirements-peers.txt")
