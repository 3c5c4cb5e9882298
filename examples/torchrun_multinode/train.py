"""Train a ConvNet on one or many nodes, on GPUs or CPU processes, started by torchrun; stop and continue at any step.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10
"""

import argparse
import contextlib
import copy
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16 is autocast
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size"
stop = torch.zeros(1)  # preemption: not 0 once a signal has asked this process to stop
disk = ThreadPoolExecutor(max_workers=1)  # preemption: checkpoints are written while training goes on,
writing = []  # one at a time


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="where the files of mnist and fashion_mnist are")
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", action="store_true", help="multiply --lr by the number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a collective may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="and after each epoch")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches per process and step")
    parser.add_argument("--clip-norm", type=float, help="limit of the gradients' norm")
    args = parser.parse_args()
    check_gpus()
    for name in ("epochs", "batch_size", "timeout", "accumulate"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.checkpoint_every is not None and args.checkpoint_every < 1:
        parser.error(f"--checkpoint-every must be 1 or more, not {args.checkpoint_every}")
    if args.clip_norm is not None and not args.clip_norm > 0:
        parser.error(f"--clip-norm must be above 0, not {args.clip_norm}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < gpus < processes:
        parser.error(f"--nproc-per-node={processes} is more than the {gpus} GPUs of {socket.gethostname()}")
    return args


def check_gpus():
    """Refuse to train on CPU where the job has GPUs, which PyTorch cannot use, unless ALLOW_CPU=1 permits it."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus == 0 or torch.cuda.is_available() or os.environ.get("ALLOW_CPU") == "1":
        return
    driver, query = "no nvidia-smi", "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    if shutil.which("nvidia-smi"):
        driver = subprocess.getoutput(query).partition("\n")[0]
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {version}" for name, version in builds.items() if version), "CPUs only")
    problem = f"PyTorch {torch.__version__}, built for {built}, cannot use the {gpus} GPUs of this job"
    remedy = (
        "install a build that can, on such a node: UV_TORCH_BACKEND=auto uv pip install --reinstall torch torchvision"
    )
    remedy += " (or train on the CPUs: ALLOW_CPU=1)"
    fail(f"{problem} (NVIDIA driver: {driver}): {remedy}")


def fail(message):
    """Print one line in argparse's form and end with status 2, at once: other processes may never answer again."""
    print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def end_with_parent():
    """Have Linux end this process when torchrun ends, whatever the cause."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def setup(args):
    """Share out the cores, join the process group, and return rank, world_size and this process's device."""
    end_with_parent()  # torchrun: nothing trains on unseen
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.fill_(1))  # preemption: remember it until the next step
    processes, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // processes))  # the default is one thread, or all cores: both are slower
    warnings.filterwarnings("ignore", "Grad strides")  # ddp: conv1's, harmless: one channel suits both layouts
    sys.stdout.reconfigure(line_buffering=True)  # each line reaches the log at once
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # torchrun: one machine only, so its name need not resolve
    # torchrun: rank, world size and where to meet come from its variables. The votes on stopping go over Gloo.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    return dist.get_rank(), dist.get_world_size(), device


def settings(args):
    """Return what a resumed run must not change."""
    names = ("dataset", "batch_size", "lr", "scale_lr", "seed", "precision", "accumulate", "clip_norm")
    return {"world_size": int(os.environ["WORLD_SIZE"])} | {name: getattr(args, name) for name in names}


def lock(folder):
    """Raise BlockingIOError if another run holds this lock; else hold it until this process ends, however it ends."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks: do without
            raise


def read_checkpoint(args, path):
    """Return the checkpoint (None: there is none) and what is wrong (None: nothing); the file stays as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        lock(path.parent)
    except BlockingIOError:
        return None, f"another run is writing to --output-dir {path.parent}: wait for its end, or choose another folder"
    except OSError as error:
        return None, f"cannot write to --output-dir {path.parent} ({error.strerror}): choose another folder"
    if not path.exists():
        return None, None
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        damaged = zipfile.ZipFile(path).testzip()  # torch.load does not notice a flipped bit
        changed = [f"{key} {old}" for key, old in checkpoint["settings"].items() if old != settings(args)[key]]
        done = len(checkpoint["history"])
        ours = checkpoint["run"] == os.environ["TORCHELASTIC_RUN_ID"] != "none"  # torchrun: restarted after a failure
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): mend that, then continue with --resume"
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        damaged = repr(error)
    if damaged:
        return None, f"{path} is damaged ({damaged}): move it away to start anew, or put a good copy in its place"
    if not args.resume and not ours:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same, or another --output-dir"
    if done > args.epochs:
        return None, f"{path} has {done} epochs behind it: --epochs {args.epochs} must not be less"
    return checkpoint, None


