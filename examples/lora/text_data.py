"""The data that the user brings: a text, prompts with their completions, or texts with labels.

train.py calls `load`. It turns the file into two data sets, whose items are whole batches: tokens
(B, T), and as labels what the model has to say of them. What cannot be used is refused in one line.
"""

import json
import math
import random
import re
import zlib

import torch
from torch.utils.data import Dataset

import tokenize_text
from common import data
from model_files import checksum
from plumbing import fail, plural

IGNORED = -100  # cross_entropy leaves out what has this label
PROMPTS = ("prompt", "completion")  # the keys of JSON lines that have questions and answers
CLASSES = ("text", "label")  # and of those for a classifier
EXPECTED = 'expected "prompt" and "completion", or for a classifier "text" and "label"'
ALONE = "tokenize_text.py takes texts alone"
CHATS = "docs/prompts-and-labels.md of the repository has the program that turns chats into prompts"
MULTIPLE = 8  # to a multiple of this a batch is padded, with which GPUs compute faster
TOGETHER = 1000  # texts that become tokens at a time: as lists these take ten times the memory


def load(args, tokenizer):
    """Return the training set and the test set in --text-file, and note in `args` what they are.

    `targets` is how many tokens a training sample has to predict, in the mean; `classes` are the
    names of a classifier's. Of a text the last tenth is for testing, and of lines a tenth that is
    drawn at random, always the same: lines may be sorted.
    """
    args.end = None  # the token that ends a document, where documents are kept apart
    args.classes = None
    args.cut_off = None
    args.begin = None  # the token that begins a prompt, but no sample of a text
    try:
        of_lines = not args.text_file.is_dir() and tokenize_text.has_lines(args.text_file)
    except tokenize_text.WrongInput as error:
        fail(f"--text-file: {error}")
    if of_lines:
        return load_lines(args, tokenizer)
    args.begin = "".join(tokenizer.convert_ids_to_tokens(first_token(tokenizer)))
    tokens = tokenize(args, tokenizer, read_text(args))
    samples = (len(tokens) - 1) // args.context
    split = (samples - max(1, samples // 10)) * args.context
    args.targets = args.context
    train_set = data.Tokens(tokens[: split + 1], args.context)
    return train_set, data.Tokens(tokens[split:], args.context)


# A text


def read_text(args):
    """Return the text in --text-file; refuse one that cannot be read.

    Of a folder of tokens return what its tokens.json says.
    """
    try:
        if args.text_file.is_dir():
            return tokenize_text.read_index(args.text_file)
        content = data.read_text(args.text_file)
        return content.decode(errors="ignore").replace("\r\n", "\n").replace("\r", "\n")
    except (data.DataError, tokenize_text.WrongInput) as error:
        fail(f"--text-file: {error}")


def tokenize(args, tokenizer, text):
    """Return the text's tokens, and note in `args` what later checks need.

    Refuse a text with too few tokens, or too many that are unknown.
    """
    if isinstance(text, dict):
        return read_tokens(args, tokenizer, text)
    if args.separate_documents:
        advice = "give --text-file a folder that tokenize_text.py has written"
        fail(f"--separate-documents needs tokens that end documents: {advice}")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    check_tokens(args, tokenizer, len(tokens), count_unknown(tokenizer, tokens))
    args.text = checksum([tokens])
    _, args.largest_token = data.token_range(tokens)
    return tokens


def read_tokens(args, tokenizer, index):
    """Return the tokens in the folder --text-file, and note in `args` what later checks need.

    `index` is what tokens.json says of them: they are not all read here. Refuse tokens of another
    tokenizer than the model's.
    """
    path = args.model_dir / "tokenizer.json"
    own = None
    if path.exists():
        own = tokenize_text.tokenizer_checksum(path)
    if own != index["tokenizer"]:
        wrong = f"--text-file {args.text_file} has tokens of another tokenizer than {path}"
        fail(f"{wrong}: write them with tokenize_text.py --tokenizer {args.model_dir}")
    check_tokens(args, tokenizer, index["tokens"], index["unknown_tokens"])
    args.text = tokenize_text.description(index, args.separate_documents)
    args.largest_token = index["largest_token"]
    if args.separate_documents:
        args.end = index["end"]
    return data.Shards([data.mapped_tokens(path, index["dtype"]) for path in index["paths"]])


def check_tokens(args, tokenizer, count, unknown):
    """Refuse a text of too few tokens, or of which too many are unknown."""
    check_unknown(args, tokenizer, count, unknown)
    # There must be a sample to train on and one to test with, each shifted by a token.
    if count <= 2 * args.context:
        wrong = f"--text-file {args.text_file} has {count} tokens"
        least = f"--context {args.context} needs more than {2 * args.context}"
        most = f", or --context {(count - 1) // 2}" if count > 2 else ""
        fail(f"{wrong}, and {least}: use a longer text{most}")


def count_unknown(tokenizer, tokens):
    """Return how many of the tokens stand for what the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return 0  # such as GPT-2's, which knows each byte: the token ends a text, or pads a batch
    return (tokens == unknown).sum().item()


def check_unknown(args, tokenizer, count, unknown):
    """Refuse data with too many unknown tokens: to predict these is easy, and worth nothing."""
    if unknown > count / 10:
        wrong = f"tokens of {args.text_file} are {tokenizer.unk_token}"
        advice = "take a model whose tokenizer knows this script"
        fail(f"--model-dir {args.model_dir}: {unknown} of the {count} {wrong}: {advice}")


# Lines of JSON


class Completions(Dataset):
    """Prompts with their completions, of which the completions are to be predicted.

    Indexing with a list of B indices returns inputs (B, T) and targets (B, T), int64. The targets
    are the inputs shifted by one token, and -100 where a prompt or padding is to be predicted. The
    padding stands last, where no token sees it: the model is causal, and needs no attention mask.
    """

    def __init__(self, samples, padding, sizes):
        """Keep samples: of each its tokens (N,), and how many of them are the prompt.

        Batches are padded with the token `padding`, to a multiple of sizes[0], at most sizes[1].
        """
        self.samples = samples
        self.padding = padding
        self.sizes = sizes

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, indices):
        inputs = []
        targets = []
        for tokens, begin in (self.samples[index] for index in indices):
            inputs.append(tokens[:-1])
            target = tokens[1:].clone()
            target[: begin - 1] = IGNORED
            targets.append(target)
        return pad(inputs, self.padding, self.sizes), pad(targets, IGNORED, self.sizes)


class LabelledTexts(Dataset):
    """Texts with the number of their class.

    Indexing with a list of B indices returns inputs (B, T), padded as in Completions, and labels
    (B,), int64. A classifier of transformers answers at the last token that is no padding.
    """

    def __init__(self, samples, padding, sizes):
        """Keep samples: of each its tokens (N,), and the number of its class."""
        self.texts = [tokens for tokens, _ in samples]
        self.labels = torch.tensor([label for _, label in samples])
        self.padding = padding
        self.sizes = sizes

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, indices):
        texts = [self.texts[index] for index in indices]
        return pad(texts, self.padding, self.sizes), self.labels[indices]


def pad(rows, value, sizes):
    """Return rows of several lengths as one tensor (B, T), int64, with a value behind each."""
    multiple, most = sizes
    length = math.ceil(max(map(len, rows)) / multiple) * multiple
    batch = torch.full((len(rows), min(most, length)), value)
    for target, row in zip(batch, rows, strict=True):
        target[: len(row)] = row
    return batch


def load_lines(args, tokenizer):
    """Return what load() does, of a file of JSON lines."""
    if args.separate_documents:
        wrong = "--separate-documents is for a folder of tokens"
        fail(f"{wrong}, and the lines of {args.text_file} are apart: leave it out")
    keys, rows = read_lines(args.text_file)
    if len(rows) < 2:
        wrong = f"has {plural(len(rows), 'line')}, and needs one to train on and one to test with"
        fail(f"--text-file {args.text_file} {wrong}: add some")
    args.padding = tokenizer.pad_token_id
    if args.padding is None:
        args.padding = tokenizer.eos_token_id  # as Llama's, which has no other
    if args.padding is None or (keys == PROMPTS and tokenizer.eos_token_id is None):
        wrong = "its tokenizer names no eos_token, which ends a completion and pads a batch"
        fail(f"--model-dir {args.model_dir}: {wrong}: name it in tokenizer_config.json")
    kind = Completions if keys == PROMPTS else LabelledTexts
    read = completions if keys == PROMPTS else labelled_texts
    samples = read(args, tokenizer, rows)
    tests = set(random.Random(0).sample(range(len(rows)), max(1, len(rows) // 10)))
    test_samples = [sample for number, sample in enumerate(samples) if number in tests]
    train_samples = [sample for number, sample in enumerate(samples) if number not in tests]
    args.targets = 1
    if keys == PROMPTS:
        count = sum(len(tokens) - begin for tokens, begin in train_samples)
        args.targets = count / len(train_samples)
    # Compiled for one length, the model would have to be compiled anew for another one.
    sizes = (args.context if args.compile else MULTIPLE, args.context)
    train_set = kind(train_samples, args.padding, sizes)
    return train_set, kind(test_samples, args.padding, sizes)


def read_lines(path):
    """Return the keys of a file of JSON lines and, of each line, its number and their values.

    The first line says which keys they are. A line that cannot be used is refused.
    """
    keys = None
    rows = []
    number = 0
    try:
        with tokenize_text.open_text(path) as file:
            for line in file:
                number += 1
                if line.strip():
                    row = read_object(line)
                    keys = keys or keys_of(row)
                    rows.append((number, *values(row, keys)))
    except tokenize_text.WrongInput as error:
        fail(f"--text-file {path}, line {number}: {error}")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        fail(f"--text-file: cannot read {path} after line {number}: {reason}")
    return keys, rows


def read_object(line):
    """Return the JSON object in a line of bytes. Raises WrongInput if there is none."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        advice = "convert the file with iconv -f ENCODING -t UTF-8"
        raise tokenize_text.WrongInput(f"it is not UTF-8 ({error.reason}): {advice}") from None
    except (ValueError, RecursionError) as error:
        wrong = f"it is no JSON ({error})"
        raise tokenize_text.WrongInput(f"{wrong}: {tokenize_text.ONE_A_LINE}") from None
    if isinstance(row, list):
        raise tokenize_text.WrongInput(f"it is a list: {tokenize_text.ONE_A_LINE}")
    if not isinstance(row, dict):
        raise tokenize_text.WrongInput(f"it is no JSON object: {EXPECTED}")
    return row


def keys_of(row):
    """Return the two keys of which kind a line's object is. Raises WrongInput if it is of both."""
    found = [keys for keys in (PROMPTS, CLASSES) if row.keys() >= set(keys)]
    if len(found) > 1:
        raise tokenize_text.WrongInput("it has the keys of both kinds: leave those of one out")
    if not found:
        found = [PROMPTS if PROMPTS[0] in row else CLASSES]  # of these something is missing
    return found[0]


def values(row, keys):
    """Return the values that a line's object has for two keys, as texts. Raises WrongInput."""
    found = []
    for key in keys:
        if key not in row:
            has = ", ".join(f'"{name}"' for name in row) or "nothing"
            other = CHATS if "messages" in row else ALONE
            raise tokenize_text.WrongInput(f'it has no "{key}" but {has}: {EXPECTED}; {other}')
        value = row[key]
        is_number = key == "label" and isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, str) and not is_number:
            kinds = "a text or a whole number" if key == "label" else "a text"
            shown = json.dumps(value)[:60]
            raise tokenize_text.WrongInput(f'its "{key}" is {shown}, and has to be {kinds}')
        value = str(value)
        if not value.strip() and key != "prompt":
            raise tokenize_text.WrongInput(f'its "{key}" is empty: fill it in, or remove the line')
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            wrong = f'its "{key}" has half of a surrogate pair, which is no letter'
            raise tokenize_text.WrongInput(f"{wrong}: remove it, or replace it by \\ufffd")
        found.append(value)
    return found


def completions(args, tokenizer, rows):
    """Return of each line its tokens, and how many of them are its prompt.

    A completion ends with the tokenizer's eos_token. That counts as any other token, also where the
    same one pads a batch: a model that is not trained to write it would never stop. What is longer
    than --context is cut off. A prompt that leaves no room for its completion is refused.
    """
    numbers, prompts, answers = zip(*rows, strict=True)
    both = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    encoded = [encode(tokenizer, texts) for texts in (prompts, answers, both)]
    begin = first_token(tokenizer)
    end = [tokenizer.eos_token_id]
    samples = []
    lengths = []
    without_room = []
    for number, prompt, answer, whole in zip(numbers, *encoded, strict=True):
        # A prompt has the tokens that it has alone, as when the model is asked. Its completion has
        # those that follow in the whole, unless a token there has letters of both.
        if whole[: len(prompt)] == prompt:
            answer = whole[len(prompt) :]
        prompt = with_first_token(begin, prompt)
        if not prompt:
            wrong = "its prompt has no token after which the completion could begin"
            fail(f"--text-file {args.text_file}, line {number}: {wrong}: fill it in")
        tokens = prompt + answer + (end if answer[-1:] != end else [])
        lengths.append(len(tokens) - 1)
        if len(prompt) > args.context:
            without_room.append(number)
        tokens = torch.tensor(tokens[: args.context + 1], dtype=torch.int32)
        samples.append((tokens, len(prompt)))
    if without_room:
        of = f"of {plural(len(without_room), 'line')}, such as line {without_room[0]},"
        wrong = f"the prompt {of} leaves no room for its completion at --context {args.context}"
        advice = f"--context {max(lengths)} takes all, or leave them out"
        fail(f"--text-file {args.text_file}: {wrong}: {advice}")
    note_lines(args, tokenizer, samples, lengths)
    return samples


def labelled_texts(args, tokenizer, rows):
    """Return of each line its text's tokens, and the number of its label; note the classes.

    A text that is longer than --context is cut off.
    """
    numbers, texts, names = zip(*rows, strict=True)
    are_numbers = all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in names)
    args.classes = sorted(set(names), key=lambda name: (int(name) if are_numbers else 0, name))
    if len(args.classes) < 2:
        wrong = f"has the label {names[0]} alone, so that there is nothing to learn"
        fail(f"--text-file {args.text_file} {wrong}: it needs 2 or more")
    number_of = {name: number for number, name in enumerate(args.classes)}
    # The tokenizer puts these around each text, also when the classifier is asked.
    others = {args.padding, *tokenizer("")["input_ids"]}
    samples = []
    lengths = []
    for number, tokens, name in zip(numbers, encode(tokenizer, texts, True), names, strict=True):
        if others.issuperset(tokens):
            wrong = "its text has no token that is not also the one that pads a batch"
            fail(f"--text-file {args.text_file}, line {number}: {wrong}: remove the line")
        lengths.append(len(tokens))
        tokens = torch.tensor(tokens[: args.context], dtype=torch.int32)
        samples.append((tokens, number_of[name]))
    # The tokenizer is saved with the classifier, which depends on where the padding is.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(args.padding)
    tokenizer.padding_side = "right"
    note_lines(args, tokenizer, samples, lengths)
    return samples


