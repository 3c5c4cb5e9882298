"""Train a ConvNet with Lightning's Trainer on CPU nodes, where Horovod averages the gradients.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a single process would not need, those with
"lightning:" what the Trainer needs. The functions of plumbing keep the job alive: checkpoints that
survive a kill, and clear errors.
"""

import os
import signal
import sys
import time

import horovod.torch as hvd
import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp64": "64-true"}  # the Trainer's names


def parse_args():
    parser = plumbing.arguments(__doc__, PRECISIONS)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--logger", choices=("CSVLogger", "TensorBoardLogger"), help="also log with this one")
    add("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
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

    def on_train_epoch_start(self):
        self.start = time.perf_counter()

    def training_step(self, batch, _):
        plumbing.restart_watchdog(self.args)  # MPI would wait forever for a process that hangs
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        # If it is not finite, the next save ends the run.
        plumbing.note_loss(self.trainer.train_dataloader, loss)
        # All batches are equally large: the sum of these shares is the mean over all samples.
        share = loss.double() / self.trainer.num_training_batches / self.trainer.world_size
        # lightning: sums over the steps (reduce_fx), and over all processes (sync_dist)
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # horovod: the optimizer that HorovodStrategy has wrapped averages gradients

    def on_before_optimizer_step(self, optimizer):
        if not self.trainer.lr_scheduler_configs:  # you may add a scheduler
            plumbing.set_learning_rate(self.args, optimizer, self.trainer.global_step)

    def on_validation_start(self):
        self.seconds = time.perf_counter() - self.start

    def validation_step(self, batch, _):
        plumbing.restart_watchdog(self.args)
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


class HorovodStrategy(ParallelStrategy):
    """What Lightning's Trainer asks for when it trains with several processes, by Horovod."""

    global_rank = property(lambda self: hvd.rank())
    local_rank = property(lambda self: hvd.local_rank())
    node_rank = property(lambda self: hvd.cross_rank())
    world_size = property(lambda self: hvd.size())
    root_device = torch.device("cpu")
    is_distributed = True  # lightning: otherwise sync_dist=True has no effect

    def setup_environment(self):
        rank_zero_only.rank = hvd.rank()  # lightning: which process logs
        super().setup_environment()

    def model_to_device(self):
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer):
        super().setup_optimizers(trainer)  # calls configure_optimizers
        plain = self.optimizers
        self.optimizers = [  # horovod: each backward pass starts to average its gradients
            hvd.DistributedOptimizer(
                optimizer,
                named_parameters=self.lightning_module.named_parameters(),
                backward_passes_per_step=trainer.accumulate_grad_batches,
                op=hvd.Average,
            )
            for optimizer in plain
        ]
        # You may add schedulers, also one of several parts, such as SequentialLR: each has to set
        # the rate of the wrapped optimizer.
        for config in self.lr_scheduler_configs:
            number = plain.index(config.scheduler.optimizer)
            for scheduler in plumbing.parts_of(config.scheduler):
                scheduler.optimizer = self.optimizers[number]
        # horovod: rank 0's weights to all
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

    def optimizer_step(self, optimizer, closure, *args, **kwargs):
        """Run the closure, which computes the gradients, wait for their average, and take a step.

        optimizer.step(closure) of Horovod would wait before the closure, and then take a step with
        gradients that are not averaged, without any error.
        """

        def averaged():
            loss = closure()
            optimizer.synchronize()  # horovod: waits until all gradients are averaged
            return loss

        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, averaged, *args, **kwargs)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        operations = {"sum": hvd.Sum, "mean": hvd.Average, "avg": hvd.Average}
        operations |= {"min": hvd.Min, "max": hvd.Max}
        # It is a word such as "sum", or torch.distributed's ReduceOp.SUM.
        name = str(reduce_op).lower().rpartition(".")[2]
        return hvd.allreduce(tensor, op=operations[name])  # horovod: over all processes

    def all_gather(self, tensor, group=None, sync_grads=False):
        return hvd.allgather(tensor.unsqueeze(0))  # horovod: (world_size, ...)

    def broadcast(self, obj, src=0):
        # horovod: to all; by default the name would be the type of obj, which may differ
        return hvd.broadcast_object(obj, src, name="object")

    def barrier(self, name=None):
        hvd.barrier()  # horovod: waits for all processes


def setup(args):
    """Join the other processes, and return the Trainer."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # the processes of a node share these
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each its own
    # More threads than cores are slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))
    return L.Trainer(
        accelerator="cpu",
        devices=1,  # of this process: Horovod has started the others
        strategy=HorovodStrategy(cluster_environment=LightningEnvironment()),
        plugins=[AtomicCheckpointIO(args)],
        callbacks=[EpochCheckpoint(args.output_dir, "checkpoint", enable_version_counter=False)],
        precision=PRECISIONS[args.precision],
        max_epochs=args.epochs,
        accumulate_grad_batches=args.gradient_accumulation_steps,
        gradient_clip_val=args.max_grad_norm,
        logger=getattr(L.pytorch.loggers, args.logger)(args.output_dir) if args.logger else False,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,  # a restart would have to wait for it
        enable_progress_bar=sys.stdout.isatty(),  # it would fill a log file
    )


def resume(args, trainer, model):
    """Have fit find the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    # This is the checkpoint, or None where there is none, or an error message.
    found = plumbing.read_checkpoint(args, model) if trainer.global_rank == 0 else None
    answer = found["progress"] if isinstance(found, dict) else found
    # horovod: rank 0 decides; then each process reads the file, or ends if it has found an error
    if plumbing.accept(trainer.strategy.broadcast(answer)):
        checkpoint = found or plumbing.load_checkpoint(args.output_dir / "checkpoint.pt")
        trainer.strategy.checkpoint_io.checkpoint = checkpoint
        progress = checkpoint["progress"]
    return progress


def main(args):
    """Train as one of the processes that horovodrun or srun has started."""
    plumbing.prepare_process(args)
    plumbing.quiet_lightning()
    trainer = setup(args)
    device = trainer.strategy.root_device
    rank = trainer.global_rank

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
    # horovod: shuffled parts of equal length: who had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    batches.set_epoch = sampler.set_epoch  # lightning: calls it in each epoch, to shuffle anew
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # accumulation: batches that do not complete a step are left out
    trainer.limit_train_batches = args.steps_per_epoch * args.gradient_accumulation_steps
    # horovod: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    # lightning: an empty batch, since it refuses a loader without any
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False)) or [[]]
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    # Model; fit creates the optimizer, and loads the state of both if the run is resumed.
    torch.manual_seed(args.seed)
    model = LitConvNet(args)
    # lightning: fit would convert the weights to fp64 after it has loaded and rounded a checkpoint
    model = trainer.precision_plugin.convert_module(model)
    progress = resume(args, trainer, model.model)
    model.progress = progress
    # horovod: from here on random numbers (augmentation, dropout) differ in each process
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
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.model.state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
