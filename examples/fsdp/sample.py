"""Write text with the model that train.py has left in its output folder:  python sample.py --prompt "Once upon a" """

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where cores are busy, threads that spin take minutes
import torch

from common.models import TinyGPT


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default="output", help="folder with model.pt and model.json")
    parser.add_argument("--prompt", default="\n", help="the text that the model continues")
    parser.add_argument("--length", type=int, default=200, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="1: as the model says; 0: the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another text")
    args = parser.parse_args()
    if args.length < 1 or not args.temperature >= 0 or not args.prompt:
        parser.error("--length must be 1 or more, --temperature 0 or more, and --prompt must have a letter")
    try:
        model = TinyGPT(**json.loads((args.output_dir / "model.json").read_text()))
        model.load_state_dict(torch.load(args.output_dir / "model.pt", weights_only=True))
    except FileNotFoundError as error:
        parser.error(f"there is no {error.filename}: train.py writes it at the end of a run")
    except Exception as error:  # a damaged file can raise almost anything
        parser.error(f"{args.output_dir} has no model that can be read ({error!r}): train it again with --resume")
    return args, model.eval()


@torch.no_grad()
def sample(model, tokens, length, temperature, generator):
    """Return `tokens` (T,), int64, and `length` more, each drawn from the model's distribution for the next one."""
    for _ in range(length):
        logits = model(tokens[None, -model.context :])[0, -1]
        if temperature == 0:
            token = logits.argmax()[None]
        else:
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, token])
    return tokens


def main():
    """Print the prompt and what the model makes of it."""
    args, model = parse_args()
    prompt = torch.tensor(list(args.prompt.encode()))
    tokens = sample(model, prompt, args.length, args.temperature, torch.Generator().manual_seed(args.seed))
    new = bytes(tokens[len(prompt) :].tolist())
    if sum(symbol < 32 for symbol in new) > len(new) / 2:  # the random source: a letter for each of its 32 symbols
        print("".join(chr(64 + symbol) if symbol < 32 else "?" for symbol in new))
    else:
        print(args.prompt + new.decode(errors="replace"))


if __name__ == "__main__":
    main()
