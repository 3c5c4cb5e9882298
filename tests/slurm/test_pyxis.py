"""IMAGE=pyxis:FILE: srun opens an image by NVIDIA's plugin pyxis, for which pyxis.c stands.

An image is here a text file, each line of which names a folder and its place in the image. All images have the
machine's /usr, without the program `ip`, which real ones often lack.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import outputs
from harness.jobs import (
    CPUS,
    EPOCHS,
    GPUS,
    NODES,
    all_nodes,
    assert_completed,
    assert_refused,
    hand_over,
    on_this_machine_only,
    stop_twice,
    stub,
    submit,
    two_processes,
)
from harness.launchers import copy_example
from lab import Lab, Wanted, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.only("ddp_spawn", "srun_multinode", "torchrun_multinode"),
    pytest.mark.runs("weekly"),
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/usr/include/slurm/spank.h").exists(), reason="needs libslurm-dev"),
]
OPEN = """#!/bin/sh -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 image /mnt
place() {
    if [ -d "$1" ]; then mkdir -p "/mnt$2"; else mkdir -p "/mnt${2%/*}"; touch "/mnt$2"; fi
    mount --rbind "$1" "/mnt$2"
}
for folder in /usr /etc /proc /sys /dev; do place "$folder" "$folder"; done
for folder in sbin lib lib64; do ln -s "usr/$folder" "/mnt/$folder"; done
mkdir /mnt/bin
ln -s /usr/bin/* /mnt/bin
rm /mnt/bin/ip
mkdir -m 1777 /mnt/tmp
[ -e "$image" ]
echo "$mounts" | tr , '\\n' | cat "$image" - | while IFS=: read -r path inside; do place "$path" "$inside"; done
"""


@pytest.fixture(scope="module")
def pyxis_lab(session_folder: Path) -> Iterator[Lab]:
    """A lab whose SLURM has the stand-in for pyxis."""
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="pyxis-", dir=session_folder))
    source = Path(__file__).with_name("pyxis.c")
    words = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "pyxis.so"), str(source)]
    subprocess.run(words, check=True, timeout=300)
    (folder / "open.sh").write_text(OPEN)
    (folder / "open.sh").chmod(0o755)
    (folder / "plugstack.conf").write_text(f"required {folder}/pyxis.so {folder}/open.sh\n")
    hand_over(folder)
    shared = on_this_machine_only(session_folder, Path(sys.prefix))
    conf = [f"PlugStackConfig={folder}/plugstack.conf", "LaunchParameters=test_exec"]  # srun looks for programs here
    with Lab(Wanted(NODES, CPUS, GPUS, name=f"pyxis{os.getpid()}", share=shared, conf=conf)) as lab:
        yield lab


@pytest.fixture
def image(tmp_path: Path) -> str:
    """What IMAGE has to be for an image with the tests' Python in it."""
    places = [f"{sys.prefix}:/opt/venv"]
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        places.append(f"{sys.base_prefix}:{sys.base_prefix}")
    (tmp_path / "image").write_text("".join(f"{place}\n" for place in places))
    return f"pyxis:{tmp_path}/image"


def test_same_bits(pyxis_lab: Lab, example: str, source: Path, tmp_path: Path, image: str) -> None:
    """The job in the image ends with the bits of the job without one; stopped and requeued, too."""
    options = two_processes(source)
    folders = [copy_example(source, tmp_path / name / example) for name in ("without", "inside")]
    job = submit(pyxis_lab, example, folders[0], options=options)
    inside = submit(pyxis_lab, example, folders[1], options=options, IMAGE=image, VENV="/nowhere")
    for one in (job, inside):
        assert_completed(one, EPOCHS, processes=2)
    outputs.assert_same_run(inside.output, job.output)
    if example == "torchrun_multinode":
        stopped = stop_twice(pyxis_lab, source, tmp_path / "stopped" / example, options, IMAGE=image)
        outputs.assert_same_run(stopped.output, job.output)


LOOK = """
import os, sys
from pathlib import Path
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
Path("written").touch()
found = [Path(arguments["--data-dir"], "marker").read_text(), Path(arguments["--text-file"]).read_text()]
found += [sys.prefix, Path(arguments["--output-dir"]).exists(), Path(HIDDEN).exists(), os.environ["OMP_NUM_THREADS"]]
os.write(1, f"saw {found}\\n".encode())
sys.exit(7)
"""


def test_what_it_sees(pyxis_lab: Lab, example: str, source: Path, tmp_path: Path, image: str) -> None:
    """It sees the image, its own folder and the paths among the arguments, and nothing beside them."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "marker").write_text("data")
    (tmp_path / "text").write_text("words")
    (tmp_path / "hidden").touch()
    folder = stub(source, tmp_path / example, LOOK.replace("HIDDEN", repr(str(tmp_path / "hidden"))))
    (folder / "data").symlink_to(tmp_path / "disk")
    words = ("--data-dir", "data", "--text-file", str(tmp_path / "text"))
    job = submit(pyxis_lab, example, folder, *words, options=two_processes(source), IMAGE=image).wait()
    saw = {line for line in re.findall(r"^saw (\[.*\])$", job.log, re.MULTILINE)}
    assert len(saw) == 1, job.log
    assert ast.literal_eval(min(saw)) == ["data", "words", "/opt/venv", True, False, "1"]
    assert (folder / "written").exists() and job.shown["JobState"] == "FAILED"


WAIT = """
import faulthandler, os, signal, time

faulthandler.register(signal.SIGUSR2)
os.write(1, b"started\\n")
while not os.path.exists("finish"):
    time.sleep(0.1)
"""


def test_stacks(pyxis_lab: Lab, example: str, source: Path, tmp_path: Path, image: str) -> None:
    """Processes in the image print their stacks when asked, as without one."""
    folder = stub(source, tmp_path / example, WAIT)
    job = submit(pyxis_lab, example, folder, options=two_processes(source), IMAGE=image)
    job.wait_for_line("started")
    pyxis_lab.run(["scancel", "--signal=USR2", "--batch", job.id], check=True)
    job.wait_for_line("train.py", 60)
    (folder / "finish").touch()
    assert job.wait().shown["JobState"] == "COMPLETED", job.log


def test_refused(pyxis_lab: Lab, example: str, source: Path, tmp_path: Path, image: str) -> None:
    """No such image, an image without PyTorch, and a folder that pyxis cannot mount: no process starts."""
    (tmp_path / "empty").write_text(f"{sys.base_prefix}:/base\n")
    cases = [
        ("missing", f"pyxis:{tmp_path}/missing", "missing cannot run train.py ("),
        ("empty", f"pyxis:{tmp_path}/empty", "empty cannot run train.py ("),
        ("a,b", image, f"/a,b/{example}: it has a : or a ,"),
    ]
    for place, value, text in cases:
        folder = stub(source, tmp_path / "folders" / place / example)
        job = submit(pyxis_lab, example, folder, options=(all_nodes(source),), IMAGE=value).wait()
        assert_refused(job, text)
        assert "started" not in job.log, job.log
