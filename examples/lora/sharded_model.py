"""A model of Hugging Face's format of which each process holds a part: what --shard needs beside.

Each process reads its own rows of each weight from the files of --model-dir, and writes no more
than one layer at a time. train.py calls this. It is no part of the lesson.
"""

import contextlib
import ctypes
import functools
import json
import math
import shutil
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

import model_files
import plumbing
import text_data
from plumbing import checkpoints, fail, gather, others_waiting, rank, shards

# Bytes of a weight that are read at a time for its checksum.
PIECE = 2**26
# What reads a whole model: some have to be written anew, once.
LOAD = "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto')"
# What a checkpoint has of the run: weights that are frozen stay as they were.
STATE = ("model", "optimizer")
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
# without_values() notes here where each weight is: by its name in the model, the file, the name
# there, and the shape.
stored = {}


def return_memory():
    """Have glibc return blocks of 1 MiB or more to the kernel as soon as they are freed.

    plumbing has it keep them for the next step, which is faster. Gathered layers come and go in
    many sizes: what is kept of them was more than the whole model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


# Before the model is shared out


def without_values(args, dtype):
    """Return the model in --model-dir with names and shapes of its weights, which take no memory.

    Its buffers, such as the frequencies of a rotary embedding, have values: no file has them. What
    the model is, is noted in `args` and in `stored`. A folder with another model is refused.
    """
    shards.ignore_warnings()
    return_memory()
    folder = args.model_dir
    if args.classes:
        wrong = "--shard cannot train a classifier, whose new head is in none of the model's files"
        fail(f"{wrong}: leave --shard out")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **model_files.LOCAL)
        config.name_or_path = plumbing.original(folder)  # adapters say of what model they are
        with each_new_weight(to_meta_device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        stored.clear()
        stored.update(find_weights(folder, model))
    except Exception as error:  # it depends on which file is missing or damaged
        wrong = f"its model cannot be loaded ({model_files.one_line(error)})"
        fail(f"--model-dir {folder}: {wrong}: copy it there again")
    check_kind(folder, model, dtype)
    check_names(folder, model)
    model_files.check_embeddings(folder, model, args.largest_token)
    model_files.check_context(args, model)
    args.model = type(model).__name__
    args.base = checksum_of_files(args, model)
    return model


@contextlib.contextmanager
def each_new_weight(function):
    """Have each weight that a layer gets in this context be function(layer, name, weight).

    Where the function returns None, the weight stays as it is.
    """
    hook = register_module_parameter_registration_hook(function)
    try:
        yield
    finally:
        hook.remove()


def to_meta_device(layer, name, weight):
    """Return a weight that a layer gets on the meta device, which has no memory."""
    if weight.is_meta:
        return weight  # it is that of another layer, such as the embedding's
    return torch.nn.Parameter(weight.to("meta"), weight.requires_grad)


def find_weights(folder, model):
    """Return where each weight of a model is: its file, its name in there, and its shape.

    Names in a file may be older than those of the model. transformers knows both.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    paths = [folder / name for name in sorted(model_files.weight_files(folder))]
    paths = [single] if single.exists() else paths
    if not paths:
        wrong = f"--shard reads {single.name} or {index.name}, and there is neither"
        write = f"{LOAD}.save_pretrained(FOLDER)"
        fail(f"--model-dir {folder}: {wrong}: where the model fits, {write} makes them of *.bin")
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    names = model.state_dict()
    found = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                prefix = model.base_model_prefix
                name, changed = rename_source_key(key, renamings, converters, prefix, names)
                if name not in names and key in names:
                    name, changed = key, None
                if changed and name in names:
                    refuse_other_form(folder, key)
                found[name] = (path, key, tuple(file.get_slice(key).get_shape()))
    return found


def refuse_other_form(folder, key):
    """Refuse weights that transformers has in another form than the files, such as experts."""
    wrong = f"--shard cannot read {key}, which transformers puts together with others"
    write = f"{LOAD}.save_pretrained(NEW, save_original_format=False)"
    fail(f"--model-dir {folder}: {wrong}: where the model fits, {write} does so once")


def check_kind(folder, model, dtype):
    """Refuse models that --shard cannot share out."""
    where = f"--model-dir {folder}: --shard cannot share out this {type(model).__name__}"
    numbers = [name for name, weight in model.named_parameters() if not weight.dim()]
    if numbers:
        fail(f"{where}: {numbers[0]} is a single number: leave --shard out")
    if not parts(model):
        fail(f"{where}: transformers does not say what its layers are: leave --shard out")
    if dtype == torch.bfloat16 and model._keep_in_fp32_modules_strict:
        fail(f"{where}: some of its weights have to stay in fp32: use --precision fp32")


