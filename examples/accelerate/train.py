"""Train a ConvNet with Hugging Face's accelerate, whose launcher starts it on one or many nodes.

Locally:   accelerate launch --config_file accelerate.yaml --num_processes 2 train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, checkpoints that survive a kill, and a stop
after any step. Comments that begin with a tag, such as "ddp:", mark what a single process would not
need. The functions of plumbing keep the job alive.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

# With bf16 the weights stay in fp32; accelerate has autocast compute in bf16.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    add("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    add("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    every = "also save after so many steps, such as 500, or after a time, such as 10min"
    add("--checkpoint-every", type=plumbing.steps_or_minutes, help=every)
    args = parser.parse_args()
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # accelerate: processes on all nodes
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # accelerate: on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        command = "accelerate launch --config_file accelerate.yaml --num_processes 2 train.py"
        parser.error(f"start it so: {command}")
    # accelerate launch: sets these by its flags, or by a config file of your own
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed not in ("no", args.precision):
        parser.error(f"accelerate's mixed_precision is {mixed}: use --precision of train.py")
    for name in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{name}") == "true":
            parser.error(f"{name} needs other checkpoints: take the example {name.lower()}")
    return args


def setup(args):
    """Join the process group; return the Accelerator, which knows this process's device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # accelerate: this process's number on its node
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # ddp: NCCL for the gradients on GPUs; Gloo for small things on the CPU, such as requests
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # accelerate: has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, by which all processes
    # meet. Accelerator() would join the group itself, but with a timeout of its own, 600 s.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    accelerator = Accelerator(
        cpu=device.type == "cpu",  # accelerate: otherwise it sees no group without GPUs
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(args.gradient_accumulation_steps),
    )
    # After Accelerator(), which sets another number where there are no GPUs.
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    return accelerator


def train_one_epoch(args, accelerator, ddp_model, train_loader, optimizer, progress):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    # ddp: random numbers (augmentation, dropout) differ in each process and epoch
    torch.manual_seed(args.seed + progress["step"] * args.world_size + dist.get_rank())
    ddp_model.train()
    start = time.perf_counter() - progress["seconds"]
    # Loss and samples. The same tensor is in progress: what is added here is also in a checkpoint.
    sums = progress["sums"]
    for images, labels in train_loader:
        seconds = time.perf_counter() - start
        # stop: 0 asks to go on, 1 to save after this step, 2 to save and stop
        request = torch.tensor([plumbing.requested(args, progress, seconds)])
        # stop: the largest request counts; it travels while this batch is computed
        pending = dist.all_reduce(request, dist.ReduceOp.MAX, async_op=True)
        images = images.to(accelerator.device, WEIGHT_DTYPES[args.precision], non_blocking=True)
        labels = labels.to(accelerator.device, non_blocking=True)
        # accumulation: gradients are averaged with the last batch of a step
        with accelerator.accumulate(ddp_model):
            logits = ddp_model(images)
            loss = F.cross_entropy(logits, labels)
            # accelerate: divides the loss by the batches of a step, and computes the gradients
            accelerator.backward(loss)  # ddp: averages the gradients over all processes
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        pending.wait()
        if not accelerator.sync_gradients:  # accumulation: this step has further batches
            continue
        if args.max_grad_norm:
            accelerator.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        if request >= 1:
            progress["seconds"] = time.perf_counter() - start
            model = accelerator.unwrap_model(ddp_model, keep_torch_compile=False)
            save_checkpoint(args, accelerator, model, optimizer, progress)
            start = time.perf_counter() - progress["seconds"]  # a save is no training
        if request == 2:
            plumbing.stop(args, progress)  # stop: ends this process; run.slurm requeues the job
    progress["seconds"] = time.perf_counter() - start
    sums = accelerator.reduce(sums)  # accelerate: sum over all processes, which all call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


@torch.no_grad()
def evaluate(args, accelerator, model, test_loader):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)  # loss, correct, samples
    for images, labels in test_loader:
        images = images.to(accelerator.device, WEIGHT_DTYPES[args.precision], non_blocking=True)
        labels = labels.to(accelerator.device, non_blocking=True)
        logits = model(images)  # accelerate: prepare() has put autocast around it for bf16
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    sums = accelerator.reduce(sums)  # accelerate: sum over all processes, which all call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, accelerator, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    # accelerate: a checkpoint has the sums over all processes
    progress = progress | {"sums": accelerator.reduce(progress["sums"])}
    # ddp: all processes have the same weights; one writes them, in one file, as a whole or not at
    # all. accelerator.save_state() would write several, of which a kill could leave a part.
    if accelerator.is_main_process:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, accelerator, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    # Steps of the whole run; rows of metrics.csv; sums and seconds of the epoch that is trained.
    progress = {"step": 0, "history": [], "seconds": 0.0}
    progress["sums"] = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    found = plumbing.read_checkpoint(args, model) if accelerator.is_main_process else None
    # ddp: rank 0 decides; then each process reads the file, or ends if rank 0 has found an error
    checkpoint = plumbing.share_checkpoint(args, found)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
        progress["sums"] = progress["sums"].to(accelerator.device)
        if not accelerator.is_main_process:
            progress["sums"].zero_()  # ddp: rank 0 alone keeps them: they are those of all
    return progress


@record  # accelerate: reports the traceback of the process that failed first
def main(args):
    """Train as one of the processes that accelerate launch has started."""
    plumbing.prepare_process(args)
    accelerator = setup(args)
    device = accelerator.device
    rank = dist.get_rank()

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
    except data.DataError as error:
        plumbing.fail(error)
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
    torch.manual_seed(args.seed + rank)  # ddp: all get the weights of rank 0 below
    model = ConvNet().to(device, WEIGHT_DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, fused=device.type == "cuda")
    # accelerate: wraps `model` in DDP, if there are several processes. It is not given the loaders,
    # since it would repeat samples so that all processes have equally many.
    ddp_model, optimizer = accelerator.prepare(model, optimizer)
    progress = resume(args, accelerator, model, optimizer)
    # DDP chooses in its first backward pass in which order it sums gradients. One is done now, on
    # zeros of the input's shape: a resumed run then sums in the same order, and has the same bits.
    zeros = torch.zeros(1, 1, 28, 28, device=device, dtype=WEIGHT_DTYPES[args.precision])
    plumbing.fix_summation_order(ddp_model, zeros)

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        batches = BatchSampler(sampler, args.batch_size, drop_last=True)
        batches = plumbing.batches_left(args, progress, batches)  # if it was stopped in this epoch
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, samples, seconds = train_one_epoch(
            args, accelerator, ddp_model, train_loader, optimizer, progress
        )
        # stop: an evaluation may be long: it ends after the same batch in all processes
        batches = plumbing.until_stopped(
            args, progress, test_loader, save_checkpoint, accelerator, model, optimizer
        )
        test_loss, accuracy = evaluate(args, accelerator, model, batches)  # ddp_model could hang
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        progress |= {"sums": torch.zeros_like(progress["sums"]), "seconds": 0.0}
        save_checkpoint(args, accelerator, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
