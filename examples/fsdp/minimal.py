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
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data  # the folder beside this file
from common.models import TinyGPT, token_loss

EPOCHS, BATCH_SIZE, LR, SEED = 5, 8, 1e-3, 0  # BATCH_SIZE: of each process
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 2


def train_one_epoch(model, train_loader, optimizer, device):
    """Train to the end of an epoch; return the mean loss over the tokens of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in train_loader:
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens)
        loss = token_loss(logits, labels, torch.float32)  # cross-entropy, the mean over tokens
        loss.backward()  # fsdp: averages over all processes; each keeps its shard of that
        sums[0] += loss.detach() * labels.numel()  # with .item() each step would wait
        sums[1] += labels.numel()
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens


@torch.no_grad()
def evaluate(model, test_loader, device):
    """Return the mean test loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in test_loader:
        tokens, labels = tokens.to(device), labels.to(device)
        logits = model(tokens)
        sums[0] += token_loss(logits, labels, torch.float32, "sum")
        sums[1] += labels.numel()
    dist.all_reduce(sums)  # fsdp: sum over all processes, which all have to call this
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens


def build_model(device):
    """Return the model without values; each process holds a shard, a slice, of each weight."""
    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT(VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS)
    for part in (*model.blocks, model):  # the last one: what is in no block
        fully_shard(part)  # fsdp: gathers its weights just before it computes, then frees them
    return model.to_empty(device=device)  # fsdp: memory for the shards; `initialise` fills it


@torch.no_grad()
def initialise(model):
    """Draw the weights from a normal distribution, the same for any number of processes."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        whole = torch.zeros(weight.shape, dtype=weight.dtype)  # fsdp: one at a time is whole
        if name.endswith("weight"):  # biases stay 0
            whole.fill_(1)  # of a LayerNorm
            if weight.dim() > 1:  # of another layer, as in GPT-2
                generator = torch.Generator().manual_seed(SEED * 10_000 + number)
                whole.normal_(0, 0.02, generator=generator)
        whole = whole.to(weight.device)
        # fsdp: cut as the weight is; each process cuts a copy of its own, none is sent (None)
        shard = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(shard)


def main():
    """Train as one of the processes that torchrun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: on this node
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))  # share the cores
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    dist.init_process_group(backend)  # libraries for messages: Gloo for what is on the CPU
    rank = dist.get_rank()  # fsdp: this process's number among all

    # train_set[indices] reads a whole batch at once. Samplers yield the lists: batch_size=None.
    tokens, _ = data.markov_tokens(60_000)  # random, the same in all processes
    train_set = data.Tokens(tokens[:54_000], CONTEXT)
    test_set = data.Tokens(tokens[54_000:], CONTEXT)
    # fsdp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    batches = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # fsdp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), world_size)
    batches = list(BatchSampler(shard, BATCH_SIZE, drop_last=False))
    longest = math.ceil(len(test_set) / (world_size * BATCH_SIZE))
    batches += [[]] * (longest - len(batches))  # fsdp: empty ones, so that all gather equally often
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

    model = build_model(device)
    initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), LR, foreach=True)  # many weights in one call
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # fsdp: shuffles anew; each process takes its part of one order
        train_loss = train_one_epoch(model, train_loader, optimizer, device)
        test_loss = evaluate(model, test_loader, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}", flush=True)
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=options)  # fsdp: all have to call this
    if rank == 0:  # fsdp: it has got the whole weights, in CPU memory
        torch.save(weights, "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # at once: while Python shuts down, Gloo's threads can abort the process


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("minimal.py: error: start it with torchrun, as its first lines say")
    main()
