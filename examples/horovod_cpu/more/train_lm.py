"""Train a small language model, TinyGPT, on CPU nodes with Horovod: one token is one byte.

Locally:   horovodrun --gloo -np 2 python more/train_lm.py --text-file book.txt
On SLURM:  SCRIPT=more/train_lm.py sbatch run.slurm --epochs 10
"""

import math
import sys
import time
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

# Python looks for modules in this script's folder, and those that it imports are in the one above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plumbing
from common import data
from common.models import TinyGPT
from train import distribute, resume, save_checkpoint, setup

SYMBOLS = 32  # of the synthetic text


def parse_args():
    parser = plumbing.arguments(__doc__, ["fp32"])  # --epochs and what else all examples have
    parser.set_defaults(epochs=3, batch_size=16, lr=2e-3, output_dir=Path("output", "lm"))
    add = parser.add_argument
    add("--text-file", help="any UTF-8 text in --data-dir; without it: synthetic text")
    add("--data-dir", default=".", help="folder with the text file")
    add("--context", type=int, default=128, help="tokens per sample")
    names = ("--gradient-accumulation-steps", "--batches-per-allreduce")  # the second is Horovod's
    add(*names, type=int, default=1, help="batches per optimizer step")
    add("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def load(args):
    """Return the training set, the test set, and the text's entropy if it is known.

    The test set is the last tenth of the text.
    """
    args.text = args.text_file
    if args.text_file:
        tokens = data.text_tokens(Path(args.data_dir, args.text_file))
        entropy = None
    else:
        tokens, entropy = data.markov_tokens(600_000, SYMBOLS)
    length = max(len(tokens) // 10, args.context + 1)
    cut = max(len(tokens) - length, 0)
    train_set = data.Tokens(tokens[:cut], args.context)
    test_set = data.Tokens(tokens[cut:], args.context)
    return train_set, test_set, entropy


def train_one_epoch(args, model, train_loader, optimizer, progress):
    """Train to the end of an epoch; return the mean loss, the tokens of all, and seconds."""
    model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
    # accumulation: batches that do not complete a step are left out
    batches = args.steps_per_epoch * args.gradient_accumulation_steps
    for number, (tokens, labels) in enumerate(islice(train_loader, batches), 1):
        plumbing.restart_watchdog(args)
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: every Nth
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        # horovod: with the last batch of a step, starts to average the gradients over all processes
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        if not completes_step:
            continue
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
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
        logits = model(tokens).flatten(0, 1)
        sums[0] += F.cross_entropy(logits, labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, count = sums.tolist()
    return loss_sum / count


@torch.no_grad()
def sample(args, model, length=200):
    """Return text that the model generates, on one line.

    It goes on after a newline or, for synthetic text, after the first symbol.
    """
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.tensor([[10]])
    while tokens.shape[1] <= length:
        logits = model(tokens[:, -model.context :])[0, -1]
        token = torch.multinomial(logits.softmax(0), 1, generator=generator)
        tokens = torch.cat([tokens, token[None]], 1)
    generated = tokens[0, 1:].tolist()
    if not args.text_file:
        return "".join(chr(64 + token) for token in generated)  # a letter for each synthetic symbol
    text = bytes(generated).decode("utf-8", errors="replace")  # a letter may be incomplete
    printable = [letter if letter.isprintable() else " " for letter in text]
    return " ".join("".join(printable).split())


def print_epoch(args, progress):
    """Print the metrics of the last epoch in one line, on rank 0."""
    if hvd.rank() > 0:
        return
    row = progress["history"][-1]
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    if args.entropy:
        losses += f" (floor {args.entropy:.4f})"
    if row["test_loss"] < 709:  # otherwise exp() overflows
        losses += f" | perplexity {math.exp(row['test_loss']):.2f} per byte"
    speed = f"{row['tokens_per_second']:6.0f} tokens/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | {speed}")


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    plumbing.prepare_process(args)
    device = setup(args)
    rank = hvd.rank()

    # Data. The sampler yields all indices of a batch and the data set returns the whole batch, so
    # DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set, args.entropy = load(args)
    except data.DataError as error:
        plumbing.fail(error)
    # horovod: shuffled parts of equal length: who had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    train_loader = DataLoader(train_set, sampler=batches, batch_size=None)
    # horovod: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    batches = BatchSampler(shard, args.batch_size, drop_last=False)
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)

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
        sampler.set_epoch(epoch)  # horovod: shuffles anew; each process takes its part of one order
        totals = train_one_epoch(args, model, train_loader, optimizer, progress)
        train_loss, tokens, seconds = totals
        test_loss = evaluate(args, model, test_loader)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"tokens_per_second": tokens / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.state_dict(), file))
        print(f"sample: {sample(args, model)}")
    loss = progress["history"][-1]["test_loss"]
    plumbing.finish(args, progress, f"finished: test loss {loss:.4f}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
