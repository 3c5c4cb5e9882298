"""Fine-tune a language model that lies in a local folder with LoRA and DistributedDataParallel (DDP), by torchrun.

Once:      python make_model.py                       (writes a small example, model/; yours: --model-dir FOLDER)
Locally:   torchrun --standalone --nproc-per-node=2 train.py
On SLURM:  sbatch run.slurm --epochs 10

LoRA freezes the model and adds adapters to its linear layers: two small matrices each, which alone are trained.
Comments with a tag, such as "ddp:", mark what a script for a single process that trains all weights would not need.
If a process dies or hangs, the others end with an error too; --resume then continues from the last checkpoint.
"""

import argparse
import ctypes
import errno
import fcntl
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from common import data

os.environ["HF_HUB_OFFLINE"] = "1"  # training never downloads: compute nodes seldom have internet
try:
    import peft
    import transformers
    from safetensors import SafetensorError
except ImportError as error:
    argparse.ArgumentParser().exit(2, f"train.py: error: {error}: pip install -r requirements.txt\n")

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of what is trained; bf16: autocast
stop_requested = torch.zeros(1)  # preemption: 1 after SIGUSR1 or SIGTERM, which ask this process to stop


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
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate; 1e-4 is usual for a pretrained model")
    parser.add_argument("--scale-lr", choices=("linear", "sqrt"), help="multiply --lr by the processes, or their root")
    parser.add_argument("--warmup-steps", type=int, default=0, help="first steps of the whole run, in which --lr rises")
    parser.add_argument("--seed", type=int, default=0, help="seed for initial adapters, shuffling and dropout")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="bf16: mixed precision; fp64: for tests")
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for other processes before giving up")
    parser.add_argument("--output-dir", type=Path, default="output", help="folder for everything the run writes")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also save every STEPS steps of an epoch")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more computing")
    parser.add_argument("--max-grad-norm", type=float, help="clip the norm of the gradients to this value")
    args = parser.parse_args()
    args.processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun: number of processes on this node
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))  # torchrun: number of processes on all nodes
    check_args(parser, args)
    return args


def setup(args):
    """Set the number of threads, join the process group, and return this process's device."""
    prepare_process(args)
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun: this process's number on its node
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // args.processes))  # by default each process would use all cores: slower
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=args.timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # preemption: Gloo for the votes below
    dist.init_process_group(backend, timeout=timeout)  # torchrun: MASTER_ADDR, RANK and so on are set
    return device


def train_one_epoch(args, ddp_model, train_loader, optimizer, device, history, position):
    """Return the mean training loss and the number of samples, both over all processes, and the time in seconds."""
    ddp_model.train()
    start = time.perf_counter() - position["seconds"]
    sums = position["sums"]  # loss, samples; the same tensor, so this updates position
    per_epoch = position["step"] + len(train_loader) // args.gradient_accumulation_steps  # steps of a whole epoch
    first = position["step"] * args.gradient_accumulation_steps + 1
    for number, (tokens, targets) in enumerate(train_loader, first):
        is_last = number % args.gradient_accumulation_steps == 0  # accumulation: this micro-batch completes a step
        if is_last:
            vote, voting = start_vote()  # preemption: if one process got a signal, all stop after this step
        # Dropout: new in each micro-batch and process, and the same after a resume.
        torch.manual_seed(args.seed + (len(history) * 10**6 + number) * args.world_size + dist.get_rank())
        tokens, targets = tokens.to(device), targets.to(device)
        ddp_model.require_backward_grad_sync = is_last  # accumulation: else gradients are not averaged yet
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = ddp_model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).to(DTYPES[args.precision]), targets.flatten())
        # ddp: averages the gradients, if the step is complete. lora: those of the adapters; the others have none
        (loss / args.gradient_accumulation_steps).backward()
        sums[0] += loss.detach() * len(targets)
        sums[1] += len(targets)
        if not is_last:
            continue
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), args.max_grad_norm)
        step = len(history) * per_epoch + position["step"]  # of the whole run
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate(args, step)
        optimizer.step()
        optimizer.zero_grad()
        position["step"] += 1
        voting.wait()
        if vote or (args.checkpoint_every and position["step"] % args.checkpoint_every == 0):
            position["seconds"] = time.perf_counter() - start
            save_checkpoint(args, ddp_model.module, optimizer, history, position)
        if vote:
            print_usage(history)
            shut_down(f"stopped by a signal after step {position['step']} of epoch {len(history) + 1}: use --resume")
    dist.all_reduce(sums)  # ddp: sum over all processes
    loss_sum, samples = sums.tolist()
    return loss_sum / samples, samples, time.perf_counter() - start


