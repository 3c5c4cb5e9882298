"""Write text with the model that train.py has left in its output folder:  python sample.py --prompt "Once upon a" """

import argparse
import json
import math
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
    if args.length < 1 or not args.prompt or any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        parser.error("--length must be 1 or more, and --prompt must have a letter, in UTF-8")
    if args.temperature and not 0.01 <= args.temperature < math.inf:
        parser.error(f"--temperature must be 0, or 0.01 or more, not {args.temperature}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to {2**63 - 1}, not {args.seed}")
    try:
        model = TinyGPT(**json.loads((args.output_dir / "model.json").read_text()))
        model.load_state_dict(torch.load(args.output_dir / "model.pt", weights_only=True))
    except FileNotFoundError as error:
        others = sorted(args.output_dir.glob("*/model.json"))
        advice = f"give --output-dir {others[-1].parent}" if others else "train.py writes it at the end of a run"
        parser.error(f"there is no {error.filename}: {advice}")
    except Exception as error:  # a damaged file can raise almost anything
        what = str(error).strip().partition("\n")[0] or repr(error)
        parser.error(f"{args.output_dir} has no model that can be read ({what}): train it again with --resume")
    if (vocabulary := model.token.num_embeddings) != 256:
        parser.error(f"{args.output_dir} has a model of {vocabulary} tokens: sample.py knows only those of 256 bytes")
    if wrong := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
        parser.error(f"{args.output_dir / 'model.pt'}: {wrong[0]} has values that are no numbers: use a lower --lr")
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
