"""What stands in several example folders, and is checked to be the same by comparing files.

An example is copied as one folder, so it carries its own copy of what it needs: longrun.py, job.sh, sharded.py where it
writes many files, and common/ where it uses that. container.def,
environment.yml and install.sh are the same in examples that are installed in the same way.
"""

import filecmp
import shutil
from pathlib import Path


def files(folder: Path) -> set[str]:
    """Return the names of the files of a folder, but for how files are checked here."""
    return {path.name for path in folder.glob("*") if path.is_file() and path.name != "ruff.toml"}


def sources(root: Path) -> dict[Path, Path]:
    """Return the source of each file in an example that has to be a copy; one that has no source must not be there."""
    found: dict[Path, Path] = {}
    first: dict[tuple[str, bool], Path] = {}
    for folder in sorted(path.parent for path in root.glob("examples/*/train.py")):
        for name in files(root / "longrun"):
            if name.endswith((".py", ".sh")) and (name != "sharded.py" or (folder / name).exists()):
                found[folder / name] = root / "longrun" / name
        horovod = (folder / "install.sh").exists()
        for name in {"container.def", "environment.yml", "install.sh"} & files(folder):
            found[folder / name] = first.setdefault((name, horovod), folder / name)
        tensorflow = "tensorflow" in (folder / "requirements.txt").read_text()
        own = {"data.py", "models.py"} if tensorflow else set()
        if (folder / "common").exists():
            for name in (files(root / "common") | files(folder / "common")) - own:
                found[folder / "common" / name] = root / "common" / name
    return found


def differs(copy: Path, source: Path) -> bool:
    """Return whether a copy is not what it has to be."""
    return not (copy.exists() and source.exists() and filecmp.cmp(copy, source, shallow=False))


def differences(root: Path) -> list[str]:
    """Return the names of all copies that differ from their source, are missing, or have none."""
    return [str(copy.relative_to(root)) for copy, source in sources(root).items() if differs(copy, source)]


def fix(root: Path) -> None:
    """Copy the sources again, and remove what has none."""
    for copy, source in sources(root).items():
        if not source.exists():
            copy.unlink()
        elif differs(copy, source):
            shutil.copy(source, copy)
