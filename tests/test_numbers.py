"""Numbers that cannot work, or would train something else than was asked for: one line, with the nearest that works.

What each example's parser refuses stands in harness/refusals.py: test_bad_input of test_contract.py tries all of it.
"""

import argparse
import importlib
import json
import re
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plumbing
from harness import refusals
from harness.launchers import EXAMPLES, ROOT
from harness.refusals import RefusedError

pytestmark = pytest.mark.usefixtures("refusing")


def test_each_flag_has_a_row() -> None:
    """Each flag of an example's that takes a number has a row among those that must be refused."""
    tried = {words.split()[0] for words in refusals.BAD_NUMBERS}
    number = r"""add(?:_argument)?\(\s*"(--[\w-]+)",(?: "--[\w-]+",)* type=(?:int|float)"""
    shared = re.findall(number, (ROOT / "plumbing" / "settings.py").read_text())
    assert len(shared) == 7
    for name in EXAMPLES:
        calls = refusals.bad_numbers(ROOT / "examples" / name)
        assert len(calls) >= 14, name
        flags = re.findall(number, (ROOT / "examples" / name / "train.py").read_text())
        assert {*shared, *flags} - tried <= {"--zero-stage", "--layers"}, name


ACCEPTED: dict[str, list[Any]] = {
    "epochs": [1, 10_000],
    "batch_size": [1, 2**20],
    "lr": [0.0, 1e-30, 1e-3, 1e3],  # 0: nothing is learnt, which a resume may want
    "seed": [0, 42, 20261126, 2**32 - 1],
    "timeout": [1, 300, 86_400, 2_000_000],
    "warmup_steps": [0, 10**6],
    "workers": [0, 64],
    "max_grad_norm": [None, 1e-6, 1.0],
    "keep_epochs": [None, 1, 1000],
}
CASES = [(name, value) for name, values in ACCEPTED.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_accepted(name: str, value: float | None) -> None:
    """Numbers up to the bounds are taken."""
    plumbing.check_args(argparse.ArgumentParser(exit_on_error=False), Namespace(**{name: value}))


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_largest_seed(seed: int) -> None:
    """All generators take what the examples make of the largest seed, in the largest runs."""
    import numpy as np
    import torch

    torch.manual_seed(seed + (10**6 * 10**6 + 10**6) * 10**5)  # torchrun_vision: epochs, batches, processes
    torch.Generator().manual_seed(seed * 10_000 + 9_999)  # fsdp: weights
    torch.Generator().manual_seed(seed + 2**31)  # DistributedSampler: epochs
    np.random.seed(seed)
    np.random.default_rng([seed, 2**31])


@pytest.mark.parametrize(("words", "seconds"), [("0.0001min", 0.006), ("0.001min", 0.06), ("999999min", 59_999_940)])
def test_minutes(words: str, seconds: float) -> None:
    """A short time means a checkpoint after each step, as 1 does; a long one does not overflow."""
    assert plumbing.steps_or_minutes(words).total_seconds() == pytest.approx(seconds)


def shared(processes: int, global_batch: int, batch: int, accumulates: bool = True) -> Namespace:
    """Return what share_batch makes of these numbers."""
    args = Namespace(world_size=processes, global_batch=global_batch, batch_size=batch)
    if accumulates:
        args.gradient_accumulation_steps = 1
    plumbing.share_batch(args)
    return args


SHARED = {  # processes, global batch, batch size: batch size and batches, or what the refusal says
    (2, 62, 16): "62 is 31 samples for each of 2 processes, and no batches of 8 to 16 (--batch-size) divide 31: "
    "use 60 or 64, or --batch-size 31",
    (1, 37, 16): "use 36 or 39, or --batch-size 37",
    (3, 3 * 101, 32): "use 300 or 306, or --batch-size 101",
    (4, 4 * 46, 22): "use 180 or 192, or --batch-size 46",
    (2, 26, 4): "use 24 or 28, or --batch-size 13",
    (2, 2 * 257, 256): "use 512 or 516, or --batch-size 257",
    (2, 61, 16): "61 is no multiple of 2, the number of processes that share it: use 60 or 64",
    (8, 100, 64): "100 is no multiple of 8, the number of processes that share it: use 96 or 104",
    (4, 3, 64): "3 is no multiple of 4, the number of processes that share it: use 4",
    (1000, 1, 64): "1 is no multiple of 1000, the number of processes that share it: use 1000",
    (2, 62, 31): (31, 1),
    (2, 62, 64): (31, 1),
    (2, 64, 16): (16, 2),
    (2, 60, 16): (15, 2),
    (2, 48, 16): (12, 2),
    (1, 9, 6): (3, 3),
    (1, 8, 1): (1, 8),
    (2, 6, 2): (1, 3),
    (2, 2, 64): (1, 1),
    (2, 2**30, 2**31 - 1): (2**29, 1),
}


@pytest.mark.parametrize(("numbers", "found"), SHARED.items())
def test_share_of_global_batch(numbers: tuple[int, int, int], found: str | tuple) -> None:
    """A share is cut into equal batches of at most --batch-size and at least half of that, or the nearest are named."""
    if isinstance(found, str):
        with pytest.raises(RefusedError) as refused:
            shared(*numbers)
        assert str(refused.value).startswith("--global-batch ") and found in str(refused.value)
        near = [int(word) for word in found.replace(",", "").split("use ")[1].split() if word.isdigit()]
        for number in near[:2]:
            shared(numbers[0], number, numbers[2])
        return
    args = shared(*numbers)
    assert (args.batch_size, args.gradient_accumulation_steps) == found
    assert args.batch_size * args.gradient_accumulation_steps * numbers[0] == numbers[1]


def test_share_in_one_batch() -> None:
    """An example that does not accumulate takes its share in one batch, whatever --batch-size says."""
    assert shared(2, 62, 16, accumulates=False).batch_size == 31
    with pytest.raises(RefusedError, match="use 60 or 62"):
        shared(2, 61, 16, accumulates=False)


CONFIGS = {
    '{"gradient_clipping": NaN}': "it has NaN, which is no number",
    '{"optimizer": {"params": {"weight_decay": Infinity}}}': "it has Infinity, which is no number",
    '{"gradient_clipping": -1.0}': "gradient_clipping must be 0 (none) or more, not -1.0",
    '{"gradient_clipping": "auto"}': "gradient_clipping must be 0 (none) or more, not 'auto'",
    '{"gradient_clipping": true}': "gradient_clipping must be 0 (none) or more, not True",
    '{"optimizer": {"params": {"lr": 5e-05}}}': "remove lr of the optimizer, and give train.py --lr 5e-05",
    '{"scheduler": "WarmupLR"}': "scheduler must be an object, and its params, too",
    '{"optimizer": {"params": {"lr": "auto", "betas": "auto"}}}': "write values for betas of the optimizer: only a",
    '{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}': "warmup_num_steps of the scheduler",
    '{"train_batch_size": 64}': "remove train_batch_size",
    '{"train_micro_batch_size_per_gpu": 8}': "remove train_micro_batch_size_per_gpu: it follows from --batch-size",
    '{"train_micro_batch_size_per_gpu": "auto"}': "remove train_micro_batch_size_per_gpu",
    '{"gradient_accumulation_steps": 0}': "gradient_accumulation_steps must be 1 or more, not 0",
    '{"gradient_accumulation_steps": -2}': "gradient_accumulation_steps must be 1 or more, not -2",
    '{"gradient_accumulation_steps": 2.0}': "gradient_accumulation_steps must be 1 or more, not 2.0",
    '{"gradient_accumulation_steps": true}': "gradient_accumulation_steps must be 1 or more, not True",
    '{"gradient_accumulation_steps": "auto"}': "gradient_accumulation_steps must be 1 or more, not 'auto'",
    '{"gradient_accumulation_steps": 3}': "no multiple of 2 processes times 3 batches: use 60 or 66",
}


@pytest.mark.parametrize(("text", "says"), CONFIGS.items())
def test_numbers_of_deepspeed(tmp_path: Path, text: str, says: str) -> None:
    """The config file of DeepSpeed has no number that would be replaced without a word, or is none."""
    config = json.loads(text)
    config = {"optimizer": {"type": "AdamW"}} | config
    config["optimizer"]["type"] = "AdamW"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(RefusedError) as refused:
        steps = plumbing.read_config(path).get("gradient_accumulation_steps", 1)
        plumbing.share_batch(Namespace(global_batch=64, world_size=2, batch_size=32), steps)
    assert says in str(refused.value) and ("--global-batch" in str(refused.value) or str(path) in str(refused.value))


@pytest.mark.parametrize(("batches", "left"), [(5, None), (6, [2, 3, 4, 5]), (8, [2, 3, 4, 5]), (9, None)])
def test_batches_left(batches: int, left: list[int] | None) -> None:
    """A sampler of another length than count_steps has counted is refused: its last batches would never be read."""
    args = Namespace(steps_per_epoch=3, gradient_accumulation_steps=2)
    progress = {"step": 4, "history": [{}]}  # one step of the second epoch
    if left is None:
        with pytest.raises(RefusedError, match=f"rank 0 has {batches} batches in epoch 2, not 6: "):
            plumbing.batches_left(args, progress, iter(range(batches)))
    else:
        assert plumbing.batches_left(args, progress, iter(range(batches))) == left


def layers(kind: str) -> Callable[[], object]:
    """Return a function that makes one step of a model with a layer of this kind and a batch of one sample."""
    import torch
    from torch import nn

    shapes = {
        "BatchNorm1d": (1, 4),
        "BatchNorm2d": (1, 4, 1, 1),
        "BatchNorm3d": (1, 4, 1, 1, 1),
        "LazyBatchNorm1d": (1, 4),
    }
    make = getattr(nn, kind)
    layer = make() if kind.startswith("Lazy") else make(4)
    return lambda: layer(torch.ones(shapes[kind]))


@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LazyBatchNorm1d"])
def test_batch_of_one(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """BatchNorm over a single value ends in one line that names --batch-size, whichever layer it is."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    plumbing.processes.explain_errors()
    with pytest.raises(ValueError) as raised:
        layers(kind)()
    with pytest.raises(RefusedError, match=r"BatchNorm needs batches of 2 or more .*: use a larger --batch-size"):
        sys.excepthook(ValueError, raised.value, raised.value.__traceback__)


def test_input_that_a_model_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that makes the input is named, also where the model's code is PyTorch's own; otherwise the model's."""
    import torch
    from torch import nn

    with pytest.raises(RefusedError, match=r"fix_summation_order, \(1, 1, 28, 28\), .*test_numbers.py, line \d+: Run"):
        plumbing.fix_summation_order(nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 1, 28, 28))
    importlib.import_module("common.models")  # it and its package are there again after this test
    for name in ("common", "common.models"):
        monkeypatch.delitem(sys.modules, name)
    linked = tmp_path / "linked"
    linked.symlink_to(ROOT)
    monkeypatch.syspath_prepend(str(linked))
    model = importlib.import_module("common.models").ConvNet()
    with pytest.raises(RefusedError, match=r"common/models.py, line \d+: RuntimeError"):
        plumbing.fix_summation_order(model, torch.zeros(1, 3, 28, 28))


def test_weights_of_training_alone() -> None:
    """In the pass on zeros an LSTM trains, as cuDNN needs it, no other layer does, and each weight gets a gradient."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm, self.last = nn.LSTM(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
            self.more, self.number = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.0, dtype=torch.cfloat))
            self.trained: set[str] = set()
            for name, weight in self.named_parameters():
                weight.register_post_accumulate_grad_hook(lambda _, name=name: self.trained.add(name))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.modes = [module.training for module in (self.lstm, self.norm, self)]
            last = self.last(self.norm(self.lstm(inputs)[0][-1]))
            return last + self.more(inputs[0, :, :3]) * self.number.real if self.training else last

    model = Model()
    plumbing.fix_summation_order(model, torch.zeros(5, 1, 4))
    assert model.modes == [True, False, False]
    assert model.trained == {name for name, _ in model.named_parameters()}
    assert all(module.training for module in model.modules())
    assert not any(weight.grad is not None for weight in model.parameters())


def test_other_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All other exceptions are shown as before; of a loader worker's DataError the last line is."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    plumbing.processes.explain_errors()
    error = ValueError("Expected something else")
    sys.excepthook(ValueError, error, None)
    assert "ValueError: Expected something else" in capsys.readouterr().err
    kind = type("DataError", (Exception,), {})
    worker = kind(
        "Caught DataError in DataLoader worker process 1.\nOriginal Traceback:\ncommon.data.DataError: sample(3)"
    )
    with pytest.raises(RefusedError, match=r"^sample\(3\)$"):
        sys.excepthook(kind, worker, None)


VARIED = ["lr=0:inf", "lr=log:1e-4:inf", "lr=-inf:1", "lr=nan:1", "lr=0:nan", "lr=1:1", "lr=log:0:1", "batch-size=64"]


@pytest.mark.parametrize("words", VARIED)
def test_ranges_of_a_sweep(words: str) -> None:
    """A range without an end, or that is none, is refused."""
    sweep = runpy.run_path(str(ROOT / "sweep" / "sweep.py"))
    with pytest.raises(argparse.ArgumentTypeError, match=words.split("=")[0]):
        sweep["vary"](words)


SWEEPS = {
    "--vary lr=0:1 --trials 0": "--trials and --startup must be 1 or more",
    "--vary lr=0:1 --startup -1": "--trials and --startup must be 1 or more",
    "--vary lr=0:1 --warmup -1": "--warmup not below 0",
    "--vary lr=0:1 --vary lr=1:2": "--vary has the same flag twice",
    "--vary lr=0:inf": "lr=0:inf",
}


@pytest.mark.parametrize(("words", "says"), SWEEPS.items())
def test_numbers_of_a_sweep(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep's own numbers are looked at before anything is made."""
    sweep = runpy.run_path(str(ROOT / "sweep" / "sweep.py"))
    monkeypatch.setattr(sys, "argv", ["sweep.py", "run", "ddp_spawn", *words.split()])
    with pytest.raises(SystemExit) as ended:
        sweep["parse_args"]()
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert ended.value.code == 2 and len(errors) == 1 and says in errors[0]


# A warm-up, epochs, steps of an epoch, and what the log says of them.
ASKED = "of what was asked for"
WARMUPS = {
    (500, 5, 6): f"--warmup-steps 500 is above the 30 steps of this run: its learning rate rises to 5.99% {ASKED}",
    (31, 5, 6): f"--warmup-steps 31 is above the 30 steps of this run: its learning rate rises to 93.8% {ASKED}",
    (2, 1, 1): f"--warmup-steps 2 is above the 1 steps of this run: its learning rate rises to 33.3% {ASKED}",
    (
        10**9,
        2,
        100,
    ): f"--warmup-steps 1000000000 is above the 200 steps of this run: its learning rate rises to 2e-05% {ASKED}",
    (30, 5, 6): "",
    (6, 1, 6): "",  # the default of torchrun_vision, in a run of one epoch
    (29, 5, 6): "",
    (0, 1, 1): "",
    (500, 100, 6): "",  # a resumed run: all its epochs count, those before, too
}


@pytest.mark.parametrize(("numbers", "says"), WARMUPS.items())
def test_warmup_above_all_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], numbers: tuple[int, int, int], says: str
) -> None:
    """It says that the learning rate never reaches --lr; a run without a warm-up, or with a scheduler, is silent."""
    import torch

    warmup, epochs, steps = numbers
    monkeypatch.setattr(plumbing.records, "record", lambda *_: None)
    monkeypatch.setattr(plumbing.hangs, "watch", lambda *_: None)
    settings = {"warmup_steps": warmup, "epochs": epochs, "steps_per_epoch": steps, "world_size": 1, "global_batch": 64}
    progress = {"step": 6, "history": [{}]}
    for args, expected in ((settings, says), (settings | {"has_scheduler": True}, ""), ({"world_size": 1}, "")):
        args = {"global_batch": 64, "epochs": 1, "steps_per_epoch": 6} | args
        plumbing.print_header(Namespace(**args), "ConvNet on digits", torch.device("cpu"), progress)
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if "--warmup-steps" in line] == [expected] * bool(expected)
