"""Train a ConvNet with Lightning's Trainer on CPU nodes, where Horovod averages the gradients, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import ctypes
import errno
import faulthandler
import fcntl
import logging
import os
import resource
import signal
import sys
import time
import warnings
import zipfile
from pathlib import Path

import horovod.torch as hvd
import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # lightning: the Trainer's names


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
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="bf16: mixed precision; fp64: for tests"
    )
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per process and step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the averaged gradients")
    parser.add_argument(
        "--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this logger of Lightning"
    )
    args = parser.parse_args()
    check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, set the number of threads, and return the Trainer."""
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
    return L.Trainer(
        accelerator="cpu",
        devices=1,  # of this process: Horovod has started the others
        strategy=HorovodStrategy(cluster_environment=LightningEnvironment(), checkpoint_io=AtomicCheckpointIO()),
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=args.gradient_accumulation_steps,
        gradient_clip_val=args.max_grad_norm,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,
        enable_checkpointing=False,  # lightning: LitConvNet saves, after the evaluation of each epoch
        enable_progress_bar=sys.stdout.isatty(),
    )


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self, args, sampler, history):
        super().__init__()
        self.args, self.sampler, self.history = args, sampler, history
        self.model = ConvNet()

    def forward(self, images):
        return self.model(images).to(images.dtype)

    def training_step(self, batch, _):
        restart_watchdog(self.args)
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        share = loss.double() / self.trainer.num_training_batches / self.args.world_size  # of the mean, see below
        # lightning: sync_dist sums over all processes at the end of the epoch
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch, _):
        restart_watchdog(self.args)
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

    def on_train_epoch_start(self):
        self.sampler.set_epoch(self.current_epoch)  # horovod: another order in each epoch, the same in all processes
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


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    trainer = setup(args)
    rank = hvd.rank()
    train_set, test_set = load_data(args)
    checkpoint = broadcast_checkpoint(args, trainer)

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # horovod: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # horovod: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # lightning: only whole steps; in an incomplete one the samples would count less
    trainer.limit_train_batches = len(batches) // args.gradient_accumulation_steps * args.gradient_accumulation_steps

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed)
    history = checkpoint["history"] if checkpoint else []  # one dict per epoch: the rows of metrics.csv
    model = LitConvNet(args, sampler, history)
    # lightning: convert to fp64 now, if asked for: fit would first load the checkpoint, and round it to fp32
    model = trainer.precision_plugin.convert_module(model)
    trainer.strategy.checkpoint_io.loaded = checkpoint  # AtomicCheckpointIO gives it to fit

    # Train
    print_header(args, f"ConvNet on {args.dataset}", history)
    path = args.output_dir / "checkpoint.ckpt"
    trainer.fit(model, train_loader, test_loader, ckpt_path=path if checkpoint else None)  # lightning: all epochs

    # Finish
    print_usage(history)
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.model.state_dict(), file))
        print(f"finished: test acc {history[-1]['test_accuracy']:.2%}, model in {args.output_dir / 'model.pt'}")
    shut_down(args)


class HorovodStrategy(ParallelStrategy):
    """What Lightning's Trainer asks for when it trains with several processes, answered by Horovod."""

    global_rank = property(lambda self: hvd.rank())
    local_rank = property(lambda self: hvd.local_rank())
    node_rank = property(lambda self: hvd.cross_rank())
    world_size = property(lambda self: hvd.size())
    root_device = torch.device("cpu")
    is_distributed = True  # lightning: else sync_dist=True has no effect

    def setup_environment(self):
        rank_zero_only.rank = hvd.rank()  # lightning: which process logs
        super().setup_environment()

    def model_to_device(self):
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer):
        super().setup_optimizers(trainer)  # calls configure_optimizers
        own = self.optimizers
        self.optimizers = [  # horovod: each backward pass starts to average its gradients
            hvd.DistributedOptimizer(
                optimizer,
                named_parameters=self.lightning_module.named_parameters(),
                backward_passes_per_step=trainer.accumulate_grad_batches,
                op=hvd.Average,
            )
            for optimizer in own
        ]
        for config in self.lr_scheduler_configs:  # you may add a scheduler: it sets the rate of the wrapped optimizer
            config.scheduler.optimizer = self.optimizers[own.index(config.scheduler.optimizer)]
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)  # horovod: rank 0's weights to all

    def optimizer_step(self, optimizer, closure, *args, **kwargs):
        """Run the closure, which computes the gradients, wait for their average, clip it, and take a step.

        optimizer.step(closure) of Horovod would wait before the closure, and then take a step with gradients that are
        not averaged, without any error.
        """

        def averaged():
            loss = closure()
            optimizer.synchronize()  # horovod: waits until all gradients are averaged over all processes
            return loss

        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, averaged, *args, **kwargs)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        names = {"sum": hvd.Sum, "mean": hvd.Average, "avg": hvd.Average, "min": hvd.Min, "max": hvd.Max}
        op = names[str(reduce_op).lower().rpartition(".")[2]]  # "sum", or ReduceOp.SUM of torch.distributed
        return hvd.allreduce(tensor, op=op)  # horovod: over all processes

    def all_gather(self, tensor, group=None, sync_grads=False):
        return hvd.allgather(tensor.unsqueeze(0))  # horovod: (world_size, ...)

    def broadcast(self, obj, src=0):
        return hvd.broadcast_object(obj, src, name="object")  # horovod: to all; by default the name is the type of obj

    def barrier(self, name=None):
        hvd.barrier()  # horovod: wait for all processes


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
    if args.max_grad_norm is not None and not 0 < args.max_grad_norm < float("inf"):
        parser.error(f"--max-grad-norm must be above 0, not {args.max_grad_norm}")


def prepare_process(args):
    """Set what must be set before Horovod and Lightning start; return the number of tasks that srun started, or 1."""
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
    logging.disable(logging.INFO)
    ignored = "The (`srun` command|number of training)|`isinstance.tree|Seems like `optimizer.step"
    warnings.filterwarnings("ignore", ignored)
    return tasks


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
        fail_together(error)
    share = len(train_set) // args.world_size
    if args.batch_size * args.gradient_accumulation_steps > share:
        steps = f" times --gradient-accumulation-steps {args.gradient_accumulation_steps}"
        fail_together(f"--batch-size {args.batch_size}{steps} is above the {share} samples of each process")
    return train_set, test_set


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    may_change = ("data_dir", "epochs", "lr", "timeout", "output_dir", "resume", "logger")
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
    restart_watchdog(args)
    checkpoint, error = trainer.strategy.broadcast(read_checkpoint(args) if trainer.global_rank == 0 else None)
    if error:
        fail_together(error)
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
    restart_watchdog(args)
    rows = [history[0].keys(), *(row.values() for row in history)]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    if trainer.global_rank == 0:
        write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    trainer.save_checkpoint(args.output_dir / "checkpoint.ckpt")  # lightning: all processes must call it


def print_header(args, what, history):
    """Print what this run is and, if it is resumed, where it continues."""
    restart_watchdog(args)
    if hvd.rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes, backend = hvd.cross_size(), "mpi" if hvd.mpi_enabled() else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on cpu"
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
        samples = sum(row["samples_per_second"] * row["seconds"] for row in history)
        text += f", {samples / sum(row['seconds'] for row in history):.0f} samples/s"
    print(text)


def shut_down(args):
    """Wait for all processes, which may be waiting for rank 0, and disconnect."""
    restart_watchdog(args)
    hvd.barrier()  # horovod: rank 0 may still be writing; srun --wait ends it some time after the others
    hvd.shutdown()  # horovod: disconnect


if __name__ == "__main__":
    main(parse_args())
