"""Write text with a trained model: python sample.py --prompt "Once upon a" --output-dir output"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tiny_gpt import TinyGPT


@torch.no_grad()
def main():
    """Print the prompt, and what the model writes after it."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output-dir", type=Path, default="output", help="folder of the run")
    add("--prompt", default="\n", help="the text that the model continues")
    add("--length", type=int, default=200, help="tokens to write")
    add("--temperature", type=float, default=0.8, help="1: as the model says; 0.01: the likeliest")
    args = parser.parse_args()
    settings = json.loads((args.output_dir / "run.json").read_text())["settings"]
    sizes = [settings[name] for name in ("vocabulary", "context", "width", "heads", "layers")]
    model = TinyGPT(*sizes).eval()
    model.load_state_dict(torch.load(args.output_dir / "model.pt", weights_only=True))
    path = Path(settings["data_dir"] or "no data", "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None  # None: tokens are bytes
    tokens = tokenizer.encode(args.prompt).ids if tokenizer else list(args.prompt.encode())
    for _ in range(args.length):
        logits = model(torch.tensor([tokens[-model.context :]]))[0, -1]
        chances = (logits / args.temperature).softmax(0)
        tokens.append(torch.multinomial(chances, 1).item())
    if tokenizer:
        print(tokenizer.decode(tokens))
    elif not settings["data_dir"]:  # the 32 symbols of the random source, as letters
        print("".join(chr(64 + token % 32) for token in tokens[-args.length :]))
    else:
        print(bytes(tokens).decode(errors="replace"))  # a letter may be cut off


if __name__ == "__main__":
    main()
