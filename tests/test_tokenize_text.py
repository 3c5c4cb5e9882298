"""lora's tokenize_text.py, and training on what it writes; tests/test_fsdp.py has fsdp's."""

import json
import sys
from pathlib import Path

import pytest

from harness import outputs, refusals, runs

pytestmark = [pytest.mark.only("lora"), pytest.mark.runs("weekly")]
SCRIPTS = (
    "वह हर सुबह नदी के किनारे टहलती है और पानी की आवाज़ सुनती है।\n",
    "每天早晨，她沿着河边散步，听着流水的声音。",
    "تمشي كل صباح على ضفة النهر وتستمع إلى صوت الماء.\r\n",
    "a text may say <|end|> and <|endoftext|>, which end nothing  \t\n",
)


def make(folder: Path, *words: object) -> None:
    """Run the command to its end."""
    run = runs.Run([sys.executable, "tokenize_text.py", *map(str, words)], folder).wait()
    assert run.status == 0, run.stdout + run.stderr


def test_killed_and_resumed(example: str, folder: Path, tmp_path: Path) -> None:
    """Killed and resumed, a run on several files of tokens has the bits of an undisturbed one on one file.

    On other files, even of the same tokens, it does not go on.
    """
    texts = [text * (1 + i % 3) for i in range(15) for text in SCRIPTS]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    make(folder, "--out", "tokens", "--tokenizer", "model", "--shard-tokens", 3333, "corpus.jsonl")
    make(folder, "--out", "one", "--tokenizer", "tokens", "corpus.jsonl")
    words = ["--context", "32", "--batch-size", "8", "--epochs", "2", "--separate-documents", "--checkpoint-every", "5"]
    runs.train(example, folder, 2, *words, "--text-file", "one")
    (folder / "output").rename(tmp_path / "whole")
    run = runs.start(example, folder, 2, *words, "--text-file", "tokens")
    run.read_epoch(1)
    runs.kill_all(example, run)  # saved every 5 steps, most often in the second epoch
    last = runs.train(example, folder, 2, *words, "--text-file", "tokens", "--resume")
    assert "on tokens: 2 processes" in last.stdout
    outputs.assert_same_run(folder / "output", tmp_path / "whole")
    other = runs.start(example, folder, 2, *words, "--text-file", "one", "--resume").wait()
    refusals.assert_refused(other, 1, "is from a run with text of", ", documents apart: use the same settings")
