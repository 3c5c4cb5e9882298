"""runs/show.py: tables and curves of made-up runs, with a stand-in for sacct."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import readme
from harness.launchers import ROOT

HEAD = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size\n"
START = {"time": 1.0, "step": 0, "hosts": ["node1", "node2"]}
STOP = {"time": 2.0, "step": 10, "reason": "finished: the model is in output/1234/model.pt"}
# As sacct --parsable2 --duplicates --units=M prints it: a job that was requeued, and one that still runs.
SACCT = """#!/bin/sh
case "$*" in *--duplicates*--jobs=1234,1235_2*) ;; *) exit 1 ;; esac
cat <<'END'
JobID|State|NodeList|ElapsedRaw|TotalCPU|AllocCPUS|MaxRSS|AllocTRES|ConsumedEnergyRaw
1234|REQUEUED|node[1-2]|3600|06:06:00|8||billing=8,cpu=8,gres/gpu=4,mem=8G,node=2|
1234.batch|CANCELLED|node1|3600|00:01.500|4|12.20M|cpu=4,mem=4G,node=1|0
1234.0|CANCELLED|node[1-2]|3600|06:05:58|8|2110.40M|cpu=8,gres/gpu=4,mem=8G,node=2|0
1234|COMPLETED|node[1-2]|90000|1-01:00:00|8||billing=8,cpu=8,gres/gpu=4,mem=8G,node=2|7200
1235_2|RUNNING|node3|60|00:00:00|4||billing=4,cpu=4,mem=4G,node=1|
END
"""
# As nvidia-smi writes it, without units and with them; a requeued job goes on, and is writing a line.
GPUS = """timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W]
2026/11/29 05:00:00.000, 0, 90, 15211, 290.00
2026/11/29 05:00:00.000, 1, [N/A], 300, [N/A]
timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W]
2026/11/29 06:00:00.000, 0, 86 %, 12000 MiB, 280.00 W
2026/11/29 06:00:00.000, 1"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder of two runs, of a damaged one, of an environment and of a link that leads back."""
    folder = tmp_path / "output"
    for name in ("1234", "1235_2", "other", "venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.csv").write_text(f"{HEAD}1,2.5,2.4,0.5,100,60,4\n2,1.5,1.4,0.25,120,61.2,4\n")
    os.utime(folder / "1234" / "metrics.csv", (1, 1))  # the older run is above the newer one
    one, two = {"starts": [START, START], "stops": [STOP], "settings": {"epochs": 2}}, {"starts": [START], "stops": []}
    (folder / "1234" / "run.json").write_text(json.dumps(one))
    (folder / "1235_2" / "run.json").write_text(json.dumps(two))
    (folder / "1234" / "started-1234").touch()
    (folder / "1235_2" / "started-1235_2").touch()
    (folder / "1234" / "gpus-node1.csv").write_text(GPUS)
    (folder / "other" / "metrics.csv").write_text("epoch,step\n1,2\n")
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "1234" / "loop").symlink_to(folder)
    return folder


def show(output: Path, *words: str, sacct: str | None = SACCT) -> subprocess.CompletedProcess[str]:
    """Run the README's command with these words where sacct is this script."""
    programs = output.parent / "bin"
    programs.mkdir(exist_ok=True)
    if sacct:
        (programs / "sacct").write_text(sacct)
        (programs / "sacct").chmod(0o755)
    path = f"{programs}:/usr/bin:/bin" if sacct else str(programs)
    changes = {".venv/bin/python show.py": f"{sys.executable} {ROOT / 'runs' / 'show.py'}"}
    line = readme.command("runs/README.md", ".venv/bin/python show.py ...", changes)
    command = [*line.split()[:-1], *words]  # without ~/project/output
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, cwd=output.parent, env=environment, capture_output=True, text=True, timeout=300)


def test_tables_and_picture(output: Path) -> None:
    """Each table has the numbers of the files and of sacct, and the picture is there."""
    run = show(output, "output")
    assert run.returncode == 0, run.stderr
    parts = [[" ".join(line.split()) for line in part.splitlines()[1:]] for part in run.stdout.split("\n\n")]
    results, jobs, gpus, _ = parts
    assert results == [
        "1234 finished 2 2 of 2 4 1.5000 1.4000 50.00% 0:02:01 110 samples/s",
        "1235_2 running or killed 1 2 of ? 4 1.5000 1.4000 50.00% 0:02:01 110 samples/s",
    ]
    assert jobs == [
        "1234 1234 REQUEUED node[1-2] 1:00:00 6.1 of 8 2110 4",
        "1234 1234 COMPLETED node[1-2] 25:00:00 1.0 of 8 4 2.0",
        "1235_2 1235_2 RUNNING node3 0:01:00",
    ]
    assert gpus == ["1234 node1 0 88 15211 285 2", "1234 node1 1 nan 300 nan 2"]
    assert run.stdout.endswith("\n\ncurves: curves.png\n")
    assert (output.parent / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run.stderr.count("\n") == 1 and "other is left out: it has no epoch and train_loss" in run.stderr


def test_without_slurm(output: Path) -> None:
    """Where sacct is missing or fails, one line says so and the rest is shown; a folder without runs is refused."""
    for sacct, said in {
        None: "No such file",
        "#!/bin/sh\necho accounting is disabled >&2\nexit 1\n": "disabled",
    }.items():
        run = show(output, "output/1234", "--picture", "own.pdf", sacct=sacct)
        assert run.returncode == 0 and said in run.stderr and "Traceback" not in run.stderr
        assert "finished" in run.stdout and (output.parent / "own.pdf").exists()
    (output / "other" / "metrics.csv").write_text("epoch,train_loss\n1,0.5\n")  # of a script of another kind
    run = show(output, "output/other", sacct=None)
    assert run.returncode == 0 and not run.stderr and "nan" in run.stdout
    run = show(output, "bin")
    assert run.returncode == 1 and run.stderr == "show.py: no run in bin: train.py writes metrics.csv there\n"
