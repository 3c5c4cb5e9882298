"""What train.py calls to survive a real cluster: locks, atomic files, refusals, a record of the run.

Without these calls it still trains. A function that other examples have, too, has the same text, or a comment says why.
"""

import atexit
import contextlib
import ctypes
import errno
import fcntl
import io
import itertools
import json
import multiprocessing.util
import os
import pickle
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
import zlib
from argparse import ArgumentTypeError
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group as disconnect
from torch.distributed import get_rank as rank

import checks
import hangs
from checks import note_loss  # noqa: F401 (train.py calls it)

CHECKPOINT = "checkpoint.pt"  # in --output-dir
IMPORTED_BY = os.getpid()


def fail(message):
    """Print an error in the style of argparse and exit immediately: waiting for other processes could hang."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    end(2)


def end(status):
    """End this process at once, and remove what torchrun has made for it in the temporary folder, if that is empty."""
    folders = list(Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents)[:4]
    with contextlib.suppress(OSError):  # a report, or another process's folder, is in it
        for folder in folders:
            folder.rmdir()
    os._exit(status)  # not by the interpreter's shutdown, during which Gloo's threads can abort the process


def check_numbers(parser, args):
    """Refuse numbers that cannot work."""
    # Seeds: what each generator takes, NumPy's and Keras's, too. Timeouts: 23 days; milliseconds of 32 bits end there.
    largest = {"seed": 2**32 - 1, "timeout": 2_000_000, "workers": max(64, os.cpu_count())}
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        flag, most = f"--{name.replace('_', '-')}", largest.get(name, 2**31 - 1 if type(value) is int else float("inf"))
        least = 0 if type(value) is float or name in ("warmup_steps", "workers", "zero_stage", "seed") else 1
        if not least <= value < float("inf"):
            parser.error(f"{flag} must be {least} or more, not {value}")
        if value > most:
            parser.error(f"{flag} must be at most {most}, not {value}")
    if getattr(args, "max_grad_norm", None) == 0:
        parser.error("--max-grad-norm must be above 0, not 0: leave it out, and gradients are not clipped")


def check_args(parser, args):
    """Refuse numbers that cannot work, and more processes than GPUs."""
    check_numbers(parser, args)
    if 0 < (gpus := torch.cuda.device_count()) < getattr(args, "processes", 1):
        parser.error(f"{args.processes} processes on {os.uname().nodename}, which has {gpus} GPUs: start one for each")


def check_environment():
    """Refuse variables of the shell that lead to another program or network; drop numbers that are none."""
    folder = Path(getattr(sys.modules["__main__"], "__file__", "/-")).resolve().parent  # of train.py
    names = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
    for name in set(names) - sys.stdlib_module_names:
        file = getattr(sys.modules.get(name), "__file__", None) or folder / "not imported"
        if folder not in (*Path(file).absolute().parents, *Path(file).resolve().parents):
            fail(f"{name} is imported from {file}, not from {folder}: unset PYTHONPATH and PYTHONSAFEPATH")
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, wanted.split(",")):
        if not has_address(name):
            others = " ".join(other for _, other in socket.if_nameindex() if has_address(other))
            found = f"{os.uname().nodename} has no interface {name} with an address; it has: {others}"
            fail(f"GLOO_SOCKET_IFNAME={wanted}: {found}; name one of these, or unset the variable")
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):  # such as "8,1", "auto" or nothing at all
        first = os.environ.pop(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            os.environ[name] = first


def has_address(interface):
    """Return whether this node has a network interface of that name, with an address of IPv4 or IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        fcntl.ioctl(any_socket, 0x8915, interface.encode().ljust(40, b"\0")[:40])  # SIOCGIFADDR: fails without one
        return True
    with contextlib.suppress(OSError):  # where there is no IPv6
        return interface in Path("/proc/net/if_inet6").read_text().split()
    return False


def keep_printing():
    """Print lines immediately, and go on where they cannot be written: a full disk, or a reader that has gone."""

    class Log(io.FileIO):
        lost = False

        def write(self, data):
            try:
                return super().write(data)
            except OSError as error:
                if not self.lost:
                    self.lost = True
                    said = f"{Path(sys.argv[0]).name}: standard output cannot be written ({error.strerror}): "
                    with contextlib.suppress(OSError):  # at once: what a buffer keeps would fail at the end again
                        os.write(2, f"{said}the run goes on without it\n".encode())
                return len(data)

    if sys.stdout:  # not if it was closed: then its number may be that of another file
        log = io.BufferedWriter(Log(sys.stdout.fileno(), "w", closefd=False))
        # backslashreplace: a locale without umlauts would end the run at a path that has some
        sys.stdout = io.TextIOWrapper(log, sys.stdout.encoding, "backslashreplace", line_buffering=True)


