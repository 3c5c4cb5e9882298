"""How bad input has to end: with one clear line and the right status."""

import re
from collections.abc import Mapping
from pathlib import Path

from harness.runs import Run


def assert_refused(run: Run, status: int, *texts: str) -> None:
    """Check that a run has ended with this status and one line of error, whose text is the last on the terminal.

    A launcher that makes a status of its own, other than train.py's 2, may add its own traceback, with no file of ours.
    """
    assert run.status == status, f"status {run.status}, not {status}:\n{run.stdout}\n{run.stderr}"
    errors = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(set(errors)) == 1, run.stderr
    # PyTorch notes which processes it ends, and torchrun draws lines around what a process has reported.
    notes = re.compile(r"W\d{4} .*/spawn\.py:\d+\] Terminating|=*$")
    said = re.sub(r"Traceback .*\n  File \S*/horovodrun\"(.|\n)*", "", run.stderr)  # of its own, about the status
    assert [line for line in said.splitlines() if not notes.match(line)][-1].endswith(errors[-1]), run.stderr
    assert all(text in errors[-1] for text in texts), f"{texts} not in {errors[-1]}"
    ours = r'File ".*(train|longrun|sharded|data|models)\.py"'
    assert not re.search("Traceback" if status == 2 else ours, run.stderr) and not run.left, run.stderr


# What torchrun sets, for a process that is the only one.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
TORCHRUN |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # MPI would leave files of a failed start
TORCHRUN |= {"DS_ACCELERATOR": "cpu"}  # otherwise DeepSpeed prints that it has found no other
END = "end of a case\n"
EACH = """
import os, sys, tempfile, train
if "torch" in sys.modules:
    import torch._dynamo  # which every optimizer imports: once here, not in each child
for call, words in {cases}:
    sys.argv = ["train.py", *words.split()]
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            exec(call)
        except SystemExit as end:  # an interpreter with PyTorch needs a second for its own end
            sys.stderr.flush()
            os._exit(end.code)
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.wait()[1]))
    os.write(2, {end!r})
"""


def assert_calls_refused(folder: Path, cases: Mapping[tuple[str, str], list[str]]) -> None:
    """Check that each call, with its command line of train.py, ends with status 2 and one line that has all its texts.

    No traceback is shown, and nothing is left in the temporary folder. One process here, without a launcher, imports
    train.py, and has a child for each of them: a start for each would take minutes.
    """
    (folder / "each.py").write_text(EACH.format(cases=list(cases), end=END.encode()))
    run = Run(["python", "each.py"], folder, TORCHRUN).wait()
    assert run.stdout == "status 2\n" * len(cases), run.stdout + run.stderr
    *parts, _ = run.stderr.split(END)
    for part, (case, texts) in zip(parts, cases.items(), strict=True):
        lines = [line for line in part.splitlines() if line.startswith("train.py: error: ")]
        assert len(lines) == 1 and all(text in lines[0] for text in texts), f"{case}: {part}"
    assert "Traceback" not in run.stderr and not run.left, f"{run.stderr}\n{run.left}"
