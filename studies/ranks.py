"""What it costs that hundreds of ranks meet: seconds, open files and memory, on one machine.

    SLURM_JOB_ID=1 bash -c 'source plumbing/job.sh && python -m studies.ranks 64 256'

PyTorch is imported once; then the ranks are forked. Each calls what train.py calls outside of its model: it joins the
others, notes data and model, asks rank 0 for a checkpoint, prints the header, votes, and finishes. job.sh raises
the soft limit of open files, and has Gloo connect two ranks when they have something to say to each other.
"""

import argparse
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

VOTES = 20
HEAD = ("ranks", "s to join", "s for a vote", "open files of rank 0", "of the others", "MB of rank 0", "of the others")


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def own_megabytes() -> float:
    """Return the memory that this process does not share with the one that has forked it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def train_without_model(rank: int, ranks: int, folder: Path, timeout: int) -> None:
    """Do as one process what train.py does outside of its model; write what it cost into folder/RANK.json."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import TensorDataset

    import plumbing

    began = time.perf_counter()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    args = argparse.Namespace(world_size=ranks, processes=ranks, timeout=timeout, output_dir=folder / "output")
    vars(args).update(batch_size=1, global_batch=ranks, epochs=1, resume=True, scale_lr=None, dataset="none", seed=0)
    plumbing.prepare_process(args)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    data = TensorDataset(torch.zeros(ranks, 1), torch.zeros(ranks, dtype=torch.long))
    args.steps_per_epoch = plumbing.count_steps(args, 1, data, data)
    model = torch.nn.Linear(1, 2)
    plumbing.share_checkpoint(args, plumbing.read_checkpoint(args, model) if rank == 0 else None)
    progress = {"step": 0, "history": [], "seconds": 0.0}
    plumbing.print_header(args, f"{ranks} ranks", torch.device("cpu"), progress)
    cost = {"join": time.perf_counter() - began}
    began = time.perf_counter()
    for _ in range(VOTES):
        dist.all_reduce(torch.tensor([0]), dist.ReduceOp.MAX)
    cost |= {"vote": (time.perf_counter() - began) / VOTES, "mb": own_megabytes()}
    cost["files"] = len(os.listdir("/proc/self/fd"))
    (folder / f"{rank}.json").write_text(json.dumps(cost))
    plumbing.finish(args, progress, f"finished: {ranks} ranks")


def measure(ranks: int, timeout: int) -> list[float]:
    """Return what so many ranks cost, as HEAD says; raise RuntimeError if one of them fails."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                try:
                    train_without_model(rank, ranks, Path(folder), timeout)
                except BaseException as error:
                    print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)  # finish() has not ended it
            processes.append(process)
        failed = 0
        while processes:
            process, status = os.wait()
            processes.remove(process)
            if status != 0 and not failed:  # end the others, as launchers do: Gloo waits for each that is gone in turn
                for other in processes:
                    os.kill(other, signal.SIGKILL)
            failed += status != 0
        if failed:
            raise RuntimeError("a rank failed, see above; the others were ended")
        first, *others = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    most = {name: max(cost[name] for cost in others) for name in first}
    join, vote = (max(first[name], most[name]) for name in ("join", "vote"))
    return [ranks, join, vote, first["files"], most["files"], first["mb"], most["mb"]]


def main() -> None:
    """Print a table, a row for each number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m studies.ranks", description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int, nargs="+", help="numbers of ranks, 2 or more")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a collective may take")
    args = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))  # the example's folder
    import plumbing  # noqa: F401 (with it PyTorch, before the first fork)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lazy = "lazily" if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1" else "at once"
    print(f"open files: {soft}, at most {hard}; Gloo connects {lazy}")
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for ranks in args.ranks:
        number, join, vote, *others = measure(ranks, args.timeout)
        cells = [str(number), f"{join:.1f}", f"{vote:.3f}", *(f"{value:.0f}" for value in others)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