def learning_rate(args, step):
    """Return the learning rate of a step, counted from 0 over the whole run: --lr, scaled, after a linear warm-up."""
    factor = {"linear": args.world_size, "sqrt": args.world_size**0.5}.get(args.scale_lr, 1)
    return args.lr * factor * min(1, (step + 1) / (args.warmup_steps + 1))


@torch.no_grad()
def evaluate(args, model, test_loader, device):
    """Return the mean test loss of a token over the samples of all processes, and the perplexity, which it gives."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    for tokens, targets in test_loader:
        tokens, targets = tokens.to(device), targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(tokens, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1).to(DTYPES[args.precision]), targets.flatten(), reduction="none")
        sums[0] += losses.double().sum()
        sums[1] += targets.numel()
    dist.all_reduce(sums)  # ddp: sum over all processes; the mean of their perplexities would be another number
    loss_sum, count = sums.tolist()
    return {"test_loss": loss_sum / count, "perplexity": math.exp(loss_sum / count)}


def add_adapters(args, model):
    """Return the model with adapters, W x becoming W x + (alpha / rank) B A x; only A and B are trained."""
    config = peft.LoraConfig(
        r=args.lora_rank,  # lora: A has so many rows and B so many columns
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=target_modules(args, model),
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(args.seed)  # lora: A is random; B is 0, so that training starts from the model as it was
    return peft.get_peft_model(model, config)  # lora: the model's own weights no longer get gradients


@record  # torchrun: reports the traceback of the process that failed first
def main(args):
    """Train as one process of args.world_size."""
    tokenizer, train_set, test_set = load_data(args)
    device, rank = setup(args), dist.get_rank()
    model = load_model(args)
    checkpoint = broadcast_checkpoint(args, device)

    # Data: a batch is read by indexing the data set with a list of indices, therefore batch_size=None.
    # ddp: shuffled shards of equal length, so that all processes take the same number of steps
    sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
    # ddp: each test sample exactly once; a DistributedSampler would repeat some to make the shards equally long
    shard = range(rank, len(test_set), args.world_size)
    test_loader = DataLoader(test_set, sampler=BatchSampler(shard, args.batch_size, drop_last=False), batch_size=None)

    # Model, optimizer, and their state if the run is resumed.
    model = (model if args.full else add_adapters(args, model)).to(device)
    optimizer = torch.optim.AdamW(trained_weights(model).values(), args.lr)  # lora: its state, too, is small
    history = checkpoint["history"] if checkpoint else []  # one dict per epoch: the rows of metrics.csv
    position = resume_position(checkpoint, device)  # steps, seconds and sums of the current epoch so far
    if checkpoint:
        model.load_state_dict(checkpoint["model"], strict=False)  # lora: the checkpoint has the adapters only
        optimizer.load_state_dict(checkpoint["optimizer"])
    # ddp: shares the weights of `model`, and averages their gradients over all processes in the backward pass
    # lora: only those of the adapters. Rank 0 sends the frozen weights once, here, and buffers, which are constants
    devices = [device.index] if device.type == "cuda" else None
    ddp_model = DistributedDataParallel(model, device_ids=devices, broadcast_buffers=False)
    # For bit-identical results after a resume; the zeros have the shape of the model's input.
    fix_summation_order(ddp_model, torch.zeros(1, args.context, device=device, dtype=torch.long))

    # Train
    print_header(args, device, checkpoint, model)
    for epoch in range(len(history) + 1, args.epochs + 1):
        sampler.set_epoch(epoch - 1)  # ddp: another order in each epoch, the same in all processes
        train_loader = DataLoader(train_set, sampler=remaining_batches(args, sampler, position), batch_size=None)
        train_loss, count, seconds = train_one_epoch(
            args, ddp_model, train_loader, optimizer, device, history, position
        )
        row = {"epoch": epoch, "train_loss": train_loss, **evaluate(args, model, test_loader, device)}
        row |= {"tokens_per_second": count * args.context / seconds, "samples_per_second": count / seconds}
        history.append(row | {"seconds": seconds, "world_size": args.world_size})
        position = start_of_epoch(device)
        save_checkpoint(args, model, optimizer, history, position)  # ddp: all processes call it, rank 0 writes
        print_epoch(args, history[-1])

    # Finish
    saved = save_model(args, model, tokenizer)
    print_usage(history)
    shut_down("finished: test loss {test_loss:.4f}, perplexity {perplexity:.2f}, {0}".format(saved, **history[-1]))


# ---- Below: what makes runs restartable and errors readable. Skip it on a first reading. ----


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    os._exit(2)


def check_args(parser, args):
    """Refuse arguments that cannot work."""
    for name, value in vars(args).items():
        if type(value) is int and value < (least := int(name != "warmup_steps")) and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if not 0 <= args.lr < float("inf"):
        parser.error(f"--lr must be 0 or more, not {args.lr}")
    if args.max_grad_norm is not None and not args.max_grad_norm > 0:
        parser.error(f"--max-grad-norm must be above 0, not {args.max_grad_norm}")
    if not 0 <= args.lora_dropout < 1:
        parser.error(f"--lora-dropout must be from 0 to below 1, not {args.lora_dropout}")
    if not 0 < args.lora_alpha < float("inf"):
        parser.error(f"--lora-alpha must be above 0, not {args.lora_alpha}")
    if args.full and args.merge:
        parser.error("--merge adds adapters to the model, and with --full there are none: leave one of the two out")
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node=2 train.py")
    if 0 < torch.cuda.device_count() < args.processes:
        gpus = f"the {torch.cuda.device_count()} GPUs of {os.uname().nodename}"
        parser.error(f"--nproc-per-node={args.processes} is more than {gpus}")
    check_gpus()


def check_gpus():
    """Refuse to train on the CPU if the job has GPUs that PyTorch cannot use; ALLOW_CPU=1 permits it."""
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if gpus and not torch.cuda.is_available() and os.environ.get("ALLOW_CPU") != "1":
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader").partition("\n")[0]
        fail(
            f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the {gpus} GPUs of this job "
            f"(NVIDIA driver: {driver}). Install a build that can, on a node with GPUs: UV_TORCH_BACKEND=auto "
            "uv pip install --reinstall torch torchvision. To train on the CPU all the same, set ALLOW_CPU=1"
        )


def prepare_process(args):
    """Make this process end when its launcher does; print lines immediately; set up Gloo; silence transformers."""
    keep_memory()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
    sys.stdout.reconfigure(line_buffering=True)
    if args.processes == args.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    # DDP's new name for it is not known before PyTorch 2.15, and peft asks transformers for the old name of a setting.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated|`is_gradient_checkpointing` is deprecated")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for number in (signal.SIGUSR1, signal.SIGTERM):  # preemption: remember the signal until the next vote
        signal.signal(number, lambda *_: stop_requested.fill_(1))


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):  # other C libraries do not have these two settings
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: also blocks of up to 1 GB are kept
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB of them


def load_data(args):
    """Return tokenizer, training set and test set, the text's last tenth; fail if there is too little of it."""
    if not (args.model_dir / "config.json").exists():
        fail(
            f"--model-dir {args.model_dir}: there is no config.json. `python make_model.py` writes a small model; a "
            "real one is downloaded on a login node: hf download NAME --local-dir FOLDER"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_dir, local_files_only=True)
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"--model-dir {args.model_dir}: its tokenizer cannot be loaded ({one_line(error)}): copy it there again")
    try:
        text = args.text_file.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"--text-file {args.text_file}: {error.strerror}")
    except UnicodeDecodeError as error:
        fail(f"--text-file {args.text_file} is not UTF-8 ({error}): convert it with iconv -f ENCODING -t UTF-8")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    args.text = zlib.crc32(tokens.numpy())  # a checkpoint is for these
    args.last_token = max(tokens.tolist(), default=0)
    count = (len(tokens) - 1) // args.context  # of samples
    split = count - max(1, count // 10)
    step_size = args.batch_size * args.gradient_accumulation_steps
    if step_size > (share := split // args.world_size):
        fail(
            f"--text-file {args.text_file} has {len(tokens)} tokens, which make {max(0, share)} samples of --context "
            f"{args.context} for each process, less than --batch-size times --gradient-accumulation-steps, {step_size}"
        )
    split *= args.context
    return tokenizer, data.Tokens(tokens[: split + 1], args.context), data.Tokens(tokens[split:], args.context)


def load_model(args):
    """Return the language model in --model-dir; fail if it is incomplete, damaged, or too small for the tokens."""
    # lora: frozen weights need no more than bf16; what is trained stays in fp32, or small steps would be rounded away
    dtype = torch.bfloat16 if args.precision == "bf16" and not args.full else DTYPES[args.precision]
    try:
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            args.model_dir, local_files_only=True, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # depends on which file is missing or damaged
        fail(f"--model-dir {args.model_dir}: its model cannot be loaded ({one_line(error)}): copy it there again")
    if loaded["missing_keys"]:  # these would be random
        fail(f"--model-dir {args.model_dir} has no weights for {', '.join(sorted(loaded['missing_keys'])[:3])}")
    most = getattr(model.config, "max_position_embeddings", None)
    if most and args.context > most:
        fail(f"--context {args.context} is more than the {most} tokens that the model in {args.model_dir} can take")
    if args.last_token >= (known := model.get_input_embeddings().num_embeddings):
        fail(f"--model-dir {args.model_dir}: its tokenizer has token {args.last_token}, its model only {known} tokens")
    args.model = type(model).__name__
    args.base, args.size = fingerprint(model), sum(weight.numel() for weight in model.parameters())
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def fingerprint(model):
    """Return a checksum of all weights: a checkpoint of adapters is worth nothing with another base model."""
    checksum = 0
    for weight in model.parameters():
        checksum = zlib.crc32(weight.detach().flatten().contiguous().view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def one_line(error):
    """Return the first line of an error's message, which may have many."""
    return str(error).strip().partition("\n")[0] or repr(error)


def linear_layers(model):
    """Return the names of the model's linear layers, which --target-modules chooses from."""
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)  # the second is GPT-2's
    return sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, linear)})


