"""harness/gpu_lines.py finds a GPU's pieces of Python, and notices that one was not executed."""

import json
import re
from pathlib import Path

import pytest

from harness import gpu_lines, gpus
from harness.launchers import ROOT
from tests.test_gpu import assert_one_gpu_each

SAMPLE = """
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
    if rank:
        print(1)
backend = "gloo" if device.type == "cpu" else "nccl"
if 0 < (gpus := torch.cuda.device_count()) < processes:
    refuse()
if args.cpu_offload and not torch.cuda.is_available():
    refuse_on_cpus()
place = "cpu" if args.cpu_offload else device
devices = device.type == "cuda" and [device.index]
"""


def test_pieces(tmp_path: Path) -> None:
    """What only a GPU's run reaches is found, and what a run without one reaches is not."""
    (tmp_path / "train.py").write_text(SAMPLE)
    found = {piece.text for piece in gpu_lines.pieces(tmp_path)}
    asked = {"torch.cuda.is_available", "torch.cuda.device_count", "torch.cuda.set_device"}
    statements = {"torch.cuda.set_device(device)", "if rank: print(1)", "print(1)", "refuse()"}
    assert found == asked | statements | {'torch.device("cuda", rank)', '"nccl"', '"cpu"', "[device.index]"}


def test_reached(tmp_path: Path) -> None:
    """A piece counts as executed if an instruction within it was, and not if only one around it was."""
    (tmp_path / "train.py").write_text("backend = 'nccl' if device.type == 'cuda' else 'gloo'\n")
    (piece,) = gpu_lines.pieces(tmp_path)
    for position, was in (
        ([1, 1, 10, 16], True),
        ([1, 1, 0, 53], False),
        ([1, 1, 46, 52], False),
        ([1, 1, 0, None], False),
    ):
        (tmp_path / "lines-1.json").write_text(json.dumps({"train.py": [position]}))
        assert gpu_lines.reached([piece], [tmp_path]) == {piece: was}


@pytest.mark.parametrize("name", gpu_lines.EXAMPLES)
def test_examples_have_pieces(name: str) -> None:
    found = {piece.text for piece in gpu_lines.pieces(ROOT / "examples" / name)}
    assert len(found) >= 6 and '"nccl"' in found


def test_known() -> None:
    """The stand-in is for the PyTorch that the examples pin."""
    pins = {re.search(r"^torch==(\S+)", path.read_text(), re.MULTILINE)[1] for path in ROOT.glob("examples/fsdp/*.txt")}
    assert pins == {gpus.KNOWN}


def test_one_gpu_each_can_fail() -> None:
    """A process that nvidia-smi lists on two GPUs is noticed."""
    assert_one_gpu_each("1, GPU-a\n2, GPU-b\n3, GPU-b\n")
    with pytest.raises(AssertionError, match="several GPUs"):
        assert_one_gpu_each("1, GPU-a\n2, GPU-b\n1, GPU-b\n")
