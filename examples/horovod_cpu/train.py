"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10
"""

import argparse
import contextlib
import errno
import faulthandler
import fcntl
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; bf16 is autocast
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size"
MAY_CHANGE = ("data_dir", "epochs", "timeout", "output_dir", "resume")  # these arguments, on a resume
LAUNCHED = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # one is set by every launcher


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
    parser.add_argument("--warmup-epochs", type=int, default=0, help="in which --scale-lr raises the learning rate")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients as 16-bit numbers")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches that make one step")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "timeout", "batches_per_allreduce"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.warmup_epochs < 0 or args.warmup_epochs and not args.scale_lr:
        parser.error(f"--warmup-epochs {args.warmup_epochs} needs --scale-lr, and must be 0 or more")
    return args


def fail(message):
    """Print one line in argparse's form and end with status 2, at once: other processes may never answer again."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


@contextlib.contextmanager
def deadline(args):
    """End this process, and say where it hung, if what runs inside takes longer than --timeout."""
    faulthandler.dump_traceback_later(args.timeout, exit=True)  # horovod: MPI itself would wait for ever
    yield  # after an exception it stays set: the end of the process may hang, too
    faulthandler.cancel_dump_traceback_later()


def refuse(args, message):
    """Fail where all processes have come to the same message: part in order first, or some would say more."""
    with deadline(args):
        hvd.shutdown()  # horovod:
    fail(message)


def setup(args):
    """Join the other processes, share out the cores, and return this process's rank, the number of all, the device."""
    sys.stdout.reconfigure(line_buffering=True)  # each line reaches the log at once
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))  # of this srun, if it is one
    alone = f"srun started {tasks} tasks that know nothing of each other: use srun --mpi=pmix (srun --mpi=list)"
    if not any(name in os.environ for name in LAUNCHED):
        if tasks > 1:
            fail(alone)
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    # horovod: fused, gradients are added in an order that depends on the moment: not the same bits with 3 processes
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # horovod: ms; at 1, the default, it looks too often
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(args.timeout)
    with deadline(args):
        hvd.init()  # horovod:
    if hvd.size() == 1 and tasks > 1:
        fail(alone)
    with deadline(args):  # horovod: mpirun may have bound each process to cores of its own
        shares = hvd.allgather_object((hvd.cross_rank(), os.sched_getaffinity(0)))
    cores = len(set().union(*(share for node, share in shares if node == hvd.cross_rank())))
    if tasks == hvd.size() and "SLURM_CPUS_PER_TASK" in os.environ:
        cores = int(os.environ["SLURM_CPUS_PER_TASK"]) * hvd.local_size()
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores // hvd.local_size())
    torch.set_num_threads(threads)  # the default is all cores for each process: far slower
    if hvd.rank() == 0 and threads * hvd.local_size() > cores:
        crowd = f"{hvd.local_size()} processes with {threads} threads each share {cores} cores"
        print(f"warning: {crowd}: slow; start fewer, or lower OMP_NUM_THREADS", file=sys.stderr, flush=True)
    return hvd.rank(), hvd.size(), torch.device("cpu")


def settings(args):
    """Return what a resumed run must not change."""
    return {"world_size": hvd.size()} | {name: old for name, old in vars(args).items() if name not in MAY_CHANGE}


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


def learning_rate(args, epoch):
    """Return the learning rate at `epoch`, a fraction in mid-epoch (Goyal et al. 2017)."""
    factor = hvd.size() * args.batches_per_allreduce if args.scale_lr else 1  # horovod: as much as the batch grows
    return args.lr * (factor if epoch >= args.warmup_epochs else 1 + (factor - 1) * epoch / args.warmup_epochs)


def distribute(args, model, optimizer, checkpoint, resumed):
    """Return the optimizer that averages the gradients; give all processes the weights and the state of rank 0."""
    optimizer = hvd.DistributedOptimizer(  # horovod:
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
    )
    if checkpoint:  # rank 0 alone has it
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    with deadline(args):
        if resumed:  # horovod: only then, and before the weights: without a state yet, an optimizer takes a step here
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # horovod:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod:
    return optimizer


def where(device):
    """Describe the processes, for the first line."""
    nodes, threads = hvd.cross_size(), torch.get_num_threads()
    processes = f"{hvd.size()} processes on {nodes} node{'s' * (nodes > 1)}"
    backend = f"{'mpi' if hvd.mpi_enabled() else 'gloo'} on {device.type}"
    return f"{processes}, {backend}, {threads} thread{'s' * (threads > 1)} each"


def train_one_epoch(args, model, loader, optimizer, device, epoch):
    """Return the mean training loss and the number of samples, both over all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples: read once an epoch, not once a step
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + step / len(loader))
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        optimizer.zero_grad()
        for batch, targets in zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
                logits = model(batch)
            loss = F.cross_entropy(logits.to(batch.dtype), targets)
            (loss / args.batches_per_allreduce).backward()  # horovod: the last one sends each gradient on its way
            sums[0] += loss.detach() * len(targets)
            sums[1] += len(targets)
        with deadline(args):
            optimizer.step()  # horovod: waits for the gradients, averaged over all processes
    with deadline(args):
        sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod:
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
    with deadline(args):
        sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod:
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


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    rank, world_size, device = setup(args)
    step_size = args.batch_size * args.batches_per_allreduce
    if step_size > len(train_set) // world_size:
        size = f"--batch-size {args.batch_size}" + f" x {args.batches_per_allreduce}" * (step_size > args.batch_size)
        refuse(args, f"{size} is above the {len(train_set) // world_size} samples of each process")
    checkpoint, problem = read_checkpoint(args, args.output_dir / "checkpoint.pt") if rank == 0 else (None, None)
    history = checkpoint["history"] if checkpoint else []
    with deadline(args):
        history, problem = hvd.broadcast_object((history, problem))  # horovod: rank 0 decides
    if problem:
        refuse(args, problem)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # horovod: equal parts
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, step_size, drop_last=True), batch_size=None)
    shard = data.evaluation_shard(len(test_set), rank, world_size)  # horovod: each sample once
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = distribute(args, model, optimizer, checkpoint, resumed=bool(history))  # horovod:
    if rank == 0:
        print(f"ConvNet on {args.dataset}: {where(device)}, global batch {world_size * step_size}")
        if history:
            print(f"continuing after epoch {len(history)} of {args.epochs}")
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order each epoch
        start = time.perf_counter()
        train_loss, samples = train_one_epoch(args, model, loader, optimizer, device, epoch)
        seconds = time.perf_counter() - start
        test_loss, accuracy = evaluate(args, model, test_loader, device)
        history.append((epoch + 1, train_loss, test_loss, accuracy, samples / seconds, seconds, world_size))
        if rank == 0:
            save_epoch(args, model, optimizer, history)
    if rank == 0:
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
        print(f"finished: test acc {history[-1][3]:.2%}, model in {args.output_dir / 'model.pt'}")
    with deadline(args):
        hvd.barrier()  # horovod: the others wait for rank 0; srun would end it --wait seconds after them
        hvd.shutdown()  # horovod:


if __name__ == "__main__":
    main(parse_args())
