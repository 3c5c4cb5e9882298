"""The model and the text that the user brings: train.py calls this to read them, and to write what was trained.

What cannot be used, such as a download that was cut off, is refused in one line.
"""

import argparse
import json
import os
import shutil
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from common import data
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
# peft sets the first to what GPT-2's layers need, and has no such patterns for a mixture of experts.
warnings.filterwarnings("ignore", "fan_in_fan_out is set to False|The following (rank|alpha)_pattern keys")
LOCAL = {"local_files_only": True, "trust_remote_code": False}  # nor does it ask whether to run a model's own code
DOWNLOAD = "hf download NAME --local-dir FOLDER, on a login node"
NEEDED = "take a causal one, such as Llama, Qwen or GPT-2, which predicts a token from those before it"


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    if args.lora_alpha == 0:
        parser.error("--lora-alpha must be above 0, not 0")
    if args.lora_dropout >= 1:
        parser.error(f"--lora-dropout must be from 0 to below 1, not {args.lora_dropout}")
    if args.full and args.merge:
        parser.error("--merge adds adapters to the model, and with --full there are none: leave one of the two out")


def check_folder(folder):
    """Refuse a folder without a language model whose weights are all there and can be trained, and say what it has."""
    if not (folder / "config.json").exists():
        fail(f"--model-dir {folder}: there is no config.json, {what_is_there(folder)}")
    if (folder / "adapter_config.json").exists():  # transformers would load the model that these were made for
        advice = "merge them by peft's merge_and_unload, or move adapter_* away"
        fail(f"--model-dir {folder} has adapters beside a model, which would not be the model that it names: {advice}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        index = folder / "model.safetensors.index.json"
        parts = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
        missing = sorted(part for part in parts if not (folder / part).exists())
        small = [path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < 1024]
        pointers = [path.name for path in small if path.read_bytes().startswith(b"version https://git-lfs")]
    except Exception as error:  # depends on which file is missing or damaged
        if any(text in str(error) for text in ("trust_remote_code", "does not recognize")):
            version = f"transformers {transformers.__version__} does not have"
            fail(f"--model-dir {folder} needs code that {version} ({one_line(error)}): take another model")
        fail(f"--model-dir {folder}: its model cannot be loaded ({one_line(error)}): copy it there again")
    name = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        fail(f"--model-dir {folder} has {name}, which is no causal language model: {NEEDED}")
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        fail(f"--model-dir {folder} has a quantised model ({method}): take that with weights of bf16, fp16 or fp32")
    if pointers:
        advice = f"`git lfs pull` there, or {DOWNLOAD}"
        fail(f"--model-dir {folder}: {pointers[0]} only points to a file of Git LFS: {advice}")
    if missing:
        found = f"of its {len(parts)} files of weights {len(missing)} are missing, such as {missing[0]}"
        fail(f"--model-dir {folder}: {found}: copy them there, or use once more {DOWNLOAD}")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        fail(f"--model-dir {folder}: its model cannot be loaded, {what_is_there(folder)}")


def what_is_there(folder):
    """Return what a folder without a model has instead, and what to do."""
    if folder.is_file():
        return "it is a file: give the folder of a model, with config.json, tokenizer.json and *.safetensors"
    if not folder.exists():
        real = f"hf download {folder} --local-dir FOLDER" if len(folder.parts) == 2 else DOWNLOAD
        return f"and no such folder. `python make_model.py` writes a small model; a real one is downloaded: {real}"
    if (adapters := folder / "adapter_config.json").exists():
        try:
            base = json.loads(adapters.read_text())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "the base model"
        return f"it has adapters alone: give the folder of their base model ({base}), or of the two merged (--merge)"
    if found := sorted(folder.glob("*.gguf")):
        return f"it has {found[0].name}, of llama.cpp: take the model in Hugging Face's format, with *.safetensors"
    if sorted(folder.glob("consolidated*")):
        return f"it has a model in Meta's or Mistral's own format: take that in Hugging Face's: {DOWNLOAD}"
    inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
    if inner:
        return f"but there is one in {inner[0].parent}: give that folder"
    return f"`python make_model.py` writes a small model; a real one is downloaded: {DOWNLOAD}"


def load_tokenizer(args):
    """Return the tokenizer of the model in --model-dir; refuse a folder that has none, or no model."""
    check_folder(args.model_dir)
    try:
        return transformers.AutoTokenizer.from_pretrained(args.model_dir, **LOCAL)
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"--model-dir {args.model_dir}: its tokenizer cannot be loaded ({one_line(error)}): copy it there again")


def read_text(args):
    """Return the text in --text-file; refuse one that cannot be read."""
    try:
        content = data.read_text(args.text_file)
        return content.decode(errors="ignore").replace("\r\n", "\n").replace("\r", "\n")
    except data.DataError as error:
        fail(f"--text-file: {error}")


