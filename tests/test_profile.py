"""--profile: what it prints of a step, the traces that it writes, and that it notices slow data."""

import json
import re
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import LAUNCHERS

pytestmark = pytest.mark.only("torchrun_vision")
# The line of image_files.py where an image is read.
READS = "                content = (self.source / self.path(index)).read_bytes()\n"


def profile(example: str, folder: Path, output: str) -> tuple[dict[str, float], str]:
    """Run an epoch with --profile; check that the shares of a step add up; return them, and the advice after them."""
    run = runs.train(example, folder, 2, "--epochs", 1, "--profile", "--output-dir", output, SLURM_CPUS_PER_TASK="2")
    lines = [line.removeprefix("profile: ") for line in run.stdout.splitlines() if line.startswith("profile: ")]
    assert len(lines) == 6 and re.match(r"a step takes [\d.]+ s, the mean of 5 steps and of all processes", lines[0])
    rows = [
        re.fullmatch(r"(waits for data|waits for the network|computes|does other things) +([\d.]+)%", line)
        for line in lines[1:5]
    ]
    shares = {row[1]: float(row[2]) for row in rows}
    assert len(shares) == 4 and sum(shares.values()) == pytest.approx(100, abs=0.3), lines  # each is rounded
    recorded = outputs.read_run(folder / output)["profile"]
    exact = {name: 100 * share for name, share in recorded["shares"].items()}
    assert exact == pytest.approx(shares, abs=0.06) and f" {recorded['seconds']:.3f} s" in lines[0]
    assert not re.search("Kineto|USDT|ERROR", run.stderr), run.stderr
    return exact, lines[5]


@pytest.mark.runs("weekly")
def test_profile(example: str, folder: Path) -> None:
    """The shares of a step add up, each process writes a trace of 5 steps, and data that are slow are named."""
    shares, advice = profile(example, folder, "output")
    normal = shares["waits for data"]
    assert ("reading data is too slow" in advice) == (normal > max(20, shares["waits for the network"]))
    traces = sorted((folder / "output" / "profile").iterdir())
    assert [trace.name.partition(".")[0] for trace in traces] == ["rank0", "rank1"]
    for trace in traces:
        names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
        steps = sorted(name for name in names if name.startswith("ProfilerStep#"))
        assert steps == [f"ProfilerStep#{number}" for number in range(3, 8)]

    edits.edit(folder / "image_files.py", READS, f"                __import__('time').sleep(0.2)\n{READS}")
    shares, advice = profile(example, folder, "slowed")
    assert shares["waits for data"] > normal and "reading data is too slow" in advice


def test_too_few_steps(example: str, folder: Path) -> None:
    """A run that is too short to be profiled ends with one line that says so."""
    run = runs.start(example, folder, 2, "--epochs", 1, "--profile", "--batch-size", 25).wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, "--profile needs 8 steps", "--epochs")
