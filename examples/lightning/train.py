"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python train.py --devices 2
On SLURM:  sbatch run.slurm --epochs 10

Comments with a tag, such as "ddp:", mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import ctypes
import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # lightning: the Trainer's names
# lightning: whether srun started this process. Batch scripts have no step id or one of the highest, shells of
# `srun --pty` have SLURM_PTY_PORT; there, and in notebooks, this script starts the processes itself.
SRUN = int(os.environ.get("SLURM_STEP_ID", 2**32)) < 4294967290 and "SLURM_PTY_PORT" not in os.environ


def parse_args():
    devices = torch.cuda.device_count() or 2
    if SRUN:
        devices = int(os.environ.get("SLURM_GPUS_ON_NODE", 0)) or int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the processes, or their root")
    parser.add_argument("--warmup-steps", type=int, default=0, help="first steps of the whole run, in which --lr rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="bf16: mixed precision; fp64: for tests"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--devices", type=int, default=devices, help="processes per node, one per GPU, if any")
    parser.add_argument(
        "--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this logger of Lightning"
    )
    args = parser.parse_args()
    args.nodes = int(os.environ["SLURM_STEP_NUM_NODES"]) if SRUN else 1
    args.world_size = args.devices * args.nodes
    check_args(parser, args)
    return args


