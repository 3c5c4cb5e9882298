"""Say which process hangs, and where: the stacks of all at SIGUSR2, and a line of each that has stood still for long.

plumbing.py calls this. No step waits for it: what watches is a thread, which wakes every few seconds.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

HOST = os.uname().nodename
FOLDER = Path(__file__).resolve().parents[1]  # of train.py
process = {
    "rank": None,
    "start": None,
}  # set by watch(): the rank, and usage() when training begins


def say(text):
    """Print a line on stderr that begins with host and rank, in one piece beside those of other processes."""
    launchers = (
        "RANK",
        "HOROVOD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
    )  # each sets one of these
    rank = process["rank"] or next(
        (os.environ[name] for name in launchers if name in os.environ), "?"
    )
    with contextlib.suppress(OSError):
        os.write(2, f"[{HOST} rank {rank}] {text}\n".encode())


def listen():
    """Have SIGUSR2 print the Python stack of each thread of this process, and of loader workers that it has forked."""
    reading, writing = os.pipe()
    os.set_blocking(
        writing, False
    )  # the signal's handler must never wait for `copy`: it may hold Python's lock
    faulthandler.register(signal.SIGUSR2, writing, all_threads=True)

    def copy():
        with open(reading, errors="replace") as lines:
            for line in lines:
                say(line.rstrip())

    threading.Thread(target=copy, daemon=True).start()


def usage():
    """Return seconds: of the clock, in which the main thread has computed, and in which it has waited for a core."""
    computed = waited = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not tell
            # TensorFlow has another thread compute, for which the main thread waits.
            if task.name == f"{os.getpid()}" or (task / "comm").read_text() == "tf_Compute\n":
                on_core, off_core, _ = map(int, (task / "schedstat").read_text().split())
                computed, waited = computed + on_core / 1e9, waited + off_core / 1e9
    return time.perf_counter(), computed, waited


def waits():
    """Return how long the main thread has waited since training began: for others, and files, and for a core.

    Nothing with GPUs: there it waits for its own.
    """
    torch = sys.modules.get("torch")
    if not process["start"] or (torch and torch.cuda.is_available()):
        return {}
    clock, computed, core = (
        now - then for now, then in zip(usage(), process["start"], strict=True)
    )
    return {"waited": round(max(0, clock - computed - core), 2), "waited_for_core": round(core, 2)}


def name_slowest(used):
    """Return the end of the line `used:`, which says which rank has waited least for the others, and which most."""
    if len(used) == 1 or "waited" not in used[0]:
        return ""
    ranks = sorted(range(len(used)), key=lambda rank: used[rank]["waited"])
    slowest, most = used[ranks[0]], f"rank {ranks[-1]} {used[ranks[-1]]['waited']:.1f} s"
    least = f"rank {ranks[0]} on {slowest['host']} {slowest['waited']:.1f} s"
    return f"; waited for others: {least} (the slowest) to {most}"


def watch_start(args):
    """Say so if training has not begun after most of --timeout: while data are read, or the processes connect."""
    if not hasattr(args, "epochs"):
        return  # it trains nothing: torchrun_vision's predict.py
    begun, pause = time.monotonic(), min(5, args.timeout / 40)

    def look():
        told = False
        while not process["start"]:
            seconds = time.monotonic() - begun
            if not told and seconds > 0.8 * args.timeout:
                told, waits = True, collective()
                where = place() + f"; it waits in {waits}" * bool(waits)
                say(
                    f"training has not begun after {seconds:.0f} s (--timeout {args.timeout}): {where}"
                )
            time.sleep(pause)
        if told:
            say(f"training begins after {time.monotonic() - begun:.0f} s")

    threading.Thread(target=look, daemon=True).start()


def watch(args, progress, rank, hosts):
    """From now on say so if no step has ended for most of --timeout; `hosts` has the host of each rank."""
    process.update(rank=str(rank), start=usage())
    begun, hooked = progress["step"], [0]
    each = (
        2 if "horovod" in sys.modules else 1
    )  # the step of its optimizer calls that of the one which it wraps

    def count(*_):
        hooked[0] += 1

    if optimizer := sys.modules.get(
        "torch.optim.optimizer"
    ):  # a framework's loop changes `progress` once in an epoch
        optimizer.register_optimizer_step_post_hook(count)
    pause = min(5, args.timeout / 40)

    def look():
        last, since, told, store = None, 0, False, None
        while True:
            seconds, step = (
                time.monotonic() - since,
                max(progress["step"], begun + hooked[0] // each),
            )
            if step != last:
                if told:
                    say(f"goes on after {seconds:.0f} s")
                    withdraw(store, rank)
                last, since, told = step, time.monotonic(), False
            elif not told and seconds > 0.8 * args.timeout:
                told, store = True, store or connect()
                what = f"no step for {seconds:.0f} s (--timeout {args.timeout}), after step {step}"
                report(what, store, rank, hosts, pause + 1)
            time.sleep(pause)

    threading.Thread(target=look, daemon=True).start()


def connect():
    """Return where all processes leave word for each other, over a connection of its own; None with Horovod.

    Only who stands still connects: rank 0 would hold a second connection of each process from the start.
    """
    found = []

    def clone():
        group = sys.modules["torch.distributed"].distributed_c10d
        found.append(group.PrefixStore("hangs", group._get_default_store().clone()))

    within(5, clone)
    return found[0] if found else None


def withdraw(store, rank):
    """Take back what this process has left there: it goes on."""
    if store:
        within(2, lambda: store.delete_key(str(rank)))


def report(what, store, rank, hosts, pause):
    """Say where this process is and, if it can ask the others, which of them are missing after `pause` seconds."""
    state = {"place": place(), "waits": collective()}
    say(f"{what}: {state['place']}" + f"; it waits in {state['waits']}" * bool(state["waits"]))
    if store:
        within(2, lambda: store.set(str(rank), json.dumps(state)))
        time.sleep(
            pause
        )  # until the others have looked, too: they have stood still since the same step
        if not within(5, lambda: compare(store, rank, hosts)):
            say(
                f"no answer from where all processes meet: rank 0 on {hosts[0]}, or what has started it"
            )


def within(seconds, function):
    """Call a function, and return whether it has come back in time; what it raises is ignored."""

    def call():
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def place():
    """Return where the main thread is: the line of this folder that it has come to, and the function that it is in."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    files = [Path(frame.filename).resolve() for frame in stack]
    own = [
        n
        for n, file in enumerate(files)
        if file.is_relative_to(FOLDER) and "site-packages" not in file.parts
    ]
    last = own[-1] if own else -1
    file = files[last].relative_to(FOLDER) if own else files[last]
    inside = f", in {stack[-1].name} of {files[-1].name}" * (stack[last] is not stack[-1])
    return f"{file}:{stack[last].lineno}, {stack[last].name}: {stack[last].line}{inside}"


