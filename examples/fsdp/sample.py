"""Write text with the model that train.py has left in its output folder.

python sample.py --prompt "Once upon a"
"""

import argparse
import json
import math
import os
from pathlib import Path

# Where cores are busy, threads that spin take minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

import tokenize_text
from common.models import TinyGPT


def parse_args():
    """Return the arguments, and the model in --output-dir."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=defaults)
    add = parser.add_argument
    add("--output-dir", type=Path, default="output", help="folder with model.pt and model.json")
    folder = "folder of tokens that the model was trained on; without: it was trained on bytes"
    add("--tokens-dir", type=Path, help=folder)
    add("--prompt", default="\n", help="the text that the model continues")
    add("--length", type=int, default=200, help="bytes to write, or tokens")
    add("--temperature", type=float, default=0.8, help="1: as the model says; 0: the likeliest")
    add("--seed", type=int, default=0, help="another seed gives another text")
    args = parser.parse_args()
    no_text = any("\ud800" <= letter <= "\udfff" for letter in args.prompt)
    if args.length < 1 or not args.prompt or no_text:
        parser.error("--length must be 1 or more, and --prompt must have a letter, in UTF-8")
    if args.temperature and not 0.01 <= args.temperature < math.inf:
        parser.error(f"--temperature must be 0, or 0.01 or more, not {args.temperature}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to {2**63 - 1}, not {args.seed}")
    try:
        model = TinyGPT(**json.loads((args.output_dir / "model.json").read_text()))
        model.load_state_dict(torch.load(args.output_dir / "model.pt", weights_only=True))
    except FileNotFoundError as error:
        advice = "train.py writes it at the end of a run"
        others = sorted(args.output_dir.glob("*/model.json"))
        if others:
            advice = f"give --output-dir {others[-1].parent}"
        parser.error(f"there is no {error.filename}: {advice}")
    except Exception as error:  # a damaged file can raise almost anything
        line, _, _ = str(error).strip().partition("\n")
        wrong = f"{args.output_dir} has no model that can be read ({line or repr(error)})"
        parser.error(f"{wrong}: train it again with --resume")
    vocabulary = model.token.num_embeddings
    args.end = None
    args.tokenizer = None
    args.numbers = list(args.prompt.encode())
    known = 256
    if args.tokens_dir:
        try:
            index = tokenize_text.read_index(args.tokens_dir)
            args.tokenizer = tokenize_text.load_tokenizer(args.tokens_dir / "tokenizer.json")
        except tokenize_text.WrongInput as error:
            parser.error(f"--tokens-dir: {error}")
        args.end = index["end"]
        args.numbers = tokenize_text.token_numbers(args.tokenizer, args.prompt)
        known = index["vocabulary"]
    if vocabulary != known:
        wrong = f"{args.output_dir} has a model of {vocabulary} tokens"
        advice = "give --tokens-dir the folder that train.py has read"
        parser.error(f"{wrong}, not of {known}: {advice}")
    if not args.numbers:
        parser.error("--prompt has no token: give another one")
    bad = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    if bad:
        wrong = f"{args.output_dir / 'model.pt'}: {bad[0]} has values that are no numbers"
        parser.error(f"{wrong}: use a lower --lr")
    return args, model.eval()


@torch.no_grad()
def sample(model, tokens, length, temperature, generator, end=None):
    """Return `tokens` (T,), int64, and `length` more, each drawn as likely as the model says.

    There are fewer if `end` is drawn, the token that ends a document.
    """
    for _ in range(length):
        logits = model(tokens[None, -model.context :])[0, -1]
        if temperature == 0:
            token = logits.argmax()[None]
        else:
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        if token.item() == end:
            break
        tokens = torch.cat([tokens, token])
    return tokens


def main():
    """Print the prompt and what the model makes of it."""
    args, model = parse_args()
    prompt = torch.tensor(args.numbers)
    generator = torch.Generator().manual_seed(args.seed)
    tokens = sample(model, prompt, args.length, args.temperature, generator, args.end)
    if args.tokenizer:
        print(args.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        return
    new = bytes(tokens[len(prompt) :].tolist())
    # The random source has 32 symbols. Each is printed as a letter.
    if sum(symbol < 32 for symbol in new) > len(new) / 2:
        print("".join(chr(64 + symbol) if symbol < 32 else "?" for symbol in new))
    else:
        print(args.prompt + new.decode(errors="replace"))


if __name__ == "__main__":
    main()