def write(path, save):
    """Write a file whole or not at all: save(file) fills a temporary file, which then takes the place of `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk or a quota full? Mend that, then continue with --resume")


def save(args, model, optimizer, history, position):
    """Copy the state of all processes; metrics.csv and the checkpoint are then written in the background."""
    sums = position["sums"].clone()
    dist.all_reduce(sums)  # preemption: each process has filled a row of its own
    if dist.get_rank() == 0:
        finish_writing()  # there is one copy at most
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "settings": settings(args)}
        state |= {"history": history, "position": position | {"sums": sums}, "run": os.environ["TORCHELASTIC_RUN_ID"]}
        writing.append(disk.submit(write_checkpoint, args.output_dir, copy.deepcopy(state)))


def write_checkpoint(folder, state):
    """Write metrics.csv and the checkpoint of what `save` has copied."""
    rows = "".join(",".join(map(str, row)) + "\n" for row in state["history"])
    write(folder / "metrics.csv", lambda file: file.write(f"{COLUMNS}\n{rows}".encode()))
    write(folder / "checkpoint.pt", lambda file: torch.save(state, file))  # last, so that no row can be lost


def finish_writing():
    """Wait until the last checkpoint is on disk; raise here what went wrong there."""
    while writing:
        writing.pop().result()


def leave(message):
    """End this process, as all others do now, once the last checkpoint is on disk."""
    finish_writing()
    dist.barrier()  # ddp: the others wait for rank 0
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # ddp:
    os._exit(0)  # at once: Gloo's threads can make Python's own way out abort


def train_one_epoch(args, model, loader, optimizer, device, history, position):
    """Return the mean training loss and the number of samples, both over all processes, from the epoch's beginning."""
    model.train()
    start = time.perf_counter() - position["seconds"]
    sums = position["sums"][dist.get_rank()]  # loss, samples: read once an epoch, not once a step
    for images, labels in loader:
        vote = stop.clone()
        voting = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)  # preemption: while this step computes
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        optimizer.zero_grad()
        parts = list(zip(images.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True))
        for part, (images, labels) in enumerate(parts, 1):
            inner = part < len(parts)  # accumulation: gradients only add up; the last part exchanges their sum
            with model.no_sync() if inner else contextlib.nullcontext():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                    logits = model(images)
                loss = F.cross_entropy(logits.to(images.dtype), labels)
                (loss / len(parts)).backward()  # ddp: averages the gradients over all processes
            sums[0] += loss.detach() * len(labels)
            sums[1] += len(labels)
        if args.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        optimizer.step()
        position["step"] += 1
        voting.wait()
        if vote or (args.checkpoint_every and position["step"] % args.checkpoint_every == 0):
            position["seconds"] = time.perf_counter() - start
            save(args, model.module, optimizer, history, position)
        if vote:
            leave(f"stopped by a signal after step {position['step']} of epoch {len(history) + 1}: --resume continues")
    dist.all_reduce(position["sums"])  # ddp:
    loss_sum, samples = position["sums"].sum(0).tolist()
    position["seconds"] = time.perf_counter() - start
    return loss_sum / samples, samples


@torch.no_grad()
def evaluate(args, model, loader, device):
    """Return the mean test loss and the accuracy, 0 to 1, over all processes: each sample counts once."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in loader:
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # ddp:
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def new_epoch(device):
    """Return the position before the first step of an epoch."""
    sums = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64, device=device)  # one row a process: loss, samples
    return {"step": 0, "seconds": 0.0, "sums": sums}


def print_epoch(args, row):
    """Print the line of an epoch."""
    epoch, train_loss, test_loss, accuracy, speed, seconds, _ = row
    losses = f"train loss {train_loss:.4f} | test loss {test_loss:.4f} | test acc {accuracy:7.2%}"
    print(f"epoch {epoch:2}/{args.epochs} | {losses} | {speed:5.0f} samples/s | {seconds:6.2f} s")


def describe(args, device, checkpoint):
    """Print what this run is, and which ranks are where."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    if dist.get_rank() > 0:
        return
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"{len(hosts)} processes on {nodes} node{'s' * (nodes > 1)}, {backend} on {device.type}"
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
    batch = len(hosts) * args.batch_size * args.accumulate
    print(f"ConvNet on {args.dataset}: {where}, {threads}, global batch {batch}")
    ranks = {host: [rank for rank, name in enumerate(hosts) if name == host] for host in hosts}
    print("ranks:", "; ".join(f"{host} {', '.join(map(str, numbers))}" for host, numbers in ranks.items()))
    if checkpoint:
        step = f", step {checkpoint['position']['step']}" * (checkpoint["position"]["step"] > 0)
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}{step}")


@record  # torchrun: reports the first traceback of all processes
def main(args):
    """Train as one process of the group."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    batch_size, share = args.batch_size * args.accumulate, len(train_set) // int(os.environ["WORLD_SIZE"])
    if batch_size > share:
        times_accumulate = f" times --accumulate {args.accumulate}" * (args.accumulate > 1)
        fail(f"--batch-size {args.batch_size}{times_accumulate} is above the {share} samples of each process")
    rank, world_size, device = setup(args)
    found = [read_checkpoint(args, args.output_dir / "checkpoint.pt") if rank == 0 else None]
    dist.broadcast_object_list(found, device=device)  # ddp: rank 0 decides; others may not see the file yet
    checkpoint, problem = found[0]
    if problem:
        fail(problem)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # ddp:
    shard = data.evaluation_shard(len(test_set), rank, world_size)  # ddp: each sample once
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * (world_size if args.scale_lr else 1))
    history, position = [], new_epoch(device)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        history, position = checkpoint["history"], checkpoint["position"]
        mine = torch.arange(world_size) == rank
        position["sums"] = (position["sums"] * mine[:, None]).to(device)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)  # ddp:
    # ddp: its first backward settles in which order gradients are added. Once now, so that a resumed run adds alike.
    replica(torch.zeros(1, 1, 28, 28, device=device, dtype=DTYPES[args.precision])).sum().backward()
    describe(args, device, checkpoint)
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order each epoch
        batches = list(BatchSampler(sampler, batch_size, drop_last=True))[position["step"] :]
        loader = DataLoader(train_set, sampler=batches, batch_size=None)
        train_loss, samples = train_one_epoch(args, replica, loader, optimizer, device, history, position)
        seconds = position["seconds"]
        test_loss, accuracy = evaluate(args, model, test_loader, device)
        history.append((epoch + 1, train_loss, test_loss, accuracy, samples / seconds, seconds, world_size))
        position = new_epoch(device)
        save(args, model, optimizer, history, position)
        if rank == 0:
            print_epoch(args, history[-1])
    if rank == 0:
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
    leave(f"finished: test acc {history[-1][3]:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
