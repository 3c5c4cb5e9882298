"""Train a ConvNet with DeepSpeed ZeRO, of which each process holds a shard, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "deepspeed:" or "torchrun:" mark what a script for a single process would not need. What else
a long job on a cluster needs, such as errors that say what to do, is in plumbing.py; shards.py is about checkpoints.
"""

import argparse
import math
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet
from plumbing import shards

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # deepspeed: else it warns
import deepspeed  # noqa: E402


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, shared by all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="or set bf16 in the config file")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--deepspeed_config", type=Path, default="ds_config.json", help="DeepSpeed's config file")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="overrides the stage in the config file")
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # deepspeed: its users write this
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed: its own launcher adds this
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))  # torchrun: on this node
    plumbing.check_args(parser, args)
    config = plumbing.read_config(args.deepspeed_config)
    args.gradient_accumulation_steps = config.get("gradient_accumulation_steps", 1)
    plumbing.share_batch(args, args.gradient_accumulation_steps)
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    return args


def setup(args):
    """Join the process group, and return this process's device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # deepspeed: Gloo for tensors on the CPU
    timeout = timedelta(seconds=args.timeout)
    # torchrun: has set MASTER_ADDR, MASTER_PORT and RANK, by which the processes find each other here
    dist.init_process_group(backend, timeout=timeout)
    deepspeed.ops.__compatible_ops__ = {}  # deepspeed: on CPUs it would compile an op for inference
    deepspeed.init_distributed(timeout=timeout)  # deepspeed: uses this process group; without one it looks for MPI
    return device


def train_one_epoch(args, engine, train_loader, device):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    engine.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    dtype = next(engine.parameters()).dtype  # of the weights, as the config file says
    for images, labels in islice(train_loader, args.steps_per_epoch * args.gradient_accumulation_steps):
        images = images.to(device, dtype, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss = F.cross_entropy(engine(images).float(), labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(labels)  # on the device: no step waits for it
        sums[1] += len(labels)
        if not engine.lr_scheduler:  # the config file may have one
            for param_group in engine.optimizer.param_groups:
                param_group["lr"] = learning_rate(args, engine.global_steps)
        engine.step()  # deepspeed: every gradient_accumulation_steps calls, optimizer.step() and zero_grad()
    dist.all_reduce(sums)  # deepspeed: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(engine, test_loader, device):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images = images.to(device, next(engine.parameters()).dtype, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = engine(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # deepspeed: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, engine, progress):
    """Save the engine's state and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, engine, progress)  # stops the run if a loss is not finite, and the like
    folder = shards.begin(args, progress)
    with shards.write_errors(folder):
        engine.save_checkpoint(folder.parent, folder.name)  # deepspeed: each process writes its shards
    shards.complete(args, progress, folder)


def resume(args, engine):
    """Load the engine's state from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; one row of metrics.csv for each complete epoch
    found = [shards.read_checkpoint(args, engine.module) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)  # deepspeed: rank 0 says which files belong to the checkpoint
    if checkpoint := plumbing.accept(found[0]):  # ends this process if rank 0 has found an error
        folder = shards.check(args, checkpoint)  # deepspeed: each process checks a part of the files
        loaded, _ = engine.load_checkpoint(folder.parent, folder.name)  # deepspeed: each process reads its shards
        if loaded is None:
            plumbing.fail(f"rank {dist.get_rank()} does not find its part of {folder}: is it on a shared disk?")
        progress = checkpoint["progress"]
    return progress


def create_engine(args):
    """Return DeepSpeed's engine, which holds the model on its device and the optimizer of the config file.

    Of N processes each keeps 1/N of the optimizer's state (ZeRO stages 1 to 3), of the gradients (2 and 3) and of the
    weights (3). At stage 0 each process keeps everything, as with DistributedDataParallel.
    """
    config = plumbing.read_config(args.deepspeed_config)
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    config["optimizer"].setdefault("params", {})["lr"] = learning_rate(args, args.warmup_steps)  # after the warm-up
    if args.zero_stage is not None:
        config["zero_optimization"]["stage"] = args.zero_stage
    if args.precision == "bf16":
        config["bf16"]["enabled"] = True
    torch.manual_seed(args.seed)
    model = ConvNet()
    with plumbing.config_errors(args):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    plumbing.set_timeout(args, engine.data_parallel_group)  # deepspeed: 10 minutes or more else
    plumbing.note_config(args, engine)  # stage, precision and so on, as the command line or the config file says
    return engine


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    plumbing.prepare_process(args)
    device, rank = setup(args), dist.get_rank()

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    # deepspeed: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=True), **loading)
    # deepspeed: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = math.ceil(len(test_set) / (args.world_size * args.batch_size))
    batches += [[]] * (longest - len(batches))  # deepspeed: at stage 3 all must call forward equally often
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    engine = create_engine(args)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    progress = resume(args, engine)

    # Train.
    plumbing.print_config(args, learning_rate(args, args.warmup_steps))
    plumbing.print_header(args, f"{type(engine.module).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # deepspeed: another order in each epoch, the same in all processes
        train_loss, samples, seconds = train_one_epoch(args, engine, train_loader, device)
        test_loss, test_accuracy = evaluate(engine, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress["step"] = engine.global_steps
        save_checkpoint(args, engine, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    weights = shards.gather_weights(engine.module)
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
