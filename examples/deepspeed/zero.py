"""What ZeRO needs besides the training: its settings, equal numbers of batches, whole weights."""

import json
from pathlib import Path

import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import longrun


def read_settings(args):
    """Return DeepSpeed's settings: those of its file, where no flag of train.py replaces them.

    All processes call this after they have joined, since the batch size depends on their number.
    args then contains the values that DeepSpeed derives from the settings.
    """
    # In a job train.py is a copy, and the file beside it is a copy, too.
    path = Path(__file__).parent / args.deepspeed_config
    try:
        config = json.loads(path.read_text())
        config["train_micro_batch_size_per_gpu"] = args.batch_size
        if args.global_batch:  # DeepSpeed divides it by the number of processes
            config["train_batch_size"] = args.global_batch
            del config["train_micro_batch_size_per_gpu"]
        if args.lr is not None:
            config["optimizer"]["params"]["lr"] = args.lr
        args.lr = config["optimizer"]["params"]["lr"]
        if args.zero_stage is not None:
            config["zero_optimization"]["stage"] = args.zero_stage
        if args.precision == "bf16":
            config["bf16"] = {"enabled": True}
        checked = deepspeed.DeepSpeedConfig(config)  # raises an error if a setting is wrong
    except Exception as error:
        longrun.fail(f"{path.name}: {' '.join(repr(error).split())}")
    args.global_batch = checked.train_batch_size
    args.batch_size = checked.train_micro_batch_size_per_gpu
    args.gradient_accumulation_steps = checked.gradient_accumulation_steps
    args.zero_stage = int(checked.zero_optimization_stage)
    args.precision = "bf16" if checked.bfloat16_config.enabled else args.precision
    # Only the same number of processes, at the same stage, can read a checkpoint: see sharded.py.
    args.divided = f"{longrun.size} processes at ZeRO stage {args.zero_stage}"
    return config


def equally_often(loader, limit):
    """Yield each batch and True; then the last batch and False, until all processes are done.

    At stage 3 each process has a part of the weights, so all must call the model equally often.
    """
    count, batches, batch = max(longrun.gather(len(loader))), iter(loader), None
    for number in range(min(count, limit or count)):
        batch = next(batches, batch)
        yield batch, number < len(loader)


def whole_weights(args, engine, progress):
    """Return a state dict of the whole model, in fp32, on the CPU; rank 0 alone may call this."""
    if args.zero_stage == 0:
        weights = engine.module.cpu().state_dict()
    else:  # those of the last checkpoint; zero_to_fp32.py in its folder does the same
        folder, name = args.output_dir / "checkpoint", progress["folder"]
        weights = get_fp32_state_dict_from_zero_checkpoint(folder, name)
    return {name: w.float() if w.is_floating_point() else w for name, w in weights.items()}
