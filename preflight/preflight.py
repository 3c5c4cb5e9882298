"""Check a SLURM cluster from inside a job on several nodes, and print its faults in one table.

On SLURM:  sbatch run.slurm [--pattern per-process]

Every task collects facts and posts them to task 0 in six rounds, over TCP. Nothing waits forever, and a task that
is lost, or late for a round, is not waited for again. Then task 0 has the facts judged: see verdict.py. Anybody on the
cluster can connect to these ports, so each message is signed with a secret that run.slurm has made for this job.
"""

from __future__ import annotations  # a node with an older Python shall be named too: this runs on 3.8

import argparse
import contextlib
import fcntl
import hmac
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

# Seconds that task 0 waits for the others:
ROUNDS = {"hello": 30, "peers": 25, "torch": 120, "reduce": 75, "streams": 45, "network": 110}
IMPORT_SECONDS, REDUCE_SECONDS = 110, 20  # torch is slow to load the first time; an all-reduce takes milliseconds
SHARED_SECONDS = 10  # for a file to show up on the other nodes
MEGABYTES = 8  # of the all-reduced tensor
SIZES = [2**power for power in range(10, 31, 2)]  # bytes that are all-reduced to see how speed goes by size
REPEATS = 4  # all-reduces of each size
SIZES_SECONDS = 12  # for all of them, with each backend: no size is begun that would take longer
STREAM_SECONDS, STREAMS_SECONDS = 0.3, 20  # how long one node sends to another, and to all others
MOST_PEERS, MOST_INTERFACES = 16, 4  # to which a node sends: with many nodes to the next ones
LONGEST = 2**24  # bytes of a message: enough for some 10,000 tasks, and a stranger cannot fill the memory
VARIABLES = ["CPUS_PER_TASK", "GPUS_PER_TASK", "TRES_PER_TASK", "STEP_TASKS_PER_NODE"]
NODE = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]  # the latter is slurmd's default


class Job(NamedTuple):
    """What this task knows before it has talked to others."""

    id: int
    rank: int
    world: int
    node: str
    leader: bool  # the first task of its node finds out what is the same for all tasks there
    nodes: list[str]
    port: int
    token: bytes  # what the messages of this job are signed with
    folder: Path  # for the files of this run; removed at the end
    pattern: str


