"""tokenize_text.py, and training on what it writes: any script, any size, the same bits, and what is refused."""

import gzip
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import outputs, processes, refusals, runs

EXAMPLES = ("fsdp",)
SCRIPTS = {
    "Devanagari": "वह हर सुबह नदी के किनारे टहलती है और पानी की आवाज़ सुनती है।\n",
    "Chinese": "每天早晨，她沿着河边散步，听着流水的声音。",
    "Arabic": "تمشي كل صباح على ضفة النهر وتستمع إلى صوت الماء.\r\n",
    "emoji": "a 👩‍👩‍👧‍👦 family, 🇮🇳 and 👍🏽 \U0001f9d1\U0001f3ff‍\U0001f680 \u0301\u200b\n\n",
    "ends": "a text may say <|end|> and <|endoftext|>, which end nothing  \t\n",
}


def start(folder: Path, *words: object) -> runs.Run:
    """Start the command."""
    return runs.Run([sys.executable, "tokenize_text.py", *map(str, words)], folder)


def make(folder: Path, *words: object) -> Path:
    """Run the command to its end, and return the folder that it has made."""
    run = start(folder, *words).wait()
    assert run.status == 0, run.stdout + run.stderr
    return folder / str(words[words.index("--out") + 1])


def read(out: Path) -> tuple[dict, np.ndarray]:
    """Return what tokens.json says of a folder of tokens, and all of these."""
    index = json.loads((out / "tokens.json").read_text())
    parts = [np.fromfile(out / shard["name"], index["dtype"]) for shard in index["shards"]]
    assert [len(part) for part in parts] == [shard["tokens"] for shard in index["shards"]]
    return index, np.concatenate(parts)


