"""Train a ConvNet with Hugging Face's accelerate, started by its launcher on one or many nodes.

Locally:   accelerate launch --config_file accelerate.yaml --num_processes 2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, gradient accumulation, and a stop after any step.
Comments that begin with "ddp:" or "accelerate:" mark what a single process would not need.
"""

import argparse
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
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
    add("--gradient-accumulation-steps", type=positive, default=1, help="batches per step")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--precision", choices=("fp32", "bf16", "fp64"), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--checkpoint-every", type=float, metavar="MINUTES", help="also save within an epoch")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with accelerate launch, as the first lines of train.py say")
    # accelerate: the launcher sets these if your configuration file says so
    if "true" in map(os.environ.get, ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")):
        parser.error("DeepSpeed and FSDP have other checkpoints: use the example deepspeed or fsdp")
    batches = int(os.environ["WORLD_SIZE"]) * args.gradient_accumulation_steps  # of all, per step
    args.global_batch = args.global_batch or args.batch_size * batches
    args.batch_size, rest = divmod(args.global_batch, batches)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {batches}")
    return args


def setup(args):
    """Join the process group; return the Accelerator, the device, the rank and the world size."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    longrun.prepare(args, rank, world_size, dist.all_gather_object, dist.destroy_process_group)
    has_gpus = torch.cuda.is_available()
    # ddp: NCCL for tensors on GPUs; Gloo for tensors on the CPU, such as the request to stop
    backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
    joining = InitProcessGroupKwargs(backend, timeout=timedelta(seconds=10 * args.timeout))
    # accelerate: joins the process group by MASTER_ADDR and MASTER_PORT, and chooses the GPU
    accelerator = Accelerator(
        cpu=not has_gpus,
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        kwargs_handlers=[joining],
    )
    if has_gpus:
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return accelerator, accelerator.device, rank, world_size


def predict(args, model, batch, device):
    """Return the model's logits (B, 10) for a batch, and its labels (B,), on the device."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    images = images.double() if args.precision == "fp64" and images.is_floating_point() else images
    return model(images), labels  # accelerate: for bf16 prepare() adds autocast


def train_one_epoch(args, accelerator, ddp_model, batches, stateful, progress):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = progress["sums"]  # loss, labels; a checkpoint within the epoch contains these sums
    optimizer, scheduler = stateful["optimizer"], stateful["scheduler"]
    # ddp: each process and batch gets its own random numbers (dropout), also after a resume
    longrun.seed(args.seed, progress["step"], 0, dist.get_rank())
    for number, batch in enumerate(batches, 1):
        part = number % args.gradient_accumulation_steps  # accumulation: 0 is a step's last batch
        if part == 0:  # stop: rank 0 looks for a request, and broadcasts it during backward()
            answer = torch.tensor(longrun.wish(args))
            pending = dist.broadcast(answer, src=0, async_op=True)
        # accumulation: accelerate averages the gradients only in the last batch of a step
        with accelerator.accumulate(ddp_model):
            logits, labels = predict(args, ddp_model, batch, accelerator.device)
            loss = F.cross_entropy(logits, labels)
            # accelerate: divides the loss by the number of batches per step
            accelerator.backward(loss)  # ddp: averages the gradients
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        if part == 0:
            if args.max_grad_norm:
                accelerator.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress["step"] += 1
            progress["epoch_step"] += 1
            pending.wait()
            if answer != longrun.GO_ON:
                # ddp: the checkpoint contains the sums over all processes. It is a single file: a
                # kill while accelerator.save_state() writes its files can leave only some of them.
                so_far = progress | {"sums": accelerator.reduce(sums)}
                longrun.save_checkpoint(args, stateful, so_far)
            if answer == longrun.STOP:
                longrun.end(args, progress, "stopped")  # stop: exits; job.sh may requeue the job
        longrun.seed(args.seed, progress["step"], part, dist.get_rank())  # for the next batch
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    sums = accelerator.reduce(sums)  # ddp: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, accelerator, model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    for buffer in model.buffers():  # ddp: use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, correct, labels
    for batch in islice(test_loader, args.limit_steps):
        logits, labels = predict(args, model, batch, accelerator.device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
        longrun.alive(args.timeout)
    sums = accelerator.reduce(sums)  # ddp: sum over all processes; each must call this
    return (sums[:2] / sums[2]).tolist()


def main(args):
    """Train as one of the processes that accelerate launch has started."""
    accelerator, device, rank, world_size = setup(args)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    parts = args.gradient_accumulation_steps
    steps = min(len(sampler) // (args.batch_size * parts), args.limit_steps or len(train_set))
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
    # step: of the run; epoch_step: of the epoch; history: rows of metrics.csv; sums: loss, samples.
    progress = {"step": 0, "epoch_step": 0, "history": [], "sums": torch.zeros(2).double()}
    what = f"{type(model).__name__} on {args.dataset}"
    where = "nccl on cuda" if device.type == "cuda" else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    # ddp: a checkpoint has the sums of all processes: rank 0 takes them, the others start at 0
    progress["sums"] = progress["sums"].to(device) * (rank == 0)
    # accelerate: wraps the model in DDP, which copies rank 0's weights and averages gradients.
    # prepare() does not get the loaders, because it would repeat their last samples. It does not
    # get the scheduler, which would then take one step for each process.
    ddp_model, stateful["optimizer"] = accelerator.prepare(model, optimizer)

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: a new order in each epoch; each process takes its part
        done = progress["epoch_step"] * parts  # batches done before a stop in this epoch
        left = list(sampler)[done * args.batch_size :]  # the indices that are still to be read
        longrun.seed(args.seed, epoch, rank)  # the loader's workers, if any, take their seeds here
        train_loader = DataLoader(train_set, args.batch_size, sampler=left, drop_last=True, **extra)
        count, start = max(0, steps * parts - done), time.perf_counter()
        batches = islice(train_loader, count)  # leaves out an incomplete last step
        train_loss = train_one_epoch(args, accelerator, ddp_model, batches, stateful, progress)
        seconds = time.perf_counter() - start
        # Not ddp_model: its forward pass can wait for a process that has fewer test batches.
        test_loss, accuracy = evaluate(args, accelerator, model, test_loader)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = count * args.batch_size * world_size / seconds
        row |= {"test_accuracy": accuracy, "samples_per_second": speed, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        progress |= {"epoch_step": 0, "sums": torch.zeros_like(progress["sums"])}
        longrun.save_checkpoint(args, stateful, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    main(parse_args())
