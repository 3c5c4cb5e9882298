"""Train a ConvNet on the GPUs of one machine, or on CPU processes, started by torch.multiprocessing.spawn.

Locally:   python train.py --processes 2
On SLURM:  sbatch run.slurm --epochs 10
"""

import argparse
import errno
import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16 is autocast
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size"


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
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2, help="one per GPU, if any")
    args = parser.parse_args()
    check_gpus()
    for name in ("epochs", "batch_size", "timeout", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if 0 < torch.cuda.device_count() < args.processes:
        parser.error(f"--processes {args.processes} is more than the {torch.cuda.device_count()} GPUs of this node")
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        parser.error(f"spawn cannot leave its node, and this job has {nodes}: use --nodes=1 or torchrun_multinode")
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        parser.error("srun started several copies of this script, which starts its own processes: use --ntasks=1")
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
    """Wait for the parent's end, whatever its cause, and end this process too."""
    mp.parent_process().join()
    os._exit(1)


def setup(args, rank, port):
    """Share out the cores, join the process group, and return this process's device."""
    threading.Thread(target=end_with_parent, daemon=True).start()  # ddp: nothing trains on unseen
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # the default is all cores for each process: far slower
    warnings.filterwarnings("ignore", "Grad strides")  # ddp: conv1's, harmless: one channel suits both layouts
    sys.stdout.reconfigure(line_buffering=True)  # each line reaches the log at once
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ddp: one machine only, so its name need not resolve
    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # ddp: the parent's, where the processes meet
    dist.init_process_group(  # ddp:
        "nccl" if cuda else "gloo", store=store, rank=rank, world_size=args.processes, timeout=timeout
    )
    return device


def settings(args):
    """Return what a resumed run must not change."""
    names = ("dataset", "batch_size", "lr", "scale_lr", "seed", "precision")
    return {"world_size": args.processes} | {name: getattr(args, name) for name in names}


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
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        damaged = zipfile.ZipFile(path).testzip()  # torch.load does not notice a flipped bit
        changed = [f"{key} {old}" for key, old in checkpoint["settings"].items() if old != settings(args)[key]]
        done = len(checkpoint["history"])
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): mend that, then continue with --resume"
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        damaged = repr(error)
    if damaged:
        return None, f"{path} is damaged ({damaged}): move it away to start anew, or put a good copy in its place"
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


def train_one_epoch(args, model, loader, optimizer, device):
    """Return the mean training loss and the number of samples, both over all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples: read once an epoch, not once a step
    for images, labels in loader:
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        optimizer.zero_grad()
        loss.backward()  # ddp: averages the gradients over all processes
        optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    dist.all_reduce(sums)  # ddp:
    loss_sum, samples = sums.tolist()
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


def save_epoch(args, model, optimizer, history):
    """Write metrics.csv and the checkpoint, then print the last epoch's line."""
    rows = "".join(",".join(map(str, row)) + "\n" for row in history)
    write(args.output_dir / "metrics.csv", lambda file: file.write(f"{COLUMNS}\n{rows}".encode()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"history": history, "settings": settings(args)}
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))  # last, so that no row can be lost
    epoch, train_loss, test_loss, accuracy, speed, seconds, _ = history[-1]
    losses = f"train loss {train_loss:.4f} | test loss {test_loss:.4f} | test acc {accuracy:7.2%}"
    print(f"epoch {epoch:2}/{args.epochs} | {losses} | {speed:5.0f} samples/s | {seconds:6.2f} s")


def main(rank, args, port):
    """Train as process `rank` of args.processes; `port` is where the parent's store listens."""
    world_size = args.processes
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    if args.batch_size > len(train_set) // world_size:
        fail(f"--batch-size {args.batch_size} is above the {len(train_set) // world_size} samples of each process")
    device = setup(args, rank, port)
    found = [read_checkpoint(args, args.output_dir / "checkpoint.pt") if rank == 0 else None]
    dist.broadcast_object_list(found, device=device)  # ddp: rank 0 decides; others may not see the file yet
    checkpoint, problem = found[0]
    if problem:
        fail(problem)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # ddp:
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=True), batch_size=None)
    shard = data.evaluation_shard(len(test_set), rank, world_size)  # ddp: each sample once
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr * (world_size if args.scale_lr else 1))
    history = []
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        history = checkpoint["history"]
    replica = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)  # ddp:
    # ddp: its first backward settles in which order gradients are added. Once now, so that a resumed run adds alike.
    replica(torch.zeros(1, 1, 28, 28, device=device, dtype=DTYPES[args.precision])).sum().backward()
    if rank == 0:
        where = f"{world_size} processes on 1 node, {dist.get_backend()} on {device.type}"
        threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
        print(f"ConvNet on {args.dataset}: {where}, {threads}, global batch {world_size * args.batch_size}")
        if history:
            print(f"continuing after epoch {len(history)} of {args.epochs}")
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order each epoch
        start = time.perf_counter()
        train_loss, samples = train_one_epoch(args, replica, loader, optimizer, device)
        seconds = time.perf_counter() - start
        test_loss, accuracy = evaluate(args, model, test_loader, device)
        history.append((epoch + 1, train_loss, test_loss, accuracy, samples / seconds, seconds, world_size))
        if rank == 0:
            save_epoch(args, model, optimizer, history)
    if rank == 0:
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
        print(f"finished: test acc {history[-1][3]:.2%}, model in {args.output_dir / 'model.pt'}")
    dist.destroy_process_group()  # ddp:


def launch(args):
    """Start the processes and wait for them; if one fails, end them all."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ddp: port 0 is any free port
    mp.set_forkserver_preload(["torch._dynamo"])  # ddp: import torch, and what AdamW will, once for all processes
    processes = mp.start_processes(  # ddp: mp.spawn, but for the start method: seconds and 200 MB a process less
        main, args=(args, store.port), nprocs=args.processes, join=False, start_method="forkserver"
    )
    try:
        while not processes.join(grace_period=5):
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException):
        ends = [process.exitcode for process in processes.processes]
        if 2 in ends:
            sys.exit(2)  # that process has said why
        for file in filter(os.path.exists, processes.error_files):  # all of them: one may follow from another
            print(pickle.loads(Path(file).read_bytes()), file=sys.stderr)
        names = [signal.Signals(-end).name if end < 0 else f"status {end}" for end in ends]
        each = ", ".join(f"process {rank} ended with {name}" for rank, name in enumerate(names))
        sys.exit(f"train.py: error: {each}: mend that, then continue with --resume")
    except KeyboardInterrupt:
        os._exit(130)  # the processes end with this one


if __name__ == "__main__":
    launch(parse_args())
