"""usage.py, which prints what a run has used, by node, and logs what GPUs and processors do. These are stand-ins."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from harness import outputs, runs
from harness.runs import Reference

pytestmark = [pytest.mark.runs("one")]
DATA = 40  # MB


def printed(folder: Path, *words: str, status: int = 0) -> list[str]:
    """Return the lines that `python usage.py` prints in an example's folder; of stderr if it is to fail."""
    run = runs.Run(["python", "usage.py", *words], folder).wait()
    assert run.status == status and bool(run.stderr) == bool(status), run.stderr
    return (run.stderr if status else run.stdout).splitlines()


def test_of_a_run(example: str, folder: Path, reference: Reference) -> None:
    """One line for this machine: its figures are the sums of what both processes have written."""
    shutil.copytree(reference.output, folder / "output")
    head, line = printed(folder, "output")
    assert re.split("  +", head)[1:] == ["node", "processes", "time", "cores used", "memory MB", "GPU MB", "read MB"]
    used = outputs.read_run(folder / "output")["stops"][-1]["used"]
    _, host, processes, time, cores, memory, gpu, read = re.split("  +", line)
    assert (host, processes, gpu) == (used[0]["host"], "2", "0")
    assert int(memory) == sum(one["mb"] for one in used) and int(read) == sum(one["read_mb"] for one in used)
    hours, minutes, seconds = map(int, time.split(":"))
    longest = max(one["seconds"] for one in used)
    assert abs(hours * 3600 + minutes * 60 + seconds - longest) <= 0.5
    mean, given = map(float, cores.split(" of "))
    assert abs(mean - sum(one["core_seconds"] for one in used) / longest) < 0.06 and 0 < mean <= given + 0.1


def test_of_a_job(example: str, folder: Path) -> None:
    """Two nodes, four starts, of which one was killed: a line for each stop and node, and one on what is missing."""
    one = {"seconds": 3723.4, "core_seconds": 7000.0, "cores": 8, "mb": 1000, "gpu_mb": 500, "read_mb": 20}
    used = [one | {"host": host} for host in ("node1", "node1", "node2")]
    used[1] = used[1] | {"read_mb": None, "seconds": 3700.0}  # where the kernel does not count
    stops = [{"time": 1.8e9 + number, "step": 1, "reason": "stopped", "used": used} for number in (0, 9000)]
    stops.append({"time": 1.8e9, "step": 1, "reason": "stopped", "used": [{"host": "node1", "mb": 1}]})  # an old one
    (folder / "output").mkdir()
    (folder / "output" / "run.json").write_text(json.dumps({"starts": [{}] * 4, "stops": stops}))
    _, *lines, last = printed(folder, "output")
    cells = [re.split("  +", line)[1:] for line in lines]
    assert cells == 2 * [
        ["node1", "2", "1:02:03", "3.8 of 8", "2000", "1000", "20"],
        ["node2", "1", "1:02:03", "1.9 of 8", "1000", "500", "20"],
    ]
    assert last.startswith("1 of 4 starts: no record")


def test_refusals(example: str, folder: Path) -> None:
    """No argument, no such folder, and a run.json of another program: one line says what to do."""
    (folder / "other").mkdir()
    (folder / "other" / "run.json").write_text("[]")
    for words in ([], ["nowhere"], ["other"]):
        (line,) = printed(folder, *words, status=1)
        assert line.startswith("usage.py: error: ") and "output/1234" in line


READ = """

import usage
before = usage.process()
with open("data", "rb") as file:
    while file.read(1 << 20):
        pass
print(before["read_mb"], usage.process()["read_mb"])
"""


def test_what_is_read(example: str, folder: Path) -> None:
    """What a process reads is counted, also from memory, and what the imports have read before is not."""
    (folder / "data").write_bytes(bytes(DATA << 20))
    before, after = map(int, runs.Run(["python", "-c", READ], folder).wait().stdout.split())
    assert before == 0 and DATA <= after <= DATA + 2


NVIDIA = """#!/bin/sh
case "$*" in *{unknown}*) echo 'Field is not a valid field to query.'; exit 2 ;; esac
[ "$1" = --id=1,3 ] || exit 6
echo '1, 90, 30000, 300.00, 1700, 0x0000000000000004'
echo '3, [N/A], 40000, [N/A], 1500, 0x0000000000000001'
"""
AMD = """#!/bin/sh
echo 'device,sclk clock speed:,sclk clock level:,Current Socket Graphics Package Power (W),GPU use (%),\
VRAM Total Memory (B),VRAM Total Used Memory (B)'
echo 'card0,(1700Mhz),1,250.0,80,68702699520,1073741824'
echo 'card1,(800Mhz),0,N/A,0,68702699520,0'
"""
LOG = """
import pathlib, sys, types
import usage
usage.POWERCAP = pathlib.Path("powercap")
turns = iter(sys.argv[1].split(","))
def sleep(_):  # in the place of ten seconds; what the counters say next
    for number, value in enumerate(next(turns, "").split("+")):
        if not value:
            sys.exit()
        (usage.POWERCAP / f"intel-rapl:{number}" / "energy_uj").write_text(value)
    clock[0] += 10
clock = [1.8e9]
usage.time = types.SimpleNamespace(sleep=sleep, time=lambda: clock[0])
usage.log(pathlib.Path("output"), 10)
"""


