"""Train an image classifier on image files with DistributedDataParallel, started by torchrun.

Once:      python make_images.py          (writes an example, images/; your own: --data-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, mixed precision, and a stop after any step.
Comments that begin with "ddp:" or "torchrun:" mark what a single process would not need.
"""

import argparse
import contextlib
import math
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models

import image_files
import longrun

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the weights stay in fp32
# These two models have several outputs in training.
NAMES = sorted({*models.list_models(module=models)} - {"googlenet", "inception_v3"})


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--data-dir", default="images", help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    add("--image-size", type=positive, default=32, help="pixels; 224 is usual for photographs")
    add("--model", choices=NAMES, default="resnet18", metavar="NAME", help="model of torchvision")
    add("--weights", type=Path, help="state dict of the model to start from; see README.md")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=16, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--gradient-accumulation-steps", type=positive, default=1, help="batches per step")
    add("--lr", type=float, default=5e-4, help="learning rate")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--precision", choices=("fp32", *AUTOCAST, "fp64"), default="fp32", help="bf16 is mixed")
    add("--sync-batchnorm", action="store_true", help="BatchNorm over all processes (GPUs)")
    add("--compile", action="store_true", help="compile the model: for long runs on GPUs")
    # loader: the cores of this process minus one; without SLURM torchrun gives it one core
    workers = max(1, torch.get_num_threads() - 1)
    add("--workers", type=lambda n: positive(n, 0), default=workers, help="workers per process")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and augmentation")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--checkpoint-every", type=float, metavar="MINUTES", help="also save within an epoch")
    add("--keep-epochs", action="store_true", help="also keep the weights after each epoch")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    batches = int(os.environ["WORLD_SIZE"]) * args.gradient_accumulation_steps  # of all, per step
    args.global_batch = args.global_batch or args.batch_size * batches
    args.batch_size, rest = divmod(args.global_batch, batches)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {batches}")
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
        torch.backends.cudnn.benchmark = True  # finds the fastest convolutions for these sizes
    # ddp: NCCL for tensors on GPUs; Gloo for tensors on the CPU, such as the request to stop
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    dist.init_process_group(backend, timeout=timedelta(seconds=10 * args.timeout))
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return device, rank, world_size


def predict(args, model, batch, device):
    """Return the model's logits (B, classes) for a batch, and its labels (B,), on the device."""
    images, labels = (part.to(device, non_blocking=True) for part in batch)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    images = image_files.normalise(images, dtype)
    with torch.autocast(device.type, AUTOCAST.get(args.precision), args.precision in AUTOCAST):
        logits = model(images)
    return logits.to(dtype), labels


