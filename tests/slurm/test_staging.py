"""STAGE=1 sbatch run.slurm: each node copies what the flags name to its own disk, and nothing is left there."""

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from harness import outputs, readme, samples
from harness.edits import apply_diff, edit
from harness.jobs import STUB, stop_twice, stub, submit, two_processes, wait_for_start
from harness.launchers import ROOT, copy_example
from harness.processes import ASK_SLURM, wait_until
from harness.runs import Run
from lab import Lab, faults

TORCHRUN = ("fsdp", "lora")
pytestmark = pytest.mark.slurm
often = pytest.mark.runs("weekly", *TORCHRUN)  # the same function in all; torchrun takes its time to start
FLAG = {"horovod_cpu": "--data-dir", "fsdp": "--text-file", "lora": "--model-dir"}
TEXT = "the quick brown fox jumps over the lazy dog\n" * 500
NOT_COPIED = "run.slurm: error: the data could not be copied to all nodes"
# It says whether the copies are there when it has been asked to stop, and some time before that.
PATIENT = STUB.replace(
    '        (output / "stopped").touch()\n',
    "        time.sleep(3)\n"
    "        copies = [word for word in sys.argv if word.startswith(os.environ['STAGE_DIR'])]\n"
    '        os.write(1, f"at the end: {[os.listdir(copy) for copy in copies[:1]]}\\n".encode())\n'
    '        (output / "stopped").touch()\n',
)


def staged(lab: Lab, job: str, *more: str) -> list[str]:
    """Return the nodes on which a job's copies lie, or a part of them."""
    path = f"/tmp/data-{job}/{'/'.join(more)}"
    return [node for node in lab.nodes if lab.run(["ls", "-d", path], node=node).returncode == 0]


def with_data(folder: Path) -> Path:
    """Put data into an example's folder: a file, and one that is a link as in Hugging Face's cache; return it.

    Nothing in there can be written to, and so nothing can be removed.
    """
    (folder / "blobs").mkdir()
    (folder / "blobs" / "0f3a").write_text(TEXT)
    (folder / "data").mkdir()
    (folder / "data" / "book.txt").write_text(TEXT)
    (folder / "data" / "config.json").symlink_to("../blobs/0f3a")
    (folder / "data").chmod(stat.S_IRUSR | stat.S_IXUSR)
    return folder