def prepare_process(args):
    """Make this process end when its launcher does, print lines immediately, and set up Gloo."""
    hangs.listen()
    hangs.watch_start(args)
    explain_errors()
    keep_memory()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its launcher
    keep_printing()
    check_environment()
    if args.processes == args.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works even if the host name cannot be resolved
    # DDP warns about the strides of gradients. It is harmless: where a dimension is 1, both memory layouts are equal.
    warnings.filterwarnings("ignore", "Grad strides")


def explain_errors():
    """Have an exception that says too little, such as one of a label that is no class, end this process with a line."""

    def hook(kind, error, trace):
        if not (message := checks.explain(error)):
            return sys.__excepthook__(kind, error, trace)
        with contextlib.suppress(OSError):  # what torchrun would print, a traceback
            os.unlink(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        sys.stderr = sys.__stderr__  # torch.distributed collects what a hook prints, to put the rank before each line
        fail(message)

    sys.excepthook = hook


def keep_memory():
    """Have glibc keep the memory of freed tensors for the next step: returning it each time costs up to a fifth."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return  # another C library, which does not have these two settings
    # M_MMAP_THRESHOLD, the largest block that is kept: 1 GB, or 32 MiB, the most that glibc accepts up to 2.34 (RHEL 9)
    if libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25):
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB are kept


def check_gpu(device):
    """Refuse GPUs on which PyTorch cannot compute, and to train on the CPU of a job with GPUs, unless ALLOW_CPU=1."""
    in_vain = (os.environ.get("SLURM_GPUS_ON_NODE") or "0") != "0" and os.environ.get("ALLOW_CPU") != "1"
    if device.type == "cpu" and not in_vain:
        return
    try:
        # A GPU that is too old is found, but there are no kernels for it.
        torch.ones(1, device="cuda" if device.type == "cpu" else device).sum().item()
    except (RuntimeError, AssertionError) as error:
        driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader").partition("\n")[0]
        build = f"PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the GPUs of this job"
        row = 'the row "no GPU, AMD, V100, an NVIDIA driver below 580" of README.md says what to install'
        cpu = "; to train on the CPU all the same, set ALLOW_CPU=1" * (device.type == "cpu")
        fail(f"{build} (NVIDIA driver: {driver}; {str(error).partition(chr(10))[0]}): {row}{cpu}")


def share_batch(args):
    """Have each process take its share of --global-batch; without that, set it to what the other settings make it.

    A process takes its share in as few batches of at most --batch-size as divide it, where the example can accumulate
    gradients, and otherwise in one. Batches of less than half of --batch-size are refused: they take far longer.
    """
    processes, accumulates = getattr(args, "groups", args.world_size), hasattr(args, "gradient_accumulation_steps")
    if args.global_batch is None:
        args.global_batch = processes * args.batch_size * (args.gradient_accumulation_steps if accumulates else 1)
        return
    share, rest = divmod(args.global_batch, processes)

    def fits(number):
        return not accumulates or number_of_parts(number, args.batch_size)

    if rest or not fits(share):
        nearest = next(filter(fits, range(share, 0, -1)), None), next(filter(fits, itertools.count(share + 1)))
        near = "use " + " or ".join(str(number * processes) for number in nearest if number)
        wrong = (
            f"--global-batch {args.global_batch} is no multiple of {processes}, the number of processes that share it"
        )
        if not rest:
            wrong = f"--global-batch {args.global_batch} is {share} samples for each of {processes} processes, and no "
            wrong += f"batches of {-(-args.batch_size // 2)} to {args.batch_size} (--batch-size) divide {share}"
            near += f", or --batch-size {share}"
        fail(f"{wrong}: {near}")
    parts = number_of_parts(share, args.batch_size) if accumulates else 1
    args.batch_size = share // parts
    if accumulates:
        args.gradient_accumulation_steps = parts


def number_of_parts(share, most):
    """Return the least number of equal parts of at most `most`, and of at least half of that, or None without any."""
    most = min(share, most)
    return next((parts for parts in range(-(-share // most), 2 * share // most + 1) if share % parts == 0), None)


def count_steps(args, samples, train_set, test_set):
    """Return the number of optimizer steps that an epoch of so many samples of a process has; refuse 0.

    It also notes what the data are, with which a resumed run is compared.
    """
    accumulated = getattr(args, "gradient_accumulation_steps", 1)
    steps = samples // args.batch_size // accumulated
    if not steps:
        times = f" times {accumulated} (gradient accumulation)" if accumulated > 1 else ""
        fail(f"--batch-size {args.batch_size}{times} is above the {samples} samples of each process")
    if not len(test_set):
        fail(f"{checks.name_of_data(args, train_set)}: there is no sample to test with")
    args.data_name = checks.look_at_data(args, train_set, test_set, rank() == 0)
    return steps


def fix_summation_order(ddp_model, zeros):
    """Do one backward pass, after which DDP settles in which order it sums gradients for the rest of the run.

    A resumed run then sums in the same order as an uninterrupted one, and its results are bit-identical.
    """
    ddp_model.eval()  # leaves the statistics of BatchNorm layers unchanged
    try:
        output = ddp_model(zeros)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError)) or re.search("CUDA|gloo", message):
            raise  # not a matter of the shape
        frames = traceback.extract_tb(error.__traceback__)
        *_, own = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
        where = f"{Path(own.filename).name}, line {own.lineno}: {type(error).__name__}: {message:.200}"
        given = f"{tuple(zeros.shape)}, {zeros.dtype}" if isinstance(zeros, torch.Tensor) else type(zeros).__name__
        wrong = f"the model does not take what train.py gives fix_summation_order, {given} ({where})"
        fail(f"{wrong}: edit that line, so that it is as your model's input")
    output = getattr(output, "logits", output)  # models of transformers return an object
    if message := checks.wrong_labels(output):
        fail(message)
    output.sum().backward()
    ddp_model.zero_grad()
    ddp_model.train()


def remove_unfinished(folder):
    """Remove what write() has left in a folder whose run was killed meanwhile; only for who holds the folder's lock."""
    for path in (*folder.glob("tmp.*"), *folder.glob("checkpoint/tmp.*")):
        process, _, name = path.name.removeprefix("tmp.").partition(".")
        if path.name == "tmp.link" or (process.isdecimal() and "." in name):
            with contextlib.suppress(OSError):
                path.unlink()


def lock(folder):
    """Lock the folder until this process exits or is killed; return an error message or None."""
    try:  # the file stays open on purpose: closing it would release the lock
        folder.mkdir(parents=True, exist_ok=True)
        fcntl.lockf(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666), fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_unfinished(folder)
    except BlockingIOError:
        return f"another run is writing to --output-dir {folder}: wait for its end, or choose another folder"
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # without locks there, continue
            what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            return f"cannot write to --output-dir {folder} ({what}): choose another folder"


def resume_settings(args):
    """Return the settings that a resumed run must share with the run that it continues."""
    names = ["dataset", "data", "text", "base", "model", "image_size", "sync_batchnorm", "context"]
    names += ["width", "layers", "heads", "full", "lora_rank", "lora_alpha", "lora_dropout", "target_modules"]
    names += ["vocabulary", "optimizer", "zero_stage", "fp16_allreduce", "seed", "precision", "global_batch"]
    settings = {name: value for name, value in vars(args).items() if name in names}
    if args.scale_lr:  # with the same --lr, other processes would go on with another learning rate
        settings["--scale-lr, whose number of processes was"] = getattr(args, "groups", args.world_size)
    if hasattr(args, "zero_stage"):
        settings["one file of DeepSpeed for each process, whose number was"] = args.world_size
    return settings | {"fingerprint": checks.facts}


def read_checkpoint(args, model):
    """Lock the output folder; return its checkpoint, None without one, or an error message. It changes nothing."""
    checks.look_at_model(args, model)
    path, settings = args.output_dir / CHECKPOINT, resume_settings(args)
    if error := lock(args.output_dir):
        return error
    if not path.exists():
        return None
    if not args.resume:
        return f"{path} is from an earlier run: add --resume to continue it, or choose another --output-dir"
    try:
        checkpoint = load_checkpoint(path)
        epochs = len(checkpoint["progress"]["history"])
        had = {name: old for name, old in checkpoint["settings"].items() if name != "fingerprint"}
        changed = [f"{name} {old}" for name, old in had.items() if settings.get(name, old) != old]
        changed += checks.differences(checkpoint["settings"].get("fingerprint"), path)
    except Exception as error:  # a damaged file can raise almost anything
        return f"{path} is damaged or cannot be read ({error!r}): restore a good copy, or move it away to start over"
    if changed:
        return f"{path} is from a run with {', '.join(changed)}: use the same settings, or another --output-dir"
    if epochs > args.epochs:
        return f"{path} already contains {epochs} epochs: use --epochs {epochs} or more, not {args.epochs}"
    return checkpoint


def load_checkpoint(path):
    """Return a checkpoint's content; a damaged file raises an exception."""
    if name := zipfile.ZipFile(path).testzip():  # torch.load does not notice that
        raise ValueError(f"{name} has changed")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it has more than tensors and numbers, so it is of another program") from None
    if not isinstance(checkpoint, dict) or not {"progress", "settings"} <= checkpoint.keys():
        raise ValueError("it has no progress and settings, so it is of another program")
    return checkpoint


def check_results(args, model, progress):
    """Before a checkpoint is written, end the run if what it has computed cannot be right; all processes call this."""
    reports = gather(checks.own_report(args, model))
    place = position(args, progress)
    message, switch = checks.judge(args, progress, place, reports)
    if place[1] == 0:
        checks.forget_losses()
    if not message:
        return
    if rank() == 0 and switch and os.environ.get(switch) == "1":
        print(f"{switch}=1: {message}")
    elif rank() == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    if not switch or os.environ.get(switch) != "1":
        gather(None)  # waits for that line: the launcher ends all others when one has ended
        end(2)


def accept(found):
    """Return what read_checkpoint has found; end this process if that is an error message."""
    if isinstance(found, str):
        fail(found)
    return found


def share_checkpoint(args, found):
    """Return, in each process, the checkpoint that rank 0 has found; end this process if that is an error message.

    Each process reads it by itself. Sent by rank 0, one of many GB would take minutes and, in each process, three times
    its size of memory. Only where it lies on rank 0's own disk there is no other way.
    """
    path = args.output_dir / CHECKPOINT
    answer = [{"content": content_of(path)} if isinstance(found, dict) else found]
    dist.broadcast_object_list(answer)
    if not accept(answer[0]):
        return None
    for _ in range(20):  # a network file system may show it to some nodes a little later
        if all(gather(content_of(path) == answer[0]["content"])):
            return found or load_checkpoint(path)
        time.sleep(1)
    shared = [found]
    dist.broadcast_object_list(shared)
    return shared[0]


def content_of(path):
    """Return what tells a checkpoint's file from another, without reading it all, or None if it cannot be read."""
    with contextlib.suppress(OSError, zipfile.BadZipFile):
        return zlib.crc32(repr([(part.filename, part.CRC) for part in zipfile.ZipFile(path).infolist()]).encode())


def write(path, save):
    """Write a file atomically: save(file) writes a temporary file, which is then renamed to `path`."""
    temporary = path.with_name(f"tmp.{os.getpid()}.{path.name}")
    try:
        with open(temporary, "wb") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        fail(f"cannot write {path} ({error}): is the disk full, or your quota? Free some space, then use --resume")


def write_metrics(args, progress):
    """Write metrics.csv, which has the rows of the history."""
    if history := progress["history"]:
        rows = [history[0].keys(), *(row.values() for row in history)]
        text = "".join(",".join(map(str, row)) + "\n" for row in rows)
        write(args.output_dir / "metrics.csv", lambda file: file.write(text.encode()))


def write_checkpoints(args, state):
    """Write metrics.csv, and the checkpoint, which also has the settings; at an epoch's end under all of its names."""
    write_metrics(args, state["progress"])
    state = state | {"settings": resume_settings(args)}
    first, *others = [args.output_dir / name for name in (*kept_names(args, state["progress"]), CHECKPOINT)]
    write(first, lambda file: torch.save(state, file))
    for path in others:  # the newest last: a run that is killed before repeats the epoch, and its names
        link(first, path)


def kept_names(args, progress):
    """Return further names that --keep-epochs gives this checkpoint, and remove the files that they take the place of.

    At the end of an epoch that is one with its number, and, if no test loss was lower, another for the best one.
    """
    epochs, step = position(args, progress)
    kept = getattr(args, "keep_epochs", None)  # programs without the flag may call this
    if not kept or step:
        return []
    for path in args.output_dir.glob("checkpoint-epoch-*.pt"):
        number = path.stem.removeprefix("checkpoint-epoch-")
        if number.isdecimal() and not 0 <= epochs - int(number) < kept:
            path.unlink()
    losses = [((val := row.get("val_loss", row["test_loss"])) != val, val) for row in progress["history"]]  # NaN: last
    return [f"checkpoint-epoch-{epochs}.pt", *["checkpoint-best.pt"] * (losses.index(min(losses)) == epochs - 1)]


def link(path, other):
    """Give a file another name as well, atomically, which takes no space; where there are no hard links, copy it."""
    temporary = other.with_name("tmp.link")  # not one that `write` opens, which would empty what it is linked with
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
        os.replace(temporary, other)
    except OSError:
        with open(path, "rb") as file:
            write(other, lambda copy: shutil.copyfileobj(file, copy))


def stop_requested():
    """Return whether this job has to stop: the task that started torchrun has then made a file, see plumbing.sh."""
    return os.path.exists(os.environ.get("STOP_FILE", ""))


def steps_or_minutes(text):
    """Return a number of steps, as of "500", or a time, as of "10min"; argparse prints what is wrong with another."""
    minutes = re.fullmatch(r"(\d{1,6}(\.\d{1,6})?)min", text)
    every = timedelta(minutes=float(minutes[1])) if minutes else int(text) if re.fullmatch(r"\d{1,18}", text) else 0
    if not every:
        raise ArgumentTypeError(f"must be 1 or more steps, such as 500, or minutes, such as 10min, not {text!r}")
    return every


def wish(args, progress, seconds):
    """Return what this process wants after this step, `seconds` into the epoch: 0 go on, 1 save, 2 save and stop."""
    if stop_requested():
        return 2
    if isinstance(args.checkpoint_every, timedelta):  # since the last save, or since this process began to train
        return int(seconds - progress["seconds"] >= args.checkpoint_every.total_seconds())
    return int(bool(args.checkpoint_every) and (progress["step"] + 1) % args.checkpoint_every == 0)


def stop(args, progress):
    """End this process, which was asked to stop and has saved; the file `stopped` tells run.slurm so."""
    if dist.get_rank() == 0:
        (args.output_dir / "stopped").touch()
    epochs, step = position(args, progress)
    finish(args, progress, f"stopped by a signal after step {step} of epoch {epochs + 1}: use --resume")


def until_stopped(args, progress, test_loader, save, *parts):
    """Yield the batches of an evaluation; if the job is asked to stop meanwhile, save and end, as all processes do.

    Each process looks before as many batches as all of them have: some may have one more. `save` is save_checkpoint,
    and `parts` is what it gets between args and progress.
    """
    common = len(test_loader.dataset) // getattr(args, "groups", args.world_size) // args.batch_size
    for number, batch in enumerate(test_loader):
        if number < common:
            vote = torch.tensor([int(stop_requested())])
            dist.all_reduce(vote, dist.ReduceOp.MAX)
            if vote:
                save(args, *parts, progress)
                stop(args, progress)
        yield batch


def finish(args, progress, message):
    """Wait for all processes, print the message and the memory that was used, disconnect, and end this process."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    used = {"host": os.uname().nodename, "seconds": time.clock_gettime(time.CLOCK_BOOTTIME) - began, "cores": cores}
    used |= {"core_seconds": sum(os.times()[:4]), "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
    with contextlib.suppress(OSError):  # what it has read from files, also from memory; not every kernel counts that
        used["read_mb"] = int(Path("/proc/self/io").read_text().split()[1]) >> 20
    used = gather(used | hangs.waits() | {"gpu_mb": torch.cuda.max_memory_allocated() >> 20})  # waits: rank 0 may write
    if rank() == 0:
        record(args, progress, "stops", {"reason": message, "used": used})
        memory, gpu = (max(process[name] for process in used) for name in ("mb", "gpu_mb"))
        gpus = f" and {gpu} MB of GPU memory" * (gpu > 0)
        print(f"used: {memory} MB of memory{gpus} in the largest process{hangs.name_slowest(used)}")
        print(message)
    disconnect()
    call_exit_functions()
    end(0)


def call_exit_functions():
    """Call what is registered with atexit, which end() does not: there loggers such as wandb write their last rows."""
    if os.getpid() != IMPORTED_BY:
        return  # it was forked, from a notebook for instance, whose functions are not for this process
    loaders = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    names = ("_clean_up_worker", "_clean_up_persistent_workers_atexit")  # the first up to PyTorch 2.14 or so
    workers = [getattr(loaders, name, None) for name in names]
    for waits in (*workers, multiprocessing.util._exit_function, end):  # for loader workers, which end by themselves
        atexit.unregister(waits)
    atexit._run_exitfuncs()


def position(args, progress):
    """Return how many epochs are complete, and how many steps of the next one."""
    return len(progress["history"]), progress["step"] - len(progress["history"]) * args.steps_per_epoch


def gather(value):
    """Return the list of what each process has given, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print_header(args, what, device, progress):
    """Print what this run is, which ranks are on which node and, if it is resumed, where it continues."""
    hosts = gather(os.uname().nodename)
    hangs.watch(args, progress, rank(), hosts)
    ranks = {host: [number for number, name in enumerate(hosts) if name == host] for host in hosts}
    if rank() > 0:
        return
    record(args, progress, "starts", {"ranks": ranks, "commit": commit()} | checks.for_run_json())
    nodes, threads = len(ranks), torch.get_num_threads()
    backend = getattr(args, "backend", "nccl" if device.type == "cuda" else "gloo")
    where = f"{args.world_size} processes on {nodes} node{'s' * (nodes > 1)}, {backend} on {device.type}"
    print(f"{what}: {where}, {threads} thread{'s' * (threads > 1)} each, global batch {args.global_batch}")
    for said in filter(None, (checks.summary(), checks.long_warmup(args))):
        print(said)
    if nodes > 1:
        print("ranks:", "; ".join(f"{host} {', '.join(map(str, numbers))}" for host, numbers in ranks.items()))
    if progress["step"]:
        epochs, step = position(args, progress)
        print(f"continuing after epoch {epochs} of {args.epochs}" + f", step {step}" * (step > 0))


def print_epoch(args, progress):
    """Print the metrics of the last epoch in one line, on rank 0."""
    if rank() > 0:
        return
    row = progress["history"][-1]
    losses = f"train loss {row['train_loss']:.4f} | test loss {row['test_loss']:.4f}"
    speed = f"{row['samples_per_second']:5.0f} samples/s | {row['seconds']:6.2f} s"
    others = [name for name in row if name.startswith("test_") and name != "test_loss"]
    metric = " | ".join(f"{name.replace('_', ' ')} {row[name]:.4f}" for name in others)  # own ones, such as test_rmse
    if "test_accuracy" in row:
        metric = f"test acc {row['test_accuracy']:7.2%}"
    print(f"epoch {row['epoch']:2}/{args.epochs} | {losses} | {metric} | {speed}")


def commit():
    """Return the git commit of this program, with "-dirty" after it where files differ from it, or None without git."""
    folder = Path(sys.argv[0]).resolve().parent
    if (noted := folder / ".commit").exists():  # by requeue.sh, which has made this copy
        return noted.read_text().strip() or None
    words = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True, timeout=60).strip()