def target_modules(args, model):
    """Return --target-modules as peft expects it; fail if the model has no such linear layer."""
    if args.target_modules == "all-linear":
        return args.target_modules
    names, known = args.target_modules.split(","), linear_layers(model)
    if unknown := sorted(set(names) - set(known)):
        fail(f"--target-modules {', '.join(unknown)}: the model in {args.model_dir} has {', '.join(known)}")
    return names


def trained_weights(model):
    """Return the weights that are trained, by their names."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def fix_summation_order(ddp_model, zeros):
    """Do one backward pass, after which DDP settles in which order it sums gradients for the rest of the run.

    A resumed run then sums in the same order as an uninterrupted one, and its results are bit-identical.
    """
    ddp_model.eval()  # leaves the statistics of BatchNorm layers unchanged
    ddp_model(zeros, use_cache=False).logits.sum().backward()
    ddp_model.zero_grad()
    ddp_model.train()


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    names = ("world_size", "base", "text", "context", "batch_size", "gradient_accumulation_steps", "seed", "precision")
    names += ("full", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "max_grad_norm")
    return {name: getattr(args, name) for name in names}


def lock(folder):
    """Lock the folder until this process exits or is killed; return an error message or None."""
    try:  # the file stays open on purpose: closing it would release the lock
        folder.mkdir(parents=True, exist_ok=True)
        fcntl.lockf(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"another run is writing to --output-dir {folder}: wait for its end, or choose another folder"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # without locks there, continue
            return f"cannot write to --output-dir {folder} ({error.strerror}): choose another folder"


def read_checkpoint(args):
    """Lock the output folder; return (checkpoint or None, error message or None). Never modifies a checkpoint."""
    path = args.output_dir / "checkpoint.pt"
    if error := lock(args.output_dir):
        return None, error
    if not path.exists():
        return None, None
    if not args.resume:
        return None, f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        damage = zipfile.ZipFile(path).testzip()  # torch.load does not notice a flipped bit
        epochs, settings = len(checkpoint["history"]), resume_settings(args)
        changed = [f"{name} {old}" for name, old in checkpoint["settings"].items() if old != settings[name]]
    except OSError as error:
        return None, f"cannot read {path} ({error.strerror}): correct that, then continue with --resume"
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        damage = repr(error)
    if damage:
        return None, f"{path} is damaged ({damage}): move it away to start over, or restore a good copy"
    if changed:
        return None, f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return None, f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint, None


def broadcast_checkpoint(args, device):
    """Return the checkpoint that rank 0 reads and sends to all, or None; other nodes may not see the file yet."""
    found = [read_checkpoint(args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=device)
    checkpoint, error = found[0]
    if error:
        fail(error)
    return checkpoint


def write(path, save):
    """Write a file atomically: save(file) writes a temporary file, which is then renamed to `path`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")


