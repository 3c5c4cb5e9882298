"""Train a GPT that no single process has to hold: FSDP2 and tensor parallelism, started by torchrun on many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments with a tag, such as "fsdp:", mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import TinyGPT

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16: mixed precision
stop_requested = torch.zeros(1)  # preemption: 1 after SIGUSR1 or SIGTERM, which ask this process to stop
saving = []  # the thread that writes the last checkpoint in the background


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text-file", type=Path, help="any UTF-8 text; without it: a random source of known entropy")
    parser.add_argument("--tokens", type=int, default=60_000, help="length of the random source")
    parser.add_argument("--context", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="of the model's attention")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes that share each layer's work")
    parser.add_argument("--activation-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--cpu-offload", action="store_true", help="keep weights and optimizer in CPU memory (GPUs)")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per batch of each data-parallel group")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the groups, or their root")
    parser.add_argument("--warmup-steps", type=int, default=0, help="first steps of the whole run, in which --lr rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also save every STEPS steps of an epoch")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--peak-tflops", type=float, help="of one GPU or process; without it, this is measured")
    args = parser.parse_args()
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    check_args(parser, args)
    args.groups = args.world_size // args.tensor_parallel  # fsdp: each has its own samples
    args.global_batch = args.groups * args.batch_size * args.gradient_accumulation_steps  # samples per optimizer step
    return args


def setup(args):
    """Set the number of threads, join the process group, and return this process's device."""
    prepare_process(args)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # by default each process would use all cores: slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=args.timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # Gloo also for the votes and checkpoints
    dist.init_process_group(backend, timeout=timeout)  # torchrun: MASTER_ADDR, RANK and so on are set
    return device


