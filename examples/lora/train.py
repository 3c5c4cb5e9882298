"""Fine-tune a language model with LoRA and DistributedDataParallel (DDP), started by torchrun.

Once:      python make_model.py           (writes a small model; yours: --model-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

LoRA freezes the model and trains adapters, two small matrices beside each of its linear layers.
--shard shares out a model that no process can hold. Comments that begin with a tag, such as "ddp:",
mark what one process that trains all weights would not need. plumbing keeps the job alive.
"""

import contextlib
import math
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import model_files  # before peft: it has nothing downloaded, and says which package is missing
import plumbing
import sharded_model
import text_data
from common.models import token_loss
from plumbing import shards

# isort: split
import peft

# With bf16 the weights that are trained stay in fp32; only what autocast computes is in bf16.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    parser.set_defaults(batch_size=4, lr=5e-3)  # for a pretrained model often --lr 1e-4
    add = parser.add_argument
    add("--model-dir", type=Path, default="model", help="model in Hugging Face's format")
    add("--text-file", type=Path, default="text.txt", help="text, JSON lines, folder of tokens")
    add("--separate-documents", action="store_true", help="attention stays within a document")
    add("--context", type=int, default=32, help="tokens of a sample")
    add("--full", action="store_true", help="train all weights, without adapters, for comparison")
    add("--lora-rank", type=int, default=4, help="columns of an adapter's matrices, often 8 to 64")
    add("--lora-alpha", type=float, default=8, help="adapters are scaled by alpha / rank")
    add("--lora-dropout", type=float, default=0.0, help="share of their inputs that are set to 0")
    add("--target-modules", default="all-linear", help="layers with them, such as q_proj,v_proj")
    add("--shard", action="store_true", help="each process holds a part of the model: FSDP2")
    add("--merge", action="store_true", help="also save the model with the adapters added to it")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--compile", action="store_true", help="see docs/compile.md of the repository")
    every = "also save after so many steps, such as 500, or after a time, such as 10min"
    add("--checkpoint-every", type=plumbing.steps_or_minutes, help=every)
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
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
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # ddp: NCCL for the gradients on GPUs; Gloo for small things on the CPU, such as requests
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return the mean loss, the targets of all, and seconds."""
    model = ddp_model if args.shard else ddp_model.module
    ddp_model.train()
    loss_function = torch.compile(token_loss) if args.compile else token_loss  # saves memory
    start = time.perf_counter() - progress["seconds"]
    # Loss and samples. The same tensor is in progress: what is added here is also in a checkpoint.
    sums = progress["sums"]
    first = progress["step"] * args.gradient_accumulation_steps + 1  # counted over the whole run
    for number, (tokens, labels) in enumerate(train_loader, first):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: every Nth
        seconds = time.perf_counter() - start
        # stop: 0 asks to go on, 1 to save after this step, 2 to save and stop
        request = torch.tensor([plumbing.requested(args, progress, seconds)])
        # stop: the largest request counts; it travels while this batch is computed
        pending = dist.all_reduce(request, dist.ReduceOp.MAX, async_op=True)
        # Dropout: other numbers for each batch and process, and the same ones after a resume.
        torch.manual_seed(args.seed + number * args.world_size + dist.get_rank())
        tokens = tokens.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # accumulation: gradients are averaged with the last batch of a step; shard: with each one
        last = completes_step or args.shard
        averaging = contextlib.nullcontext() if last else ddp_model.no_sync()
        with averaging, torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = ddp_model(tokens, **model_files.options(args, tokens)).logits
        loss = loss_function(logits, labels, WEIGHT_DTYPES[args.precision], "sum")
        # Samples may have few targets or many. All batches are divided by the mean number, and not
        # by their own: each target weighs the same, in whatever batch and on whatever process.
        loss = loss / (len(labels) * args.targets)
        # ddp: averages the gradients over all processes. lora: only the adapters have gradients
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += (labels != text_data.IGNORED).sum().double() / args.targets
        pending.wait()
        if not completes_step:
            continue
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        if request >= 1:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, model, optimizer, progress)
            start = time.perf_counter() - progress["seconds"]  # a save is no training
        if request == 2:
            plumbing.stop(args, progress)  # stop: ends this process; run.slurm requeues the job
    progress["seconds"] = time.perf_counter() - start
    sums = sums.clone()
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples * args.targets, time.perf_counter() - start


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return the mean loss of a target, over all processes, and the perplexity or accuracy."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, targets, correct
    for tokens, labels in test_loader:
        tokens = tokens.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = model(tokens, **model_files.options(args, tokens)).logits
        losses = token_loss(logits, labels, WEIGHT_DTYPES[args.precision], "none")
        sums[0] += losses.double().sum()
        sums[1] += (labels != text_data.IGNORED).sum()
        if args.classes:
            sums[2] += (logits.argmax(1) == labels).sum()
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, targets, correct = sums.tolist()
    loss = loss_sum / targets
    if args.classes:
        return {"test_loss": loss, "test_accuracy": correct / targets}
    return {"test_loss": loss, "perplexity": math.exp(loss) if loss < 709 else math.inf}


def load_model(args):
    """Return the model in --model-dir, with adapters unless --full."""
    dtype = WEIGHT_DTYPES[args.precision]
    if args.precision == "bf16" and not args.full:
        # lora: frozen weights need no more; in those that are trained, small steps would be lost
        dtype = torch.bfloat16
    if not args.shard:
        model = model_files.load_model(args, dtype)
        return model if args.full else add_adapters(args, model)
    model = sharded_model.without_values(args, dtype)  # shard: on the meta device, without memory
    with sharded_model.first_values() as values:
        model = model if args.full else add_adapters(args, model)
    options = sharded_model.options(args)
    for part in (*sharded_model.parts(model), model):  # the last one: what is in no layer
        # shard: before a part computes, its weights are gathered from all processes; then freed
        fully_shard(part, **options)
    return sharded_model.read_weights(args, model, values)  # shard: each process reads its rows


def add_adapters(args, model):
    """Return the model with adapters: W x + (alpha / rank) B A x, of which A and B are trained."""
    config = peft.LoraConfig(
        r=args.lora_rank,  # lora: A has so many rows and B so many columns
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=model_files.target_modules(args, model),
        task_type="SEQ_CLS" if args.classes else "CAUSAL_LM",  # lora: the first trains a new head
    )
    # lora: A is random; B is 0, so that training starts from the model as it was
    torch.manual_seed(args.seed)
    return peft.get_peft_model(model, config)  # lora: its own weights no longer get gradients


def trained_weights(model):
    """Return the weights that are trained, by their names: the adapters' or, with --full, all."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def save_checkpoint(args, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # ddp: a checkpoint has the sums over all processes
    if args.shard:
        folder = shards.begin(args, progress)
        with shards.write_errors(folder):
            # shard: each process writes its part of what is trained
            dcp.save(sharded_model.state(model, optimizer), checkpoint_id=folder)
            shards.complete(args, progress | {"sums": progress["sums"].tolist()}, folder)
    elif dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        # lora: the adapters, and not the model, which stays as it was
        state = {"model": trained_weights(model), "optimizer": optimizer.state_dict()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, model, optimizer, device):
    """Load adapters and optimizer from the checkpoint, if there is one; return how far it is."""
    # Steps of the whole run; rows of metrics.csv; sums and seconds of the epoch that is trained.
    progress = {"step": 0, "history": [], "seconds": 0.0}
    progress["sums"] = torch.zeros(2, dtype=torch.float64, device=device)
    # ddp: rank 0 decides; then each process reads the file, or ends if rank 0 has found an error
    checkpoint = sharded_model.find_checkpoint(args, model)
    if checkpoint and args.shard:
        state = sharded_model.state(model, optimizer)
        # shard: the files may have other parts, since other processes have written them
        dcp.load(state, checkpoint_id=shards.check(args, checkpoint))
        sharded_model.set_state(model, optimizer, state)
    elif checkpoint:
        model.load_state_dict(checkpoint["model"], strict=False)  # lora: it has only the adapters
        optimizer.load_state_dict(checkpoint["optimizer"])
    if checkpoint:
        progress = checkpoint["progress"]
        progress["sums"] = torch.as_tensor(progress["sums"], dtype=torch.float64, device=device)
        if dist.get_rank() > 0:
            progress["sums"].zero_()  # ddp: rank 0 alone keeps them: they are those of all
    return progress