def write_folder(folder, save):
    """Write a folder: save(folder) writes a temporary one, which then takes the place of `folder`, complete."""
    temporary, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    try:
        save(temporary)
        for path in filter(Path.is_file, temporary.rglob("*")):
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        fail(f"cannot write {folder} ({error}): is the disk full, or your quota? Free some space, then use --resume")
    shutil.rmtree(old, ignore_errors=True)


def start_vote():
    """Ask all processes whether one of them got a signal; return the answer, and the request to wait for."""
    vote = stop_requested.clone()
    return vote, dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)


def remaining_batches(args, sampler, position):
    """Return the batches of indices that an epoch still has after position["step"] complete steps."""
    batches = list(BatchSampler(sampler, args.batch_size, drop_last=True))
    per_step = args.gradient_accumulation_steps
    return batches[position["step"] * per_step : len(batches) // per_step * per_step]  # only complete steps


def start_of_epoch(device):
    """Return the position of a process before the first step of an epoch."""
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples: of this process, in this epoch so far
    return {"step": 0, "seconds": 0.0, "sums": sums}


def resume_position(checkpoint, device):
    """Return the position of a process at the start of this run."""
    position = start_of_epoch(device)
    if checkpoint:
        position |= {name: checkpoint["position"][name] for name in ("step", "seconds")}
        if dist.get_rank() == 0:  # the saved sums are those of all processes together
            position["sums"] += checkpoint["position"]["sums"].to(device)
    return position


def save_checkpoint(args, model, optimizer, history, position):
    """Sum position["sums"] over all processes, which must all call this; on rank 0 write metrics.csv and checkpoint."""
    sums = position["sums"].clone()
    dist.all_reduce(sums)
    if dist.get_rank() > 0:
        return
    rows = [history[0].keys(), *(row.values() for row in history)] if history else []
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))
    weights = {name: weight.detach() for name, weight in trained_weights(model).items()}  # lora: the adapters
    state = {"model": weights, "optimizer": optimizer.state_dict(), "history": history}
    state |= {"position": position | {"sums": sums}, "settings": resume_settings(args)}
    write(args.output_dir / "checkpoint.pt", lambda file: torch.save(state, file))


