"""The model that the user brings.

train.py calls this to read it, and to write what was trained. What cannot be used, such as a
download that was cut off, is refused in one line.
"""

import argparse
import json
import os
import re
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import tokenize_text
from common.models import positions_in_documents
from plumbing import fail, gather, original, others_waiting, rank

os.environ["HF_HUB_OFFLINE"] = "1"  # training never downloads: compute nodes seldom have internet
try:
    import peft
    import transformers
    from safetensors import SafetensorError
except ImportError as error:
    advice = "pip install -r requirements.txt"
    argparse.ArgumentParser().exit(2, f"train.py: error: {error}: {advice}\n")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
# peft asks transformers for the old name of a setting.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
# peft sets this to what GPT-2's layers need.
warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
# peft has no such patterns for a mixture of experts.
warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
# transformers neither downloads anything nor asks whether to run a model's own code.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
DOWNLOAD = "hf download NAME --local-dir FOLDER, on a login node"
CAUSAL = "which predicts a token from those before it"
NEEDED = f"take a causal one, such as Llama, Qwen or GPT-2, {CAUSAL}"
# Letters, digits, accents, spaces and ends of lines, which tokenizers divide by different rules.
PROBE = "It's 1234 cafe\u0301s,\r\n\n  DON'T  \t\u0928\u0926\u0940 \u4e2d\u6587 x"


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    if args.lora_alpha == 0:
        parser.error("--lora-alpha must be above 0, not 0")
    if args.lora_dropout >= 1:
        parser.error(f"--lora-dropout must be from 0 to below 1, not {args.lora_dropout}")
    if args.full and args.merge:
        wrong = "--merge adds adapters to the model, and with --full there are none"
        parser.error(f"{wrong}: leave one of the two out")
    if args.shard and args.compile:
        parser.error("--compile does not work with --shard: leave one of the two out")
    if args.shard and args.merge:
        wrong = "--merge needs the whole model, of which each process has a part with --shard"
        advice = "PeftModel.from_pretrained(model, FOLDER).merge_and_unload() does it afterwards"
        parser.error(f"{wrong}: leave one of the two out; {advice}")


def check_folder(folder):
    """Refuse a folder without a language model whose weights are all there and can be trained."""
    where = f"--model-dir {folder}"
    if not (folder / "config.json").exists():
        fail(f"{where}: there is no config.json, {what_is_there(folder)}")
    # transformers would load the model that these adapters were made for.
    if (folder / "adapter_config.json").exists():
        wrong = "has adapters beside a model, which would not be the model that it names"
        fail(f"{where} {wrong}: merge them by peft's merge_and_unload, or move adapter_* away")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        parts = weight_files(folder)
        missing = sorted(part for part in parts if not (folder / part).exists())
        pointers = git_lfs_pointers(folder)
    except Exception as error:  # it depends on which file is missing or damaged
        if any(text in str(error) for text in ("trust_remote_code", "does not recognize")):
            wrong = f"needs code that transformers {transformers.__version__} does not have"
            fail(f"{where} {wrong} ({one_line(error)}): take another model")
        fail(f"{where}: its model cannot be loaded ({one_line(error)}): copy it there again")
    name = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        fail(f"{where} has {name}, which is no causal language model: {NEEDED}")
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        is_dict = isinstance(quantised, dict)
        method = quantised.get("quant_method") if is_dict else quantised.quant_method
        advice = "take that with weights of bf16, fp16 or fp32"
        fail(f"{where} has a quantised model ({method}): {advice}")
    if pointers:
        advice = f"`git lfs pull` there, or {DOWNLOAD}"
        fail(f"{where}: {pointers[0]} only points to a file of Git LFS: {advice}")
    if missing:
        wrong = f"of its {len(parts)} files of weights {len(missing)} are missing"
        advice = f"copy them there, or use once more {DOWNLOAD}"
        fail(f"{where}: {wrong}, such as {missing[0]}: {advice}")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        fail(f"{where}: its model cannot be loaded, {what_is_there(folder)}")


def weight_files(folder):
    """Return the names of the files of weights that a folder's index names, if it has an index."""
    index = folder / "model.safetensors.index.json"
    return set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()


