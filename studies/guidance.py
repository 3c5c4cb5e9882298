"""Which learning rate fits a larger global batch: `python -m studies.guidance`, 30 minutes on two cores.

It trains the two models of common/ on as many samples as ever, with the global batches of 1, 2, 4 and 8 processes, and
the rules of `--scale-lr`: the rate of one process kept, times the root of the number of processes, times that number;
without a warm-up and with one; with AdamW and with SGD; with several seeds. The rate of one process is the best of some
powers of 2, which it looks for first. It writes a row for each run to guidance.csv in the folder --output, where it
goes on if it was interrupted, then guidance.png and the tables of docs/batch-size-and-learning-rate.md.

Each run is one process with the whole global batch: N processes with a batch of B each take the step of one process
with N*B, to a rounding, as the tests of the examples show. For the same reason N processes with B/N each, the global
batch kept, have the loss of one process with B.
"""

import argparse
import csv
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

from matplotlib.figure import Figure

from benchmarks import report
from benchmarks.measure import keep_memory, positive

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = (1, 2, 4, 8)
POOL = multiprocessing.get_context("spawn").Pool
RULES = {"kept": lambda processes: 1.0, "sqrt": math.sqrt, "linear": float}  # what a rate is multiplied with
WARMUP = 0.2  # of all steps, where there is one
BATCH = {"digits": 32, "gpt": 4}  # images or sequences of 128 tokens, of one process
SAMPLES = {"digits": 5632, "gpt": 1024}  # of the whole training
# Of which the best is taken for one process: powers of 2.
EXPONENTS = {
    ("digits", "AdamW"): range(-12, -5),
    ("digits", "SGD"): range(-9, -2),
    ("gpt", "AdamW"): range(-11, -6),
    ("gpt", "SGD"): range(-8, -3),
}


@dataclass(frozen=True)
class Setting:
    """What is asked of one run."""

    model: str  # digits: the ConvNet on handwritten digits; gpt: TinyGPT on tokens of a Markov chain
    optimizer: str
    processes: int
    rule: str
    warmup: float  # share of the steps
    seed: int
    rate: float  # of one process, before it is scaled


@dataclass(frozen=True)
class Result(Setting):
    """A run: a row of guidance.csv."""

    test_loss: float  # infinite if it diverged
    test_accuracy: float  # 0 to 1; of the gpt: of the next token

    @property
    def setting(self) -> Setting:
        """What was asked."""
        return Setting(*astuple(self)[: len(fields(Setting))])


@cache
def parts(model: str) -> tuple:
    """Return the training set and the test set, both to be indexed with a list of numbers."""
    from common import data

    if model == "digits":
        return data.load("digits")
    tokens, _ = data.markov_tokens(128 * 640)
    return data.Tokens(tokens[: 128 * 512 + 1], 128), data.Tokens(tokens[128 * 512 + 1 :], 128)


def make(setting: Setting) -> tuple:
    """Return the model with its initial weights, and its optimizer."""
    import torch

    from common import models

    torch.manual_seed(setting.seed)
    model = models.ConvNet() if setting.model == "digits" else models.TinyGPT()
    if setting.optimizer == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), fused=True)  # the examples' to a rounding, and faster
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(setting: Setting) -> Result:
    """Train once, as the examples do, and evaluate."""
    import torch
    from torch.nn import functional as F

    train_set, test_set = parts(setting.model)
    model, optimizer = make(setting)
    batch = BATCH[setting.model] * setting.processes
    steps = SAMPLES[setting.model] // batch
    epochs = SAMPLES[setting.model] // len(train_set) + 1
    generator = torch.Generator().manual_seed(setting.seed)
    order = torch.cat([torch.randperm(len(train_set), generator=generator) for _ in range(epochs)])
    for step in range(steps):
        inputs, labels = train_set[order[step * batch : (step + 1) * batch].tolist()]
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        rate = setting.rate * RULES[setting.rule](setting.processes)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / (round(setting.warmup * steps) + 1))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses, correct = [], []
        for start in range(0, len(test_set), 64):
            inputs, labels = test_set[list(range(start, min(start + 64, len(test_set))))]
            logits = model(inputs).flatten(0, -2)
            losses.append(F.cross_entropy(logits, labels.flatten(), reduction="none"))
            correct.append(logits.argmax(-1) == labels.flatten())
    loss, accuracy = torch.cat(losses).mean().item(), torch.cat(correct).double().mean().item()
    loss = loss if math.isfinite(loss) else math.inf
    return Result(**asdict(setting), test_loss=loss, test_accuracy=accuracy)


def prepare() -> None:
    """Give a process one thread, and let the memory that it frees stay with it, as in the examples."""
    import torch

    torch.set_num_threads(1)
    keep_memory()


