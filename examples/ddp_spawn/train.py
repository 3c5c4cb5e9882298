"""Train a ConvNet with DistributedDataParallel (DDP) on the GPUs of one machine, or on several CPU processes.

Locally:   python train.py --processes 2
On SLURM:  sbatch run.slurm --epochs 10

Comments with a tag, such as "ddp:", mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import ctypes
import errno
import fcntl
import functools
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import types
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

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of the weights; with bf16, autocast


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the processes, or their root")
    parser.add_argument("--warmup-steps", type=int, default=0, help="first steps of the whole run, in which --lr rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2, help="one per GPU, if any")
    parser.add_argument(
        "--profile", action="store_true", help="show what 5 steps spend their time on, and write a trace"
    )
    args = parser.parse_args()
    args.world_size = args.processes
    check_args(parser, args)
    return args


def setup(args, local_rank, port):
    """Set the number of threads, join the process group, and return this process's device."""
    prepare_process(args)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # by default each process would use all cores: slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)  # ddp: here the processes exchange their addresses
    backend = "nccl" if device.type == "cuda" else "gloo"  # ddp: NCCL connects GPUs, Gloo connects CPU processes
    dist.init_process_group(  # ddp: waits for all processes and connects them
        backend, store=store, rank=local_rank, world_size=args.world_size, timeout=timeout
    )
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, epoch, profiler):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    ddp_model.train()
    start = time.perf_counter()
    # Loss and samples stay on the device, so that no step waits for them.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for step, (images, labels) in enumerate(train_loader, (epoch - 1) * len(train_loader)):
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        loss.backward()  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, step)
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main(rank, args, port):
    """Train as process number `rank` of args.world_size; `port` is the port of the TCPStore that launch() opened."""
    train_set, test_set = load_data(args)
    device = setup(args, rank, port)
    checkpoint = broadcast_checkpoint(args, device)

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model, optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    history = checkpoint["history"] if checkpoint else []  # one dict per epoch: the rows of metrics.csv
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    ddp_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    # For bit-identical results after a resume; the zeros have the shape of the model's input.
    fix_summation_order(ddp_model, torch.zeros(1, 1, 28, 28, device=device, dtype=DTYPES[args.precision]))

    # Train
    print_header(args, device, checkpoint)
    profiler = make_profiler(args, (args.epochs - len(history)) * len(batches))
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # ddp: another order in each epoch, the same in all processes
        train_loss, count, seconds = train_one_epoch(args, ddp_model, train_loader, optimizer, device, epoch, profiler)
        test_loss, test_accuracy = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        history.append(row | {"samples_per_second": count / seconds, "seconds": seconds, "world_size": args.world_size})
        save_checkpoint(args, model, optimizer, history)  # ddp: rank 0 writes; all have the same weights
        print_epoch(args, history[-1])

    # Finish
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    print_usage(history)
    shut_down(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.pt'}")


def launch(args):
    """Start the processes and wait for them; if one fails, end the others and report why."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process immediately, and the others with it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ddp: port 0 means any free port
    mp.set_forkserver_preload(["torch._dynamo"])  # torch, and what AdamW needs of it, is imported only once
    # ddp: each process calls main(rank, args, port); like mp.spawn, but forkserver saves seconds and 200 MB per process
    context = mp.start_processes(main, (args, store.port), args.world_size, join=False, start_method="forkserver")
    try:
        while not context.join(grace_period=5):  # returns False each time that one process has ended well
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        report_failure(context, error)


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
    if 0 < torch.cuda.device_count() < args.world_size:
        parser.error(f"--processes {args.world_size} is more than the {torch.cuda.device_count()} GPUs of this node")
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
    threading.Thread(target=exit_with_parent, daemon=True).start()
    sys.stdout.reconfigure(line_buffering=True)
    if args.processes == args.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    # DDP warns about the strides of conv1's gradient. It is harmless: with one channel, both memory layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def exit_with_parent():
    """Wait until the parent has ended, for whatever reason, and exit: no worker outlives its launcher."""
    mp.parent_process().join()
    os._exit(1)


def load_data(args):
    """Return the training and the test set; fail if they are missing, or too small for --batch-size."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    if args.batch_size > (share := len(train_set) // args.world_size):
        fail(f"--batch-size {args.batch_size} is above the {share} samples of each process")
    return train_set, test_set


def fix_summation_order(ddp_model, zeros):
    """Do one backward pass, after which DDP settles in which order it sums gradients for the rest of the run.

    A resumed run then sums in the same order as an uninterrupted one, and its results are bit-identical.
    """
    ddp_model.eval()  # leaves the statistics of BatchNorm layers unchanged
    ddp_model(zeros).sum().backward()
    ddp_model.zero_grad()
    ddp_model.train()


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    names = ("world_size", "dataset", "batch_size", "seed", "precision")
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
    path = args.output_dir / "checkpoint.pt"
    if error := lock(args.output_dir):
        return None, error
    if not path.exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        damage = zipfile.ZipFile(path).testzip()  # torch.load does not notice a flipped bit
        epochs, settings = len(checkpoint["history"]), resume_settings(args)
        changed = [f"{name} {old}" for name, old in checkpoint["settings"].items() if old != settings[name]]
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): correct that, then continue with --resume"
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        damage = repr(error)
    if damage:
        return None, f"{path} is damaged ({damage}): move it away to start over, or restore a good copy"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return None, f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint, None


