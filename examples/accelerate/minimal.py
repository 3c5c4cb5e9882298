"""Train a ConvNet with Hugging Face's accelerate, started by accelerate launch.

Locally:   accelerate launch --multi_gpu --num_processes 2 minimal.py  (also without GPUs)
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "ddp:" or "accelerate:" mark what a single process would not need.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


def train_one_epoch(accelerator, ddp_model, train_loader, optimizer):
    """Train for one epoch; return the mean loss over the samples of all processes."""
    ddp_model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss, labels
    for images, labels in train_loader:
        images, labels = images.to(accelerator.device), labels.to(accelerator.device)
        logits = ddp_model(images)
        loss = F.cross_entropy(logits, labels)
        accelerator.backward(loss)  # ddp: averages the gradients over all processes
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        optimizer.step()
        optimizer.zero_grad()
    sums = accelerator.reduce(sums)  # ddp: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(accelerator, model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    for buffer in model.buffers():  # ddp: use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, correct, labels
    for images, labels in test_loader:
        images, labels = images.to(accelerator.device), labels.to(accelerator.device)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
    sums = accelerator.reduce(sums)  # ddp: sum over all processes; each must call this
    return (sums[:2] / sums[2]).tolist()


def main():
    """Train as one of the processes that accelerate launch has started."""
    # accelerate: joins the process group, and chooses this process's GPU
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    device = accelerator.device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # ddp: the number of this process, from 0, and the number of all processes
    rank, world_size = accelerator.process_index, accelerator.num_processes

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
    # accelerate: wraps the model in DDP, which copies rank 0's weights and averages gradients.
    # prepare() does not get the loaders, because it would repeat their last samples.
    ddp_model, optimizer = accelerator.prepare(model, optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # ddp: a new order in each epoch; each process takes its part
        train_loss = train_one_epoch(accelerator, ddp_model, train_loader, optimizer)
        # Not ddp_model: its forward pass can wait for a process that has fewer test batches.
        test_loss, accuracy = evaluate(accelerator, model, test_loader)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")  # .cpu(): loads without a GPU
    accelerator.end_training()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("minimal.py: error: use accelerate launch, as its first lines say")
    main()