def prompt_tokens(tokenizer, prompt):
    """Return the tokens of a prompt, as a list, as they are when its completion is trained."""
    (tokens,) = encode(tokenizer, [prompt])
    return with_first_token(first_token(tokenizer), tokens)


def encode(tokenizer, texts, around=False):
    """Yield the tokens of each text, as a list; `around`: with those that are put around it."""
    for start in range(0, len(texts), TOGETHER):
        part = list(texts[start : start + TOGETHER])
        yield from tokenizer(part, add_special_tokens=around)["input_ids"]


def first_token(tokenizer):
    """Return a list of the token with which the tokenizer begins each text, if there is one."""
    begin = tokenizer("")["input_ids"][:1]
    return begin if begin == [tokenizer.bos_token_id] else []


def with_first_token(begin, tokens):
    """Return tokens after the first one, which is not doubled where the text itself has it."""
    return tokens if tokens[:1] == begin else begin + tokens


def note_lines(args, tokenizer, samples, lengths):
    """Note in `args` what later checks need of lines, and how many were cut off."""
    tokens = torch.cat([tokens for tokens, _ in samples])
    check_unknown(args, tokenizer, len(tokens), count_unknown(tokenizer, tokens))
    args.largest_token = max(tokens.max().item(), args.padding)
    # A sample's length, and where its completion begins, or its class.
    others = torch.tensor([(len(tokens), number) for tokens, number in samples])
    args.text = f"{checksum([tokens, others])} of {len(samples)} lines"
    if args.classes:
        names = zlib.crc32(repr(args.classes).encode())
        args.text += f" with {len(args.classes)} classes, checksum {names:08x}"
    longer = sum(length > args.context for length in lengths)
    if longer:
        cut = f"{plural(longer, 'line')} of {len(lengths)} cut off at --context {args.context}"
        args.cut_off = f"{cut}: --context {max(lengths)} takes all"
