"""Train a ConvNet with Lightning's Trainer on one node or many, on GPUs or CPU processes.

Locally:   python train.py --devices 2
On SLURM:  sbatch run.slurm --epochs 10
"""

import argparse
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # lightning: its names
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size"
SETTINGS = ("world_size", "dataset", "batch_size", "lr", "scale_lr", "seed", "precision")  # the same after a resume
# lightning: whether srun started this process: batch scripts, salloc's shell and notebooks have SLURM_NTASKS, too
SRUN = int(os.environ.get("SLURM_STEP_ID", 2**32)) < 4294967290 and "SLURM_PTY_PORT" not in os.environ


def parse_args():
    gpus = torch.cuda.device_count()
    tasks = int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))  # as the header says
    devices = (int(os.environ.get("SLURM_GPUS_ON_NODE", 0)) or tasks) if SRUN else gpus or 2
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="where the files of mnist and fashion_mnist are")
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", action="store_true", help="multiply --lr by the number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a collective may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--devices", type=int, default=devices, help="processes of each node, one per GPU, if any")
    parser.add_argument("--logger", choices=("CSVLogger", "TensorBoardLogger"), help="Lightning's own, besides")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "timeout", "devices"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if 0 < gpus < args.devices:
        parser.error(f"--devices {args.devices} is more than the {gpus} GPUs that this process can use")
    args.nodes = int(os.environ["SLURM_STEP_NUM_NODES"]) if SRUN else 1
    args.world_size = args.devices * args.nodes
    started = int(os.environ["SLURM_STEP_NUM_TASKS"]) if SRUN else args.world_size
    if SRUN and not tasks * args.nodes == started == args.world_size:  # lightning: would wait for the rest for ever
        wrong = f"srun started {started} tasks on {args.nodes} nodes, not {args.devices} on each"
        parser.error(f"{wrong} (--devices, or one per GPU): change #SBATCH --ntasks-per-node, and leave out --ntasks")
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


