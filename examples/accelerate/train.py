"""Train a ConvNet with Hugging Face's accelerate, which starts it on one or many nodes; stops at any step.

Locally:   accelerate launch --config_file accelerate.yaml --num_processes 2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with a tag, as "accelerate:", mark what a script for a single process would not need. What else a
long job on a cluster needs, such as checkpoints that survive a kill and errors that say what to do, is in plumbing.py.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

# The dtype of weights and inputs. With bf16 the weights stay in fp32, and accelerate has autocast compute in bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    parser.add_argument("--checkpoint-every", type=plumbing.steps_or_minutes, help="also save every 500 (steps), 10min")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # accelerate launch: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # accelerate launch: number of processes on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it so: accelerate launch --config_file accelerate.yaml --num_processes 2 train.py")
    return args


def setup(args):
    """Join the process group; return accelerate's Accelerator, which knows this process's device and rank."""
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    local_rank = int(os.environ["LOCAL_RANK"])  # accelerate launch: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # ddp: Gloo for tensors on the CPU
    # ddp: the processes find each other by what `accelerate launch` has put into the environment. accelerate: would do
    # this itself, but pass over a timeout that is its own, 600 s
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    accelerator = Accelerator(
        cpu=device.type == "cpu",  # accelerate: else it would not take them for a group where there is no GPU
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps),
    )
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    return accelerator


def train_one_epoch(args, accelerator, ddp_model, train_loader, optimizer, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    ddp_model.train()
    start = time.perf_counter() - progress["seconds"]
    sums = progress["sums"]  # loss, samples: a checkpoint within the epoch has them, too
    for images, labels in train_loader:
        vote = torch.tensor([plumbing.requested(args, progress, time.perf_counter() - start)])
        voting = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)  # stop: the largest wish is that of all
        images = images.to(accelerator.device, DTYPES[args.precision], non_blocking=True)
        labels = labels.to(accelerator.device, non_blocking=True)
        with accelerator.accumulate(ddp_model):  # accumulation: averages gradients in the last batch of a step only
            loss = F.cross_entropy(ddp_model(images), labels)
            accelerator.backward(loss)  # accelerate: a share of the loss; ddp: averages gradients over all processes
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(labels)  # on the device: no step waits for it
        sums[1] += len(labels)
        voting.wait()  # now `vote` is 0 to go on, 1 to save after this step, 2 to stop then
        if not accelerator.sync_gradients:  # accumulation: more batches belong to this step
            continue
        if args.max_grad_norm:
            accelerator.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        if vote:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, accelerator, accelerator.unwrap_model(ddp_model), optimizer, progress)
        if vote == 2:
            plumbing.stop(args, progress)  # stop: ends this process, without an error; `run` requeues
    progress["seconds"] = time.perf_counter() - start
    loss_sum, samples = accelerator.reduce(sums).tolist()  # accelerate: sum over all processes
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, accelerator, model, test_loader):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, correct, samples
    for images, labels in test_loader:
        images = images.to(accelerator.device, DTYPES[args.precision], non_blocking=True)
        labels = labels.to(accelerator.device, non_blocking=True)
        logits = model(images)  # accelerate: prepare() has put autocast around it, if it computes in bf16
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    loss_sum, correct, samples = accelerator.reduce(sums).tolist()  # accelerate: sum over all processes
    return loss_sum / samples, correct / samples


def save_checkpoint(args, accelerator, model, optimizer, progress):
    """Save model, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    progress = progress | {"sums": accelerator.reduce(progress["sums"])}  # accelerate: over all processes
    if accelerator.is_main_process:  # ddp: all have the same weights; one writes them, atomically: no save_state()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
        plumbing.write_checkpoint(args, state)


def resume(args, accelerator, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    # step: of the whole run; history: rows of metrics.csv; sums, of this process, and seconds: of the current epoch
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    progress = {"step": 0, "sums": sums, "seconds": 0.0, "history": []}
    found = plumbing.read_checkpoint(args, model) if accelerator.is_main_process else None
    # ddp: rank 0 decides, and each process reads the file; ends this process if rank 0 has found an error
    if checkpoint := plumbing.share_checkpoint(args, found):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
        # ddp: rank 0 keeps the sums, which are of all; the others begin at 0, else they would count world_size times
        progress["sums"] = progress["sums"].to(sums.device) * accelerator.is_main_process
    return progress


@record  # accelerate launch: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    plumbing.prepare_process(args)
    accelerator, rank = setup(args), dist.get_rank()

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    loading = {"batch_size": None, "pin_memory": torch.cuda.is_available()}  # pinned: no step waits for its copy
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = ConvNet().to(accelerator.device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=accelerator.device.type == "cuda")
    # accelerate: wraps `model` in DDP, if there are several processes; not the loaders, which would repeat samples
    ddp_model, optimizer = accelerator.prepare(model, optimizer)
    progress = resume(args, accelerator, model, optimizer)
    # DDP regroups gradients after its first backward pass: one now, on zeros shaped as the input, keeps resumes exact
    plumbing.fix_summation_order(ddp_model, torch.zeros(1, 1, 28, 28).to(accelerator.device, DTYPES[args.precision]))

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", accelerator.device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order in each epoch, the same in all processes
        done = progress["step"] - epoch * args.steps_per_epoch  # steps of this epoch, if the run was stopped within it
        first, last = done * args.gradient_accumulation_steps, args.steps_per_epoch * args.gradient_accumulation_steps
        batches = list(BatchSampler(sampler, args.batch_size, drop_last=True))[first:last]
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, samples, seconds = train_one_epoch(args, accelerator, ddp_model, train_loader, optimizer, progress)
        # stop: an evaluation may be long: it ends after the same batch in all processes, which save what was trained
        batches = plumbing.until_stopped(args, progress, test_loader, save_checkpoint, accelerator, model, optimizer)
        test_loss, test_accuracy = evaluate(args, accelerator, model, batches)  # not DDP: shards may differ
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, accelerator, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
