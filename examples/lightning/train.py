"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python train.py --devices 2
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py plus flags, checkpoints, and a stop after any epoch.
Comments that begin with "ddp:" or "lightning:" mark what a single process would not need.
"""

import argparse
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

import longrun
from common import data
from common.models import ConvNet
from strategy import WholeFiles

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # the Trainer's names


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--devices", type=positive, default=torch.cuda.device_count() or 2, help="processes a node")
    add("--nodes", type=positive, help="number of nodes; only run.slurm sets it")
    add("--dataset", choices=data.NAMES, default=data.NAMES[0])
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--epochs", type=positive, default=5, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=64, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--precision", choices=tuple(PRECISIONS), default="fp32", help="bf16 is mixed")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    add("--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this logger")
    args = parser.parse_args()
    processes = args.devices * (args.nodes or 1)
    args.global_batch = args.global_batch or args.batch_size * processes
    args.batch_size, rest = divmod(args.global_batch, processes)
    if rest or not args.batch_size:
        parser.error(f"--global-batch {args.global_batch} must be a multiple of {processes}")
    return args


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self, args, data_sets):
        super().__init__()
        self.args, self.data_sets = args, data_sets
        self.model = ConvNet()
        self.progress = {"step": 0, "history": [], "lr": args.lr}  # history: rows of metrics.csv

    def forward(self, images):
        logits = self.model(images)
        return logits.float() if self.args.precision == "bf16" else logits

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.args.lr)
        # The learning rate rises during the warm-up; put another PyTorch scheduler here.
        warmup = self.args.warmup_steps
        scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / (warmup + 1)))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def setup(self, stage):  # lightning: the process group exists; no checkpoint has been read yet
        args, what = self.args, f"{type(self.model).__name__} on {self.args.dataset}"
        where = "nccl on cuda" if self.device.type == "cuda" else "gloo on cpu"
        # longrun.py compares and loads the model. lightning: loads the whole checkpoint later.
        stateful = {"state_dict": self}
        self.progress = longrun.start(args, what, where, self.data_sets, stateful, self.progress)
        longrun.seed(args.seed, len(self.progress["history"]), self.global_rank)  # for workers
        longrun.alive(None)  # the first step has no time limit: it may compile kernels

    def on_train_start(self):
        # lightning: has loaded the saved learning rates. Scale them if --lr is another one.
        before, self.progress["lr"] = self.progress["lr"], self.args.lr
        factor = self.args.lr / before if before else 1
        for group in self.optimizers().param_groups:
            group |= {name: group[name] * factor for name in longrun.RATES if name in group}
        scheduler = self.lr_schedulers()
        if hasattr(scheduler, "base_lrs"):  # some PyTorch schedulers do not have them
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]

    def on_train_epoch_start(self):
        # ddp: rank 0 decides whether all stop; each must call this, or the others hang
        answer = self.trainer.strategy.broadcast(longrun.wish(self.args))
        if answer == longrun.STOP and hasattr(self, "start"):  # only after a checkpoint is saved
            longrun.end(self.args, self.progress, "stopped")  # job.sh requeues the job
        self.start = time.perf_counter()
        self.sums = torch.zeros(2, dtype=torch.double, device=self.device)  # loss, labels

    def training_step(self, batch, number):
        # ddp: each process and batch gets its own random numbers (dropout), also after a resume
        longrun.seed(self.args.seed, self.current_epoch, number, self.global_rank)
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        self.sums[1] += labels.numel()
        return loss  # ddp: Lightning calls backward(), in which DDP averages the gradients

    def on_train_batch_end(self, *_):
        longrun.alive(self.args.timeout)  # ends the process if the next call comes too late

    def on_validation_start(self):
        dist.all_reduce(self.sums)  # ddp: sum over all processes
        self.train_loss, samples = (self.sums[0] / self.sums[1]).item(), self.sums[1].item()
        seconds = time.perf_counter() - self.start
        self.speed = {"samples_per_second": samples / seconds, "seconds": seconds}
        for buffer in self.buffers():  # ddp: use rank 0's BatchNorm statistics
            dist.broadcast(buffer, src=0)
        self.sums = torch.zeros(3, dtype=torch.double, device=self.device)  # loss, correct, labels

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        self.sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += labels.numel()
        longrun.alive(self.args.timeout)

    def on_validation_epoch_end(self):
        dist.all_reduce(self.sums)  # ddp: sum over all processes
        test_loss, accuracy = (self.sums[:2] / self.sums[2]).tolist()
        row = {"train_loss": self.train_loss, "test_loss": test_loss, "test_accuracy": accuracy}
        self.log_dict(row, sync_dist=True, reduce_fx="max")  # lightning: for loggers, callbacks
        row = {"epoch": self.current_epoch + 1} | row | self.speed
        self.progress["history"].append(row | {"world_size": self.trainer.world_size})
        self.progress["step"] = self.global_step


def main(args):
    """Train as the first process, which starts the others, or as one that srun has started."""
    torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # lightning: after each epoch saves the model, optimizer, scheduler, loops and callbacks
    saving = ModelCheckpoint(args.output_dir, "checkpoint", enable_version_counter=False)
    saving.FILE_EXTENSION = ".pt"  # job.sh and longrun.py look for checkpoint.pt
    # lightning: who starts the processes, and which variables tell each process its rank
    environment = SLURMEnvironment(auto_requeue=False) if args.nodes else LightningEnvironment()
    trainer = L.Trainer(
        devices=args.devices,
        num_nodes=args.nodes or 1,
        strategy=WholeFiles(timeout=timedelta(seconds=10 * args.timeout)),
        plugins=[environment],
        callbacks=[saving],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        limit_train_batches=args.limit_steps,
        limit_val_batches=args.limit_steps,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,  # a check before training, which each restart would repeat
        enable_progress_bar=False,  # a bar would fill the log file
        enable_model_summary=False,
    )
    rank, world_size = trainer.global_rank, trainer.world_size
    longrun.prepare(args, rank, world_size, dist.all_gather_object, dist.destroy_process_group)
    # Data: replace these lines with your data sets; any map-style Dataset works.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        longrun.fail(error)
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    if len(sampler) < args.batch_size:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": torch.cuda.is_available()}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **extra)
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size, **extra)

    torch.manual_seed(args.seed)
    model = LitConvNet(args, (train_set, test_set))
    model = model.double() if args.precision == "fp64" else model  # before a checkpoint is loaded
    path = args.output_dir / "checkpoint.pt"
    path = path if args.resume and path.exists() else None
    trainer.fit(model, train_loader, test_loader, ckpt_path=path)
    longrun.write(args, "model.pt", lambda file: torch.save(model.model.cpu().state_dict(), file))
    longrun.end(args, model.progress, "finished")


if __name__ == "__main__":
    main(parse_args())