def fail(message: str) -> None:
    """End with status 2 and one line, both from task 0 alone: all tasks find the same."""
    if os.environ.get("SLURM_PROCID", "0") != "0":
        sys.exit(0)
    print(f"preflight.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser("preflight.py", description="Check a SLURM cluster: sbatch run.slurm [options]")
    text = "per-node (default): torchrun_multinode, ddp_spawn, deepspeed; "
    text += "per-process: horovod_cpu, lightning, srun.slurm"
    parser.add_argument("--pattern", choices=["per-node", "per-process"], default="per-node", help=text)
    setattr(parser, "error", fail)  # noqa: B010 (one line, without the usage)
    return parser.parse_args()


def read_job(args: argparse.Namespace) -> Job:
    """Collect what SLURM says; outside of a step, end with status 2."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        fail("this is not a SLURM job; submit it: sbatch run.slurm")
    if int(env.get("SLURM_STEP_ID", 2**32)) >= 2**32 - 6:  # batch and interactive steps have the highest numbers
        fail("srun did not start this; submit it: sbatch run.slurm")
    if not env.get("PREFLIGHT_TOKEN"):
        fail("no PREFLIGHT_TOKEN, which run.slurm makes; submit it: sbatch run.slurm")
    command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
    try:
        nodes = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=10, text=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConnectionError(f"cannot run scontrol, which the examples need too: {describe(error)}") from None
    return Job(
        id=int(env["SLURM_JOB_ID"]),
        rank=int(env["SLURM_PROCID"]),
        world=int(env["SLURM_STEP_NUM_TASKS"]),
        node=NODE,
        leader=env["SLURM_LOCALID"] == "0",
        nodes=nodes,
        port=10000 + int(env["SLURM_JOB_ID"]) % 20000,  # as in the examples: below the ports given out at random
        token=env["PREFLIGHT_TOKEN"].encode(),
        folder=Path(f".preflight-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}").absolute(),
        pattern=args.pattern,
    )


# Tools.


def describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def side_by_side(function: Callable[[str], Any], items: Iterable[str], seconds: float) -> dict[str, Any]:
    """Return {item: function(item)}, with {"error": text} for an item that raises or takes too long."""
    answers: dict[str, Any] = {item: {"error": f"no answer within {seconds:g} s"} for item in items}

    def work(item: str) -> None:
        try:
            answers[item] = function(item)
        except Exception as error:
            answers[item] = {"error": describe(error)}

    # Threads, since a name look-up takes no time limit; daemons, since one that hangs must not keep us.
    threads = [threading.Thread(target=work, args=(item,), daemon=True) for item in list(answers)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(answers)


def listen(port: int, function: Callable[[socket.socket], None]) -> int:
    """Listen at a port (0: any free one), call the function in a thread for whoever connects, return the port."""
    address = ("", port)
    if socket.has_dualstack_ipv6():  # then it serves both: a network may have either alone
        server = socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    else:
        server = socket.create_server(address, backlog=512)

    def accept() -> None:
        while True:
            threading.Thread(target=function, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel break a connection 15 s after the other end has died or was cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 15000):
        with contextlib.suppress(AttributeError, OSError):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def sign(token: bytes, text: bytes) -> bytes:
    return hmac.new(token, text, "sha256").hexdigest().encode()


def send(connection: socket.socket, token: bytes, message: Any) -> None:
    """Send a message as one line: its signature, from which nobody can tell the token, and the message as JSON."""
    text = json.dumps(message).encode()
    connection.sendall(sign(token, text) + b" " + text + b"\n")


def receive(stream: BinaryIO, token: bytes) -> Iterator[Any]:
    """Yield the other end's messages; raise ValueError at the first line that no task of this job has signed."""
    for line in iter(lambda: stream.readline(LONGEST), b""):
        signature, _, text = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, sign(token, text)):
            raise ValueError("another job or program is there")
        yield json.loads(text)


# How tasks talk: exchange(round, facts) returns what every task posted in that round.


class Head:
    """Task 0's end. It has the facts of all others."""

    host = "127.0.0.1"  # where task 0 itself finds its own servers
    clock = {"ahead": 0.0, "doubt": 0.0}

    def __init__(self, job: Job) -> None:
        self.job = job
        self.posts: dict[str, dict[int, Any]] = defaultdict(dict)
        self.answers: dict[str, Any] = {}
        self.connections: dict[int, socket.socket] = {}
        self.turns: dict[socket.socket, threading.Lock] = {}  # one thread at a time sends over a connection
        self.lost: set[int] = set()
        self.waiting_for = set(range(job.world))
        self.port_problem = ""
        try:
            listen(job.port, self.serve)
        except OSError as error:
            self.port_problem = describe(error)
            listen(job.port + 1, self.serve)  # the others know that one too

    def serve(self, connection: socket.socket) -> None:
        """Greet a task with the time and take its posts, until it hangs up: from then on it is lost."""
        rank = -1
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError, ValueError):
            keep_alive(connection)
            self.turns[connection] = threading.Lock()
            send(connection, self.job.token, {"time": time.time()})
            for name, sender, facts in receive(stream, self.job.token):
                if sender not in range(1, self.job.world):
                    raise ValueError(f"no task {sender} posts here")
                rank = sender
                self.connections[rank] = connection
                self.posts[name][rank] = facts
                if name in self.answers:  # too late for the others
                    self.answer(connection, name)
        self.lost.add(rank)

    def answer(self, connection: socket.socket, name: str) -> None:
        """Send what all have posted in a round."""
        with self.turns[connection]:
            send(connection, self.job.token, [name, self.answers[name]])

    def exchange(self, name: str, facts: Any) -> dict[int, Any]:
        """Wait for the posts of a round, at most the seconds in ROUNDS, answer all, and return them by task.

        Who is late is not waited for in later rounds.
        """
        self.posts[name][0] = facts
        end = time.monotonic() + ROUNDS[name]
        while self.waiting_for - self.lost - set(self.posts[name]) and time.monotonic() < end:
            time.sleep(0.05)
        done = dict(self.posts[name])
        self.waiting_for &= set(done)
        self.answers[name] = {} if name == "peers" else done  # peers: by far the largest, and for task 0 only
        for connection in list(self.connections.values()):
            with contextlib.suppress(OSError):
                self.answer(connection, name)
        return done

    def silent(self) -> set[int]:
        """Return the tasks that are lost, or owe an answer in the present round."""
        begun = [name for name in ROUNDS if 0 in self.posts[name]]
        answered = set(self.posts[begun[-1]]) if begun else {0}
        owing = set(range(self.job.world)) - answered
        unfinished = self.waiting_for - set(self.posts[list(ROUNDS)[-1]])
        return owing | (self.lost & unfinished)


