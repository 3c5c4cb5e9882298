"""Train a ConvNet or a small GPT with DeepSpeed ZeRO on one or many nodes, on GPUs or CPU processes, without ssh.

Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10
"""

import argparse
import ctypes
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data
from common.models import ConvNet, TinyGPT

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # deepspeed: or it warns
import deepspeed  # noqa: E402
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: E402
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402

PRECISIONS = ("fp32", "bf16", "fp64")  # bf16: weights too, with a master copy in fp32; fp64 is refused
COLUMNS = "epoch,train_loss,test_loss,test_accuracy,samples_per_second,seconds,world_size"
MATTERS = ("zero_optimization", "optimizer", "scheduler", "gradient_accumulation_steps", "gradient_clipping")
GRADIENTS = ("averaged_gradients", "offload_gradient_dict", "grad_partitions_flat_buffer")  # where ZeRO keeps them,
MASTER_COPY = ("fp32_groups", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # and this one


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dataset", choices=data.NAMES, default="digits")
    parser.add_argument("--data-dir", default="data", help="where the files of mnist and fashion_mnist are")
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--scale-lr", action="store_true", help="multiply --lr by the number of processes")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16 may stand in the file as well")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a collective may take")
    parser.add_argument("--output-dir", type=Path, default="output", help="everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--deepspeed_config", type=Path, default="ds_config.json", help="DeepSpeed's settings")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="instead of the file's")
    parser.add_argument("--model", choices=("convnet", "gpt"), default="convnet", help="gpt makes its own data")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed: its own launcher adds this
    args = parser.parse_args()
    check_gpus()
    for name in ("epochs", "batch_size", "timeout"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.precision == "fp64":
        parser.error("--precision fp64 is more than DeepSpeed can do: use fp32 or bf16")
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():  # deepspeed: it would look for MPI
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    processes, gpus = processes_here(), torch.cuda.device_count()
    if 0 < gpus < processes:
        parser.error(f"--nproc-per-node={processes} is more than the {gpus} GPUs of {socket.gethostname()}")
    return args


def processes_here():
    """Return how many processes torchrun, or deepspeed's own launcher, has started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1))


def check_gpus():
    """Refuse to train on CPU where the job has GPUs, which PyTorch cannot use, unless ALLOW_CPU=1 permits it."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus == 0 or torch.cuda.is_available() or os.environ.get("ALLOW_CPU") == "1":
        return
    driver, query = "no nvidia-smi", "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    if shutil.which("nvidia-smi"):
        driver = subprocess.getoutput(query).partition("\n")[0]
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {version}" for name, version in builds.items() if version), "CPUs only")
    problem = f"PyTorch {torch.__version__}, built for {built}, cannot use the {gpus} GPUs of this job"
    remedy = (
        "install a build that can, on such a node: UV_TORCH_BACKEND=auto uv pip install --reinstall torch torchvision"
    )
    remedy += " (or train on the CPUs: ALLOW_CPU=1)"
    fail(f"{problem} (NVIDIA driver: {driver}): {remedy}")


def fail(message):
    """Print one line in argparse's form and end with status 2, at once: other processes may never answer again."""
    print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def end_with_parent():
    """Have Linux end this process when torchrun ends, whatever the cause."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def setup(args):
    """Share out the cores, join the process group, and return rank, world_size and this process's device."""
    end_with_parent()  # torchrun: nothing trains on unseen
    processes, local_rank = processes_here(), int(os.environ["LOCAL_RANK"])
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // processes))  # the default is one thread, or all cores: both are slower
    sys.stdout.reconfigure(line_buffering=True)  # each line reaches the log at once
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if processes == int(os.environ["WORLD_SIZE"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # torchrun: one machine only, so its name need not resolve
    timeout = timedelta(seconds=args.timeout)
    # deepspeed: joined here, so that it need not look for MPI; rank and world size come from torchrun's variables.
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    # deepspeed: no op to compile. It would build one for its inference on CPU here, of no use for training.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(timeout=timeout)  # deepspeed: takes the process group that is there
    return dist.get_rank(), dist.get_world_size(), device


class Asked(dict):
    """A dict that remembers which keys DeepSpeed asks it for: what it never asks for, it does not know."""

    asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return self  # for `key in settings.keys()`


def read_config(args):
    """Return DeepSpeed's settings: the file's, with those of the command line in their place."""
    path, world_size = args.deepspeed_config, int(os.environ["WORLD_SIZE"])
    try:
        config = json.loads(path.read_text(), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as error:
        fail(f"cannot read --deepspeed_config {path} ({error.strerror})")
    except ValueError as error:
        fail(f"{path} is not valid JSON: {error}")
    for key in ("zero_optimization", "bf16", "optimizer"):
        if not isinstance(config, dict) or not isinstance(config.setdefault(key, {}), dict):
            fail(f"{path}: {key} must be an object: {{...}}")
    if args.zero_stage is not None:
        config["zero_optimization"]["stage"] = args.zero_stage
    if args.precision == "bf16":
        config["bf16"]["enabled"] = True
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    try:
        config["optimizer"].setdefault("params", {})["lr"] = args.lr * (world_size if args.scale_lr else 1)
        checked = DeepSpeedConfig(Asked(config))
    except Exception as error:  # deepspeed: pydantic's, its own, or just an assertion
        parts = [f"{key} {config[key]}" for key in ("train_batch_size", "gradient_accumulation_steps") if key in config]
        parts += [f"--batch-size {args.batch_size}", f"{world_size} processes"]
        hint = f" ({', '.join(parts)})" * isinstance(error, AssertionError)
        fail(f"{path}: {' '.join(str(error).split())}{hint}")
    if unknown := sorted(config.keys() - Asked.asked):
        fail(f"{path}: DeepSpeed knows no {', '.join(unknown)}: mend the spelling, or remove it")
    if not checked.optimizer_name:
        fail(f"{path}: optimizer has no type, such as AdamW")
    config["zero_optimization"]["stage"] = int(checked.zero_optimization_stage)
    config["bf16"]["enabled"] = checked.bfloat16_config.enabled
    config["gradient_accumulation_steps"] = checked.gradient_accumulation_steps
    return config


def precision(config):
    """Return the name of what the weights are kept in."""
    return next((name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")), "fp32")


def settings(args, config):
    """Return what a resumed run must not change."""
    names = ("dataset", "model", "batch_size", "lr", "scale_lr", "seed")
    run = {"world_size": int(os.environ["WORLD_SIZE"]), "precision": precision(config)}
    return run | {name: getattr(args, name) for name in names} | {key: config.get(key) for key in MATTERS}


def shards(folder, rank):
    """Return the files that this process has written into a checkpoint."""
    own = [file for pattern in ("zero", "bf16_zero") for file in folder.glob(f"{pattern}_pp_rank_{rank}_*.pt")]
    return own + (list(folder.glob("mp_rank_*.pt")) if rank == 0 else [])


def damage(folder, rank):
    """Return what is wrong with this process's part of a checkpoint (None: nothing)."""
    if not any(folder.glob("*.pt")):
        return f"{folder.name}: rank {rank} sees no files there"
    for file in shards(folder, rank):
        try:
            bad = zipfile.ZipFile(file).testzip()  # torch.load does not notice a flipped bit
        except Exception as error:
            bad = repr(error)
        if bad:
            return f"{file.name}: {bad}"


def lock(folder):
    """Raise BlockingIOError if another run holds this lock; else hold it until this process ends, however it ends."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks: do without
            raise


def read_checkpoint(args, path, current):
    """Return the checkpoint (None: there is none) and what is wrong (None: nothing); the files stay as they are."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        lock(path.parent)
    except BlockingIOError:
        return None, f"another run is writing to --output-dir {path.parent}: wait for its end, or choose another folder"
    except OSError as error:
        return None, f"cannot write to --output-dir {path.parent} ({error.strerror}): choose another folder"
    if not (path / "latest").exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    damaged = None
    try:
        tag = (path / "latest").read_text()
        files = list((path / tag).glob("*.pt"))
        first = next((file for file in shards(path / tag, 0) if "model_states" in file.name), path / tag)
        damaged = damage(path / tag, rank=0)
        state = torch.load(first, map_location="cpu", weights_only=True, mmap=True)
        old, history = state["settings"], state["history"]
        count = {0: 1, 3: 2 * old["world_size"]}.get(old["zero_optimization"]["stage"], 1 + old["world_size"])
        damaged = damaged or (len(files) != count and f"{len(files)} files, not {count}")
        changed = [f"{key} {old[key]}" for key in old if old[key] != current.get(key)]
    except PermissionError as error:
        return None, f"cannot read {error.filename} ({error.strerror}): mend that, then continue with --resume"
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        damaged = damaged or repr(error)
    if damaged:
        return None, f"{path} is damaged ({damaged}): move it away to start anew, or put a good copy in its place"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same, or another --output-dir"
    if len(history) > args.epochs:
        return None, f"{path} has {len(history)} epochs behind it: --epochs {args.epochs} must not be less"
    return {"tag": tag, "history": history}, None


def agree(args, path, current, device):
    """Return the checkpoint that all processes have found good, or end them all."""
    found = [read_checkpoint(args, path, current) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=device)  # deepspeed: rank 0 decides; others may not see the file yet
    checkpoint, problem = found[0]
    if checkpoint:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, damage(path / checkpoint["tag"], dist.get_rank()))  # deepspeed: its shards
        if damaged := next(filter(None, problems), None):
            problem = f"{path} is damaged ({damaged}): move it away to start anew, or put a good copy in its place"
    if problem:
        fail(problem)
    return checkpoint


def write(path, save):
    """Write a file whole or not at all: save(file) fills a temporary file, which then takes the place of `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk or a quota full? Mend that, then continue with --resume")


def start_engine(args, model, config):
    """Return DeepSpeed's engine around the model."""
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())  # deepspeed:
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        message = f"{error} {error.__cause__ or ''}".strip().splitlines()[0]
        if "gloo" in message or isinstance(error, dist.DistError):
            raise  # only follows from another process's end
        if "build" in message:
            message += ": install ninja and g++, or build it on a login node (DS_BUILD_CPU_ADAM=1, see README.md)"
        fail(f"{args.deepspeed_config}: {message}")
    # deepspeed: its own process group would wait for 30 minutes.
    dist.set_timeout(timedelta(seconds=args.timeout), engine.data_parallel_group)
    return engine


def tensors(tree):
    """Yield all tensors in nested lists and dicts."""
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


def megabytes(*trees):
    """Return the memory of all tensors in these, counting what they share once."""
    storages = [tensor.untyped_storage() for tensor in tensors(trees)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / 1e6


def gradient_memory(engine):
    """Return the MB of gradients that this process holds between backward and step."""
    weights = [weight.grad for weight in engine.parameters()]
    return megabytes(weights, [getattr(engine.optimizer, name, None) for name in GRADIENTS])


def describe_memory(engine, gradients):
    """Print the MB that a process holds, the most of all processes."""
    weights = [[weight.data, getattr(weight, "ds_tensor", None)] for weight in engine.parameters()]
    master = [getattr(engine.optimizer, name, None) for name in MASTER_COPY]
    state = list(engine.basic_optimizer.state.values())
    most = torch.tensor([megabytes(weights), gradients, megabytes(master), megabytes(state)], device=engine.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        names = ("parameters", "gradients", "master copy", "optimizer state")
        figures = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, most.tolist(), strict=True))
        print(f"MB per process at ZeRO stage {engine.zero_optimization_stage()}: {figures}")


def train_one_epoch(args, model, loader, device):
    """Return the mean training loss, the number of samples (of tokens, with gpt) and the MB of gradients."""
    model.train()
    dtype, memory = next(model.parameters()).dtype, None
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples: read once an epoch, not once a step
    for images, labels in loader:
        for part, targets in zip(images.split(args.batch_size), labels.split(args.batch_size), strict=True):
            part, targets = part.to(device), targets.to(device).flatten()
            logits = model(part.to(dtype) if part.is_floating_point() else part).flatten(0, -2)  # deepspeed:
            loss = F.cross_entropy(logits.float(), targets)
            model.backward(loss)  # deepspeed: averages the gradients over all processes
            memory = gradient_memory(model) if memory is None else memory
            model.step()  # deepspeed: zero_grad too; with gradient accumulation only the last part's is a step
            sums[0] += loss.detach() * len(targets)
            sums[1] += len(targets)
    dist.all_reduce(sums)  # deepspeed:
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, memory


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the mean test loss and the accuracy, 0 to 1, over all processes: each sample counts once."""
    model.eval()
    dtype = next(model.parameters()).dtype
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device).flatten()
        logits = model(images.to(dtype) if images.is_floating_point() else images).flatten(0, -2)
        sums[0] += F.cross_entropy(logits.float(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # deepspeed:
    loss_sum, correct, samples = sums.tolist()
    return loss_sum / samples, correct / samples


def save_epoch(args, engine, history, current):
    """Write metrics.csv and the checkpoint, then print the last epoch's line. All processes."""
    path, tag, rank = args.output_dir / "checkpoint", f"epoch{len(history)}", dist.get_rank()
    if rank == 0:
        rows = "".join(",".join(map(str, row)) + "\n" for row in history)
        write(args.output_dir / "metrics.csv", lambda file: file.write(f"{COLUMNS}\n{rows}".encode()))
        shutil.rmtree(path / tag, ignore_errors=True)  # a run that was killed while it saved may have left some
    try:
        state = {"history": history, "settings": current}
        engine.save_checkpoint(path, tag, state, save_latest=False)  # deepspeed: on all processes, or it hangs
        for file in shards(path / tag, rank):
            with open(file, "rb") as written:
                os.fsync(written.fileno())
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            raise  # only follows from another process's end
        fail(f"cannot write {path} ({error}): is the disk or a quota full? Mend that, then continue with --resume")
    dist.barrier()  # deepspeed: only now is the checkpoint whole
    if rank == 0:
        write(path / "latest", lambda file: file.write(tag.encode()))  # last, so that there always is a whole one
        for old in set(path.glob("epoch*")) - {path / tag}:
            shutil.rmtree(old, ignore_errors=True)
        epoch, train_loss, test_loss, accuracy, speed, seconds, _ = history[-1]
        losses = f"train loss {train_loss:.4f} | test loss {test_loss:.4f} | test acc {accuracy:7.2%}"
        print(f"epoch {epoch:2}/{args.epochs} | {losses} | {speed:5.0f} samples/s | {seconds:6.2f} s")


def whole_weights(engine, model):
    """Return the state dict in fp32, gathered from all processes, on each of them."""
    copies = [itertools.chain(*getattr(engine.optimizer, name, [])) for name in ("fp16_groups", "fp32_groups")]
    master = dict(zip(*copies, strict=False)) if hasattr(engine.optimizer, "fp32_groups") else {}  # stage 0 in bf16
    weights = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        whole = safe_get_full_fp32_param(weight)  # deepspeed: of all shards, on all processes (None: it is whole)
        weights[name] = (master.get(weight, weight) if whole is None else whole).detach().cpu()
    return weights


def load_data(args):
    """Return the training and the test set."""
    if args.model == "convnet":
        return data.load(args.dataset, args.data_dir)
    tokens, _ = data.markov_tokens(150_000)
    return data.Tokens(tokens[:-15_000], 128), data.Tokens(tokens[-15_000:], 128)


def test_batches(args, size, rank, world_size):
    """Return the batches of indices of one process: each sample once, and the same number of batches for all."""
    shard = data.evaluation_shard(size, rank, world_size)  # deepspeed: each sample once
    batches = list(BatchSampler(shard, args.batch_size, drop_last=False))
    longest = -(-len(data.evaluation_shard(size, 0, world_size)) // args.batch_size)
    return batches + [[]] * (longest - len(batches))  # deepspeed: stage 3 gathers weights in each forward of all


def describe(args, config, engine, history):
    """Print what this run is."""
    stage, world_size = engine.zero_optimization_stage(), dist.get_world_size()
    own = f"micro batch {args.batch_size} and learning rate {config['optimizer']['params']['lr']:g}"
    print(f"{args.deepspeed_config}: ZeRO stage {stage}, {precision(config)}; {own} from the command line")
    nodes = world_size // processes_here()
    where = f"{world_size} processes on {nodes} node{'s' * (nodes > 1)}, {dist.get_backend()} on {engine.device.type}"
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
    what = f"ConvNet on {args.dataset}" if args.model == "convnet" else "TinyGPT on a synthetic source"
    print(f"{what}: {where}, {threads}, global batch {engine.train_batch_size()}")
    if history:
        print(f"continuing after epoch {len(history)} of {args.epochs}")


@record  # torchrun: reports the first traceback of all processes
def main(args):
    """Train as one process of the group."""
    try:
        train_set, test_set = load_data(args)
    except data.DataError as error:
        fail(error)
    rank, world_size, device = setup(args)
    config = read_config(args)
    step_size, share = args.batch_size * config["gradient_accumulation_steps"], len(train_set) // world_size
    if step_size > share:
        times = f" times gradient_accumulation_steps {step_size // args.batch_size}" * (step_size > args.batch_size)
        fail(f"--batch-size {args.batch_size}{times} is above the {share} samples of each process")
    current = settings(args, config)
    checkpoint = agree(args, args.output_dir / "checkpoint", current, device)

    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # deepspeed: equal parts
    loader = DataLoader(train_set, sampler=BatchSampler(sampler, step_size, drop_last=True), batch_size=None)
    batches = test_batches(args, len(test_set), rank, world_size)
    test_loader = DataLoader(test_set, sampler=batches, batch_size=None)
    torch.manual_seed(args.seed)
    model = ConvNet() if args.model == "convnet" else TinyGPT()
    engine = start_engine(args, model, config)  # deepspeed: to its device and precision, with the file's optimizer
    history = []
    if checkpoint:
        engine.load_checkpoint(args.output_dir / "checkpoint", checkpoint["tag"])  # deepspeed: each process its shard
        history = checkpoint["history"]
    if rank == 0:
        describe(args, config, engine, history)
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)  # deepspeed: another order each epoch
        start = time.perf_counter()
        train_loss, samples, gradients = train_one_epoch(args, engine, loader, device)
        seconds = time.perf_counter() - start
        if epoch == 0:
            describe_memory(engine, gradients)
        test_loss, accuracy = evaluate(engine, test_loader, device)
        history.append((epoch + 1, train_loss, test_loss, accuracy, samples / seconds, seconds, world_size))
        save_epoch(args, engine, history, current)
    weights = whole_weights(engine, model)
    if rank == 0:
        write(args.output_dir / "model.pt", lambda file: torch.save(weights, file))
        print(f"finished: test acc {history[-1][3]:.2%}, model in {args.output_dir / 'model.pt'}", flush=True)
    dist.barrier()  # deepspeed: the others wait for rank 0; srun would end it --wait seconds after them
    dist.destroy_process_group()  # deepspeed:
    os._exit(0)  # at once: Gloo's threads can make Python's own way out abort


if __name__ == "__main__":
    main(parse_args())
