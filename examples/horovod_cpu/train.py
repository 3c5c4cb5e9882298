"""Train a ConvNet on CPU nodes with Horovod, over MPI or Gloo.

Locally:   horovodrun --gloo -np 2 python train.py
On SLURM:  sbatch run.slurm --epochs 10

Comments that begin with "horovod:" mark what a script for a single process would not need. What else a long job on a
cluster needs, such as checkpoints that survive a kill and errors that say what to do, is in plumbing.py.
train_lm.py imports functions from this file.
"""

import argparse
import os
import time
from itertools import islice
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import plumbing
from common import data
from common.models import ConvNet

# The dtype of weights and inputs. With bf16 the weights stay in fp32, and autocast computes in bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="folder with the files of mnist and fashion_mnist")
    parser.add_argument("--epochs", type=int, default=5, help="total number, including those before a resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per batch of each process")
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, in parts up to --batch-size")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the number of processes")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps in which the learning rate rises")
    names = ("--gradient-accumulation-steps", "--batches-per-allreduce")  # the second is used in Horovod's examples
    parser.add_argument(*names, type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as 16-bit numbers")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial weights and shuffling")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a step, or the start, may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--keep-epochs", type=int, metavar="N", help="keep N epochs' checkpoints, and the best")
    args = parser.parse_args()
    plumbing.check_args(parser, args)
    return args


def setup(args):
    """Join the other processes, and return this process's device."""
    hvd.init()  # horovod: waits for all processes and connects them
    args.world_size = hvd.size()
    plumbing.check_connected(args)
    plumbing.share_batch(args)
    cores = len(os.sched_getaffinity(0)) // hvd.local_size()  # horovod: the processes of a node share its cores
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) == args.world_size:
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", cores))  # srun has given each process its own
    # By default each process would use all cores: slower.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, cores))
    return torch.device("cpu")


def distribute(args, model, optimizer):
    """Return an optimizer that averages the gradients over all processes before it takes a step."""
    return hvd.DistributedOptimizer(  # horovod: wrap
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=args.gradient_accumulation_steps,
        op=hvd.Average,
    )


def train_one_epoch(args, model, train_loader, optimizer, device, progress):
    """Train to the end of an epoch; return mean loss, samples, both over all processes, and seconds."""
    model.train()
    start = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples
    batches = args.steps_per_epoch * args.gradient_accumulation_steps  # accumulation: only whole steps
    for number, (images, labels) in enumerate(islice(train_loader, batches), 1):
        plumbing.restart_watchdog(args)
        completes_step = number % args.gradient_accumulation_steps == 0  # accumulation: of so many batches
        images = images.to(device, DTYPES[args.precision])
        labels = labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        loss = F.cross_entropy(logits.to(images.dtype), labels)
        # horovod: the last backward pass of a step starts to average the gradients over all processes
        (loss / args.gradient_accumulation_steps).backward()
        plumbing.note_loss(train_loader, loss)  # the first that is not finite: `check_results` then stops the run
        sums[0] += loss.detach() * len(labels)  # on the device: no step waits for it
        sums[1] += len(labels)
        if not completes_step:
            continue
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, progress["step"])
        optimizer.step()  # horovod: first waits until all gradients are averaged
        optimizer.zero_grad()
        progress["step"] += 1
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean test loss and the accuracy, from 0 to 1, over the samples of all processes."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in test_loader:
        plumbing.restart_watchdog(args)
        images = images.to(device, DTYPES[args.precision])
        labels = labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.to(images.dtype), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    sums = hvd.allreduce(sums, op=hvd.Sum)  # horovod: sum over all processes
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_checkpoint(args, model, optimizer, progress):
    """Save model, optimizer and `progress`, from which --resume continues; all processes call this."""
    plumbing.check_results(args, model, progress)  # stops the run if a loss is not finite, and the like
    if hvd.rank() == 0:  # horovod: all processes have the same weights; one writes them
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}
        plumbing.write_checkpoint(args, state)


def resume(args, model, optimizer):
    """Load the checkpoint, if there is one, and give all processes the state of rank 0; return how far the run is."""
    progress = {"step": 0, "history": []}  # steps of the whole run; one row of metrics.csv for each complete epoch
    found = plumbing.read_checkpoint(args, model) if hvd.rank() == 0 else None
    answer = found["progress"] if isinstance(found, dict) else found  # else None, or an error message
    answer = plumbing.accept(hvd.broadcast_object(answer, name="progress"))  # horovod: rank 0 tells all processes
    if answer:
        progress = answer
        if hvd.rank() == 0:
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
        # Only after a resume, and before the weights: where an optimizer has no state, this takes a step to make it.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # horovod: send rank 0's state to all
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # horovod: send rank 0's weights to all
    return progress


def main(args):
    """Train as one of the processes that horovodrun, mpirun or srun has started."""
    plumbing.prepare_process(args)
    device, rank = setup(args), hvd.rank()

    # Data (yours: see README.md): a list of indices reads a whole batch at once, therefore batch_size=None.
    try:
        train_set, test_set = data.load(args.dataset, args.data_dir)
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

    # Model (yours: see README.md) and optimizer, and their state if the run is resumed.
    torch.manual_seed(args.seed)
    model = ConvNet().to(device, DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    optimizer = distribute(args, model, optimizer)
    progress = resume(args, model, optimizer)

    # Train.
    plumbing.print_header(args, f"{type(model).__name__} on {args.data_name}", device, progress)
    for epoch in range(len(progress["history"]), args.epochs):
        sampler.set_epoch(epoch)  # horovod: another order in each epoch, the same in all processes
        train_loss, samples, seconds = train_one_epoch(args, model, train_loader, optimizer, device, progress)
        test_loss, test_accuracy = evaluate(args, model, test_loader, device)
        row = {"epoch": epoch + 1, "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy}
        row |= {"samples_per_second": samples / seconds, "seconds": seconds, "world_size": args.world_size}
        progress["history"].append(row)
        save_checkpoint(args, model, optimizer, progress)
        plumbing.print_epoch(args, progress)

    # Finish.
    if rank == 0:
        plumbing.write(args.output_dir / "model.pt", lambda file: torch.save(model.cpu().state_dict(), file))
    accuracy = progress["history"][-1]["test_accuracy"]
    plumbing.finish(args, progress, f"finished: test acc {accuracy:.2%}, model in {args.output_dir / 'model.pt'}")


if __name__ == "__main__":
    main(parse_args())
