"""Train a GPT that no process has to hold whole, by FSDP2 and tensor parallelism, with torchrun.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, checkpoints that survive a kill, and a stop
after any step. Comments that begin with a tag, such as "fsdp:", mark what a single process would
not need. tensor_parallel.py splits layers; the functions of plumbing keep the job alive.
"""

import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
import sharded_model
import tensor_parallel
from common import data
from common.models import TinyGPT, token_loss
from plumbing import shards

# With bf16 each process keeps and updates its weights in fp32; only what it computes is in bf16.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    parser.set_defaults(batch_size=8, end=None, entropy=None)
    add = parser.add_argument
    add("--text-file", type=Path, help="text, or tokenize_text.py's folder; default: random tokens")
    add("--separate-documents", action="store_true", help="attention stays within a document")
    add("--tokens", type=int, default=60_000, help="length of the random source")
    add("--vocabulary", type=int, default=256, help="kinds of tokens; if not 256, all as likely")
    add("--context", type=int, default=64, help="tokens of a sample")
    add("--width", type=int, default=128, help="numbers by which the model represents a token")
    add("--layers", type=int, default=2, help="blocks of the model")
    add("--heads", type=int, default=4, help="heads of each block's attention")
    add("--replicas", type=int, default=1, help="whole models, each shared out over processes")
    add("--tensor-parallel", type=int, default=1, help="processes that share each layer's work")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    add("--cpu-offload", action="store_true", help="weights and optimizer in CPU memory (GPUs)")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--compile", action="store_true", help="see docs/compile.md of the repository")
    every = "also save after so many steps, such as 500, or after a time, such as 10min"
    add("--checkpoint-every", type=plumbing.steps_or_minutes, help=every)
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep-sharded", action="store_true", help="do not write model.pt, which rank 0 gathers")
    add("--peak-tflops", type=float, help="of one GPU or process: also print the share of it")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: on this node
    plumbing.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    sharded_model.check_sizes(parser, args)
    args.groups = args.world_size // args.tensor_parallel  # tensor: a group counts as one process
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    return args


def setup(args):
    """Join the process group; return this process's device, and the mesh, a table of all ranks."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # fsdp: NCCL for weights and gradients on GPUs; Gloo for small things on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    # fsdp: replicas have the same weights; the processes of each share these out ("shard")
    # tensor: neighbours on one node get the same samples, and share out each layer
    sizes = (args.replicas, args.groups // args.replicas, args.tensor_parallel)
    mesh = dist.init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "shard", "tensor"))
    plumbing.set_timeout(args, *mesh.get_all_groups())
    return device, mesh


def train_one_epoch(args, model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return the mean loss, the tokens of all, and seconds."""
    model.train()
    loss_function = torch.compile(token_loss) if args.compile else token_loss  # saves memory
    start = time.perf_counter() - progress["seconds"]
    # Loss and tokens. The same tensor is in progress: what is added here is also in a checkpoint.
    sums = progress["sums"]
    group_rank = dist.get_rank() // args.tensor_parallel
    for number, (tokens, labels) in enumerate(train_loader, 1):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: every Nth
        if (number - 1) % args.gradient_accumulation_steps == 0:  # fsdp: dropout differs by group
            torch.manual_seed(args.seed + progress["step"] * args.groups + group_rank)
        seconds = time.perf_counter() - start
        # stop: 0 asks to go on, 1 to save after this step, 2 to save and stop
        request = torch.tensor([plumbing.requested(args, progress, seconds)])
        # stop: the largest request counts; it travels while this batch is computed
        pending = dist.all_reduce(request, dist.ReduceOp.MAX, async_op=True)
        tokens = tokens.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(tokens)
        loss = loss_function(logits, labels, WEIGHT_DTYPES[args.precision])
        # fsdp: averages the gradients over all processes; each gets those of its shard
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        # tensor: all processes of a row see the same tokens, and each counts its part of them
        count = labels.numel() / args.tensor_parallel
        sums[0] += loss.detach() * count  # on the device: with .item() each step would wait
        sums[1] += count
        pending.wait()
        if not completes_step:
            continue
        if args.max_grad_norm:
            tensor_parallel.clip_grad_norm(model, args.max_grad_norm)
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
        progress["step"] += 1
        if request >= 1:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, model, optimizer, progress)
            start = time.perf_counter() - progress["seconds"]  # a save is no training
        if request == 2:
            plumbing.stop(args, progress)  # stop: ends this process; run.slurm requeues the job
    progress["seconds"] = time.perf_counter() - start
    sums = sums.clone()
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens, tokens, time.perf_counter() - start


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return the mean test loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in test_loader:
        tokens = tokens.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(tokens)
        sums[0] += token_loss(logits, labels, WEIGHT_DTYPES[args.precision], "sum")
        sums[1] += labels.numel()  # tensor: those of a row count the same, which cancels out
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens


def save_checkpoint(args, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # fsdp: a checkpoint has the sums over all processes
    progress |= {"sums": progress["sums"].tolist(), "mesh": sharded_model.mesh_sizes(args)}
    folder = shards.begin(args, progress)
    weights, state = state_dict.get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    if args.async_save:
        # fsdp: the step waits only until the shards are copied; a thread writes the copies
        shards.save_in_background(args, saved, progress, folder)
        return
    with shards.write_errors(folder):
        dcp.save(saved, checkpoint_id=folder)  # fsdp: each process writes its shards
        shards.complete(args, progress, folder)


def resume(args, model, optimizer, device):
    """Load model and optimizer from the checkpoint, or fill the model; return how far it is."""
    # Steps of the whole run; rows of metrics.csv; sums and seconds of the epoch that is trained.
    progress = {"step": 0, "history": [], "seconds": 0.0}
    progress["sums"] = torch.zeros(2, dtype=torch.float64, device=device)
    answer = [None]  # a list, since broadcast_object_list fills it in
    if dist.get_rank() == 0:
        answer[0] = shards.read_checkpoint(args, model)
    # fsdp: rank 0 decides; then each process reads its shards, or ends if rank 0 has found an error
    dist.broadcast_object_list(answer)
    checkpoint = plumbing.accept(answer[0])
    if checkpoint:
        folder = shards.check(args, checkpoint)
        weights, state = state_dict.get_state_dict(model, optimizer)
        # fsdp: the files may have other shards, since another number of processes has written them
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        loaded = {"model_state_dict": weights, "optim_state_dict": state}
        state_dict.set_state_dict(model, optimizer, **loaded)
        progress = checkpoint["progress"]
        progress["sums"] = torch.tensor(progress["sums"], dtype=torch.float64, device=device)
        if dist.get_rank() > 0:
            progress["sums"].zero_()  # fsdp: rank 0 alone keeps them: they are those of all
    else:
        initialise(args, model)
    return progress


def build_model(args, mesh, device):
    """Return the model; each process holds a shard, a slice, of each weight, without values."""
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(args.vocabulary, args.context, args.width, args.heads, args.layers)
    model.end = args.end  # of --separate-documents: the token that ends a document
    model = model.to(WEIGHT_DTYPES[args.precision])
    if args.tensor_parallel > 1:
        tensor_parallel.split_layers(model, mesh["tensor"])
    # fsdp: replicas add up their gradients, and never send weights
    options = {"mesh": mesh["replica", "shard"] if args.replicas > 1 else mesh["shard"]}
    if args.precision == "bf16":
        # fsdp: weights are gathered as bf16, and gradients are summed in fp32
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if args.cpu_offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    for part in (*model.blocks, model):  # the last one: what is in no block
        if part is not model:
            sharded_model.change_block(args, part)  # --compile, --gradient-checkpointing
        # fsdp: before a part computes, its weights are gathered from all processes; then freed
        fully_shard(part, **options)
    return sharded_model.without_values(model, "cpu" if args.cpu_offload else device)


@torch.no_grad()
def initialise(args, model):
    """Draw the weights from a normal distribution, the same for any number of processes."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        whole = torch.zeros(weight.shape, dtype=weight.dtype)  # fsdp: one at a time is whole
        if name.endswith("weight"):  # biases stay 0
            whole.fill_(1)  # of a LayerNorm
            if weight.dim() > 1:  # of another layer, as in GPT-2
                generator = torch.Generator().manual_seed(args.seed * 10_000 + number)
                whole.normal_(0, 0.02, generator=generator)
        whole = whole.to(weight.device)
        # fsdp: cut as the weight is; each process cuts a copy of its own, none is sent (None)
        shard = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(shard)


def load_data(args):
    """Return the training set, and the test set: the last tenth of the text or random source."""
    try:
        if args.text_file and args.text_file.is_dir():
            tokens = sharded_model.read_tokens(args)  # mapped: a batch reads what it needs
        elif args.text_file:
            tokens = data.text_tokens(args.text_file)
        else:
            tokens, args.entropy = data.random_tokens(args.tokens, args.vocabulary)
        sharded_model.note_tokens(args, tokens)
        cut = max(0, len(tokens) - max(len(tokens) // 10, args.context + 1))
        train_set = data.Tokens(tokens[:cut], args.context)
        test_set = data.Tokens(tokens[cut:], args.context)
        return train_set, test_set
    except data.DataError as error:
        plumbing.fail(error)


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one of the processes that torchrun has started."""
    plumbing.prepare_process(args)
    shards.ignore_warnings()
    device, mesh = setup(args)
    # tensor: all processes of a group have the same samples
    group_rank = dist.get_rank() // args.tensor_parallel

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    train_set, test_set = load_data(args)
    # Pinned memory: no step waits for its copy to a GPU.
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}
    # fsdp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.groups, group_rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # fsdp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(group_rank, len(test_set), args.groups)
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = math.ceil(len(test_set) / (args.groups * args.batch_size))
    # fsdp: empty batches at the end: all have to call forward equally often, which gathers weights
    batches += [[]] * (longest - len(batches))
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = build_model(args, mesh, device)
    # Up to PyTorch 2.8 the fused optimizer takes weights of a single mesh only.
    fused = device.type == "cuda" and args.tensor_parallel == 1 and not args.cpu_offload
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=fused, foreach=not fused)
    progress = resume(args, model, optimizer, device)

    # Train.
    name = plumbing.name_of_model(args, model)
    plumbing.print_header(args, f"{name} on {args.data_name}", device, progress)
    sharded_model.print_mesh(args, model, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # fsdp: shuffles anew; each process takes its part of one order
        batches = BatchSampler(sampler, args.batch_size, drop_last=True)
        batches = plumbing.batches_left(args, progress, batches)  # if it was stopped in this epoch
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, tokens, seconds = train_one_epoch(
            args, model, train_loader, optimizer, device, progress
        )
        # stop: an evaluation may be long: it ends after the same batch in all processes
        batches = plumbing.until_stopped(
            args, progress, test_loader, save_checkpoint, model, optimizer
        )
        test_loss = evaluate(args, model, batches, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"tokens_per_second": tokens / seconds}
        row |= {"samples_per_second": tokens / args.context / seconds, "seconds": seconds}
        progress["history"].append(row | {"world_size": args.world_size})
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress, sharded_model.share_of_peak(args, progress))

    # Finish.
    where = f"`python sharded_model.py {args.output_dir}` writes model.pt"
    if not args.keep_sharded:
        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        # fsdp: all processes call this; rank 0 gets the whole weights, in CPU memory
        weights = state_dict.get_model_state_dict(model, options=options)
        where = f"model in {shards.write_model(args, weights)}"
    loss = progress["history"][-1]["test_loss"]
    plumbing.finish(args, progress, f"finished: test loss {loss:.4f}, {where}")


if __name__ == "__main__":
    main(parse_args())