def tokenize(args, tokenizer, text):
    """Return the text's tokens, and note in `args` what later checks need; refuse too few of them, or unknown ones."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    unknown = (tokens == tokenizer.unk_token_id).sum().item() if tokenizer.unk_token_id is not None else 0
    if unknown > len(tokens) / 10:  # to predict these is easy, and worth nothing
        found = f"{unknown} of the {len(tokens)} tokens of {args.text_file} are {tokenizer.unk_token}"
        fail(f"--model-dir {args.model_dir}: {found}: take a model whose tokenizer knows this script")
    return check_tokens(args, tokens)


def check_tokens(args, tokens):
    """Return the tokens, and note in `args` what later checks need; refuse too few of them."""
    if len(tokens) <= 2 * args.context:  # a sample to train on and one to test with, shifted by a token
        least = f"--context {args.context} needs more than {2 * args.context}"
        most = f", or --context {(len(tokens) - 1) // 2}" if len(tokens) > 2 else ""
        fail(f"--text-file {args.text_file} has {len(tokens)} tokens, and {least}: use a longer text{most}")
    args.text = checksum([tokens])
    _, args.largest_token = data.token_range(tokens)
    return tokens


def load_model(args, dtype):
    """Return the model in --model-dir, and note in `args` what it is; refuse one that does not fit or is damaged."""
    model = read_model(args.model_dir, dtype, args.largest_token)
    most = longest(model)
    if most and args.context > most:
        fail(f"--context {args.context} is more than the {most} tokens that the model in {args.model_dir} can take")
    args.model, args.base = type(model).__name__, checksum(model.parameters())
    check_logits(args.model_dir, model.to("cuda" if torch.cuda.is_available() else "cpu"), args.precision == "bf16")
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def read_model(path, dtype, largest_token):
    """Return the model in a folder; refuse one that is damaged, or that does not know the largest token."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    how = {"ignore_mismatched_sizes": True, "output_loading_info": True}  # an error would not name these weights
    folder, advice = f"--model-dir {path}", "copy it there again, with the config.json that belongs to it"
    try:
        model, loaded = load(path, dtype=dtype, **LOCAL, **how)
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"{folder}: its model cannot be loaded ({one_line(error)}): copy it there again")
    if other := sorted(map(str, loaded["mismatched_keys"])):
        fail(f"{folder}: of {len(other)} weights the shape is another one than config.json says, {other[0]}: {advice}")
    if missing := sorted(loaded["missing_keys"]):  # these would be random
        fail(f"{folder} has no weights for {', '.join(missing[:3])}: {advice}, or {NEEDED}")
    kinds = {by_kind(name) for name in model.state_dict()}
    if dropped := sorted(name for name in loaded["unexpected_keys"] if by_kind(name) in kinds):
        fail(f"{folder} has weights of further layers, such as {dropped[0]}, which config.json does not name: {advice}")
    if largest_token >= (known := model.get_input_embeddings().num_embeddings):
        text = f"its tokenizer has token {largest_token}, its model only {known} tokens"
        fail(f"{folder}: {text}: copy both there from one source")
    return model


def longest(model):
    """Return how many tokens a model can take, or 0 if it has no such limit."""
    return max(0, getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0)


def by_kind(name):
    """Return a weight's name without the numbers of its layers."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def check_logits(folder, model, bf16=False):
    """Refuse a model whose logits are no numbers, or depend on later tokens: those it would have to predict.

    The gradient of the earlier logits by the last token's embedding is exactly 0 if the model is causal. (The logits
    themselves may change in the rounding, as with a mixture of experts.) What takes no part in it, such as a vision
    tower, is frozen: DistributedDataParallel would wait for its gradients.
    """
    embedding, used, outputs = model.get_input_embeddings(), set(), []
    hooks = [module.register_forward_hook(lambda module, *_: used.add(module)) for module in model.modules()]
    hooks.append(embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output)))
    tokens = (torch.arange(4, device=model.device) + embedding.num_embeddings // 2) % embedding.num_embeddings
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(tokens[None], use_cache=False).logits.float()
    except Exception as error:  # depends on what else the model needs
        fail(f"--model-dir {folder}: {type(model).__name__} cannot read tokens ({one_line(error)}): {NEEDED}")
    for hook in hooks:
        hook.remove()
    if not logits.isfinite().all():
        wrong = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
        found = f"{len(wrong)} of its weights have values that are no numbers, such as {wrong[0]}" if wrong else ""
        advice = "copy it there again, or use --precision fp32"
        fail(f"--model-dir {folder}: the model's outputs are no numbers ({found or model.dtype}): {advice}")
    (gradient,) = torch.autograd.grad(logits[:, :-1].square().sum(), outputs[0])
    by_token = gradient.reshape(len(tokens), -1).float().abs().amax(1)
    if by_token[-1] > 1e-5 * by_token.max():
        name = type(model).__name__
        fail(f"--model-dir {folder}: {name} is not causal, its outputs depend on later tokens: {NEEDED}")
    for part in (*model.children(), *model.base_model.children()):
        if used.isdisjoint(part.modules()):
            part.requires_grad_(False)


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
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)  # the second is GPT-2's
    linear = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, kinds)}
    frozen = [name for name, weight in linear.items() if not weight.requires_grad]  # see check_logits
    # peft refuses two of these, and of the third Mamba takes the weight alone, past the adapter.
    mamba = {"out_proj", "conv1d", "dt_proj"} if "mamba" in model.config.model_type else set()
    known = {name.rpartition(".")[2] for name in linear} - mamba
    names = {name.strip() for name in args.target_modules.split(",")}
    if args.target_modules == "all-linear":
        if not frozen and not mamba:
            return args.target_modules
        heads = {name for name, layer in model.named_modules() if layer is model.get_output_embeddings()}
        names = known - {name.rpartition(".")[2] for name in heads}
    if unknown := sorted(names - known):
        fail(f"--target-modules {', '.join(unknown)}: the model in {args.model_dir} has {', '.join(sorted(known))}")
    chosen = {name: weight for name, weight in linear.items() if name.rpartition(".")[2] in names}
    if args.merge and any(weight is model.get_input_embeddings().weight for weight in chosen.values()):
        fail("--target-modules with the output layer, whose weight is also the embedding's: leave it out with --merge")
    if frozen:
        return [name for name, weight in chosen.items() if weight.requires_grad]
    return sorted(names)


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
