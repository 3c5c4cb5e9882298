"""Train an image classifier on image files with DistributedDataParallel (DDP), started by torchrun on many nodes.

Once:      python make_images.py                      (writes an example, images/; yours: --data-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments with a tag, such as "ddp:", mark what a script for a single process and images in memory would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings
import zipfile
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import classifiers
import image_files
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common.data import DataError

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}  # of the weights
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # mixed precision: of most operations
stop_requested = torch.zeros(1)  # preemption: 1 after SIGUSR1 or SIGTERM, which ask this process to stop


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default="images", help="folder with train/CLASS/*.jpg and val/, or tar"
    )
    parser.add_argument("--image-size", type=int, default=32, help="pixels; 224 is usual for photographs")
    parser.add_argument("--model", default="resnet18", help="any classifier of torchvision, by its name")
    parser.add_argument("--weights", type=Path, help="state dict on disk to start from, such as torchvision's")
    parser.add_argument(
        "--new-head", action="store_true", help="start the last layer anew: --weights has other classes"
    )
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch of each process")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate after warm-up; then it falls to 0")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the processes, or their root")
    parser.add_argument("--warmup-steps", type=int, help="first steps of the run, in which --lr rises (of one epoch)")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights, shuffling and augmentation")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16, fp16: mixed; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="also save every STEPS steps within an epoch"
    )
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over all processes' batches (GPUs)")
    parser.add_argument("--workers", type=int, help="processes that read images, for each that trains (from the cores)")
    parser.add_argument("--prefetch", type=int, default=2, help="batches that each worker reads ahead")
    parser.add_argument("--log-to", choices=("tensorboard", "mlflow", "wandb"), help="also write the metrics for these")
    parser.add_argument(
        "--profile", action="store_true", help="show what 5 steps spend their time on, and write a trace"
    )
    args = parser.parse_args()
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    check_args(parser, args)
    return args


def setup(args):
    """Share out the cores, join the process group, and return this process's device."""
    prepare_process(args)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    cores = (int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))) // args.processes
    if args.workers is None:  # loader: with a GPU all cores but one decode images; without, training itself needs most
        args.workers = max(1, cores - 1 if device.type == "cuda" else cores // 4)
    torch.set_num_threads(max(1, cores - args.workers))  # by default each process would use all cores: slower
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=args.timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # preemption: Gloo for the votes below
    dist.init_process_group(backend, timeout=timeout)  # torchrun: MASTER_ADDR, RANK and so on are set
    return device


def train_one_epoch(args, ddp_model, train_loader, parts, device, history, position, profiler):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    ddp_model.train()
    start = time.perf_counter() - position["seconds"]
    optimizer, scaler = parts["optimizer"], parts["scaler"]
    sums = position["sums"]  # loss, samples; the same tensor, so this updates position
    per_epoch = position["step"] + len(train_loader) // args.gradient_accumulation_steps  # steps of a whole epoch
    first = position["step"] * args.gradient_accumulation_steps + 1
    for number, (images, labels) in enumerate(on_device(train_loader, device), first):
        is_last = number % args.gradient_accumulation_steps == 0  # accumulation: this micro-batch completes a step
        if is_last:
            vote, voting = start_vote()  # preemption: if one process got a signal, all stop after this step
        # Dropout: new in each micro-batch and process, and the same after a resume.
        torch.manual_seed(args.seed + (len(history) * 10**6 + number) * args.world_size + dist.get_rank())
        ddp_model.require_backward_grad_sync = is_last  # accumulation: else gradients are not averaged yet
        with torch.autocast(device.type, AUTOCAST.get(args.precision), enabled=args.precision in AUTOCAST):
            logits = ddp_model(image_files.normalise(images, DTYPES[args.precision]))
        loss = F.cross_entropy(logits.to(DTYPES[args.precision]), labels)
        # ddp: averages the gradients, if the step is complete. fp16: the scaler keeps small gradients from becoming 0
        scaler.scale(loss / args.gradient_accumulation_steps).backward()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        if not is_last:
            continue
        if args.max_grad_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        step = len(history) * per_epoch + position["step"]  # of the whole run
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, step) * cosine(args, step, args.epochs * per_epoch)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average_statistics(ddp_model)  # ddp: of BatchNorm; else each process would have its own, or rank 0's
        position["step"] += 1
        voting.wait()
        if vote or (args.checkpoint_every and position["step"] % args.checkpoint_every == 0):
            position["seconds"] = time.perf_counter() - start
            save_checkpoint(args, parts, history, position)
        if vote:
            print_usage(history)
            shut_down(f"stopped by a signal after step {position['step']} of epoch {len(history) + 1}: use --resume")
        profiler.step()
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def cosine(args, step, total):
    """Return by what the rate of a step, one of `total`, is multiplied: 1 in the warm-up, then it falls to 0."""
    done, length = max(0, step - args.warmup_steps), max(1, total - args.warmup_steps)
    return (1 + math.cos(math.pi * done / length)) / 2


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean test loss, and the top-1 and top-5 accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, correct, correct among the first 5, samples
    for images, labels in on_device(test_loader, device):
        with torch.autocast(device.type, AUTOCAST.get(args.precision), enabled=args.precision in AUTOCAST):
            logits = model(image_files.normalise(images, DTYPES[args.precision]))
        logits = logits.to(DTYPES[args.precision])
        correct = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5): most likely class first
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += correct[:, 0].sum()
        sums[2] += correct.sum()
        sums[3] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, top1, top5, samples = sums.tolist()
    return {"test_loss": loss_sum / samples, "test_accuracy": top1 / samples, "test_top5_accuracy": top5 / samples}