def train_one_epoch(args, model, train_loader, optimizer, device, history, position, group):
    """Return the mean training loss and the number of tokens, both over all processes, and the time in seconds."""
    model.train()
    start = time.perf_counter() - position["seconds"]
    sums = position["sums"]  # loss, tokens; the same tensor, so this updates position
    per_epoch = position["step"] + len(train_loader) // args.gradient_accumulation_steps  # steps of a whole epoch
    for number, (tokens, labels) in enumerate(train_loader, 1):
        is_last = number % args.gradient_accumulation_steps == 0  # accumulation: this micro-batch completes a step
        if is_last:
            vote, voting = start_vote()  # preemption: if one process got a signal, all stop after this step
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens).to(DTYPES[args.precision])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        # fsdp: averages the gradients over the groups; each process keeps, and accumulates, those of its shard
        (loss / args.gradient_accumulation_steps).backward()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        if not is_last:
            continue
        if args.max_grad_norm:
            clip_grad_norm(model, args.max_grad_norm)
        step = len(history) * per_epoch + position["step"]  # of the whole run
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, step)
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
        position["step"] += 1
        voting.wait()
        if vote or (args.checkpoint_every and position["step"] % args.checkpoint_every == 0):
            position["seconds"] = time.perf_counter() - start
            save_checkpoint(args, model, optimizer, history, position, group)
        if vote:
            wait_for_checkpoint()
            print_usage(history)
            shut_down(f"stopped by a signal after step {position['step']} of epoch {len(history) + 1}: use --resume")
    dist.all_reduce(sums, group=group)  # fsdp: sum over all groups
    loss_sum, count = sums.tolist()
    return loss_sum / count, count, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.groups, "sqrt": args.groups**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, model, test_loader, device, group):
    """Return the mean test loss, in nats per token, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in test_loader:
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens).to(DTYPES[args.precision])
        sums[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
    dist.all_reduce(sums, group=group)  # fsdp: sum over all groups
    loss_sum, count = sums.tolist()
    return loss_sum / count


def make_mesh(args, device):
    """Return the processes as a table: a row is a group, which takes the same samples."""
    # fsdp: a column shares out the samples and a block's weights; tensor: a row, neighbours on one node, the layers
    shape = (args.groups, args.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    for group in mesh.get_all_groups():
        dist.set_timeout(timedelta(seconds=args.timeout), group)  # fsdp: 30 minutes else
    return mesh


def build_model(args, mesh, device):
    """Return the model, of which each process holds its shards, without values; no process ever holds all of it."""
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(context=args.context, width=args.width, heads=args.heads, layers=args.layers)
    model.to(DTYPES[args.precision])
    if args.tensor_parallel > 1:
        split_layers(model, mesh["tensor"])
    # fsdp: gathers the weights as bf16, and keeps and updates them in fp32
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.precision == "bf16" else {}
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()
    for part in (*model.blocks, model):
        if args.activation_checkpointing and part is not model:
            part.forward = functools.partial(recompute, part.forward, use_reentrant=False)
        # fsdp: a block's weights are gathered just before it computes, and freed right after
        fully_shard(part, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(**half), offload_policy=offload)
    return model.to_empty(device="cpu" if args.cpu_offload else device)


def split_layers(model, mesh):
    """Split each layer over the processes of a group, which then compute their parts of the same samples."""
    # tensor: column-wise layers split their outputs, such as the heads; a row-wise one sums up what its parts compute
    column, row = ColwiseParallel, RowwiseParallel
    plan = {"query": column(), "key": column(), "value": column(), "proj": row(), "mlp.0": column(), "mlp.2": row()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    outside = {"token": row(input_layouts=Replicate()), "position": column(output_layouts=Replicate())}
    parallelize_module(model, mesh, outside | {"head": column(output_layouts=Replicate())})
    model.head.weight = model.token.weight  # the split has replaced both, which are one weight


@torch.no_grad()
def clip_grad_norm(model, limit):
    """Scale the gradients so that their norm, over the shards of all processes, is at most `limit`.

    PyTorch's own function cannot add up norms of weights that are split over both dimensions of the mesh and over one.
    """
    squares = 0
    for weight in model.parameters():
        split = zip(weight.device_mesh.shape, weight.placements, strict=True)
        shards = math.prod(size for size, placement in split if not placement.is_replicate())
        # fsdp: what several processes hold, as a LayerNorm with tensor parallelism, would count several times
        squares += weight.grad.to_local().square().sum() * shards / dist.get_world_size()
    dist.all_reduce(squares)
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1)
    for weight in model.parameters():
        weight.grad.to_local().mul_(factor)


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


def make_test_loader(args, test_set, group_rank):
    """Return the batches of the test set for this process."""
    # fsdp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(group_rank, len(test_set), args.groups)
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = math.ceil(len(test_set) / (args.groups * args.batch_size))
    # fsdp: all processes must call forward equally often
    return DataLoader(test_set, sampler=batches + [[]] * (longest - len(batches)), batch_size=None)


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    train_set, test_set, entropy = load_data(args)
    device = setup(args)
    mesh = make_mesh(args, device)
    group, group_rank = mesh.get_group("data"), mesh.get_local_rank("data")
    checkpoint = broadcast_checkpoint(args, device)

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # fsdp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.groups, group_rank, seed=args.seed, drop_last=True)
    test_loader = make_test_loader(args, test_set, group_rank)

    # Model, optimizer, and their state if the run is resumed.
    model = build_model(args, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    history = checkpoint["history"] if checkpoint else []  # one dict per epoch: the rows of metrics.csv
    position = resume_position(checkpoint, device, group_rank)  # steps, seconds and sums of the current epoch so far
    if checkpoint:
        load_shards(args, checkpoint, model, optimizer)
    else:
        initialise(model, args.seed)

    # Train
    print_header(args, device, model, entropy, checkpoint)
    peak = measure_peak(args, device)
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # fsdp: another order in each epoch, the same in all processes
        train_loader = DataLoader(train_set, sampler=remaining_batches(args, sampler, position), batch_size=None)
        train_loss, count, seconds = train_one_epoch(
            args, model, train_loader, optimizer, device, history, position, group
        )
        row = {"epoch": epoch, "train_loss": train_loss, "test_loss": evaluate(args, model, test_loader, device, group)}
        row |= {"tokens_per_second": count / seconds, "flops_utilisation": flops(args, model) * count / seconds / peak}
        row |= {"samples_per_second": count / args.context / seconds, "seconds": seconds}
        history.append(row | {"world_size": args.world_size})
        position = start_of_epoch(device)
        save_checkpoint(args, model, optimizer, history, position, group)  # fsdp: all write their shards
        print_epoch(args, history[-1])

    # Finish
    wait_for_checkpoint()
    # fsdp: gathers one weight after another in the memory of rank 0
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    write_model(args, weights)
    print_usage(history)
    shut_down(f"finished: test loss {history[-1]['test_loss']:.4f}, model in {args.output_dir / 'model.pt'}")


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    for name, value in vars(args).items():
        if type(value) is int and value < (least := int(name != "warmup_steps")) and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    for name in ("max_grad_norm", "peak_tflops"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if args.heads % args.tensor_parallel:
        parser.error(f"--heads {args.heads} must be a multiple of --tensor-parallel {args.tensor_parallel}")
    if args.cpu_offload and not torch.cuda.is_available():
        parser.error("--cpu-offload needs GPUs: without, everything is in CPU memory anyway")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    if args.world_size % args.tensor_parallel:
        parser.error(f"{args.world_size} processes are no multiple of --tensor-parallel {args.tensor_parallel}")
    if 0 < torch.cuda.device_count() < args.processes:
        gpus = f"the {torch.cuda.device_count()} GPUs of {os.uname().nodename}"
        parser.error(f"--nproc-per-node={args.processes} is more than {gpus}")
    check_gpus()


def check_gpus():
    """Refuse to train on the CPU if the job has GPUs that PyTorch cannot use; ALLOW_CPU=1 permits it."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus and not torch.cuda.is_available() and os.environ.get("ALLOW_CPU") != "1":
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader").partition("\n")[0]
        fail(
            f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the {gpus} GPUs of this job "
            f"(NVIDIA driver: {driver}). Install a build that can, on a node with GPUs: UV_TORCH_BACKEND=auto "
            "uv pip install --reinstall torch torchvision. To train on the CPU all the same, set ALLOW_CPU=1"
        )


