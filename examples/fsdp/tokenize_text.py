"""Write texts as flat uint16 tokens, which train.py reads: data/train.bin and data/val.bin.

python tokenize_text.py book.txt                           # a token is a byte: any language
python tokenize_text.py *.txt --vocabulary 8000            # trains a tokenizer on the texts
python tokenize_text.py *.txt --tokenizer tokenizer.json   # the tokenizer of a Hugging Face model

Nothing is downloaded. The last tenth of the tokens is for testing.
"""

import argparse
import itertools
import os
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer


def write_tokens(path, texts, tokenizer):
    """Write the tokens of texts, one text after the other, to a file."""
    with open(path, "wb") as file:
        for name in texts:
            with open(name, encoding="utf-8", newline="") as text:
                while lines := list(itertools.islice(text, 10_000)):
                    tokens = list("".join(lines).encode())
                    if tokenizer:  # without tokens that begin or end a text
                        parts = tokenizer.encode_batch(lines, add_special_tokens=False)
                        tokens = [token for part in parts for token in part.ids]
                    np.array(tokens, np.uint16).tofile(file)


def main():
    """Write train.bin and val.bin, and tokenizer.json for sample.py."""
    parser = argparse.ArgumentParser("tokenize_text.py")
    parser.add_argument("texts", nargs="+", help="files in UTF-8")
    parser.add_argument("--data-dir", type=Path, default="data", help="folder to write to")
    parser.add_argument("--vocabulary", type=int, help="train a tokenizer with this many tokens")
    parser.add_argument("--tokenizer", help="a file of the library tokenizers: tokenizer.json")
    args = parser.parse_args()
    tokenizer, unfinished = None, args.data_dir / ".unfinished"
    try:
        if args.tokenizer:
            tokenizer = Tokenizer.from_file(args.tokenizer)
            tokenizer.no_truncation()
        elif args.vocabulary:
            tokenizer = ByteLevelBPETokenizer()
            tokenizer.train(args.texts, args.vocabulary, show_progress=False)
        args.data_dir.mkdir(parents=True, exist_ok=True)
        (args.data_dir / "tokenizer.json").unlink(missing_ok=True)  # of an earlier call
        write_tokens(unfinished, args.texts, tokenizer)
        tokens = np.memmap(unfinished, np.uint16, "r")
        cut = len(tokens) - len(tokens) // 10
        tokens[cut:].tofile(args.data_dir / "val.bin")
        os.truncate(unfinished, cut * tokens.itemsize)
        os.replace(unfinished, args.data_dir / "train.bin")
        if tokenizer:
            tokenizer.save(str(args.data_dir / "tokenizer.json"))
    except Exception as error:  # the library `tokenizers` raises plain Exception
        parser.error(" ".join(str(error).split()))
    print(f"{cut} tokens to train with, {len(tokens) - cut} to test with. The flags of train.py:")
    vocabulary = tokenizer.get_vocab_size() if tokenizer else 256
    print(f"--data-dir {args.data_dir} --vocabulary {vocabulary}")


if __name__ == "__main__":
    main()
