"""Train a ConvNet with Lightning's Trainer on CPU nodes, where Horovod averages the gradients.

Locally:   horovodrun --gloo -np 2 python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "horovod:" or "lightning:" mark what a single process would not need.
"""

import os

import horovod.torch as hvd
import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


class LitConvNet(L.LightningModule):
    """The model with its losses and its optimizer; trainer.fit calls these methods."""

    def __init__(self):
        super().__init__()
        self.model = ConvNet()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), LR)
        hvd.broadcast_parameters(self.state_dict(), root_rank=0)  # horovod: rank 0's weights to all
        # horovod: averages the gradients over all processes before each step
        return hvd.DistributedOptimizer(optimizer, named_parameters=self.named_parameters())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        # lightning: by default step() calls this closure, which computes the gradients. Horovod
        # waits for gradients before step(), so they would not be averaged.
        optimizer_closure()
        optimizer.step()  # horovod: first waits until all gradients are averaged

    def on_train_epoch_start(self):
        self.sums = torch.zeros(2, dtype=torch.double)  # loss, labels

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.sums[0] += loss.detach() * labels.numel()
        self.sums[1] += labels.numel()
        return loss  # lightning: calls backward(), in which Horovod starts to send the gradients

    def on_validation_start(self):
        self.sums = hvd.allreduce(self.sums, op=hvd.Sum)  # horovod: sum over all processes
        self.train_loss = (self.sums[0] / self.sums[1]).item()
        # horovod: use rank 0's BatchNorm statistics: they differ by process
        hvd.broadcast_parameters(dict(self.named_buffers()), root_rank=0)
        self.sums = torch.zeros(3, dtype=torch.double)  # loss, correct, labels

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self.model(images)
        self.sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += labels.numel()

    def on_validation_epoch_end(self):
        self.sums = hvd.allreduce(self.sums, op=hvd.Sum)  # horovod: sum over all processes
        test_loss, accuracy = (self.sums[:2] / self.sums[2]).tolist()
        if hvd.rank() == 0:
            losses = f"train loss {self.train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {self.current_epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)


def main():
    """Train as one of the processes that horovodrun or srun has started."""
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()  # horovod: number of this process, from 0, and of all
    if "OMP_NUM_THREADS" not in os.environ:  # CPU threads of a process: its share of the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,  # this process alone: horovodrun or srun starts the others
        plugins=[LightningEnvironment()],  # lightning: ignore SLURM's variables
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,  # this option and the next three keep the output short
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )

    train_set, test_set = data.load("digits")  # or fashion_mnist: see README.md
    # horovod: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    # collate_fn makes a batch of samples
    extra = {"collate_fn": data.collate}
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, **extra)
    # horovod: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, BATCH_SIZE, **extra)

    torch.manual_seed(SEED + rank)  # horovod: dropout differs by process
    model = LitConvNet()
    trainer.fit(model, train_loader, test_loader)
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        torch.save(model.model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