def setup(args, local_rank):
    """Share out the cores, connect the processes, and return the Trainer."""
    if SRUN:
        os.environ["SLURM_NODELIST"] = os.environ["SLURM_STEP_NODELIST"]  # lightning: rank 0 is on the first of these
    else:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing trains on unseen without its parent
        os.environ["LOCAL_RANK"] = f"{local_rank}"  # lightning: with this set, it starts no processes itself
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * args.devices if SRUN else 0
    torch.set_num_threads(max(1, (cores or len(os.sched_getaffinity(0))) // args.devices))
    os.environ["OMP_NUM_THREADS"] = f"{torch.get_num_threads()}"  # lightning: else it sets a number of its own
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", "Grad strides|The (`srun` command|number of training)|`isinstance.tree")
    sys.stdout.reconfigure(line_buffering=True)  # each line reaches the log at once
    environment = SLURMEnvironment(auto_requeue=False) if SRUN else LightningEnvironment()
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=pl.strategies.DDPStrategy(timeout=timedelta(seconds=args.timeout)),
        plugins=[environment, WholeFiles()],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        logger=getattr(pl.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its own repeats test samples
        num_sanity_val_steps=0,
        enable_checkpointing=False,  # lightning: on_train_epoch_end does it
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.strategy.setup_environment()  # lightning: fit would do it, too late to ask rank 0 for the checkpoint
    return trainer


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
        changed = [f"{key} {old}" for key, old in checkpoint["settings"].items() if old != getattr(args, key)]
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


class WholeFiles(pl.plugins.TorchCheckpointIO):
    """Writes checkpoints whole or not at all, and loads what rank 0 has read."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        write(path, lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path, **_):
        return self.loaded


class Training(pl.LightningModule):
    """The model, its losses and its optimizer, and what fit shall do around an epoch; fit calls all of it."""

    def __init__(self, args, history):
        super().__init__()
        self.args, self.history, self.model = args, history, ConvNet()

    def forward(self, images):
        return self.model(images).to(images.dtype)

    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        share = loss.double() / self.trainer.num_training_batches / self.args.world_size
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")  # lightning:
        return loss

    def validation_step(self, batch, _):
        logits, size = self(batch[0]), len(self.trainer.val_dataloaders.dataset)
        loss, correct = F.cross_entropy(logits, batch[1], reduction="sum"), (logits.argmax(1) == batch[1]).sum()
        shares = {"test_loss": loss.double() / size, "test_accuracy": correct.double() / size}
        self.log_dict(shares, sync_dist=True, reduce_fx="sum")  # lightning: its "mean" rounds the number of samples

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.args.lr * (self.args.world_size if self.args.scale_lr else 1))

    def on_train_start(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # lightning: its handler waits for processes that got no signal
        # ddp: the first backward settles in which order gradients are added. Once now: a resumed run then adds alike.
        self.trainer.model(torch.zeros(1, 1, 28, 28, device=self.device, dtype=self.dtype)).sum().backward()

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.sampler.sampler.set_epoch(self.current_epoch)  # ddp: another order each epoch
        self.start = time.perf_counter()

    def on_validation_start(self):
        self.seconds = time.perf_counter() - self.start

    def on_save_checkpoint(self, checkpoint):
        checkpoint.update(history=self.history, settings={name: getattr(self.args, name) for name in SETTINGS})

    def on_train_epoch_end(self):
        args, epoch, metrics = self.args, self.current_epoch + 1, self.trainer.callback_metrics
        train_loss, test_loss, accuracy = (metrics[name].item() for name in COLUMNS.split(",")[1:4])
        speed = self.trainer.num_training_batches * args.batch_size * args.world_size / self.seconds
        self.history.append((epoch, train_loss, test_loss, accuracy, speed, self.seconds, args.world_size))
        if self.global_rank == 0:
            rows = "".join(",".join(map(str, row)) + "\n" for row in self.history)
            write(args.output_dir / "metrics.csv", lambda file: file.write(f"{COLUMNS}\n{rows}".encode()))
        self.trainer.save_checkpoint(args.output_dir / "checkpoint.ckpt")  # last, so that no row can be lost
        losses = f"train loss {train_loss:.4f} | test loss {test_loss:.4f} | test acc {accuracy:7.2%}"
        self.print(f"epoch {epoch:2}/{args.epochs} | {losses} | {speed:5.0f} samples/s | {self.seconds:6.2f} s")


def main(local_rank, args):
    """Train as one of the processes."""
    check_gpus()  # not before the fork in `launch`: CUDA, once asked, does not work in forked processes
    world_size, path = args.world_size, args.output_dir / "checkpoint.ckpt"
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        fail(error)
    if args.batch_size > len(train_set) // world_size:
        fail(f"--batch-size {args.batch_size} is above the {len(train_set) // world_size} samples of each process")
    trainer = setup(args, local_rank)
    rank, device = trainer.global_rank, trainer.strategy.root_device.type
    # ddp: rank 0 decides; others may not see the file yet
    checkpoint, problem = trainer.strategy.broadcast(read_checkpoint(args, path) if rank == 0 else None)
    if problem:
        fail(problem)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # ddp:
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=True), batch_size=None)
    shard = data.evaluation_shard(len(test_set), rank, world_size)  # ddp: each sample once
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)
    torch.manual_seed(args.seed)
    history = checkpoint["history"] if checkpoint else []
    # lightning: converted only by fit, the module would get a checkpoint's fp64 weights first, and round them to fp32
    model = trainer.precision_plugin.convert_module(Training(args, history))
    trainer.strategy.checkpoint_io.loaded = checkpoint
    if rank == 0:
        where = f"{world_size} processes on {args.nodes} node{'s' * (args.nodes > 1)}, {dist.get_backend()} on {device}"
        threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
        print(f"ConvNet on {args.dataset}: {where}, {threads}, global batch {world_size * args.batch_size}")
        if history:
            print(f"continuing after epoch {len(history)} of {args.epochs}")
    trainer.fit(model, loader, test_loader, ckpt_path=path if checkpoint else None)  # lightning: all of the training
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.model.state_dict(), file))
        print(f"finished: test acc {history[-1][3]:.2%}, model in {args.output_dir / 'model.pt'}")
    dist.barrier()  # ddp: the others wait for rank 0; srun would end it --wait seconds after them
    dist.destroy_process_group()
    os._exit(0)  # at once: Gloo's threads can make Python's own way out abort


def launch(args):
    """Start the processes of this machine and wait for them; if one fails, end them all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all at once
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ddp: port 0 is any free port
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "NODE_RANK": "0"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # ddp: they meet there, not at a store that rank 0 starts
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine only, so its name need not resolve
    try:
        mp.start_processes(main, args=(args,), nprocs=args.devices, start_method="fork")
    except mp.ProcessExitedException as error:
        sys.exit(2 if error.exit_code == 2 else f"train.py: error: {error}: mend that, then continue with --resume")


if __name__ == "__main__":
    arguments = parse_args()
    main(None, arguments) if SRUN else launch(arguments)
