"""Read the model and the text, or end with one line that says what is wrong with them."""

import ctypes
import json
import random

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import longrun

FORMATS = ({"text"}, {"prompt", "completion"}, {"messages"})  # the keys of a line that TRL knows


def load_model(args):
    """Return tokenizer and model of --model-dir, and the model without values."""
    folder = args.model_dir
    if not (folder / "config.json").exists():
        advice = "python make_model.py, or hf download NAME --local-dir FOLDER"
        longrun.fail(f"--model-dir {folder} has no config.json: {advice}")
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            if file.read(7) == b"version":
                longrun.fail(f"{path} is a pointer of git LFS: get the file by git lfs pull")
    # Only a frozen model is loaded in bf16: trained weights need fp32, or small steps are lost.
    bf16 = args.precision == "bf16" and not args.full
    how = {"dtype": torch.bfloat16 if bf16 else torch.float32, "output_loading_info": True}
    if args.shard:  # shard: each process keeps its part of each weight, by FSDP2
        how["distributed_config"] = DistributedConfig(fsdp_size=longrun.size)
        ctypes.CDLL(None).mallopt(-3, 2**20)  # return gathered weights to the system when freed
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):  # without memory
            shapes = AutoModelForCausalLM.from_config(config)
        model, info = AutoModelForCausalLM.from_pretrained(folder, **how)
        if info["missing_keys"]:
            raise ValueError(f"it has no weights for {min(info['missing_keys'])}")
    except Exception as error:  # the type depends on the file that is missing or damaged
        reason = str(error).strip().partition("\n")[0]
        longrun.fail(f"--model-dir {folder} cannot be loaded: {reason or repr(error)}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", args.context)
    if args.context > longest:
        longrun.fail(f"--context {args.context} is above the {longest} tokens of the model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer, model, shapes


def load_data(args, tokenizer):
    """Return the training set, and the test set, which is a tenth of the data."""
    path = args.text_file
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = read_lines(text)
            random.Random(0).shuffle(rows)  # a file may be sorted
        else:
            tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            # A block begins with the last token of the block before, so each token is predicted.
            starts = range(0, len(tokens) - 1, args.context - 1)
            rows = [{"input_ids": tokens[start : start + args.context]} for start in starts]
        tests = max(1, len(rows) // 10)  # of a text: its end
        if len(rows) - tests < args.global_batch:
            raise ValueError(f"{len(rows)} samples are too few: a tenth is for the test")
        if "messages" in rows[0] and not tokenizer.chat_template:
            raise ValueError("the tokenizer of --model-dir has no chat template for messages")
        return Dataset.from_list(rows[:-tests]), Dataset.from_list(rows[-tests:])
    except Exception as error:
        longrun.fail(f"--text-file {path}: {error}")


def read_lines(text):
    """Return the object in each line of JSON lines."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
                if set(rows[-1]) not in FORMATS or rows[-1].keys() != rows[0].keys():
                    raise ValueError(f"wrong keys (see README.md): {', '.join(rows[-1])}")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number}: {error}") from None
    return rows
