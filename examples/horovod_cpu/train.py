"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
train_lm.py imports functions from this file.
"""

import argparse
import ctypes
import errno
import faulthandler
import fcntl
import functools
import os
import resource
import sys
import time
import types
import zipfile
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
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
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument(
        "--profile", action="store_true", help="show what 5 steps spend their time on, and write a trace"
    )
    add_horovod_arguments(parser)
    args = parser.parse_args()
    check_args(parser, args)
    return args


def add_horovod_arguments(parser):
    """Add the arguments that train.py and train_lm.py share."""
    names = ("--gradient-accumulation-steps", "--batches-per-allreduce")  # the second is used in Horovod's examples
    parser.add_argument(*names, type=int, default=1, help="batches per process and step")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")


def setup(args):
    """Join the other processes, set the number of threads, and return this process's device."""
    tasks = prepare_process(args)
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    if args.world_size == 1 and tasks > 1:
        fail(ALONE.format(tasks))
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # horovod: share the cores of the node
    if tasks == args.world_size:  # started by srun, which gives each process its own cores
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))
    # By default each process would use all cores: slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))
    return torch.device("cpu")


def distribute(args, model, optimizer, checkpoint, resumed):
    """Give all processes the weights and the state of rank 0; return an optimizer that averages the gradients.

    `checkpoint` is None on all processes but rank 0; `resumed` is the same on all.
    """
    optimizer = hvd.DistributedOptimizer(  # horovod: wrap
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.gradient_accumulation_steps,
        op=hvd.Average,
    )
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    if resumed:  # only then, and before the weights: an optimizer that has no state yet takes a step in this function
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # horovod: send rank 0's state to all
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: send rank 0's weights to all
    return optimizer


