"""What the command line asks for: which numbers cannot work, and each process's part of a batch."""

import itertools
import os
import re
import sys
import weakref
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from datetime import timedelta
from pathlib import Path

from . import checks
from .launchers import fail, rank

# By optimizer, its first group, and the rates that set_learning_rate has given to all groups.
RATES = weakref.WeakKeyDictionary()


def arguments(description, precisions):
    """Return a parser with the flags that all examples have.

    --help shows the first paragraph of `description`: it would run several together. `precisions`
    are the choices of --precision, of which the first is the default.
    """
    first, _, _ = (description or "").partition("\n\n")
    parser = ArgumentParser(description=first, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=5, help="total number, including those before a resume")
    add("--batch-size", type=int, default=64, help="samples per batch of each process")
    add("--global-batch", type=int, metavar="N", help="samples of a step, of all processes")
    add("--lr", type=float, default=1e-3, help="learning rate")
    words = "multiply --lr by the number of processes, or its square root"
    add("--scale-lr", choices=("linear", "sqrt"), help=words)
    words = "steps in which the learning rate rises"
    add("--warmup-steps", type=int, default=0, help=words)
    add("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    words = "bf16: mixed precision; fp64: for tests"
    add("--precision", choices=precisions, default=next(iter(precisions)), help=words)
    words = "seconds that a step, or the start, may take"
    add("--timeout", type=int, default=300, help=words)
    words = "folder for everything the run writes"
    add("--output-dir", type=Path, default="output", help=words)
    words = "continue from the checkpoint, if there is one"
    add("--resume", action="store_true", help=words)
    return parser


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run.

    That is --lr, multiplied as --scale-lr says ("linear": Goyal et al. 2017), after a linear
    warm-up.
    """
    processes = getattr(args, "groups", args.world_size)
    factor = 1
    if args.scale_lr == "linear":
        factor = processes
    elif args.scale_lr == "sqrt":
        factor = processes**0.5
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def set_learning_rate(args, optimizer, step, factor=1):
    """Set the rate of a step: learning_rate() times `factor`, which is for a schedule of yours.

    Of PyTorch's optimizers each group gets that, times what the group has as "lr_scale". A rate
    that something else has set would have no effect, so it ends the run.
    """
    rate = learning_rate(args, step) * factor
    if not hasattr(optimizer, "param_groups"):  # Keras has one rate; with a schedule it is a tensor
        before = optimizer.learning_rate
        right = hasattr(before, "assign") and (before == args.lr or before == rate)
        if step == 0 and not right:
            refuse_rate(f"the optimizer has a schedule, or the learning rate {float(before):g}")
        before.assign(rate)
        return
    groups = optimizer.param_groups
    first, known = RATES.get(optimizer, (None, []))
    if first is not groups[0] and step:  # load_state_dict() makes new groups, with rates of then
        known = [group["lr"] for group in groups]
    for number, group in enumerate(groups):
        if step == 0 and "initial_lr" in group:
            refuse_rate("the optimizer has a scheduler of PyTorch")
        if group["lr"] != (known[number] if number < len(known) else args.lr):
            refuse_rate(f"group {number} of the optimizer has the learning rate {group['lr']}")
        group["lr"] = rate * group.get("lr_scale", 1)
    RATES[optimizer] = groups[0], [group["lr"] for group in groups]


def refuse_rate(wrong):
    """End the run because of a rate, or a schedule, that would have no effect."""
    advice = 'give the optimizer args.lr, a group its own rate by "lr_scale", and a schedule to'
    page = "docs/batch-size-and-learning-rate.md of the repository"
    advice = f"{advice} set_learning_rate, as its factor: see {page}"
    fail(f"{wrong}, which set_learning_rate replaces: {advice}")


def check_args(parser, args):
    """Refuse numbers that cannot work, and more processes than GPUs."""
    check_numbers(parser, args)
    torch = sys.modules.get("torch")
    gpus = torch.cuda.device_count() if torch else 0
    if 0 < gpus < getattr(args, "processes", 1):
        node = f"{os.uname().nodename}, which has {gpus} GPUs"
        parser.error(f"{args.processes} processes on {node}: start one for each")


def check_numbers(parser, args):
    """Refuse numbers that cannot work."""
    # A seed is what each generator takes, also NumPy's and Keras's. A timeout in milliseconds must
    # fit in 32 bits: that is 23 days.
    largest = {"seed": 2**32 - 1, "timeout": 2_000_000, "workers": max(64, os.cpu_count())}
    may_be_0 = ("warmup_steps", "workers", "zero_stage", "seed")
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        flag = f"--{name.replace('_', '-')}"
        most = largest.get(name, 2**31 - 1 if type(value) is int else float("inf"))
        least = 0 if type(value) is float or name in may_be_0 else 1
        if not least <= value < float("inf"):
            parser.error(f"{flag} must be {least} or more, not {value}")
        if value > most:
            parser.error(f"{flag} must be at most {most}, not {value}")
    if getattr(args, "max_grad_norm", None) == 0:
        advice = "leave it out, and gradients are not clipped"
        parser.error(f"--max-grad-norm must be above 0, not 0: {advice}")


def steps_or_minutes(text):
    """Return a number of steps, from "500", or a timedelta, from "10min".

    Raises ArgumentTypeError, which argparse prints, for other text.
    """
    minutes = re.fullmatch(r"(\d{1,6}(\.\d{1,6})?)min", text)
    if minutes and float(minutes[1]):
        return timedelta(minutes=float(minutes[1]))
    if re.fullmatch(r"\d{1,18}", text) and int(text):
        return int(text)
    wanted = "1 or more steps, such as 500, or minutes, such as 10min"
    raise ArgumentTypeError(f"must be {wanted}, not {text!r}")


def share_batch(args, batches=None):
    """Have each process take its share of --global-batch; without that, set it to what comes out.

    A process takes its share in as few batches of at most --batch-size as divide it, where the
    example can accumulate gradients, and otherwise in one. Batches of less than half of
    --batch-size are refused: they take far longer. `batches` is their number where something else
    than a flag says it, such as DeepSpeed's file.
    """
    processes = getattr(args, "groups", args.world_size)
    accumulates = batches is None and hasattr(args, "gradient_accumulation_steps")
    fixed = batches or 1
    if args.global_batch is None:
        parts = args.gradient_accumulation_steps if accumulates else fixed
        args.global_batch = processes * args.batch_size * parts
        return
    share, rest = divmod(args.global_batch, processes * fixed)

    def fits(number):
        return not accumulates or number_of_parts(number, args.batch_size)

    if rest or not fits(share):
        below = next(filter(fits, range(share, 0, -1)), None)
        above = next(filter(fits, itertools.count(share + 1)))
        near = [number * processes * fixed for number in (below, above) if number]
        advice = f"use {' or '.join(map(str, near))}"
        asked = f"--global-batch {args.global_batch}"
        if rest:
            shared = f"{processes}, the number of processes that share it"
            if fixed > 1:
                shared = f"{processes} processes times {fixed} batches"
            fail(f"{asked} is no multiple of {shared}: {advice}")
        wrong = f"{asked} is {share} samples for each of {processes} processes"
        least = -(-args.batch_size // 2)
        wrong += f", and no batches of {least} to {args.batch_size} (--batch-size) divide {share}"
        fail(f"{wrong}: {advice}, or --batch-size {share}")
    parts = number_of_parts(share, args.batch_size) if accumulates else 1
    args.batch_size = share // parts
    if accumulates:
        args.gradient_accumulation_steps = parts


def number_of_parts(share, most):
    """Return the least number of equal parts of at most `most`, and of at least half of that.

    Returns None where no number of parts divides the share so.
    """
    most = min(share, most)
    candidates = range(-(-share // most), 2 * share // most + 1)
    return next((parts for parts in candidates if share % parts == 0), None)


def count_steps(args, samples, train_set, test_set):
    """Return the number of optimizer steps of an epoch of `samples` of each process; refuse 0.

    It also notes what the data are, with which a resumed run is compared.
    """
    accumulated = getattr(args, "gradient_accumulation_steps", 1)
    steps = samples // args.batch_size // accumulated
    if not steps:
        times = f" times {accumulated} (gradient accumulation)" if accumulated > 1 else ""
        asked = f"--batch-size {args.batch_size}{times}"
        fail(f"{asked} is above the {samples} samples of each process")
    if not len(test_set):
        fail(f"{checks.name_of_data(args, train_set)}: there is no sample to test with")
    args.data_name = checks.look_at_data(args, train_set, test_set, rank() == 0)
    if not hasattr(args, "groups"):  # otherwise several processes need the same samples
        checks.draw_apart(rank())
    return steps


def position(args, progress):
    """Return how many epochs are complete, and how many steps of the next one."""
    epochs = len(progress["history"])
    return epochs, progress["step"] - epochs * args.steps_per_epoch


def batches_left(args, progress, batches):
    """Return the batches of an epoch on which a run has not trained.

    Those are all, unless it was stopped within the epoch. Batches at the end that do not complete
    an optimizer step are left out. Another number than count_steps has counted is refused: some
    would never be read, or the other processes would wait.
    """
    accumulated = getattr(args, "gradient_accumulation_steps", 1)
    epochs, done = position(args, progress)
    batches = list(batches)
    counted = args.steps_per_epoch * accumulated
    # One more, which has no effect, is that of drop_last=False.
    if not counted <= len(batches) <= counted + accumulated:
        wrong = f"rank {rank()} has {len(batches)} batches in epoch {epochs + 1}, not {counted}"
        need = "all processes need as many as count_steps has counted, in each epoch"
        fail(f"{wrong}: {need}. See docs/sequences-and-streams.md of the repository")
    return batches[done * accumulated : counted]
