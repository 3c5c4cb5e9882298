"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python train.py --devices 2
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, and checkpoints that survive a kill. Comments
that begin with "ddp:" or "lightning:" mark what a single process would not need. The functions of
plumbing and launching keep the job alive.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import launching
import plumbing
from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # the Trainer's names


def parse_args():
    srun = launching.started_by_srun()
    devices = launching.devices_per_node(srun)
    parser = plumbing.arguments(__doc__, PRECISIONS)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--devices", type=int, default=devices, help="number of processes on each node")
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this one")
    args = parser.parse_args()
    args.srun = srun
    args.nodes = int(os.environ["SLURM_STEP_NUM_NODES"]) if srun else 1
    args.processes = args.devices
    args.world_size = args.devices * args.nodes
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    launching.check_tasks(parser, args)
    return args


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = ConvNet()

    def forward(self, images):
        return self.model(images).to(images.dtype)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.args.lr)

    def on_train_start(self):
        plumbing.begin_training(self.trainer, self.progress)
        # lightning: its own handler waits for the step's end; SLURM kills soon, so end at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # DDP chooses in its first backward pass in which order it sums gradients. One is done now,
        # on zeros of the input's shape: a resumed run then sums in the same order, and has the
        # same bits.
        zeros = torch.zeros(1, 1, 28, 28, device=self.device, dtype=self.dtype)
        plumbing.fix_summation_order(self.trainer.model, zeros)

    def on_train_epoch_start(self):
        self.start = time.perf_counter()

    def training_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        # If it is not finite, the next save ends the run.
        plumbing.note_loss(self.trainer.train_dataloader, loss)
        # All batches are equally large: the sum of these shares is the mean over all samples.
        share = loss.double() / self.trainer.num_training_batches / self.trainer.world_size
        # lightning: sums over the steps (reduce_fx), and over all processes (sync_dist)
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # ddp: Lightning calls backward(), in which DDP averages the gradients

    def on_before_optimizer_step(self, optimizer):
        if not self.trainer.lr_scheduler_configs:  # you may add a scheduler
            plumbing.set_learning_rate(self.args, optimizer, self.trainer.global_step)

    def on_validation_start(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the GPU may still be at the last steps
        self.seconds = time.perf_counter() - self.start

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, reduction="sum").double()
        correct = (logits.argmax(1) == labels).sum().double()
        size = len(self.trainer.val_dataloaders.dataset)
        metrics = {"test_loss": loss / size, "test_accuracy": correct / size}
        # lightning: a sum as well; "mean" would weight batches by a count that it has rounded
        self.log_dict(metrics, sync_dist=True, reduce_fx="sum")

    def on_train_epoch_end(self):  # lightning: comes after the validation of this epoch
        metrics = self.trainer.callback_metrics
        row = {"epoch": self.current_epoch + 1}
        row |= {name: metrics[name].item() for name in ("train_loss", "test_loss", "test_accuracy")}
        samples = self.args.steps_per_epoch * self.args.global_batch
        row |= {"samples_per_second": samples / self.seconds, "seconds": self.seconds}
        row |= {"world_size": self.args.world_size}
        self.progress["history"].append(row)
        self.progress["step"] = self.trainer.global_step
        # Stops the run if a loss is not finite; otherwise EpochCheckpoint saves it now.
        plumbing.check_results(self.args, self, self.progress)

    def on_save_checkpoint(self, checkpoint):  # lightning: has the state of model and optimizer
        checkpoint["progress"] = self.progress


class EpochCheckpoint(ModelCheckpoint):
    """Save after each epoch, and then print its line: an epoch that is printed is not lost."""

    FILE_EXTENSION = ".pt"

    def on_train_epoch_end(self, trainer, module):
        super().on_train_epoch_end(trainer, module)
        plumbing.print_epoch(module.args, module.progress)

    def state_dict(self):
        return {}  # lightning: it would have paths, which are others after the folder has moved


