"""docs/large-data.md: its changes to fsdp and lora, its commands, and what measures the cost, as they stand."""

import argparse
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness import edits, outputs, readme, runs
from harness.launchers import LAUNCHERS, ROOT
from harness.runs import Reference

PAGE = ROOT / "docs" / "large-data.md"


@pytest.mark.only("fsdp")
def test_mapped_text(example: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mapped, a text has the same samples as in memory, and takes none; what cannot be mapped is one clear line."""
    import torch

    text = folder / "book.txt"
    text.write_bytes(bytes(range(1, 65)) * 2**20)  # 64 MB
    args = argparse.Namespace(text_file=text, context=64)
    before = outputs.import_file(folder / "train.py").load_data(args)
    diff, _ = readme.fences(PAGE, "diff")
    edits.apply_diff(folder / "train.py", diff)
    train = outputs.import_file(folder / "train.py")
    held = memory()
    after = train.load_data(args)
    for one, other in zip(before, after, strict=True):
        indices = torch.randint(len(one), (50,)).tolist()
        assert len(one) == len(other) and all(map(torch.equal, one[indices], other[indices]))
    assert memory() - held < 2**25, "a map is no memory of the process's own"
    assert re.fullmatch(r"of 67108864 tokens, the first with checksum \d+", args.text)
    calls: list[str] = []

    def fail(message: object) -> None:
        calls.append(str(message))

    train.plumbing.fail = fail
    (folder / "empty.txt").write_bytes(b"")
    for name in ("none.txt", "empty.txt"):
        train.load_data(argparse.Namespace(text_file=folder / name, context=64))
    assert len(calls) == 2 and "none.txt" in calls[0], calls


def memory() -> int:
    """Return how many bytes of its own this process has, without those of files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.runs("weekly")
@pytest.mark.only("fsdp")
def test_what_measures_texts(example: str, folder: Path) -> None:
    """The page's program prints its ratio, for tokens of both kinds."""
    program = readme.fences(PAGE, "python")[1]
    assert program.count("range(2000)") == 1
    (folder / "compare.py").write_text(program.replace("range(2000)", "range(20)"))
    (folder / "book.txt").write_bytes(bytes(2**22))
    for kind in ("uint8", "int32"):
        run = runs.Run([sys.executable, "compare.py", "book.txt", kind], folder).wait()
        assert run.status == 0 and re.fullmatch(r"map / memory: \d+\.\d\d\n", run.stdout), run.stderr


@pytest.mark.runs("weekly")
@pytest.mark.only("lora")
def test_mapped_tokens(example: str, folder: Path, reference: Reference) -> None:
    """Mapped, tokens made beforehand give the bits of a run that made them; what they cannot be is one clear line."""
    import torch

    (folder / "write_tokens.py").write_text(readme.fences(PAGE, "python")[0])
    edits.apply_diff(folder / "model_files.py", readme.fences(PAGE, "diff")[1])
    readme.run_block(readme.block("docs/large-data.md", "python write_tokens.py ..."), folder)
    outputs.assert_same_run(folder / "output", reference.output)
    (folder / "empty.bin").write_bytes(b"")
    for name, text in (
        ("none.bin", "No such file"),
        ("empty.bin", ""),
        ("text.txt", "no whole number of int32|its tokenizer has"),
    ):
        run = runs.start(example, folder, 1, "--text-file", name, "--output-dir", "other").wait()
        lines = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
        assert run.status == 1 and len(lines) == 1 and re.search(text, lines[0]), run.stderr
    torch.arange(2**24, dtype=torch.int32).numpy().tofile(folder / "tokens.bin")  # 64 MB
    module = outputs.import_file(folder / "model_files.py")
    args = argparse.Namespace(text_file=folder / "tokens.bin", context=64)
    held = memory()
    tokens = module.tokenize(args, None, module.read_text(args))
    assert tokens[-1] == 2**24 - 1 and memory() - held < 2**25, "a map is no memory of the process's own"


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
    assert outputs.import_file(folder / "predict.py").class_names(folder / "tars") == classes
    shutil.copy(folder / "tars" / "two.tar", folder / "tars" / "zzz.tar")
    with pytest.raises(Exception, match=r"zzz\.tar: another tar in .*tars has train/two/001\.png, too") as raised:  # noqa: PT011
        image_files.load(folder / "tars", 32)
    assert type(raised.value).__name__ == "DataError"


@pytest.mark.runs("weekly")
@pytest.mark.only("torchrun_vision")
def test_what_measures_images(example: str, folder: Path) -> None:
    """The page's program prints a ratio for each folder."""
    program = readme.fences(PAGE, "python")[2]
    assert program.count("range(150)") == 1
    (folder / "compare.py").write_text(program.replace("range(150)", "range(5)"))
    readme.run_block(readme.until("docs/large-data.md", "... tar -cf ..."), folder)
    run = runs.Run([sys.executable, "compare.py", "images", "tars"], folder).wait()
    line = r"{}: \d+\.\d\d times as long as images; \d+\.\d\d s to list 300\n"
    assert run.status == 0 and re.fullmatch(line.format("images") + line.format("tars"), run.stdout), run.stderr
