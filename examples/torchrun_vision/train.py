"""Train an image classifier on image files with DistributedDataParallel (DDP), by torchrun.

Once:      python make_images.py          (writes an example, images/; yours: --data-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

The learning rate rises for --warmup-steps, which are those of an epoch by default, and then falls
to 0. Comments that begin with a tag, such as "ddp:" or "loader:", mark what a single process would
not need. image_files.py reads, decodes and augments; classifiers.py makes the model; the functions
of plumbing keep the job alive.
"""

import contextlib
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

# With bf16 and fp16 the weights stay in fp32; only what autocast computes is in 16 bits.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32}
WEIGHT_DTYPES |= {"fp64": torch.float64}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    parser.set_defaults(batch_size=16, lr=5e-4, warmup_steps=None)
    add = parser.add_argument
    folder = "folder with train/CLASS/*.jpg and val, or a tar of it"
    add("--data-dir", type=Path, default="images", help=folder)
    add("--image-size", type=int, default=32, help="pixels; 224 is usual for photographs")
    names = "a classifier of torchvision"
    add("--model", choices=classifiers.NAMES, default="resnet18", metavar="NAME", help=names)
    add("--weights", type=Path, help="state dict on disk to start from, such as torchvision's")
    add("--new-head", action="store_true", help="start the last layer anew, for other classes")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    statistics = "BatchNorm over the batches of all processes (GPUs)"
    add("--sync-batchnorm", action="store_true", help=statistics)
    workers = "processes that read images, for each that trains (from the cores)"
    add("--workers", type=int, help=workers)
    add("--prefetch", type=int, default=2, help="batches that each worker reads ahead")
    add("--compile", action="store_true", help="see docs/compile.md of the repository")
    every = "also save after so many steps, such as 500, or after a time, such as 10min"
    add("--checkpoint-every", type=plumbing.steps_or_minutes, help=every)
    add("--log-to", choices=logs.NAMES, help="also write the metrics for these")
    profile = "show what 5 steps spend their time on; write a trace"
    add("--profile", action="store_true", help=profile)
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    logs.check_args(parser, args)
    classifiers.check_args(parser, args)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    return args