def prepare_process(args):
    """Make this process end when its launcher does; print lines immediately; set up Gloo; silence a warning."""
    keep_memory()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
    sys.stdout.reconfigure(line_buffering=True)
    if args.processes == args.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # about changing the logits in place: not done here
    warnings.filterwarnings("ignore", ".*TypedStorage is deprecated")  # of torch.distributed.checkpoint itself
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathering takes two steps
    for number in (signal.SIGUSR1, signal.SIGTERM):  # preemption: remember the signal until the next vote
        signal.signal(number, lambda *_: stop_requested.fill_(1))


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def load_data(args):
    """Return the training set, the test set (the last tenth), and the text's entropy, in nats per token, if known.

    Fail if the text cannot be read, or is too short for one step.
    """
    try:
        if args.text_file:
            tokens, entropy = data.text_tokens(args.text_file), None
        else:
            tokens, entropy = data.markov_tokens(args.tokens)
        cut = max(0, len(tokens) - max(len(tokens) // 10, args.context + 1))
        train_set, test_set = (data.Tokens(part, args.context) for part in (tokens[:cut], tokens[cut:]))
    except data.DataError as error:
        fail(error)
    args.text = f"of {len(tokens)} tokens with checksum {zlib.crc32(tokens.numpy())}"
    if args.global_batch > len(train_set):
        steps = f" times --gradient-accumulation-steps {args.gradient_accumulation_steps}"
        fail(
            f"--batch-size {args.batch_size}{steps} times {args.groups} groups of processes is above the "
            f"{len(train_set)} samples of {args.context} tokens: lower one of them, or use a longer text"
        )
    return train_set, test_set, entropy


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues: not the number of processes."""
    names = ("global_batch", "text", "context", "width", "layers", "heads", "seed", "precision")
    return {name: getattr(args, name) for name in names}


def lock(folder):
    """Lock the folder until this process exits or is killed; return an error message or None."""
    try:  # the file stays open on purpose: closing it would release the lock
        folder.mkdir(parents=True, exist_ok=True)
        fcntl.lockf(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another run is writing to --output-dir {folder}: wait for its end, or choose another folder"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # without locks there, continue
            return f"cannot write to --output-dir {folder} ({error.strerror}): choose another folder"


def read_checkpoint(args):
    """Lock the output folder; return (checkpoint or None, error message or None). Never modifies a checkpoint."""
    path = args.output_dir / "checkpoint"
    if error := lock(args.output_dir):
        return None, error
    if not (path / "run.json").exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = json.loads((path / "run.json").read_text())
        if checkpoint.pop("checksum") != zlib.crc32(json.dumps(checkpoint).encode()):
            raise ValueError("its content has changed")
        epochs, settings = len(checkpoint["history"]), resume_settings(args)
        changed = [f"{name} {old}" for name, old in checkpoint["settings"].items() if old != settings[name]]
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): correct that, then continue with --resume"
    except Exception as error:  # a damaged file can raise almost anything
        return None, f"{path} is damaged (run.json: {error!r}): move it away to start over, or restore a good copy"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return None, f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint, None


def broadcast_checkpoint(args, device):
    """Return what rank 0 reads of the checkpoint and sends to all, or None, once all have looked for damaged files."""
    found = [read_checkpoint(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=device)
    checkpoint, error = found[0]
    if checkpoint:
        errors = [None] * args.world_size
        dist.all_gather_object(errors, check_files(args, checkpoint))
        error = next(filter(None, errors), None)
    if error:
        fail(error)
    return checkpoint


def check_files(args, checkpoint):
    """Read this process's part of the checkpoint's files; return an error message, if one is damaged, or None."""
    path = args.output_dir / "checkpoint"
    for name, checksum in list(checkpoint["files"].items())[dist.get_rank() :: args.world_size]:
        try:
            damage = "its content has changed" * (file_checksum(path / checkpoint["tag"] / name) != checksum)
        except PermissionError as error:
            return f"cannot read {error.filename} ({error.strerror}): correct that, then continue with --resume"
        except OSError as error:
            damage = f"{error.strerror} on {os.uname().nodename}"
        if damage:
            return f"{path} is damaged ({name}: {damage}): move it away to start over, or restore a good copy"


def file_checksum(path):
    """Return the CRC-32 of a file's content."""
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(2**20):
            checksum = zlib.crc32(part, checksum)
    return checksum


def write(path, save):
    """Write a file atomically: save(file) writes a temporary file, which is then renamed to `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")


def start_vote():
    """Ask all processes whether one of them got a signal; return the answer, and the request to wait for."""
    vote = stop_requested.clone()
    return vote, dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)


def remaining_batches(args, sampler, position):
    """Return the batches of indices that an epoch still has after position["step"] complete steps."""
    batches = list(BatchSampler(sampler, args.batch_size, drop_last=True))
    per_step = args.gradient_accumulation_steps
    return batches[position["step"] * per_step : len(batches) // per_step * per_step]  # only complete steps


def start_of_epoch(device):
    """Return the position of a process before the first step of an epoch."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens: of this process, in this epoch so far
    return {"step": 0, "seconds": 0.0, "sums": sums}


def resume_position(checkpoint, device, group_rank):
    """Return the position of a process at the start of this run."""
    position = start_of_epoch(device)
    if checkpoint:
        position |= {name: checkpoint["position"][name] for name in ("step", "seconds")}
        if group_rank == 0:  # the saved sums are those of all groups together
            position["sums"] += torch.tensor(checkpoint["position"]["sums"], dtype=torch.float64, device=device)
    return position


def write_model(args, weights):
    """On rank 0, write the state dict of the whole model, and the shape that it belongs to."""
    if dist.get_rank() == 0:
        shape = {"vocab": len(weights["token.weight"])}
        shape |= {name: getattr(args, name) for name in ("context", "width", "heads", "layers")}
        write(args.output_dir / "model.json", lambda file: file.write(json.dumps(shape).encode()))
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))