def average_statistics(model):
    """Average BatchNorm's running statistics over all processes."""
    running = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not running or dist.get_world_size() == 1:
        return
    flat = torch.cat([buffer.flatten() for buffer in running])  # one message instead of dozens
    dist.all_reduce(flat)
    for buffer, mean in zip(running, (flat / dist.get_world_size()).split([b.numel() for b in running]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def make_loaders(args, train_set, test_set, batches, device):
    """Return the two loaders; `batches` is the list from which train_loader takes its batches in each epoch."""
    # loader: workers read, decode and augment in the background, while this process computes
    settings = {"num_workers": args.workers, "worker_init_fn": prepare_worker}
    settings["pin_memory"] = device.type == "cuda"  # loader: from pinned memory copies to a GPU run in the background
    if args.workers:
        settings["prefetch_factor"] = args.prefetch
    # loader: the workers stay for all epochs; starting them takes seconds if the process is large
    train_loader = DataLoader(train_set, batch_sampler=batches, persistent_workers=args.workers > 0, **settings)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    rank = dist.get_rank()
    shard = range(rank, len(test_set), args.world_size)
    return train_loader, DataLoader(test_set, args.batch_size, sampler=shard, **settings)


def make_parts(args, classes, device, checkpoint):
    """Return what training changes, and so what a checkpoint holds: model, optimizer and scaler."""
    torch.manual_seed(args.seed)
    model = make_model(args, len(classes), None if checkpoint else args.weights).to(
        device, DTYPES[args.precision], memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    device = setup(args)
    train_set, test_set, classes = load_data(args)
    checkpoint = broadcast_checkpoint(args, device)

    # Data
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, dist.get_rank(), seed=args.seed, drop_last=True)
    batches = []  # of the current epoch
    train_loader, test_loader = make_loaders(args, train_set, test_set, batches, device)

    # Model, optimizer, and their state if the run is resumed.
    steps_per_epoch = len(sampler) // (args.batch_size * args.gradient_accumulation_steps)
    args.warmup_steps = steps_per_epoch if args.warmup_steps is None else args.warmup_steps
    parts = make_parts(args, classes, device, checkpoint)
    model = parts["model"]
    history = load_parts(parts, checkpoint)  # one dict per epoch: the rows of metrics.csv
    position = resume_position(checkpoint, device)  # steps, seconds and sums of the current epoch so far
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    devices = [device.index] if device.type == "cuda" else None
    ddp_model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)  # see average_statistics
    # For bit-identical results after a resume; the zeros have the shape of the model's input.
    zeros = torch.zeros(1, 3, args.image_size, args.image_size, device=device, dtype=DTYPES[args.precision])
    fix_summation_order(ddp_model, zeros)

    # Train
    print_header(args, device, checkpoint)
    log = open_log(args, history)
    profiler = make_profiler(args, (args.epochs - len(history)) * steps_per_epoch - position["step"])
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # ddp: another order in each epoch, the same in all processes
        batches[:] = remaining_batches(args, sampler, position, epoch)
        train_loss, count, seconds = train_one_epoch(
            args, ddp_model, train_loader, parts, device, history, position, profiler
        )
        row = {"epoch": epoch, "train_loss": train_loss, **evaluate(args, model, test_loader, device)}
        history.append(row | {"samples_per_second": count / seconds, "seconds": seconds, "world_size": args.world_size})
        save_best(args, model, history)
        position = start_of_epoch(device)
        save_checkpoint(args, parts, history, position)  # ddp: all processes call it, rank 0 writes
        log(history[-1])
        print_epoch(args, history[-1])

    # Finish
    if dist.get_rank() == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(weights_of(model), file))
    print_usage(history)
    shut_down(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.pt'}")


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    for name, value in vars(args).items():
        if type(value) is int and value < (least := int(name not in ("warmup_steps", "workers"))) and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.max_grad_norm is not None and not args.max_grad_norm > 0:
        parser.error(f"--max-grad-norm must be above 0, not {args.max_grad_norm}")
    if args.model not in classifiers.NAMES:
        parser.error(f"--model {args.model!r} is none of torchvision's classifiers: {', '.join(classifiers.NAMES)}")
    if args.sync_batchnorm and not torch.cuda.is_available():
        parser.error("--sync-batchnorm needs GPUs: PyTorch has no SyncBatchNorm for CPUs. Use a larger --batch-size")
    if args.log_to and find_spec(args.log_to) is None:
        parser.error(f"--log-to {args.log_to} needs a package that is not installed: pip install {args.log_to}")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
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
    # Harmless: both memory layouts of a 1x1 convolution are equal; fp16's scaler may leave out the first step; and
    # the new name is not known before PyTorch 2.15.
    warnings.filterwarnings("ignore", "Grad strides|Detected call of|`broadcast_buffers` is deprecated")
    for number in (signal.SIGUSR1, signal.SIGTERM):  # preemption: remember the signal until the next vote
        signal.signal(number, lambda *_: stop_requested.fill_(1))


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def prepare_worker(_):
    """Have a loader worker end with its parent, and ignore the signals that ask the parent to save."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def load_data(args):
    """Return training set, test set and classes; fail if they are incomplete, or too small for --batch-size."""
    try:
        train_set, test_set, classes = image_files.load(args.data_dir, args.image_size)
    except DataError as error:
        fail(error)
    args.data = f"{len(train_set)} images of {len(classes)} classes"  # a checkpoint is for these
    step_size = args.batch_size * args.gradient_accumulation_steps
    if step_size > (share := len(train_set) // args.world_size):
        fail(
            f"--batch-size {args.batch_size} times --gradient-accumulation-steps {args.gradient_accumulation_steps} "
            f"is above the {share} samples of each process"
        )
    return train_set, test_set, classes


def make_model(args, classes, weights):
    """Return the model that --model names, for so many classes, with the weights in a file, if one is given."""
    try:
        model = classifiers.make(args.model, classes, args.image_size, weights, args.new_head)
        if args.gradient_checkpointing:
            classifiers.compute_blocks_twice(model)
    except DataError as error:
        fail(error)
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_batchnorm else model


def on_device(loader, device):
    """Yield the loader's batches, on the device; a file that cannot be decoded ends the run with its name."""
    try:
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)  # faster convolutions
            yield images, labels.to(device, non_blocking=True)
    except DataError as error:  # from a worker it comes with the worker's traceback, whose last line it is
        fail(str(error).strip().rpartition("\n")[2].removeprefix("common.data.DataError: "))


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
    names = ("world_size", "data", "model", "image_size", "batch_size", "gradient_accumulation_steps", "seed")
    names += ("precision", "max_grad_norm", "sync_batchnorm")
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


