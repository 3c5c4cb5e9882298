"""Train a small language model, TinyGPT, on CPU nodes with Horovod: one token is one byte.

Locally:   horovodrun --gloo -np 2 python more/train_lm.py --text-file book.txt
On SLURM:  SCRIPT=more/train_lm.py sbatch run.slurm --text-file "$PWD/book.txt"
"""

import argparse
import math
import sys
import time
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

# Python looks for modules in this script's folder; longrun.py and train.py are in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import longrun
from train import distribute, save_checkpoint, setup


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = longrun.fail  # print the error as one line, without the usage
    add, positive = parser.add_argument, longrun.positive
    add("--text-file", type=Path, help="any text in UTF-8; without it: a random text")
    add("--context", type=positive, default=128, help="tokens per sample")
    add("--epochs", type=positive, default=3, help="total number, including those before a resume")
    add("--batch-size", type=positive, default=16, help="samples per batch of each process")
    add("--global-batch", type=positive, help="samples per step; sets --batch-size")
    add("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by world size, or its root")
    add("--warmup-steps", type=lambda n: positive(n, 0), default=0, help="steps to reach --lr")
    add("--seed", type=int, default=0, help="for initial weights, shuffling and dropout")
    add("--timeout", type=positive, default=300, help="seconds per batch; 10 times that for a save")
    add("--output-dir", type=Path, default="output/lm", help="folder for everything the run writes")
    add("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    add("--limit-steps", type=positive, help="steps and test batches per epoch, for a short trial")
    return parser.parse_args()


class TinyGPT(nn.Module):
    """A decoder-only transformer in the pre-norm layout of GPT-2, with 440,000 parameters."""

    def __init__(self, context, vocab=256, width=128, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))
        # The default, 1.0, makes the first logits far too large.
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens):
        """Map tokens (B, T), int64, T at most `context`, to next-token logits (B, T, vocab)."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length], is_causal=True)
        return self.norm(x) @ self.token.weight.T  # tied weights (Press and Wolf 2017)


def random_text(size=600_000, symbols=32):
    """Return the tokens of a random source, and its entropy in nats: no loss can be below it.

    Each token depends on the one before (a Markov chain), by a table of probabilities.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(symbols, symbols, generator=generator).double().mul(2).softmax(1)
    often = torch.linalg.matrix_power(table, 1024)[0]  # how often each token occurs
    entropy = -(often @ (table * table.log()).sum(1)).item()
    # 600 chains side by side: one call draws the next token of each chain.
    chains = [torch.multinomial(often, 600, replacement=True, generator=generator)]
    for _ in range(size // 600 - 1):
        chains.append(torch.multinomial(table[chains[-1]], 1, generator=generator)[:, 0])
    return torch.stack(chains, 1).flatten(), entropy


def load(args):
    """Return training and test windows, and the text's entropy, or None if it is not known."""
    if args.text_file is None:
        tokens, entropy = random_text()
    else:
        try:
            args.text_file.read_text("utf-8")
            tokens = torch.frombuffer(bytearray(args.text_file.read_bytes()), dtype=torch.uint8)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or empty
            longrun.fail(f"--text-file {args.text_file} is not a text in UTF-8 ({error})")
        tokens, entropy = tokens.long(), None
    cut = len(tokens) * 9 // 10  # the last tenth is for testing
    if len(tokens) - cut <= args.context:
        longrun.fail(f"{len(tokens)} tokens are too few: use a longer text or a smaller --context")
    # Windows share only one token, because the targets are the inputs shifted by one.
    parts = [
        part.unfold(0, args.context + 1, args.context) for part in (tokens[:cut], tokens[cut:])
    ]
    return *(TensorDataset(part[:, :-1], part[:, 1:]) for part in parts), entropy


def train_one_epoch(args, model, batches, stateful, progress):
    """Train to the end of an epoch; return the mean loss over the tokens of all processes."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
    optimizer, scheduler = stateful["optimizer"], stateful["scheduler"]
    for tokens, labels in batches:
        # horovod: each process and step gets its own random numbers (dropout), also after a resume
        longrun.seed(args.seed, progress["step"], hvd.rank())
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()  # horovod: starts to average the gradients over all processes
        sums[0] += loss.detach() * labels.numel()
        sums[1] += labels.numel()
        optimizer.step()  # horovod: first waits until all gradients are averaged
        scheduler.step()
        optimizer.zero_grad()
        progress["step"] += 1
        longrun.alive(args.timeout)  # ends the process if the next call comes too late
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def evaluate(args, model, test_loader):
    """Return the mean test loss, in nats per token, over the tokens of all processes."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)  # loss, tokens
    for tokens, labels in islice(test_loader, args.limit_steps):
        logits = model(tokens).flatten(0, 1)
        sums[0] += F.cross_entropy(logits, labels.flatten(), reduction="sum")
        sums[1] += labels.numel()
        longrun.alive(args.timeout)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes; each must call this
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def sample(args, model, length=200):
    """Return text that the model generates, on one line."""
    model.eval()
    torch.manual_seed(args.seed)
    tokens = torch.tensor([[10]])  # a line break
    for _ in range(length):
        logits = model(tokens[:, -args.context :])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1)[None]], 1)
    if args.text_file is None:
        return "".join(chr(64 + token) for token in tokens[0, 1:])  # a letter for each token
    return " ".join(bytes(tokens[0, 1:].tolist()).decode(errors="replace").split())


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    rank, world_size = setup(args)
    train_set, test_set, args.entropy = load(args)
    # horovod: shuffled parts of equal length; a process with one more step would hang
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    steps = min(len(sampler) // args.batch_size, args.limit_steps or len(train_set))
    if not steps:
        longrun.fail(f"the {len(sampler)} samples of each process are too few for one step")
    # horovod: reads each test sample once; DistributedSampler would repeat or leave out some
    test_part = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_part, args.batch_size)

    torch.manual_seed(args.seed)
    model = TinyGPT(args.context)
    optimizer = distribute(args, model, torch.optim.AdamW(model.parameters(), args.lr))
    scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / (args.warmup_steps + 1)))
    stateful = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"step": 0, "history": []}  # optimizer steps of the run, and rows of metrics.csv
    what = f"TinyGPT on {args.text_file or 'a random text'}, {args.context} tokens per sample"
    where = "mpi on cpu" if hvd.mpi_enabled() else "gloo on cpu"
    progress = longrun.start(args, what, where, (train_set, test_set), stateful, progress)  # resume
    if progress["step"]:  # horovod: without a state this call would take a step to create one
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: rank 0's weights to all

    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order in each epoch, the same in all processes
        train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
        batches, start = islice(train_loader, args.limit_steps), time.perf_counter()
        train_loss = train_one_epoch(args, model, batches, stateful, progress)
        seconds = time.perf_counter() - start
        test_loss = evaluate(args, model, test_loader)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"samples_per_second": steps * args.global_batch / seconds, "seconds": seconds}
        progress["history"].append(row | {"world_size": world_size})
        save_checkpoint(args, stateful, progress)
    longrun.write(args, "model.pt", lambda file: torch.save(model.state_dict(), file))
    if rank == 0:  # horovod: all processes have the same weights; one prints
        loss = progress["history"][-1]["test_loss"]
        floor = f" (floor {args.entropy:.4f})" if args.entropy else ""
        print(f"test loss {loss:.4f}{floor}, perplexity {math.exp(min(loss, 700)):.2f} per byte")
        print(f"sample: {sample(args, model)}")
    longrun.end(args, progress, "finished")


if __name__ == "__main__":
    main(parse_args())
