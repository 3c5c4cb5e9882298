"""Collect what a machine without a network lacks for on_gpu.py, on one that has a network: wheels and public scripts.

    python -m benchmarks.on_gpu_files --out FOLDER --python 3.12 --torch 2.11 --clones CLONES

FOLDER then has wheels/ and sources/, for on_gpu.py's --wheels and --sources. The wheels are for that Python on Linux,
x86-64, and beside the PyTorch that is there; their versions are those of tests/constraints.txt. CLONES has a clone
OWNER+NAME, or OWNER+NAME/repo, of each public script's repository. DeepSpeed comes as source only: its wheel is built
here, for any Python and without its kernels, which the examples do not use. It needs pip, and no package beside it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_steps import last_words
from harness.launchers import ROOT

LARGEST = 60  # MB, all together
PACKAGES = {  # that a machine with PyTorch and Hugging Face's packages may still lack, and what needs each
    "deepspeed": "the example deepspeed",
    "hjson": "deepspeed",
    "pydantic": "deepspeed",
    "pydantic-core": "pydantic",
    "annotated-types": "pydantic",
    "typing-inspection": "pydantic",
    "typing-extensions": "pydantic, which needs a newer one than PyTorch does",
    "datasets": "the public script of peft",
    "dill": "datasets",
    "multiprocess": "datasets",
}
SOURCE_ONLY = ("deepspeed",)
# pip takes each name literally, so that all that such a machine can run have to be listed.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def version_of(package: str) -> str:
    """Return the version in tests/constraints.txt."""
    text = (ROOT / "tests" / "constraints.txt").read_text()
    found = re.search(rf"^{package}==([^\s;]+)", text, re.MULTILINE | re.IGNORECASE)
    if not found:
        sys.exit(f"on_gpu_files.py: error: tests/constraints.txt has no {package}")
    return found[1]


def pip(*words: str) -> None:
    """Run pip; end with one line if it fails."""
    variables = os.environ | {"DS_BUILD_OPS": "0"}
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, env=variables)
    if done.returncode:
        sys.exit(f"on_gpu_files.py: error: pip {' '.join(words)}: {last_words(done.stderr)}")


def download(folder: Path, packages: list[str], python: str) -> None:
    """Download the wheels of these packages for another Python, without what they need in turn."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    words += [f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS), f"--dest={folder}"]
    pip(*words, *(f"{package}=={version_of(package)}" for package in packages))


def build(folder: Path, package: str) -> None:
    """Build a wheel of what comes as source only: it has no compiled part, so that it is for any Python."""
    with tempfile.TemporaryDirectory() as temporary:
        # An older pip would otherwise need the package wheel.
        options = ["--quiet", "--use-pep517", "--no-deps", f"--wheel-dir={temporary}"]
        pip("wheel", *options, f"{package}=={version_of(package)}")
        (made,) = Path(temporary).glob("*.whl")
        if not made.name.endswith("-any.whl"):
            sys.exit(f"on_gpu_files.py: error: {made.name} is not for any Python: was DS_BUILD_OPS set?")
        shutil.copy(made, folder)


def main() -> None:
    """Read the command line, fill the folder, and say what it weighs."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.on_gpu_files", description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="must not exist yet")
    parser.add_argument("--python", default="3.12", help="that of the machine")
    parser.add_argument("--torch", default="2.11", help="that of the machine; nothing is downloaded for it")
    parser.add_argument("--clones", type=Path, metavar="FOLDER", help="of the public scripts' repositories")
    parser.add_argument("--packages", nargs="*", choices=PACKAGES, default=list(PACKAGES), metavar="NAME")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} is there already: remove it, or give another folder")
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python {args.python}: give it as 3.12")
    if not re.fullmatch(r"2\.\d+(\.\d+)?", args.torch) or not 6 <= int(args.torch.split(".")[1]) <= 15:
        parser.error(f"--torch {args.torch}: on_gpu.py takes 2.6 to 2.15")
    wheels = args.out / "wheels"
    wheels.mkdir(parents=True)
    download(wheels, [name for name in args.packages if name not in SOURCE_ONLY], args.python)
    for package in SOURCE_ONLY:
        if package in args.packages:
            build(wheels, package)
    if args.clones:
        from benchmarks import gpu_peers

        gpu_peers.export(args.clones, args.out / "sources")
    size = 0
    for path in sorted(path for path in args.out.rglob("*") if path.is_file()):
        size += path.stat().st_size
        print(f"{path.stat().st_size / 1e6:8.3f} MB  {path.relative_to(args.out)}")
    print(f"{size / 1e6:8.3f} MB  in all, for Python {args.python} beside torch {args.torch}: {args.out}")
    if size > LARGEST * 1e6:
        sys.exit(f"on_gpu_files.py: error: that is more than {LARGEST} MB")


if __name__ == "__main__":
    main()
