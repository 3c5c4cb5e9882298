"""Train a ConvNet with DeepSpeed ZeRO, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "deepspeed:" or "torchrun:" mark what a single process would not need.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

from common import data  # the folder beside this file
from common.models import ConvNet

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: samples per batch of each process
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,  # of each process, also on CPUs
    # deepspeed: each of N processes keeps 1/N of AdamW's state (stage 1), also of the gradients
    # (stage 2), also of the weights (stage 3; evaluation and saving then need more: see train.py).
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,  # off; by default DeepSpeed clips to a norm of 1
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},  # PyTorch's
}


def train_one_epoch(engine, train_loader, device):
    """Train for one epoch; return the mean loss over the samples of all processes."""
    engine.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, labels
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        logits = engine(images)
        loss = F.cross_entropy(logits, labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        engine.step()  # deepspeed: each process updates its part of the weights, and gets the rest
    dist.all_reduce(sums)  # deepspeed: sum over all processes; all must call this, or others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(engine, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    for buffer in engine.module.buffers():  # use rank 0's BatchNorm statistics
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, labels
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        logits = engine(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)  # deepspeed: sum over all processes; all must call this, or others hang
    return (sums[:2] / sums[2]).tolist()


def main():
    """Train as one of the processes that torchrun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    deepspeed.ops.__compatible_ops__ = {}  # deepspeed: needs a compiler on CPUs otherwise
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_distributed reads
    deepspeed.init_distributed()  # deepspeed: uses NCCL on GPUs and Gloo on CPUs
    rank, world_size = dist.get_rank(), dist.get_world_size()  # ranks are 0 to world_size - 1

    train_set, test_set = data.load("digits")  # or fashion_mnist: see README.md
    # deepspeed: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, **extra)
    # deepspeed: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, BATCH_SIZE, **extra)

    torch.manual_seed(SEED + rank)  # deepspeed: dropout differs by process; weights are rank 0's
    model = ConvNet()
    # deepspeed: moves the model to the device, and makes the optimizer of CONFIG
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=CONFIG)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # deepspeed: another order in each epoch, the same for all
        train_loss = train_one_epoch(engine, train_loader, device)
        test_loss, accuracy = evaluate(engine, test_loader, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # deepspeed: up to stage 2 each process has all weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")  # .cpu(): loads without a GPU
    dist.destroy_process_group()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by: torchrun --standalone --nproc-per-node=2 minimal.py")
    main()
