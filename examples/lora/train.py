"""Fine-tune a language model from a local folder with LoRA and DistributedDataParallel (DDP), by torchrun.

Once:      python make_model.py                       (writes a small example, model/; yours: --model-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

LoRA freezes the model and adds adapters to its linear layers: two small matrices each, and only these are trained.
Comments that begin with "ddp:", "torchrun:" or "lora:" mark what a script that trains all weights in a single process
would not need. What else a long job on a cluster needs, such as checkpoints that survive a kill, is in plumbing.py.
"""

import argparse
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import model_files  # before peft: it has nothing downloaded, and says which package is missing
import plumbing
from common import data
from common.models import token_loss

# isort: split
import peft

# Of weights that are trained. With bf16 they stay in fp32, and autocast computes in bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default="model", help="folder with a model of Hugging Face's format")
    parser.add_argument("--text-file", type=Path, default="text.txt", help="text to train on, in UTF-8")
    parser.add_argument("--context", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--full", action="store_true", help="train all weights, without adapters, for comparison")
    parser.add_argument("--lora-rank", type=int, default=4, help="columns of an adapter's matrices: 8 to 64 are usual")
    parser.add_argument("--lora-alpha", type=float, default=8, help="an adapter's output is scaled by alpha / rank")
    parser.add_argument("--lora-dropout", type=float, default=0.0, help="share of an adapter's inputs set to 0")
    parser.add_argument("--target-modules", default="all-linear", help="layers with adapters, such as q_proj,v_proj")
    parser.add_argument("--merge", action="store_true", help="also save the model with the adapters added to it")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate; 1e-4 is usual for a pretrained model")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial adapters, shuffling and dropout")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--compile", action="store_true", help="faster on GPUs: see docs/compile.md of the repository")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=plumbing.steps_or_minutes, help="also save every 500 (steps), 10min")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)
    model_files.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    return args


