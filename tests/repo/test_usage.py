"""runs/usage.py, which prints what a run has used, and log_usage of job.sh, which writes what it reads.

The programs that ask GPUs are stand-ins, and so are the counters of processors, and the time.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import outputs, runs
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


CUT = """
1800000000.00 1234.0
0, 90, 30000, 300.00, 1700, 0x0000000000000004
1000000,262143328850,package-0

1800000010.00 1234.0
0, 90, 30000, 300.00, 1700, 0x0000000000000001
Unable to determine the device handle for GPU1: 0000:41:00.0: Unknown Error
90, 30000, 3
1800000

1800003600.00 1234.1
0, 90, 30000, 100.00, 1700, [N/A]
9000000,262143328850,package-0

1800003610.00 1234.1
0, 90, 30000, 100.00, 1700, 0x0000000000000000
59000000,262143328850,package-0

1800003620.00 1234.1
0, 90, 30000, 900.00, 1700, 0x0000000000000000
69000000,262143328"""


def test_cut_off_and_requeued(tmp_path: Path) -> None:
    """Lines that were cut off and errors are left out, and the time between two starts of a job counts for nothing."""
    (tmp_path / "usage-node1.site.txt").write_text(CUT)
    found = outputs.import_file(USAGE).samples(tmp_path)
    assert list(found) == [("node1.site", "gpu0"), ("node1.site", "cpu0")]
    gpu, cpu = found.values()
    assert [(one["seconds"], one["watts"]) for one in gpu] == [(0, 300), (10, 300), (0, 100), (10, 100), (10, 900)]
    assert [one["slowed"] for one in gpu] == ["power", "", "", "", ""]
    assert [(one["time"], one["seconds"], one["watts"]) for one in cpu] == [(1800003610, 10, 5)]


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
AMD = """#!/bin/sh
echo 'WARNING: AMD GPU device(s) is/are in a low-power state.'
echo 'device,sclk clock speed:,sclk clock level:,Current Socket Graphics Package Power (W),GPU use (%),\
VRAM Total Memory (B),VRAM Total Used Memory (B)'
echo 'card0,(1700Mhz),1,250.0,80,68702699520,1073741824'
echo 'card1,(800Mhz),0,N/A,0,68702699520,0'
"""
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


def test_log_of_amd(tmp_path: Path) -> None:
    """The columns of rocm-smi are found by their names; a processor that tells nobody its energy has no line."""
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    (tmp_path / "powercap" / "intel-rapl:0" / "energy_uj").unlink()
    log(tmp_path, {"nvidia-smi": FAILS, "rocm-smi": AMD}, "\n", SLURM_GPUS_ON_NODE="2", SLURM_RESTART_COUNT="3")
    found = outputs.import_file(USAGE).samples(tmp_path / "output")
    assert [device for _, device in found] == ["gpu0", "gpu1"] and all(len(those) == 2 for those in found.values())
    first = {"busy": 80, "memory_mb": 1024, "watts": 250, "mhz": 1700, "slowed": ""}
    second = {"busy": 0, "memory_mb": 0, "watts": None, "mhz": 800, "slowed": ""}
    for those, expected in zip(found.values(), (first, second), strict=True):
        for one, since in zip(those, (0, 10), strict=True):
            assert one == expected | {"time": 1.8e9 + since, "seconds": since}


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


def test_log_every(tmp_path: Path) -> None:
    """LOG_EVERY=60 is a sample each minute."""
    gpus = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1,3"}
    text = log(tmp_path, {"nvidia-smi": ANSWERS}, "\n", LOG_EVERY="60", **gpus).read_text()
    assert re.findall(r"^(\d+)\.00 1234\.0$", text, re.MULTILINE) == ["1800000000", "1800000060"]


ROWS = "epoch,train_loss,test_loss,seconds,world_size\n1,2.0,2.0,1.0,2\n"


def scratch(folder: Path) -> None:
    """`output` is a link to a run on another file system."""
    run(folder / "scratch/me")
    link(folder / "project/output", "../scratch/me")


def linked_run(folder: Path) -> None:
    run(folder / "scratch/7")
    (folder / "project/output").mkdir(parents=True)
    link(folder / "project/output/7", str(folder / "scratch/7"))


def loop(folder: Path) -> None:
    run(folder / "project/output")
    link(folder / "project/output/again", "../..")


def both_ways(folder: Path) -> None:
    run(folder / "project/output/7")
    link(folder / "project/latest", "output/7")


def linked_to_nothing(folder: Path) -> None:
    run(folder / "project/output/7")
    link(folder / "project/output/8", "gone")


def data_set(folder: Path) -> None:
    run(folder / "project/output/7")
    for part in ("train", "val"):
        run(folder / f"project/images/{part}/class")


def environments(folder: Path) -> None:
    run(folder / "project/output/7")
    run(folder / "project/env/lib")
    (folder / "project/env/pyvenv.cfg").touch()
    run(folder / "project/other/site-packages/tool")


def both_at_the_top(folder: Path) -> None:
    """The project itself is an environment, and has a data set beside its runs."""
    for part in ("train/class", "val/class", "lib/tool", "output/7"):
        run(folder / "project" / part)
    (folder / "project/pyvenv.cfg").touch()


def run(folder: Path) -> None:
    """Write a run."""
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(ROWS)


def link(path: Path, target: str) -> None:
    """Make a symbolic link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


# How runs lie below `project`, and which are found there.
BELOW: dict[str, tuple[Callable[[Path], None], str]] = {
    "output is a link": (scratch, "output"),
    "a run is a link": (linked_run, "output/7"),
    "a link leads back": (loop, "output"),
    "a run has two paths": (both_ways, "latest"),
    "a link to nothing": (linked_to_nothing, "output/7"),
    "a data set": (data_set, "output/7"),
    "environments": (environments, "output/7"),
    "both at the top": (both_at_the_top, "output/7"),
}


@pytest.mark.parametrize("case", BELOW)
def test_runs_are_found(tmp_path: Path, case: str) -> None:
    """The runs below a folder are found, each once, also behind links."""
    make, expected = BELOW[case]
    make(tmp_path)
    top = tmp_path / "project"
    (run,), left_out = outputs.import_file(USAGE.with_name("reader.py")).find_runs(top, set())
    assert (run.name, run.folder, left_out) == (expected, top / expected, [])
