"""How Horovod joins the processes, and how Lightning uses Horovod and writes checkpoints."""

import os
from pathlib import Path
from types import SimpleNamespace

import horovod.torch as hvd
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy

import longrun


def gather(values, value):
    """Fill the list with the values of all ranks, for longrun.py."""
    values[:] = hvd.allgather_object(value, name="gather")  # horovod: all must use the same name


def setup(args):
    """Join the other processes; return this process's rank and the world size."""
    # horovod: sends each gradient alone; with fusion the order of a sum depends on the timing
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")  # ms between two rounds of sending gradients
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(10 * args.timeout)
    longrun.alive(args.timeout)  # joining the others takes at most --timeout
    hvd.init()  # horovod: waits for all processes and connects them
    rank, world_size = hvd.rank(), hvd.size()
    longrun.prepare(args, rank, world_size, gather, hvd.shutdown)
    if world_size == 1 and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        longrun.fail("srun's tasks do not know of each other: use srun --mpi=pmix, see README.md")
    if "OMP_NUM_THREADS" not in os.environ:  # CPU threads of a process: its share of the cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    args.global_batch = args.global_batch or args.batch_size * world_size
    args.batch_size, rest = divmod(args.global_batch, world_size)
    if rest or not args.batch_size:
        longrun.fail(f"--global-batch {args.global_batch} must be a multiple of {world_size}")
    args.lr *= {"linear": world_size, "sqrt": world_size**0.5, None: 1}[args.scale_lr]
    return rank, world_size


class HorovodStrategy(ParallelStrategy):
    """What the Trainer needs in order to train with several processes; longrun.py writes files."""

    global_rank = property(lambda self: hvd.rank())
    local_rank = property(lambda self: hvd.local_rank())
    node_rank = property(lambda self: hvd.cross_rank())
    world_size = property(lambda self: hvd.size())
    root_device = torch.device("cpu")
    is_distributed = True  # lightning: otherwise self.log(..., sync_dist=True) has no effect

    def __init__(self):
        # lightning: ignore SLURM_*, and see one process; Horovod connects it with the others
        super().__init__(cluster_environment=LightningEnvironment())

    def setup_environment(self):
        rank_zero_only.rank = hvd.rank()  # lightning: which process logs
        super().setup_environment()

    def model_to_device(self):
        self.model.to(self.root_device)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        operations = {"sum": hvd.Sum, "mean": hvd.Average, "avg": hvd.Average}
        operations |= {"min": hvd.Min, "max": hvd.Max}
        # reduce_op is a word such as "sum", or torch.distributed's ReduceOp.SUM.
        return hvd.allreduce(tensor, op=operations[str(reduce_op).lower().rpartition(".")[2]])

    def all_gather(self, tensor, group=None, sync_grads=False):
        return hvd.allgather(tensor.unsqueeze(0))  # (world_size, ...)

    def broadcast(self, obj, src=0):
        return hvd.broadcast_object(obj, src, name="object")  # horovod: all must use the same name

    def barrier(self, name=None):
        hvd.barrier()

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        """Write the Trainer's checkpoint, a dict; the Trainer calls this in all processes."""
        if Path(filepath).name != "checkpoint.pt":  # of a ModelCheckpoint that you have added
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        module = self.lightning_module
        longrun.check([w for w in module.parameters() if w.requires_grad], module.progress)
        # longrun.py calls state_dict() of each part; here the parts already are state dicts
        parts = {n: SimpleNamespace(state_dict=lambda part=p: part) for n, p in checkpoint.items()}
        return longrun.save_checkpoint(module.args, parts, module.progress)