def collective():
    """Return in which collective this process waits, if PyTorch's flight recorder knows: from 2.15 on, Gloo's, too."""
    entries, torch = [], sys.modules.get("torch")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            entries += json.loads(getattr(torch._C._distributed_c10d, name)())["entries"]
    waiting = [entry for entry in entries if not entry["retired"]]
    return (
        f"{waiting[0]['profiling_name']} number {waiting[0]['collective_seq_id']}"
        if waiting
        else ""
    )


def compare(store, rank, hosts):
    """As the lowest of the ranks that stand still, say which are missing, and where the others wait."""
    if rank != next(number for number in range(rank + 1) if store.check([str(number)])):
        return
    found = {
        n: json.loads(store.get(str(n))) for n in range(rank, len(hosts)) if store.check([str(n)])
    }
    waiting, missing = {}, []
    for number, host in enumerate(hosts):
        state = found.get(
            number, {"place": "no answer: stopped, or dead, or it still takes steps", "waits": ""}
        )
        if state["waits"] or (
            number in found and not any(other["waits"] for other in found.values())
        ):
            waiting.setdefault(state["waits"] or "the places that their lines say", []).append(
                str(number)
            )
        else:
            missing.append(f"rank {number} on {host} ({state['place']})")
    where = "; ".join(f"rank {', '.join(ranks)} in {what}" for what, ranks in waiting.items())
    say(f"missing: {', '.join(missing) or 'none'}; waiting: {where}")
