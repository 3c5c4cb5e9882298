"""Train a ConvNet with DistributedDataParallel (DDP), started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "ddp:" or "torchrun:" mark what a single process would not need.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


def train_one_epoch(ddp_model, train_loader, optimizer, device):
    """Train for one epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        logits = ddp_model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    for buffer in model.buffers():  # ddp: use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, labels
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)  # ddp: sum over all processes; each must call this, or the others hang
    return (sums[:2] / sums[2]).tolist()


def main():
    """Train as one of the processes that torchrun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    # ddp: NCCL moves tensors between GPUs, Gloo between CPUs
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()  # ddp: ranks are 0 to world_size - 1

    train_set, test_set = data.load("digits")  # or fashion_mnist: see README.md
    # ddp: shuffled parts of equal length; a process with one more step would hang in backward()
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, **extra)
    # ddp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, BATCH_SIZE, **extra)

    torch.manual_seed(SEED + rank)  # ddp: dropout, if there is any, differs by process
    model = ConvNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=device.type == "cuda")
    # ddp: copies rank 0's weights to all processes, and averages gradients in backward()
    ddp_model = DistributedDataParallel(model)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # ddp: a new order in each epoch; each process takes its part
        train_loss = train_one_epoch(ddp_model, train_loader, optimizer, device)
        # Not ddp_model: its forward pass can wait for a process that has fewer test batches.
        test_loss, accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")  # .cpu(): loads without a GPU
    dist.destroy_process_group()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by: torchrun --standalone --nproc-per-node=2 minimal.py")
    main()
