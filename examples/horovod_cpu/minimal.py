"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "horovod:" mark what a single process would not need.
"""

import os

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: of each process


def train_one_epoch(model, train_loader, optimizer):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, samples
    for images, labels in train_loader:
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # horovod: starts to average the gradients over all processes
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        optimizer.step()  # horovod: first waits until all gradients are averaged
        optimizer.zero_grad()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples


@torch.no_grad()
def evaluate(model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, correct, samples
    for images, labels in test_loader:
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main():
    """Train as one of the processes that horovodrun or srun has started."""
    hvd.init()  # horovod: waits for all processes and connects them
    rank = hvd.rank()  # horovod: this process's number among all
    world_size = hvd.size()  # horovod: processes on all nodes
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # the processes of a node share these
    # More threads than cores are slower; minimal.slurm sets OMP_NUM_THREADS.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))

    # train_set[indices] reads a whole batch at once. Samplers yield the lists: batch_size=None.
    # For others: DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    train_set, test_set = data.load("digits")
    # horovod: shuffled parts of equal length: who had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # horovod: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), world_size)
    batches = BatchSampler(shard, BATCH_SIZE, drop_last=False)
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    torch.manual_seed(SEED + rank)  # horovod: for dropout; all get the weights of rank 0 below
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    # horovod: averages the gradients over all processes before each step
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: rank 0's weights to all
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # horovod: shuffles anew; each process takes its part of one order
        train_loss = train_one_epoch(model, train_loader, optimizer)
        test_loss, accuracy = evaluate(model, test_loader)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
