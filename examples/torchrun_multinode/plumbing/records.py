"""What a run prints, and what it notes in run.json for programs that read it afterwards."""

import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path

from . import checks, forgotten, hangs
from .files import write, write_metrics
from .launchers import (
    call_exit_functions,
    disconnect,
    end,
    gather,
    rank,
    refuse,
    wait_for_unfinished,
)
from .settings import position

PACKAGES = (
    *("torch", "torchvision", "tensorflow", "horovod", "lightning", "deepspeed", "accelerate"),
    *("transformers", "peft"),
)


def plural(number, noun):
    """Return a number with a noun, such as "1 node" or "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def original(text):
    """Return a text in which copies that a job with STAGE=1 has made have their originals' paths.

    The copies, below STAGE_DIR, are gone when somebody reads what a run has written.
    """
    stage = os.environ.get("STAGE_DIR")
    return str(text).replace(stage, "") if stage else str(text)


def check_shares(args, told):
    """End the run if its processes would train with data that are no shares of the same."""
    repeated = checks.repeated(args, [process["draws"] for process in told])
    other = checks.other_sets([process["sets"] for process in told])
    for message, switch in ((repeated, "ALLOW_SAME_DRAWS"), (other, "ALLOW_OTHER_DATA")):
        if message:
            refuse(f"{message}. If it is right, {switch}=1 in the environment goes on", switch)


def print_header(args, what, device, progress):
    """Print what this run is, which ranks are on which node and, after a resume, where it goes on.

    All processes call this; from now on it is watched whether the run makes progress.
    """
    told = gather({"host": os.uname().nodename} | checks.own)
    hosts = [process["host"] for process in told]
    check_shares(args, told)
    hangs.watch(args, progress, rank(), hosts)
    checks.note_saved(progress)  # a resumed run begins with what is saved
    if rank() > 0:
        return
    forgotten.note()
    ranks = {}
    for number, host in enumerate(hosts):
        ranks.setdefault(host, []).append(number)
    record(args, progress, "starts", {"ranks": ranks, "commit": commit()} | checks.for_run_json())
    kind = getattr(device, "type", device)
    backend = getattr(args, "backend", "nccl" if kind == "cuda" else "gloo")
    threads = args.threads if hasattr(args, "threads") else sys.modules["torch"].get_num_threads()
    where = f"{args.world_size} processes on {plural(len(ranks), 'node')}, {backend} on {kind}"
    size = f"{plural(threads, 'thread')} each, global batch {args.global_batch}"
    print(f"{what}: {where}, {size}")
    for said in filter(None, (checks.summary(), checks.long_warmup(args))):
        print(said)
    if len(ranks) > 1:
        words = [f"{host} {', '.join(map(str, numbers))}" for host, numbers in ranks.items()]
        print("ranks:", "; ".join(words))
    if progress["step"]:
        epochs, step = position(args, progress)
        within = f", step {step}" if step else ""
        print(f"continuing after epoch {epochs} of {args.epochs}{within}")


def print_epoch(args, progress, share_of_peak=None):
    """Print the metrics of the last epoch in one line, on rank 0.

    `share_of_peak` is how much of what its GPUs can compute the run has used, from 0 to 1.
    """
    if rank() > 0:
        return
    row = progress["history"][-1]
    parts = [f"train loss {row['train_loss']:.4f}", f"test loss {row['test_loss']:.4f}"]
    if "test_accuracy" in row:
        parts.append(f"test acc {row['test_accuracy']:7.2%}")
    elif "perplexity" in row:
        parts.append(f"perplexity {row['perplexity']:.2f}")
    else:  # metrics of your own, such as test_rmse
        others = [name for name in row if name.startswith("test_") and name != "test_loss"]
        parts += [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in others]
    unit = "tokens" if "tokens_per_second" in row else "samples"
    speed = f"{row[f'{unit}_per_second']:5.0f} {unit}/s"
    if share_of_peak is not None:
        speed += f", {share_of_peak:.1%} of peak"
    parts += [speed, f"{row['seconds']:6.2f} s"]
    print(f"epoch {row['epoch']:2}/{args.epochs} | {' | '.join(parts)}")


def finish(args, progress, message):
    """Wait for all processes, print the message and the memory that was used, and end this one."""
    wait_for_unfinished()
    used = gather(usage())  # waits: rank 0 may still be writing
    if rank() == 0:
        record(args, progress, "stops", {"reason": message, "used": used})
        memory = max(process["mb"] for process in used)
        gpu = max(process["gpu_mb"] for process in used)
        gpus = f" and {gpu} MB of GPU memory" if gpu else ""
        print(f"used: {memory} MB of memory{gpus} in the largest process{hangs.name_slowest(used)}")
        print(message)
    disconnect()
    call_exit_functions()
    end(0)


def usage():
    """Return what this process has used, from its start on: seconds, cores, memory in MB, waits."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # clock ticks
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    cores = int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    used = {"host": os.uname().nodename, "seconds": seconds, "cores": cores}
    used["core_seconds"] = sum(os.times()[:4])
    used["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    with contextlib.suppress(OSError):  # not every kernel counts what is read, also from memory
        used["read_mb"] = int(Path("/proc/self/io").read_text().split()[1]) >> 20
    torch = sys.modules.get("torch")
    gpu_mb = torch.cuda.max_memory_allocated() >> 20 if torch else 0
    return used | hangs.waits() | {"gpu_mb": gpu_mb}


def commit():
    """Return the git commit of this program, or None without git.

    "-dirty" stands after it where files differ from it.
    """
    folder = Path(__file__).resolve().parents[1]  # of train.py
    noted = folder / ".commit"  # by requeue.sh, which has made this copy
    if noted.exists():
        return noted.read_text().strip() or None
    words = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True, timeout=60)
        return found.strip()


def read_record(path):
    """Return what run.json says so far; move one that is damaged aside, with a line.

    That it is damaged is no reason not to go on.
    """
    try:
        known = json.loads(path.read_text())
        if all(isinstance(one, dict) for name in ("starts", "stops") for one in known[name]):
            return known | {name: list(known[name]) for name in ("starts", "stops")}
        error = "starts and stops are no objects"
    except FileNotFoundError:
        return {"starts": [], "stops": []}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as reason:
        error = repr(reason)
    number = 1
    while path.with_name(f"run.json.damaged{number}").exists():
        number += 1
    kept = path.with_name(f"run.json.damaged{number}")
    with contextlib.suppress(OSError):  # then `write` says what is wrong
        path.rename(kept)
    said = f"{path} is damaged ({error}): it begins anew, and the old one is {kept.name}"
    print(said, file=sys.stderr)
    return {"starts": [], "stops": []}


def record(args, progress, what, facts):
    """Add a start or a stop to run.json, which says what this run is."""
    path = args.output_dir / "run.json"
    known = read_record(path)
    if what == "starts":
        write_metrics(args, progress)  # if it was damaged: the checkpoint has its rows
    modules = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    versions = {name: module.__version__ for name, module in modules.items()}
    versions["python"] = platform.python_version()
    known |= {"command": sys.argv, "settings": vars(args), "versions": versions}
    known.setdefault("id", uuid.uuid4().hex[:16])
    known[what].append({"time": time.time(), "step": progress["step"], **facts})
    text = original(json.dumps(known, indent=1, default=str))
    write(path, lambda file: file.write(text.encode()))


def run_id(args):
    """Return the id of this run, which it keeps after a resume, for loggers; after print_header."""
    return json.loads((args.output_dir / "run.json").read_text())["id"]
