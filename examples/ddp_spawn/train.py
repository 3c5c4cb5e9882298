"""Train a ConvNet with DistributedDataParallel (DDP), on processes that this script starts.

Locally:   python train.py --processes 2
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, and a stop after any epoch.
Comments that begin with "ddp:" mark what a single process would not need.
"""

import argparse
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import longrun
from common import data
from common.models import ConvNet


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, positive = parser.add_argument, longrun.positive
    add("--processes", type=positive, default=torch.cuda.device_count() or 2, help="one per GPU")
    add("--dataset", choices=data.NAMES, default=data.NAMES[0])
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=64, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    args = parser.parse_args()
    args.global_batch = args.global_batch or args.batch_size * args.processes
    args.batch_size, rest = divmod(args.global_batch, args.processes)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {args.processes}")
    return args


def setup(args, rank, port):
    """Join the process group, and return this process's device."""
    gather, leave = dist.all_gather_object, dist.destroy_process_group
    longrun.prepare(args, rank, args.processes, gather, leave)
    if "OMP_NUM_THREADS" not in os.environ:  # CPU threads of a process: its share of the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.processes))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # ddp: NCCL for tensors on GPUs; Gloo for tensors on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # ddp: launch() has started the store, a small server, through which processes find each other
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=args.timeout))
    timeout = timedelta(seconds=10 * args.timeout)
    dist.init_process_group(backend, None, timeout, args.processes, rank, store)
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return device


def predict(args, model, batch, device):
    """Return the model's logits (B, 10) for a batch, and its labels (B,), on the device."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    images = images.double() if args.precision == "fp64" and images.is_floating_point() else images
    with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
        logits = model(images)
    return logits.float() if args.precision == "bf16" else logits, labels


def train_one_epoch(args, ddp_model, batches, stateful, device, progress):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
    optimizer, scheduler = stateful["optimizer"], stateful["scheduler"]
    for batch in batches:
        # ddp: each process and step gets its own random numbers (dropout), also after a resume
        longrun.seed(args.seed, progress["step"], 0, dist.get_rank())
        logits, labels = predict(args, ddp_model, batch, device)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress["step"] += 1
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    for buffer in model.buffers():  # ddp: use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, labels
    for batch in islice(test_loader, args.limit_steps):
        logits, labels = predict(args, model, batch, device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
        longrun.alive(args.timeout)
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[:2] / sums[2]).tolist()


def save_checkpoint(args, stateful, progress):
    """Save what --resume continues from, and stop if asked to; all processes call this."""
    longrun.save_checkpoint(args, stateful, progress)
    answer = torch.tensor(longrun.wish(args))
    dist.broadcast(answer, src=0)  # ddp: rank 0 decides whether all stop
    if answer == longrun.STOP and len(progress["history"]) < args.epochs:
        longrun.end(args, progress, "stopped")  # job.sh requeues the job


def main(rank, args, port):
    """Train as one of the processes; `port` is the port of launch()'s store."""
    device, world_size = setup(args, rank, port), args.processes
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    steps = min(len(sampler) // args.batch_size, args.limit_steps or len(train_set))
    if not steps:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    # Model: replace it with yours.
    torch.manual_seed(args.seed)
    model = ConvNet().to(device)
    model = model.double() if args.precision == "fp64" else model
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    # The learning rate rises during the warm-up; put another PyTorch scheduler here.
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / (args.warmup_steps + 1)))
    # A checkpoint contains these: add all that your training changes, such as averaged weights.
    stateful = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"step": 0, "history": []}  # optimizer steps of the run, and rows of metrics.csv
    what = f"{type(model).__name__} on {args.dataset}"
    where = "nccl on cuda" if device.type == "cuda" else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    # ddp: copies rank 0's weights to all processes, and averages gradients in backward()
    ddp_model = DistributedDataParallel(model)

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: a new order in each epoch; each process takes its part
        longrun.seed(args.seed, epoch, rank)  # the loader's workers, if any, take their seeds here
        train_loader = DataLoader(
            train_set, args.batch_size, sampler=sampler, drop_last=True, **extra
        )
        batches, start = islice(train_loader, args.limit_steps), time.perf_counter()
        train_loss = train_one_epoch(args, ddp_model, batches, stateful, device, progress)
        seconds = time.perf_counter() - start
        # Not ddp_model: its forward pass can wait for a process that has fewer test batches.
        test_loss, accuracy = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = steps * args.global_batch / seconds
        row |= {"test_accuracy": accuracy, "samples_per_second": speed, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        save_checkpoint(args, stateful, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    longrun.end(args, progress, "finished")


def launch(args):
    """Start the processes, and wait for them."""
    # ddp: port 0 is any free port; do not wait for the processes here, since they start below
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        # ddp: each process calls main(its rank, args, port); if one fails, the others are ended
        mp.spawn(main, args=(args, store.port), nprocs=args.processes)
    except mp.ProcessExitedException as error:
        raise SystemExit(2 if error.exit_code == 2 else f"train.py: error: {error}") from None


if __name__ == "__main__":
    launch(parse_args())
