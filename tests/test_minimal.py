"""minimal.py, the launch pattern and nothing else: it needs nothing but common/, and ends with train.py's bits."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest

from harness import outputs, readme
from harness.launchers import LAUNCHERS, MINIMAL
from harness.runs import Reference

MODULES = ("image_files.py", "tiny_gpt.py", "token_data.py")  # in the place of common/


def command(folder: Path) -> list[str]:
    """Return the command that minimal.py's docstring gives for this machine, as a list of words."""
    docstring = ast.get_docstring(ast.parse((folder / "minimal.py").read_text()))
    (line,) = re.findall(r"^Locally: +(.*?)(?:  \(.*\))?$", docstring, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.only(*MINIMAL)
@pytest.mark.runs("smoke")
def test_same_bits_as_train(example: str, folder: Path, reference: Reference) -> None:
    """Alone beside common/, started as it says, it prints the metrics of all processes and writes train.py's model.

    Image files are in images/, and image_files.py reads them; fsdp has tokens. The README has the same command.
    """
    for path in folder.iterdir():
        if path.is_dir() and path.name not in ("common", "images"):
            shutil.rmtree(path)
        elif path.is_file() and path.name not in ("minimal.py", *MODULES):
            path.unlink()
    line = readme.command(f"examples/{example}/README.md", "... minimal.py")
    assert line == shlex.join(command(folder))
    run = readme.run_block([line], folder)
    line = r"^epoch (\d+): train loss ([\d.]+)(?:, test loss ([\d.]+))?(?:, test acc ([\d.]+)%)?$"
    printed = re.findall(line, run.stdout, re.MULTILINE)
    rows = outputs.read_metrics(reference.output)
    assert len(printed) == len(rows), run.stdout
    for row, (epoch, train_loss, test_loss, accuracy) in zip(rows, printed, strict=True):
        assert int(epoch) == row["epoch"] and (test_loss or accuracy), run.stdout
        assert float(train_loss) == pytest.approx(row["train_loss"], abs=6e-5)
        assert not test_loss or float(test_loss) == pytest.approx(row["test_loss"], abs=6e-5)
        assert not accuracy or float(accuracy) == pytest.approx(100 * row["test_accuracy"], abs=6e-3)
    assert LAUNCHERS[example].has_learnt(rows[-1])
    outputs.assert_same_weights(outputs.read_model(folder), outputs.read_model(reference.output))