def logged(folder: Path, programs: dict[str, str], turns: str, **variables: str) -> list[str]:
    """Return the lines of usage-NODE.csv after a log of a machine that has these programs; none without the file."""
    path = folder / "bin"
    path.mkdir()
    for name, text in programs.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    (folder / "output").mkdir(exist_ok=True)
    variables["PATH"] = f"{path}:{os.environ['PATH']}"
    run = runs.Run(["python", "-c", LOG, turns], folder, variables).wait()
    assert run.status == 0, run.stderr
    files = [*(folder / "output").glob("usage-*")]
    return files[0].read_text().splitlines() if files else []


def zone(folder: Path, name: str, kind: str, energy: int) -> None:
    """Make a counter as the kernel's, which begins again after 262 J."""
    place = folder / "powercap" / name
    place.mkdir(parents=True)
    for file, text in {"name": kind, "energy_uj": energy, "max_energy_range_uj": 262_000_000 - 1}.items():
        (place / file).write_text(f"{text}\n")


@pytest.mark.parametrize("unknown", ["event_reasons", "nothing"])  # to a driver before 535, and to newer ones
def test_log_of_nvidia_and_processors(example: str, folder: Path, unknown: str) -> None:
    """Samples of the job's GPUs and of both processors, whose counters begin again; the table has means and energy."""
    zone(folder, "intel-rapl:0", "package-0", 100_000_000)
    zone(folder, "intel-rapl:1", "package-1", 0)
    zone(folder, "intel-rapl:0:0", "dram", 0)
    gpus = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1,3"}
    turns = "200000000+50000000,38000000+100000000"  # 10 J/s, then again over the end; 5 J/s
    head, *lines = logged(folder, {"nvidia-smi": NVIDIA.format(unknown=unknown)}, turns, **gpus)
    assert head == "time,device,seconds,busy,memory_mb,watts,mhz,slowed" and len(lines) == 2 + 4 + 4
    assert lines[2:6] == [
        "1800000010.00,gpu1,10.00,90,30000,300.00,1700,power",
        "1800000010.00,gpu3,10.00,,40000,,1500,",
        "1800000010.00,cpu0,10.00,,,10.0,,",
        "1800000010.00,cpu1,10.00,,,5.0,,",
    ]
    (folder / "output" / "run.json").write_text('{"starts": [], "stops": []}')
    blank, head, *rows, energy = printed(folder, "output")
    assert [re.split("  +", row)[1:] for row in rows] == [
        ["gpu1", "90", "30000", "300", "1700", "100% power", "1.67"],  # 300 W for 20 s
        ["gpu3", "40000", "1500", "0%", "0.00"],
        ["cpu0", "10", "0%", "0.06"],
        ["cpu1", "5", "0%", "0.03"],
    ]
    assert energy == "energy: 1.7 Wh of GPUs and 0.1 Wh of CPUs" and not blank and head.startswith("node")


def test_log_of_amd(example: str, folder: Path) -> None:
    """The columns of rocm-smi are found by their names; a processor that tells nobody its energy has no line."""
    zone(folder, "intel-rapl:0", "package-0", 0)
    (folder / "powercap" / "intel-rapl:0" / "energy_uj").unlink()
    _, *lines = logged(folder, {"nvidia-smi": "#!/bin/sh\nexit 9\n", "rocm-smi": AMD}, "", SLURM_GPUS_ON_NODE="2")
    rows = [line.split(",", 1)[1] for line in lines]
    assert rows == ["gpu0,0.00,80,1024,250.0,1700,", "gpu1,0.00,0,0,,800,"]


def test_nothing_to_log(example: str, folder: Path) -> None:
    """A job without GPUs on such a node, and one whose GPUs do not answer, leave no file, and the log ends."""
    assert logged(folder, {"nvidia-smi": NVIDIA.format(unknown="nothing")}, "1", CUDA_VISIBLE_DEVICES="1,3") == []
    shutil.rmtree(folder / "bin")
    assert logged(folder, {"nvidia-smi": "#!/bin/sh\nexit 9\n"}, "1", SLURM_GPUS_ON_NODE="2") == []