def broadcast_checkpoint(args, device):
    """Return the checkpoint that rank 0 reads and sends to all, or None; other nodes may not see the file yet."""
    found = [read_checkpoint(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=device)
    checkpoint, error = found[0]
    if error:
        fail(error)
    return checkpoint


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


def save_checkpoint(args, model, optimizer, history):
    """Write metrics.csv, then the checkpoint; a kill between the two leaves a row too many, which a resume rewrites."""
    if dist.get_rank() > 0:
        return
    rows = [history[0].keys(), *(row.values() for row in history)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    state["settings"] = resume_settings(args)
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))


def print_header(args, device, checkpoint):
    """Print what this run is and, if it is resumed, where it continues."""
    if dist.get_rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    where = f"{args.world_size} processes on 1 node, {dist.get_backend()} on {device.type}, {threads}"
    print(f"ConvNet on {args.dataset}: {where}, global batch {args.world_size * args.batch_size}")
    if checkpoint:
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if dist.get_rank() > 0:
        return
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['samples_per_second']:5.0f} samples/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | test acc {row['test_accuracy']:7.2%} | {speed}")


def make_profiler(args, steps):
    """Return the profiler: with --profile it records 5 steps, after the first 3, and reports; else it does nothing.

    Nor does it if a resumed run has fewer steps left: it has to end all the same.
    """
    if not args.profile or (args.resume and steps < 8):
        return types.SimpleNamespace(step=lambda: None)
    if steps < 8:
        fail(f"--profile needs 8 steps, and this run has {steps} to do: raise --epochs, or lower --batch-size")
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it logs an error: no GPU
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=functools.partial(report_profile, args))


def report_profile(args, profiler):
    """Write this process's trace; print on rank 0 what the time of a step goes to, as a mean over all processes."""
    folder, rank = args.output_dir / "profile", dist.get_rank()
    torch.profiler.tensorboard_trace_handler(str(folder), f"rank{rank}")(profiler)
    found = [None] * args.world_size
    dist.all_gather_object(found, shares_of_a_step(profiler.events()))
    if rank > 0:
        return
    seconds, data, network, computing = (sum(values) / args.world_size for values in zip(*found, strict=True))
    print(f"profile: a step takes {seconds:.3f} s, the mean of 5 steps and of all processes; traces: {folder}")
    other = 1 - data - network - computing
    shares = {"waits for data": data, "waits for the network": network, "computes": computing}
    for name, share in (shares | {"does other things": other}).items():
        print(f"profile: {name:21} {share:6.1%}")
    advice = "computing takes most of it: more processes, --precision bf16, a smaller model"
    if data > max(network, 0.2):
        advice = "reading data is too slow: more workers or cores, smaller files, a faster disk"
    elif network > 0.2:
        advice = "the network or a slower process is waited for: a larger --batch-size means fewer exchanges"
    elif other > computing:
        advice = "starting the work, evaluation or saving takes most of it: a larger --batch-size"
    print(f"profile: {advice}")


def shares_of_a_step(events):
    """Return the seconds of a step, and its shares that wait for data, wait for the network, and compute.

    What happens at the same time counts once: as computing, else as the network, else as data.
    """
    steps, data, network, computing = [], [], [], []
    gpu = any(event.device_type == torch.autograd.DeviceType.CUDA for event in events)
    for event in events:
        span, name = (event.time_range.start, event.time_range.end), event.name
        if gpu and event.device_type == torch.autograd.DeviceType.CUDA:
            if not event.is_user_annotation:
                (network if "nccl" in name.lower() else computing).append(span)
        elif name.startswith("ProfilerStep"):
            steps.append(span)
        elif name.startswith("enumerate(DataLoader)"):
            data.append(span)
        elif not gpu and name.startswith("gloo:"):
            network.append(span)
        elif not gpu and name.startswith(("aten::", "autograd::", "DistributedDataParallel", "Optimizer.step")):
            computing.append(span)
    total = covered(steps)
    busy = [covered(computing), covered(computing + network), covered(computing + network + data)]
    shares = [(busy[2] - busy[1]) / total, (busy[1] - busy[0]) / total, busy[0] / total]
    return [total / len(steps) / 1e6, *shares]


def covered(spans):
    """Return the length of what is covered by at least one of these (start, end)."""
    length, reached = 0, float("-inf")
    for start, end in sorted(spans):
        length += max(0, end - max(start, reached))
        reached = max(reached, end)
    return length


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


def report_failure(context, error):
    """Print the tracebacks of all processes, since the failure of one often causes that of others, and exit."""
    if any(process.exitcode == 2 for process in context.processes):
        sys.exit(2)  # fail() has printed the error
    for file in filter(os.path.exists, context.error_files):
        print(pickle.loads(Path(file).read_bytes()), file=sys.stderr)
    cause = getattr(error, "signal_name", None) or "an exception"
    sys.exit(f"train.py: error: process {error.error_index} ended with {cause}: fix the cause, then use --resume")


if __name__ == "__main__":
    launch(parse_args())
