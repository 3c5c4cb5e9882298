"""runs/usage.py, which prints what a run has used, and log_usage of job.sh, which writes what it reads.

The programs that ask GPUs are stand-ins, and so are the counters of processors, and the time.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from harness import runs
from harness.launchers import ROOT

USAGE = ROOT / "runs" / "usage.py"


def printed(folder: Path, *words: str, status: int = 0) -> list[str]:
    """Return the lines that `python usage.py` prints in a folder; of stderr if it is to fail."""
    run = runs.Run(["python", str(USAGE), *words], folder).wait()
    assert run.status == status and bool(run.stderr) == bool(status), run.stderr
    return (run.stderr if status else run.stdout).splitlines()


def cells(line: str) -> list[str]:
    """Return what a line of a printed table has."""
    return re.split("  +", line)


def test_of_a_job(tmp_path: Path) -> None:
    """Two nodes, four starts, of which one was killed: a line for each stop and node, and one on what is missing."""
    one = {"seconds": 3723.4, "core_seconds": 7000.0, "cores": 8, "mb": 1000, "gpu_mb": 500, "read_mb": 20}
    used = [one | {"host": host} for host in ("node1", "node1", "node2")]
    used[1].pop("read_mb")  # where the kernel does not count
    used[1]["seconds"] = 3700.0
    stops = [{"time": 1.8e9 + number, "step": 1, "reason": "stopped", "used": used} for number in (0, 9000)]
    stops.append({"time": 1.8e9, "step": 1, "reason": "stopped", "used": [{"host": "node1", "mb": 1}]})  # an old one
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "run.json").write_text(json.dumps({"starts": [{}] * 4, "stops": stops}))
    head, *lines, last = printed(tmp_path, "output")
    assert cells(head)[1:] == ["node", "processes", "time", "cores used", "memory MB", "GPU MB", "read MB"]
    assert [cells(line)[1:] for line in lines] == 2 * [
        ["node1", "2", "1:02:03", "3.8 of 8", "2000", "1000", "20"],
        ["node2", "1", "1:02:03", "1.9 of 8", "1000", "500", "20"],
    ]
    assert last.startswith("1 of 4 starts: no record")


def test_refusals(tmp_path: Path) -> None:
    """No argument, no such folder, and a run.json of another program: one line says what to do."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("[]")
    for words in ([], ["nowhere"], ["other"]):
        (line,) = printed(tmp_path, *words, status=1)
        assert line.startswith("usage.py: error: ") and "output/1234" in line


NVIDIA = """#!/bin/sh
case "$*" in *{unknown}*) echo 'Field "clocks" is not a valid field to query.'; exit 2 ;; esac
[ "$1 $2" = "-i 1,3" ] || exit 6
echo '1, 90, 30000, 300.00, 1700, 0x0000000000000004'
echo '3, [N/A], 40000, [N/A], 1500, 0x0000000000000001'
"""
FAILS = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""
HANGS = "#!/bin/sh\nexec sleep 1000\n"
# Instead of waiting, each turn sets the counters and the time; the log ends after the last one.
LOG = """
source plumbing/job.sh
clock=1800000000
date() { command date --date="@$clock" "$@"; }
sleep() {
    read -r -a energy <&3 || exit
    for number in "${!energy[@]}"; do echo "${energy[number]}" >"powercap/intel-rapl:$number/energy_uj"; done
    clock=$((clock + $1))
}
log_usage 3<turns
wait
"""


def log(folder: Path, programs: dict[str, str], turns: str = "", **variables: str) -> Path | None:
    """Have log_usage write a log on a machine that has these programs, and return it, or None if there is none."""
    shutil.copytree(ROOT / "plumbing", folder / "plumbing", dirs_exist_ok=True)
    text = (folder / "plumbing" / "job.sh").read_text().replace("/sys/class/powercap", "powercap")
    seconds = 1 if HANGS in programs.values() else 300  # the machine may be busy
    (folder / "plumbing" / "job.sh").write_text(text.replace("timeout -s 9 30 ", f"timeout -s 9 {seconds} "))
    shutil.rmtree(path := folder / "bin", ignore_errors=True)
    path.mkdir()
    for name, text in programs.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    (folder / "output").mkdir(exist_ok=True)
    (folder / "turns").write_text(turns)
    variables |= {"PATH": f"{path}:{os.environ['PATH']}", "OUTPUT_DIR": "output", "SLURM_JOB_ID": "1234"}
    run = runs.Run(["bash", "-c", LOG], folder, variables).wait()
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    return next((folder / "output").glob("usage-*"), None)


def zone(folder: Path, name: str, kind: str, energy: int) -> None:
    """Make a counter as the kernel's, which begins again after 262 J."""
    place = folder / "powercap" / name
    place.mkdir(parents=True)
    for file, text in {"name": kind, "energy_uj": energy, "max_energy_range_uj": 262_000_000 - 1}.items():
        (place / file).write_text(f"{text}\n")


@pytest.mark.parametrize("unknown", ["event_reasons", "nothing"])  # to a driver before 535, and to newer ones
def test_log_of_nvidia_and_processors(tmp_path: Path, unknown: str) -> None:
    """Samples of the job's GPUs and of both processors, whose counters begin again; the table has means and energy."""
    zone(tmp_path, "intel-rapl:0", "package-0", 100_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    zone(tmp_path, "intel-rapl:0:0", "dram", 0)
    gpus = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1,3"}
    turns = "200000000 50000000\n38000000 100000000\n"  # 10 J/s, then again over the end; 5 J/s
    path = log(tmp_path, {"nvidia-smi": NVIDIA.format(unknown=unknown)}, turns, **gpus)
    assert path.name == f"usage-{os.uname().nodename}.txt"
    first = path.read_text().split("\n\n")[0].split("\n")
    assert first[:2] == ["", "1800000000.00 1234.0"] and len(first) == 2 + 2 + 3
    (tmp_path / "output" / "run.json").write_text('{"starts": [], "stops": []}')
    blank, head, *rows, energy = printed(tmp_path, "output")
    assert [cells(row)[1:] for row in rows] == [
        ["gpu1", "90", "30000", "300", "1700", "100% power", "1.67"],  # 300 W for 20 s
        ["gpu3", "40000", "1500", "0%", "0.00"],
        ["cpu0", "10", "0%", "0.06"],
        ["cpu1", "5", "0%", "0.03"],
    ]
    assert energy == "energy: 1.7 Wh of GPUs and 0.1 Wh of CPUs" and not blank and head.startswith("node")


ANSWERS = NVIDIA.format(unknown="nothing")
SILENT = {  # nvidia-smi, variables
    "a job without GPUs": (ANSWERS, {"SLURM_GPUS_ON_NODE": "0"}),
    "the second task of a node": (ANSWERS, {"SLURM_LOCALID": "1"}),
    "LOG_EVERY=0": (ANSWERS, {"LOG_EVERY": "0"}),
    "it fails": (FAILS, {}),
    "it hangs": (HANGS, {}),
}


@pytest.mark.parametrize("what", SILENT)
def test_nothing_to_log(tmp_path: Path, what: str) -> None:
    """Where no device says anything, or none is to be asked, the log ends at once, and there is no file."""
    nvidia, variables = SILENT[what]
    gpus = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1,3"}
    assert log(tmp_path, {"nvidia-smi": nvidia}, "\n", **gpus | variables) is None


ROWS = "epoch,train_loss,test_loss,seconds,world_size\n1,2.0,2.0,1.0,2\n"


def run(folder: Path) -> None:
    """Write a run."""
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(ROWS)