def setup(args):
    """Join the process group, and return this process's device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    cores = cores // args.processes
    if args.workers is None:
        # loader: with a GPU all cores but one decode images; without one, training needs most
        args.workers = max(1, cores - 1 if device.type == "cuda" else cores // 4)
    torch.set_num_threads(max(1, cores - args.workers))  # more threads than cores are slower
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # ddp: NCCL for the gradients on GPUs; Gloo for small things on the CPU, such as requests
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torchrun: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes meet
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    return device


def train_one_epoch(args, ddp_model, train_loader, parts, device, progress):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    ddp_model.train()
    torch.backends.cudnn.benchmark = True  # GPUs: tries what suits the one shape of these batches
    optimizer = parts["optimizer"]
    scaler = parts["scaler"]
    start = time.perf_counter() - progress["seconds"]
    # Loss and samples. The same tensor is in progress: what is added here is also in a checkpoint.
    sums = progress["sums"]
    epochs, steps = plumbing.position(args, progress)  # complete epochs; steps of this one
    first = steps * args.gradient_accumulation_steps + 1  # 1, unless it was stopped in this epoch
    for number, (images, labels) in enumerate(train_loader, first):
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: every Nth
        seconds = time.perf_counter() - start
        # stop: 0 asks to go on, 1 to save after this step, 2 to save and stop
        request = torch.tensor([plumbing.requested(args, progress, seconds)])
        # stop: the largest request counts; it travels while this batch is computed
        pending = dist.all_reduce(request, dist.ReduceOp.MAX, async_op=True)
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)  # faster
        labels = labels.to(device, non_blocking=True)
        # Dropout: other numbers for each batch and process, and the same ones after a resume.
        torch.manual_seed(args.seed + (epochs * 10**6 + number) * args.world_size + dist.get_rank())
        # accumulation: gradients are averaged with the last batch of a step
        averaging = contextlib.nullcontext() if completes_step else ddp_model.no_sync()
        with averaging, autocast(args, device):
            logits = ddp_model(image_files.normalise(images, WEIGHT_DTYPES[args.precision]))
        loss = F.cross_entropy(logits.to(WEIGHT_DTYPES[args.precision]), labels)
        scaler.scale(loss / args.gradient_accumulation_steps).backward()  # ddp: averages gradients
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        pending.wait()
        if not completes_step:
            continue
        if args.max_grad_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        factor = cosine(args, progress["step"])
        plumbing.set_learning_rate(args, optimizer, progress["step"], factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        classifiers.average_statistics(ddp_model)  # ddp: those of BatchNorm, over all processes
        progress["step"] += 1
        if request >= 1:
            progress["seconds"] = time.perf_counter() - start
            save_checkpoint(args, parts, progress)
            start = time.perf_counter() - progress["seconds"]  # a save is no training
        if request == 2:
            plumbing.stop(args, progress)  # stop: ends this process; run.slurm requeues the job
    progress["seconds"] = time.perf_counter() - start
    sums = sums.clone()
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def autocast(args, device):
    """Return the context in which models compute in the 16 bits of --precision, if it has them."""
    return torch.autocast(device.type, AUTOCAST.get(args.precision), args.precision in AUTOCAST)


def cosine(args, step):
    """Return the factor by which the rate of a step, after the warm-up, falls to 0 at the end."""
    done = max(0, step - args.warmup_steps)
    length = max(1, args.epochs * args.steps_per_epoch - args.warmup_steps)
    return (1 + math.cos(math.pi * done / length)) / 2


@torch.no_grad()
@plumbing.uncompiled  # its last batch may be smaller, and would have to be compiled anew
def evaluate(args, model, test_loader, device):
    """Return the mean loss, top-1 and top-5 accuracy, from 0 to 1, over all processes' samples."""
    model.eval()
    torch.backends.cudnn.benchmark = False
    # Loss; samples whose class is the likeliest, or among the five likeliest; all samples.
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in test_loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with autocast(args, device):
            logits = model(image_files.normalise(images, WEIGHT_DTYPES[args.precision]))
        logits = logits.to(WEIGHT_DTYPES[args.precision])
        likeliest = logits.topk(min(5, logits.shape[1])).indices  # (B, 5): the likeliest is first
        correct = likeliest == labels[:, None]
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += correct[:, 0].sum()
        sums[2] += correct.sum()
        sums[3] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, top1, top5, samples = sums.tolist()
    row = {"test_loss": loss_sum / samples, "test_accuracy": top1 / samples}
    return row | {"test_top5_accuracy": top5 / samples}


def save_checkpoint(args, parts, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, parts["model"], progress)  # stops if a loss is not finite
    classifiers.write_best(args, parts["model"], progress)  # best.pt, after the best epoch so far
    progress = progress | {"sums": progress["sums"].clone()}
    dist.all_reduce(progress["sums"])  # ddp: a checkpoint has the sums over all processes
    if dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        state = {name: part.state_dict() for name, part in parts.items()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, parts, device):
    """Load the parts from the checkpoint, or the model from --weights; return how far it is."""
    # Steps of the whole run; rows of metrics.csv; sums and seconds of the epoch that is trained.
    progress = {"step": 0, "history": [], "seconds": 0.0}
    progress["sums"] = torch.zeros(2, dtype=torch.float64, device=device)
    found = plumbing.read_checkpoint(args, parts["model"]) if dist.get_rank() == 0 else None
    # ddp: rank 0 decides; then each process reads the file, or ends if rank 0 has found an error
    checkpoint = plumbing.share_checkpoint(args, found)
    if checkpoint:
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        progress = checkpoint["progress"]
        progress["sums"] = progress["sums"].to(device)
        if dist.get_rank() > 0:
            progress["sums"].zero_()  # ddp: rank 0 alone keeps them: they are those of all
    elif args.weights:
        other = None
        if args.new_head:
            other = make_parts(args, len(args.classes) + 1, torch.device("meta"))["model"]
        classifiers.load_weights(parts["model"], args.model, args.weights, other)
    return progress


