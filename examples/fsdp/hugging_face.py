"""Turn the model that train.py has left into one that `transformers` loads, and back.

python hugging_face.py export --output-dir output --folder gpt
python hugging_face.py import --output-dir imported --folder gpt
"""

import argparse
import copy
import json
import os
import shutil
from pathlib import Path

import torch

from common.models import TinyGPT

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads and writes local folders only
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# TinyGPT is a GPT-2 under other names, but for three layers where GPT-2 has one, and for its exact
# GELU.
NAMES = {"token": "wte", "position": "wpe", "norm": "ln_f"}
BLOCK = {"norm1": "ln_1", "norm2": "ln_2", "proj": "attn.c_proj"}
BLOCK |= {"mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"}
QUERY_KEY_VALUE = "attn.c_attn"


def transposed(weight):
    """Return a weight as the other model keeps it.

    Of a linear layer one has (inputs, outputs), and the other has (outputs, inputs).
    """
    return weight.T if weight.dim() == 2 else weight


def export_weights(weights, layers):
    """Return GPT-2's weights, made of TinyGPT's."""
    found = {}
    for kind in ("weight", "bias"):
        for ours, theirs in NAMES.items():
            if f"{ours}.{kind}" in weights:
                found[f"transformer.{theirs}.{kind}"] = weights[f"{ours}.{kind}"]
        for number in range(layers):
            block, other = f"blocks.{number}", f"transformer.h.{number}"
            for ours, theirs in BLOCK.items():
                found[f"{other}.{theirs}.{kind}"] = transposed(weights[f"{block}.{ours}.{kind}"])
            parts = [weights[f"{block}.{name}.{kind}"] for name in ("query", "key", "value")]
            found[f"{other}.{QUERY_KEY_VALUE}.{kind}"] = transposed(torch.cat(parts))
    found["lm_head.weight"] = weights["head.weight"]
    return {name: weight.contiguous() for name, weight in found.items()}


def import_weights(weights, layers):
    """Return TinyGPT's weights, made of GPT-2's: what export_weights has done, undone."""
    found = {}
    for kind in ("weight", "bias"):
        for ours, theirs in NAMES.items():
            if f"transformer.{theirs}.{kind}" in weights:
                found[f"{ours}.{kind}"] = weights[f"transformer.{theirs}.{kind}"]
        for number in range(layers):
            block, other = f"blocks.{number}", f"transformer.h.{number}"
            for ours, theirs in BLOCK.items():
                found[f"{block}.{ours}.{kind}"] = transposed(weights[f"{other}.{theirs}.{kind}"])
            parts = transposed(weights[f"{other}.{QUERY_KEY_VALUE}.{kind}"]).chunk(3)
            for ours, part in zip(("query", "key", "value"), parts, strict=True):
                found[f"{block}.{ours}.{kind}"] = part
    found["head.weight"] = weights["transformer.wte.weight"]
    return {name: weight.contiguous() for name, weight in found.items()}


def byte_tokenizer():
    """Return a tokenizer whose token N is the byte N of the text in UTF-8, as train.py reads it."""
    # The alphabet has a letter for each byte: its own, where that can be printed.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    bytes_left = [byte for byte in range(256) if chr(byte) not in tokens]
    letters_left = [letter for letter in alphabet if ord(letter) >= 256]
    tokens |= dict(zip(letters_left, bytes_left, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"tokenizer_object": tokenizer, "clean_up_tokenization_spaces": False}
    return transformers.PreTrainedTokenizerFast(**options)


@torch.no_grad()
def check_same(ours, theirs):
    """Raise ValueError if two models have other logits: one has something that the other lacks."""
    tokens = torch.arange(min(8, ours.context)) % ours.token.num_embeddings
    # In fp64 rounding hides nothing.
    one = copy.deepcopy(ours).double().eval()(tokens[None])
    other = copy.deepcopy(theirs).double().eval()(tokens[None]).logits
    if not one.isfinite().all():
        raise ValueError("its outputs are no numbers")
    if (one - other).abs().max() > 1e-5 * one.abs().max():
        wrong = "TinyGPT and GPT-2 with its weights have other outputs"
        raise ValueError(f"{wrong}: it has settings that one of them lacks")


def export_model(output_dir, target):
    """Write the model in an output folder of train.py as a folder that `transformers` loads."""
    shape = json.loads((output_dir / "model.json").read_text())
    weights = torch.load(output_dir / "model.pt", weights_only=True)
    dtype = weights["token.weight"].dtype
    config = transformers.GPT2Config(
        vocab_size=len(weights["token.weight"]),
        n_positions=shape["context"],
        n_embd=shape["width"],
        n_layer=shape["layers"],
        n_head=shape["heads"],
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).to(dtype)
    model.load_state_dict(export_weights(weights, shape["layers"]))
    ours = TinyGPT(**shape).to(dtype)
    ours.load_state_dict(weights)
    check_same(ours, model)
    model.save_pretrained(target)
    if config.vocab_size == 256:  # otherwise the tokens are your own
        byte_tokenizer().save_pretrained(target)


def import_model(folder, target):
    """Write the GPT-2 in a folder as model.pt and model.json, as train.py does.

    Raise ValueError if TinyGPT cannot be it.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    known = config.model_type == "gpt2" and config.activation_function == "gelu"
    if not known or config.n_inner not in (None, 4 * config.n_embd):
        wrong = "its config.json is not of a GPT-2 with the exact gelu"
        raise ValueError(f"{wrong}, as `export` writes it")
    load = transformers.GPT2LMHeadModel.from_pretrained
    model, loaded = load(folder, local_files_only=True, dtype="auto", output_loading_info=True)
    if loaded["missing_keys"]:  # these would be random
        raise ValueError(f"it has no weights for {min(loaded['missing_keys'])}")
    in_layers = [name for name in loaded["unexpected_keys"] if ".h." in name]
    further = [name for name in in_layers if "attn.bias" not in name]
    if further:
        wrong = f"it has weights of further layers, such as {further[0]}"
        raise ValueError(f"{wrong}, which its config.json does not name")
    shape = {"context": config.n_positions, "width": config.n_embd, "heads": config.n_head}
    shape |= {"layers": config.n_layer, "vocab": config.vocab_size}
    weights = import_weights(model.state_dict(), config.n_layer)
    ours = TinyGPT(**shape).to(model.dtype)
    ours.load_state_dict(weights)
    check_same(ours, model)
    target.mkdir(parents=True)
    torch.save(weights, target / "model.pt")
    (target / "model.json").write_text(json.dumps(shape))


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("direction", choices=("export", "import"), help="from --output-dir to --folder, or back")
    add("--output-dir", type=Path, required=True, help="folder with model.pt and model.json")
    add("--folder", type=Path, required=True, help="folder in Hugging Face's format")
    args = parser.parse_args()
    convert = export_model
    source = args.output_dir
    target = args.folder
    if args.direction == "import":
        convert = import_model
        source = args.folder
        target = args.output_dir
    if target.exists():
        parser.error(f"{target} is there already: nothing was written")
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        convert(source, temporary)
        os.replace(temporary, target)
    except Exception as error:  # a damaged file can raise almost anything
        line, _, _ = str(error).strip().partition("\n")
        parser.error(f"{source} cannot be converted: {line or repr(error)}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{target} is {source} in the other format")


if __name__ == "__main__":
    main()
