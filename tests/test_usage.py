"""usage.py, which prints what a run has used by node: from what a run has written, and from what a cluster's would."""

import json
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
