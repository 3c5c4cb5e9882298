"""Measure what torchrun_multinode's readiness to stop costs: the vote in each step, and a checkpoint in mid-epoch.

    torchrun --standalone --nproc-per-node=2 benchmarks/stopping.py --rounds 7

Run it in an environment with the example's requirements.txt, on an idle machine. Each round trains one epoch of 93
steps in three ways, one after the other: as the example does, without the vote, and with a checkpoint every 10 steps.
Printed are medians over the rounds, of ratios within a round, and what one checkpoint holds training up for.
"""

import argparse
import copy
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "torchrun_multinode"))
import train  # noqa: E402

BATCH, EVERY = 64, 10


class NoVote:
    """What an all-reduce returns that was not made."""

    def wait(self) -> None:
        """Return at once."""


def without_vote(all_reduce):
    """Leave out the only all-reduce that is asynchronous."""
    return lambda *args, async_op=False: NoVote() if async_op else all_reduce(*args)


def main() -> None:
    """Print one line a round on rank 0, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    sys.argv = ["train.py", "--dataset", "synthetic", "--output-dir", tempfile.mkdtemp(prefix="stopping-")]
    args = train.parse_args()
    args.output_dir.mkdir(exist_ok=True)
    rank, world_size, device = train.setup(args)
    train_set, _ = train.data.load("synthetic")
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, BATCH, drop_last=True), batch_size=None)
    model = train.ConvNet()
    optimizer = torch.optim.AdamW(model.parameters())
    replica = DistributedDataParallel(model)
    held_up, real_save, all_reduce = [], train.save, train.dist.all_reduce

    def timed_save(*state: object) -> None:
        start = time.perf_counter()
        real_save(*state)
        held_up.append(time.perf_counter() - start)

    def epoch(every: int | None = None) -> float:
        args.checkpoint_every, position = every, train.new_epoch(device)
        train.train_one_epoch(args, replica, loader, optimizer, device, [], position)
        return position["seconds"]

    train.save = timed_save
    epoch()
    votes, saves = [], []
    for number in range(rounds):
        shipped = epoch()
        train.dist.all_reduce = without_vote(all_reduce)
        bare = epoch()
        train.dist.all_reduce = all_reduce
        saving = epoch(EVERY)
        votes.append(shipped / bare)
        saves.append((saving - shipped) / (len(loader) // EVERY))
        if rank == 0:
            print(f"round {number + 1}: {shipped:.2f} s, without vote {bare:.2f} s, with checkpoints {saving:.2f} s")
    if rank == 0:
        start = time.perf_counter()
        copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        copied = time.perf_counter() - start
        step = statistics.median(votes)
        print(f"a step with the vote / without: {step:.4f} ({min(votes):.3f} to {max(votes):.3f})")
        print(f"a save holds training up for {statistics.median(held_up) * 1e3:.1f} ms; a copy: {copied * 1e3:.1f} ms")
        print(f"an epoch is longer by {statistics.median(saves) * 1e3:.1f} ms for each of its checkpoints")
    train.finish_writing()
    shutil.rmtree(args.output_dir)
    train.leave("")


if __name__ == "__main__":
    main()
