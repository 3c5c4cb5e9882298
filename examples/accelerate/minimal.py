"""Train a ConvNet with Hugging Face's accelerate, started by accelerate launch.

Locally:   accelerate launch --multi_gpu --num_processes 2 minimal.py  (also without GPUs)
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "ddp:" or "accelerate:" mark what a single process would not need.
"""

import os
import warnings

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: of each process
warnings.filterwarnings("ignore", "Grad strides")  # about conv1's memory layout: harmless


def train_one_epoch(accelerator, ddp_model, train_loader, optimizer):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss, samples
    for images, labels in train_loader:
        images, labels = images.to(accelerator.device), labels.to(accelerator.device)
        logits = ddp_model(images)
        loss = F.cross_entropy(logits, labels)
        accelerator.backward(loss)  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        optimizer.step()
        optimizer.zero_grad()
    sums = accelerator.reduce(sums)  # accelerate: sum over all processes, which all call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples


@torch.no_grad()
def evaluate(accelerator, model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, correct, samples
    for images, labels in test_loader:
        images, labels = images.to(accelerator.device), labels.to(accelerator.device)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    sums = accelerator.reduce(sums)  # accelerate: sum over all processes, which all call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main():
    """Train as one of the processes that accelerate launch has started."""
    # accelerate: joins the other processes, and knows this process's device and number
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = accelerator.device
    rank = accelerator.process_index
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # accelerate: processes on all nodes
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # accelerate: on this node
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // processes))  # more threads than cores are slower

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
    # accelerate: wraps `model` in DDP; it is not given the loaders, whose samples it would repeat
    ddp_model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        train_loss = train_one_epoch(accelerator, ddp_model, train_loader, optimizer)
        # Not ddp_model, which may wait for the others: some have one test batch more.
        test_loss, accuracy = evaluate(accelerator, model, test_loader)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")
    accelerator.end_training()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("minimal.py: error: use accelerate launch, as its first lines say")
    main()
