"""Train a GPT that no single process has to hold, by FSDP2 and tensor parallelism, started by torchrun on many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "fsdp:", "tensor:" or "torchrun:" mark what a script for a single process would not need. How
layers are split is in tensor_parallel.py. What else a long job on a cluster needs is in plumbing.py and shards.py.
"""

import argparse
import functools
import math
import os
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
import sharded_model
import tensor_parallel
from common import data
from common.models import TinyGPT, token_loss
from plumbing import shards

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16: mixed precision


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text-file", type=Path, help="any UTF-8 text; without it: a random source of known entropy")
    parser.add_argument("--tokens", type=int, default=60_000, help="length of the random source")
    parser.add_argument("--vocabulary", type=int, default=256, help="another one: the random source is uniform")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="of the model's attention")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share each layer's work")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--cpu-offload", action="store_true", help="keep weights and optimizer in CPU memory (GPUs)")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per batch of each data-parallel group")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of groups")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--compile", action="store_true", help="faster on GPUs: see docs/compile.md of the repository")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=plumbing.steps_or_minutes, help="also save every 500 (steps), 10min")
    parser.add_argument("--peak-tflops", type=float, help="of one GPU or process: also print the share of it")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    plumbing.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    sharded_model.check_sizes(parser, args)
    args.groups = args.world_size // args.tensor_parallel  # tensor: --tensor-parallel processes are a group
    plumbing.share_batch(args)
    return args


def setup(args):
    """Join the process group; return this process's device, and the mesh, a table of all processes."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # fsdp: Gloo for tensors on the CPU
    # torchrun: has set MASTER_ADDR, MASTER_PORT and RANK, by which the processes find each other here
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    # fsdp: a column shares out the samples and a block's weights; tensor: a row, neighbours on one node, each layer
    mesh = init_device_mesh(device.type, (args.groups, args.tensor_parallel), mesh_dim_names=("data", "tensor"))
    for group in mesh.get_all_groups():
        plumbing.set_timeout(args, group)
    return device, mesh


def train_one_epoch(args, model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return mean loss, tokens, both over all processes, and seconds."""
    model.train()
    loss_function = torch.compile(token_loss) if args.compile else token_loss  # compiled: without copies of logits
    start = time.perf_counter() - progress["seconds"]
    sums = progress["sums"]  # loss, tokens: a checkpoint within the epoch has them, too
    for number, (tokens, labels) in enumerate(train_loader, 1):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: of so many batches
        vote = torch.tensor([plumbing.requested(args, progress, time.perf_counter() - start)])
        voting = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)  # stop: the largest wish is that of all
        tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = loss_function(model(tokens), labels, DTYPES[args.precision])
        (loss / args.gradient_accumulation_steps).backward()  # fsdp: each process gets the mean gradients of its shard
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        count = labels.numel() / args.tensor_parallel  # tensor: the processes of a group share what they count
        sums[0] += loss.detach() * count  # on the device: no step waits for it
        sums[1] += count
        voting.wait()  # now `vote` is 0 to go on, 1 to save after this step, 2 to stop then
        if not completes_step:
            continue
        if args.max_grad_norm:
            tensor_parallel.clip_grad_norm(model, args.max_grad_norm)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
        progress["step"] += 1
        if vote:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, model, optimizer, progress)
        if vote == 2:
            plumbing.stop(args, progress)  # stop: ends this process, without an error; `run` requeues
    progress["seconds"] = time.perf_counter() - start
    totals = sums.clone()
    dist.all_reduce(totals)  # fsdp: sum over all processes
    loss_sum, tokens = totals.tolist()
    return loss_sum / tokens, tokens, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.groups, "sqrt": args.groups**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return the mean test loss, in nats per token, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in test_loader:
        tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        sums[0] += token_loss(model(tokens), labels, DTYPES[args.precision], "sum")
        sums[1] += labels.numel()
    dist.all_reduce(sums)  # fsdp: sum over all processes; tensor: those of a group add equal parts
    return (sums[0] / sums[1]).item()