def make_loaders(args, train_set, test_set, device, rank):
    """Return the loaders of the training set, as yet without batches, and of the test set."""
    # loader: workers read, decode and augment in the background, and stay for all epochs
    loading = {"num_workers": args.workers, "worker_init_fn": image_files.prepare_worker}
    loading |= {"persistent_workers": args.workers > 0}
    loading |= {"prefetch_factor": args.prefetch if args.workers else None}
    # Pinned memory: no step waits for its copy to a GPU.
    loading |= {"pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, batch_sampler=[], **loading)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some, or drop them
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, args.batch_size, sampler=shard, **loading)
    return train_loader, test_loader


def make_parts(args, classes, device):
    """Return what training changes, and so what a checkpoint holds: model, optimizer and scaler."""
    torch.manual_seed(args.seed)
    model = classifiers.make(args.model, classes, args.image_size)
    if args.gradient_checkpointing:
        classifiers.compute_blocks_twice(model)
    if args.sync_batchnorm:
        # ddp: statistics of the batches of all processes
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device, WEIGHT_DTYPES[args.precision], memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    # In fp16 small gradients would become 0: they are computed from a loss that is scaled up.
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@record  # torchrun: reports the traceback of the process that failed first
@image_files.errors_to(plumbing.fail)  # images that cannot be read, weights that do not fit
def main(args):
    """Train as one of the processes that torchrun has started."""
    plumbing.prepare_process(args)
    plumbing.end_with_loader_workers()
    device = setup(args)
    rank = dist.get_rank()

    # Data (yours: see README.md). A checkpoint is refused with other ones than `args.data` says.
    train_set, test_set, args.classes = image_files.load(args.data_dir, args.image_size)
    args.data = f"{len(train_set)} images of {len(args.classes)} classes"
    # ddp: shuffled parts of equal length: whoever had more steps would wait for the others forever
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    args.steps_per_epoch = plumbing.count_steps(args, len(sampler), train_set, test_set)
    if args.warmup_steps is None:
        args.warmup_steps = args.steps_per_epoch
    train_loader, test_loader = make_loaders(args, train_set, test_set, device, rank)

    # Model (yours: see README.md), optimizer and scaler, and their state if the run is resumed.
    parts = make_parts(args, len(args.classes), device)
    progress = resume(args, parts, device)
    model = parts["model"]
    # ddp: gives all processes the weights of rank 0, and averages gradients in backward()
    ddp_model = DistributedDataParallel(model)
    ddp_model.broadcast_buffers = False  # ddp: statistics are averaged, see train_one_epoch
    # DDP chooses in its first backward pass in which order it sums gradients. One is done now, on
    # zeros of the input's shape: a resumed run then sums in the same order, and has the same bits.
    shape = (1, 3, args.image_size, args.image_size)
    zeros = torch.zeros(shape, device=device, dtype=WEIGHT_DTYPES[args.precision])
    plumbing.fix_summation_order(ddp_model, zeros)
    if args.compile:
        plumbing.compile_in_place(args, model)  # DDP calls it; its weights keep their names

    # Train.
    name = plumbing.name_of_model(args, model)
    plumbing.print_header(args, f"{name} on {args.data_dir}", device, progress)
    if rank == 0:
        print(f"data: {args.data}, {plumbing.plural(args.workers, 'worker')} for each process")
    log = logs.open_log(args, progress["history"])
    profiler = step_profile.make_profiler(args, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        seeded = image_files.with_seeds(sampler, args.seed, epoch)  # to augment: a seed per index
        batches = BatchSampler(seeded, args.batch_size, drop_last=True)
        batches = plumbing.batches_left(args, progress, batches)  # if it was stopped in this epoch
        train_loader.batch_sampler[:] = batches  # loader: the same workers in each epoch
        profiled = step_profile.mark_steps(args, train_loader, profiler)
        train_loss, samples, seconds = train_one_epoch(
            args, ddp_model, profiled, parts, device, progress
        )
        # stop: an evaluation may be long: it ends after the same batch in all processes
        batches = plumbing.until_stopped(args, progress, test_loader, save_checkpoint, parts)
        row = {"epoch": epoch + 1, "train_loss": train_loss}
        row |= evaluate(args, model, batches, device)  # ddp_model could hang
        row |= {"samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, parts, progress)
        log(row)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    classifiers.write_weights(path, model)  # ddp: all processes have the same; rank 0 writes them
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
