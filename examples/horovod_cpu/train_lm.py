"""Train a small language model, TinyGPT, on CPU nodes with Horovod: one token is one byte.

Locally:   horovodrun --gloo -np 2 python train_lm.py --text-file book.txt
On SLURM:  SCRIPT=train_lm.py sbatch run.slurm --epochs 10
"""

import argparse
import math
import time
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import TinyGPT
from train import distribute, learning_rate, resume, save_checkpoint, setup

SYMBOLS = 32  # of the synthetic text


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text-file", help="any UTF-8 text in --data-dir; without it: synthetic text")
    parser.add_argument("--data-dir", default=".", help="folder with the text file")
    parser.add_argument("--context", type=int, default=128, help="tokens per sample")
    parser.add_argument("--epochs", type=int, default=3, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    names = ("--gradient-accumulation-steps", "--batches-per-allreduce")  # the second is used in Horovod's examples
    parser.add_argument(*names, type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output/lm", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def load(args):
    """Return the training set, the test set, which is the last tenth, and the text's entropy if it is known."""
    args.text = args.text_file
    if args.text_file:
        tokens, entropy = data.text_tokens(Path(args.data_dir, args.text_file)), None
    else:
        tokens, entropy = data.markov_tokens(600_000, SYMBOLS)
    cut = len(tokens) - max(len(tokens) // 10, args.context + 1)
    return data.Tokens(tokens[: max(cut, 0)], args.context), data.Tokens(tokens[cut:], args.context), entropy


def train_one_epoch(args, model, train_loader, optimizer, progress):
    """Train to the end of an epoch; return mean loss, tokens, both over all processes, and seconds."""
    model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
    batches = args.steps_per_epoch * args.gradient_accumulation_steps  # accumulation: only whole steps
    for number, (tokens, labels) in enumerate(islice(train_loader, batches), 1):
        plumbing.restart_watchdog(args)
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: of so many batches
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        # horovod: the last backward pass of a step starts to average the gradients over all processes
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        if not completes_step:
            continue
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()  # horovod: first waits until all gradients are averaged
        optimizer.zero_grad()
        progress["step"] += 1
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, count = sums.tolist()
    return loss_sum / count, count, time.perf_counter() - start


@torch.no_grad()
def evaluate(args, model, test_loader):
    """Return the mean test loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
    for tokens, labels in test_loader:
        plumbing.restart_watchdog(args)
        sums[0] += F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, count = sums.tolist()
    return loss_sum / count


@torch.no_grad()
def sample(args, model, length=200):
    """Return text that the model generates, on one line: after a newline, or after the first synthetic symbol."""
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([[10]])
    while tokens.shape[1] <= length:
        logits = model(tokens[:, -model.context :])[0, -1]
        token = torch.multinomial(logits.softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], 1)
    if not args.text_file:
        return "".join(chr(64 + token) for token in tokens[0, 1:])  # a letter for each synthetic symbol
    text = bytes(tokens[0, 1:].tolist()).decode("utf-8", errors="replace")  # a letter may be incomplete
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def print_epoch(args, progress):
    """Print the metrics of the last epoch in one line, on rank 0."""
    if hvd.rank() > 0:
        return
    row = progress["history"][-1]
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    losses += f" (floor {args.entropy:.4f})" if args.entropy else ""
    losses += f" | perplexity {math.exp(row['test_loss']):.2f} per byte" if row["test_loss"] < 709 else ""
    speed = f"{row['tokens_per_second']:6.0f} tokens/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | {speed}")


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    plumbing.prepare_process(args)
    device, rank = setup(args), hvd.rank()

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    try:
        train_set, test_set, args.entropy = load(args)
    except data.DataError as error:
        plumbing.fail(error)
    # horovod: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # horovod: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model and optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = TinyGPT(context=args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = distribute(args, model, optimizer)
    progress = resume(args, model, optimizer)

    # Train.
    what = f"TinyGPT on {args.text_file or 'synthetic text'}, {args.context} tokens per sample"
    plumbing.print_header(args, what, device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order in each epoch, the same in all processes
        train_loss, tokens, seconds = train_one_epoch(args, model, train_loader, optimizer, progress)
        test_loss = evaluate(args, model, test_loader)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"tokens_per_second": tokens / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        print_epoch(args, progress)

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.state_dict(), file))
        print(f"sample: {sample(args, model)}")
    loss = progress["history"][-1]["test_loss"]
    plumbing.finish(args, progress, f"finished: test loss {loss:.4f}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
