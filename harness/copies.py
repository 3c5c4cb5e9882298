"""What stands in several example folders, and is held to be the same: common/, some files, and functions of plumbing.

An example is copied as one folder, so it carries its own copy of what it needs. `common/` has the text of the top-level
one. A file of FILES is the same in all examples that have it, unless a line of it begins with `# own: ` and says why
this example needs another. A function of plumbing.py or plumbing.sh has the same text in all examples that have a
function of its name, unless a comment right above it begins so: then it has that of the other functions of this name
with the same reason. Functions of shards.py count as those of plumbing.py, and those of gloo.sh as plumbing.sh's.
"""

import ast
import filecmp
import re
import shutil
from pathlib import Path

FIRST = "torchrun_multinode"  # whose text is the source, where it has the file or the function
FILES = ("checks.py", "hangs.py", "requeue.sh", "own_data.py", "own_model.py", "install.sh")
SHELL = re.compile(r"((?:^#.*\n)*)^(\w+)\(\) (?:\{ *(?:#.*)?\n(?:.*\n)*?\}|\( *(?:#.*)?\n(?:.*\n)*?\))$", re.MULTILINE)


def uses_torch(folder: Path) -> bool:
    """Return whether an example is one of PyTorch's."""
    return "\ntorch==" in f"\n{(folder / 'requirements.txt').read_text()}"


def left_out(folder: Path) -> list[str]:
    """Return patterns of what an example's common/ does not have: the modules, if it does not use PyTorch."""
    return ["__pycache__", *["*.py"] * (not uses_torch(folder))]


def files(tree: Path, without: list[str]) -> set[str]:
    """Return the files of a folder, relative to it, but for those that match one of the patterns."""
    found = [file for file in tree.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return {str(file.relative_to(tree)) for file in found if not any(map(file.match, without))}


def functions(path: Path) -> dict[str, tuple[str, str]]:
    """Return the text of each function of a program, with the comments right above it, and the one on why it is own."""
    text = path.read_text()
    if path.suffix != ".py":
        return {match[2]: (match[0], own_reason(match[1])) for match in SHELL.finditer(text)}
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            start = min([node, *node.decorator_list], key=lambda part: part.lineno).lineno - 1
            while lines[start - 1].startswith("#"):
                start -= 1
            found[node.name] = "\n".join(lines[start : node.end_lineno]), own_reason(lines[start])
    return found


def own_reason(comment: str) -> str:
    """Return the line of a function's comment that says why its example needs another text, or nothing."""
    return next((line for line in comment.splitlines() if line.startswith("# own: ")), "")


def in_examples(root: Path, name: str) -> list[Path]:
    """Return the file `name` of each example that has it, the source's first."""
    return sorted(root.glob(f"examples/*/{name}"), key=lambda path: (path.parent.name != FIRST, path))


def different_files(root: Path) -> list[tuple[Path, Path]]:
    """Return each file of FILES that has another text than it has to, and the one whose text is right."""
    found = []
    for name in FILES:
        paths = [path for path in in_examples(root, name) if "\n# own: " not in f"\n{path.read_text()}"]
        found += [(path, paths[0]) for path in paths if path.read_bytes() != paths[0].read_bytes()]
    return found


def places(root: Path) -> list[list[Path]]:
    """Return the files between which functions are shared: those in Python, and those in bash; the source is first."""
    found = []
    shards, gloo = (sorted(root.glob(f"examples/*/{name}")) for name in ("shards.py", "gloo.sh"))
    for name, others in (("plumbing.py", shards), ("plumbing.sh", [*gloo, root / "jupyter" / "run.slurm"])):
        found.append([*in_examples(root, name), *(path for path in others if path.exists())])
    return found


def different_functions(root: Path) -> list[tuple[Path, str, str, str]]:
    """Return each function that has another text than it has to: its file, its name, that text, and the right one."""
    found = []
    for paths in places(root):
        right: dict[tuple[str, str], str] = {}  # by its name, and the reason for which it is own
        for path in paths:
            for name, (text, reason) in functions(path).items():
                if text != right.setdefault((name, reason), text):
                    found.append((path, name, text, right[name, reason]))
    return found


def differences(root: Path) -> list[str]:
    """Return what differs in a repository: files of an example's common/, those of FILES, functions as FILE: NAME."""
    found = []
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        wanted = files(root / "common", left_out(folder))
        same, _, _ = filecmp.cmpfiles(root / "common", folder / "common", wanted, shallow=False)
        wrong = sorted((wanted | files(folder / "common", [])).difference(same))
        found += [str((folder / "common" / name).relative_to(root)) for name in wrong]
    found += [str(path.relative_to(root)) for path, _ in different_files(root)]
    return found + [f"{path.relative_to(root)}: {name}" for path, name, _, _ in different_functions(root)]


def fix(root: Path) -> None:
    """Copy common/ into each example again, and write the right text of each file and function that differs."""
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        shutil.rmtree(folder / "common", ignore_errors=True)
        shutil.copytree(root / "common", folder / "common", ignore=shutil.ignore_patterns(*left_out(folder)))
    for path, right in different_files(root):
        shutil.copy(right, path)
    for path, _, text, right in different_functions(root):
        path.write_text(path.read_text().replace(text, right))
