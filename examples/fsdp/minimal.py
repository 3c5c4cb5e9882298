"""Train a GPT with FSDP2, so that no process has to hold all of it; torchrun starts the processes.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training with what a long job needs: checkpoints, restarts, clear errors.
Comments that begin with "fsdp:" or "torchrun:" mark what a single process would not need.
"""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import TinyGPT

EPOCHS, BATCH_SIZE, LR, SEED = 5, 8, 1e-3, 0  # BATCH_SIZE: of each process
CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


def train_one_epoch(model, train_loader, optimizer, device):
    """Train to the end of an epoch; return the mean loss over the tokens of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in train_loader:
        tokens, labels = tokens.to(device), labels.to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()  # fsdp: averages over all processes; each keeps its shard of that
        sums[0] += loss.detach() * labels.numel()  # on the device: no step waits
        sums[1] += labels.numel()
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the mean test loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in test_loader:
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens)
        sums[0] += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    return (sums[0] / sums[1]).item()


def build_model(device):
    """Return the model; each process holds a shard, a slice, of each weight, without values."""
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(256, CONTEXT, WIDTH, HEADS, LAYERS)
    for part in (*model.blocks, model):  # the last one: what is in no block
        # fsdp: before a part computes, its weights are gathered from all processes; then freed
        fully_shard(part)
    return model.to_empty(device=device)  # fsdp: memory for the shards; `initialise` fills it


@torch.no_grad()
def initialise(model):
    """Draw the weights from a normal distribution, the same for any number of processes."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        whole = torch.zeros(weight.shape)  # fsdp: one at a time is whole; biases stay 0
        if name.endswith("weight"):
            generator = torch.Generator().manual_seed(SEED * 10_000 + number)
            whole.normal_(0, 0.02, generator=generator) if weight.dim() > 1 else whole.fill_(1)
        # fsdp: among which processes (mesh) a weight is cut, and how; each cuts its own copy (None)
        mesh, placements = weight.device_mesh, weight.placements
        shard = distribute_tensor(whole.to(weight.device), mesh, placements, src_data_rank=None)
        weight.copy_(shard)


def main():
    """Train as one of the processes that torchrun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    processes = int(os.environ["LOCAL_WORLD_SIZE"])  # torchrun: number of processes on this node
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))  # cores of a process
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    # Libraries for messages: NCCL between GPUs, Gloo for what is on the CPU, at the end.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()  # fsdp: of the whole job

    # These data read a whole batch at once, by a list of indices: therefore batch_size=None.
    tokens, _ = data.markov_tokens(60_000)  # random, the same in all processes
    cut = len(tokens) - len(tokens) // 10
    train_set, test_set = data.Tokens(tokens[:cut], CONTEXT), data.Tokens(tokens[cut:], CONTEXT)
    # fsdp: shuffled parts of equal length: who had more steps would wait forever
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # fsdp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), world_size)
    batches = list(BatchSampler(shard, BATCH_SIZE, drop_last=False))
    longest = math.ceil(len(test_set) / (world_size * BATCH_SIZE))
    batches += [[]] * (longest - len(batches))  # fsdp: empty ones, as all must gather equally often
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    model = build_model(device)
    initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), LR, foreach=True)  # many weights in one call
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # fsdp: shuffles anew; each process takes its part of one order
        train_loss = train_one_epoch(model, train_loader, optimizer, device)
        test_loss = evaluate(model, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}: train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(line, flush=True)
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # fsdp: all processes call this; rank 0 gets the whole weights, in CPU memory
    weights = state_dict.get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(weights, "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


if __name__ == "__main__":
    main()
