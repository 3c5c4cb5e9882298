"""DeepSpeed's file of settings: what in it is refused, and what comes from the command line."""

import contextlib
import json
import sys
from pathlib import Path

from . import checks
from .launchers import fail, rank


def read_config(path):
    """Return DeepSpeed's config file as a dict with all sections of which train.py sets values."""
    folder = Path(sys.argv[0]).parent
    # In a job that is a copy of the program, which requeue.sh has made, with this file.
    kept = folder / path if (folder / ".commit").exists() else path
    try:
        text = (kept if kept.exists() else path).read_text()
        config = json.loads(text, parse_constant=refuse_constant)
    except OSError as error:
        fail(f"cannot read --deepspeed_config {path} ({error.strerror})")
    except ValueError as error:
        fail(f"{path} is not valid JSON: {error}")
    for name in ("zero_optimization", "bf16", "optimizer"):
        if not isinstance(config, dict) or not isinstance(config.setdefault(name, {}), dict):
            fail(f"{path}: {name} must be an object: {{...}}")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if name in config:
            reason = "it follows from --batch-size and gradient_accumulation_steps"
            fail(f"{path}: remove {name}: {reason}")
    clipping = config.get("gradient_clipping", 0)
    if type(clipping) not in (int, float) or clipping < 0:
        fail(f"{path}: gradient_clipping must be 0 (none) or more, not {clipping!r}")
    for name in ("optimizer", "scheduler"):
        section = config.get(name) or {}
        values = (section.get("params") or {}) if isinstance(section, dict) else None
        if not isinstance(values, dict):
            fail(f"{path}: {name} must be an object, and its params, too: {{...}}")
        auto = [key for key, value in values.items() if value == "auto" and key != "lr"]
        if auto:
            reason = 'only a Trainer of transformers has a value for "auto"'
            fail(f"{path}: write values for {', '.join(auto)} of the {name}: {reason}")
    lr = (config["optimizer"].get("params") or {}).get("lr", "auto")
    if lr != "auto":
        fail(f"{path}: remove lr of the optimizer, and give train.py --lr {lr}")
    if "type" not in config["optimizer"]:
        fail(f"{path}: optimizer has no type, such as AdamW")
    steps = config.get("gradient_accumulation_steps", 1)
    if type(steps) is not int or steps < 1:
        fail(f"{path}: gradient_accumulation_steps must be 1 or more, not {steps!r}")
    return config


def refuse_constant(text):
    """Raise ValueError for NaN and Infinity, which Python's reader of JSON lets through."""
    raise ValueError(f"it has {text}, which is no number")


@contextlib.contextmanager
def config_errors(args):
    """Turn what DeepSpeed raises for a config that cannot work into a line that names the file."""
    import torch

    try:
        yield
    except Exception as error:
        message = " ".join(f"{error} {error.__cause__ or ''}".split())
        other = isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError))
        if other or "gloo" in message:
            raise  # not a mistake in the config
        if "failed to map segment" in message:
            message += ": set TORCH_EXTENSIONS_DIR to a folder that is not mounted with noexec"
        elif "build" in message:
            login = "build it on a login node (DS_BUILD_CPU_ADAM=1, see README.md)"
            message += f": install ninja and g++, or {login}"
        fail(f"{args.deepspeed_config}: {message}")


def note_config(args, engine):
    """Set in args what the engine uses, from the command line or from the config file."""
    args.zero_stage = int(engine.zero_optimization_stage())
    args.optimizer = engine.optimizer_name()
    args.gradient_accumulation_steps = engine.gradient_accumulation_steps()
    args.has_scheduler = engine.lr_scheduler is not None  # the file's, which sets the learning rate
    if args.has_scheduler and (args.scale_lr or args.warmup_steps):
        wrong = "has a scheduler, with which --scale-lr and --warmup-steps have no effect"
        fail(f"{args.deepspeed_config}: it {wrong}: leave out one or the other")
    if args.zero_stage in (1, 2):
        checks.count_gradients(engine.module)
    args.precision = "fp32"
    if engine.bfloat16_enabled():
        args.precision = "bf16"
    elif engine.fp16_enabled():
        args.precision = "fp16"


def print_config(args, lr):
    """Print which settings come from where, on rank 0."""
    if rank() == 0:
        where = f"{args.deepspeed_config}: ZeRO stage {args.zero_stage}, {args.precision}"
        given = f"micro batch {args.batch_size}"
        if args.has_scheduler:
            where += ", learning rate by its scheduler"
        else:
            given += f" and learning rate {lr:g}"
        print(f"{where}; {given} from the command line")
