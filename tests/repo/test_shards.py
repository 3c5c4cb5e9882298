"""How the examples divide the data among up to 4,096 processes, of which none is started."""

import argparse
import math
import sys
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import samples
from harness.launchers import EXAMPLES, ROOT

PROCESSES = st.integers(1, 4096)
SHARD = "range(rank, len(test_set), args.world_size)"  # in every train.py
COMPILED = compile(SHARD, "train.py", "eval")


def train_py(name: str) -> str:
    """Return the text of an example's train.py, where the groups of fsdp, which share the samples, are processes."""
    text = (ROOT / "examples" / name / "train.py").read_text()
    return text.replace("group_rank", "rank").replace("args.groups", "args.world_size")


def evaluation_shard(size: int, rank: int, world_size: int) -> range:
    """Return the test indices of one process, by the expression that stands in every train.py."""
    return eval(COMPILED, {"rank": rank, "test_set": range(size), "args": argparse.Namespace(world_size=world_size)})


@pytest.mark.parametrize("name", EXAMPLES)
def test_expression_is_used(name: str) -> None:
    """The expression that is tested here is the one in train.py."""
    assert train_py(name).count(f"    shard = {SHARD}\n") == 1


@settings(max_examples=8, deadline=None)
@given(world_size=PROCESSES, share=st.integers(1, 6), rest=st.integers(0, 4095), batch_size=st.integers(1, 4))
def test_training_shards(world_size: int, share: int, rest: int, batch_size: int) -> None:
    """No sample twice, none missing but a rest of less than one each; all processes take equally many steps."""
    size = share * world_size + rest % world_size
    shards = [[index for (index,) in samples.batches(size, rank, world_size, 1)] for rank in range(world_size)]
    assert {len(shard) for shard in shards} == {share}
    seen = {index for shard in shards for index in shard}
    assert len(seen) == share * world_size and seen <= set(range(size))
    for rank in {0, world_size // 2, world_size - 1}:
        steps = samples.batches(size, rank, world_size, batch_size)
        assert len(steps) == share // batch_size
        assert [index for batch in steps for index in batch] == shards[rank][: len(steps) * batch_size]


@settings(deadline=None)
@given(size=st.integers(0, 20_000), world_size=PROCESSES)
def test_evaluation_shards(size: int, world_size: int) -> None:
    """Each test sample is evaluated exactly once, by processes that have as many as each other, or one more."""
    shards = [evaluation_shard(size, rank, world_size) for rank in range(world_size)]
    assert sorted(index for shard in shards for index in shard) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@settings(deadline=None)
@given(size=st.integers(1, 20_000), world_size=st.integers(1, 64), batch_size=st.integers(1, 300))
def test_equally_many_forward_passes(size: int, world_size: int, batch_size: int) -> None:
    """deepspeed and fsdp fill up each process's batches of the test set to as many as the first process has."""
    for name in ("deepspeed", "fsdp"):
        assert "math.ceil(len(test_set) / (args.world_size * args.batch_size))" in train_py(name)
    longest = math.ceil(len(evaluation_shard(size, 0, world_size)) / batch_size)
    assert math.ceil(size / (world_size * batch_size)) == longest


@settings(max_examples=20, deadline=None)
@given(world_size=PROCESSES, epoch=st.integers(0, 1000))
def test_order_of_samples(world_size: int, epoch: int) -> None:
    """One batch of all processes has the samples that one process would take for it, whatever their number.

    That order is PyTorch's own: a permutation seeded with seed + epoch.
    """
    size = 2 * world_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist()
    some = {0, world_size // 2, world_size - 1}
    for rank in some:
        assert samples.batches(size, rank, world_size, 1, epoch) == [[order[rank]], [order[world_size + rank]]]


def calls(function: Callable[[], object]) -> int:
    """Return how many functions a function calls, directly or not."""
    count = 0

    def called(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def peak(function: Callable[[], object]) -> int:
    """Return the largest number of bytes that Python holds while a function runs."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_work_per_process() -> None:
    """The calls and the memory that sharing out 20,000 samples takes in a process do not grow with their number.

    A tenth more memory is permitted, for what Python does beside it.
    """

    def share(world_size: int) -> Callable[[], object]:
        return lambda: (
            samples.batches(20_000, world_size - 1, world_size, 4),
            list(evaluation_shard(20_000, world_size - 1, world_size)),
        )

    share(1)()  # what is only loaded once
    memory, work = peak(share(1)), calls(share(1))
    for world_size in (2, 64, 4096):
        assert peak(share(world_size)) < 1.1 * memory and calls(share(world_size)) <= work, world_size