def train_one_epoch(args, ddp_model, batches, stateful, progress):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = progress["sums"]  # loss, labels; a checkpoint within the epoch contains these sums
    optimizer, scheduler = stateful["optimizer"], stateful["scheduler"]
    scaler = stateful["scaler"]  # fp16: the loss is scaled up, because small gradients would be 0
    for number, batch in enumerate(batches, 1):
        part = number % args.gradient_accumulation_steps  # accumulation: 0 is a step's last batch
        # ddp: each process and batch gets its own random numbers (dropout), also after a resume
        longrun.seed(args.seed, progress["step"], part, dist.get_rank())
        if part == 0:  # stop: rank 0 looks for a request, and broadcasts it during backward()
            answer = torch.tensor(longrun.wish(args))
            pending = dist.broadcast(answer, src=0, async_op=True)
        # accumulation: no_sync() keeps DDP from averaging the gradients after every batch
        with ddp_model.no_sync() if part else contextlib.nullcontext():
            logits, labels = predict(args, ddp_model, batch, sums.device)
            loss = F.cross_entropy(logits, labels)
            # ddp: averages the gradients
            scaler.scale(loss / args.gradient_accumulation_steps).backward()
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        if part == 0:
            if args.max_grad_norm:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            progress["step"] += 1
            progress["epoch_step"] += 1
            pending.wait()
            if answer != longrun.GO_ON:
                save_checkpoint(args, stateful, progress)
            if answer == longrun.STOP:
                longrun.end(args, progress, "stopped")  # stop: exits; job.sh may requeue the job
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return mean loss, top-1 and top-5 accuracy, 0 to 1, over the samples of all processes."""
    model.eval()
    for buffer in model.buffers():  # ddp: use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, correct, in top 5, labels
    for batch in islice(test_loader, args.limit_steps):
        logits, labels = predict(args, model, batch, device)
        likeliest = logits.topk(min(5, logits.shape[1])).indices  # (B, 5): the likeliest is first
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (likeliest[:, 0] == labels).sum()
        sums[2] += (likeliest == labels[:, None]).sum()
        sums[3] += labels.numel()
        longrun.alive(args.timeout)
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[:3] / sums[3]).tolist()


def save_checkpoint(args, stateful, progress):
    """Save what --resume continues from; all processes call this, and rank 0 writes."""
    sums = progress["sums"].clone()
    dist.all_reduce(sums)  # ddp: the checkpoint contains the sums over all processes
    longrun.save_checkpoint(args, stateful, progress | {"sums": sums})
    if args.keep_epochs and progress["epoch_step"] == 0:
        name, weights = f"model-{len(progress['history'])}.pt", stateful["model"].state_dict()
        longrun.write(args, name, lambda file: torch.save(weights, file))


def main(args):
    """Train as one of the processes that torchrun has started."""
    device, rank, world_size = setup(args)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    train_set, test_set = image_files.load(args.data_dir, args.image_size, args.seed)
    args.classes = train_set.classes  # run.json contains them, for predict.py
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    parts = args.gradient_accumulation_steps
    steps = min(len(sampler) // (args.batch_size * parts), args.limit_steps or len(train_set))
    if not steps:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # loader: workers read, decode and augment images while the process trains
    extra = {"num_workers": args.workers, "worker_init_fn": image_files.start_worker}
    extra |= {"pin_memory": device.type == "cuda", "persistent_workers": args.workers > 0}
    order = []  # the indices that are still to be read in an epoch
    train_loader = DataLoader(train_set, args.batch_size, sampler=order, drop_last=True, **extra)
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    # Model: replace it with yours.
    torch.manual_seed(args.seed)
    model = models.get_model(args.model, num_classes=len(args.classes))
    if args.weights:
        image_files.load_weights(model, args.weights)
    if args.sync_batchnorm:  # ddp: its statistics are over the batches of all processes
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.double() if args.precision == "fp64" else model
    model = model.to(device, memory_format=torch.channels_last)  # faster convolutions
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    def rate(step):
        """Return the factor of --lr: it rises in the warm-up, and falls to 0 along a cosine."""
        fall = (1 + math.cos(math.pi * step / (steps * args.epochs))) / 2
        return fall * min(1, (step + 1) / (args.warmup_steps + 1))

    scheduler = LambdaLR(optimizer, rate)  # put another PyTorch scheduler here
    # A checkpoint contains these: add all that your training changes, such as averaged weights.
    stateful = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    # step: of the run; epoch_step: of the epoch; history: rows of metrics.csv; sums: loss, samples.
    progress = {"step": 0, "epoch_step": 0, "history": [], "sums": torch.zeros(2).double()}
    what = f"{args.model} on {args.data_dir}"
    where = "nccl on cuda" if device.type == "cuda" else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    # ddp: a checkpoint has the sums of all processes: rank 0 takes them, the others start at 0
    progress["sums"] = progress["sums"].to(device) * (rank == 0)
    # ddp: copies rank 0's weights to all processes, and averages gradients in backward()
    ddp_model = DistributedDataParallel(torch.compile(model) if args.compile else model)

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: a new order in each epoch; each process takes its part
        train_set.epoch.fill_(epoch)  # loader: workers augment each image differently
        done = progress["epoch_step"] * parts  # batches done before a stop in this epoch
        order[:] = list(sampler)[done * args.batch_size :]
        longrun.seed(args.seed, epoch, rank)  # for the loader's workers, which stay for all epochs
        count, start = max(0, steps * parts - done), time.perf_counter()
        batches = islice(train_loader, count)  # leaves out an incomplete last step
        train_loss = train_one_epoch(args, ddp_model, batches, stateful, progress)
        seconds = time.perf_counter() - start
        # Not ddp_model: its forward pass can wait for a process that has fewer test batches.
        test_loss, accuracy, top5 = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "test_top5_accuracy": top5}
        speed = count * args.batch_size * world_size / seconds
        row |= {"samples_per_second": speed, "seconds": seconds, "world_size": world_size}
        progress["history"].append(row)
        progress |= {"epoch_step": 0, "sums": torch.zeros_like(progress["sums"])}
        save_checkpoint(args, stateful, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    try:
        main(parse_args())
    except image_files.DataError as error:  # a worker's is the last line of a traceback
        longrun.fail(str(error).rpartition("DataError: ")[2].strip())