def git_lfs_pointers(folder):
    """Return the names of the files in a folder that only point to a file of Git LFS."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    small = [path for path in files if path.stat().st_size < 1024]
    start = b"version https://git-lfs"
    return [path.name for path in small if path.read_bytes().startswith(start)]


def what_is_there(folder):
    """Return what a folder without a model has instead, and what to do."""
    if folder.is_file():
        advice = "give the folder of a model, with config.json, tokenizer.json and *.safetensors"
        return f"it is a file: {advice}"
    make = "`python make_model.py` writes a small model; a real one is downloaded"
    if not folder.exists():
        named = len(folder.parts) == 2  # it is NAME, such as Qwen/Qwen3-0.6B
        real = f"hf download {folder} --local-dir FOLDER" if named else DOWNLOAD
        return f"and no such folder. {make}: {real}"
    adapters = folder / "adapter_config.json"
    if adapters.exists():
        try:
            base = json.loads(adapters.read_text())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "the base model"
        advice = f"give the folder of their base model ({base}), or of the two merged (--merge)"
        return f"it has adapters alone: {advice}"
    other = sorted(folder.glob("*.gguf"))
    if other:
        advice = "take the model in Hugging Face's format, with *.safetensors"
        return f"it has {other[0].name}, of llama.cpp: {advice}"
    if sorted(folder.glob("consolidated*")):
        wrong = "it has a model in Meta's or Mistral's own format"
        return f"{wrong}: take that in Hugging Face's: {DOWNLOAD}"
    inner = sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])
    if inner:
        return f"but there is one in {inner[0].parent}: give that folder"
    return f"{make}: {DOWNLOAD}"


def load_tokenizer(args):
    """Return the tokenizer in --model-dir; refuse a folder that has none, or no model.

    Some classes of transformers divide a text by rules of their own in place of those that are in
    tokenizer.json. Where that makes other tokens, the rules of the file are taken.
    """
    check_folder(args.model_dir)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_dir, **LOCAL)
        path = args.model_dir / "tokenizer.json"
        if not path.exists():
            return tokenizer
        tokens = tokenize_text.token_numbers(tokenize_text.load_tokenizer(path), PROBE)
        if tokenizer(PROBE, add_special_tokens=False)["input_ids"] == tokens:
            return tokenizer
        if rank() == 0:
            other = f"AutoTokenizer divides texts in another way than {path}, which is taken here"
            print(f"note: {other}, as PreTrainedTokenizerFast does", file=sys.stderr)
        return transformers.PreTrainedTokenizerFast.from_pretrained(args.model_dir, **LOCAL)
    except Exception as error:  # it depends on which file is missing or damaged
        wrong = f"its tokenizer cannot be loaded ({one_line(error)})"
        advice = "copy it there again"
        others = (args.model_dir / "tokenizer.model", args.model_dir / "tokenizer.json")
        if [path.exists() for path in others] == [True, False]:
            advice += ", and pip install sentencepiece, which reads tokenizer.model"
        fail(f"--model-dir {args.model_dir}: {wrong}: {advice}")


def options(args, tokens):
    """Return with which options the model reads tokens (B, T).

    With --separate-documents positions begin anew in each document. Of such positions transformers
    makes a mask, with which attention stays within a document.
    """
    if args.end is None:
        return {"use_cache": False}
    return {"use_cache": False, "position_ids": positions_in_documents(tokens, args.end)}


def load_model(args, dtype):
    """Return the model in --model-dir, and note in `args` what it is.

    Refuse one that does not fit or is damaged.
    """
    model = read_classifier(args, dtype) if args.classes else read_model(args.model_dir, dtype)
    check_embeddings(args.model_dir, model, args.largest_token)
    check_context(args, model)
    args.model = type(model).__name__
    model.name_or_path = model.config.name_or_path = original(args.model_dir)  # adapters name it
    args.base = checksum(model.parameters())
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    padding = None if args.classes is None else args.padding
    for part in check_logits(args.model_dir, model, args.precision == "bf16", padding):
        part.requires_grad_(False)  # DistributedDataParallel would wait for its gradients
    check_documents(args, model)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def read_model(path, dtype):
    """Return the model in a folder; refuse one that is damaged."""
    model, mismatched, missing, unexpected = read_weights(path, dtype, "CausalLM")
    check_weights(path, model.state_dict(), mismatched, missing, unexpected)
    return model


def read_classifier(args, dtype):
    """Return the model in --model-dir as a classifier, with an output for each of args.classes.

    Its head is the layer `score`. It is new, with random weights, unless the model has been a
    classifier before: then refuse other classes. Refuse a damaged model.
    """
    path = args.model_dir
    config = transformers.AutoConfig.from_pretrained(path, **LOCAL)
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        advice = "take such as Llama, Qwen or GPT-2"
        fail(f"--model-dir {path}: transformers has no {config.model_type} classifier: {advice}")
    names = dict(enumerate(args.classes))
    before = list(config.id2label.values())
    is_classifier = "Classification" in str(config.architectures)
    if is_classifier and before != args.classes:
        wrong = f"is a classifier for {', '.join(before)}, and the labels in {args.text_file}"
        advice = "take the model that it was made of, or those labels"
        fail(f"--model-dir {path} {wrong} are {', '.join(args.classes)}: {advice}")
    torch.manual_seed(args.seed)  # the head's first weights are the same on all processes
    numbers = {name: number for number, name in names.items()}
    settings = {"id2label": names, "label2id": numbers}
    found = read_weights(path, dtype, "SequenceClassification", **settings)
    model, mismatched, missing, unexpected = found
    new = set() if is_classifier else {"score.weight"}
    check_weights(path, model.state_dict(), mismatched, set(missing) - new, unexpected)
    model.config.get_text_config().pad_token_id = args.padding
    model.config.dtype = config.dtype  # in which the folder has it, and not what this run needs
    model.score.to(torch.float64 if dtype == torch.float64 else torch.float32)  # it is trained
    return model


def read_weights(path, dtype, kind, **settings):
    """Return a model of transformers' classes of a kind, and names of weights.

    These are of another shape, without one in the files, and in the files alone.
    """
    load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    # An error would not name the weights of another shape.
    how = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, loaded = load(path, dtype=dtype, **LOCAL, **how, **settings)
    except Exception as error:  # it depends on which file is missing or damaged
        wrong = f"its model cannot be loaded ({one_line(error)})"
        fail(f"--model-dir {path}: {wrong}: copy it there again")
    return model, *(loaded[f"{name}_keys"] for name in ("mismatched", "missing", "unexpected"))


def check_weights(path, names, mismatched, missing, unexpected):
    """Refuse a folder whose files do not have the weights with these names.

    The last three are the names of weights of another shape, without one, and that it has besides.
    """
    where = f"--model-dir {path}"
    advice = "copy it there again, with the config.json that belongs to it"
    other = sorted(map(str, mismatched))
    if other:
        wrong = f"of {len(other)} weights the shape is another one than config.json says"
        fail(f"{where}: {wrong}, {other[0]}: {advice}")
    missing = sorted(missing)
    if missing:  # these would be random
        fail(f"{where} has no weights for {', '.join(missing[:3])}: {advice}, or {NEEDED}")
    kinds = {by_kind(name) for name in names}
    dropped = sorted(name for name in unexpected if by_kind(name) in kinds)
    if dropped:
        wrong = f"has weights of further layers, such as {dropped[0]}"
        fail(f"{where} {wrong}, which config.json does not name: {advice}")


def check_embeddings(path, model, largest_token):
    """Refuse a model that lacks the largest token."""
    known = model.get_input_embeddings().num_embeddings
    if largest_token >= known:
        wrong = f"its tokenizer has token {largest_token}, its model only {known} tokens"
        fail(f"--model-dir {path}: {wrong}: copy both there from one source")


def check_context(args, model):
    """Refuse a --context that is longer than what the model can take."""
    most = longest(model)
    if most and args.context > most:
        limit = f"the {most} tokens that the model in {args.model_dir} can take"
        fail(f"--context {args.context} is more than {limit}")


def longest(model):
    """Return how many tokens a model can take, or 0 if it has no such limit."""
    config = model.config.get_text_config()
    return max(0, getattr(config, "max_position_embeddings", None) or 0)


def by_kind(name):
    """Return a weight's name without the numbers of its layers."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def check_logits(folder, model, bf16=False, padding=None):
    """Refuse a model whose logits are no numbers, or depend on the later tokens, which it predicts.

    The gradient of the earlier logits by the last token's embedding is exactly 0 if the model is
    causal. The logits themselves may change in the rounding, such as with a mixture of experts.
    A classifier has one output for all tokens. It must not depend on the padding behind them.
    Return a list of the parts that take no part in it, such as a vision tower.
    """
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    name = type(inner).__name__.removeprefix("FSDP")
    embedding = model.get_input_embeddings()
    used = set()
    embedded = []

    def note(module, inputs, output):
        used.add(module)
        if module is embedding:
            # It is frozen if the model has adapters.
            embedded.append(output if output.requires_grad else output.requires_grad_())

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    known = embedding.num_embeddings
    tokens = (torch.arange(4, device=model.device) + known // 2) % known
    if padding is not None:
        tokens[-1] = padding
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            logits = model(tokens[None], use_cache=False).logits.float()
    except Exception as error:  # it depends on what else the model needs
        fail(f"--model-dir {folder}: {name} cannot read tokens ({one_line(error)}): {NEEDED}")
    for hook in hooks:
        hook.remove()
    if not logits.isfinite().all():
        bad = names_of_bad_weights(model)
        what = model.dtype
        if bad:
            what = f"{len(bad)} of its weights have values that are no numbers, such as {bad[0]}"
        advice = "copy it there again, or use --precision fp32"
        fail(f"--model-dir {folder}: the model's outputs are no numbers ({what}): {advice}")
    earlier = logits[:, :-1] if padding is None else logits
    (gradient,) = torch.autograd.grad(earlier.square().sum(), embedded[0])
    by_token = gradient.reshape(len(tokens), -1).float().abs().amax(1)
    if by_token[-1] > 1e-5 * by_token.max():
        wrong = f"{name} is not causal, its outputs depend on later tokens"
        if padding is not None:
            wrong = f"the answer of {name} depends on the padding behind a text"
        fail(f"--model-dir {folder}: {wrong}: {NEEDED}")
    both = (*inner.children(), *inner.base_model.children())
    return [part for part in both if used.isdisjoint(part.modules())]


def names_of_bad_weights(model):
    """Return the names of the weights with values that are no numbers.

    Of a model that is shared out each process has a part, and all call this.
    """
    bad = []
    for name, weight in model.named_parameters():
        own = weight.to_local() if hasattr(weight, "to_local") else weight
        if not own.isfinite().all():
            bad.append(own_name(name))
    found = gather(bad) if isinstance(model, FSDPModule) else [bad]
    return sorted(set().union(*found))


def own_name(name):
    """Return the name that a weight has in a model without adapters."""
    words = name.removeprefix("base_model.model.").split(".")
    return ".".join(word for word in words if word != "base_layer")


@torch.no_grad()
def check_documents(args, model):
    """Refuse --separate-documents with a model in which a document's logits depend on another."""
    if args.end is None:
        return
    first = torch.tensor([[1, 2, args.end, 3, 4], [3, 1, args.end, 3, 4]], device=model.device)
    with torch.autocast(model.device.type, torch.bfloat16, args.precision == "bf16"):
        one, other = model(first, **options(args, first)).logits.float()[:, -2:]
    # In a mixture of experts all tokens share a matrix product, which GPUs round to TF32.
    rounding = 1e-4 if model.device.type == "cpu" and args.precision != "bf16" else 0.02
    if (one - other).abs().max() > rounding * one.abs().max():
        wrong = f"{type(model).__name__} does not keep documents apart by their positions"
        fail(f"--model-dir {args.model_dir}: {wrong}: leave --separate-documents out")


def one_line(error):
    """Return the first line of an error's message, which may have many."""
    line, _, _ = str(error).strip().partition("\n")
    return line or repr(error)


def checksum(tensors):
    """Return a checksum of tensors.

    A checkpoint of adapters is worth nothing with another base model or text.
    """
    found = 0
    for tensor in tensors:
        content = tensor.detach().flatten().contiguous().view(torch.uint8).numpy()
        found = zlib.crc32(content, found)
    return f"{found:08x}"


def last_part(name):
    """Return the last part of a layer's name, such as q_proj."""
    return name.split(".")[-1]


def target_modules(args, model):
    """Return --target-modules as peft expects it.

    Refuse names that none of the model's linear layers has.
    """
    layers = dict(model.named_modules())
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)  # the second is GPT-2's
    linear = {name: layer.weight for name, layer in layers.items() if isinstance(layer, kinds)}
    # check_logits has frozen what takes no part.
    frozen = [name for name, weight in linear.items() if not weight.requires_grad]
    # peft refuses two of these, and of the third Mamba takes the weight alone, past the adapter.
    has_mamba = re.search("mamba|jamba|falcon_h1|nemotron_h", model.config.model_type)
    mamba = {"out_proj", "conv1d", "dt_proj"} if has_mamba else set()
    # A classifier's head is trained without an adapter.
    head = model.get_output_embeddings() if args.classes is None else model.score
    known = {last_part(name) for name in linear} - mamba - ({"score"} if args.classes else set())
    names = {name.strip() for name in args.target_modules.split(",")}
    if args.target_modules == "all-linear":
        if not frozen and not mamba:
            return args.target_modules
        names = known - {last_part(name) for name, layer in layers.items() if layer is head}
    unknown = sorted(names - known)
    if unknown:
        has = f"the model in {args.model_dir} has {', '.join(sorted(known))}"
        fail(f"--target-modules {', '.join(unknown)}: {has}")
    chosen = {name: weight for name, weight in linear.items() if last_part(name) in names}
    embedding = model.get_input_embeddings().weight
    if args.merge and any(weight is embedding for weight in chosen.values()):
        wrong = "--target-modules with the output layer, whose weight is also the embedding's"
        fail(f"{wrong}: leave it out with --merge")
    if frozen:
        return [name for name, weight in chosen.items() if weight.requires_grad]
    return sorted(names)


