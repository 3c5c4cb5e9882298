"""Continue a prompt with a model and what train.py has made of it: `python generate.py --prompt "The river"`.

Without --adapter, --model-dir alone is taken: the model as it was, or output/merged or output/model of train.py.
It computes on a GPU if there is one; on a login node without one a model of billions of parameters takes minutes.
"""

import argparse
import os
import warnings
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
import peft
import transformers


def main():
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
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks for it
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_dir, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model_dir, local_files_only=True)
        if args.adapter:
            model = peft.PeftModel.from_pretrained(model, args.adapter, local_files_only=True)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    except Exception as error:  # depends on which file is missing or damaged
        parser.error(f"cannot load {args.adapter or args.model_dir}: {str(error).strip().splitlines()[0]}")
    torch.manual_seed(args.seed)
    prompt = tokenizer(args.prompt, add_special_tokens=False, return_tensors="pt").to(model.device)
    how = {"do_sample": args.temperature > 0} | ({"temperature": args.temperature} if args.temperature else {})
    written = model.eval().generate(
        **prompt, max_new_tokens=args.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **how
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
