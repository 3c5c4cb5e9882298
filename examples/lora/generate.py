"""Continue a prompt with a model and what train.py has made of it.

`python generate.py --prompt "The river"` takes --model-dir alone: the model as it was, or
output/merged or output/model of train.py. --adapter adds what was trained beside it. It computes on
a GPU if there is one. On a login node without one a model of billions of parameters takes minutes.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

import model_files  # it comes before peft, and has nothing downloaded
import text_data
from plumbing import fail

# isort: split
import peft


def parse_args():
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=defaults)
    add = parser.add_argument
    add("--prompt", required=True, help="the beginning of a text")
    model = "folder with a model of Hugging Face's format"
    add("--model-dir", type=Path, default="model", help=model)
    adapter = "folder with adapters for this model, such as output/adapter"
    add("--adapter", type=Path, help=adapter)
    add("--max-new-tokens", type=int, default=40, help="tokens to write, at most")
    temperature = "0: always the likeliest token; 1: drawn at random"
    add("--temperature", type=float, default=0, help=temperature)
    add("--seed", type=int, default=0, help="seed for --temperature above 0")
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
    except Exception as error:  # it depends on which file is missing or damaged
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = lines or [repr(error)]
        # The first of several lines does not say what is wrong, but the second one does.
        fail(f"cannot load {folder}: {lines[1] if len(lines) > 1 else lines[0]}")
    loaded = peft.get_peft_model_state_dict(with_adapters)
    other = sorted(saved.keys() ^ loaded.keys())
    if other:  # peft would leave these out, or random
        fail(f"cannot load {folder}: its adapters are of a model with other layers ({other[0]})")
    bad = [name for name, weight in saved.items() if not weight.isfinite().all()]
    if bad:
        fail(f"cannot load {folder}: {bad[0]} has values that are no numbers")
    base = with_adapters.peft_config["default"].base_model_name_or_path
    own = model.name_or_path
    if base and Path(base).exists() and not Path(base).samefile(own):
        print(f"note: {folder} was trained with {base}, not with {own}", file=sys.stderr)
    return with_adapters


def main():
    args = parse_args()
    tokenizer = model_files.load_tokenizer(args)
    tokens = torch.tensor([text_data.prompt_tokens(tokenizer, args.prompt)], dtype=torch.long)
    length = tokens.numel()
    if not length:
        fail(f"--prompt {args.prompt!r} has no token: give a longer one")
    model = model_files.read_model(args.model_dir, "auto")
    model_files.check_embeddings(args.model_dir, model, tokens.max().item())
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    model_files.check_logits(args.model_dir, model)
    most = model_files.longest(model)
    if 0 < most < length + args.max_new_tokens:
        wrong = f"--prompt has {length} tokens, and the model can take {most}"
        advice = "a shorter --prompt"
        if length < most:
            advice = f"--max-new-tokens {most - length} or fewer"
        fail(f"{wrong} with those that it writes: use {advice}")
    if args.adapter:
        model = load_adapters(model, args.adapter)
    torch.manual_seed(args.seed)
    how = {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    ends = model.generation_config.eos_token_id  # one, several or none
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    how["eos_token_id"] = sorted(ends - {None}) or None  # the first one ends what was trained
    how["do_sample"] = args.temperature > 0
    if args.temperature:
        how["temperature"] = args.temperature
    else:  # the model's generation_config.json may have these
        how |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
        how |= {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # as if none were given
    tokens = tokens.to(model.device)
    mask = torch.ones_like(tokens)  # without it a token that also pads batches would be left out
    (written,) = model.eval().generate(tokens, attention_mask=mask, **how)
    print(tokenizer.decode(written, skip_special_tokens=True))


if __name__ == "__main__":
    main()
