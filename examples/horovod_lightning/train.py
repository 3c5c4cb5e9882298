"""Train a ConvNet with Lightning's Trainer on CPU nodes, where Horovod averages the gradients, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need, those with "lightning:" what
the Trainer needs. What else a long job on a cluster needs, such as checkpoints that survive a kill and errors that say
what to do, is in plumbing.py.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # lightning: the Trainer's names
LOGGERS = ("CSVLogger", "TensorBoardLogger")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16: mixed; fp64: for tests")
    parser.add_argument("--logger", choices=LOGGERS, help="also log with this logger of Lightning")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
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

    def on_train_epoch_start(self):
        self.sampler.set_epoch(self.current_epoch)  # horovod: another order in each epoch, the same in all processes
        self.start = time.perf_counter()

    def training_step(self, batch, _):
        plumbing.restart_watchdog(self.args)
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        plumbing.note_loss(self.trainer.train_dataloader, loss)  # the first that is not finite: see `check_results`
        share = loss.double() / self.trainer.num_training_batches / self.args.world_size  # of the mean, see below
        # lightning: sync_dist sums over all processes at the end of the epoch
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # horovod: the optimizer that HorovodStrategy has wrapped averages the gradients

    def on_before_optimizer_step(self, optimizer):
        if not self.trainer.lr_scheduler_configs:  # you may add a scheduler
            for param_group in optimizer.param_groups:
                param_group["lr"] = learning_rate(self.args, self.trainer.global_step)

    def on_validation_start(self):
        self.seconds = time.perf_counter() - self.start

    def validation_step(self, batch, _):
        plumbing.restart_watchdog(self.args)
        images, labels = batch
        logits, size = self(images), len(self.trainer.val_dataloaders.dataset)
        loss, correct = F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()
        shares = {"test_loss": loss.double() / size, "test_accuracy": correct.double() / size}
        # lightning: reduce_fx="mean" would round the number of samples when it divides over processes
        self.log_dict(shares, sync_dist=True, reduce_fx="sum")

    def on_train_epoch_end(self):  # lightning: after the validation of this epoch
        row = {"epoch": self.current_epoch + 1}
        for name in ("train_loss", "test_loss", "test_accuracy"):
            row[name] = self.trainer.callback_metrics[name].item()
        samples = self.trainer.num_training_batches * self.args.batch_size * self.args.world_size
        row |= {"samples_per_second": samples / self.seconds, "seconds": self.seconds}
        self.progress["history"].append(row | {"world_size": self.args.world_size})
        self.progress["step"] = self.trainer.global_step
        plumbing.check_results(self.args, self, self.progress)  # stops the run if a loss is not finite, and the like
        self.trainer.save_checkpoint(self.args.output_dir / "checkpoint.pt")  # lightning: all processes must call it
        plumbing.print_epoch(self.args, self.progress)

    def on_save_checkpoint(self, checkpoint):  # lightning: has put the state of model and optimizer into it
        checkpoint["progress"] = self.progress


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


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

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        if hvd.rank() == 0:  # horovod: all processes have the same weights; one writes them
            plumbing.write_checkpoint(self.lightning_module.args, checkpoint)

    def load_checkpoint(self, *args, **kwargs):
        return self.checkpoint  # lightning: what resume() has found; this node may not see the file yet


def setup(args):
    """Join the other processes, and return the Trainer."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # horovod: the processes of a node share its cores
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each process its own
    # By default each process would use all cores: slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))
    return L.Trainer(
        accelerator="cpu",
        devices=1,  # of this process: Horovod has started the others
        strategy=HorovodStrategy(cluster_environment=LightningEnvironment()),
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


def resume(args, trainer, model):
    """Have fit find the checkpoint, if there is one; return how far the run is."""
    found = plumbing.read_checkpoint(args, model) if trainer.global_rank == 0 else None
    checkpoint = plumbing.accept(trainer.strategy.broadcast(found))  # horovod: rank 0 reads it for all processes
    trainer.strategy.checkpoint = checkpoint
    # Steps of the whole run; one row of metrics.csv for each complete epoch.
    return checkpoint["progress"] if checkpoint else {"step": 0, "history": []}


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    plumbing.prepare_process(args)
    plumbing.quiet_lightning()
    trainer = setup(args)
    device, rank = trainer.strategy.root_device, trainer.global_rank

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    # horovod: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # lightning: only whole steps; in an incomplete one the samples would count less
    trainer.limit_train_batches = args.steps_per_epoch * args.gradient_accumulation_steps
    # horovod: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed)
    model = LitConvNet(args, sampler)
    # lightning: convert to fp64 now, if asked for: fit would first load the checkpoint, and round it to fp32
    model = trainer.precision_plugin.convert_module(model)
    progress = model.progress = resume(args, trainer, model.model)

    # Train.
    plumbing.print_header(args, f"{type(model.model).__name__} on {args.data_name}", device, progress)
    path = args.output_dir / "checkpoint.pt" if progress["history"] else None
    trainer.fit(model, train_loader, test_loader, ckpt_path=path)  # lightning: all epochs that are left

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.model.state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
