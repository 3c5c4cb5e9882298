"""Train an image classifier on image files with DistributedDataParallel (DDP), started by torchrun; stops at any step.

Once:      python make_images.py                      (writes an example, images/; yours: --data-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "ddp:", "torchrun:" or "loader:" mark what a script for a single process would not need. What
else a long job on a cluster needs, such as checkpoints that survive a kill and errors that say what to do, is in
plumbing.py; image_files.py reads, decodes and augments, and classifiers.py makes the model.
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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import classifiers
import image_files
import logs
import plumbing
import step_profile

# Of weights and inputs. With bf16 and fp16 the weights stay in fp32, and autocast computes in the shorter type.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default="images", help="folder with train/CLASS/*.jpg and val, or tar")
    parser.add_argument("--image-size", type=int, default=32, help="pixels; 224 is usual for photographs")
    parser.add_argument("--model", choices=classifiers.NAMES, default="resnet18", metavar="NAME", help="of torchvision")
    parser.add_argument("--weights", type=Path, help="state dict on disk to start from, such as torchvision's")
    parser.add_argument("--new-head", action="store_true", help="start the last layer anew, for other classes")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate after the warm-up; then it falls to 0")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, help="steps in which the learning rate rises (those of an epoch)")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over all processes' batches (GPUs)")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights, shuffling and augmentation")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16, fp16: mixed; fp64: for tests")
    parser.add_argument("--workers", type=int, help="processes that read images, for each that trains (from the cores)")
    parser.add_argument("--prefetch", type=int, default=2, help="batches that each worker reads ahead")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--compile", action="store_true", help="faster on GPUs: see docs/compile.md of the repository")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=plumbing.steps_or_minutes, help="also save every 500 (steps), 10min")
    parser.add_argument("--log-to", choices=logs.NAMES, help="also write the metrics for these")
    parser.add_argument("--profile", action="store_true", help="show what 5 steps spend their time on; write a trace")
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)
    logs.check_args(parser, args)
    classifiers.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    return args


def setup(args):
    """Join the process group, and return this process's device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    cores = (int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))) // args.processes
    if args.workers is None:  # loader: with a GPU all cores but one decode images; without, training itself needs most
        args.workers = max(1, cores - 1 if device.type == "cuda" else cores // 4)
    torch.set_num_threads(max(1, cores - args.workers))  # more threads than cores are slower
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster matrix products in fp32, since the A100
    plumbing.check_gpu(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # ddp: Gloo for tensors on the CPU
    # torchrun: has set MASTER_ADDR, MASTER_PORT and RANK, by which the processes find each other here
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    return device


def train_one_epoch(args, ddp_model, train_loader, parts, device, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    ddp_model.train()
    torch.backends.cudnn.benchmark = True  # GPUs: tries for seconds what suits each shape of a batch; here there is one
    optimizer, scaler = parts["optimizer"], parts["scaler"]
    start = time.perf_counter() - progress["seconds"]
    sums = progress["sums"]  # loss, samples: a checkpoint within the epoch has them, too
    epochs, done = plumbing.position(args, progress)  # complete epochs; steps of this one, if the run was stopped in it
    for number, (images, labels) in enumerate(train_loader, done * args.gradient_accumulation_steps + 1):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: of so many batches
        vote = torch.tensor([plumbing.requested(args, progress, time.perf_counter() - start)])
        voting = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)  # stop: the largest wish is that of all
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)  # faster convolutions
        labels = labels.to(device, non_blocking=True)
        # Dropout: new in each batch and process, and the same after a resume.
        torch.manual_seed(args.seed + (epochs * 10**6 + number) * args.world_size + dist.get_rank())
        ddp_model.require_backward_grad_sync = completes_step  # accumulation: averages only then, as no_sync() does
        with torch.autocast(device.type, AUTOCAST.get(args.precision), enabled=args.precision in AUTOCAST):
            logits = ddp_model(image_files.normalise(images, DTYPES[args.precision]))
        loss = F.cross_entropy(logits.to(DTYPES[args.precision]), labels)
        scaler.scale(loss / args.gradient_accumulation_steps).backward()  # ddp: averages the gradients of all processes
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(labels)  # on the device: no step waits for it
        sums[1] += len(labels)
        voting.wait()  # now `vote` is 0 to go on, 1 to save after this step, 2 to stop then
        if not completes_step:
            continue
        if args.max_grad_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"]) * cosine(args, progress["step"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        classifiers.average_statistics(ddp_model)  # ddp: of BatchNorm, over all processes: else each has its own
        progress["step"] += 1
        if vote:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, parts, progress)
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


def cosine(args, step):
    """Return by what the rate of a step is multiplied: 1 in the warm-up, then it falls to 0 at the end of the run."""
    done, length = max(0, step - args.warmup_steps), max(1, args.epochs * args.steps_per_epoch - args.warmup_steps)
    return (1 + math.cos(math.pi * done / length)) / 2


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return the mean test loss, and the top-1 and top-5 accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    torch.backends.cudnn.benchmark = False
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, correct, correct among the first 5, samples
    for images, labels in test_loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, AUTOCAST.get(args.precision), enabled=args.precision in AUTOCAST):
            logits = model(image_files.normalise(images, DTYPES[args.precision])).to(DTYPES[args.precision])
        correct = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (B, 5): most likely class first
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += correct[:, 0].sum()
        sums[2] += correct.sum()
        sums[3] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, top1, top5, samples = sums.tolist()
    return {"test_loss": loss_sum / samples, "test_accuracy": top1 / samples, "test_top5_accuracy": top5 / samples}


