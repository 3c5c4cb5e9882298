"""Train a ConvNet with DistributedDataParallel (DDP) on one node; this script starts its processes itself.

Locally:   python train.py --processes 2
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with a tag, as "ddp:", mark what a script for a single process would not need. What else a long
job on a cluster needs, such as checkpoints that survive a kill and errors that say what to do, is in plumbing.py.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16: autocast


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2, help="number of processes")
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, shared by all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    args.world_size = args.processes
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)
    return args


def setup(args, local_rank, port):
    """Join the process group, and return this process's device."""
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # ddp: Gloo for tensors on the CPU
    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # ddp: here the processes exchange their addresses
    # ddp: waits for all processes and connects them
    dist.init_process_group(backend, store=store, rank=local_rank, world_size=args.world_size, timeout=timeout)
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    ddp_model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    for images, labels in train_loader:
        images = images.to(device, DTYPES[args.precision], non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        loss.backward()  # ddp: averages the gradients over all processes
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(labels)  # on the device: no step waits for it
        sums[1] += len(labels)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images = images.to(device, DTYPES[args.precision], non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, model, optimizer, progress):
    """Save model, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    if dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
        plumbing.write_checkpoint(args, state)


def resume(args, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; one row of metrics.csv for each complete epoch
    found = plumbing.read_checkpoint(args, model) if dist.get_rank() == 0 else None
    # ddp: rank 0 decides, and each process reads the file; ends this process if rank 0 has found an error
    if checkpoint := plumbing.share_checkpoint(args, found):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
    return progress


@plumbing.print_errors
def main(local_rank, args, port):
    """Train as one process of args.world_size; `port` is that of the store which launch() has opened."""
    plumbing.prepare_process(args)
    device, rank = setup(args, local_rank, port), dist.get_rank()

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    train_loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=True), **loading)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    progress = resume(args, model, optimizer)
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    ddp_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    # DDP regroups gradients after its first backward pass: one now, on zeros shaped as the input, keeps resumes exact
    plumbing.fix_summation_order(ddp_model, torch.zeros(1, 1, 28, 28, device=device, dtype=DTYPES[args.precision]))

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order in each epoch, the same in all processes
        train_loss, samples, seconds = train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress)
        test_loss, test_accuracy = evaluate(args, model, test_loader, device)  # not DDP: shards may differ by a batch
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


def launch(args):
    """Start the processes and wait for them."""
    plumbing.end_on_ctrl_c()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ddp: port 0 means any free port
    try:
        # ddp: each process calls main(local_rank, args, port); if one fails, the others are ended
        mp.spawn(main, (args, store.port), args.world_size)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        plumbing.report_failure(error)


if __name__ == "__main__":
    launch(parse_args())
