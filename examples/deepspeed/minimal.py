"""Train a ConvNet with DeepSpeed ZeRO, started by torchrun on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "deepspeed:" or "torchrun:" mark what a single process would not need.
"""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import ConvNet

# deepspeed: reads this when it is imported; without it, it looks for a device itself, and warns
os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
import deepspeed  # noqa: E402 (the linter wants imports at the top)

EPOCHS, BATCH_SIZE, LR, SEED = 5, 64, 1e-3, 0  # BATCH_SIZE: of each process
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH_SIZE,  # of each process, also on CPUs
    # deepspeed: of N processes each keeps 1/N of AdamW's state (stage 1), of the gradients as well
    # (2), of the weights as well (3; evaluation and saving then need more: see train.py).
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,  # off; by default DeepSpeed clips to a norm of 1
    "optimizer": {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}},  # that of PyTorch
}


def train_one_epoch(engine, train_loader, device):
    """Train to the end of an epoch; return the mean loss over the samples of all processes."""
    engine.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        logits = engine(images)
        loss = F.cross_entropy(logits, labels)
        engine.backward(loss)  # deepspeed: averages the gradients over all processes
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        engine.step()  # deepspeed: each updates its part of the weights, and gets the other parts
    dist.all_reduce(sums)  # deepspeed: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples


@torch.no_grad()
def evaluate(engine, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images, labels = images.to(device), labels.to(device)
        logits = engine(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # deepspeed: sum over all processes, which all have to call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def main():
    """Train as one of the processes that torchrun has started."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: on this node
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))  # share the cores
    deepspeed.ops.__compatible_ops__ = {}  # deepspeed: otherwise it needs a compiler on CPUs
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    deepspeed.init_distributed()  # deepspeed: with NCCL on GPUs, with Gloo on CPUs
    rank = dist.get_rank()  # deepspeed: this process's number among all

    # train_set[indices] reads a whole batch at once. Samplers yield the lists: batch_size=None.
    # For others: DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True)
    train_set, test_set = data.load("digits")
    # deepspeed: shuffled parts of equal length: who had more steps would wait forever
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # deepspeed: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), world_size)
    batches = BatchSampler(shard, BATCH_SIZE, drop_last=False)
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    torch.manual_seed(SEED + rank)  # deepspeed: for dropout; all get the weights of rank 0 below
    model = ConvNet()
    # deepspeed: the engine moves the model to a GPU if there is one, and has CONFIG's optimizer
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=CONFIG)
    device = engine.device
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # deepspeed: shuffles anew; each takes its part of one order
        train_loss = train_one_epoch(engine, train_loader, device)
        test_loss, accuracy = evaluate(engine, test_loader, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}, test acc {accuracy:.2%}", flush=True)
    if rank == 0:  # deepspeed: up to stage 2 each process has all weights; one writes them
        torch.save(model.cpu().state_dict(), "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("minimal.py: error: start it with torchrun, as its first lines say")
    main()
