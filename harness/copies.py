"""What stands in several example folders, and is held to be the same by comparing files.

An example is copied as one folder, so it carries its own copy of what it needs: `common/` and
`plumbing/` as they are at top level, and a few files, which examples of the same framework share.
"""

import filecmp
import shutil
from pathlib import Path

FOLDERS = ("common", "plumbing")
LEFT_OUT = ("__pycache__", ".ruff_cache", "ruff.toml")  # what tools leave; how files are checked here
FILES = ("own_data.py", "own_model.py", "tokenize_text.py", "container.def", "install.sh")


def framework(folder: Path, name: str) -> str:
    """Return what an example's copy of a file depends on: the package that its models come from.

    container.def depends on what its environment is installed with instead.
    """
    if name == "container.def":
        return "install.sh" if (folder / "install.sh").exists() else "pip"
    packages = (folder / "requirements.txt").read_text()
    return "tensorflow" if "\ntensorflow" in f"\n{packages}" else "torch"


def files(tree: Path) -> set[str]:
    """Return the files of a folder, relative to it, but for those that match LEFT_OUT."""
    found = [file.relative_to(tree) for file in tree.rglob("*") if file.is_file()]
    return {str(file) for file in found if not set(file.parts) & set(LEFT_OUT)}


def sources(root: Path) -> list[tuple[Path, Path]]:
    """Return each file of FILES in an example, and the one that has to have the same text.

    That is the one of the first example, by name, of the same framework.
    """
    first: dict[tuple[str, str], Path] = {}
    found = []
    for name in FILES:
        for path in sorted(root.glob(f"examples/*/{name}")):
            found.append((path, first.setdefault((name, framework(path.parent, name)), path)))
    return found


def differences(root: Path) -> list[str]:
    """Return the files of a repository that are no copies of what they have to be copies of."""
    found = []
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        for name in FOLDERS:
            wanted = files(root / name)
            same, _, _ = filecmp.cmpfiles(root / name, folder / name, wanted, shallow=False)
            wrong = (wanted | files(folder / name)).difference(same)
            found += [str((folder / name / file).relative_to(root)) for file in sorted(wrong)]
    for path, source in sources(root):
        if path.read_bytes() != source.read_bytes():
            found.append(str(path.relative_to(root)))
    return found


def fix(root: Path) -> None:
    """Copy both folders into each example again, and each file of FILES from the first example."""
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(root / name, folder / name, ignore=ignored)
    for path, source in sources(root):
        if path != source:
            shutil.copy(source, path)
