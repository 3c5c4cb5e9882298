"""GPUs that are none, for tests: what switches harness/fake_cuda on, and reads what was done there.

Nothing else imports that folder: Python does, in a process that has these variables. What it cannot stand for: kernels
of a GPU and their rounding, time, memory that runs out, streams (all is computed at once, and a missing wait is not
noticed), CUDA graphs, NCCL's own errors and time-outs, torch.compile, fused optimizers, kernels of DeepSpeed, profiles
of a GPU, and any PyTorch but the one that it names.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.launchers import ROOT

FOLDER = ROOT / "harness" / "fake_cuda"
KNOWN = re.search(r'^VERSION = "(.*)"', (FOLDER / "stand_in.py").read_text(), re.MULTILINE)[1]


def why_not() -> str:
    """Return why there can be no stand-in with this Python's PyTorch, or nothing."""
    found, _, build = version("torch").partition("+")
    if found != KNOWN:
        return f"the stand-in for CUDA knows PyTorch {KNOWN}, not {version('torch')}"
    if not build.startswith(("cpu", "rocm", "xpu")):
        return ""
    reason = f"needs a PyTorch built for CUDA, not {version('torch')}: the GPU lines are not executed"
    asked = os.environ.get("UV_TORCH_BACKEND", "")
    return f"UV_TORCH_BACKEND={asked}: {reason}" if asked == build else reason


def build(folder: Path) -> Path:
    """Compile gpus.cpp for this Python and its PyTorch, unless that has been done in `folder`; return its folder.

    That has the Python half, too, so that it is all that a node of the lab must see.
    """
    source = FOLDER / "gpus.cpp"
    torch = Path(find_spec("torch").origin).parent
    what = "".join([version("torch"), sys.version, *(path.read_text() for path in sorted(FOLDER.glob("*.??*")))])
    built = folder / f"fake-cuda-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if not built.exists():
        part = built.with_name(f"{built.name}.{os.getpid()}")
        shutil.copytree(FOLDER, part, ignore=shutil.ignore_patterns("__pycache__"))
        words = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=gpus", str(source)]
        words += [f"-I{torch / 'include'}", f"-I{sysconfig.get_path('include')}", f"-L{torch / 'lib'}"]
        words += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(part / "gpus.so")]
        subprocess.run(words, check=True, timeout=500)
        part.rename(built)
    return built


def environment(built: Path, record: Path, devices: int = 2, lines: bool = False) -> dict[str, Any]:
    """Return the variables with which a process finds so many GPUs, and leaves what it has done in `record`."""
    record.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(built), "FAKE_CUDA_DEVICES": str(devices), "FAKE_CUDA_RECORD": str(record)}
    variables |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    # With two cores, as of a job, torchrun_vision takes its default number of workers, 1.
    return variables | ({"TRACE_LINES": str(record), "SLURM_CPUS_PER_TASK": "2"} if lines else {})


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what each process that has used a GPU has left, by the number of that GPU."""
    found = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda one: (one["own"], one["pid"]))
