"""Train a ConvNet with DeepSpeed ZeRO, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, and checkpoints that survive a kill. Comments
that begin with "deepspeed:" or "torchrun:" mark what a single process would not need. The functions
of plumbing keep the job alive; those of shards are about checkpoints of many files.
"""

import argparse
import math
import os
import time
from datetime import timedelta
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

# deepspeed: reads this when it is imported; without it, it looks for a device itself, and warns
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed  # noqa: E402 (the linter wants imports at the top)


def parse_args():
    parser = plumbing.arguments(__doc__, ("fp32", "bf16"))  # --epochs and what else all have
    add = parser.add_argument
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    words = "DeepSpeed's config file, which may also ask for bf16"
    add("--deepspeed_config", type=Path, default="ds_config.json", help=words)
    add("--zero-stage", type=int, choices=range(4), help="overrides the stage in the config file")
    add("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # its users are used to it
    add("--local_rank", help=argparse.SUPPRESS)  # deepspeed: its own launcher adds this
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    processes = os.environ.get("LOCAL_SIZE", 1)  # what deepspeed's own launcher sets
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))  # torchrun: on this node
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
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # deepspeed: NCCL for what is sharded, on GPUs; Gloo for small things on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=args.timeout)
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    dist.init_process_group(backend, timeout=timeout)
    # deepspeed: otherwise it would compile an op for inference on CPUs, which nothing here uses
    deepspeed.ops.__compatible_ops__ = {}
    # deepspeed: uses this process group; without one it would look for MPI
    deepspeed.init_distributed(timeout=timeout)
    return device


def train_one_epoch(args, engine, train_loader, device):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    # deepspeed: random numbers (augmentation, dropout) differ in each process and epoch
    torch.manual_seed(args.seed + engine.global_steps * args.world_size + dist.get_rank())
    engine.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    dtype = next(engine.parameters()).dtype  # of the weights, as the config file says
    for images, labels in train_loader:
        images = images.to(device, dtype, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = engine(images)
        loss = F.cross_entropy(logits.float(), labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        if not engine.lr_scheduler:  # the config file may have one
            plumbing.set_learning_rate(args, engine.optimizer, engine.global_steps)
        engine.step()  # deepspeed: after the last batch of a step, optimizer.step() and zero_grad()
    dist.all_reduce(sums)  # deepspeed: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


@torch.no_grad()
def evaluate(engine, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    dtype = next(engine.parameters()).dtype
    for images, labels in test_loader:
        images = images.to(device, dtype, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = engine(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # deepspeed: sum over all processes, which all have to call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, engine, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, engine, progress)  # stops the run if a loss is not finite
    folder = shards.begin(args, progress)
    with shards.write_errors(folder):
        engine.save_checkpoint(folder.parent, folder.name)  # deepspeed: each writes its shards
    shards.complete(args, progress, folder)


def resume(args, engine):
    """Load the engine's state from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    answer = [None]  # a list, since broadcast_object_list fills it in
    if dist.get_rank() == 0:
        answer[0] = shards.read_checkpoint(args, engine.module)
    # deepspeed: rank 0 says which files belong to the checkpoint, or which error it has found
    dist.broadcast_object_list(answer)
    checkpoint = plumbing.accept(answer[0])  # ends every process here if it is an error
    if checkpoint:
        folder = shards.check(args, checkpoint)  # deepspeed: each checks a part of the files
        loaded, _ = engine.load_checkpoint(folder.parent, folder.name)  # and reads its shards
        if loaded is None:
            wrong = f"rank {dist.get_rank()} does not find its part of {folder}"
            plumbing.fail(f"{wrong}: is it on a shared disk?")
        progress = checkpoint["progress"]
    return progress


def create_engine(args):
    """Return DeepSpeed's engine, which holds the model and the optimizer of the config file.

    Of N processes each keeps 1/N of the optimizer's state (ZeRO stages 1 to 3), of the gradients
    (2 and 3) and of the weights (3). At stage 0 each process keeps everything, as with DDP.
    """
    config = plumbing.read_config(args.deepspeed_config)
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    # DeepSpeed wants a rate here; train_one_epoch sets that of each step.
    config["optimizer"].setdefault("params", {})["lr"] = args.lr
    if args.zero_stage is not None:
        config["zero_optimization"]["stage"] = args.zero_stage
    if args.precision == "bf16":
        config["bf16"]["enabled"] = True
    torch.manual_seed(args.seed)
    model = ConvNet()
    parameters = model.parameters()
    with plumbing.config_errors(args):
        # deepspeed: the engine moves `model` to its device, and has the optimizer of the file
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    plumbing.set_timeout(args, engine.data_parallel_group)  # deepspeed: has 10 minutes or more
    plumbing.note_config(args, engine)  # stage, precision and so on, whatever has asked for them
    return engine


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one of the processes that torchrun has started."""
    plumbing.prepare_process(args)
    device = setup(args)
    rank = dist.get_rank()

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    # Pinned memory: no step waits for its copy to a GPU.
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}
    # deepspeed: shuffled parts of equal length: who had more steps would wait forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # deepspeed: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    # deepspeed: at stage 3 all processes must call forward equally often: with empty batches
    while len(batches) < math.ceil(len(test_set) / (args.world_size * args.batch_size)):
        batches.append([])
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    engine = create_engine(args)
    progress = resume(args, engine)

    # Train.
    plumbing.print_config(args, plumbing.learning_rate(args, args.warmup_steps))
    name = type(engine.module).__name__
    plumbing.print_header(args, f"{name} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # deepspeed: shuffles anew; each takes its part of one order
        batches = BatchSampler(sampler, args.batch_size, drop_last=True)
        batches = plumbing.batches_left(args, progress, batches)  # those of complete steps
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, samples, seconds = train_one_epoch(args, engine, train_loader, device)
        test_loss, accuracy = evaluate(engine, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress["step"] = engine.global_steps
        save_checkpoint(args, engine, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    weights = shards.gather_weights(engine.module)  # deepspeed: at stage 3, from all processes
    if rank == 0:  # deepspeed: all processes have the same weights now; one writes them
        plumbing.write(path, lambda file: torch.save(weights, file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
