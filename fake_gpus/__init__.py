"""Fake GPUs, on which tests execute the lines that only a run on GPUs reaches: the CPU computes, Gloo plays NCCL.

This file switches them on for a process, and reads what was done there. Python itself imports the other files, in a
process that has these variables. gpus.cpp has every kernel of a GPU replaced by the CPU's. fake_driver.py has what
`torch.cuda` asks the driver, and NCCL.

They cannot show: kernels of a GPU and their rounding, time, memory that runs out, streams (all is computed at once, and
a missing wait is not noticed), CUDA graphs, NCCL's own errors and time-outs, torch.compile, fused optimizers, kernels
of DeepSpeed, profiles of a GPU, and any PyTorch but the one that they name.

The folder is frozen: it follows the pinned PyTorch, and gets nothing new.
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

FOLDER = Path(__file__).parent
KNOWN = re.search(r'^VERSION = "(.*)"', (FOLDER / "fake_driver.py").read_text(), re.MULTILINE)[1]


def why_not() -> str:
    """Return why there can be no fake GPUs with this Python's PyTorch, or nothing."""
    found, _, build = version("torch").partition("+")
    if found != KNOWN:
        return f"the fake GPUs know PyTorch {KNOWN}, not {version('torch')}"
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
    built = folder / f"fake-gpus-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if not built.exists():
        part = built.with_name(f"{built.name}.{os.getpid()}")
        shutil.copytree(FOLDER, part, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
        words = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=gpus", str(source)]
        words += [f"-I{torch / 'include'}", f"-I{sysconfig.get_path('include')}", f"-L{torch / 'lib'}"]
        words += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(part / "gpus.so")]
        subprocess.run(words, check=True, timeout=500)
        part.rename(built)
    return built


def environment(built: Path, record: Path, devices: int = 2) -> dict[str, Any]:
    """Return the variables with which a process finds so many GPUs, and leaves what it has done in `record`."""
    record.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(built), "FAKE_GPUS": str(devices), "FAKE_GPUS_RECORD": str(record)}
    return variables | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return what each process that has used a GPU has left, by the number of that GPU."""
    found = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    return sorted(found, key=lambda one: (one["own"], one["pid"]))
