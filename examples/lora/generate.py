"""Continue a prompt with a model and what train.py has made of it: `python generate.py --prompt "The river"`.

Without --adapter, --model-dir alone is taken: the model as it was, or output/merged or output/model of train.py.
It computes on a GPU if there is one; on a login node without one a model of billions of parameters takes minutes.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

import model_files  # before peft: it has nothing downloaded
from plumbing import fail

# isort: split
import peft


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompt", required=True, help="the beginning of a text")
    parser.add_argument("--model-dir", type=Path, default="model", help="folder with a model of Hugging Face's format")
    parser.add_argument("--adapter", type=Path, help="folder with adapters for this model, such as output/adapter")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="tokens to write, at most")
    parser.add_argument(
        "--temperature", type=float, default=0, help="0: always the likeliest token; 1: drawn at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for --temperature above 0")
    args = parser.parse_args()
    if not args.prompt or any("\ud800" <= letter <= "\udfff" for letter in args.prompt):
        parser.error("--prompt must have a letter, and be in UTF-8")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be 1 or more, not {args.max_new_tokens}")
    if args.temperature and not 0.01 <= args.temperature < math.inf:
        parser.error(f"--temperature must be 0, or 0.01 or more, not {args.temperature}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed must be from 0 to {2**63 - 1}, not {args.seed}")
    return args


def load_adapters(model, folder):
    """Return the model with the adapters in a folder; refuse those of a model with other layers."""
    try:
        with_adapters = peft.PeftModel.from_pretrained(model, folder, local_files_only=True)
        saved = peft.load_peft_weights(folder, device="cpu", local_files_only=True)
    except Exception as error:  # depends on which file is missing or damaged
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        fail(f"cannot load {folder}: {(lines[1:] or lines or [repr(error)])[0]}")
    loaded = peft.get_peft_model_state_dict(with_adapters)
    if other := sorted(saved.keys() ^ loaded.keys()):  # peft would leave these out, or random
        fail(f"cannot load {folder}: its adapters are of a model with other layers ({other[0]})")
    if wrong := [name for name, weight in saved.items() if not weight.isfinite().all()]:
        fail(f"cannot load {folder}: {wrong[0]} has values that are no numbers")
    base = with_adapters.peft_config["default"].base_model_name_or_path
    if base and Path(base).exists() and not Path(base).samefile(model.name_or_path):
        print(f"note: {folder} was trained with {base}, not with {model.name_or_path}", file=sys.stderr)
    return with_adapters


def main():
    args = parse_args()
    tokenizer = model_files.load_tokenizer(args)
    prompt = tokenizer(args.prompt, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    length = prompt["input_ids"].shape[1]
    if not length:
        fail(f"--prompt {args.prompt!r} has no token: give a longer one")
    model = model_files.read_model(args.model_dir, "auto", prompt["input_ids"].max().item())
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    model_files.check_logits(args.model_dir, model)
    most = model_files.longest(model)
    if 0 < most < length + args.max_new_tokens:
        best = f"--max-new-tokens {most - length} or fewer" if length < most else "a shorter --prompt"
        fail(f"--prompt has {length} tokens, and the model can take {most} with those that it writes: use {best}")
    if args.adapter:
        model = load_adapters(model, args.adapter)
    torch.manual_seed(args.seed)
    how = {"do_sample": args.temperature > 0} | ({"temperature": args.temperature} if args.temperature else {})
    written = model.eval().generate(
        **prompt.to(model.device), max_new_tokens=args.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **how
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
