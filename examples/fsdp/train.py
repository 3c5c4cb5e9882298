"""Train a GPT with FSDP2 and tensor parallelism, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, tensor parallelism, checkpoints, and a stop after any step.
Comments that begin with "fsdp:", "tensor:" or "torchrun:" mark what one process does not need.
"""

import argparse
import copy
import os
import time
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint as computed_twice
from torch.utils.data import DataLoader, DistributedSampler, Subset

import longrun
import parallel
import sharded
import token_data as data
from tiny_gpt import TinyGPT, initialise, token_loss


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--data-dir", help="folder with train.bin and val.bin; without it: a random source")
    add("--tokens", type=positive, default=60_000, help="length of the random source")
    add("--vocabulary", type=positive, default=256, help="number of different tokens; 256: bytes")
    add("--context", type=positive, default=64, help="tokens per sample")
    add("--width", type=positive, default=128, help="numbers that represent a token")
    add("--layers", type=positive, default=2, help="blocks of the model")
    add("--heads", type=positive, default=4, help="heads of each block's attention")
    add("--replicas", type=positive, default=1, help="copies of the model, each in shards")
    add("--tensor-parallel", type=positive, default=1, help="processes that share a layer's work")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    add("--compile", action="store_true", help="compile the blocks: for long runs on GPUs")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=8, help="samples per batch of each group")
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
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    # tensor: the processes of a group read the same samples; a group counts as one process
    args.group = int(os.environ["RANK"]) // args.tensor_parallel
    args.groups, rest = divmod(int(os.environ["WORLD_SIZE"]), args.tensor_parallel)
    if rest or args.groups % args.replicas:
        parser.error("--tensor-parallel times --replicas must divide the number of processes")
    if args.width % args.heads or args.heads % args.tensor_parallel:
        parser.error("--heads must divide --width, and --tensor-parallel must divide --heads")
    batches = args.groups * args.gradient_accumulation_steps  # of all, per step
    args.global_batch = args.global_batch or args.batch_size * batches
    args.batch_size, rest = divmod(args.global_batch, batches)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {batches}")
    return args


def setup(args):
    """Join the process group; return this process's device and rank, and the mesh of all ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    longrun.prepare(args, rank, world_size, dist.all_gather_object, dist.destroy_process_group)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # fsdp: NCCL for tensors on GPUs; Gloo for tensors on the CPU, such as the request to stop
    backend, timeout = "cpu:gloo,cuda:nccl", timedelta(seconds=10 * args.timeout)
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    dist.init_process_group(backend if device.type == "cuda" else "gloo", timeout=timeout)
    # fsdp: replicas have the same weights; the processes of each replica divide them ("shard")
    # tensor: neighbours on one node get the same samples, and share the work of each layer
    sizes = (args.replicas, args.groups // args.replicas, args.tensor_parallel)
    mesh = dist.init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "shard", "tensor"))
    for group in mesh.get_all_groups() if hasattr(dist, "set_timeout") else ():  # PyTorch 2.15
        dist.set_timeout(timeout, group)
    longrun.alive(None)  # the first step has no time limit: it may compile kernels
    return device, rank, world_size, mesh


def predict(model, batch, device):
    """Return the model's logits (N, vocabulary) of the N tokens of a batch, and labels (N,)."""
    tokens, labels = (part.to(device, non_blocking=True) for part in batch)
    return model(tokens).flatten(0, 1), labels.flatten()


