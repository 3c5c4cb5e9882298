"""Train a ConvNet with Lightning's Trainer on one or many nodes, on GPUs or CPUs.

Locally:   python minimal.py
On SLURM:  sbatch minimal.slurm

This is the launch pattern and nothing else; train.py is the same training as a long job needs it.
Comments that begin with "ddp:" or "lightning:" mark what a single process would not need.
"""

import os
import warnings

import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # the batch is that of each process
warnings.filterwarnings("ignore", "Grad strides")  # harmless: of a layer with one input channel


class LitConvNet(L.LightningModule):
    """The model with its losses, its optimizer and its data; trainer.fit calls these methods."""

    def __init__(self):
        super().__init__()
        self.model = ConvNet()
        self.train_set, self.test_set = data.load("digits")

    def train_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        # ddp: shuffled shards of equal length, so that all take the same number of steps
        sampler = DistributedSampler(self.train_set, world_size, rank, seed=SEED, drop_last=True)
        batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
        self.sampler = sampler
        return DataLoader(self.train_set, sampler=batches, batch_size=None)

    def val_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        # ddp: each test sample exactly once; a DistributedSampler would repeat some of them
        shard = range(rank, len(self.test_set), world_size)
        batches = BatchSampler(shard, BATCH_SIZE, drop_last=False)
        return DataLoader(self.test_set, sampler=batches, batch_size=None)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), LR)

    def on_train_epoch_start(self):
        self.sampler.set_epoch(self.current_epoch)  # ddp: another order, the same in all processes

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        share = loss.double() / self.trainer.num_training_batches / self.trainer.world_size
        # lightning: sync_dist sums over all processes at the end of the epoch
        self.log("train_loss", share, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss  # ddp: in the backward pass, averages the gradients over all processes

    def validation_step(self, batch, _):
        images, labels = batch
        correct = (self.model(images).argmax(1) == labels).sum().double()
        # lightning: reduce_fx="mean" would round the number of samples when it divides
        self.log("test_accuracy", correct / len(self.test_set), sync_dist=True, reduce_fx="sum")

    def on_train_epoch_end(self):  # lightning: after the validation of this epoch
        metrics = self.trainer.callback_metrics
        train_loss, accuracy = metrics["train_loss"], metrics["test_accuracy"]
        if self.trainer.is_global_zero:
            epoch = self.current_epoch + 1
            print(f"epoch {epoch}: train loss {train_loss:.4f}, test acc {accuracy:.2%}")


def main():
    """Train as the first process, which starts the others, or as one that srun has started."""
    trainer = L.Trainer(
        devices="auto" if torch.cuda.is_available() else 2,
        num_nodes=int(os.environ.get("SLURM_JOB_NUM_NODES", 1)),
        strategy="ddp",  # lightning: averages gradients with DistributedDataParallel
        max_epochs=EPOCHS,
        use_distributed_sampler=False,  # lightning: its sampler would repeat test samples
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(SEED)
    model = LitConvNet()
    trainer.fit(model)
    if trainer.is_global_zero:  # ddp: all processes have the same weights; one writes them
        torch.save(model.model.cpu().state_dict(), "model.pt")


if __name__ == "__main__":
    main()