class Guest:
    """Every other task's end; raises ConnectionError when task 0 cannot be reached, or no longer."""

    def __init__(self, job: Job) -> None:
        self.job, problems = job, {}
        # The first is where srun runs, which SLURM has reached already: it serves even if names are broken.
        hosts = [os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or job.nodes[0], job.nodes[0]]
        end = time.monotonic() + ROUNDS["hello"] - 5
        while time.monotonic() < end:
            for host, port in [(host, port) for port in (job.port, job.port + 1) for host in dict.fromkeys(hosts)]:
                try:
                    self.connect(host, port)
                    return
                except (OSError, ValueError) as error:
                    problems[host] = f"{host} port {job.port}: {describe(error)}"
            time.sleep(0.3)
        raise ConnectionError(f"cannot reach task 0 on {job.nodes[0]} ({'; '.join(problems.values())})")

    def connect(self, host: str, port: int) -> None:
        before = time.time()
        self.host, self.connection = host, socket.create_connection((host, port), timeout=3)
        self.messages = receive(self.connection.makefile("rb"), self.job.token)
        greeting = next(self.messages, None)
        after = time.time()
        if greeting is None:
            raise ConnectionError("it has hung up")
        # Task 0 read its clock somewhere between our two readings.
        self.clock = {"ahead": (before + after) / 2 - greeting["time"], "doubt": (after - before) / 2}
        keep_alive(self.connection)
        self.connection.settimeout(sum(ROUNDS.values()))

    def exchange(self, name: str, facts: Any) -> dict[int, Any]:
        """Post facts to task 0 and return its answer, what it has by task; waits no longer than all rounds take."""
        try:
            send(self.connection, self.job.token, [name, self.job.rank, facts])
            for answered, posts in self.messages:
                if answered == name:
                    return {int(rank): post for rank, post in posts.items()}
        except (OSError, ValueError) as error:
            raise ConnectionError(f"lost task 0 on {self.job.nodes[0]} ({describe(error)})") from None
        raise ConnectionError(f"task 0 on {self.job.nodes[0]} has ended")


# Facts about the node, each found in a thread of its own.


def find_names(job: Job, _: dict[int, Any]) -> dict[str, Any]:
    """Return the addresses that this node finds for the name of each node, within 8 s."""

    def look_up(name: str) -> list[str]:
        return sorted({str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})

    return side_by_side(look_up, job.nodes, 8)


def find_connections(job: Job, roster: dict[int, Any]) -> dict[str, Any]:
    """Return who answers under each other node's name, each within 5 s: the first task there says its node's."""
    ports = {hello["node"]: hello["listener"] for hello in roster.values() if hello["leader"]}

    def knock(node: str) -> str:
        with socket.create_connection((node, ports[node]), timeout=5) as connection:
            return connection.makefile().readline(300).strip()  # a name; another program may never end its line

    return side_by_side(knock, [node for node in ports if node != job.node], 8)