def save_model(args, model, tokenizer):
    """On rank 0 write what was trained: the adapters, or with --full the model; return on all where that is.

    With --merge also write a model with the adapters added to it, which needs no peft.
    """
    name, what = ("model", "model") if args.full else ("adapter", "adapters")
    saved = f"{what} in {args.output_dir / name}"
    if dist.get_rank() > 0:
        return saved

    def save(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(args.output_dir / name, save if args.full else model.save_pretrained)
    if args.merge:
        model = model.merge_and_unload()  # lora: W + (alpha / rank) B A takes the place of W
        write_folder(args.output_dir / "merged", save)
    return saved


def print_header(args, device, checkpoint, model):
    """Print what this run is, which ranks are on which node and, if it is resumed, where it continues."""
    hosts = [None] * args.world_size
    dist.all_gather_object(hosts, os.uname().nodename)
    if dist.get_rank() > 0:
        return
    threads = f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} each"
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    where = f"{args.world_size} processes on {nodes} node{'s' if nodes > 1 else ''}, {backend} on {device.type}"
    batch = args.world_size * args.batch_size * args.gradient_accumulation_steps
    print(f"{args.model} in {args.model_dir} on {args.text_file}: {where}, {threads}, global batch {batch}")
    count = sum(weight.numel() for weight in trained_weights(model).values())
    megabytes = DTYPES[args.precision].itemsize / 1e6  # of the gradient of one weight
    full = f", {count / args.size:.2%} of the {args.size * megabytes:.3f} MB of --full" if not args.full else ""
    print(f"{args.size:,} weights, {count:,} are trained: a step exchanges {count * megabytes:.3f} MB{full}")
    ranks = {host: [str(rank) for rank, name in enumerate(hosts) if name == host] for host in hosts}
    print("ranks:", "; ".join(f"{host} {', '.join(numbers)}" for host, numbers in ranks.items()))
    if checkpoint:
        step = checkpoint["position"]["step"]
        within = f", step {step}" if step else ""
        print(f"continuing after epoch {len(checkpoint['history'])} of {args.epochs}{within}")


