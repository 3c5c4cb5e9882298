"""Train a ConvNet with DistributedDataParallel (DDP), on processes which this script starts.

Locally:   python train.py --processes 2
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, and checkpoints that survive a kill.
Comments that begin with a tag, such as "ddp:", mark what a single process would not
need. The functions of plumbing keep the job alive.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

# With bf16 the weights stay in fp32; only what autocast computes is in bf16.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--processes", type=int, default=torch.cuda.device_count() or 2, help="one for each GPU")
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    add("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    args.world_size = args.processes  # all are on this node
    plumbing.check_args(parser, args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    return args


def setup(args, local_rank, port):
    """Join the process group, and return this process's device."""
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # more threads than cores are slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: faster products in fp32, since the A100
    plumbing.check_gpu(device)
    # ddp: NCCL for the gradients on GPUs; Gloo for small things on the CPU
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=args.timeout)
    # ddp: here the processes exchange their addresses, and wait until all are connected
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)
    size = args.world_size
    dist.init_process_group(backend, store=store, rank=local_rank, world_size=size, timeout=timeout)
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    # ddp: random numbers (augmentation, dropout) differ in each process and epoch
    torch.manual_seed(args.seed + progress["step"] * args.world_size + dist.get_rank())
    ddp_model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    for images, labels in train_loader:
        images = images.to(device, WEIGHT_DTYPES[args.precision], non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = ddp_model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        loss.backward()  # ddp: averages the gradients over all processes
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)  # on the device: with .item() each step would wait
        sums[1] += len(labels)
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        images = images.to(device, WEIGHT_DTYPES[args.precision], non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # ddp: sum over all processes, which all have to call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    if dist.get_rank() == 0:  # ddp: all processes have the same weights; one writes them
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    found = plumbing.read_checkpoint(args, model) if dist.get_rank() == 0 else None
    # ddp: rank 0 decides; then each process reads the file, or ends if rank 0 has found an error
    checkpoint = plumbing.share_checkpoint(args, found)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        progress = checkpoint["progress"]
    return progress


@plumbing.print_errors
def main(local_rank, args, port):
    """Train as one process of all; `port` is that of the store which launch() has opened."""
    plumbing.prepare_process(args)
    device = setup(args, local_rank, port)
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
    progress = resume(args, model, optimizer)
    # ddp: gives all processes the weights of rank 0, and averages gradients in backward()
    ddp_model = DistributedDataParallel(model)
    # DDP chooses in its first backward pass in which order it sums gradients. One is done now, on
    # zeros of the input's shape: a resumed run then sums in the same order, and has the same bits.
    zeros = torch.zeros(1, 1, 28, 28, device=device, dtype=WEIGHT_DTYPES[args.precision])
    plumbing.fix_summation_order(ddp_model, zeros)

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # ddp: shuffles anew; each process takes its part of one order
        batches = BatchSampler(sampler, args.batch_size, drop_last=True)
        train_loader = DataLoader(train_set, sampler=batches, **loading)
        train_loss, samples, seconds = train_one_epoch(
            args, ddp_model, train_loader, optimizer, device, progress
        )
        test_loss, accuracy = evaluate(args, model, test_loader, device)  # ddp_model could hang
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    if rank == 0:  # ddp: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


def launch(args):
    """Start the processes, and wait for them."""
    plumbing.end_on_ctrl_c()
    # ddp: port 0 means any free port
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        # ddp: each calls main(its number, args, port); if one fails, the others are ended
        mp.spawn(main, (args, store.port), args.world_size)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        plumbing.report_failure(error)


if __name__ == "__main__":
    launch(parse_args())