def find_shared(job: Job, roster: dict[int, Any]) -> dict[str, Any]:
    """Return the nodes whose file does not show up here. All wrote theirs before anyone got the roster."""
    wanted = {hello["node"] for hello in roster.values()}
    end = time.monotonic() + SHARED_SECONDS
    while True:
        # A listing, for it makes NFS ask the server, while "no such file" may come from its memory.
        unseen = sorted(wanted - set(os.listdir(job.folder)))
        if not unseen or time.monotonic() > end:
            return {"unseen": unseen, "folder": os.getcwd()}
        time.sleep(0.2)


def find_limits() -> dict[str, Any]:
    """Return the soft and the hard limit (-1: none) of what a task may have, and whether RDMA needs locked memory."""
    kinds = {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK, "processes": resource.RLIMIT_NPROC}
    limits: dict[str, Any] = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    limits["pids"] = min(group_limits("pids", ["pids.max"]), default=-1)
    with contextlib.suppress(OSError):  # there is none
        limits["rdma"] = os.listdir("/sys/class/infiniband")
    return limits


def group_limits(controller: str, names: list[str], files: str = "/", of: str = "/proc/self/cgroup") -> list[int]:
    """Return the numbers in files so named, of the job's control groups and those above them; "max" is none."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(of).read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):  # version 2, or 1
                top = Path(files, "sys/fs/cgroup", controller if controllers else "")
                group = top / path.lstrip("/")
                for path in [place / name for place in (group, *group.parents) for name in names]:
                    with contextlib.suppress(OSError, ValueError):  # there is none; "max"
                        found.append(int(path.read_text()))
    return found


def asked_gpus() -> int:
    """Return how many GPUs of this node the job was given. SLURM before 21.08 says it in CUDA_VISIBLE_DEVICES only."""
    if os.environ.get("SLURM_GPUS_ON_NODE"):
        return int(os.environ["SLURM_GPUS_ON_NODE"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return len([device for device in visible if device not in ("", "NoDevFiles")])  # the latter: a job without GPUs


def find_gpus(_: Job, __: dict[int, Any]) -> list[str]:
    """Return the driver's version once for each GPU that it shows to this task; nothing where there is no driver."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=12)
    return re.findall(r"^[\d.]+$", done.stdout, re.MULTILINE)  # messages of a failure are there too


def find_wheel(_: Job, __: dict[int, Any]) -> dict[str, Any]:
    """Return what decides which PyTorch fits: driver, compute capability and name of each GPU; a driver of AMD."""
    facts: dict[str, Any] = {"gpus": [], "amd": os.path.exists("/dev/kfd"), "problem": ""}
    end = time.monotonic() + 13
    for fields in ("driver_version,compute_cap,name", "driver_version,name") if shutil.which("nvidia-smi") else ():
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=end - time.monotonic())
        except (OSError, subprocess.SubprocessError) as error:
            return {**facts, "problem": f"nvidia-smi: {type(error).__name__}"}
        facts["gpus"] = re.findall(r"^([\d.]+), (?:([\d.]+), )?(.+)$", done.stdout, re.MULTILINE)
        if facts["gpus"]:  # else an nvidia-smi that does not know compute_cap, such as that of driver 470
            break
    return facts


# How fast the network is, without torch: each node sends to each other for a moment, over each interface.


