"""Train a GPT with FSDP2, so that no process has to hold all of it, on one or many nodes.

Locally:   torchrun --standalone --nproc-per-node=2 minimal.py
On SLURM:  sbatch minimal.slurm

train.py is the same training plus what a long job needs: flags, checkpoints, clear errors.
Comments that begin with "fsdp:" or "torchrun:" mark what a single process would not need.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset

import token_data as data  # the files beside this one
from tiny_gpt import TinyGPT, initialise, token_loss

EPOCHS, BATCH_SIZE, LR, SEED = 5, 8, 1e-3, 0  # BATCH_SIZE: samples per batch of each process


def predict(model, batch, device):
    """Return the model's logits (N, vocabulary) of the N tokens of a batch, and labels (N,)."""
    tokens, labels = (part.to(device) for part in batch)
    return model(tokens).flatten(0, 1), labels.flatten()


def train_one_epoch(model, train_loader, optimizer, device):
    """Train for one epoch; return the mean loss over the tokens of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for batch in train_loader:
        logits, labels = predict(model, batch, device)
        loss = token_loss(logits, labels)
        loss.backward()  # fsdp: averages the gradients; each process keeps those of its shard
        sums[0] += loss.detach() * labels.numel()  # not .item(): Python would wait for the GPU
        sums[1] += labels.numel()
        optimizer.step()  # fsdp: each process updates its shard of the weights
        optimizer.zero_grad()
    dist.all_reduce(sums)  # fsdp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(model, test_loader, count, device):
    """Return the mean loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    batches, batch = iter(test_loader), None
    # fsdp: each call of the model gathers weights, so all processes must call it equally often
    for number in range(count):
        batch = next(batches, batch)
        logits, labels = predict(model, batch, device)
        if number < len(test_loader):
            sums[0] += token_loss(logits, labels, "sum")
            sums[1] += labels.numel()
    dist.all_reduce(sums)  # fsdp: sum over all processes; each must call this, or the others hang
    return (sums[0] / sums[1]).item()


def main():
    """Train as one of the processes that torchrun has started."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster, less exact fp32 matrix products
    # torchrun: sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which init_process_group reads
    # fsdp: NCCL moves tensors between GPUs, Gloo between CPUs
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()  # fsdp: ranks are 0 to world_size - 1

    train_set, test_set = data.load()  # random tokens, the same in all processes
    # fsdp: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED, drop_last=True)
    # collate_fn makes a batch of samples; pin_memory makes its copy to a GPU faster
    extra = {"collate_fn": data.collate, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=sampler, drop_last=True, **extra)
    # fsdp: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, BATCH_SIZE, **extra)
    most = -(-len(test_set) // (BATCH_SIZE * world_size))  # test batches of rank 0, rounded up

    with torch.device("meta"):  # fsdp: names and shapes only, without memory
        model = TinyGPT()
    for block in model.blocks:
        # fsdp: a block's weights are gathered from all processes before it computes, then freed
        fully_shard(block)
    fully_shard(model)  # fsdp: the weights outside the blocks
    model.to_empty(device=device)  # fsdp: memory for this process's shards, a part of each weight
    initialise(model, SEED)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), LR, fused=fused, foreach=not fused)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # fsdp: another order in each epoch, the same in all processes
        train_loss = train_one_epoch(model, train_loader, optimizer, device)
        test_loss = evaluate(model, test_loader, most, device)
        if rank == 0:
            losses = f"train loss {train_loss:.4f}, test loss {test_loss:.4f}"
            print(f"epoch {epoch + 1}: {losses}", flush=True)
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=options)  # fsdp: all must call this
    if rank == 0:  # fsdp: only rank 0 has the whole weights, in CPU memory
        torch.save(weights, "model.pt")
    dist.destroy_process_group()
    os._exit(0)  # skip Python's clean-up, in which Gloo sometimes aborts (PyTorch 2.15)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by: torchrun --standalone --nproc-per-node=2 minimal.py")
    main()
