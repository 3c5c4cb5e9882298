"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "ddp:" or "lightning:" mark what a single process would not need.
"""

import os

import lightning as L
import torch
import torch.distributed as dist
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

    def forward(self, images):
        return self.model(images)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), LR)

    def on_train_epoch_start(self):
        self.sums = torch.zeros(2, dtype=torch.double, device=self.device)  # loss, labels

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        self.sums[1] += labels.numel()
        return loss  # ddp: Lightning calls backward(), in which DDP averages the gradients

    def on_validation_start(self):
        dist.all_reduce(self.sums)  # ddp: sum over all processes
        self.train_loss = (self.sums[0] / self.sums[1]).item()
        for buffer in self.buffers():  # ddp: use rank 0's BatchNorm statistics
            dist.broadcast(buffer, src=0)
        self.sums = torch.zeros(3, dtype=torch.double, device=self.device)  # loss, correct, labels

    def validation_step(self, batch, _):
        images, labels = batch
        logits = self(images)
        self.sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += labels.numel()

    def on_validation_epoch_end(self):
        dist.all_reduce(self.sums)  # ddp: sum over all processes
        test_loss, accuracy = (self.sums[:2] / self.sums[2]).tolist()
        if self.trainer.is_global_zero:
            losses = f"train loss {self.train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {self.current_epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)


def main():
    """Train as the first process, which starts the others, or as one that srun has started."""
    torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    trainer = L.Trainer(
        devices="auto" if torch.cuda.is_available() else 2,  # per node, as --ntasks-per-node
        num_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", 1)),
        strategy="ddp",  # lightning: wraps the module in DistributedDataParallel
        max_epochs=EPOCHS,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,  # this option and the next three keep the output short
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    rank = trainer.global_rank
    world_size = trainer.world_size

    train_set, test_set = data.load("digits")  # or fashion_mnist: see README.md
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": torch.cuda.is_available()}
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, **extra)
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, BATCH_SIZE, **extra)

    torch.manual_seed(SEED + rank)  # ddp: dropout, if there is any, differs by process
    model = LitConvNet()
    trainer.fit(model, train_loader, test_loader)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.model.cpu().state_dict(), "model.pt")
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    main()