def documents(out: Path) -> list[str]:
    """Return the documents of a folder of tokens, decoded."""
    from tokenizers import Tokenizer

    index, tokens = read(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokens[-1] == index["end"] and tokens.max() == index["largest_token"] < index["vocabulary"]
    parts = np.split(tokens, np.flatnonzero(tokens == index["end"]) + 1)[:-1]
    assert len(parts) == index["documents"] and len(tokens) == index["tokens"]
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def write_json_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    """Write documents as a file of JSON lines, some escaped as ASCII, with an empty line and one of no letter."""
    lines = [json.dumps({"id": i, key: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate([*texts, " \n"])]
    path.write_text("\n".join([*lines[:1], "", *lines[1:]]), encoding="utf-8")
    return path


@pytest.mark.only("fsdp")
def test_any_script(example: str, folder: Path) -> None:
    """Decoded, the tokens are the text again, from a text, JSON lines, gzip and with a separator.

    1 and 3 processes write the same files. Several files of tokens are the same sequence as one.
    """
    texts = list(SCRIPTS.values())
    (folder / "book.txt").write_text("\ufeff" + "".join(texts) * 400, encoding="utf-8", newline="")
    write_json_lines(folder / "corpus.jsonl", texts * 700)
    divided = "\n===\n".join(texts * 300).encode()
    (folder / "divided.txt.gz").write_bytes(gzip.compress(divided))
    words = ["--train-vocabulary", 400, "--separator", "\\n===\\n", "book.txt", "corpus.jsonl", "divided.txt.gz"]
    one = make(folder, "--out", "one", "--processes", 1, "--shard-tokens", 10**5, *words)
    three = make(folder, "--out", "three", "--processes", 3, "--shard-tokens", 10**5, *words)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in three.iterdir()) and "00002.bin" in names
    assert all((one / name).read_bytes() == (three / name).read_bytes() for name in names)
    assert documents(one) == ["".join(texts) * 400, *texts * 700, *texts * 300]
    whole = make(folder, "--out", "whole", "--tokenizer", "one", *words[2:])
    index, tokens = read(whole)
    assert [shard["name"] for shard in index["shards"]] == ["00000.bin"] and index["dtype"] == "uint16"
    assert np.array_equal(tokens, read(one)[1])


def write_tokenizer(folder: Path, kind: str, text: str) -> Path:
    """Write a tokenizer of another kind, trained on a text, as a model has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet: list[str] = []
    if kind == "bytes":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.enable_truncation(5)
    (folder / kind).mkdir()
    tokenizer.save(str(folder / kind / "tokenizer.json"))
    (folder / kind / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return folder / kind


def write_book(folder: Path, megabytes: int) -> Path:
    """Write a text of so many megabytes."""
    text = "".join(SCRIPTS.values())
    (folder / "book.txt").write_text(text * (megabytes * 10**6 // len(text.encode())), encoding="utf-8")
    return folder / "book.txt"


@pytest.mark.only("fsdp")
def test_killed(example: str, folder: Path) -> None:
    """Killed while it writes, it leaves nothing that is taken for whole, and no process; a killed process ends it."""
    write_book(folder, 20)
    path = write_tokenizer(folder, "bytes", "a river")
    words = ["--tokenizer", path, "--processes", 2, "--shard-tokens", 20_000, "book.txt"]
    run = start(folder, "--out", "tokens", *words)
    run.read_until("00000.bin")
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(leaves=60)
    assert (folder / "tokens" / "00000.bin").exists() and not (folder / "tokens" / "tokens.json").exists()
    again = start(folder, "--out", "tokens", *words).wait()
    assert again.status == 2 and "error: tokens is there already: nothing was written" in again.stderr
    check = start(folder, "--verify", "tokens").wait()
    assert check.status == 2 and "has no tokens.json, and is of a run that was cut off" in check.stderr

    run = start(folder, "--out", "other", *words)
    run.read_until("00000.bin")
    pools = [pid for pid in run.pids() if "spawn_main" in "".join(map(str, processes.command_lines([pid])))]
    os.kill(max(pools), signal.SIGKILL)
    run.wait(60, leaves=60)
    assert run.status == 2 and "Use fewer --processes" in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert not (folder / "other").exists()


@pytest.fixture
def command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], list[str]]:
    """A function that calls the command in this process, and returns the lines of its error."""
    module = outputs.import_file(folder / "tokenize_text.py")
    monkeypatch.chdir(folder)

    def call(words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["tokenize_text.py", *words.split()])
        with pytest.raises(SystemExit, match="2"):
            module.main()
        return [line for line in capsys.readouterr().err.splitlines() if "error: " in line]

    return call


GOOD = b'{"text": "a river"}\n'
WRONG = {  # a file's name and content, and what the line has to say
    "no JSON": ("a.jsonl", GOOD * 2 + b'{"text": "a\n', "a.jsonl, line 3: it is no JSON"),
    "an array": ("a.JSON", b'[\n {"text": "a river"}\n]\n', "a.JSON, line 1: it is no JSON .*jq -c"),
    "a list": ("a.jsonl", GOOD + b'["a river"]\n', 'line 2: it has no text with the key "text"'),
    "another key": ("a.jsonl", GOOD + b'{"content": "a"}\n', "line 2: it has no text .* See --key"),
    "a number": ("a.jsonl", b'{"text": 5}\n', "line 1: it has no text"),
    "null": ("a.jsonl", GOOD + b'\n{"text": null}\n', "line 3: it has no text"),
    "half a pair": ("a.jsonl", GOOD + b'{"text": "a \\ud83d b"}\n', "line 2: it has half of a surrogate pair"),
    "deep": ("a.jsonl", GOOD + b"[" * 10**5 + b"\n", "line 2: it is no JSON"),
    "Latin-1 lines": ("a.jsonl", GOOD + b'{"text": "caf\xe9"}\n', "line 2: it is not UTF-8"),
    "Latin-1": ("a.txt", b"a river\n" * 40_000 + b"caf\xe9 \n", "a.txt, line 40001: it is not UTF-8 .*iconv"),
    "cut letter": ("a.txt", b"a\n" + "नदी".encode()[:-1], "line 2: it is not UTF-8"),
    "UTF-16": ("a.txt", "a river\na\n".encode("utf-16-le"), "line 1: it has a byte 0, as in UTF-16"),
    "binary": ("a.txt", b"a river\n\0", "line 2: it has a byte 0"),
    "PDF": ("a.pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "line 2: it is not UTF-8"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(os.urandom(50).hex().join(["{", "}"]).encode())[:-30], "cannot read a"),
    "a table": ("a.CSV.gz", b"id,text\n1,a river\n", "a.CSV.gz is a table: write each row"),
    "Windows": ("a.txt", b"a\r\n" * 70_000 + b"\r\na river", "line 70000: its lines end with .*, and --separator has"),
    "empty": ("a.txt", b"", "there is no document with a letter"),
    "no letter": ("a.jsonl", b'{"text": " \\n"}\n\n', "there is no document with a letter"),
}


@pytest.mark.only("fsdp")
def test_wrong_files(example: str, folder: Path, command: Callable[[str], list[str]]) -> None:
    """What is no text is refused in one line, with the file and the number of the line; nothing is left."""
    path = write_tokenizer(folder, "bytes", "a river")
    for case, (name, content, text) in WRONG.items():
        (folder / name).write_bytes(content)
        for how in (f"--tokenizer {path}", "--train-vocabulary 300"):
            (line,) = command(f"--out tokens --separator \\n\\n {how} {name}")
            assert line.startswith("tokenize_text.py: error: ") and re.search(text, line), (case, how, line)
            assert not (folder / "tokens").exists(), case


@pytest.fixture
def small(example: str, folder: Path) -> Path:
    """A folder of tokens in several files, `tokens`, of short documents; `model` is the tokenizer's, for lora."""
    count = 15 if example == "lora" else 100
    texts = [text * (1 + i % 3) for i in range(count) for text in SCRIPTS.values()]
    write_json_lines(folder / "corpus.jsonl", texts)
    how = ["--tokenizer", "model"] if example == "lora" else ["--train-vocabulary", 320]
    return make(folder, "--out", "tokens", *how, "--shard-tokens", 3333, "corpus.jsonl")


@pytest.mark.only("fsdp")
def test_verify(example: str, folder: Path, small: Path, command: Callable[[str], list[str]]) -> None:
    """--verify names a file of which a bit has changed; one of another size is refused without that."""
    run = start(folder, "--verify", "tokens").wait()
    assert run.status == 0 and run.stdout.startswith("tokens: ") and "of 500 documents" in run.stdout, run.stderr
    last = sorted(small.glob("*.bin"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{last.name} has changed since it was written" in command("--verify tokens")[0]
    last.write_bytes(content[:-1])
    text = f"{last.name} has {len(content) - 1} bytes, and {len(content)} by tokens.json"
    assert text in command("--verify tokens")[0]
    last.unlink()
    assert f"{last.name} is missing" in command("--verify tokens")[0]
    last.write_bytes(content)
    path = small / "tokenizer.json"
    path.write_text(path.read_text().replace('"BPE"', '"bpe"'))
    assert "tokenizer.json has changed" in command("--verify tokens")[0]
    (small / "tokens.json").write_text("{}")
    assert "tokens.json cannot be read" in command("--verify tokens")[0]


SHORT = {
    "fsdp": "--context 32 --width 32 --layers 1 --batch-size 32 --epochs 2",
    "lora": "--context 32 --batch-size 8 --epochs 2",
}


def one_file(folder: Path) -> None:
    """Write the tokens of `tokens` once more, into one file."""
    make(folder, "--out", "one", "--tokenizer", "tokens", "corpus.jsonl")


@pytest.mark.only(*EXAMPLES)
@pytest.mark.runs("weekly")  # the contract has it with another text
def test_killed_and_resumed(example: str, folder: Path, small: Path, tmp_path: Path) -> None:
    """Killed and resumed, a run on several files has the bits of an undisturbed one on one file.

    fsdp's sample goes on in the text; on other files, even of the same tokens, lora does not go on.
    """
    one_file(folder)
    words = [*SHORT[example].split(), "--separate-documents", "--checkpoint-every", 5]
    runs.train(example, folder, 2, *words, "--text-file", "one")
    (folder / "output").rename(tmp_path / "whole")
    run = runs.start(example, folder, 2, *words, "--text-file", "tokens")
    run.read_epoch(1)
    runs.kill_all(example, run)  # saved every 5 steps, most often in the second epoch
    last = runs.train(example, folder, 2, *words, "--text-file", "tokens", "--resume")
    assert "on tokens: 2 processes" in last.stdout
    outputs.assert_same_run(folder / "output", tmp_path / "whole")
    rows = outputs.read_metrics(folder / "output")
    assert rows[1]["test_loss"] < rows[0]["test_loss"]
    if example == "fsdp":
        words_of_sample = ["sample.py", "--tokens-dir", "tokens", "--prompt", "वह हर", "--length", "20"]
        written = runs.Run([sys.executable, *words_of_sample], folder).wait()
        assert written.stdout.startswith("वह हर") and written.status == 0, written.stderr
    else:
        other = runs.start(example, folder, 2, *words, "--text-file", "one", "--resume").wait()
        refusals.assert_refused(other, 1, "is from a run with text of", ", documents apart: use the same settings")
