"""The model and the text that the user brings: train.py calls this to read them, and to write what was trained.

What cannot be used, such as a download that was cut off, is refused in one line.
"""

import argparse
import os
import shutil
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from plumbing import fail

os.environ["HF_HUB_OFFLINE"] = "1"  # training never downloads: compute nodes seldom have internet
try:
    import peft  # noqa: F401 (train.py needs it)
    import transformers
    from safetensors import SafetensorError
except ImportError as error:
    argparse.ArgumentParser().exit(2, f"train.py: error: {error}: pip install -r requirements.txt\n")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# DDP's new name for it is not known before PyTorch 2.15, and peft asks transformers for the old name of a setting.
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated|`is_gradient_checkpointing` is deprecated")


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    if args.lora_alpha == 0:
        parser.error("--lora-alpha must be above 0, not 0")
    if args.lora_dropout >= 1:
        parser.error(f"--lora-dropout must be from 0 to below 1, not {args.lora_dropout}")
    if args.full and args.merge:
        parser.error("--merge adds adapters to the model, and with --full there are none: leave one of the two out")


def load_tokenizer(args):
    """Return the tokenizer of the model in --model-dir; refuse a folder that has none."""
    if not (args.model_dir / "config.json").exists():
        fail(
            f"--model-dir {args.model_dir}: there is no config.json. `python make_model.py` writes a small model; a "
            "real one is downloaded on a login node: hf download NAME --local-dir FOLDER"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(args.model_dir, local_files_only=True)
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"--model-dir {args.model_dir}: its tokenizer cannot be loaded ({one_line(error)}): copy it there again")


def read_text(args):
    """Return the text in --text-file; refuse one that cannot be read."""
    try:
        return args.text_file.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"--text-file {args.text_file}: {error.strerror}")
    except UnicodeDecodeError as error:
        fail(f"--text-file {args.text_file} is not UTF-8 ({error}): convert it with iconv -f ENCODING -t UTF-8")


def tokenize(args, tokenizer, text):
    """Return the text's tokens, and note in `args` what later checks need; refuse too few of them."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if len(tokens) <= 2 * args.context:  # a sample to train on and one to test with, shifted by a token
        least = f"--context {args.context} needs more than {2 * args.context}"
        fail(f"--text-file {args.text_file} has {len(tokens)} tokens, and {least}: use a longer text")
    args.text, args.largest_token = checksum([tokens]), tokens.max().item()
    return tokens


def load_model(args, dtype):
    """Return the model in --model-dir, and note in `args` what it is; refuse one that does not fit or is damaged."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model, loaded = load(args.model_dir, local_files_only=True, dtype=dtype, output_loading_info=True)
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"--model-dir {args.model_dir}: its model cannot be loaded ({one_line(error)}): copy it there again")
    if loaded["missing_keys"]:  # these would be random
        fail(f"--model-dir {args.model_dir} has no weights for {', '.join(sorted(loaded['missing_keys'])[:3])}")
    most = getattr(model.config, "max_position_embeddings", None)
    if most and args.context > most:
        fail(f"--context {args.context} is more than the {most} tokens that the model in {args.model_dir} can take")
    if args.largest_token >= (known := model.get_input_embeddings().num_embeddings):
        text = f"its tokenizer has token {args.largest_token}, its model only {known} tokens"
        fail(f"--model-dir {args.model_dir}: {text}: copy both there from one source")
    args.model, args.base = type(model).__name__, checksum(model.parameters())
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def one_line(error):
    """Return the first line of an error's message, which may have many."""
    return str(error).strip().partition("\n")[0] or repr(error)


def checksum(tensors):
    """Return a checksum of tensors: a checkpoint of adapters is worth nothing with another base model or text."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().flatten().contiguous().view(torch.uint8).numpy(), found)
    return f"{found:08x}"


def target_modules(args, model):
    """Return --target-modules as peft expects it; refuse names that none of the model's linear layers has."""
    if args.target_modules == "all-linear":
        return args.target_modules
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)  # the second is GPT-2's
    known = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, linear)}
    names = args.target_modules.split(",")
    if unknown := sorted(set(names) - known):
        fail(f"--target-modules {', '.join(unknown)}: the model in {args.model_dir} has {', '.join(sorted(known))}")
    return names


def write_folder(folder, *parts):
    """Write what parts, such as a model, save into a temporary folder, which takes the place of `folder`, complete."""
    temporary, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        for part in parts:
            part.save_pretrained(temporary)
        for path in filter(Path.is_file, temporary.rglob("*")):
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        fail(f"cannot write {folder} ({error}): is the disk full, or your quota? Free some space, then use --resume")
    shutil.rmtree(old, ignore_errors=True)


def print_sizes(args, model):
    """Print on rank 0 how many weights are trained, and how much a step therefore exchanges."""
    if dist.get_rank() > 0:
        return
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    count, item = sum(weight.numel() for weight in trained), trained[0].element_size()
    size = sum(weight.numel() for weight in model.parameters()) - count * (not args.full)  # without adapters
    full = "" if args.full else f", {count / size:.2%} of the {size * item / 1e6:.3f} MB of --full"
    print(f"{size:,} weights, {count:,} are trained: a step exchanges {count * item / 1e6:.3f} MB{full}")
