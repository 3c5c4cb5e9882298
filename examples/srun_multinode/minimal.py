"""Train a ConvNet with DistributedDataParallel (DDP) on one or many nodes, started by srun alone.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "ddp:" or "srun:" mark what a single process would not need.
"""

import os
import warnings

import torch
import torch.distributed as dist
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


def main():
    """Train as one of the processes that srun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # srun: this process's number on its node
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # srun: processes on all nodes
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # srun: minimal.slurm has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all meet
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")  # libraries for messages
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
        # Not ddp_model, which may wait for the others: some have one test batch more.
        test_loss, accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("minimal.py: error: start it as its first lines say")
    main()
