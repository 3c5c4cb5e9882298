"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python train.py --devices 2
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "ddp:" or "lightning:" mark what a script for a single process would not need. What else a long
job on a cluster needs is in plumbing.py, such as errors that say what to do, and in launching.py.
"""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import launching
import plumbing
from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # lightning: the Trainer's names


def parse_args():
    srun = launching.started_by_srun()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    devices = launching.devices_per_node(srun)
    parser.add_argument("--devices", type=int, default=devices, help="number of processes per node")
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, shared by all processes")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16: mixed; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this one")
    args = parser.parse_args()
    args.srun, args.nodes = srun, int(os.environ["SLURM_STEP_NUM_NODES"]) if srun else 1
    args.processes, args.world_size = args.devices, args.devices * args.nodes
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)
    launching.check_tasks(parser, args)
    return args


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self, args, sampler):
        super().__init__()
        self.args, self.sampler = args, sampler
        self.model = ConvNet()

    def forward(self, images):
        return self.model(images).to(images.dtype)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), learning_rate(self.args, 0))

    def on_train_start(self):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # lightning: end at SIGTERM; its handler would first wait
        # One backward pass now, so that a resumed run has the same bits; the zeros have the shape of the model's input.
        zeros = torch.zeros(1, 1, 28, 28, device=self.device, dtype=self.dtype)
        plumbing.fix_summation_order(self.trainer.model, zeros)

    def on_train_epoch_start(self):
        self.sampler.set_epoch(self.current_epoch)  # ddp: another order in each epoch, the same in all processes
        self.start = time.perf_counter()

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        plumbing.note_loss(self.trainer.train_dataloader, loss)  # the first that is not finite: see `check_results`
        share = loss.double() / self.trainer.num_training_batches / self.args.world_size  # of the mean, see below
        # lightning: sync_dist sums over all processes at the end of the epoch
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # ddp: in the backward pass, DDPStrategy averages the gradients over all processes

    def on_before_optimizer_step(self, optimizer):
        if not self.trainer.lr_scheduler_configs:  # you may add a scheduler
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(self.args, self.trainer.global_step)

    def on_validation_start(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the GPU may still be at the last steps
        self.seconds = time.perf_counter() - self.start

    def validation_step(self, batch, _):
        images, labels = batch
        logits, size = self(images), len(self.trainer.val_dataloaders.dataset)
        loss, correct = F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()
        shares = {"test_loss": loss.double() / size, "test_accuracy": correct.double() / size}
        # lightning: reduce_fx="mean" would round the number of samples when it divides over processes
        self.log_dict(shares, sync_dist=True, reduce_fx="sum")

    def on_train_epoch_end(self):  # lightning: after the validation of this epoch
        row = {"epoch": self.current_epoch + 1}
        row |= {key: self.trainer.callback_metrics[key].item() for key in ("train_loss", "test_loss", "test_accuracy")}
        samples = self.trainer.num_training_batches * self.args.global_batch
        row |= {"samples_per_second": samples / self.seconds, "seconds": self.seconds}
        self.progress["history"].append(row | {"world_size": self.args.world_size})
        self.progress["step"] = self.trainer.global_step
        plumbing.check_results(self.args, self, self.progress)  # stops the run if a loss is not finite, and the like
        self.trainer.save_checkpoint(self.args.output_dir / "checkpoint.pt")  # lightning: all processes must call it
        plumbing.print_epoch(self.args, self.progress)

    def on_save_checkpoint(self, checkpoint):  # lightning: has put the state of model and optimizer into it
        checkpoint["progress"] = self.progress


class AtomicCheckpointIO(TorchCheckpointIO):
    """How the Trainer writes and reads its checkpoints; of all processes, rank 0 writes."""

    def __init__(self, args):
        self.args, self.found = args, None

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        plumbing.write_checkpoint(self.args, checkpoint)

    def load_checkpoint(self, path, **_):
        return self.found


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


def setup(args):
    """Start the other processes, if srun has not; join the process group, and return the Trainer."""
    torch.set_float32_matmul_precision("high" if torch.cuda.is_available() else "highest")  # TF32, since the A100
    environment = SLURMEnvironment(auto_requeue=False) if args.srun else LightningEnvironment()  # lightning: ranks
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=DDPStrategy(timeout=timedelta(seconds=args.timeout)),
        plugins=[environment, AtomicCheckpointIO(args)],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,
        enable_checkpointing=False,  # lightning: LitConvNet saves, after the evaluation of each epoch
        enable_progress_bar=sys.stdout.isatty(),
    )
    plumbing.check_gpu(trainer.strategy.root_device)
    launcher = trainer.strategy.launcher
    launcher.launch(launching.watch, launcher)  # lightning: runs this script again for each process, unless srun has
    trainer.strategy.setup_environment()  # lightning: joins the process group; fit would do both, but later
    return trainer


def resume(args, trainer, model):
    """Have fit find the checkpoint, if there is one; return how far the run is."""
    found = plumbing.read_checkpoint(args, model) if trainer.global_rank == 0 else None
    checkpoint = plumbing.share_checkpoint(args, found)  # ddp: rank 0 decides, and each process reads the file
    trainer.strategy.checkpoint_io.found = checkpoint
    # Steps of the whole run; one row of metrics.csv for each complete epoch.
    return checkpoint["progress"] if checkpoint else {"step": 0, "history": []}


@launching.print_errors
def main(args):
    """Train as one process of args.world_size."""
    launching.prepare_process(args)
    trainer = setup(args)
    device, rank = trainer.strategy.root_device, trainer.global_rank

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    train_loader = DataLoader(train_set, sampler=BatchSampler(sampler, args.batch_size, drop_last=True), **loading)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), **loading)

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed)
    model = LitConvNet(args, sampler)
    # lightning: convert to fp64 now, if asked for: fit would first load the checkpoint, and round it to fp32
    model = trainer.precision_plugin.convert_module(model)
    progress = model.progress = resume(args, trainer, model.model)

    # Train.
    plumbing.print_header(args, f"{type(model.model).__name__} on {args.data_name}", device, progress)
    found = args.output_dir / "checkpoint.pt" if progress["history"] else None
    trainer.fit(model, train_loader, test_loader, ckpt_path=found)  # lightning: all epochs that are left

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