@often
@pytest.mark.only("horovod_cpu", "fsdp", "lora")
def test_staged_data_is_removed(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The copies are gone when the job is requeued, when it is cancelled, and when one could not be made."""
    flag = FLAG[example]
    folder = with_data(stub(source, tmp_path / example, PATIENT))
    job = submit(lab, example, folder, f"{flag[:-2]}=data", STAGE="1")
    wait_for_start(folder, job.id)
    assert f"'{flag}', '/tmp/data-{job.id}{folder}/data'" in job.log
    copies = str(folder / "data").lstrip("/")
    for name in ("book.txt", "config.json"):
        path = f"/tmp/data-{job.id}/{copies}/{name}"
        for node in lab.nodes:
            assert lab.run(["cat", path], node=node, check=True).stdout == TEXT
            assert lab.run(["test", "-L", path], node=node).returncode != 0
            lab.run(["touch", f"/tmp/data-{job.id}/old"], node=node, check=True)
    faults.requeue(lab, job.id)
    wait_for_start(folder, job.id, starts=2)
    assert staged(lab, job.id, copies) == ["node1", "node2"] and not staged(lab, job.id, "old")
    if example in TORCHRUN:
        # Before a preemption SLURM may send SIGTERM long before the end: who is asked to stop still has the data.
        lab.run(["scancel", "--signal=TERM", job.id], check=True)
        wait_for_start(folder, job.id, starts=3)
        assert job.log.count("at the end: [[") == 4 and job.log.count("'book.txt'") == 4, job.log
        assert staged(lab, job.id, copies) == ["node1", "node2"]
    job.cancel()
    assert not staged(lab, job.id)


@often
@pytest.mark.only("horovod_cpu", "fsdp", "lora")
def test_copy_that_does_not_end(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """What has been copied is gone when a job is cancelled meanwhile."""
    folder = stub(source, tmp_path / example)
    (folder / "data").mkdir()
    os.mkfifo(folder / "data" / "endless")  # nobody writes to it: a copy of what is in it does not end
    edit(folder / "plumbing" / "staging.sh", "cp -rL", "cp -rL --copy-contents")
    copying = submit(lab, example, folder, FLAG[example], "data", STAGE="1")
    wait_until(lambda: staged(lab, copying.id), 300, "the beginning of the copy", ASK_SLURM)
    copying.cancel()
    assert not staged(lab, copying.id) and "copied" not in copying.log


@often
@pytest.mark.only("horovod_cpu", "fsdp", "lora")
def test_copy_that_fails(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """Missing data, a full disk, and a folder of somebody else's where the copy would be: the job fails, and says it.

    On all nodes, or on one of them.
    """
    folder = with_data(stub(source, tmp_path / example))
    lab.run(["mkdir", "/tmp/on-node1"], node="node1", check=True)
    for node, size in (("node1", "1m"), ("node2", "16k")):
        lab.run(["mkdir", "-p", "-m", "777", "/tmp/small"], node=node, user="root", check=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "small", "/tmp/small"]
        lab.run(words, node=node, user="root", check=True)
    # The file, or folder, that is asked for; TMPDIR; and what is said before.
    cases = {
        "no-such-folder": ("/tmp", "No such file or directory"),
        "/tmp/on-node1": ("/tmp", "No such file or directory"),
        "data": ("/tmp/small", "No space left on device"),
    }
    for asked, (temporary, said) in cases.items():
        broken = submit(lab, example, folder, FLAG[example], asked, STAGE="1", TMPDIR=temporary)
        assert broken.wait().shown["JobState"] == "FAILED" and "started" not in broken.log
        assert said in broken.log and broken.log.count(NOT_COPIED) == 1, broken.log
        assert "copied" not in broken.log.replace(NOT_COPIED, "") and not staged(lab, broken.id)
    for node in lab.nodes:
        assert not lab.run(["ls", "-A", "/tmp/small"], node=node, check=True).stdout
        lab.run(["umount", "/tmp/small"], node=node, user="root", check=True)

    # What somebody else has put where the copy would be is not written to.
    name = f"/tmp/data-{int(broken.id) + 1}"
    lab.run(["sh", "-c", f"mkdir -m 777 {name} && chown nobody {name}"], node="node1", user="root", check=True)
    planted = submit(lab, example, folder, FLAG[example], "data", STAGE="1")
    assert name.endswith(f"-{planted.id}") and planted.wait().shown["JobState"] == "FAILED"
    assert NOT_COPIED in planted.log, planted.log
    assert lab.run(["ls", "-A", name], node="node1", check=True).stdout == ""


@pytest.mark.runs("weekly")
@pytest.mark.only("horovod_cpu")
def test_language_model_with_staged_text(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """SCRIPT=more/train_lm.py and STAGE=1: the text is copied once per node, read there, and removed at the end."""
    folder = copy_example(source, tmp_path / example)
    (folder / "texts").mkdir()
    (folder / "texts" / "book.txt").write_text(TEXT)
    arguments = ["--data-dir", "texts", "--text-file", "book.txt", "--context", "32", "--epochs", "1"]
    job = submit(lab, example, folder, *arguments, SCRIPT="more/train_lm.py", STAGE="1").wait()
    assert job.shown["JobState"] == "COMPLETED", job.log
    assert re.search(rf"copied {folder}/texts to \S+/data-{job.id} on 2 nodes in \d+ s", job.log), job.log
    first = "TinyGPT on book.txt, 32 tokens per sample: 4 processes on 2 nodes, mpi on cpu"
    assert first in job.log and "tokens/s" in job.log
    assert (job.output / "model.pt").exists()
    assert not staged(lab, job.id)


@pytest.mark.runs("weekly")
@pytest.mark.only("fsdp", "lora")
def test_staged_as_unstaged(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """The README's job with STAGE=1, stopped twice, ends with the bits of the one without, and names no copy.

    The second start reads copies that are made anew. The model is one of links, as in Hugging Face's cache.
    """
    folder = copy_example(source, tmp_path / "prepared" / example)
    if example == "lora":
        (folder / "model").rename(folder / "blobs")
        (folder / "model").mkdir()
        for path in (folder / "blobs").iterdir():
            (folder / "model" / path.name).symlink_to(f"../blobs/{path.name}")
    else:
        (folder / "book.txt").write_text("".join(f"{number} {number**2}\n" for number in range(4000)))
        words = [sys.executable, "tokenize_text.py", "--out", "tokens", "--train-vocabulary", "300", "book.txt"]
        assert Run(words, folder).wait().status == 0
    line = readme.command(f"examples/{example}/README.md", "STAGE=1 sbatch run.slurm...")
    without = line.removeprefix("STAGE=1 ")
    options = two_processes(source)
    plain = submit(lab, example, copy_example(folder, tmp_path / "plain" / example), options=options, line=without)
    job = stop_twice(lab, folder, tmp_path / "staged" / example, options, line=line)
    plain.wait()
    outputs.assert_same_run(job.output, plain.output)
    assert job.log.count("run.slurm: copied ") == 3 and not staged(lab, job.id)
    names = ["model", "text.txt"] if example == "lora" else ["tokens"]
    settings = outputs.read_run(job.output)["settings"]
    assert [settings[name] for name in ("model_dir", "text_file") if name in settings] == [
        str(job.folder / name) for name in names
    ]
    written = [path for path in job.output.rglob("*.json") if job.output / f"code-{job.id}" not in path.parents]
    assert written and not [path for path in written if f"data-{job.id}" in path.read_text()]
    if example == "lora":
        adapter = json.loads((job.output / "adapter" / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str(job.folder / "model")
        assert f"data-{job.id}" not in (job.output / "adapter" / "README.md").read_text()


@pytest.mark.runs("weekly")
@pytest.mark.only("torchrun_multinode")
def test_another_example(example: str, source: Path, lab: Lab, tmp_path: Path) -> None:
    """With the page's change run.slurm of another example copies data, too."""
    folder = copy_example(source, tmp_path / example)
    samples.write_data(folder / "data", "mnist")
    (diff,) = readme.fences(ROOT / "docs" / "large-data.md", "diff")
    apply_diff(folder / "run.slurm", diff)
    arguments = ["--dataset", "mnist", "--batch-size", "16", "--epochs", "1"]
    job = submit(lab, example, folder, *arguments, options=two_processes(source), STAGE="1").wait()
    assert job.shown["JobState"] == "COMPLETED" and "ConvNet on mnist: 2 processes" in job.log, job.log
    assert f"copied {folder}/data to /tmp/data-{job.id} on 2 nodes" in job.log and not staged(lab, job.id)
    assert outputs.read_run(job.output)["settings"]["data_dir"] == str(folder / "data")
