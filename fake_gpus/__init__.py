"""For tests: switch the fake GPUs on for a process, and read what it did. README.md says what they are."""

import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def environment(logs: Path, folder: Path = FOLDER) -> dict[str, Any]:
    """Return the variables with which a process finds two fake GPUs, and leaves a log in the folder `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    return {"PYTHONPATH": str(folder), "FAKE_GPUS": str(logs), "CUDA_VISIBLE_DEVICES": "0,1"}


def training(logs: Path) -> list[tuple[list[str], str]]:
    """Return, for each process that trained, the GPUs that it used, and its log; in the order of the GPUs."""
    found = [path.read_text() for path in logs.glob("*.log")]
    return sorted((sorted(set(re.findall(r"cuda:\d+", text))), text) for text in found if "pinned memory" in text)
