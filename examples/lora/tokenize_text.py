"""Turn texts of any size into tokens, in files that train.py maps into memory.

python tokenize_text.py --out tokens --train-vocabulary 8000 book.txt corpus.jsonl.gz
python tokenize_text.py --out tokens --tokenizer FOLDER corpus.jsonl
python tokenize_text.py --verify tokens

A file named .jsonl, .ndjson or .json has a document in each line, {"text": ...}. Any other file is
one document, or several that --separator divides. A file may be compressed by gzip. The tokens are
the same for any number of processes, none of which holds more than a few megabytes of text.
"""

import argparse
import codecs
import gzip
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

INDEX = "tokens.json"  # in the folder of the tokens; it is written last
LINES = (".jsonl", ".ndjson", ".json")  # endings of files that have an object in each line
TABLES = (".csv", ".tsv", ".parquet")
ONE_A_LINE = "have one object in each line, as jq -c '.[]' writes those of a list"
END = "<|end|>"  # ends a document, with a vocabulary that is trained here
PIECE = 2**17  # letters: a longer document is encoded in pieces of about this length
BATCH = 2**19  # letters that a process gets at once
NEAR = 100  # letters before and after a cut that tell whether it changes a token
TRIED = 1000  # places where a document may be cut
TRAINED_ON = 3 * 10**7  # bytes: of a longer text the vocabulary is trained on parts, evenly spread
LONGEST_LINE = 2**28  # bytes of a line of JSON
# What these processes of a pool encode with: a tokenizer, and the number of the token that ends.
encoder = {}


class WrongInput(Exception):
    """What was given cannot be used; the message is one line that says why and what to do."""


class KilledProcess(WrongInput):
    """A process of the pool was killed. Python may wait forever for the rest of what it sent."""


# What a folder of tokens has


