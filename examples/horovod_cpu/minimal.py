"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "horovod:" mark what a single process would not need.
"""

import os

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


def train_one_epoch(model, train_loader, optimizer):
    """Train for one epoch; return the mean loss over the samples of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, labels
    for images, labels in train_loader:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # horovod: starts to average the gradients over all processes
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        optimizer.step()  # horovod: first waits until all gradients are averaged
        optimizer.zero_grad()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    # horovod: use rank 0's BatchNorm statistics: they differ by process
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, labels
    for images, labels in test_loader:
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[:2] / sums[2]).tolist()


def main():
    """Train as one of the processes that horovodrun or srun has started."""
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()  # horovod: number of this process, from 0, and of all
    if "OMP_NUM_THREADS" not in os.environ:  # CPU threads of a process: its share of the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))

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
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    # horovod: averages the gradients over all processes before each step
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: rank 0's weights to all
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # horovod: another order in each epoch, the same in all processes
        train_loss = train_one_epoch(model, train_loader, optimizer)
        test_loss, accuracy = evaluate(model, test_loader)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
