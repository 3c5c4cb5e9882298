"""Train a ConvNet with DeepSpeed ZeRO on one or many nodes, on GPUs or CPUs, started by torchrun.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "deepspeed:" or "torchrun:" mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import contextlib
import ctypes
import difflib
import errno
import fcntl
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # deepspeed: else it warns
import deepspeed  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfigError  # noqa: E402
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402


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
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="or set bf16 in the config file")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--deepspeed_config", type=Path, default="ds_config.json", help="DeepSpeed's config file")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="overrides the stage in the config file")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed: its own launcher adds this
    args = parser.parse_args()
    # torchrun: number of processes on this node (DeepSpeed's own launcher sets LOCAL_SIZE) and on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    check_args(parser, args)
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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    deepspeed.init_distributed(timeout=timeout)  # deepspeed: uses this process group; without one it looks for MPI
    return device


def train_one_epoch(args, engine, train_loader, device):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    engine.train()
    start = time.perf_counter()
    # Loss and samples stay on the device, so that no step waits for them.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    dtype = next(engine.parameters()).dtype  # of the weights, as the config file says
    per_step = engine.gradient_accumulation_steps()
    for images, labels in islice(train_loader, len(train_loader) // per_step * per_step):  # only complete steps
        images, labels = images.to(device, dtype), labels.to(device)
        loss = F.cross_entropy(engine(images).float(), labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        if not engine.lr_scheduler:  # the config file may have one
            for param_group in engine.optimizer.param_groups:
                param_group["lr"] = learning_rate(args, engine.global_steps)
        engine.step()  # deepspeed: every gradient_accumulation_steps calls, optimizer.step() and zero_grad()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
    dist.all_reduce(sums)  # deepspeed: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(engine, test_loader, device):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    dtype = next(engine.parameters()).dtype
    for images, labels in test_loader:
        images, labels = images.to(device, dtype), labels.to(device)
        logits = engine(images)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # deepspeed: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def create_engine(args, config):
    """Return DeepSpeed's engine, which holds the model on its device and the optimizer of the config file.

    Of N processes each keeps 1/N of the optimizer's state (ZeRO stages 1 to 3), of the gradients (2 and 3) and of the
    weights (3). At stage 0 each process keeps everything, as with DistributedDataParallel.
    """
    torch.manual_seed(args.seed)
    model = ConvNet()
    with config_errors(args):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dist.set_timeout(timedelta(seconds=args.timeout), engine.data_parallel_group)  # deepspeed: 30 minutes else
    return engine


def gather_weights(model):
    """Return the state dict in fp32, gathered from the shards of all processes, on each of them."""
    weights = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        gathered = safe_get_full_fp32_param(weight)  # deepspeed: all processes call it; None if it is no shard
        weight = (weight if gathered is None else gathered).detach().cpu()
        weights[name] = weight.float() if weight.is_floating_point() else weight
    return weights


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    config = read_config(args)
    train_set, test_set = load_data(args, config)
    device = setup(args)
    rank = dist.get_rank()

    # Model, optimizer, and their state if the run is resumed.
    engine = create_engine(args, config)
    checkpoint = broadcast_checkpoint(args, engine)
    history = []  # one dict per epoch: the rows of metrics.csv
    if checkpoint:
        # deepspeed: each process loads its shard
        loaded, _ = engine.load_checkpoint(args.output_dir / "checkpoint", checkpoint["tag"])
        if loaded is None:
            fail(f"rank {rank} does not find its part of {args.output_dir / 'checkpoint'}: is it on a shared disk?")
        history = checkpoint["history"]

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # deepspeed: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # deepspeed: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = math.ceil(len(test_set) / (args.world_size * args.batch_size))
    # deepspeed: at stage 3 all processes must call forward equally often
    test_batches += [[]] * (longest - len(test_batches))
    test_loader = DataLoader(test_set, sampler=test_batches, batch_size=None)

    # Train
    print_header(args, engine, history)
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # deepspeed: another order in each epoch, the same in all processes
        train_loss, count, seconds = train_one_epoch(args, engine, train_loader, device)
        test_loss, test_accuracy = evaluate(engine, test_loader, device)
        row = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        history.append(row | {"samples_per_second": count / seconds, "seconds": seconds, "world_size": args.world_size})
        save_checkpoint(args, engine, history)
        print_epoch(args, history[-1])

    # Finish
    weights = gather_weights(engine.module)
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
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
        least = int(name != "warmup_steps")
        if type(value) is int and value < least and name not in ("seed", "zero_stage", "local_rank"):
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
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
    """Make this process end when its launcher does; print lines immediately; set up Gloo and DeepSpeed."""
    keep_memory()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
    sys.stdout.reconfigure(line_buffering=True)
    if args.processes == args.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    deepspeed.ops.__compatible_ops__ = {}  # DeepSpeed would compile an op for inference on CPUs: not needed here


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


KEYS = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "gradient_accumulation_steps")
KEYS += ("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print")


def read_config(args):
    """Return the config file as a dict, with the values of the command line in it."""
    path = args.deepspeed_config
    try:
        config = json.loads(path.read_text(), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        fail(f"cannot read --deepspeed_config {path} ({error.strerror})")
    except ValueError as error:
        fail(f"{path} is not valid JSON: {error}")
    for name in ("zero_optimization", "bf16", "optimizer"):
        if not isinstance(config, dict) or not isinstance(config.setdefault(name, {}), dict):
            fail(f"{path}: {name} must be an object: {{...}}")
    for key in config.keys() - set(KEYS):  # DeepSpeed ignores a key that it does not know
        if similar := difflib.get_close_matches(key, KEYS, n=1):
            fail(f"{path}: unknown key {key}: did you mean {similar[0]}?")
    if "train_batch_size" in config:
        fail(f"{path}: remove train_batch_size: it follows from --batch-size and gradient_accumulation_steps")
    if "type" not in config["optimizer"]:
        fail(f"{path}: optimizer has no type, such as AdamW")
    lr = learning_rate(args, args.warmup_steps)  # after the warm-up
    config["optimizer"]["params"] = config["optimizer"].get("params", {}) | {"lr": lr}
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    if args.zero_stage is not None:
        config["zero_optimization"]["stage"] = args.zero_stage
    if args.precision == "bf16":
        config["bf16"]["enabled"] = True
    return config


@contextlib.contextmanager
def config_errors(args):
    """Turn what DeepSpeed raises for a config that cannot work into one line with the name of the file."""
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # not a mistake in the config
    except (DeepSpeedConfigError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        message = " ".join(f"{error} {error.__cause__ or ''}".split())
        if "gloo" in message:
            raise  # the connection to another process is lost
        if "build" in message:
            message += ": install ninja and g++, or build it on a login node (DS_BUILD_CPU_ADAM=1, see README.md)"
        fail(f"{args.deepspeed_config}: {message}")


def load_data(args, config):
    """Return the training and the test set; fail if they are missing, or too small for --batch-size."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    per_step = config.get("gradient_accumulation_steps", 1)
    if args.batch_size * per_step > (share := len(train_set) // args.world_size):
        steps = f" times gradient_accumulation_steps {per_step}" if per_step > 1 else ""
        fail(f"--batch-size {args.batch_size}{steps} is above the {share} samples of each process")
    return train_set, test_set


def precision(engine):
    """Return the name of the precision in which the engine computes."""
    return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"


def resume_settings(args, engine):
    """Return the settings that a resumed run must share with the run that it continues."""
    settings = {name: getattr(args, name) for name in ("world_size", "dataset", "batch_size", "seed")}
    settings |= {"precision": precision(engine), "optimizer": engine.optimizer_name()}
    settings |= {"gradient_accumulation_steps": engine.gradient_accumulation_steps()}
    return settings | {"ZeRO stage": int(engine.zero_optimization_stage())}


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


def read_checkpoint(args, engine):
    """Lock the output folder; return (checkpoint or None, error message or None). Never modifies a checkpoint."""
    path = args.output_dir / "checkpoint"
    if error := lock(args.output_dir):
        return None, error
    if not (path / "run.json").exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    file, damage = "run.json", None
    try:
        checkpoint = json.loads((path / "run.json").read_text())
        for file in checkpoint["files"]:
            if bad := zipfile.ZipFile(path / file).testzip():  # torch.load does not notice a flipped bit
                damage = f"{file}: {bad}"
        epochs, settings = len(checkpoint["history"]), resume_settings(args, engine)
        changed = [f"{name} {old}" for name, old in checkpoint["settings"].items() if old != settings[name]]
    except PermissionError as error:
        return None, f"cannot read {error.filename} ({error.strerror}): correct that, then continue with --resume"
    except Exception as error:  # a damaged file can raise almost anything
        damage = f"{file}: {error!r}"
    if damage:
        return None, f"{path} is damaged ({damage}): move it away to start over, or restore a good copy"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return None, f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint, None


def broadcast_checkpoint(args, engine):
    """Return what rank 0 reads and sends to all, or None; other nodes may not see the files yet."""
    found = [read_checkpoint(args, engine) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=engine.device)
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


def save_checkpoint(args, engine, history):
    """Write metrics.csv, then the shards of all processes, then run.json: it names the files of the checkpoint."""
    path, tag, rank = args.output_dir / "checkpoint", f"epoch{len(history)}", dist.get_rank()
    if rank == 0:
        rows = [history[0].keys(), *(row.values() for row in history)]
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
        shutil.rmtree(path / tag, ignore_errors=True)  # may be there from a run that was killed while saving
    dist.barrier()
    try:
        engine.save_checkpoint(path, tag)  # deepspeed: all processes must call it
        for file in (path / tag).glob("*.pt"):
            if rank == 0 or f"_rank_{rank}_" in file.name:
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            raise  # the connection to another process is lost
        fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")
    dist.barrier()  # deepspeed: now all shards are written
    if rank == 0:
        files = sorted(str(file.relative_to(path)) for file in (path / tag).glob("*.pt"))
        run = {"tag": tag, "files": files, "history": history, "settings": resume_settings(args, engine)}
        write(path / "run.json", lambda file: file.write(json.dumps(run).encode()))
        for old in set(path.glob("epoch*")) - {path / tag}:
            shutil.rmtree(old, ignore_errors=True)


def print_header(args, engine, history):
    """Print what this run is and, if it is resumed, where it continues."""
    if dist.get_rank() > 0:
        return
    lr = learning_rate(args, args.warmup_steps)  # after the warm-up
    from_args = f"micro batch {args.batch_size} and learning rate {lr:g} from the command line"
    print(f"{args.deepspeed_config}: ZeRO stage {engine.zero_optimization_stage()}, {precision(engine)}; {from_args}")
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes = args.world_size // args.processes
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}"
    where += f", {dist.get_backend()} on {engine.device.type}, {threads}"
    print(f"ConvNet on {args.dataset}: {where}, global batch {engine.train_batch_size()}")
    if history:
        print(f"continuing after epoch {len(history)} of {args.epochs}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if dist.get_rank() > 0:
        return
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['samples_per_second']:5.0f} samples/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | test acc {row['test_accuracy']:7.2%} | {speed}")


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
    dist.barrier()  # deepspeed: rank 0 may still be writing; srun --wait ends it some time after the others
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # deepspeed: disconnect
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    main(parse_args())
