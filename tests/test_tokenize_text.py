"""tokenize_text.py, and training on what it writes: any script, any size, the same bits, and what is refused."""

import argparse
import gzip
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from harness import outputs, processes, refusals, runs

EXAMPLES = ("fsdp", "lora")
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


@pytest.mark.only("fsdp")
@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_long_documents(example: str, folder: Path, kind: str) -> None:
    """A document that is encoded in pieces has the tokens of the whole, also where a tokenizer adds a space.

    It is the same from a text and from JSON lines.
    """
    from tokenizers import Tokenizer

    generator = np.random.default_rng(0)
    words = " ".join([*SCRIPTS.values(), "the river and   a village\n\n\n\nwith houses"]).split(" ")
    text = " ".join(generator.choice([word for word in words if kind == "bytes" or word], 150_000))
    (folder / "long.txt").write_text(text, encoding="utf-8", newline="")
    write_json_lines(folder / "long.jsonl", [text])
    path = write_tokenizer(folder, kind, text[:100_000])
    _, tokens = read(make(folder, "--out", "tokens", "--tokenizer", path, "long.txt", "long.jsonl"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()
    whole = tokenizer.encode(text, add_special_tokens=False).ids + [1]
    assert len(text) > 700_000 and np.array_equal(tokens, whole + whole)


@pytest.mark.only("fsdp")
def test_large_vocabulary(example: str, folder: Path) -> None:
    """Numbers above 65,535 stay whole, also if fewer tokens have them; unknown words are counted."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "</s>": 1, "a": 2, "river": 65_536, "village": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "words").mkdir()
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    write_json_lines(folder / "corpus.json", ["a river", "a small village"], "content")
    how = ["--tokenizer", "words", "--end-token", "</s>", "--key", "content", "corpus.json"]
    index, tokens = read(make(folder, "--out", "tokens", *how))
    assert tokens.tolist() == [2, 65_536, 1, 2, 0, 70_000, 1]
    found = {name: index[name] for name in ("dtype", "vocabulary", "largest_token", "unknown_tokens", "end")}
    assert list(found.values()) == ["uint32", 70_001, 70_000, 1, 1]


MEASURE = """
import resource, subprocess, sys
status = subprocess.call([sys.executable, "tokenize_text.py", *sys.argv[1:]])
print("most", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, status)
"""


@pytest.mark.runs("weekly")
@pytest.mark.timeout(1800)
@pytest.mark.only("fsdp")
def test_memory(example: str, folder: Path) -> None:
    """No process of it holds more than 300 MB, nor much more with 200 MB of text than with 20 MB."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz" + "नदीपानीके" + "河边散步每天"))
    words = ["".join(generator.choice(letters, size)) for size in generator.integers(1, 12, 40_000)]
    most = {}
    for size in (20, 200):
        with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
            while file.tell() < size * 10**6:
                chosen = (40_000 * generator.random(2000) ** 3).astype(int)
                file.write(json.dumps({"text": " ".join(words[i] for i in chosen)}, ensure_ascii=False) + "\n")
        words_of_command = f"--out {size} --train-vocabulary 8000 --processes 2 corpus.jsonl".split()
        run = runs.Run([sys.executable, "-c", MEASURE, *words_of_command], folder).wait(900)
        found = re.search(r"^most (\d+) 0$", run.stdout, re.MULTILINE)
        assert found, run.stdout + run.stderr
        print(run.stdout)
        most[size] = int(found[1])
    assert most[200] < 300 and most[200] < most[20] + 100, most


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


HALF = """
import os, signal, struct, sys
import tokenize_text

def encode_half(batch):
    frame = sys._getframe()
    while "result_queue" not in frame.f_locals:
        frame = frame.f_back
    queue = frame.f_locals["result_queue"]
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), struct.pack("!i", 100_000) + bytes(10))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    tokenize_text.encode = encode_half
    tokenize_text.main()
"""


@pytest.mark.only("fsdp")
def test_killed_while_it_sends(example: str, folder: Path) -> None:
    """Python's pool waits forever for the rest of what a process had begun to send; the command ends with its line."""
    write_book(folder, 5)
    path = write_tokenizer(folder, "bytes", "a river")
    (folder / "half.py").write_text(HALF)
    words = ["half.py", "--out", "tokens", "--tokenizer", path, "--processes", 2, "book.txt"]
    run = runs.Run([sys.executable, *map(str, words)], folder).wait(leaves=60)
    assert run.status == 2 and "Use fewer --processes" in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert not (folder / "tokens").exists()


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