def read_index(folder):
    """Return what tokens.json says of a folder of tokens, whose files have the right sizes.

    Raises WrongInput if the folder is not whole.
    """
    path = folder / INDEX
    again = "write it again with tokenize_text.py"
    if not path.exists():
        begun = f", and is of a run that was cut off: remove it, and {again}"
        what = begun if list(folder.glob("*.bin")) else ", which tokenize_text.py writes"
        raise WrongInput(f"the folder {folder} has no {INDEX}{what}")
    try:
        content = path.read_bytes()
        index = json.loads(content)
        size = np.dtype(index["dtype"]).itemsize
        expected = {folder / part["name"]: part["tokens"] * size for part in index["shards"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongInput(f"{path} cannot be read ({error!r}): {again}") from error
    for shard, length in expected.items():
        if not os.access(shard, os.R_OK):
            raise WrongInput(f"{shard} is missing, or may not be read: copy it again, or {again}")
        found = shard.stat().st_size
        if found != length:
            wrong = f"{shard} has {found} bytes, and {length} by {INDEX}"
            raise WrongInput(f"{wrong}: copy it again, or {again}")
    return index | {"checksum": zlib.crc32(content), "paths": list(expected)}


def tokenizer_checksum(path):
    """Return a checksum of what a tokenizer.json does to a text without special tokens.

    Raises WrongInput if the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        used = {name: content[name] for name in content.keys() - {"truncation", "padding"}}
    except (OSError, ValueError, AttributeError) as error:
        raise WrongInput(f"{path} cannot be read ({error}): copy it there again") from error
    used.pop("post_processor", None)
    return zlib.crc32(json.dumps(used, sort_keys=True).encode())


def description(index, separate):
    """Return what a resumed run has to have the same of a folder of tokens, which is not all read.

    tokens.json has the checksums of the files. `separate` is whether documents are kept apart.
    """
    apart = ", documents apart" if separate else ""
    return f"of {index['tokens']} tokens, {INDEX} with checksum {index['checksum']}{apart}"


def verify(folder):
    """Read a folder of tokens; return a line that says what it has.

    Raises WrongInput if a file's checksum is not that of tokens.json.
    """
    index = read_index(folder)
    for path, part in zip(index["paths"], index["shards"], strict=True):
        checksum = 0
        with open(path, "rb") as file:
            while content := file.read(2**20):
                checksum = zlib.crc32(content, checksum)
        if checksum != part["checksum"]:
            raise WrongInput(f"{path} has changed since it was written: copy it again")
    if tokenizer_checksum(folder / "tokenizer.json") != index["tokenizer"]:
        raise WrongInput(f"{folder / 'tokenizer.json'} has changed: copy it again")
    return summary(folder, index)


def summary(folder, index):
    """Return a line that says what a folder of tokens has."""
    found = f"{index['tokens']:,} tokens of {index['documents']:,} documents"
    return f"{folder}: {found} in {len(index['shards'])} files, vocabulary {index['vocabulary']:,}"


# Reading texts


def open_text(path):
    """Return a text file, opened for reading bytes; one that gzip has compressed is unpacked."""
    file = open(path, "rb")  # noqa: SIM115
    if file.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), 2**20)
    return file


def has_lines(path):
    """Return whether a file has JSON lines, by its name. Raises WrongInput if it is a table."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(TABLES):
        raise WrongInput(f"{path} is a table: write each row that you need as a line of JSON")
    return name.endswith(LINES)


def read_file(path, key, separator):
    """Yield the text of a file in parts: each with whether a document ends with it.

    Raises WrongInput with the file's name and the number of the line if it cannot be used.
    """
    of_lines = has_lines(path)
    lines = 0
    try:
        with open_text(path) as file:
            read = read_json(file, key) if of_lines else read_text(file)
            if separator and not of_lines:
                read = divide(read, separator)
            for text, ends, number in read:
                lines = number
                yield text, ends
    except WrongInput as error:
        raise WrongInput(f"{path}, {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise WrongInput(f"cannot read {path} after line {lines}: {reason}") from error


def read_json(file, key):
    """Yield the document in each line of a file of JSON lines, True, and the line's number."""
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise WrongInput(f"line {number}: it has {LONGEST_LINE} bytes or more: divide it")
        if not line.strip():
            continue
        try:
            document = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise WrongInput(f"line {number}: it is not UTF-8 ({error.reason})") from None
        except (ValueError, RecursionError) as error:
            wrong = f"line {number}: it is no JSON ({error})"
            raise WrongInput(f"{wrong}: {ONE_A_LINE}") from None
        if not isinstance(document, dict) or not isinstance(document.get(key), str):
            wrong = f'line {number}: it has no text with the key "{key}"'
            raise WrongInput(f"{wrong}: is it one JSON object a line? See --key")
        text = document[key]
        try:
            text.encode()
        except UnicodeEncodeError:
            wrong = f"line {number}: it has half of a surrogate pair, which is no letter"
            raise WrongInput(f"{wrong}: remove it, or replace it by \\ufffd") from None
        yield text, True, number


def read_text(file):
    """Yield the parts of a text, whether they are its last, and the number of the line there."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 1
    first = True
    while content := file.read(PIECE):
        text = decode(decoder, content, number)
        if first:
            text = text.removeprefix("\ufeff")  # a mark of some editors, and no part of the text
            first = not text
        number += text.count("\n")
        yield text, False, number
    yield decode(decoder, b"", number, True), True, number


def decode(decoder, content, number, final=False):
    """Return the next part of a text; refuse what is no UTF-8, or is of no text."""
    before, _ = decoder.getstate()
    try:
        text = decoder.decode(content, final)
    except UnicodeDecodeError as error:
        line = number + (before + content)[: error.start].count(b"\n")
        advice = "convert it with iconv -f ENCODING -t UTF-8"
        raise WrongInput(f"line {line}: it is not UTF-8 ({error.reason}): {advice}") from None
    zero = text.find("\0")
    if zero >= 0:
        line = number + text[:zero].count("\n")
        wrong = f"line {line}: it has a byte 0, as in UTF-16 or in a binary file"
        raise WrongInput(f"{wrong}: convert it with iconv -f UTF-16LE -t UTF-8")
    return text


def divide(parts, separator):
    """Yield the documents of a text that a separator divides, as read_text yields its parts."""
    rest = ""
    number = 1
    other = separator.replace("\n", "\r\n")  # as a file of Windows has it
    for text, ends, number in parts:
        rest += text
        if separator not in other and other in rest:
            line = number - rest[rest.index(other) :].count("\n")
            wrong = f"line {line}: its lines end with \\r\\n, and --separator has \\n alone"
            raise WrongInput(f"{wrong}: remove each \\r with tr -d '\\r'")
        *whole, rest = rest.split(separator)
        for document in whole:
            yield document, True, number
        if not ends:  # a separator may have begun in the last letters
            known = max(0, len(rest) - len(other) + 1)
            yield rest[:known], False, number
            rest = rest[known:]
    yield rest, True, number


def pieces(args, tokenizer=None):
    """Yield the text of all files in pieces: each with whether a document ends with it.

    Documents without a letter are left out. With a tokenizer, no piece ends within a token.
    """
    for path in args.files:
        rest = ""
        begun = False
        for text, ends in read_file(path, args.key, args.separator):
            rest += text
            start = 0
            while len(rest) - start > 2 * PIECE:
                end, after = cut(rest, start + PIECE, tokenizer)
                yield rest[start:end], False
                start = after
                begun = True
            rest = rest[start:]
            if ends:
                if begun or rest.strip():
                    yield rest, True
                rest = ""
                begun = False


def cut(text, place, tokenizer):
    """Return where a piece of a long text ends, near `place`, and where the next one begins.

    It is a place where the tokens of the two are those of the whole, as far as the letters nearby
    tell. Some tokenizers put a space before each text, and one in the text is left out there.
    """
    if tokenizer is None:
        return place, place
    for end in range(place, place + TRIED):
        before = text[end - NEAR : end]
        after = text[end : end + NEAR]
        whole = token_numbers(tokenizer, before + after)
        start = token_numbers(tokenizer, before)
        if whole[: len(start)] != start:
            continue
        if whole == start + token_numbers(tokenizer, after):
            return end, end
        if after[0] == " " and whole == start + token_numbers(tokenizer, after[1:]):
            return end, end + 1
    return place, place


def batches(parts, counts):
    """Yield lists of pieces of so many letters as a process gets at once; count documents."""
    batch = []
    size = 0
    for text, ends in parts:
        batch.append((text, ends))
        size += len(text)
        counts["documents"] += ends
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


# Making tokens


def token_numbers(tokenizer, text):
    """Return the numbers of a text's tokens."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def load_tokenizer(path):
    """Return the tokenizer in a tokenizer.json. In a text, special tokens are text like any other.

    Raises WrongInput if it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing more special
        advice = "copy it there again"
        if not path.exists():  # there may be other files, such as vocab.json, of which it is made
            name = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            advice += f", or have transformers write it: {name}"
        raise WrongInput(f"{path} cannot be read ({error}): {advice}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # otherwise a text that names one would have it
    return tokenizer


def train_tokenizer(args):
    """Return a byte-level BPE with a vocabulary of --train-vocabulary, trained on the files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.train_vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # gzip makes a text about a third as long.
    size = sum(path.stat().st_size * (3 if path.suffix == ".gz" else 1) for path in args.files)
    each = math.ceil(size / TRAINED_ON)
    parts = enumerate(pieces(args))
    tokenizer.train_from_iterator((text for i, (text, _) in parts if i % each == 0), trainer)
    return tokenizer


def begin_process(path, end, kind):
    """Prepare a process of the pool to encode batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    encoder.update(tokenizer=load_tokenizer(path), end=end, kind=kind)


def end_with_parent():
    """End this process when the one that started it has ended, also if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(batch):
    """Return the tokens (N,) of a batch of pieces, with one more where a document ends."""
    numbers = []
    for text, ends in batch:
        numbers += token_numbers(encoder["tokenizer"], text)
        if ends:
            numbers.append(encoder["end"])
    return np.array(numbers, dtype=encoder["kind"])


def encode_all(parts, processes, *settings):
    """Yield the tokens of each batch, in their order; few batches are in memory at a time.

    `settings` are those of begin_process.
    """
    how = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, how, begin_process, settings)
    pending = deque()
    children = set()
    try:
        for batch in parts:
            pending.append(pool.submit(encode, batch))
            if len(pending) > 2 * processes:
                yield result_of(pending.popleft(), children)
        while pending:
            yield result_of(pending.popleft(), children)
    except BrokenProcessPool as error:
        pool.shutdown(wait=False)
        advice = "was the memory exhausted? Use fewer --processes"
        raise KilledProcess(f"a process that encodes has been killed: {advice}") from error
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def result_of(future, children):
    """Return what a process of the pool has computed; note all of them in `children`.

    Raises BrokenProcessPool if one has ended, also if the pool does not notice that: it waits
    forever for the rest of what a process has sent that was killed meanwhile.
    """
    children.update(multiprocessing.active_children())
    while not wait([future], timeout=5).done:
        if not all(child.is_alive() for child in children):
            raise BrokenProcessPool
    return future.result()


# Writing a folder of tokens


def write_shards(folder, arrays, most):
    """Write tokens into files of `most` tokens each; yield what tokens.json says of each."""
    number = 0
    file = None
    for array in arrays:
        while len(array):
            if file is None:
                shard = {"name": f"{number:05}.bin", "tokens": 0, "checksum": 0}
                file = open(folder / shard["name"], "xb")  # noqa: SIM115
            part = array[: most - shard["tokens"]]
            array = array[len(part) :]
            content = part.tobytes()
            file.write(content)
            shard["tokens"] += len(part)
            shard["checksum"] = zlib.crc32(content, shard["checksum"])
            if shard["tokens"] == most:
                close(file)
                file = None
                number += 1
                yield shard
    if file:
        close(file)
        yield shard


def close(file):
    """Close a file, whose content is then on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def write_text(path, text):
    """Write a file as a whole or not at all."""
    temporary = path.with_name(f"tmp.{path.name}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def end_token(args):
    """Return the token that ends a document: --end-token, or what the tokenizer's folder names."""
    if args.end_token or args.train_vocabulary:
        return args.end_token or END
    path = args.tokenizer / "tokenizer_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["eos_token"]
        return found["content"] if isinstance(found, dict) else str(found or "")
    except (OSError, ValueError, KeyError, TypeError):
        raise WrongInput(f"{path} names no eos_token: give --end-token") from None


def write_folder(args):
    """Write the tokens of all files into --out; return a line that says what was written."""
    start = time.perf_counter()
    if args.train_vocabulary:
        tokenizer = train_tokenizer(args)
    else:
        tokenizer = load_tokenizer(args.tokenizer / "tokenizer.json")
    end = end_token(args)
    number = tokenizer.token_to_id(end)
    if number is None:
        raise WrongInput(f"the tokenizer has no token {end!r}: give --end-token")
    path = args.out / "tokenizer.json"
    if args.train_vocabulary:
        write_text(path, tokenizer.to_str())
        tokenizer = load_tokenizer(path)
    else:
        shutil.copyfile(args.tokenizer / "tokenizer.json", path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    write_text(args.out / "tokenizer_config.json", json.dumps(config))
    # Numbers may have gaps, so that their count is not enough.
    vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    kind = "uint16" if vocabulary <= 2**16 else "uint32"
    counts = {"tokens": 0, "documents": 0, "largest_token": 0, "unknown_tokens": 0}
    # From here on each process of the pool has one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parts = batches(pieces(args, tokenizer), counts)
    arrays = encode_all(parts, args.processes, path, number, kind)
    arrays = count(arrays, counts, unknown_token(path))
    shards = []
    for shard in write_shards(args.out, arrays, args.shard_tokens):
        shards.append(shard)
        seconds = time.perf_counter() - start
        print(f"{shard['name']}: {shard['tokens']:,} tokens, after {seconds:.0f} s", flush=True)
    if not shards:
        raise WrongInput("there is no document with a letter in these files")
    index = {"shards": shards, "dtype": kind, "vocabulary": vocabulary} | counts
    index |= {"end": number, "end_token": end, "tokenizer": tokenizer_checksum(path)}
    write_text(args.out / INDEX, json.dumps(index, indent=1))
    return f"{summary(args.out, index)}; {time.perf_counter() - start:.1f} s"


def unknown_token(path):
    """Return the number of the token that stands for what a tokenizer does not know, or -1."""
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    token = model.get("unk_token")
    number = model["vocab"].get(token) if token else model.get("unk_id")
    return -1 if number is None else number


def count(arrays, counts, unknown):
    """Yield arrays of tokens, and note in `counts` what tokens.json says of them."""
    for array in arrays:
        if len(array):
            counts["tokens"] += len(array)
            counts["largest_token"] = max(counts["largest_token"], int(array.max()))
            counts["unknown_tokens"] += int((array == unknown).sum()) if unknown >= 0 else 0
        yield array


def parse_args(parser):
    """Return the arguments; refuse those that cannot work."""
    add = parser.add_argument
    add("files", nargs="*", type=Path, help=f"texts, and files of JSON lines ({', '.join(LINES)})")
    add("--out", type=Path, help="the folder to write; it must not exist yet")
    add("--tokenizer", type=Path, help="folder with a tokenizer.json, such as that of a model")
    words = "train a tokenizer with so many tokens on the files"
    add("--train-vocabulary", type=int, metavar="N", help=words)
    add("--end-token", help="the token that ends a document, if the folder names none, or another")
    add("--key", default="text", help='key of the text in JSON lines (default: "text")')
    words = "what divides a text file into documents; \\n stands for the end of a line"
    add("--separator", help=words)
    words = "processes that encode (default: one for each core)"
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=int, default=cores, metavar="N", help=words)
    words = "tokens of a file (default: %(default)s)"
    add("--shard-tokens", type=int, default=2**27, metavar="N", help=words)
    add("--verify", type=Path, metavar="FOLDER", help="compare a folder with its checksums")
    args = parser.parse_args()
    if args.verify:
        return args
    if not args.files or not args.out:
        parser.error("give --out FOLDER and one or more files")
    if (args.tokenizer is None) == (args.train_vocabulary is None):
        parser.error("give either --tokenizer FOLDER or --train-vocabulary N")
    if args.train_vocabulary and args.end_token:
        parser.error(f"--train-vocabulary ends documents with {END}: leave --end-token out")
    if args.train_vocabulary is not None and not 257 <= args.train_vocabulary <= 10**6:
        limits = f"from 257, the bytes and {END}, to a million"
        parser.error(f"--train-vocabulary must be {limits}, not {args.train_vocabulary}")
    if args.separator is not None:
        args.separator = args.separator.replace("\\n", "\n")
        if not 1 <= len(args.separator) <= 1000:
            parser.error("--separator must have from 1 to 1000 letters")
    for flag in ("processes", "shard_tokens"):
        if not 1 <= getattr(args, flag) <= 2**40:
            parser.error(f"--{flag.replace('_', '-')} must be 1 or more")
    for path in args.files:
        if not path.is_file():
            what = "is a folder: give its files" if path.is_dir() else "does not exist"
            parser.error(f"{path} {what}")
    return args


def make_folder(args):
    """Make the folder --out with the tokens of all files; return a line that says what it has.

    Raises WrongInput if that cannot be done; nothing is left then.
    """
    try:
        args.out.mkdir(parents=True)
    except FileExistsError:
        raise WrongInput(f"{args.out} is there already: nothing was written") from None
    except OSError as error:
        raise WrongInput(f"cannot make the folder {args.out}: {error.strerror}") from error
    try:
        return write_folder(args)
    except OSError as error:
        wrong = f"cannot write {args.out} ({error}): is the disk full, or your quota?"
        raise WrongInput(wrong) from error
    finally:
        if not (args.out / INDEX).exists():
            shutil.rmtree(args.out, ignore_errors=True)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    args = parse_args(parser)
    os.environ.setdefault("RAYON_NUM_THREADS", str(args.processes))  # training has these threads
    try:
        print(verify(args.verify) if args.verify else make_folder(args))
    except ImportError as error:
        advice = "pip install -r requirements.txt"
        parser.exit(2, f"{parser.prog}: error: {error}: {advice}\n")
    except KilledProcess as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    except WrongInput as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: error: ended by Ctrl-C, and nothing is left\n")


if __name__ == "__main__":
    main()
