"""Train a ConvNet with DistributedDataParallel (DDP), on processes which this script starts.

Locally:   python minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "ddp:" mark what a single process would not need.
"""

import os
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: of each process
warnings.filterwarnings("ignore", "Grad strides")  # about conv1's memory layout: harmless


def train_one_epoch(ddp_model, train_loader, optimizer, device):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        logits = ddp_model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main(local_rank, world_size, port):
    """Train as one process of world_size; `port` is that of the store which launch() has opened."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))  # share the cores
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"  # libraries for messages
    store = dist.TCPStore("127.0.0.1", port)  # ddp: here the processes meet, and wait for all
    dist.init_process_group(backend, store=store, rank=local_rank, world_size=world_size)
    rank = dist.get_rank()  # ddp: this process's number among all

    # train_set[indices] reads a whole batch at once. Samplers yield the lists: batch_size=None.
    # For others: DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    train_set, test_set = data.load("digits")
    # ddp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), world_size)
    batches = BatchSampler(shard, BATCH_SIZE, drop_last=False)
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    torch.manual_seed(SEED + rank)  # ddp: for dropout; all get the weights of rank 0 below
    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    # ddp: gives all processes the weights of rank 0, and averages gradients in backward()
    ddp_model = DistributedDataParallel(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        train_loss = train_one_epoch(ddp_model, train_loader, optimizer, device)
        test_loss, accuracy = evaluate(model, test_loader, device)  # ddp_model could hang
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


def launch():
    """Start one process for each GPU, or two; they meet in a store at any free port (0)."""
    world_size = torch.cuda.device_count() or 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(main, (world_size, store.port), world_size)  # ddp: each calls main(its number, ...)


if __name__ == "__main__":
    launch()