class AtomicCheckpointIO(TorchCheckpointIO):
    """How the Trainer writes and reads its checkpoints; of all processes, rank 0 writes."""

    def __init__(self, args):
        self.args = args
        self.path = os.path.realpath(os.path.join(args.output_dir, "checkpoint.pt"))
        self.checkpoint = None  # what resume() has read

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if os.path.realpath(path) != self.path:  # of a ModelCheckpoint that you have added
            return super().save_checkpoint(checkpoint, path, storage_options)
        return plumbing.write_checkpoint(self.args, checkpoint)  # as a whole or not at all

    def load_checkpoint(self, path, **options):
        checkpoint, self.checkpoint = self.checkpoint, None  # kept no longer than it is needed
        if os.path.realpath(path) != self.path or checkpoint is None:  # of trainer.test, perhaps
            return super().load_checkpoint(path, **options)
        return checkpoint


def setup(args):
    """Start the other processes, if srun has not; join the process group; return the Trainer."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    # lightning: who has started the processes, and by which variables each knows its rank
    environment = SLURMEnvironment(auto_requeue=False) if args.srun else LightningEnvironment()
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=DDPStrategy(timeout=timedelta(seconds=args.timeout)),
        plugins=[environment, AtomicCheckpointIO(args)],
        callbacks=[EpochCheckpoint(args.output_dir, "checkpoint", enable_version_counter=False)],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,  # a restart would have to wait for it
        enable_progress_bar=sys.stdout.isatty(),  # it would fill a log file
    )
    plumbing.check_gpu(trainer.strategy.root_device)
    launcher = trainer.strategy.launcher
    # lightning: runs this script again for each further process, unless srun has done so. fit
    # would start and join them as well, but only after the data and the checkpoint were read.
    launcher.launch(launching.watch, launcher)
    trainer.strategy.setup_environment()  # lightning: joins the process group
    return trainer


def resume(args, trainer, model):
    """Have fit find the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    found = plumbing.read_checkpoint(args, model) if trainer.global_rank == 0 else None
    # ddp: rank 0 decides; then each process reads the file, or ends if rank 0 has found an error
    checkpoint = plumbing.share_checkpoint(args, found)
    if checkpoint:
        trainer.strategy.checkpoint_io.checkpoint = checkpoint
        progress = checkpoint["progress"]
    return progress


@launching.print_errors
def main(args):
    """Train as the first process, which starts the others, or as one that srun has started."""
    launching.prepare_process(args)
    trainer = setup(args)
    device = trainer.strategy.root_device
    rank = trainer.global_rank

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    # Pinned memory: no step waits for its copy to a GPU.
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}
    # ddp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    batches.set_epoch = sampler.set_epoch  # lightning: calls it in each epoch, to shuffle anew
    train_loader = DataLoader(train_set, sampler=batches, **loading)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    # lightning: an empty batch, since it refuses a loader without any
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False)) or [[]]
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed + rank)  # ddp: all get the weights of rank 0 below
    model = LitConvNet(args)
    # lightning: fit would convert the weights to fp64 after it has loaded and rounded a checkpoint
    model = trainer.precision_plugin.convert_module(model)
    progress = resume(args, trainer, model.model)
    model.progress = progress
    # ddp: from here on random numbers (augmentation, dropout) differ in each process
    torch.manual_seed(args.seed + progress["step"] * args.world_size + rank)

    # Train.
    name = type(model.model).__name__
    plumbing.print_header(args, f"{name} on {args.data_name}", device, progress)
    # lightning: with "last" each process would look for itself, and some might not see the file
    path = args.output_dir / "checkpoint.pt" if progress["history"] else None
    trained = len(progress["history"]) < args.epochs
    trainer.fit(model, train_loader, test_loader, ckpt_path=path)
    plumbing.end_training(trainer, model, trained)

    # Finish.
    path = args.output_dir / "model.pt"
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
