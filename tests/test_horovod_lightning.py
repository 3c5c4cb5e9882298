"""What only horovod_lightning promises: a strategy that does what Lightning asks for, a logger, clipping."""

import csv
from pathlib import Path

import pytest

from harness import edits, outputs, runs
from harness.runs import Reference

pytestmark = pytest.mark.only("horovod_lightning")


@pytest.mark.runs("full")
def test_clipping_and_logger(example: str, folder: Path, reference: Reference) -> None:
    """2 processes with batches of 32 are one process with batches of 64: 1e-9 in fp64, warm-up included.

    The norm to which the Trainer clips gradients is that of their average. It is so low here that AdamW's epsilon
    counts, and as many steps as in the reference run bring less. A logger, asked for, has what metrics.csv has.
    """
    edits.edit(folder / "train.py", "max_epochs=args.epochs,", "max_epochs=args.epochs, gradient_clip_val=1e-6,")
    two = "--batch-size 32 --lr 0.0005 --scale-lr linear --logger CSVLogger"
    for processes, name, arguments in ((2, "two", two), (1, "one", "--batch-size 64")):
        words = f"--epochs 1 --warmup-steps 5 --precision fp64 --output-dir {name} {arguments}"
        runs.train(example, folder, processes, *words.split(), OMP_NUM_THREADS="1")
    assert outputs.largest_difference(outputs.read_model(folder / "two"), outputs.read_model(folder / "one")) < 1e-9
    (path,) = (folder / "two" / "lightning_logs").glob("*/metrics.csv")
    with open(path, newline="") as file:
        logged = {name: float(value) for row in csv.DictReader(file) for name, value in row.items() if value}
    (row,) = outputs.read_metrics(folder / "two")
    assert row["train_loss"] > outputs.read_metrics(reference.output)[0]["train_loss"] + 0.1
    for name in ("train_loss", "test_loss", "test_accuracy"):
        assert logged[name] == pytest.approx(row[name], rel=1e-6)


ASK = """
import horovod.torch as hvd, torch, train
rank, world_size = train.setup(train.parse_args())
strategy = train.HorovodStrategy()
numbers = torch.tensor([1.0, 2.0]) * (rank + 1)
answers = [
    strategy.world_size, strategy.local_rank, strategy.node_rank, strategy.is_global_zero,
    strategy.reduce(numbers, reduce_op="sum").tolist(),
    strategy.reduce(numbers, reduce_op=torch.distributed.ReduceOp.SUM).tolist(),
    strategy.reduce(numbers).tolist(), strategy.reduce("no tensor"),
    strategy.reduce(numbers, reduce_op="max").tolist(), strategy.reduce(numbers, reduce_op="min").tolist(),
    strategy.all_gather(numbers).tolist(),
    strategy.broadcast({"from": rank}, src=1), strategy.broadcast(None if rank else [3]),
    strategy.reduce_boolean_decision(rank == 0), strategy.reduce_boolean_decision(rank == 0, all=False),
]
strategy.barrier()
print(rank, answers, flush=True)
hvd.shutdown()
"""


def test_strategy(example: str, folder: Path) -> None:
    """What Lightning may ask a strategy for, asked by 2 processes."""
    (folder / "ask.py").write_text(ASK)
    run = runs.Run(["horovodrun", "--gloo", "-np", "2", "python", "ask.py"], folder).wait()
    assert run.status == 0, run.stderr
    same = "[3.0, 6.0], [3.0, 6.0], [1.5, 3.0], 'no tensor', [2.0, 4.0], [1.0, 2.0], "
    same += "[[1.0, 2.0], [2.0, 4.0]], {'from': 1}, [3], False, True"
    expected = [f"0 [2, 0, 0, True, {same}]", f"1 [2, 1, 0, False, {same}]"]
    assert sorted(run.stdout.splitlines()) == expected, run.stderr