def read(path: Path) -> dict[Setting, Result]:
    """Return the runs that a CSV file has, none if there is no file."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        kinds = get_type_hints(Result).items()
        rows = [Result(**{name: kind(row[name]) for name, kind in kinds}) for row in csv.DictReader(file)]
    return {row.setting: row for row in rows}


def run_all(settings: Sequence[Setting], path: Path, at_once: int) -> dict[Setting, Result]:
    """Run what the CSV file does not have yet, add each run to it as soon as it is done, and return all that it has."""
    found = read(path)
    missing = [setting for setting in settings if setting not in found]
    if not missing:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    if not found:
        path.write_text(",".join(field.name for field in fields(Result)) + "\n")
    with POOL(at_once, prepare) as pool, open(path, "a", newline="") as file:
        start = time.monotonic()
        for number, result in enumerate(pool.imap_unordered(train, missing), 1):
            found[result.setting] = result
            csv.writer(file).writerow(astuple(result))
            file.flush()
            print(f"{number} of {len(missing)}, {time.monotonic() - start:.0f} s: {result}", flush=True)
    return found


def candidates(models: Sequence[str]) -> list[Setting]:
    """Return the runs among which the best rate of one process is looked for."""
    pairs = [pair for pair in EXPONENTS if pair[0] in models]
    return [Setting(*pair, 1, "kept", 0.0, 0, 2.0**exponent) for pair in pairs for exponent in EXPONENTS[pair]]


def best_rates(found: dict[Setting, Result], models: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return for each model and optimizer the rate with the lowest loss; raises ValueError if it is the last of them.

    There an even smaller or larger one might be better.
    """
    rates = {}
    for pair in [pair for pair in EXPONENTS if pair[0] in models]:
        tried = [one for one in candidates(models) if (one.model, one.optimizer) == pair]
        best = min(tried, key=lambda one: found[one].test_loss)
        if best in (tried[0], tried[-1]):
            raise ValueError(f"{pair}: the best of the rates, {best.rate}, is at the end of EXPONENTS: add others")
        rates[pair] = best.rate
    return rates


def grid(rates: dict[tuple[str, str], float], seeds: int) -> list[Setting]:
    """Return all runs that are compared. With one process all rules are the same, and only one is run."""
    found = []
    for (pair, rate), seed in itertools.product(rates.items(), range(seeds)):
        found.append(Setting(*pair, 1, "kept", 0.0, seed, rate))
        for processes, rule, warmup in itertools.product(PROCESSES[1:], RULES, (0.0, WARMUP)):
            found.append(Setting(*pair, processes, rule, warmup, seed, rate))
    return found


def mean_losses(results: Sequence[Result]) -> dict[tuple[str, str, int, str, float], float]:
    """Return the mean test loss over the seeds, for each model, optimizer, number of processes, rule and warm-up."""
    losses: dict[tuple, list[float]] = {}
    for one in results:
        losses.setdefault((one.model, one.optimizer, one.processes, one.rule, one.warmup), []).append(one.test_loss)
    return {key: statistics.mean(values) for key, values in losses.items()}


def tables(results: Sequence[Result]) -> str:
    """Return a Markdown table for each model and optimizer, after a line that says what it is of."""
    means, text = mean_losses(results), []
    for model, optimizer in dict.fromkeys((one.model, one.optimizer) for one in results):
        of_pair = [one for one in results if (one.model, one.optimizer) == (model, optimizer)]
        rate, seeds = of_pair[0].rate, len({one.seed for one in of_pair})
        one_process = means[model, optimizer, 1, "kept", 0.0]
        rows = []
        for processes in PROCESSES[1:]:
            cells = {"processes": f"{processes}", "global batch": f"{BATCH[model] * processes}"}
            cells["steps"] = f"{SAMPLES[model] // (BATCH[model] * processes)}"
            for rule, warmup in itertools.product(RULES, (0.0, WARMUP)):
                loss = means[model, optimizer, processes, rule, warmup]
                cells[rule + ", warm-up" * bool(warmup)] = f"{loss:.3f}"
            rows.append(cells)
        caption = f"{model}, {optimizer}: rate {rate:.4g} and batch {BATCH[model]} with one process, whose test loss "
        caption += f"is {one_process:.3f} after {SAMPLES[model] // BATCH[model]} steps; means of {seeds} seeds"
        text.append(f"{caption}\n\n{report.table(rows)}")
    return "\n".join(text)


def draw(results: Sequence[Result]) -> Figure:
    """Return the picture: test loss against the number of processes, a panel for each model and optimizer."""
    means = mean_losses(results)
    pairs = list(dict.fromkeys((one.model, one.optimizer) for one in results))
    figure = Figure(figsize=(3.4 * len(pairs), 3.2), dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(pairs), squeeze=False)[0]
    for axis, (model, optimizer) in zip(axes, pairs, strict=True):
        first = means[model, optimizer, 1, "kept", 0.0]
        for (number, rule), warmup in itertools.product(enumerate(RULES), (0.0, WARMUP)):
            losses = [means[model, optimizer, processes, rule, warmup] for processes in PROCESSES[1:]]
            style, label = "o--" if warmup else "o-", f"{rule}{', warm-up' * bool(warmup)}"
            axis.plot(PROCESSES, [first, *losses], style, color=f"C{number}", markersize=3, label=label)
        axis.axhline(first, color="gray", linewidth=0.8, label="global batch kept")
        axis.set(xscale="log", yscale="log", title=f"{model}, {optimizer}", xlabel="processes")
        axis.set_xticks(PROCESSES, [str(processes) for processes in PROCESSES])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("test loss after the same samples")
    axes[-1].legend(fontsize=7)
    return figure


def main() -> None:
    """Find the rates of one process, run the grid, and write tables and picture."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m studies.guidance", description=__doc__, formatter_class=layout)
    parser.add_argument("--models", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--at-once", type=positive, default=len(os.sched_getaffinity(0)), help="runs (default: cores)")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder for what is written")
    args = parser.parse_args()
    path = args.output / "guidance.csv"
    try:
        rates = best_rates(run_all(candidates(args.models), path, args.at_once), args.models)
        settings = grid(rates, args.seeds)
        found = run_all(settings, path, args.at_once)
    except (KeyError, TypeError, ValueError) as error:
        sys.exit(f"guidance.py: error: {path}: {error}; if this file is not one of this study, delete it")
    results = [found[setting] for setting in settings]
    draw(results).savefig(path.with_suffix(".png"))
    path.with_suffix(".md").write_text(tables(results))
    print(tables(results))


if __name__ == "__main__":
    main()
