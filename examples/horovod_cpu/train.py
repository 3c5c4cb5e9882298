"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, and a stop after any epoch.
Comments that begin with "horovod:" mark what a single process would not need.
more/train_lm.py imports functions from here.
"""

import argparse
import os
import time
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import longrun
from common import data
from common.models import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--dataset", choices=data.NAMES, default=data.NAMES[0])
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=64, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by world size, or its root")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    return parser.parse_args()


def gather(values, value):
    """Fill the list with the values of all ranks, for longrun.py."""
    values[:] = hvd.allgather_object(value, name="gather")  # horovod: all must use the same name


def setup(args):
    """Join the other processes; return this process's rank and the world size."""
    # horovod: sends each gradient alone; with fusion the order of a sum depends on the timing
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms between two rounds of sending gradients
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(10 * args.timeout)
    longrun.alive(args.timeout)  # joining the others takes at most --timeout
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()
    longrun.prepare(args, rank, world_size, gather, hvd.shutdown)
    if world_size == 1 and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        longrun.fail("srun's tasks do not know of each other: use srun --mpi=pmix, see README.md")
    if "OMP_NUM_THREADS" not in os.environ:  # CPU threads of a process: its share of the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    args.global_batch = args.global_batch or args.batch_size * world_size
    args.batch_size, rest = divmod(args.global_batch, world_size)
    if rest or not args.batch_size:
        longrun.fail(f"--global-batch {args.global_batch} must be a multiple of {world_size}")
    args.lr *= {"linear": world_size, "sqrt": world_size**0.5, None: 1}[args.scale_lr]
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return rank, world_size


def distribute(args, model, optimizer):
    """Return an optimizer that averages gradients over all processes before it takes a step."""
    return hvd.DistributedOptimizer(  # horovod: backward() starts to send the gradients
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )


def predict(args, model, batch):
    """Return the model's logits (B, 10) for a batch, and its labels (B,)."""
    images, labels = batch
    images = images.double() if args.precision == "fp64" and images.is_floating_point() else images
    with torch.autocast("cpu", torch.bfloat16, args.precision == "bf16"):
        logits = model(images)
    return logits.float() if args.precision == "bf16" else logits, labels


def train_one_epoch(args, model, batches, stateful, progress):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, labels
    optimizer, scheduler = stateful["optimizer"], stateful["scheduler"]
    for batch in batches:
        # horovod: each process and step gets its own random numbers (dropout), also after a resume
        longrun.seed(args.seed, progress["step"], hvd.rank())
        logits, labels = predict(args, model, batch)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # horovod: starts to average the gradients over all processes
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        optimizer.step()  # horovod: first waits until all gradients are averaged
        scheduler.step()
        optimizer.zero_grad()
        progress["step"] += 1
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    # horovod: use rank 0's BatchNorm statistics: they differ by process
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, labels
    for batch in islice(test_loader, args.limit_steps):
        logits, labels = predict(args, model, batch)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
        longrun.alive(args.timeout)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[:2] / sums[2]).tolist()


def save_checkpoint(args, stateful, progress):
    """Save what --resume continues from, and stop if asked to; all processes call this."""
    longrun.save_checkpoint(args, stateful, progress)
    # horovod: rank 0 decides whether all stop
    answer = hvd.broadcast_object(longrun.wish(args), root_rank=0, name="wish")
    if answer == longrun.STOP and len(progress["history"]) < args.epochs:
        longrun.end(args, progress, "stopped")  # job.sh requeues the job


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    rank, world_size = setup(args)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # horovod: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    steps = min(len(sampler) // args.batch_size, args.limit_steps or len(train_set))
    if not steps:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # collate_fn makes a batch of samples
    extra = {"collate_fn": data.collate}
    # horovod: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    # Model: replace it with yours.
    torch.manual_seed(args.seed)
    model = ConvNet()
    model = model.double() if args.precision == "fp64" else model
    optimizer = distribute(args, model, torch.optim.AdamW(model.parameters(), args.lr))
    # The learning rate rises during the warm-up; put another PyTorch scheduler here.
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / (args.warmup_steps + 1)))
    # A checkpoint contains these: add all that your training changes, such as averaged weights.
    stateful = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"step": 0, "history": []}  # optimizer steps of the run, and rows of metrics.csv
    what = f"{type(model).__name__} on {args.dataset}"
    where = "mpi on cpu" if hvd.mpi_enabled() else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    if progress["step"]:  # horovod: without a state this call would take a step to create one
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: rank 0's weights to all

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order in each epoch, the same in all processes
        longrun.seed(args.seed, epoch, rank)  # the loader's workers, if any, take their seeds here
        train_loader = DataLoader(
            train_set, args.batch_size, sampler=sampler, drop_last=True, **extra
        )
        batches, start = islice(train_loader, args.limit_steps), time.perf_counter()
        train_loss = train_one_epoch(args, model, batches, stateful, progress)
        seconds = time.perf_counter() - start
        test_loss, accuracy = evaluate(args, model, test_loader)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = steps * args.global_batch / seconds
        row |= {"test_accuracy": accuracy, "samples_per_second": speed, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        save_checkpoint(args, stateful, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(model.state_dict(), file))
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    main(parse_args())