def load_shards(args, checkpoint, model, optimizer):
    """Load this process's shards of model and optimizer, whatever the processes that wrote them held."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.output_dir / "checkpoint" / checkpoint["tag"])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


@functools.cache
def checkpoint_group(timeout):
    """Return a process group of its own, so that saving in the background does not disturb training."""
    return dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")


def save_checkpoint(args, model, optimizer, history, position, group):
    """Write metrics.csv on rank 0, copy the shards, and start to write the copies in the background."""
    wait_for_checkpoint()  # the one before
    sums = position["sums"].clone()
    dist.all_reduce(sums, group=group)
    path, tag = args.output_dir / "checkpoint", f"epoch{len(history)}-step{position['step']}"
    if dist.get_rank() == 0:
        rows = [history[0].keys(), *(row.values() for row in history)] if history else []
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
        shutil.rmtree(path / tag, ignore_errors=True)  # may be there from a run that was killed while saving
    background = checkpoint_group(args.timeout)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    with write_errors(path):
        written = dcp.async_save(
            {"model": weights, "optimizer": state}, checkpoint_id=path / tag, process_group=background
        )
    run = {"tag": tag, "history": list(history), "position": position | {"sums": sums.tolist()}}
    run |= {"settings": resume_settings(args), "mesh": [args.groups, args.tensor_parallel]}
    saving.append(threading.Thread(target=finish_checkpoint, args=(path, written, run, background)))
    saving[0].start()


def finish_checkpoint(path, written, run, background):
    """When all shards are written, write run.json, which names them: from now on a resume takes this checkpoint."""
    rank, folder = dist.get_rank(), path / run["tag"]
    with write_errors(path):
        written.result()
        own = {file.name: file_checksum(file) for file in folder.glob(f"__{rank}_*")}
        if rank == 0:
            own[".metadata"] = file_checksum(folder / ".metadata")
        files = [None] * dist.get_world_size()
        dist.all_gather_object(files, own, background)
        if rank == 0:
            run["files"] = functools.reduce(dict.__or__, files)
            run["checksum"] = zlib.crc32(json.dumps(run).encode())
            write(path / "run.json", lambda file: file.write(json.dumps(run).encode()))
            for old in set(path.glob("epoch*")) - {folder}:
                shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def write_errors(path):
    """End this process if what is done in this context fails, also in a thread, with one line if it is the disk."""
    try:
        yield
    except BaseException as error:  # CheckpointException is no Exception; and no error may end the thread alone
        if isinstance(error, dcp.api.CheckpointException):  # has the errors of all processes, with tracebacks
            error = next(iter(error.failures.values()))[0]
        connection = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, (OSError, RuntimeError)) and not connection:  # torch.save raises RuntimeError
            fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")
        traceback.print_exc()
        os._exit(1)


def wait_for_checkpoint():
    """Wait until the last checkpoint is written."""
    while saving:
        saving.pop().join()


def print_header(args, device, model, entropy, checkpoint):
    """Print what this run is, which ranks are on which node and, if it is resumed, where it continues."""
    hosts = [None] * args.world_size
    dist.all_gather_object(hosts, os.uname().nodename)
    if dist.get_rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on {device.type}"
    source = args.text_file or "a random source"
    print(f"TinyGPT on {source}: {where}, {threads}, global batch {args.global_batch}")
    own = sum(weight.to_local().numel() for weight in model.parameters())
    groups = f"{args.groups} data-parallel group{'s' if args.groups > 1 else ''} of {args.tensor_parallel}"
    print(f"mesh: {groups}; of {parameters(model)} parameters this process holds {own}")
    ranks = {host: [str(rank) for rank, name in enumerate(hosts) if name == host] for host in hosts}
    print("ranks:", "; ".join(f"{host} {', '.join(numbers)}" for host, numbers in ranks.items()))
    if entropy:
        print(f"entropy of the source: {entropy:.4f} nats per token; no model can have a lower loss")
    if checkpoint:
        step, mesh = checkpoint["position"]["step"], checkpoint["mesh"]
        within = f", step {step}" if step else ""
        within += f", saved by {mesh[0]} groups of {mesh[1]}" * (mesh != [args.groups, args.tensor_parallel])
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}{within}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if dist.get_rank() > 0:
        return
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['tokens_per_second']:6.0f} tokens/s | {row['flops_utilisation']:4.0%} of peak"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | {speed} | {row['seconds']:6.2f} s")


def parameters(model):
    """Return the number of the model's parameters, over all shards."""
    return sum(weight.numel() for weight in model.parameters())