def replicate(args, model, device):
    """Return the model in DistributedDataParallel, of which each process holds all."""
    # ddp: gives all processes the weights of rank 0, and averages gradients in backward()
    # lora: only those of the adapters; buffers are constants, which need not be sent in each step
    ddp_model = DistributedDataParallel(model)
    ddp_model.broadcast_buffers = False
    # DDP chooses in its first backward pass in which order it sums gradients. One is done now, on
    # zeros of the input's shape: a resumed run then sums in the same order, and has the same bits.
    zeros = torch.zeros(1, args.context, device=device, dtype=torch.long)
    plumbing.fix_summation_order(ddp_model, zeros)
    if args.compile:
        plumbing.compile_in_place(args, model)  # DDP calls it; its weights keep their names
    return ddp_model


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one of the processes that torchrun has started."""
    plumbing.prepare_process(args)
    device = setup(args)
    rank = dist.get_rank()

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    tokenizer = model_files.load_tokenizer(args)
    train_set, test_set = text_data.load(args, tokenizer)
    # Pinned memory: no step waits for its copy to a GPU.
    loading = {"batch_size": None, "pin_memory": device.type == "cuda"}
    # ddp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    batches = BatchSampler(shard, args.batch_size, drop_last=False)
    test_loader = DataLoader(test_set, sampler=batches, **loading)

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    model = load_model(args).to(device)
    weights = trained_weights(model).values()
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(weights, args.lr, fused=fused, foreach=args.shard and not fused)
    progress = resume(args, model, optimizer, device)
    ddp_model = model if args.shard else replicate(args, model, device)

    # Train.
    name = f"{args.model} in {args.model_dir} on {args.text_file}"
    plumbing.print_header(args, name, device, progress)
    model_files.print_sizes(args, model)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        batches = BatchSampler(sampler, args.batch_size, drop_last=True)
        batches = plumbing.batches_left(args, progress, batches)  # if it was stopped in this epoch
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, targets, seconds = train_one_epoch(
            args, ddp_model, train_loader, optimizer, device, progress
        )
        # stop: an evaluation may be long: it ends after the same batch in all processes
        batches = plumbing.until_stopped(
            args, progress, test_loader, save_checkpoint, model, optimizer
        )
        if args.shard:
            batches = sharded_model.fill_up(args, test_set, batches)  # all compute equally often
        row = {"epoch": epoch + 1, "train_loss": train_loss}
        row |= evaluate(args, model, batches, device)  # ddp_model could hang
        if not args.classes:
            row["tokens_per_second"] = targets / seconds
        row["samples_per_second"] = args.steps_per_epoch * args.global_batch / seconds
        progress["history"].append(row | {"seconds": seconds, "world_size": args.world_size})
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / ("model" if args.full else "adapter")
    if args.shard:
        sharded_model.save(args, model, tokenizer, path)  # shard: all gather a layer, rank 0 writes
    else:  # ddp: all processes have the same weights; rank 0 writes them
        model_files.save(args, model, tokenizer, path)
    row = progress["history"][-1]
    learnt = "test acc {test_accuracy:.2%}" if args.classes else "perplexity {perplexity:.2f}"
    result = f"test loss {row['test_loss']:.4f}, {learnt.format(**row)}"
    plumbing.finish(args, progress, f"finished: {result}, {path.name} in {path}")


if __name__ == "__main__":
    main(parse_args())
