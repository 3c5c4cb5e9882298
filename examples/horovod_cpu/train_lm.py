"""Train a small language model, TinyGPT, on CPU nodes with Horovod: one token is one byte.

Locally:   horovodrun --gloo -np 2 python train_lm.py --text-file book.txt
On SLURM:  SCRIPT=train_lm.py sbatch run.slurm --epochs 10
"""

import argparse
import math
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from train import deadline, distribute, fail, learning_rate, read_checkpoint, refuse, settings, setup, where, write

from common import data
from common.models import TinyGPT

COLUMNS = "epoch,train_loss,test_loss,tokens_per_second,seconds,world_size"
SYMBOLS = 32  # of the synthetic source


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text-file", help="any UTF-8 text, in --data-dir (none: a synthetic source of known entropy)")
    parser.add_argument("--data-dir", default=".", help="where the text file is")
    parser.add_argument("--context", type=int, default=128, help="tokens per sample")
    parser.add_argument("--epochs", type=int, default=3, help="in all, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--scale-lr", action="store_true", help="multiply --lr by the number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a collective may take")
    parser.add_argument("--output-dir", type=Path, default="output/lm", help="everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--warmup-epochs", type=int, default=0, help="in which --scale-lr raises the learning rate")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients as 16-bit numbers")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches that make one step")
    args = parser.parse_args()
    for name in ("context", "epochs", "batch_size", "timeout", "batches_per_allreduce"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.warmup_epochs < 0 or args.warmup_epochs and not args.scale_lr:
        parser.error(f"--warmup-epochs {args.warmup_epochs} needs --scale-lr, and must be 0 or more")
    return args


def load(args):
    """Return the training set, the test set, which is the last tenth, and the source's entropy (None: unknown)."""
    if args.text_file:
        tokens, entropy = data.text_tokens(Path(args.data_dir, args.text_file)), None
    else:
        tokens, entropy = data.markov_tokens(600_000, SYMBOLS)
    cut = len(tokens) - max(len(tokens) // 10, args.context + 1)
    return data.Tokens(tokens[: max(cut, 0)], args.context), data.Tokens(tokens[cut:], args.context), entropy


def train_one_epoch(args, model, loader, optimizer, device, epoch):
    """Return the mean training loss and the number of tokens, both over all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens: read once an epoch, not once a step
    for step, (tokens, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + step / len(loader))
        optimizer.zero_grad()
        for batch, targets in zip(tokens.split(args.batch_size), labels.split(args.batch_size), strict=True):
            loss = F.cross_entropy(model(batch).flatten(0, 1), targets.flatten())
            (loss / args.batches_per_allreduce).backward()  # horovod: the last one sends each gradient on its way
            sums[0] += loss.detach() * targets.numel()
            sums[1] += targets.numel()
        with deadline(args):
            optimizer.step()  # horovod: waits for the gradients, averaged over all processes
    with deadline(args):
        sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod:
    loss_sum, count = sums.tolist()
    return loss_sum / count, count


@torch.no_grad()
def evaluate(args, model, loader, device):
    """Return the mean test loss, in nats per token, over all processes: each token counts once."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, labels in loader:
        sums[0] += F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
    with deadline(args):
        sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod:
    loss_sum, count = sums.tolist()
    return loss_sum / count


@torch.no_grad()
def sample(args, model, length=200):
    """Return a line of text that the model continues from a newline, or from the source's first symbol."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([[10]])
    while tokens.shape[1] <= length:
        logits = model(tokens[:, -model.context :])[0, -1]
        token = torch.multinomial(logits.softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], 1)
    if not args.text_file:
        return "".join(chr(64 + token) for token in tokens[0, 1:])  # the source's symbols have no letters of their own
    text = bytes(tokens[0, 1:].tolist()).decode("utf-8", errors="replace")  # it may end in mid-letter, or be no letter
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def save_epoch(args, model, optimizer, history, entropy):
    """Write metrics.csv and the checkpoint, then print the last epoch's line."""
    rows = "".join(",".join(map(str, row)) + "\n" for row in history)
    write(args.output_dir / "metrics.csv", lambda file: file.write(f"{COLUMNS}\n{rows}".encode()))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"history": history, "settings": settings(args)}
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))  # last, so that no row can be lost
    epoch, train_loss, test_loss, speed, seconds, _ = history[-1]
    losses = f"train loss {train_loss:.4f} | test loss {test_loss:.4f}"
    losses += f" (floor {entropy:.4f})" if entropy else ""
    losses += f" | perplexity {math.exp(test_loss):.2f} per byte"
    print(f"epoch {epoch:2}/{args.epochs} | {losses} | {speed:6.0f} tokens/s | {seconds:6.2f} s")


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    try:
        train_set, test_set, entropy = load(args)
    except data.DataError as error:
        fail(error)
    rank, world_size, device = setup(args)
    step_size = args.batch_size * args.batches_per_allreduce
    if step_size > len(train_set) // world_size:
        refuse(args, f"a step of {step_size} samples is above the {len(train_set) // world_size} of each process")
    checkpoint, problem = read_checkpoint(args, args.output_dir / "checkpoint.pt") if rank == 0 else (None, None)
    history = checkpoint["history"] if checkpoint else []
    with deadline(args):
        history, problem = hvd.broadcast_object((history, problem))  # horovod: rank 0 decides
    if problem:
        refuse(args, problem)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # horovod: equal parts
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, step_size, drop_last=True), batch_size=None)
    shard = data.evaluation_shard(len(test_set), rank, world_size)  # horovod: each sample once
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)
    torch.manual_seed(args.seed)
    model = TinyGPT(context=args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = distribute(args, model, optimizer, checkpoint, resumed=bool(history))  # horovod:
    if rank == 0:
        batch = f"global batch {world_size * step_size} x {args.context} tokens"
        print(f"TinyGPT on {args.text_file or 'a synthetic source'}: {where(device)}, {batch}")
        if history:
            print(f"continuing after epoch {len(history)} of {args.epochs}")
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order each epoch
        start = time.perf_counter()
        train_loss, count = train_one_epoch(args, model, loader, optimizer, device, epoch)
        seconds = time.perf_counter() - start
        test_loss = evaluate(args, model, test_loader, device)
        history.append((epoch + 1, train_loss, test_loss, count / seconds, seconds, world_size))
        if rank == 0:
            save_epoch(args, model, optimizer, history, entropy)
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(model.state_dict(), file))
        print(f"sample: {sample(args, model)}")
        print(f"finished: test loss {history[-1][2]:.4f}, model in {args.output_dir / 'model.pt'}")
    with deadline(args):
        hvd.barrier()  # horovod: the others wait for rank 0; srun would end it --wait seconds after them
        hvd.shutdown()  # horovod:


if __name__ == "__main__":
    main(parse_args())