@pytest.mark.only("fsdp")
def test_refused(example: str, folder: Path, command: Callable[[str], list[str]]) -> None:
    """What cannot work is refused in one line, and what is there already is left as it is."""
    (folder / "a.txt").write_text("a river")
    (folder / "kept").mkdir()
    write_tokenizer(folder, "bytes", "a river")
    shutil.copytree(folder / "bytes", folder / "nameless")
    (folder / "nameless" / "tokenizer_config.json").unlink()
    shutil.copytree(folder / "bytes", folder / "damaged")
    os.truncate(folder / "damaged" / "tokenizer.json", 100)
    for words, text in {
        "": "give --out FOLDER and one or more files",
        "--out x a.txt": "give either --tokenizer FOLDER or --train-vocabulary N",
        "--out x a.txt --tokenizer bytes --train-vocabulary 300": "give either",
        "--out x a.txt --train-vocabulary 256": "must be from 257",
        "--out x a.txt --train-vocabulary 300 --end-token </s>": "leave --end-token out",
        "--out x a.txt --train-vocabulary 300 --processes 0": "--processes must be 1 or more",
        "--out x a.txt --train-vocabulary 300 --shard-tokens 0": "--shard-tokens must be 1 or more",
        "--out x b.txt --train-vocabulary 300": "b.txt does not exist",
        "--out x common --train-vocabulary 300": "common is a folder: give its files",
        "--out kept a.txt --train-vocabulary 300": "kept is there already: nothing was written",
        "--out a.txt/x a.txt --train-vocabulary 300": "cannot make the folder a.txt/x: Not a directory",
        "--out x a.txt --tokenizer nowhere": "(No such file or directory (os error 2)): copy it there again, or have",
        "--out x a.txt --tokenizer damaged": "damaged/tokenizer.json cannot be read",
        "--out x a.txt --tokenizer nameless": "names no eos_token: give --end-token",
        "--out x a.txt --tokenizer nameless --end-token <end>": "the tokenizer has no token '<end>'",
        "--verify kept": "the folder kept has no tokens.json, which tokenize_text.py writes",
        "--verify nowhere": "the folder nowhere has no tokens.json",
    }.items():
        (line,) = command(words)
        assert line.startswith("tokenize_text.py: error: ") and text in line, (words, line)
        assert not (folder / "x").exists() and not list((folder / "kept").iterdir()), words


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


def memory(kind: str) -> int:
    """Return how many bytes this process has: RssAnon its own ones, RssFile those of mapped files."""
    return int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.fixture
def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's train.py as a module; what would end its process raises RefusedError."""

    def refuse(message: object) -> None:
        raise refusals.RefusedError(str(message))

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if re.match(r"(plumbing|\w+_(files|model|text|data|parallel))\b", name)]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    module = outputs.import_file(folder / "train.py")
    for part in (module, *map(sys.modules.get, ("model_files", "sharded_model", "text_data", "plumbing"))):
        if hasattr(part, "fail"):
            monkeypatch.setattr(part, "fail", refuse)
    return module