def setup(args, local_rank):
    """Set the number of threads, join the process group, and return the Trainer."""
    prepare_process(args, local_rank)
    environment = SLURMEnvironment(auto_requeue=False) if SRUN else LightningEnvironment()
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=DDPStrategy(timeout=timedelta(seconds=args.timeout)),
        plugins=[environment, AtomicCheckpointIO()],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,
        enable_checkpointing=False,  # lightning: LitConvNet saves, after the evaluation of each epoch
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.strategy.setup_environment()  # lightning: join the process group now, since broadcast_checkpoint needs it
    return trainer


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self, args, sampler, history):
        super().__init__()
        self.args, self.sampler, self.history = args, sampler, history
        self.model = ConvNet()

    def forward(self, images):
        return self.model(images).to(images.dtype)

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        share = loss.double() / self.trainer.num_training_batches / self.args.world_size  # of the mean, see below
        # lightning: sync_dist sums over all processes at the end of the epoch
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # ddp: in the backward pass, DDPStrategy averages the gradients over all processes

    def validation_step(self, batch, _):
        images, labels = batch
        logits, size = self(images), len(self.trainer.val_dataloaders.dataset)
        loss, correct = F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()
        shares = {"test_loss": loss.double() / size, "test_accuracy": correct.double() / size}
        # lightning: reduce_fx="mean" would round the number of samples when it divides over processes
        self.log_dict(shares, sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), learning_rate(self.args, 0))

    def on_train_start(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # lightning: end at SIGTERM; its handler would first wait
        # For bit-identical results after a resume; the zeros have the shape of the model's input.
        fix_summation_order(self.trainer.model, torch.zeros(1, 1, 28, 28, device=self.device, dtype=self.dtype))

    def on_train_epoch_start(self):
        self.sampler.set_epoch(self.current_epoch)  # ddp: another order in each epoch, the same in all processes
        self.start = time.perf_counter()

    def on_before_optimizer_step(self, optimizer):
        if not self.trainer.lr_scheduler_configs:  # you may add a scheduler
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(self.args, self.trainer.global_step)

    def on_validation_start(self):
        self.seconds = time.perf_counter() - self.start

    def on_save_checkpoint(self, checkpoint):
        checkpoint.update(history=self.history, settings=resume_settings(self.args))

    def on_train_epoch_end(self):  # lightning: after the validation of this epoch
        samples = self.trainer.num_training_batches * self.args.batch_size * self.args.world_size
        row = {"epoch": self.current_epoch + 1}
        for name in ("train_loss", "test_loss", "test_accuracy"):
            row[name] = self.trainer.callback_metrics[name].item()
        row |= {"samples_per_second": samples / self.seconds, "seconds": self.seconds}
        self.history.append(row | {"world_size": self.args.world_size})
        save_checkpoint(self.args, self.trainer, self.history)
        print_epoch(self.args, self.history[-1])


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def main(local_rank, args):
    """Train as one of args.world_size processes; `local_rank` is None under srun, where Lightning finds it itself."""
    check_gpus()  # not before launch() forks, since CUDA must not be initialised before a fork
    train_set, test_set = load_data(args)
    trainer = setup(args, local_rank)
    rank = trainer.global_rank
    checkpoint = broadcast_checkpoint(args, trainer)

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed)
    history = checkpoint["history"] if checkpoint else []  # one dict per epoch: the rows of metrics.csv
    model = LitConvNet(args, sampler, history)
    # lightning: convert to fp64 now, if asked for: fit would first load the checkpoint, and round it to fp32
    model = trainer.precision_plugin.convert_module(model)
    trainer.strategy.checkpoint_io.loaded = checkpoint  # AtomicCheckpointIO gives it to fit

    # Train
    print_header(args, trainer, checkpoint)
    path = args.output_dir / "checkpoint.ckpt"
    trainer.fit(model, train_loader, test_loader, ckpt_path=path if checkpoint else None)  # lightning: all epochs

    # Finish
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.model.cpu().state_dict(), file))
    print_usage(history)
    shut_down(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.pt'}")


def launch(args):
    """Start the processes of this machine and wait for them; if one fails, end the others."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process immediately, and the others with it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ddp: port 0 means any free port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "NODE_RANK": "0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # ddp: use this store; rank 0 must not start another one
    try:
        mp.start_processes(main, (args,), args.devices, start_method="fork")
    except mp.ProcessExitedException as error:
        sys.exit(2 if error.exit_code == 2 else f"train.py: error: {error}: fix the cause, then use --resume")


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def check_args(parser, args):
    """Refuse arguments that cannot work, and a number of tasks with which Lightning would wait forever."""
    for name, value in vars(args).items():
        if type(value) is int and value < (least := int(name != "warmup_steps")) and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if 0 < torch.cuda.device_count() < args.devices:
        parser.error(f"--devices {args.devices} is more than the {torch.cuda.device_count()} GPUs of this node")
    if SRUN:
        started, per_node = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("STEP_NUM_TASKS", "NTASKS_PER_NODE"))
        if not per_node * args.nodes == started == args.world_size:
            wrong = f"srun started {started} tasks on {args.nodes} nodes, not {args.devices} on each"
            parser.error(f"{wrong} (--devices, or one per GPU): use #SBATCH --ntasks-per-node instead of --ntasks")


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


def prepare_process(args, local_rank):
    """Set what must be set before Lightning is: threads, environment variables, signals, log and warnings."""
    keep_memory()
    if SRUN:
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]  # lightning: rank 0 is on the first of these
    else:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
        os.environ["LOCAL_RANK"] = f"{local_rank}"  # lightning: with this set, it starts no processes itself
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) if SRUN else 0  # srun gives each process its own cores
    torch.set_num_threads(cores or max(1, len(os.sched_getaffinity(0)) // args.devices))
    os.environ["OMP_NUM_THREADS"] = f"{torch.get_num_threads()}"  # lightning: else it sets another number
    sys.stdout.reconfigure(line_buffering=True)
    logging.disable(logging.INFO)
    # DDP warns about the strides of conv1's gradient. It is harmless: with one channel, both memory layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides|The (`srun` command|number of training)|`isinstance.tree")


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and returns the one that rank 0 has read and checked."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        write(path, lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path, **_):
        return self.loaded


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
    path = args.output_dir / "checkpoint.ckpt"
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


def broadcast_checkpoint(args, trainer):
    """Return the checkpoint that rank 0 reads and sends to all, or None; other nodes may not see the file yet."""
    checkpoint, error = trainer.strategy.broadcast(read_checkpoint(args) if trainer.global_rank == 0 else None)
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


def save_checkpoint(args, trainer, history):
    """Write metrics.csv, then the checkpoint; a kill between the two leaves a row too many, which a resume rewrites."""
    rows = [history[0].keys(), *(row.values() for row in history)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    if trainer.global_rank == 0:
        write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    trainer.save_checkpoint(args.output_dir / "checkpoint.ckpt")  # lightning: all processes must call it


def print_header(args, trainer, checkpoint):
    """Print what this run is and, if it is resumed, where it continues."""
    if trainer.global_rank > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes = f"{args.nodes} node{'s' if args.nodes > 1 else ''}"
    where = f"{args.world_size} processes on {nodes}, {dist.get_backend()} on {trainer.strategy.root_device.type}"
    print(f"ConvNet on {args.dataset}: {where}, {threads}, global batch {args.world_size * args.batch_size}")
    if checkpoint:
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}")


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
    dist.barrier()  # ddp: rank 0 may still be writing; srun --wait ends it some time after the others
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # ddp: disconnect
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    arguments = parse_args()
    main(None, arguments) if SRUN else launch(arguments)
