"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

It is minimal.py with what a long job needs: flags, checkpoints that survive a kill, and clear
errors. Comments that begin with a tag, such as "horovod:", mark what a single process would not
need. The functions of plumbing keep the job alive. more/train_lm.py imports functions from here.
"""

import os
import time
from itertools import islice

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

# With bf16 the weights stay in fp32; only what autocast computes is in bf16.
WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = plumbing.arguments(__doc__, WEIGHT_DTYPES)  # --epochs and what else all examples have
    add = parser.add_argument
    add("--dataset", choices=data.NAMES, default="digits")
    add("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    names = ("--gradient-accumulation-steps", "--batches-per-allreduce")  # the second is Horovod's
    add(*names, type=int, default=1, help="batches per optimizer step")
    add("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    add("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, and return this process's device."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)  # --global-batch, if given, sets --batch-size
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # the processes of a node share these
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each its own
    # More threads than cores are slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))
    return torch.device("cpu")


def distribute(args, model, optimizer):
    """Return an optimizer that averages gradients over all processes before it takes a step."""
    return hvd.DistributedOptimizer(  # horovod: each backward pass starts to send its gradients
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.gradient_accumulation_steps,
        op=hvd.Average,
    )


def train_one_epoch(args, model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return the mean loss, the samples of all, and seconds."""
    # horovod: random numbers (augmentation, dropout) differ in each process and epoch
    torch.manual_seed(args.seed + progress["step"] * args.world_size + hvd.rank())
    model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    # accumulation: batches that do not complete a step are left out
    batches = args.steps_per_epoch * args.gradient_accumulation_steps
    for number, (images, labels) in enumerate(islice(train_loader, batches), 1):
        plumbing.restart_watchdog(args)  # MPI would wait forever for a process that hangs
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: every Nth
        images = images.to(device, WEIGHT_DTYPES[args.precision])
        labels = labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        # horovod: with the last batch of a step, starts to average the gradients over all processes
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # if it is not finite, the next save ends the run
        sums[0] += loss.detach() * len(labels)
        sums[1] += len(labels)
        if not completes_step:
            continue
        # Sets the rate of all groups. A schedule of yours is a factor, the fourth argument.
        plumbing.set_learning_rate(args, optimizer, progress["step"])
        optimizer.step()  # horovod: first waits until all gradients are averaged
        optimizer.zero_grad()
        progress["step"] += 1
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        plumbing.restart_watchdog(args)
        images = images.to(device, WEIGHT_DTYPES[args.precision])
        labels = labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes, which all call this
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, model, optimizer, progress):
    """Save what --resume continues from; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite
    if hvd.rank() == 0:  # horovod: all processes have the same weights; one writes them
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        plumbing.write_checkpoint(args, state | {"progress": progress})


def resume(args, model, optimizer):
    """Load model and optimizer from the checkpoint, if there is one; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; rows of metrics.csv
    # This is the checkpoint, or None where there is none, or an error message.
    found = plumbing.read_checkpoint(args, model) if hvd.rank() == 0 else None
    answer = found["progress"] if isinstance(found, dict) else found
    answer = hvd.broadcast_object(answer, name="progress")  # horovod: rank 0 tells all processes
    if plumbing.accept(answer):  # it ends each process here if rank 0 has found an error
        progress = answer
        if hvd.rank() == 0:
            optimizer.load_state_dict(found["optimizer"])
        # An optimizer without state takes a real step in this call, to create it. So it stands
        # here, only after a resume, and before the weights are loaded.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # horovod: rank 0's state to all
        if hvd.rank() == 0:
            model.load_state_dict(found["model"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: rank 0's weights to all
    return progress


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    plumbing.prepare_process(args)
    device = setup(args)
    rank = hvd.rank()

    # Data (yours: see README.md). The sampler yields all indices of a batch and the data set
    # returns the whole batch, so DataLoader must not collect samples: batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
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

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed + rank)  # horovod: all get the weights of rank 0 below
    model = ConvNet().to(device, WEIGHT_DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = distribute(args, model, optimizer)
    progress = resume(args, model, optimizer)

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # horovod: shuffles anew; each process takes its part of one order
        train_loss, samples, seconds = train_one_epoch(
            args, model, train_loader, optimizer, device, progress
        )
        test_loss, accuracy = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss}
        row |= {"test_accuracy": accuracy, "samples_per_second": samples / seconds}
        row |= {"seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    path = args.output_dir / "model.pt"
    if rank == 0:  # horovod: all processes have the same weights; one writes them
        plumbing.write(path, lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {path}")


if __name__ == "__main__":
    main(parse_args())