def flops(args, model):
    """Return the floating-point operations that a token takes in training (Chowdhery et al. 2022, appendix B)."""
    products = parameters(model) - args.context * args.width  # positions are looked up, not multiplied
    return 6 * products + 12 * args.layers * args.width * args.context


def measure_peak(args, device):
    """Return how many floating-point operations all processes together do per second in products of large matrices."""
    if args.peak_tflops:
        return args.peak_tflops * 1e12 * args.world_size
    size, repeats = (8192, 20) if device.type == "cuda" else (768, 4)
    best = 0.0
    for dtype in [DTYPES[args.precision], torch.bfloat16][: 1 + (args.precision == "bf16")]:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        for repeat in range(repeats + 1):
            if repeat == 1:  # the first one is for warming up
                dist.barrier()
                start = time.perf_counter()
            product = matrix @ matrix
        product[0, 0].item()  # waits for a GPU
        best = max(best, 2 * size**3 * repeats / (time.perf_counter() - start))  # some CPUs only emulate bf16
    peak = torch.tensor(best, device=device, dtype=torch.float64)
    dist.all_reduce(peak)
    return peak.item()


def print_usage(history):
    """Print on rank 0 what all processes together have used: what `seff` says, which not every cluster has."""
    busy = sum(os.times()[:4])  # time of a core, in seconds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, (busy, memory, torch.cuda.max_memory_allocated() / 2**20))
    if dist.get_rank() > 0:
        return
    busy, memory, gpu = zip(*used, strict=True)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * int(os.environ.get("SLURM_NTASKS", 1))
    cores = cores or len(os.sched_getaffinity(0))
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    text = f"used: {seconds:.0f} s, {sum(busy) / seconds / cores:.0%} of {cores} cores, {max(memory):.0f} MB a process"
    text += f", {max(gpu):.0f} MB of a GPU" * (max(gpu) > 0)
    if history:
        samples = sum(row["samples_per_second"] * row["seconds"] for row in history)
        text += f", {samples / sum(row['seconds'] for row in history):.0f} samples/s"
    print(text)


def shut_down(message):
    """Wait for all processes, print the message on rank 0, leave the process group, and end this process."""
    dist.barrier()  # ddp: rank 0 may still be writing; srun --wait ends it some time after the others
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # ddp: disconnect
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    main(parse_args())