def own_interfaces() -> dict[str, dict[str, Any]]:
    """Return this node's interfaces that have an IPv4 address, but for loopback: address, and Mbit/s (0: unknown)."""
    found: dict[str, dict[str, Any]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for path in sorted(Path("/sys/class/net").iterdir()):
            with contextlib.suppress(OSError):  # no address
                answer = fcntl.ioctl(query, 0x8915, struct.pack("256s", path.name.encode()[:15]))  # SIOCGIFADDR
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found[path.name] = {"address": address, "mbit": 0}
            with contextlib.suppress(OSError, ValueError, KeyError):
                if (path / "device").exists():  # a virtual one names any speed
                    found[path.name]["mbit"] = max(0, int((path / "speed").read_text()))
    return found


class Sink:
    """The end that receives, from one node at a time: so no link has more than one stream in each direction."""

    def __init__(self, token: bytes) -> None:
        self.token, self.turn = token, threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        """Take what a node of this job sends until it ends, count it, and tell it the MB/s; 10 s without any end it."""
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            greeting = sign(self.token, b"stream")
            if not hmac.compare_digest(connection.recv(len(greeting), socket.MSG_WAITALL), greeting):
                return
            with self.turn:
                connection.sendall(b"!")
                buffer, count, start = bytearray(2**20), 0, time.perf_counter()
                while size := connection.recv_into(buffer):
                    count += size
                seconds = time.perf_counter() - start
            connection.sendall(json.dumps(count / seconds / 1e6).encode() + b"\n")


def stream(source: str, target: str, port: int, token: bytes) -> float:
    """Send from one address to another for a moment; return MB/s, as the other end has seen them."""
    with socket.create_connection((target, port), timeout=5, source_address=(source, 0)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)  # what is left in it takes time after the end
        connection.settimeout(15)
        connection.sendall(sign(token, b"stream"))
        if not connection.recv(1):
            raise ConnectionError("it hung up")
        block, end = bytes(2**16), time.monotonic() + STREAM_SECONDS
        while time.monotonic() < end:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        return float(json.loads(connection.makefile().readline(100)))


def shared_interfaces(hellos: list[dict[str, Any]]) -> list[str]:
    """Return the interfaces that all nodes have, each with an address of its own; docker0 has the same everywhere."""
    common = set.intersection(*(set(hello["interfaces"]) for hello in hellos))
    addresses = {name: {hello["interfaces"][name]["address"] for hello in hellos} for name in common}
    return sorted(name for name in common if len(addresses[name]) == len(hellos))[:MOST_INTERFACES]


def used_interface(mine: dict[str, Any], other: str) -> str:
    """Return the interface that a job of the examples uses for Gloo: the one that is set, or that leads to `other`."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return os.environ["GLOO_SOCKET_IFNAME"].split(",")[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        query.connect((other, 9))  # sends nothing
        address = query.getsockname()[0]
        return next((name for name, found in mine.items() if found["address"] == address), "")
    return ""


def find_network(job: Job, roster: dict[int, Any]) -> dict[str, Any]:
    """Return the interfaces, the one that a job uses, and MB/s to other nodes over each: {node: {interface: MB/s}}."""
    leaders = [hello for hello in roster.values() if hello["leader"]]
    place = [hello["node"] for hello in leaders].index(job.node)
    mine, others = leaders[place], [*leaders[place + 1 :], *leaders[:place]][:MOST_PEERS]
    names = shared_interfaces(leaders)
    used = used_interface(mine["interfaces"], others[0]["node"]) if others else ""
    rates: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + STREAMS_SECONDS
    for other in others:  # the next node first: so each has its turn with another one
        for name in sorted(names, key=lambda name: name != used):
            if time.monotonic() < end:
                address = other["interfaces"][name]["address"]
                try:
                    rate: Any = stream(mine["interfaces"][name]["address"], address, other["sink"], job.token)
                except (OSError, ValueError) as error:
                    rate = {"error": describe(error)}
                rates.setdefault(other["node"], {})[name] = rate
    return {"interfaces": mine["interfaces"], "used": used, "rates": rates}


# Torch, in a process of its own: one that is missing, crashes or hangs takes no other answer with it.


def try_gpus(job: Job | SimpleNamespace, torch: Any) -> tuple[int, str]:
    """Return how many GPUs torch can use, and why not more: each GPU that this task would use has to compute."""
    count, problem = torch.cuda.device_count(), ""  # by NVML, so too many where CUDA does not accept the driver
    if not asked_gpus():
        return count, ""  # those may be somebody else's
    mine = range(count) if job.pattern == "per-node" else range(count)[int(os.environ["SLURM_LOCALID"]) :][:1]
    for device in mine or [0]:  # without any, this raises the reason
        try:
            torch.ones(1, device=f"cuda:{device}").sum().item()
        except Exception as error:
            problem = problem or describe(error).split(". ")[0]
            count -= device in mine
    return count, problem


def torch_process(job: Job | SimpleNamespace, pipe: Any, other_end: Any) -> None:
    """Import torch and say so, wait for the address of a store, all-reduce, and say how fast."""
    other_end.close()  # so that the parent's end is noticed
    facts: dict[str, Any] = {"version": sys.version.split()[0]}
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:  # even SystemExit
        return pipe.send({**facts, "torch": {"error": describe(error)}})
    from datetime import timedelta

    limit = timedelta(seconds=REDUCE_SECONDS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if job.rank == 0 else None
    gpus, problem = try_gpus(job, torch)
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU only"
    facts.update(torch=str(torch.__version__), build=build, cuda=gpus, gpu_problem=problem)
    pipe.send({**facts, "store": store.port if store else 0})
    try:
        host, port, backends = pipe.recv()
    except EOFError:  # the task has ended
        return
    places = {}
    for backend in backends:
        try:
            if backend == "gloo":
                store = store or dist.TCPStore(host, port, timeout=limit)
                dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=limit)
                group, device = None, torch.device("cpu")
            else:
                device = torch.device("cuda", int(os.environ["SLURM_LOCALID"]))
                torch.cuda.set_device(device)
                group = dist.new_group(backend=backend, timeout=limit)
            places[backend] = group, device
            tensor = torch.ones(MEGABYTES * 250_000, device=device)
            dist.all_reduce(tensor, group=group)
            if tensor[0].item() != job.world:
                raise ValueError(f"the sum is {tensor[0].item():g}, not {job.world}")
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                tensor[0].item()  # waits for the GPU
                seconds.append(time.perf_counter() - start)
            pipe.send({backend: MEGABYTES / min(seconds)})  # the best: others may have waited for a busy core
        except Exception as error:
            pipe.send({backend: {"error": describe(error)}})
    try:
        pipe.recv()  # all tasks were able to all-reduce
        sizes = {backend: try_sizes(job.world, torch, dist, *place) for backend, place in places.items()}
        pipe.send({"sizes": sizes})
    except EOFError:
        return
    except Exception as error:
        pipe.send({"sizes": {"error": describe(error)}})


def try_sizes(world: int, torch: Any, dist: Any, group: Any, device: Any) -> dict[int, float]:
    """Return the seconds of an all-reduce by its bytes, as far as time and a quarter of the memory permit."""
    memory = torch.cuda.mem_get_info(device)[0] if "cuda" in str(device) else free_memory()
    seconds: dict[int, float] = {}
    end, last = time.monotonic() + SIZES_SECONDS, 0.0
    for size in SIZES:
        expected = 4 * last  # seconds of an all-reduce of four times the size
        willing = 4 * size <= memory and time.monotonic() + REPEATS * expected < end
        vote = torch.ones(1, device="cpu") if willing else torch.zeros(1, device="cpu")
        dist.all_reduce(vote, group=None)
        if vote[0].item() != world:  # all end with the same size
            break
        tensor, times = torch.ones(size // 4, device=device), []
        for _ in range(REPEATS):
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            tensor[0].item()  # waits for the GPU
            times.append(time.perf_counter() - start)
        last = max(times)
        seconds[size] = min(times[1:])  # the first also makes connections
    return seconds


def free_memory(files: str = "/", of: str = "/proc/self/cgroup") -> int:
    """Return the bytes that a task of this node may take: of what is free, and of what SLURM has given to the job."""
    kilobytes = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    limits = [int(kilobytes[1]) * 1024] if kilobytes else [0]
    limits += group_limits("memory", ["memory.max", "memory.limit_in_bytes"], files, of)
    tasks = max(map(int, re.findall(r"(?<![\dx])\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))))
    return min(limits) // tasks


def torch_in_image(job: Job, pipe: Any, other_end: Any) -> None:
    """Become in_image(), in the image; the pipe becomes its standard input."""
    other_end.close()
    os.dup2(pipe.fileno(), 0)
    gpus = ["--nv" if shutil.which("nvidia-smi") else "--rocm"] if asked_gpus() else []
    code = f"import preflight; preflight.in_image({job.rank}, {job.world}, {job.pattern!r})"
    words = [os.environ["APPTAINER"], "--quiet", "exec", *gpus, f"--bind={os.getcwd()}", f"--pwd={os.getcwd()}"]
    os.execv(words[0], [*words, os.environ["IMAGE"], "python", "-Bc", code])


def in_image(rank: int, world: int, pattern: str) -> None:
    """Be the process with torch."""
    pipe, stdin = (multiprocessing.connection.Connection(fd) for fd in (os.dup(0), 0))
    torch_process(SimpleNamespace(rank=rank, world=world, pattern=pattern), pipe, stdin)


def ask(process: Any, pipe: Any, key: str, seconds: float) -> dict[str, Any]:
    """Return what the torch process says next, or {key: {"error": text}}."""
    try:
        if pipe.poll(seconds):
            return pipe.recv()
        return {key: {"error": f"no answer within {seconds} s"}}
    except (EOFError, OSError):
        process.join(5)
        return {key: {"error": f"the process with torch ended with status {process.exitcode}"}}


def reduce(job: Job, board: Head | Guest, process: Any, pipe: Any, posts: dict[int, Any]) -> dict[str, Any]:
    """All-reduce over all tasks, if all can; return MB/s by backend."""
    without = [str(rank) for rank in range(job.world) if not isinstance(posts.get(rank, {}).get("torch"), str)]
    if without:
        return {"gloo": {"error": f"not tried: task {', '.join(without)} has no torch or is silent"}}
    backends = ["gloo", "nccl"] if all(post["cuda"] > post["local"] for post in posts.values()) else ["gloo"]
    pipe.send((board.host, posts[0]["store"], backends))
    speeds: dict[str, Any] = {}
    for backend in backends:
        speeds.update(ask(process, pipe, backend, REDUCE_SECONDS + 10))
    return speeds


def measure(
    job: Job, board: Head | Guest, roster: dict[int, Any], process: Any, pipe: Any, posts: dict[int, Any]
) -> dict[str, Any]:
    """Return how fast the network is: between nodes, and for an all-reduce over all tasks by its size."""
    facts: dict[str, Any] = {"sizes": {}}
    if job.leader:
        try:
            facts["network"] = find_network(job, roster)
        except Exception as error:
            facts["network"] = {"error": describe(error)}
    board.exchange("streams", {})  # all begin with the sizes together: Gloo waits for REDUCE_SECONDS only
    speeds = [speed for rank in range(job.world) for speed in posts.get(rank, {}).get("reduce", {0: {}}).values()]
    if all(isinstance(speed, float) for speed in speeds):  # else some would wait for others
        pipe.send("sizes")
        facts.update(ask(process, pipe, "sizes", 2 * (SIZES_SECONDS + 10)))
    return facts


def tell_node(connection: socket.socket) -> None:
    with connection:
        connection.sendall(f"{NODE}\n".encode())


def hello(job: Job, board: Head | Guest) -> dict[str, Any]:
    """Return what is known at once. A leader also leaves a file and a listener for the others."""
    facts: dict[str, Any] = {name: os.environ.get(f"SLURM_{name}") for name in VARIABLES}
    facts.update(node=job.node, leader=job.leader, clock=board.clock, tasks=1, cpus=len(os.sched_getaffinity(0)))
    facts["asked_gpus"] = asked_gpus()
    facts["limits"] = find_limits()
    if job.leader:
        facts.update(listener=listen(0, tell_node), sink=listen(0, Sink(job.token).serve), interfaces=own_interfaces())
        with contextlib.suppress(OSError):  # find_shared will say it
            job.folder.mkdir(exist_ok=True)
            (job.folder / job.node).touch()
    if isinstance(board, Head):
        facts.update(port=job.port, port_problem=board.port_problem)
        facts["ephemeral"] = list(map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    return facts


def play(job: Job, board: Head | Guest, process: Any, pipe: Any) -> None:
    """Go through the six rounds."""
    local = int(os.environ["SLURM_LOCALID"])
    roster = board.exchange("hello", hello(job, board))
    probes: dict[str, Callable] = {"gpus": find_gpus}
    if job.leader:
        probes.update(names=find_names, connections=find_connections, shared=find_shared, wheel=find_wheel)
    board.exchange("peers", side_by_side(lambda name: probes[name](job, roster), probes, 15))
    found = ask(process, pipe, "torch", IMPORT_SECONDS)
    torch = f"torch {found['torch']}" if isinstance(found["torch"], str) else f"no torch ({found['torch']['error']})"
    python = f"Python {found.get('version', '?')}, {torch}, {os.environ.get('IMAGE') or sys.executable}"
    posts = board.exchange("torch", {**found, "python": python, "local": local})
    posts = board.exchange("reduce", {"reduce": reduce(job, board, process, pipe, posts)})
    board.exchange("network", measure(job, board, roster, process, pipe, posts))


def finish(head: Head, process: Any, why: str = "") -> None:
    """Print the table, tidy up and end."""
    import verdict  # by task 0 alone: other nodes may not see the file

    reports = {rank: dict(facts) for rank, facts in sorted(head.posts["hello"].items())}
    for name in list(ROUNDS)[1:]:
        for rank, facts in list(head.posts[name].items()):
            reports.get(rank, {}).update(facts)
    text, status = verdict.table(reports, head.silent(), head.job, why)
    os.write(1, text.encode())  # not print: this may run in a signal handler, in the middle of another print
    if why:  # srun, ended as well, may not bring it to the log
        with contextlib.suppress(OSError):
            Path(f"preflight-{head.job.id}-early.out").write_text(text)
    shutil.rmtree(head.job.folder, ignore_errors=True)
    process.kill()
    time.sleep(0.5)  # so that what srun says to the end comes below the table
    os._exit(status)


def main() -> None:
    args, board = parse_args(), None
    try:
        job = read_job(args)
        context = multiprocessing.get_context("fork")  # this script is standard input, which cannot be read again
        pipe, other_end = context.Pipe()
        work = torch_in_image if os.environ.get("IMAGE") else torch_process
        process = context.Process(target=work, args=(job, other_end, pipe), daemon=True)
        process.start()  # before there are threads, as a fork wants it
        other_end.close()
        if job.rank == 0:
            board = Head(job)
            why = "ended early by SLURM (a dead node, a task that failed, scancel or the time limit)"
            signal.signal(signal.SIGTERM, lambda *_: finish(board, process, why))
        play(job, board or Guest(job), process, pipe)
        if board:
            finish(board, process)
        shutil.rmtree(job.folder, ignore_errors=True)  # for a folder that is not task 0's
        process.kill()
    except Exception as error:
        print(f"preflight.py: {NODE}: {describe(error)}", flush=True)
        if board:
            finish(board, process, describe(error))
    os._exit(int(os.environ["SLURM_PROCID"] == "0"))  # threads that hang in a look-up cannot be joined


if __name__ == "__main__":
    main()