def read_record(path):
    """Return what run.json says so far; move one that is damaged aside, with a line: it is no reason not to go on."""
    try:
        known = json.loads(path.read_text())
        if all(isinstance(one, dict) for name in ("starts", "stops") for one in known[name]):
            return known | {name: list(known[name]) for name in ("starts", "stops")}
        error = "starts and stops are no objects"
    except FileNotFoundError:
        return {"starts": [], "stops": []}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as reason:
        error = repr(reason)
    number = next(number for number in range(1, 10**6) if not path.with_name(f"run.json.damaged{number}").exists())
    kept = path.with_name(f"run.json.damaged{number}")
    with contextlib.suppress(OSError):  # then write() says what is wrong
        path.rename(kept)
    print(f"{path} is damaged ({error}): it begins anew, and the old one is {kept.name}", file=sys.stderr)
    return {"starts": [], "stops": []}


def record(args, progress, what, facts):
    """Add a start or a stop to run.json, which says what this run is, for programs that read it afterwards."""
    path = args.output_dir / "run.json"
    known = read_record(path)
    if what == "starts":
        write_metrics(args, progress)  # if it was damaged: the checkpoint has its rows
    packages = ("torch", "tensorflow", "horovod", "lightning", "deepspeed", "accelerate", "transformers", "peft")
    versions = {name: sys.modules[name].__version__ for name in (*packages, "torchvision") if name in sys.modules}
    known |= {"command": sys.argv, "settings": vars(args), "versions": versions | {"python": platform.python_version()}}
    known[what].append({"time": time.time(), "step": progress["step"], **facts})
    write(path, lambda file: file.write(json.dumps(known, indent=1, default=str).encode()))
