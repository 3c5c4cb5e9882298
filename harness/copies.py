"""What stands in several example folders, and is checked to be the same by comparing files.

An example is copied as one folder, so it carries its own copy of what it needs: longrun.py, job.sh, sharded.py where it
writes many files, and common/ where it uses that. container.def and install.sh are the same in examples that are
installed in the same way.
"""

import filecmp
import shutil
from pathlib import Path

LEFT_OUT = ("__pycache__", ".ruff_cache", "ruff.toml")  # what tools leave; how files are checked here


def files(tree: Path) -> set[str]:
    """Return the files of a folder, relative to it, but for those that match LEFT_OUT."""
    found = [file.relative_to(tree) for file in tree.rglob("*") if file.is_file()]
    return {str(file) for file in found if not set(file.parts) & set(LEFT_OUT)}


def sources(root: Path) -> dict[Path, Path]:
    """Return the source of each file in an example that has to be a copy; one that has no source must not be there."""
    found: dict[Path, Path] = {}
    first: dict[tuple[str, bool], Path] = {}
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        for source in root.glob("longrun/*.[ps][yh]"):
            if source.name != "sharded.py" or (folder / source.name).exists():
                found[folder / source.name] = source
        horovod = (folder / "install.sh").exists()
        for name in ("container.def", "install.sh"):
            if (folder / name).exists():
                found[folder / name] = first.setdefault((name, horovod), folder / name)
        common = folder / "common"
        own = ("data.py", "models.py") if "tensorflow" in (folder / "requirements.txt").read_text() else ()
        for name in files(root / "common") | files(common) if common.exists() else ():
            if name not in own:
                found[common / name] = root / "common" / name
    return found


def differs(copy: Path, source: Path) -> bool:
    """Return whether a copy is not what it has to be."""
    if not source.exists():
        return True
    return not copy.exists() or not filecmp.cmp(copy, source, shallow=False)


def differences(root: Path) -> list[str]:
    """Return the names of all copies that differ from their source, are missing, or have none."""
    return [str(copy.relative_to(root)) for copy, source in sources(root).items() if differs(copy, source)]


def fix(root: Path) -> None:
    """Copy the sources again, and remove what has none."""
    for copy, source in sources(root).items():
        if source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if copy != source:
                shutil.copy(source, copy)
        else:
            copy.unlink()