def save_checkpoint(args, parts, progress):
    """Save the parts and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, parts["model"], progress)  # stops the run if a loss is not finite, and the like
    classifiers.write_best(args, parts["model"], progress)  # best.pt, at the end of the best epoch so far
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # ddp: a checkpoint has the sums over all processes
    if dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        state = {name: part.state_dict() for name, part in parts.items()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, parts, device):
    """Load the parts from the checkpoint, or the model from --weights; return how far the run is."""
    # step: of the whole run; history: rows of metrics.csv; sums, of this process, and seconds: of the current epoch
    progress = {"step": 0, "sums": torch.zeros(2, dtype=torch.float64, device=device), "seconds": 0.0, "history": []}
    found = plumbing.read_checkpoint(args, parts["model"]) if dist.get_rank() == 0 else None
    # ddp: rank 0 decides, and each process reads the file; ends this process if rank 0 has found an error
    if checkpoint := plumbing.share_checkpoint(args, found):
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        progress = checkpoint["progress"]
        # ddp: rank 0 keeps the sums, which are of all; the others begin at 0, else they would count world_size times
        progress["sums"] = progress["sums"].to(device) * (dist.get_rank() == 0)
    elif args.weights:
        classifiers.load_weights(parts["model"], args.model, args.weights, args.new_head)
    return progress


def make_loaders(args, train_set, test_set, device, rank):
    """Return the loaders of training set, as yet without batches, and test set."""
    # loader: workers read, decode and augment in the background, while this process computes; they stay for all epochs
    loading = {"num_workers": args.workers, "prefetch_factor": args.prefetch if args.workers else None}
    loading |= {"worker_init_fn": image_files.prepare_worker, "persistent_workers": args.workers > 0}
    loading |= {"pin_memory": device.type == "cuda"}  # pinned: no step waits for its copy to a GPU
    train_loader = DataLoader(train_set, batch_sampler=[], **loading)  # loader: each epoch gets its own list of batches
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    return train_loader, DataLoader(test_set, args.batch_size, sampler=shard, **loading)


def make_parts(args, classes, device):
    """Return what training changes, and so what a checkpoint holds: model, optimizer and scaler."""
    torch.manual_seed(args.seed)
    model = classifiers.make(args.model, classes, args.image_size)
    if args.gradient_checkpointing:
        classifiers.compute_blocks_twice(model)
    if args.sync_batchnorm:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # ddp: over the batches of all processes
    model = model.to(device, DTYPES[args.precision], memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")  # small gradients would become 0
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@record  # torchrun: reports the traceback of the process that failed first
@image_files.errors_to(plumbing.fail)  # images that cannot be read, weights that do not fit: one line
def main(args):
    """Train as one process of args.world_size."""
    plumbing.prepare_process(args)
    plumbing.end_with_loader_workers()
    device, rank = setup(args), dist.get_rank()

    train_set, test_set, args.classes = image_files.load(args.data_dir, args.image_size)  # in run.json, too
    args.data = f"{len(train_set)} images of {len(args.classes)} classes"  # a checkpoint is for these
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    args.warmup_steps = args.steps_per_epoch if args.warmup_steps is None else args.warmup_steps
    train_loader, test_loader = make_loaders(args, train_set, test_set, device, rank)

    # Model, optimizer and scaler, and their state if the run is resumed.
    parts = make_parts(args, len(args.classes), device)
    model, progress = parts["model"], resume(args, parts, device)
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    ddp_model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    ddp_model.broadcast_buffers = False  # ddp: not BatchNorm's statistics of rank 0: train_one_epoch averages them
    zeros = torch.zeros(1, 3, args.image_size, args.image_size, device=device, dtype=DTYPES[args.precision])
    plumbing.fix_summation_order(ddp_model, zeros)  # so that a resumed run has the same bits; the shape is the input's
    if args.compile:
        plumbing.compile_in_place(args, model)

    # Train.
    plumbing.print_header(args, f"{plumbing.name_of_model(args, model)} on {args.data_dir}", device, progress)
    if rank == 0:
        print(f"data: {args.data}, {plumbing.plural(args.workers, 'worker')} for each process")
    log, profiler = logs.open_log(args, progress["history"]), step_profile.make_profiler(args, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: another order in each epoch, the same in all processes
        done = progress["step"] - epoch * args.steps_per_epoch  # steps of this epoch, if the run was stopped within it
        first, last = done * args.gradient_accumulation_steps, args.steps_per_epoch * args.gradient_accumulation_steps
        seeded = image_files.with_seeds(sampler, args.seed, epoch)  # an image is augmented alike after a resume, too
        train_loader.batch_sampler[:] = list(BatchSampler(seeded, args.batch_size, drop_last=True))[first:last]
        profiled = step_profile.mark_steps(args, train_loader, profiler)
        train_loss, samples, seconds = train_one_epoch(args, ddp_model, profiled, parts, device, progress)
        # stop: an evaluation may be long: it ends after the same batch in all processes, which save what was trained
        batches = plumbing.until_stopped(args, progress, test_loader, save_checkpoint, parts)
        row = {"epoch": epoch + 1, "train_loss": train_loss, **evaluate(args, model, batches, device)}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, parts, progress)
        log(row)
        plumbing.print_epoch(args, progress)

    # Finish.
    classifiers.write_weights(args.output_dir / "model.pt", model)  # ddp: rank 0 does
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