def setup(args):
    """Join the process group, and return this process's device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # ddp: Gloo for tensors on the CPU
    # torchrun: has set MASTER_ADDR, MASTER_PORT and RANK, by which the processes find each other here
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    ddp_model.train()
    loss_function = torch.compile(token_loss) if args.compile else token_loss  # compiled: without copies of logits
    start = time.perf_counter() - progress["seconds"]
    sums = progress["sums"]  # loss, tokens: a checkpoint within the epoch has them, too
    first = progress["step"] * args.gradient_accumulation_steps + 1  # numbers count the batches of the whole run
    for number, (tokens, targets) in enumerate(train_loader, first):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: of so many batches
        vote = torch.tensor([plumbing.requested(args, progress, time.perf_counter() - start)])
        voting = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)  # stop: the largest wish is that of all
        # Dropout: other numbers for each batch and process, and the same ones after a resume.
        torch.manual_seed(args.seed + number * args.world_size + dist.get_rank())
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        ddp_model.require_backward_grad_sync = completes_step  # accumulation: averages only then, as no_sync() does
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(tokens, use_cache=False).logits
        loss = loss_function(logits, targets, DTYPES[args.precision])
        # ddp: averages the gradients over all processes. lora: only the adapters have some
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(targets)  # on the device: no step waits for it
        sums[1] += len(targets)
        voting.wait()  # now `vote` is 0 to go on, 1 to save after this step, 2 to stop then
        if not completes_step:
            continue
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        if vote:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, ddp_model.module, optimizer, progress)
        if vote == 2:
            plumbing.stop(args, progress)  # stop: ends this process, without an error; `run` requeues
    progress["seconds"] = time.perf_counter() - start
    totals = sums.clone()
    dist.all_reduce(totals)  # ddp: sum over all processes
    loss_sum, samples = totals.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return test loss of a token and perplexity, over all processes; not with DDP, as shards may differ by a batch."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, targets in test_loader:
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(tokens, use_cache=False).logits
        sums[0] += token_loss(logits, targets, DTYPES[args.precision], "none").double().sum()
        sums[1] += (targets != -100).sum()  # cross_entropy leaves out what is -100
    dist.all_reduce(sums)  # ddp: sum over all processes; the mean of their perplexities would be another number
    loss = (sums[0] / sums[1]).item()
    return {"test_loss": loss, "perplexity": math.exp(loss) if loss < 709 else math.inf}


def load_data(args):
    """Return the model's tokenizer, the training set, and the test set, which is the text's last tenth."""
    tokenizer = model_files.load_tokenizer(args)
    text = model_files.read_text(args)
    tokens = model_files.tokenize(args, tokenizer, text)
    count = (len(tokens) - 1) // args.context  # of samples
    split = (count - max(1, count // 10)) * args.context
    return tokenizer, data.Tokens(tokens[: split + 1], args.context), data.Tokens(tokens[split:], args.context)


def load_model(args):
    """Return the model in --model-dir, with adapters unless --full."""
    # lora: frozen weights need no more than bf16; what is trained stays in fp32, or small steps would be rounded away
    dtype = torch.bfloat16 if args.precision == "bf16" and not args.full else DTYPES[args.precision]
    model = model_files.load_model(args, dtype)
    return model if args.full else add_adapters(args, model)


def add_adapters(args, model):
    """Return the model with adapters, W x becoming W x + (alpha / rank) B A x; only A and B are trained."""
    config = peft.LoraConfig(
        r=args.lora_rank,  # lora: A has so many rows and B so many columns
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=model_files.target_modules(args, model),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(args.seed)  # lora: A is random; B is 0, so that training starts from the model as it was
    return peft.get_peft_model(model, config)  # lora: the model's own weights no longer get gradients


def trained_weights(model):
    """Return the weights that are trained, by their names: those of the adapters or, with --full, all."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def save_checkpoint(args, model, optimizer, progress):
    """Save adapters, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # ddp: a checkpoint has the sums over all processes
    if dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        # lora: the adapters, and not the model, which stays as it was
        state = {"model": trained_weights(model), "optimizer": optimizer.state_dict(), "progress": progress}
        plumbing.write_checkpoint(args, state)


def resume(args, model, optimizer, device):
    """Load adapters and optimizer from the checkpoint, if there is one; return how far the run is."""
    # step: of the whole run; history: rows of metrics.csv; sums, of this process, and seconds: of the current epoch
    progress = {"step": 0, "sums": torch.zeros(2, dtype=torch.float64, device=device), "seconds": 0.0, "history": []}
    found = plumbing.read_checkpoint(args, model) if dist.get_rank() == 0 else None
    # ddp: rank 0 decides, and each process reads the file; ends this process if rank 0 has found an error
    if checkpoint := plumbing.share_checkpoint(args, found):
        model.load_state_dict(checkpoint["model"], strict=False)  # lora: it has the weights of the adapters only
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
        # ddp: rank 0 keeps the sums, which are of all; the others begin at 0, else they would count world_size times
        progress["sums"] = progress["sums"].to(device) * (dist.get_rank() == 0)
    return progress


def save_model(args, model, tokenizer):
    """Save the adapters in peft's format or, with --full, the model; with --merge also a model that needs no peft."""
    if args.full:
        model_files.write_folder(args.output_dir / "model", model, tokenizer)
    else:
        model_files.write_folder(args.output_dir / "adapter", model)  # lora: peft leaves out the model's own weights
    if args.merge:
        merged = model.merge_and_unload()  # lora: W + (alpha / rank) B A takes the place of W
        model_files.write_folder(args.output_dir / "merged", merged, tokenizer)


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    plumbing.prepare_process(args)
    device, rank = setup(args), dist.get_rank()

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    tokenizer, train_set, test_set = load_data(args)
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = load_model(args).to(device)
    optimizer = torch.optim.AdamW(trained_weights(model).values(), args.lr, fused=device.type == "cuda")
    progress = resume(args, model, optimizer, device)
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    # lora: only those of the adapters. Rank 0 sends the frozen weights once, here; buffers are constants, never sent
    devices = [device.index] if device.type == "cuda" else None
    ddp_model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
    # DDP regroups gradients after its first backward pass: one now, on zeros shaped as the input, keeps resumes exact
    plumbing.fix_summation_order(ddp_model, torch.zeros(1, args.context, device=device, dtype=torch.long))
    if args.compile:
        plumbing.compile_in_place(args, model)  # DDP calls it, compiled from now on; its weights keep their names

    # Train.
    plumbing.print_header(args, f"{args.model} in {args.model_dir} on {args.text_file}", device, progress)
    model_files.print_sizes(args, model)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order in each epoch, the same in all processes
        done = progress["step"] - epoch * args.steps_per_epoch  # steps of this epoch, if the run was stopped within it
        first, last = done * args.gradient_accumulation_steps, args.steps_per_epoch * args.gradient_accumulation_steps
        batches = list(BatchSampler(sampler, args.batch_size, drop_last=True))[first:last]
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, samples, seconds = train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress)
        # stop: an evaluation may be long: it ends after the same batch in all processes, which save what was trained
        batches = plumbing.until_stopped(args, progress, test_loader, save_checkpoint, model, optimizer)
        row = {"epoch": epoch + 1, "train_loss": train_loss, **evaluate(args, model, batches, device)}
        row |= {"tokens_per_second": samples * args.context / seconds, "samples_per_second": samples / seconds}
        progress["history"].append(row | {"seconds": seconds, "world_size": args.world_size})
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    if rank == 0:
        save_model(args, model, tokenizer)
    saved = "model" if args.full else "adapter"
    result = "test loss {test_loss:.4f}, perplexity {perplexity:.2f}".format(**progress["history"][-1])
    plumbing.finish(args, progress, f"finished: {result}, {saved} in {args.output_dir / saved}")


if __name__ == "__main__":
    main(parse_args())
