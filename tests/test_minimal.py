"""minimal.py, the launch pattern and nothing else: it needs nothing but common/, and ends with train.py's bits."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest

from harness import outputs, readme, runs
from harness.launchers import LAUNCHERS, MINIMAL
from harness.runs import Reference


def command(folder: Path) -> list[str]:
    """Return the command that minimal.py's docstring gives for this machine, as a list of words."""
    docstring = ast.get_docstring(ast.parse((folder / "minimal.py").read_text()))
    (line,) = re.findall(r"^Locally: +(.*?)(?:  \(.*\))?$", docstring, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.only(*MINIMAL)
@pytest.mark.runs("weekly", "accelerate", "deepspeed", "horovod_cpu")  # beside those with other launchers
def test_same_bits_as_train(example: str, folder: Path, reference: Reference) -> None:
    """Alone beside common/, started as it says, it prints the metrics of all processes and writes train.py's model.

    The README has the same command.
    """
    assert any(shlex.join(command(folder)) in block for block in readme.blocks(folder / "README.md"))
    for path in folder.iterdir():
        if path.is_dir() and path.name != "common":
            shutil.rmtree(path)
        elif path.is_file() and path.name != "minimal.py":
            path.unlink()
    run = runs.Run(command(folder), folder).wait()
    assert run.status == 0, run.stderr
    printed = re.findall(r"epoch (\d+): train loss ([\d.]+), test (acc|loss) ([\d.]+)(%?)$", run.stdout, re.MULTILINE)
    rows = outputs.read_metrics(reference.output)
    assert len(printed) == len(rows), run.stdout
    for row, (epoch, train_loss, kind, value, percent) in zip(rows, printed, strict=True):
        expected = 100 * row["test_accuracy"] if percent else row["test_loss"]
        assert (int(epoch), kind) == (row["epoch"], "acc" if percent else "loss")
        assert float(train_loss) == pytest.approx(row["train_loss"], abs=6e-5)
        assert float(value) == pytest.approx(expected, abs=6e-3 if percent else 6e-5)
    assert LAUNCHERS[example].has_learnt(rows[-1])
    outputs.assert_same_weights(outputs.read_model(folder), outputs.read_model(reference.output))