def train_one_epoch(args, model, optimizer, batches, stateful, progress):
    """Train to the end of an epoch; return the mean loss over the tokens of all processes."""
    model.train()
    sums = progress["sums"]  # loss, tokens; a checkpoint within the epoch contains these sums
    loss_function = torch.compile(token_loss) if args.compile else token_loss
    # fsdp: each group and batch gets its own random numbers (dropout), also after a resume
    longrun.seed(args.seed, progress["step"], 0, args.group)
    for number, batch in enumerate(batches, 1):
        part = number % args.gradient_accumulation_steps  # accumulation: 0 is a step's last batch
        if part == 0:  # stop: rank 0 looks for a request, and broadcasts it during backward()
            answer = torch.tensor(longrun.wish(args))
            pending = dist.broadcast(answer, src=0, async_op=True)
        logits, labels = predict(model, batch, sums.device)
        loss = loss_function(logits, labels)
        (loss / args.gradient_accumulation_steps).backward()  # fsdp: averages, and keeps a shard
        count = labels.numel() / args.tensor_parallel  # tensor: each process counts its share
        sums[0] += loss.detach() * count  # not .item(): Python would wait for the GPU
        sums[1] += count
        if part == 0:
            if args.max_grad_norm:
                parallel.clip_grad_norm(model, args.max_grad_norm)
            optimizer.step()  # fsdp: each process updates its shard of the weights
            stateful["scheduler"].step()
            optimizer.zero_grad()
            progress["step"] += 1
            progress["epoch_step"] += 1
            pending.wait()
            if answer != longrun.GO_ON:
                save_checkpoint(args, model, optimizer, stateful, progress)
            if answer == longrun.STOP:
                longrun.end(args, progress, "stopped")  # stop: exits; job.sh may requeue the job
        longrun.seed(args.seed, progress["step"], part, args.group)  # for the next batch
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    dist.all_reduce(sums)  # fsdp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # its last batch may be smaller: no recompilation
def evaluate(args, model, test_loader, device):
    """Return the mean loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    # fsdp: each call of the model gathers weights, so all processes must call it equally often
    count, batches, batch = max(longrun.gather(len(test_loader))), iter(test_loader), None
    for number in range(min(count, args.limit_steps or count)):
        batch = next(batches, batch)
        logits, labels = predict(model, batch, device)
        if number < len(test_loader):
            sums[0] += token_loss(logits, labels, "sum")
            sums[1] += labels.numel()  # tensor: a group's processes add the same, which cancels out
        longrun.alive(args.timeout)
    dist.all_reduce(sums)  # fsdp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


def shard(args, model, mesh, device):
    """Divide each weight of a model among the processes; return the model, without values yet."""
    parallel.libc.mallopt(-3, 2**22)  # fsdp: freed memory goes back to the system, from 4 MB on
    if args.tensor_parallel > 1:
        parallel.split_layers(model, mesh["tensor"])
    # fsdp: replicas average their gradients, and never send weights
    options = {"mesh": mesh["replica", "shard"] if args.replicas > 1 else mesh["shard"]}
    if args.precision == "bf16":  # fsdp: weights are gathered as bf16, gradients summed in fp32
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        if args.compile:  # compiles the block's own work, not the gathering of its weights
            block.forward = torch.compile(block.forward)
        if args.gradient_checkpointing:  # activations are computed again in the backward pass
            block.forward = partial(computed_twice, block.forward, use_reentrant=False)
        # fsdp: a block's weights are gathered from all processes before it computes, then freed
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)  # fsdp: the weights outside the blocks
    return model.to_empty(device=device)


def save_checkpoint(args, model, optimizer, stateful, progress):
    """Save what --resume continues from; all processes call this, and each writes its shards."""
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # fsdp: the checkpoint contains the sums over all processes
    longrun.check([parallel.size_of(model)], progress)  # ends the run if a weight is not finite
    state = {"state": parallel.State(model, optimizer)}
    sharded.save_checkpoint(
        args, stateful, progress, lambda where, name: dcp.save(state, checkpoint_id=where / name)
    )


def main(args):
    """Train as one of the processes that torchrun has started."""
    device, rank, world_size, mesh = setup(args)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.data_dir, args.context, args.vocabulary, args.tokens)
    except data.DataError as error:
        longrun.fail(error)
    # fsdp: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, args.groups, args.group, seed=args.seed, drop_last=True)
    parts = args.gradient_accumulation_steps
    steps = min(len(sampler) // (args.batch_size * parts), args.limit_steps or len(train_set))
    if not steps or len(test_set) < args.groups:
        longrun.fail(f"too few samples: {len(sampler)} for each group, {len(test_set)} to test")
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    # fsdp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(args.group, len(test_set), args.groups))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    # Model: replace it with yours.
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(args.vocabulary, args.context, args.width, args.heads, args.layers)
    model = model.double() if args.precision == "fp64" else model
    whole = copy.deepcopy(model)
    model = shard(args, model, mesh, device)
    fused = device.type == "cuda" and args.tensor_parallel == 1
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=fused, foreach=not fused)
    # The learning rate rises during the warm-up; put another PyTorch scheduler here.
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / (args.warmup_steps + 1)))
    # checkpoint.pt contains these: add all that your training changes. Of the model it has names
    # and shapes: the values, and the optimizer's state, are in the files of parallel.State.
    stateful = {"model": whole, "scheduler": scheduler}
    # step: of the run; epoch_step: of the epoch; history: rows of metrics.csv; sums: loss, tokens.
    progress = {"step": 0, "epoch_step": 0, "history": [], "sums": torch.zeros(2).double()}
    what = f"{type(whole).__name__} on {args.data_dir or 'a random source'}"
    where = "nccl on cuda" if device.type == "cuda" else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    if progress["step"]:  # fsdp: each process reads its shards, even if other processes wrote them
        folder, name = sharded.find_checkpoint(args, progress)
        dcp.load({"state": parallel.State(model, optimizer)}, checkpoint_id=folder / name)
        sharded.scale_rates(args, progress, optimizer, None)  # longrun has scaled the scheduler's
    else:
        initialise(model, args.seed)
    # fsdp: the sums in a checkpoint are over all processes: only rank 0 continues them
    progress["sums"] = progress["sums"].to(device) * (rank == 0)
    if rank == 0:
        own = sum(weight.to_local().numel() for weight in model.parameters())
        print(f"this process has {own} of {sum(map(torch.numel, whole.parameters()))} weights")

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # fsdp: another order in each epoch, the same in all processes
        done = progress["epoch_step"] * parts  # batches done before a stop in this epoch
        left = list(sampler)[done * args.batch_size :]  # the indices that are still to be read
        longrun.seed(args.seed, epoch, args.group)  # workers of the loader, if any, take these
        train_loader = DataLoader(train_set, args.batch_size, sampler=left, drop_last=True, **extra)
        count, start = max(0, steps * parts - done), time.perf_counter()
        batches = islice(train_loader, count)  # leaves out an incomplete last step
        train_loss = train_one_epoch(args, model, optimizer, batches, stateful, progress)
        seconds = time.perf_counter() - start
        test_loss = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        speed = count * args.batch_size * args.groups / seconds
        row |= {"tokens_per_second": speed * args.context, "samples_per_second": speed}
        progress["history"].append(row | {"seconds": seconds, "world_size": world_size})
        progress |= {"epoch_step": 0, "sums": torch.zeros_like(progress["sums"])}
        save_checkpoint(args, model, optimizer, stateful, progress)
    weights = parallel.whole_weights(model)  # fsdp: all must call this; rank 0 gets the weights
    longrun.write(args, "model.pt", lambda file: torch.save(weights, file))
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    main(parse_args())