def save_checkpoint(args, model, optimizer, progress):
    """Save model, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # fsdp: a checkpoint has the sums over all processes
    folder = shards.begin(args, progress)
    weights, state = state_dict.get_state_dict(model, optimizer)
    with shards.write_errors(folder):
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)  # fsdp: each process writes its shards
        saved = {"sums": progress["sums"].tolist(), "mesh": [args.groups, args.tensor_parallel]}
        shards.complete(args, progress | saved, folder)


def resume(args, model, optimizer, device):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    # step: of the whole run; history: rows of metrics.csv; sums, of this process, and seconds: of the current epoch
    progress = {"step": 0, "sums": torch.zeros(2, dtype=torch.float64, device=device), "seconds": 0.0, "history": []}
    found = [shards.read_checkpoint(args, model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    if checkpoint := plumbing.accept(found[0]):  # ends this process if rank 0 has found an error
        folder = shards.check(args, checkpoint)
        weights, state = state_dict.get_state_dict(model, optimizer)
        # fsdp: each process reads its shards, whatever the shards of those were that have written them
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        state_dict.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        sums = torch.tensor(checkpoint["progress"]["sums"], dtype=torch.float64, device=device)
        progress = checkpoint["progress"] | {"sums": sums * (dist.get_rank() == 0)}  # fsdp: of all, so count them once
    else:
        initialise(model, args.seed)
    return progress


def build_model(args, mesh, device):
    """Return the model, of which each process holds its shards, without values; no process ever holds all of it."""
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(args.vocabulary, args.context, args.width, args.heads, args.layers).to(DTYPES[args.precision])
    if args.tensor_parallel > 1:
        tensor_parallel.split_layers(model, mesh["tensor"])
    # fsdp: gathers the weights as bf16, and keeps and updates them in fp32
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.precision == "bf16" else {}
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()
    for part in (*model.blocks, model):
        if args.compile and part is not model:
            part.forward = torch.compile(part.forward)  # fsdp: not its hooks, which gather the weights around it
        if args.gradient_checkpointing and part is not model:
            part.forward = functools.partial(recompute, part.forward, use_reentrant=False)
        # fsdp: a block's weights are gathered just before it computes, and freed right after
        fully_shard(part, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(**half), offload_policy=offload)
    return sharded_model.without_values(model, "cpu" if args.cpu_offload else device)


@torch.no_grad()
def initialise(model, seed):
    """Draw the weights from a normal distribution as in GPT-2, the same for any number of processes."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        whole = torch.zeros(weight.shape, dtype=weight.dtype)  # fsdp: one layer at a time, of which a shard is kept
        if name.endswith("weight"):
            generator = torch.Generator().manual_seed(seed * 10_000 + number)
            whole = whole.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else whole.fill_(1)
        shard = distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(shard)


def load_data(args):
    """Return the training set and the test set, which is the last tenth of the text or of the random source."""
    try:
        if args.text_file:
            tokens, args.entropy = data.text_tokens(args.text_file), None
        else:
            tokens, args.entropy = data.random_tokens(args.tokens, args.vocabulary)
        args.text = f"of {len(tokens)} tokens with checksum {zlib.crc32(tokens.numpy())}"
        cut = max(0, len(tokens) - max(len(tokens) // 10, args.context + 1))
        return data.Tokens(tokens[:cut], args.context), data.Tokens(tokens[cut:], args.context)
    except data.DataError as error:
        plumbing.fail(error)


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    plumbing.prepare_process(args)
    sharded_model.ignore_warnings()
    device, mesh = setup(args)
    group_rank = mesh.get_local_rank("data")

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    train_set, test_set = load_data(args)
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    # fsdp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.groups, group_rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # fsdp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(group_rank, len(test_set), args.groups)
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = math.ceil(len(test_set) / (args.groups * args.batch_size))
    batches += [[]] * (longest - len(batches))  # fsdp: all processes must call forward equally often
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = build_model(args, mesh, device)
    args.parameters = sum(weight.numel() for weight in model.parameters())  # fsdp: of all processes together
    fused = device.type == "cuda" and args.tensor_parallel == 1 and not args.cpu_offload  # one mesh, up to PyTorch 2.8
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=fused, foreach=not fused)
    progress = resume(args, model, optimizer, device)

    # Train.
    plumbing.print_header(args, f"{plumbing.name_of_model(args, model)} on {args.data_name}", device, progress)
    sharded_model.print_mesh(args, model, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # fsdp: another order in each epoch, the same in all processes
        done = progress["step"] - epoch * args.steps_per_epoch  # steps of this epoch, if the run was stopped within it
        first, last = done * args.gradient_accumulation_steps, args.steps_per_epoch * args.gradient_accumulation_steps
        batches = list(BatchSampler(sampler, args.batch_size, drop_last=True))[first:last]
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, tokens, seconds = train_one_epoch(args, model, train_loader, optimizer, device, progress)
        # stop: an evaluation may be long: it ends after the same batch in all processes, which save what was trained
        batches = plumbing.until_stopped(args, progress, test_loader, save_checkpoint, model, optimizer)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": evaluate(args, model, batches, device)}
        row |= {"tokens_per_second": tokens / seconds, "samples_per_second": tokens / args.context / seconds}
        progress["history"].append(row | {"seconds": seconds, "world_size": args.world_size})
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress, sharded_model.share_of_peak(args, progress))

    # Finish.
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)  # fsdp: rank 0 gathers all
    shards.write_model(args, state_dict.get_model_state_dict(model, options=options))
    loss = progress["history"][-1]["test_loss"]
    plumbing.finish(args, progress, f"finished: test loss {loss:.4f}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
