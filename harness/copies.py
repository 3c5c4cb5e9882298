"""What stands in several example folders, and is checked to be the same by comparing files.

An example is copied as one folder, so it carries its own copy of what it needs. A folder with longrun.py has the new
form: it carries longrun.py, job.sh and, but for fsdp, common/. A folder without it has the old one: plumbing/, and
plumbing/common as common/. A few files besides are the same in examples of the same framework.
"""

import filecmp
import shutil
from pathlib import Path

LEFT_OUT = ("__pycache__", ".ruff_cache", "ruff.toml")  # what tools leave; how files are checked here
OLD_FORM = ("own_data.py", "own_model.py")
FILES = (*OLD_FORM, "container.def", "install.sh")


def examples(root: Path) -> list[Path]:
    """Return the examples' folders."""
    return sorted(path.parent for path in root.glob("examples/*/train.py"))


def has_new_form(folder: Path) -> bool:
    """Whether an example's folder has longrun.py in the place of plumbing/."""
    return (folder / "longrun.py").exists()


def framework(folder: Path, name: str) -> str:
    """Return what an example's copy of a file depends on: the package that its models come from.

    container.def depends on what its environment is installed with instead; install.sh is one for all.
    """
    if name == "install.sh":
        return "all"
    if name == "container.def":
        return "install.sh" if (folder / "install.sh").exists() else "pip"
    packages = (folder / "requirements.txt").read_text()
    return "tensorflow" if "\ntensorflow" in f"\n{packages}" else "torch"


def files(tree: Path) -> set[str]:
    """Return the files of a folder, relative to it, but for those that match LEFT_OUT."""
    found = [file.relative_to(tree) for file in tree.rglob("*") if file.is_file()]
    return {str(file) for file in found if not set(file.parts) & set(LEFT_OUT)}


def trees(root: Path, folder: Path) -> dict[str, dict[str, Path]]:
    """Return the folders that an example carries, each with its files and the source of each file."""
    if has_new_form(folder) and "common" not in (folder / "train.py").read_text():
        return {}  # lora trains a model of others on a text
    if has_new_form(folder):
        if not (folder / "common").exists():  # fsdp, which trains on tokens
            return {}
        own = ("data.py", "models.py") if framework(folder, "common") == "tensorflow" else ()  # ours need PyTorch
        source = {name: (folder if name in own else root) / "common" / name for name in files(root / "common")}
        return {"common": source}
    old = {name: root / "plumbing" / name for name in files(root / "plumbing") if not name.startswith("common/")}
    common = root / "plumbing" / "common"
    return {"plumbing": old, "common": {name: common / name for name in files(common)}}


def sources(root: Path) -> list[tuple[Path, Path]]:
    """Return each single file of an example that is a copy, and the file that has to have the same text.

    longrun/ has the sources of a folder's longrun.py, job.sh, and sharded.py where the folder has that. For FILES the
    source is the file of the first example, by name, of the same framework.
    """
    found = []
    for folder in filter(has_new_form, examples(root)):
        names = ["longrun.py", "job.sh", *(["sharded.py"] if (folder / "sharded.py").exists() else [])]
        found += [(folder / name, root / "longrun" / name) for name in names]
    first: dict[tuple[str, str], Path] = {}
    for name in FILES:
        for path in sorted(root.glob(f"examples/*/{name}")):
            if name not in OLD_FORM or not has_new_form(path.parent):
                found.append((path, first.setdefault((name, framework(path.parent, name)), path)))
    return found


def differences(root: Path) -> list[str]:
    """Return the files of a repository that are no copies of what they have to be copies of."""
    pairs = sources(root)
    for folder in examples(root):
        for tree, wanted in trees(root, folder).items():
            names = wanted.keys() | files(folder / tree)
            pairs += [(folder / tree / name, wanted.get(name, root / "no source")) for name in sorted(names)]
    return [
        str(path.relative_to(root))
        for path, source in pairs
        if not (path.exists() and source.exists() and filecmp.cmp(path, source, shallow=False))
    ]


def fix(root: Path) -> None:
    """Copy into each example what it has to carry, again."""
    for folder in examples(root):
        for tree, wanted in trees(root, folder).items():
            for name in files(folder / tree) - wanted.keys():
                (folder / tree / name).unlink()
            for name, source in wanted.items():
                (folder / tree / name).parent.mkdir(parents=True, exist_ok=True)
                if source != folder / tree / name:
                    shutil.copy(source, folder / tree / name)
    for path, source in sources(root):
        if path != source:
            shutil.copy(source, path)