def check_names(folder, model):
    """Refuse a model of whose weights some are missing, or of another shape."""
    for other, name in tied_weights(model):
        if name not in stored and other in stored:
            stored[name] = stored.pop(other)
    names = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    other = [name for name in stored if names.get(name, stored[name][2]) != stored[name][2]]
    weights = {name for name, _ in model.named_parameters()}
    model_files.check_weights(folder, names, other, weights - stored.keys(), stored.keys() - names)
    for name in stored.keys() - names:
        del stored[name]  # such as a buffer that transformers computes by now


def tied_weights(model):
    """Return pairs of names that one weight has: of each, the last is that of named_parameters."""
    weights = {name for name, _ in model.named_parameters()}
    pairs = model.all_tied_weights_keys.items()
    return [(source, name) if name in weights else (name, source) for name, source in pairs]


def checksum_of_files(args, model):
    """Return a checksum of the model's weights as they are in the files.

    Each process reads some pieces of them, whose size does not depend on how many processes there
    are. Of tied weights that are in the files twice, both have to be the same.
    """
    pieces = []
    for name, (_, _, shape) in sorted(stored.items()):
        rows = max(1, PIECE // (4 * math.prod(shape[1:])))
        count = shape[0] if shape else 1
        pieces += [(name, start, start + rows) for start in range(0, count, rows)]
    own = {}
    for piece in pieces[rank() :: args.world_size]:
        own[piece] = model_files.checksum([read(*piece)])
    found = {}
    for (name, start, _), value in sorted(item for part in gather(own) for item in part.items()):
        found.setdefault(name, []).append((start, value))
    for other, name in tied_weights(model):
        if other in stored and found[other] != found[name]:
            wrong = f"{other} and {name} differ, which config.json says to be one weight"
            fail(f"--model-dir {args.model_dir}: {wrong}: set tie_word_embeddings to false there")
        stored.pop(other, None)
        found.pop(other, None)
    return f"{zlib.crc32(repr(sorted(found.items())).encode()):08x}"


def read(name, start=None, end=None):
    """Return some rows of a weight, or all of it, as they are in its file.

    The file is opened anew, so that the pages of others do not count as this process's memory.
    """
    path, key, shape = stored[name]
    with safe_open(path, "pt") as file:
        return file.get_slice(key)[start:end] if shape else file.get_tensor(key)


@contextlib.contextmanager
def first_values():
    """Yield a dict of the weights that layers get in this context, by layer and name.

    peft draws an adapter's values and then moves it to the device of the model. On the meta device
    they would be lost.
    """
    values = {}

    def note(layer, name, weight):
        if not weight.is_meta:
            values[layer, name] = weight

    with each_new_weight(note):
        yield values


def parts(model):
    """Return the parts of a model that are gathered one after another: its layers above all.

    Embedding and output layer are two more, unless they are one weight. That has to be gathered
    with what is in no part.
    """
    kinds = set(model._no_split_modules or ())
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    found = []
    inside = set()
    for layer in model.modules():
        inner = set(layer.modules())
        if type(layer).__name__ in kinds and layer not in inside and embedding not in inner:
            found.append(layer)
            inside |= inner
    tied = head is None or head.weight is embedding.weight
    return found if tied or not found else [*found, embedding, head]


def options(args):
    """Return what fully_shard needs: among whom, and in which type, weights are shared out.

    With --full and bf16, weights are gathered as bf16, since autocast would turn them into it, and
    gradients are summed in fp32.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {"mesh": dist.init_device_mesh(device, (args.world_size,))}
    if args.full and args.precision == "bf16":
        types = (torch.bfloat16, torch.float32)
        found["mp_policy"] = MixedPrecisionPolicy(*types, cast_forward_inputs=False)
    return found


# The model that is shared out


@torch.no_grad()
def read_weights(args, model, values):
    """Have each process read its rows of each weight, and check the model; return it.

    `values` are the adapters' first values: see first_values().
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    for name, buffer in model.named_buffers():
        in_file = model_files.own_name(name) in stored
        buffer.copy_(read(model_files.own_name(name)) if in_file else buffers[name])
    for name, weight in model.named_parameters():
        own = weight.to_local()
        start = dist.get_rank() * math.ceil(len(weight) / args.world_size)  # as torch.chunk cuts
        layer, _, last = name.rpartition(".")
        value = values.get((model.get_submodule(layer), last))
        if value is not None:
            own.copy_(value[start : start + len(own)])
        elif len(own):
            own.copy_(read(model_files.own_name(name), start, start + len(own)))
    with torch.enable_grad():
        unused = model_files.check_logits(args.model_dir, model, args.precision == "bf16")
    model_files.check_documents(args, model)
    model.reshard()  # what is in no part
    if unused:
        wrong = f"{type(unused[0]).__name__}, takes no part in reading text"
        fail(f"--model-dir {args.model_dir}: a part of the model, {wrong}: leave --shard out")
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def fill_up(args, test_set, batches):
    """Yield the batches and, where another process has one more, one whose targets do not count.

    All have to call the model equally often: each time its weights are gathered from all of them.
    """
    most = math.ceil(len(test_set) / args.world_size / args.batch_size)
    count = 0
    for batch in batches:
        count += 1
        yield batch
    for _ in range(count, most):
        tokens, labels = test_set[[0]]
        yield tokens, torch.full_like(labels, text_data.IGNORED)


# Its checkpoint, and what is saved at the end


def state(model, optimizer):
    """Return what is trained, and the optimizer's state: of each, this process's part."""
    return dict(zip(STATE, get_state_dict(model, optimizer, options=TRAINED), strict=True))


def set_state(model, optimizer, loaded):
    """Set what state() returns."""
    weights, found = (loaded[name] for name in STATE)
    names = {"model_state_dict": weights, "optim_state_dict": found}
    set_state_dict(model, optimizer, **names, options=TRAINED)


def find_checkpoint(args, model):
    """Return, in each process, the checkpoint that rank 0 has found, or None.

    With --shard it is what run.json says. An error, such as a checkpoint of the other kind, ends
    all processes.
    """
    found = None
    if rank() == 0:
        read_checkpoint = shards.read_checkpoint if args.shard else plumbing.read_checkpoint
        found = other_checkpoint(args) or read_checkpoint(args, model)
    if not args.shard:
        return plumbing.share_checkpoint(args, found)
    answer = [found]  # a list, since broadcast_object_list fills it in
    dist.broadcast_object_list(answer)
    return plumbing.accept(answer[0])


def other_checkpoint(args):
    """Return an error message if the output folder has a checkpoint of the other kind, or None."""
    if args.shard:
        path = args.output_dir / checkpoints.CHECKPOINT
        advice = f"{path} is from a run without --shard: leave --shard out to continue it"
    else:
        path = args.output_dir / shards.CHECKPOINT
        advice = f"{path} is from a run with --shard: add --shard to continue it"
    return f"{advice}, or choose another --output-dir" if path.exists() else None


@torch.no_grad()
def save(args, model, tokenizer, path):
    """Save the adapters as peft does, or all weights layer by layer; all processes call this."""
    model.reshard()  # what is in no layer is still gathered after an evaluation
    if args.full:
        parts_to_save = [functools.partial(write_layers, args, model), tokenizer.save_pretrained]
    else:
        weights = model.named_parameters()
        trained = [(name, weight) for name, weight in weights if weight.requires_grad]
        state = {name: weight.full_tensor().cpu() for name, weight in trained}
        parts_to_save = [functools.partial(model.save_pretrained, state_dict=state)]
    with others_waiting():
        if rank() == 0:
            writers = [SimpleNamespace(save_pretrained=function) for function in parts_to_save]
            model_files.write_folder(path, *writers)
        elif args.full:
            write_layers(args, model, None)


def write_layers(args, model, path):
    """Write config.json, and the weights as they were read: under their names, a file for a layer.

    All processes gather each weight, and the one with a path writes it.
    """
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    files = {}
    for name in stored:
        files.setdefault(layer_of(name), []).append(name)
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, names in enumerate(files.values(), 1):
        whole = {}
        for name in names:
            weight = weights[name]
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            if path:
                whole[stored[name][1]] = weight.cpu().contiguous()
        if path:
            path.mkdir(parents=True, exist_ok=True)
            file = f"model-{number:05}-of-{len(files):05}.safetensors"
            save_file(whole, path / file, {"format": "pt"})
            index["metadata"]["total_size"] += sum(weight.nbytes for weight in whole.values())
            index["weight_map"] |= dict.fromkeys(whole, file)
    if path:
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(path)
        settings = args.model_dir / "generation_config.json"
        if settings.exists():
            shutil.copyfile(settings, path / settings.name)


def layer_of(name):
    """Return the layer that a weight belongs to: its name up to the first number, or its module."""
    words = name.split(".")
    numbers = [place for place, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1] if numbers else words[:-1])
