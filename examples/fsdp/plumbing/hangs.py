"""Which process hangs, and where: a line of each that has stood still for long, before it gives up.

At SIGUSR2 each process also prints the stacks of all its threads. No step waits for this: what
watches is a thread, which wakes every few seconds.
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
PLUMBING = Path(__file__).resolve().parent
FOLDER = PLUMBING.parent  # train.py is in it
# watch() sets these two when training begins: the rank as text, and what usage() returns.
process = {"rank": None, "start": None}


def say(text):
    """Print a line on stderr that begins with host and rank.

    It is written in one piece, so that lines of other processes do not come into it.
    """
    launchers = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # each sets one
    ranks = (os.environ[name] for name in launchers if name in os.environ)
    rank = process["rank"] or next(ranks, "?")
    with contextlib.suppress(OSError):
        os.write(2, f"[{HOST} rank {rank}] {text}\n".encode())


def listen():
    """Have SIGUSR2 print the Python stack of each thread of this process.

    Loader workers that it forks print theirs, too.
    """
    reading, writing = os.pipe()
    # The signal's handler must never wait for `copy`: it may hold Python's lock.
    os.set_blocking(writing, False)
    faulthandler.register(signal.SIGUSR2, writing, all_threads=True)

    def copy():
        with open(reading, errors="replace") as lines:
            for line in lines:
                say(line.rstrip())

    threading.Thread(target=copy, daemon=True).start()


def usage():
    """Return the time, for how long the main thread has computed, and waited for a core.

    All three are in seconds.
    """
    computed = 0
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the kernel does not tell
            # TensorFlow has another thread compute, for which the main thread waits.
            if task.name == f"{os.getpid()}" or (task / "comm").read_text() == "tf_Compute\n":
                on_core, off_core, _ = map(int, (task / "schedstat").read_text().split())
                computed += on_core / 1e9
                waited += off_core / 1e9
    return time.perf_counter(), computed, waited


def waits():
    """Return how long the main thread has waited since training began.

    It has waited for a core, or for other processes and files. With GPUs nothing is returned:
    there it also waits for its own GPU.
    """
    torch = sys.modules.get("torch")
    if not process["start"] or (torch and torch.cuda.is_available()):
        return {}
    pairs = zip(usage(), process["start"], strict=True)
    clock, computed, core = (now - then for now, then in pairs)
    return {"waited": round(max(0, clock - computed - core), 2), "waited_for_core": round(core, 2)}


def name_slowest(used):
    """Return the end of the line `used:`, which says who has waited least for the others, and most.

    The rank that has waited least is the slowest: the others wait for it.
    """
    if len(used) == 1 or "waited" not in used[0]:
        return ""
    slowest, *_, fastest = sorted(range(len(used)), key=lambda rank: used[rank]["waited"])
    host = used[slowest]["host"]
    least = f"rank {slowest} on {host} {used[slowest]['waited']:.1f} s"
    most = f"rank {fastest} {used[fastest]['waited']:.1f} s"
    return f"; waited for others: {least} (the slowest) to {most}"


def watch_start(args):
    """From now on say so if training has not begun after most of --timeout.

    Until then data are read, and the processes connect.
    """
    if not hasattr(args, "epochs"):
        return  # the program trains nothing, such as torchrun_vision's predict.py
    begun = time.monotonic()
    pause = min(5, args.timeout / 40)

    def look():
        told = False
        while not process["start"]:
            seconds = time.monotonic() - begun
            if not told and seconds > 0.8 * args.timeout:
                told = True
                what = f"training has not begun after {seconds:.0f} s (--timeout {args.timeout})"
                say(f"{what}: {in_words(own_state())}")
            time.sleep(pause)
        if told:
            say(f"training begins after {time.monotonic() - begun:.0f} s")

    threading.Thread(target=look, daemon=True).start()


def watch(args, progress, rank, hosts):
    """From now on say so if no step has ended for most of --timeout.

    `hosts` has the host of each rank.
    """
    process.update(rank=str(rank), start=usage())
    begun = progress["step"]
    steps_since = count_optimizer_steps()
    pause = min(5, args.timeout / 40)

    def look():
        last = None
        since = 0
        told = False
        store = None
        while True:
            seconds = time.monotonic() - since
            step = max(progress["step"], begun + steps_since())
            if step != last:
                if told:
                    say(f"goes on after {seconds:.0f} s")
                    withdraw(store, rank)
                last = step
                since = time.monotonic()
                told = False
            elif not told and seconds > 0.8 * args.timeout:
                told = True
                store = store or connect()
                what = f"no step for {seconds:.0f} s (--timeout {args.timeout}), after step {step}"
                report(what, store, rank, hosts, pause + 1)
            time.sleep(pause)

    threading.Thread(target=look, daemon=True).start()


def count_optimizer_steps():
    """Return a function that returns how many steps PyTorch's optimizer has taken since now.

    A framework's own loop changes `progress` only at the end of an epoch.
    """
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    optimizer = sys.modules.get("torch.optim.optimizer")
    if optimizer:
        optimizer.register_optimizer_step_post_hook(count)
    # Horovod wraps an optimizer: a step of the outer one calls that of the inner one.
    calls_of_step = 2 if "horovod" in sys.modules else 1
    return lambda: calls // calls_of_step


def connect():
    """Return where all processes leave word for each other, or None with Horovod.

    It is a connection of its own. Only a process that stands still makes it: otherwise rank 0 would
    hold a second connection of each process from the start.
    """
    found = []

    def clone():
        group = sys.modules["torch.distributed"].distributed_c10d
        found.append(group.PrefixStore("hangs", group._get_default_store().clone()))

    within(5, clone)
    return found[0] if found else None


def withdraw(store, rank):
    """Take back what this process has left there, since it goes on."""
    if store:
        within(2, lambda: store.delete_key(str(rank)))


def report(what, store, rank, hosts, pause):
    """Say where this process is and, if it can ask the others, which are missing after a pause."""
    state = own_state()
    say(f"{what}: {in_words(state)}")
    if not store:
        return
    within(2, lambda: store.set(str(rank), json.dumps(state)))
    # The others have stood still since the same step. After the pause they have looked as well.
    time.sleep(pause)
    if not within(5, lambda: compare(store, rank, hosts)):
        where = f"rank 0 on {hosts[0]}, or what has started it"
        say(f"no answer from where all processes meet: {where}")


def within(seconds, function):
    """Call a function, and return whether it has come back in time; what it raises is ignored."""

    def call():
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def own_state():
    """Return where this process is, and in which collective it waits."""
    return {"place": place(), "waits": collective()}


def in_words(state):
    """Return what own_state() has returned, as text."""
    if state["waits"]:
        return f"{state['place']}; it waits in {state['waits']}"
    return state["place"]


def place():
    """Return where the main thread is: a line of train.py's folder, and the function that it is in.

    A line of this package is taken only where there is none of another file: a hang in
    plumbing.finish then shows the line of train.py.
    """
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    files = [Path(frame.filename).resolve() for frame in stack]
    own = [number for number, file in enumerate(files) if is_own(file)]
    preferred = [number for number in own if not files[number].is_relative_to(PLUMBING)]
    last = max(preferred or own, default=len(stack) - 1)
    file = files[last].relative_to(FOLDER) if own else files[last]
    found = f"{file}:{stack[last].lineno}, {stack[last].name}: {stack[last].line}"
    if stack[last] is stack[-1]:
        return found
    return f"{found}, in {stack[-1].name} of {files[-1].name}"


def is_own(file):
    """Return whether a file of a stack is below train.py's folder, and no module of Python's."""
    other = file.name.startswith("<") or "site-packages" in file.parts  # such as <string>
    return file.is_relative_to(FOLDER) and not other


def collective():
    """Return in which collective this process waits, if PyTorch's flight recorder knows.

    It knows those of NCCL and, from PyTorch 2.15 on, those of Gloo.
    """
    entries = []
    torch = sys.modules.get("torch")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            entries += json.loads(getattr(torch._C._distributed_c10d, name)())["entries"]
    for entry in entries:
        # NCCL's may be completed without being retired; Gloo's are never said to be completed.
        if not entry["retired"] and entry.get("state") != "completed":
            return f"{entry['profiling_name']} number {entry['collective_seq_id']}"
    return ""


def compare(store, rank, hosts):
    """Say which ranks are missing, and where the others wait.

    Of the ranks that stand still, only the lowest one says so.
    """
    if rank != next(number for number in range(rank + 1) if store.check([str(number)])):
        return
    numbers = [number for number in range(rank, len(hosts)) if store.check([str(number)])]
    found = {number: json.loads(store.get(str(number))) for number in numbers}
    silent = {"place": "no answer: stopped, or dead, or it still takes steps", "waits": ""}
    # Without a flight recorder no rank knows its collective: then all that answer wait.
    known = any(state["waits"] for state in found.values())
    waiting = {}
    missing = []
    for number, host in enumerate(hosts):
        state = found.get(number, silent)
        if state["waits"] or (number in found and not known):
            what = state["waits"] or "the places that their lines say"
            waiting.setdefault(what, []).append(str(number))
        else:
            missing.append(f"rank {number} on {host} ({state['place']})")
    where = "; ".join(f"rank {', '.join(ranks)} in {what}" for what, ranks in waiting.items())
    say(f"missing: {', '.join(missing) or 'none'}; waiting: {where}")
