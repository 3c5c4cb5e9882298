"""Train a ConvNet with DeepSpeed ZeRO, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, and a stop after any epoch.
Comments that begin with "deepspeed:" or "torchrun:" mark what a single process would not need.
"""

import argparse
import copy
import os
import time
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import longrun
import sharded
import zero
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
    add("--deepspeed_config", default="ds_config.json", help="DeepSpeed's settings")
    add("--zero-stage", type=int, choices=range(4), help="instead of the stage in that file")
    add("--lr", type=float, help="learning rate, instead of that in the file")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="the file may ask for bf16")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    return args


def setup(args):
    """Join the process group; return this process's device and rank, and the world size."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    longrun.prepare(args, rank, world_size, dist.all_gather_object, dist.destroy_process_group)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # deepspeed: NCCL for tensors on GPUs; Gloo for tensors on the CPU, such as the request to stop
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    dist.init_process_group(backend, timeout=timedelta(seconds=10 * args.timeout))
    deepspeed.ops.__compatible_ops__ = {}  # deepspeed: needs a compiler on CPUs otherwise
    deepspeed.init_distributed()  # deepspeed: uses the process group made above
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return device, rank, world_size


def predict(engine, batch, device):
    """Return the model's logits (B, 10) for a batch, and its labels (B,), on the device."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    dtype = next(engine.parameters()).dtype  # deepspeed: the dtype of the weights, by the settings
    images = images.to(dtype) if images.is_floating_point() else images
    return engine(images).float(), labels


def train_one_epoch(args, engine, batches, device, progress):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    engine.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
    for number, batch in enumerate(batches):
        # deepspeed: each process and batch gets its own random numbers, also after a resume
        longrun.seed(args.seed, len(progress["history"]), number, dist.get_rank())
        logits, labels = predict(engine, batch, device)
        loss = F.cross_entropy(logits, labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        engine.step()  # deepspeed: after a step's last batch optimizer.step() and zero_grad()
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    progress["step"] = engine.global_steps
    dist.all_reduce(sums)  # deepspeed: sum over all processes; all must call this, or others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, engine, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    for buffer in engine.module.buffers():  # use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, labels
    # deepspeed: at stage 3 all processes must call the engine equally often, with any batch
    for batch, counts in zero.equally_often(test_loader, args.limit_steps):
        logits, labels = predict(engine, batch, device)
        if counts:
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
            sums[2] += labels.numel()
        longrun.alive(args.timeout)
    dist.all_reduce(sums)  # deepspeed: sum over all processes; all must call this, or others hang
    return (sums[:2] / sums[2]).tolist()


def save_checkpoint(args, engine, stateful, progress):
    """Save what --resume continues from, and stop if asked to; all processes call this."""
    # deepspeed: up to stage 2 each process has all weights, and all must have the same
    longrun.check([] if args.zero_stage == 3 else list(engine.module.parameters()), progress)
    # deepspeed: each process writes its own files into a folder, which checkpoint.pt names
    sharded.save_checkpoint(args, stateful, progress, engine.save_checkpoint)
    answer = torch.tensor(longrun.wish(args))
    dist.broadcast(answer, src=0)  # deepspeed: rank 0 decides whether all stop
    if answer == longrun.STOP and len(progress["history"]) < args.epochs:
        longrun.end(args, progress, "stopped")  # job.sh requeues the job


def main(args):
    """Train as one of the processes that torchrun has started."""
    device, rank, world_size = setup(args)
    config = zero.read_settings(args)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # deepspeed: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    parts = args.gradient_accumulation_steps
    steps = min(len(sampler) // (args.batch_size * parts), args.limit_steps or len(train_set))
    if not steps:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    # deepspeed: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    # Model: replace it with yours.
    torch.manual_seed(args.seed)
    model = ConvNet()
    # checkpoint.pt contains these: add all that your training changes, such as averaged weights. Of
    # the model it has names and shapes: DeepSpeed's own files have the weights, and the rest.
    stateful = {"model": copy.deepcopy(model).to("meta")}
    # The learning rate rises during the warm-up; put another PyTorch scheduler here.
    scheduler = partial(LambdaLR, lr_lambda=lambda n: min(1, (n + 1) / (args.warmup_steps + 1)))
    scheduler = None if "scheduler" in config else scheduler  # DeepSpeed makes the file's scheduler
    # deepspeed: moves the model to the device, and makes the optimizer that the file names.
    # Each of N processes keeps 1/N of the optimizer's state (ZeRO stages 1 to 3), of the gradients
    # (2 and 3) and of the weights (3). At stage 0 each process keeps everything, as with DDP.
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, lr_scheduler=scheduler
    )
    progress = {"step": 0, "history": []}  # optimizer steps of the run, and rows of metrics.csv
    what = f"{type(model).__name__} on {args.dataset}"
    where = "nccl on cuda" if device.type == "cuda" else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    if progress["step"]:  # deepspeed: each process reads its own files
        engine.load_checkpoint(*sharded.find_checkpoint(args, progress))
        sharded.scale_rates(args, progress, engine.optimizer, engine.lr_scheduler)

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # deepspeed: another order in each epoch, the same for all
        longrun.seed(args.seed, epoch, rank)  # the loader's workers, if any, take their seeds here
        train_loader = DataLoader(
            train_set, args.batch_size, sampler=sampler, drop_last=True, **extra
        )
        batches, start = islice(train_loader, steps * parts), time.perf_counter()
        train_loss = train_one_epoch(args, engine, batches, device, progress)
        seconds = time.perf_counter() - start
        test_loss, accuracy = evaluate(args, engine, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = steps * args.global_batch / seconds
        row |= {"test_accuracy": accuracy, "samples_per_second": speed, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        save_checkpoint(args, engine, stateful, progress)
    weights = partial(zero.whole_weights, args, engine, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(weights(), file))
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    main(parse_args())