@pytest.mark.only("fsdp")
def test_pages(example: str, folder: Path, train: ModuleType) -> None:
    """Of 256 MB of tokens train.py reads the pages that a batch needs, over the ends of files, too."""
    import torch

    (folder / "tokens").mkdir()
    tokens = np.arange(2**26, dtype=np.uint32) % 999_983
    bounds = [0, 5, 2**24 + 1, 2**24 + 1000, 2**26]
    shards = []
    for number, (start_of, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        tokens[start_of:end].tofile(folder / "tokens" / f"{number}.bin")
        shards.append({"name": f"{number}.bin", "tokens": end - start_of, "checksum": 0})
    index = {"shards": shards, "dtype": "uint32", "tokens": len(tokens), "vocabulary": 999_983, "end": 7}
    (folder / "tokens" / "tokens.json").write_text(json.dumps(index))
    args = argparse.Namespace(text_file=Path("tokens"), context=512, separate_documents=False, end=None)
    own, mapped = memory("RssAnon"), memory("RssFile")
    train_set, test_set = train.load_data(args)
    assert args.vocabulary == 999_983 and args.text.startswith(f"of {2**26} tokens, tokens.json with checksum ")
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(90_000, (20,), generator=generator).tolist()
    for number, place in enumerate([0, 1, 2**15 - 1, 2**15, len(train_set) - 1, *spread]):
        inputs, targets = train_set[[place]]
        expected = torch.arange(place * 512, place * 512 + 513) % 999_983
        assert inputs.equal(expected[None, :-1]) and targets.equal(expected[None, 1:]) and inputs.dtype == torch.int64
        if number == 4:  # a page that is read may be one of 2 MB
            assert memory("RssAnon") - own < 2**23 and memory("RssFile") - mapped < 2**25
    cut = 2**26 - 2**26 // 10
    assert test_set[[3]][0][0, 0] == (cut + 3 * 512) % 999_983 and len(test_set) == (2**26 // 10 - 1) // 512


@pytest.mark.only(*EXAMPLES)
def test_training_refuses(example: str, folder: Path, small: Path, train: ModuleType) -> None:
    """Tokens of another tokenizer, documents that cannot be kept apart, and a folder that is not whole are refused."""

    def refused(text: str, **changed: object) -> None:
        given = {"text_file": Path("tokens"), "model_dir": Path("model"), "context": 16, "separate_documents": False}
        with pytest.raises(refusals.RefusedError, match=text):
            args = argparse.Namespace(**given | {"end": None} | changed)
            if example == "lora":
                train.text_data.load(args, train.model_files.load_tokenizer(args))
            train.load_data(args)

    if example == "lora":
        refused("--separate-documents needs tokens that end", text_file=Path("text.txt"), separate_documents=True)
        shutil.copytree(folder / "model", folder / "other")
        path = folder / "other" / "tokenizer.json"
        path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true', 1))
        refused("tokens of another tokenizer than other/tokenizer.json", model_dir=Path("other"))
    else:
        started = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
        texts = {
            "--text-file tokens --vocabulary 320": ["the vocabulary of its tokens.json", "--vocabulary 320"],
            "--text-file corpus.jsonl --separate-documents": ["--separate-documents needs tokens that end documents"],
            "--separate-documents": ["--separate-documents needs tokens that end documents"],
        }
        refusals.assert_arguments_refused(folder, texts, **started)
    (small / "00001.bin").write_bytes(b"ab")
    refused("--text-file: tokens/00001.bin has 2 bytes, and 6666 by tokens.json")
    (small / "tokens.json").unlink()
    refused("--text-file: the folder tokens has no tokens.json, and is of a run that was cut off")


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


@pytest.mark.only(*EXAMPLES)
@pytest.mark.runs("weekly")
def test_other_processes(example: str, folder: Path, small: Path, tmp_path: Path) -> None:
    """Continued after an epoch with another number of processes, it has the same weights, to 1e-9 in fp64."""
    words = [*SHORT[example].split(), "--text-file", "tokens", "--precision", "fp64", "--separate-documents"]
    words[words.index("--epochs") + 1] = "1"
    runs.train(example, folder, 2, *words)
    words[words.index("--epochs") + 1] = "2"
    shutil.copytree(folder / "output", folder / "other")
    runs.train(example, folder, 2, *words, "--resume")
    size = int(words[words.index("--batch-size") + 1])
    words[words.index("--batch-size") + 1] = str(2 * size)
    runs.train(example, folder, 1, *words, "--resume", "--output-dir", "other")
    one, other = outputs.read_model(folder / "output"), outputs.read_model(folder / "other")
    assert 0 < outputs.largest_difference(one, other) < 1e-9
    assert [row["world_size"] for row in outputs.read_metrics(folder / "other")] == [2, 1]


MODELS = {  # a configuration of transformers, its arguments, and whether documents can be kept apart
    "Llama": ("LlamaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}, True),
    "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_positions": 64}, True),
    "Gemma 3": ("Gemma3TextConfig", {"hidden_size": 32, "num_hidden_layers": 6, "sliding_window": 4}, True),
    "Mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2}, False),
}


@pytest.mark.only("lora")
@pytest.mark.parametrize("name", MODELS)
def test_documents_apart(example: str, folder: Path, train: ModuleType, name: str) -> None:
    """The logits of a document are the same whatever stands before it; a model that cannot do so is refused."""
    import torch
    import transformers

    config, sizes, can = MODELS[name]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "n_head": 4, "initializer_range": 0.3}
    plain = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": 7, "pad_token_id": None}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**plain | heads | sizes)
    model = transformers.AutoModelForCausalLM.from_config(made).double().eval()
    files = sys.modules["model_files"]
    args = argparse.Namespace(end=7, precision="fp64", model_dir=Path("model"))
    if not can:
        with pytest.raises(refusals.RefusedError, match="does not keep documents apart"):
            files.check_documents(args, model)
        return
    files.check_documents(args, model)
    document = [3, 1, 4, 1, 5, 9, 2, 6]
    windows = [[8, 8, 8, 7, *document], [9, 7, 7, 7, *document], [1, 2, 3, 7, *document], [1, 2, 3, 8, *document]]

    def logits(rows: list[list[int]]) -> torch.Tensor:
        tokens = torch.tensor(rows)
        with torch.no_grad():
            return model(tokens, **files.options(args, tokens)).logits[:, -len(document) :]

    found = logits(windows)
    alone = logits([document])
    assert (found[:3] - alone).abs().max() < 1e-12 < 1e-3 < (found[3] - alone[0]).abs().max()
