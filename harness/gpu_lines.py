"""Which pieces of an example's Python only a run on GPUs reaches, and which of them were executed in the stand-in.

    python -m harness.gpu_lines [--all] [EXAMPLE ...]

trains with each example on two GPUs that are none (harness/gpus.py), in a copy of its folder, and prints the list; with
--all also in the other ways of VARIANTS. A piece is what comes after a question whose answer is another one without a
GPU, and each use of torch.cuda. The environment must have what the example requires.
"""

import argparse
import ast
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import gpus, runs
from harness.launchers import LAUNCHERS, ROOT, copy_example

EXAMPLES = [name for name, row in LAUNCHERS.items() if row.gpus]
# The arguments of the ordinary run in the stand-in: little data, and what reaches GPU lines.
ARGUMENTS = {
    "fsdp": "--epochs 1 --tokens 4000 --precision bf16 --cpu-offload --max-grad-norm 1",
    "torchrun_vision": "--epochs 1 --image-size 16 --batch-size 75 --precision fp16 --sync-batchnorm --max-grad-norm 1",
}
USUAL = "--epochs 1 --precision bf16"
# Other ways, each in addition to `--epochs 1`.
VARIANTS = {
    "ddp_spawn": ["--precision fp64"],
    "fsdp": ["--tokens 4000", "--tokens 4000 --tensor-parallel 2"],
    "torchrun_vision": ["--image-size 32 --workers 1", "--image-size 32 --workers 1 --precision bf16 --profile"],
}
# What is executed besides. What reads a GPU's profile gets one that was made up: a profiler sees no kernel here.
EXTRA = {
    "lora": """
import runpy
import sys

sys.argv = ["generate.py", "--prompt", "The river", "--max-new-tokens", "2"]
runpy.run_path("generate.py", run_name="__main__")
""",
    "torchrun_vision": """
import torch
from types import SimpleNamespace
from step_profile import shares_of_a_step

def event(name, start, end, kind="CUDA", note=False):
    kind, span = getattr(torch.autograd.DeviceType, kind), SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=kind, is_user_annotation=note)

events = [event("ProfilerStep#3", 0, 100, "CPU"), event("ProfilerStep#3", 0, 100, note=True)]
events += [event("enumerate(DataLoader)#x", 0, 20, "CPU"), event("aten::mm", 0, 90, "CPU")]
events += [event("ncclDevKernel_AllReduce", 20, 50), event("sm80_gemm", 40, 90)]
assert [round(share, 9) for share in shares_of_a_step(events)] == [0.0001, 0.2, 0.2, 0.5]
""",
}


@dataclass(frozen=True)
class Piece:
    """A part of a file, from the first to the last character."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    text: str

    def holds(self, position: list[int]) -> bool:
        """Return whether an instruction's position (line, last line, column, last column) lies in here."""
        line, last, column, end = position
        return None not in position and self.start <= (line, column) and (last, end) <= self.end


def without_gpu(node: ast.expr) -> Any:
    """Return the value of an expression where there is no GPU, or None if that is not known."""
    text = ast.unparse(node)
    if text in ("torch.cuda.is_available()", "gpu"):
        return False
    if text == "torch.cuda.device_count()":
        return 0
    if isinstance(node, ast.Attribute) and text.endswith("device.type"):
        return "cpu"
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.NamedExpr):
        return without_gpu(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = without_gpu(node.operand)
        return None if value is None else not value
    if isinstance(node, ast.BoolOp):
        deciding = isinstance(node.op, ast.Or)
        values = [without_gpu(value) for value in node.values]
        if any(value is not None and bool(value) == deciding for value in values):
            return deciding
        return None if None in values else not deciding
    if isinstance(node, ast.Compare):
        left, right = without_gpu(node.left), without_gpu(node.comparators[0])
        if left is None or right is None:
            return None
        if isinstance(node.ops[0], ast.Eq):
            return left == right
        if isinstance(node.ops[0], ast.Lt):  # of a longer chain only what the first part decides
            return False if left >= right else (True if len(node.ops) == 1 else None)
    return None


def gpu_nodes(tree: ast.AST) -> Iterator[Any]:
    """Yield the expressions and statements that are not reached without a GPU, and those that name torch.cuda."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            refused = ast.unparse(node.test) in ("args.cpu_offload", "args.sync_batchnorm")  # without a GPU
            value = False if refused else without_gpu(node.test)
            if value is not None:
                branch = node.orelse if value else node.body
                for part in branch if isinstance(branch, list) else [branch]:
                    yield from (one for one in ast.walk(part) if one is part or isinstance(one, ast.stmt))
        elif isinstance(node, ast.BoolOp):
            for before, part in zip(node.values, node.values[1:], strict=False):
                value = without_gpu(before)
                if value is not None and bool(value) == isinstance(node.op, ast.Or):
                    yield part
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
            yield node


def pieces(folder: Path) -> list[Piece]:
    """Return the GPU's pieces of an example's Python."""
    found = set()
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        for node in gpu_nodes(ast.parse(text)):
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            shown = " ".join(ast.get_source_segment(text, node).split())
            found.add(Piece(path.name, start, end, shown))
    return sorted(found, key=lambda piece: (piece.file, piece.start, piece.end))


def executed(folders: Iterable[Path]) -> dict[str, list[list[int]]]:
    """Return the positions that traced runs have executed, by file."""
    found: dict[str, list[list[int]]] = {}
    for path in (path for folder in folders for path in folder.glob("lines-*.json")):
        for name, positions in json.loads(path.read_text()).items():
            found.setdefault(name, []).extend(positions)
    return found


def reached(all_pieces: list[Piece], folders: Iterable[Path]) -> dict[Piece, bool]:
    """Return for each piece whether a run that has left its lines in one of the folders has executed it."""
    seen = executed(folders)
    return {piece: any(map(piece.holds, seen.get(piece.file, []))) for piece in all_pieces}


def run_extra(example: str, folder: Path, variables: dict[str, str]) -> None:
    """Execute what an example has in EXTRA, in its folder."""
    if example in EXTRA:
        run = runs.Run(["python", "-c", EXTRA[example]], folder, variables).wait()
        assert run.status == 0, run.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(EXAMPLES)}; default: all")
    parser.add_argument("--all", action="store_true", help="also the ways of VARIANTS, and one GPU for two processes")
    args = parser.parse_args()
    for example in args.examples or EXAMPLES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = copy_example(ROOT / "examples" / example, Path(temporary, example))
            if LAUNCHERS[example].prepare:
                runs.Run(shlex.split(LAUNCHERS[example].prepare), folder).wait()
            built, record = gpus.build(Path(temporary)), Path(temporary, "record")
            ways = [ARGUMENTS.get(example, USUAL)]
            ways += [f"--epochs 1 {words}" for words in VARIANTS.get(example, [])] if args.all else []
            for number, words in enumerate(ways):
                variables = gpus.environment(built, record, lines=True)
                runs.train(example, folder, 2, *words.split(), "--output-dir", f"output{number}", **variables)
            run_extra(example, folder, variables)
            if args.all:
                runs.start(example, folder, 2, **gpus.environment(built, record, 1, lines=True)).wait()
            found = reached(pieces(folder), [record])
        for piece, was in found.items():
            print("executed" if was else "NOT     ", f"{example}/{piece.file}:{piece.start[0]}", piece.text)
        share = sum(found.values()) / len(found)
        print(f"{example}: {sum(found.values())} of {len(found)} pieces of a GPU's code were executed, {share:.0%}\n")


if __name__ == "__main__":
    sys.exit(main())