def write_folder(folder, *parts):
    """Write what parts, such as a model, save, into a folder: all of it or nothing."""
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f"{folder.name}.{os.getpid()}.old")
    # A run that was killed while it wrote has left these.
    left = [*folder.parent.glob(f"{folder.name}.*.tmp")]
    left += folder.parent.glob(f"{folder.name}.*.old") if folder.exists() else []
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    try:
        for part in parts:
            part.save_pretrained(temporary)
        for path in filter(Path.is_file, temporary.rglob("*")):
            # safetensors makes files that only their owner can read.
            path.chmod(temporary.stat().st_mode & 0o666)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        wrong = f"cannot write {folder} ({error}): is the disk full, or your quota?"
        fail(f"{wrong} Free some space, then use --resume")
    shutil.rmtree(old, ignore_errors=True)


def save(args, model, tokenizer, folder):
    """Save the adapters as peft does, or all weights; with --merge also a model without these.

    Rank 0 writes; all processes call this. Beside a classifier's adapters are what names its
    classes, and a tokenizer that can pad.
    """
    with others_waiting():
        if dist.get_rank() == 0:
            write_model(args, model, tokenizer, folder)


def write_model(args, model, tokenizer, folder):
    """Write what `save` says."""
    parts = [model]
    if args.classes and not args.full:
        parts.append(model.config)
    if args.classes or args.full:
        parts.append(tokenizer)
    write_folder(folder, *parts)
    if args.merge:
        merged = model.merge_and_unload()  # W + (alpha / rank) B A takes the place of W
        write_folder(args.output_dir / "merged", merged, tokenizer)


def print_sizes(args, model):
    """Print on rank 0 how many weights are trained, and how much a step therefore exchanges.

    Before that it prints what classes there are, how many samples were cut off, and what they lack.
    """
    if dist.get_rank() > 0:
        return
    if args.classes:
        more = ", ..." if len(args.classes) > 10 else ""
        print(f"{len(args.classes)} classes: {', '.join(args.classes[:10])}{more}")
    if args.cut_off:
        print(args.cut_off)
    if args.begin:
        print(f"note: generate.py begins a prompt with {args.begin}, and no sample begins with it")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    count = sum(weight.numel() for weight in trained)
    item = trained[0].element_size()
    size = sum(weight.numel() for weight in model.parameters())
    if args.shard:
        own = sum(weight.to_local().numel() for weight in model.parameters())
        print(f"{size:,} weights, {count:,} are trained: this process holds {own:,} of all")
        return
    full = ""
    if not args.full:
        size -= count  # the adapters are no part of the model
        full = f", {count / size:.2%} of the {size * item / 1e6:.3f} MB of --full"
    exchange = f"a step exchanges {count * item / 1e6:.3f} MB{full}"
    print(f"{size:,} weights, {count:,} are trained: {exchange}")