def print_epoch(args, row):
    """Print the metrics of an epoch in one line, on rank 0."""
    if dist.get_rank() > 0:
        return
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['tokens_per_second']:5.0f} tokens/s | {row['seconds']:6.2f} s"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | perplexity {row['perplexity']:.2f} | {speed}")


def print_usage(history):
    """Print on rank 0 what all processes together have used: what `seff` says, which not every cluster has."""
    busy = sum(os.times()[:4])  # time of a core, in seconds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    used = [None] * dist.get_world_size()
    dist.all_gather_object(used, (busy, memory, torch.cuda.max_memory_allocated() / 2**20))
    if dist.get_rank() > 0:
        return
    busy, memory, gpu = zip(*used, strict=True)
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * int(os.environ.get("SLURM_NTASKS", 1))
    cores = cores or len(os.sched_getaffinity(0))
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    text = f"used: {seconds:.0f} s, {sum(busy) / seconds / cores:.0%} of {cores} cores, {max(memory):.0f} MB a process"
    text += f", {max(gpu):.0f} MB of a GPU" * (max(gpu) > 0)
    if history:
        samples = sum(row["samples_per_second"] * row["seconds"] for row in history)
        text += f", {samples / sum(row['seconds'] for row in history):.0f} samples/s"
    print(text)


def shut_down(message):
    """Wait for all processes, print the message on rank 0, leave the process group, and end this process."""
    dist.barrier()  # ddp: rank 0 may still be writing; srun --wait ends it some time after the others
    if dist.get_rank() == 0:
        print(message)
    dist.destroy_process_group()  # ddp: disconnect
    os._exit(0)  # skip interpreter shutdown, during which Gloo's threads can abort the process


if __name__ == "__main__":
    main(parse_args())