def start_vote():
    """Ask all processes whether one of them got a signal; return the answer, and the request to wait for."""
    vote = stop_requested.clone()
    return vote, dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)


def remaining_batches(args, sampler, position, epoch):
    """Return the batches that an epoch still has after position["step"] complete steps.

    Each is a list of (index, seed): an image is augmented in the same way whichever worker does it, and after a resume.
    """
    size = len(sampler.dataset)
    keys = [(index, ((args.seed * 10**4 + epoch) * size + index) % 2**32) for index in sampler]
    batches = list(BatchSampler(keys, args.batch_size, drop_last=True))
    per_step = args.gradient_accumulation_steps
    return batches[position["step"] * per_step : len(batches) // per_step * per_step]  # only complete steps


def load_parts(parts, checkpoint):
    """Load model, optimizer and scaler from the checkpoint, if there is one; return its history, else an empty one."""
    if not checkpoint:
        return []
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["history"]


def weights_of(model):
    """Return the model's weights as they are saved: on the CPU, in the default memory layout."""
    return {name: weight.cpu().contiguous() for name, weight in model.state_dict().items()}


def save_best(args, model, history):
    """On rank 0 write best.pt, if no earlier epoch had as high an accuracy as the last one."""
    *earlier, last = [row["test_accuracy"] for row in history]
    if dist.get_rank() == 0 and last > max(earlier, default=-1):
        write(args.output_dir / "best.pt", lambda file: torch.save(weights_of(model), file))


def start_of_epoch(device):
    """Return the position of a process before the first step of an epoch."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples: of this process, in this epoch so far
    return {"step": 0, "seconds": 0.0, "sums": sums}


def resume_position(checkpoint, device):
    """Return the position of a process at the start of this run."""
    position = start_of_epoch(device)
    if checkpoint:
        position |= {name: checkpoint["position"][name] for name in ("step", "seconds")}
        if dist.get_rank() == 0:  # the saved sums are those of all processes together
            position["sums"] += checkpoint["position"]["sums"].to(device)
    return position


def save_checkpoint(args, parts, history, position):
    """Sum position["sums"] over all processes, which must all call this; on rank 0 write metrics.csv and checkpoint."""
    sums = position["sums"].clone()
    dist.all_reduce(sums)
    if dist.get_rank() > 0:
        return
    rows = [history[0].keys(), *(row.values() for row in history)] if history else []
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    state = {name: part.state_dict() for name, part in parts.items()} | {"history": history}
    state |= {"position": position | {"sums": sums}, "settings": resume_settings(args)}
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))


def open_log(args, history):
    """Return a function that logs a row of metrics.csv for --log-to, on rank 0.

    The files are written anew from the history, as metrics.csv is: no row is there twice, or missing, after a resume.
    """
    folder = args.output_dir / str(args.log_to)
    if not args.log_to or dist.get_rank() > 0:
        return lambda row: None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))

        def log(row):
            for name, value in row.items():
                writer.add_scalar(name, value, row["epoch"])
            writer.flush()
    elif args.log_to == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        mlflow.start_run()

        def log(row):
            mlflow.log_metrics(row, step=row["epoch"])
            if row["epoch"] == args.epochs:
                mlflow.end_run()
    else:
        import wandb

        run = wandb.init(project="torchrun_vision", mode="offline", dir=str(folder))

        def log(row):
            run.log(row, step=row["epoch"])
            if row["epoch"] == args.epochs:
                run.finish()

    for row in history:
        log(row)
    return log


def print_header(args, device, checkpoint):
    """Print what this run is, which ranks are on which node and, if it is resumed, where it continues."""
    hosts = [None] * args.world_size
    dist.all_gather_object(hosts, os.uname().nodename)
    if dist.get_rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on {device.type}"
    batch = args.world_size * args.batch_size * args.gradient_accumulation_steps
    print(f"{args.model} on {args.data_dir}: {where}, {threads}, global batch {batch}")
    print(f"data: {args.data}, {args.workers} worker{'s' if args.workers != 1 else ''} for each process")
    ranks = {host: [str(rank) for rank, name in enumerate(hosts) if name == host] for host in hosts}
    print("ranks:", "; ".join(f"{host} {', '.join(numbers)}" for host, numbers in ranks.items()))
    if checkpoint:
        step = checkpoint["position"]["step"]
        within = f", step {step}" if step else ""
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}{within}")


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
    busy = sum(os.times()[:4]) + worker_seconds()  # time of a core, in seconds
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


def worker_seconds():
    """Return the CPU time of this process's loader workers."""
    seconds = 0
    with contextlib.suppress(OSError):  # one has just ended
        for worker in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            user, system = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[11:13]
            seconds += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return seconds


def shut_down(message):
    """Wait for all processes, print the message on rank 0, leave the process group, and end this process."""
    dist.barrier()  # ddp: rank 0 may still be writing; srun --wait ends it some time after the others
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # ddp: disconnect
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    try:
        main(parse_args())
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the interpreter would wait for the loader workers, which ignore SIGTERM
