"""Write a small language model with random weights, and its tokenizer, into `model/`.

`python make_model.py` writes both in the format of Hugging Face, as a model from the hub is, so
that everything runs without the internet. The tokenizer is a byte-level BPE that is trained on a
text: it can write any script, since what it does not know it writes as bytes of UTF-8.
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common import data

END = "<|end|>"  # this token ends a text


def make_tokenizer(text, size):
    """Return a tokenizer with at most `size` tokens, 256 of which are single bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    options = {"eos_token": END, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def make_model(vocabulary, end):
    """Return a decoder of the kind that Llama is, with 3.5 million random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,  # with the default, 0.02, so narrow a model would hardly learn
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def main():
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=defaults)
    add = parser.add_argument
    add("--folder", type=Path, default="model", help="the folder to write; it must not exist yet")
    text = "text that the tokenizer is trained on"
    add("--text-file", type=Path, default="text.txt", help=text)
    add("--vocabulary", type=int, default=320, help="number of tokens, at most")
    add("--seed", type=int, default=0, help="seed for the random weights")
    args = parser.parse_args()
    if not 257 <= args.vocabulary <= 10**6:
        limits = f"from 257, the bytes and {END}, to a million"
        parser.error(f"--vocabulary must be {limits}, not {args.vocabulary}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to {2**63 - 1}, not {args.seed}")
    if args.folder.exists():
        print(f"{args.folder} is there already: nothing was written")
        return
    try:
        text = data.read_text(args.text_file).decode(errors="ignore")
    except data.DataError as error:
        parser.error(f"--text-file: {error}")
    tokenizer = make_tokenizer(text, args.vocabulary)
    torch.manual_seed(args.seed)
    model = make_model(len(tokenizer), tokenizer.eos_token_id)
    temporary = args.folder.with_name(f"{args.folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, args.folder)
    except (OSError, RuntimeError) as error:
        parser.error(f"cannot write {args.folder} ({error}): is the disk full, or your quota?")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{args.folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
