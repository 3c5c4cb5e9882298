"""docs/large-data.md: its commands, and what measures the cost, as they stand."""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT
from tests import test_tokenize_text as tokens

PAGE = ROOT / "docs" / "large-data.md"


def write_texts(folder: Path, count: int) -> None:
    """Write the texts that the page's commands read."""
    text = "".join(tokens.SCRIPTS.values())
    (folder / "book.txt").write_text(text * count, encoding="utf-8")
    lines = json.dumps({"text": text}) + "\n"
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(lines.encode() * count))


@pytest.mark.runs("weekly")
@pytest.mark.only("fsdp")
def test_tokens_for_fsdp(example: str, folder: Path) -> None:
    """A vocabulary is trained, a model learns its tokens, and writes text of them; the program prints a ratio."""
    write_texts(folder, 45)
    commands = readme.block("docs/large-data.md", "python tokenize_text.py --out tokens --train-vocabulary ...")
    run = readme.run_block(commands, folder)
    assert run.stdout.startswith("Once upon a") and len(run.stdout) > 30, run.stdout
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_loss"] < rows[0]["test_loss"] - 1
    program = readme.fences(PAGE, "python")[0]
    assert program.count("range(2000)") == 1
    (folder / "compare.py").write_text(program.replace("range(2000)", "range(20)"))
    (folder / "numbers.bin").write_bytes(bytes(2**22))
    run = runs.Run([sys.executable, "compare.py", "numbers.bin", "uint16"], folder).wait()
    line = r"map / memory: \d+\.\d\d, map: \d+ microseconds\n"
    assert run.status == 0 and re.fullmatch(line, run.stdout), run.stderr


@pytest.mark.runs("weekly")
@pytest.mark.only("lora")
def test_tokens_for_lora(example: str, folder: Path) -> None:
    """Of the same text, in the place of text.txt, the tokens are those that train.py makes itself."""
    write_texts(folder, 8)
    commands = readme.block("docs/large-data.md", "python tokenize_text.py --out tokens --tokenizer model ...")
    readme.run_block(commands, folder)
    rows = outputs.read_metrics(folder / "output")
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    index, numbers = tokens.read(folder / "tokens")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    text = (folder / "book.txt").read_bytes().decode()
    own = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    literal = tokens.SCRIPTS["ends"]  # of which train.py makes tokens that end a document
    assert index["end"] == tokenizer.eos_token_id and literal.count("<|end|>") == 1
    assert tokenizer.decode(own) == tokenizer.decode(numbers[: list(numbers).index(index["end"]) + 1])


@pytest.mark.runs("weekly")
@pytest.mark.only("torchrun_vision")
def test_order_of_several_tars(example: str, folder: Path, tmp_path: Path) -> None:
    """Each image once in each epoch, in another order; stopped and resumed, the same one, and the bits of files."""
    edits.note_use(folder, LAUNCHERS[example])
    words = "--epochs 2 --batch-size 15"  # 300 images: 10 steps
    runs.train(example, folder, 2, *words.split(), "--data-dir", "images", NUMBER="0")
    whole = (folder / "output").rename(tmp_path / "whole")
    readme.run_block(readme.until("docs/large-data.md", "... tar -cf ..."), folder)
    shutil.rmtree(folder / "images")
    line = readme.command("docs/large-data.md", "... --data-dir tars")
    readme.run_block([f"{line} {words}"], folder, NUMBER="1", END_IN="1", STEPS="yes")
    assert len(outputs.read_metrics(folder / "output")) == 1
    readme.run_block([f"{line} {words} --resume"], folder, NUMBER="2")
    outputs.assert_same_run(folder / "output", whole)
    noted = {number: [path.read_text().splitlines() for path in folder.glob(f"used-{number}-*")] for number in range(3)}
    orders = {tuple(lines) for lines in noted[0]}
    assert len(orders) == 2 and {(*one, *other) for one in noted[1] for other in noted[2]} > orders
    batches = [line.split() for lines in orders for line in lines]
    epochs = [[index for number, *indices in batches for index in indices if number == epoch] for epoch in ("0", "1")]
    assert all(sorted(map(int, indices)) == list(range(300)) for indices in epochs) and epochs[0] != epochs[1]


@pytest.mark.only("torchrun_vision")
def test_several_tars(example: str, folder: Path) -> None:
    """Several tars have the images of the folder that they were made of; a name that is in two of them is refused."""
    image_files = outputs.import_file(folder / "image_files.py")
    readme.run_block(readme.until("docs/large-data.md", "... tar -cf ..."), folder)
    *sets, classes = image_files.load(folder / "images", 32)
    *others, found = image_files.load(folder / "tars", 32)
    assert found == classes and len(list(folder.glob("tars/*.tar"))) == len(classes) == 6
    for one, other in zip(sets, others, strict=True):
        assert len(one) == len(other) > 0
        for index in range(len(one)):
            (image, label), (same, number) = one[index, 7], other[index, 7]
            assert label == number and image.equal(same)
    shutil.copy(folder / "tars" / "two.tar", folder / "tars" / "zzz.tar")
    with pytest.raises(Exception, match=r"zzz\.tar: another tar in .*tars has train/two/001\.png, too") as raised:  # noqa: PT011
        image_files.load(folder / "tars", 32)
    assert type(raised.value).__name__ == "DataError"


@pytest.mark.runs("weekly")
@pytest.mark.only("torchrun_vision")
def test_what_measures_images(example: str, folder: Path) -> None:
    """The page's program prints a ratio for each folder."""
    program = readme.fences(PAGE, "python")[1]
    assert program.count("range(150)") == 1
    (folder / "compare.py").write_text(program.replace("range(150)", "range(5)"))
    readme.run_block(readme.until("docs/large-data.md", "... tar -cf ..."), folder)
    run = runs.Run([sys.executable, "compare.py", "images", "tars"], folder).wait()
    line = r"{}: \d+\.\d\d times as long as images; \d+\.\d\d s to list 300\n"
    assert run.status == 0 and re.fullmatch(line.format("images") + line.format("tars"), run.stdout), run.stderr