def train_one_epoch(args, model, train_loader, optimizer, device, epoch, profiler):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    steps = len(train_loader) // args.gradient_accumulation_steps
    for number, (images, labels) in enumerate(islice(train_loader, steps * args.gradient_accumulation_steps)):
        step, micro_batch = divmod(number, args.gradient_accumulation_steps)
        images, labels = images.to(device, DTYPES[args.precision]), labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        # horovod: the last backward pass of a step starts to average the gradients
        (loss / args.gradient_accumulation_steps).backward()
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        if micro_batch + 1 == args.gradient_accumulation_steps:
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(args, epoch * steps + step)
            optimizer.step()  # horovod: waits until all gradients are averaged over all processes
            optimizer.zero_grad()
            profiler.step()
        restart_watchdog(args)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
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
        restart_watchdog(args)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    device = setup(args)
    rank = hvd.rank()
    train_set, test_set = load_data(args)
    checkpoint, history = find_checkpoint(args)  # the checkpoint on rank 0 only

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # horovod: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # horovod: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model, optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = distribute(args, model, optimizer, checkpoint, resumed=bool(history))

    # Train
    print_header(args, f"ConvNet on {args.dataset}", device, history)
    profiler = make_profiler(args, (args.epochs - len(history)) * (len(batches) // args.gradient_accumulation_steps))
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # horovod: another order in each epoch, the same in all processes
        train_loss, count, seconds = train_one_epoch(args, model, train_loader, optimizer, device, epoch - 1, profiler)
        test_loss, test_accuracy = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        history.append(row | {"samples_per_second": count / seconds, "seconds": seconds, "world_size": args.world_size})
        save_checkpoint(args, model, optimizer, history)  # horovod: rank 0 writes; all have the same weights
        print_epoch(args, history[-1])

    # Finish
    print_usage(history)
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
        print(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.pt'}")
    shut_down(args)


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----

LAUNCHED = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # every launcher sets one of these
ALONE = "srun started {} tasks that are not connected: use srun --mpi=pmix (srun --mpi=list shows the types)"


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def fail_together(message):
    """Like fail(), for an error that all processes have seen: disconnect first, so that none reports a lost peer."""
    hvd.shutdown()
    fail(message)


def restart_watchdog(args):
    """Make this process end, and print where it hung, unless this function is called again within --timeout.

    It is needed because MPI waits forever for a process that hangs.
    """
    faulthandler.dump_traceback_later(args.timeout, exit=True)


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    for name, value in vars(args).items():
        if type(value) is int and value < (least := int(name != "warmup_steps")) and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")


def prepare_process(args):
    """Set what must be set before Horovod starts; return the number of tasks that srun started, or 1."""
    keep_memory()
    sys.stdout.reconfigure(line_buffering=True)
    restart_watchdog(args)
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if not any(name in os.environ for name in LAUNCHED):
        if tasks > 1:
            fail(ALONE.format(tasks))
        os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    # With tensor fusion the summation order depends on timing: 3 or more processes would not reproduce the same bits.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms between checks for gradients to send; measured
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(args.timeout)
    return tasks


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def load_data(args):
    """Return the training and the test set; fail if they are missing, or too small for --batch-size."""
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail_together(error)
    check_batch_size(args, train_set)
    return train_set, test_set


def check_batch_size(args, train_set):
    """Fail if a process has too few samples for one step."""
    share = len(train_set) // args.world_size
    if args.batch_size * args.gradient_accumulation_steps > share:
        steps = f" times --gradient-accumulation-steps {args.gradient_accumulation_steps}"
        fail_together(f"--batch-size {args.batch_size}{steps} is above the {share} samples of each process")


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    may_change = ("data_dir", "epochs", "lr", "timeout", "output_dir", "resume", "profile")
    return {name: value for name, value in vars(args).items() if name not in may_change}


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


def find_checkpoint(args):
    """Return (checkpoint, history). Only rank 0 gets the checkpoint, if there is one; all get its history."""
    restart_watchdog(args)
    checkpoint, error = read_checkpoint(args) if hvd.rank() == 0 else (None, None)
    history, error = hvd.broadcast_object((checkpoint["history"] if checkpoint else [], error))
    if error:
        fail_together(error)
    return checkpoint, history


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
    restart_watchdog(args)
    if hvd.rank() > 0:
        return
    rows = [history[0].keys(), *(row.values() for row in history)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    state["settings"] = resume_settings(args)
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))


def print_header(args, what, device, history):
    """Print what this run is and, if it is resumed, where it continues."""
    restart_watchdog(args)
    if hvd.rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes, backend = hvd.cross_size(), "mpi" if hvd.mpi_enabled() else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on {device.type}"
    batch = args.world_size * args.batch_size * args.gradient_accumulation_steps
    print(f"{what}: {where}, {threads}, global batch {batch}")
    if history:
        print(f"continuing after epoch {len(history)} of {args.epochs}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if hvd.rank() > 0:
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
        fail_together(f"--profile needs 8 steps, and this run has {steps} to do: raise --epochs, or lower --batch-size")
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it logs an error: no GPU
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=5, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=functools.partial(report_profile, args))


def report_profile(args, profiler):
    """Write this process's trace; print on rank 0 what the time of a step goes to, as a mean over all processes."""
    folder, rank = args.output_dir / "profile", hvd.rank()
    torch.profiler.tensorboard_trace_handler(str(folder), f"rank{rank}")(profiler)
    found = hvd.allgather_object(shares_of_a_step(profiler.events()), name="profile")
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
    for event in events:
        span, name = (event.time_range.start, event.time_range.end), event.name
        if name.startswith("ProfilerStep"):
            steps.append(span)
        elif name.startswith("enumerate(DataLoader)"):
            data.append(span)
        elif name.startswith("Optimizer.step") and not (event.cpu_parent and event.cpu_parent.name == name):
            network.append(span)  # horovod: waits for the gradients, then takes the step of AdamW, an event within
        elif name.startswith(("aten::", "autograd::", "Optimizer.step")):
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
    used = hvd.allgather_object((busy, memory), name="usage")  # by default the name is the type of the object
    if hvd.rank() > 0:
        return
    busy, memory = zip(*used, strict=True)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * int(os.environ.get("SLURM_NTASKS", 1))
    cores = cores or len(os.sched_getaffinity(0))
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    text = f"used: {seconds:.0f} s, {sum(busy) / seconds / cores:.0%} of {cores} cores, {max(memory):.0f} MB a process"
    if history:
        unit = "samples" if "samples_per_second" in history[0] else "tokens"  # train_lm.py
        count = sum(row[f"{unit}_per_second"] * row["seconds"] for row in history)
        text += f", {count / sum(row['seconds'] for row in history):.0f} {unit}/s"
    print(text)


def shut_down(args):
    """Wait for all processes, which may be waiting for rank 0, and disconnect."""
    restart_watchdog(args)
    hvd.barrier()  # horovod: rank 0 may still be writing; srun --wait ends it some time after the others
    hvd.shutdown()  # horovod: disconnect


if __name__ == "__main__":
    main(parse_args())
