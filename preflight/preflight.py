"""Collect facts about the nodes of a job. run.slurm starts this program in each task:

    python - nodes NODE...   names, connections, clocks, folder, driver of the GPUs
    python - torch NODE...   PyTorch, its GPUs, an all-reduce over all tasks, links between nodes
    python - mpi NODE...     how many processes MPI counts

Each fact is one line of standard output, which srun carries to verdict.py. So a broken network
between the nodes loses no fact, and a program that crashes or hangs loses only its later facts.
"""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

JOB, RANK, WORLD, LOCAL = (
    int(os.environ[f"SLURM_{name}"]) for name in ("JOB_ID", "PROCID", "STEP_NUM_TASKS", "LOCALID")
)
NODE = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
PORT = 10000 + JOB % 20000  # that of the examples' run.slurm
ANSWER_SECONDS = 15  # for a look-up, a connection, a shared file
JOIN_SECONDS = 60  # for all tasks to import torch and to meet
MEGABYTES = 32  # of the tensor that is all-reduced, or sent from node to node
MOST_PEERS = 16  # to which a node sends


def tell(**facts):
    """Print facts as one line. A line above 1,000 bytes might arrive in pieces: srun cuts it."""
    print("preflight", json.dumps({"rank": RANK, "node": NODE, **facts}), flush=True)


def describe(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def ask_all(function, items):
    """Return {item: function(item)}, asked at the same time; an error is {"error": text}."""
    pool, end = ThreadPoolExecutor(64), time.monotonic() + ANSWER_SECONDS
    futures = {item: pool.submit(function, item) for item in items}
    answers = {}
    for item, future in futures.items():
        try:
            answers[item] = future.result(max(0, end - time.monotonic()))
        except TimeoutError:
            answers[item] = {"error": f"no answer within {ANSWER_SECONDS} s"}
        except Exception as error:
            answers[item] = {"error": describe(error)}
    return answers


# nodes: with Python alone.


class Server:
    """Tells other nodes the name and the clock of this one."""

    def __init__(self):
        self.visitors, self.problem = set(), ""
        try:
            self.listen(PORT)
        except OSError as error:
            self.problem = describe(error)
            self.listen(PORT + 1)

    def listen(self, port):
        both = socket.has_dualstack_ipv6()  # a network may have IPv4 or IPv6 alone
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", port), family=family, backlog=512, dualstack_ipv6=both)
        threading.Thread(target=self.accept, args=(server,), daemon=True).start()

    def accept(self, server):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        try:
            with connection:
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(json.dumps([JOB, NODE, time.time()]).encode() + b"\n")
                self.visitors.add(connection.makefile().readline(300).strip())
        except (OSError, ValueError):  # the other end tells it
            pass


def look_up(name):
    """Return the addresses of a node's name."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(answer[4][0]) for answer in found})


def knock(name):
    """Return which node answers under this name, and how far its clock is from ours.

    It may start later than this one.
    """
    end, problem = time.monotonic() + ANSWER_SECONDS - 6, None
    while time.monotonic() < end:
        for port in PORT, PORT + 1:
            try:
                before = time.time()
                with socket.create_connection((name, port), timeout=5) as connection:
                    job, node, clock = json.loads(connection.makefile().readline(1000))
                    after = time.time()
                    if job == JOB:
                        connection.sendall(f"{NODE}\n".encode())
                        # The other clock was read between our two readings.
                        return {"node": node, "apart": max(0, before - clock, clock - after)}
            except OSError as error:
                problem = problem or error
            except (ValueError, TypeError):
                pass
            problem = problem or ValueError("another program or job answers")
        time.sleep(0.3)
    raise problem


def find_driver():
    """Return driver, compute capability and name of each GPU, and whether there is AMD's driver."""
    found = {"gpus": [], "amd": os.path.exists("/dev/kfd")}
    # An nvidia-smi of driver 470 does not know compute_cap.
    for fields in "driver_version,compute_cap,name", "driver_version,name":
        if shutil.which("nvidia-smi") and not found["gpus"]:
            words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
            try:
                done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=10)
            except (OSError, subprocess.SubprocessError) as error:
                return {**found, "problem": describe(error)}
            lines = re.findall(r"^([\d.]+), (?:([\d.]+), )?(.+)$", done.stdout, re.MULTILINE)
            found["gpus"] = [[driver, known, name[:40]] for driver, known, name in lines[:8]]
    return found


def see_files(folder, nodes):
    """Return the nodes whose file in the working folder does not show up here."""
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        # A listing makes NFS ask the server. "No such file" might come from its memory.
        unseen = sorted(set(nodes) - set(os.listdir(folder)))
        if not unseen or time.monotonic() > end:
            return unseen
        time.sleep(0.2)


def find_nodes(nodes):
    """Tell what this node finds of itself and of the others. The first task of a node does it."""
    tell(asked_gpus=asked_gpus())
    if LOCAL > 0:
        return
    server, start = Server(), time.monotonic()
    tell(port=PORT, port_problem=server.problem)
    tell(driver=find_driver())
    tell(interfaces=[name for _, name in socket.if_nameindex() if name != "lo"][:20])
    folder = Path(f".preflight-{JOB}").absolute()
    folder.mkdir(exist_ok=True)
    (folder / NODE).touch()
    for name, found in ask_all(look_up, nodes).items():
        tell(names={name: found})
    others = [node for node in nodes if node != NODE]
    answers = ask_all(knock, others)
    for name, answer in answers.items():
        tell(connections={name: answer})
    alive = [name for name in others if answers[name].get("node") == name]
    tell(folder=os.getcwd()[:300], unseen=see_files(folder, [NODE, *alive])[:9])
    # Others still look for this node and for its file.
    while not server.visitors.issuperset(alive) and time.monotonic() < start + 3 * ANSWER_SECONDS:
        time.sleep(0.05)


# torch.


def asked_gpus():
    """Return how many GPUs of this node the job was given."""
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)


def try_gpus(torch):
    """Return how many GPUs compute, of those that this task would use, and the first problem."""
    count = torch.cuda.device_count()  # too many where CUDA does not accept the driver
    alone = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0] == "1"
    mine = range(asked_gpus()) if alone else [LOCAL]
    problem = ""
    for device in mine if asked_gpus() else []:
        try:
            torch.ones(1, device=f"cuda:{device}").sum().item()
        except Exception as error:
            problem = problem or describe(error).split(". ")[0]
            count -= device < count
    return count, problem


def try_torch(_):
    """Tell what torch can use, and the MB/s of an all-reduce over all tasks with each backend."""
    python = f"{sys.executable}, Python {sys.version.split()[0]}"
    try:
        import torch
        import torch.distributed as dist
    except BaseException as error:  # even SystemExit
        tell(python=f"{python}, no torch: {describe(error)}")
        return
    from datetime import timedelta

    tell(python=f"{python}, torch {torch.__version__}")
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU only"
    usable, problem = try_gpus(torch)
    tell(build=f"torch {torch.__version__} ({build})", usable=usable, gpu_problem=problem)

    # The address that SLURM itself has reached serves even if names are broken.
    os.environ["MASTER_ADDR"] = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    os.environ.update(MASTER_PORT=str(PORT), RANK=str(RANK), WORLD_SIZE=str(WORLD))
    limit = timedelta(seconds=JOIN_SECONDS)
    backend, device, group = "gloo", torch.device("cpu"), None
    try:
        tell(reduce={"gloo": {"error": "it did not end"}})  # overwritten below
        dist.init_process_group("gloo", timeout=limit)
        tell(reduce={"gloo": all_reduce(torch, dist, device, group)})
        measure_links(torch, dist)
        has_gpu = torch.tensor([float(usable > LOCAL and asked_gpus() > 0)])
        dist.all_reduce(has_gpu)
        if has_gpu[0].item() == WORLD:
            backend, device = "nccl", torch.device("cuda", LOCAL)
            tell(reduce={"nccl": {"error": "it did not end"}})
            torch.cuda.set_device(device)
            group = dist.new_group(backend=backend, timeout=timedelta(seconds=30))
            tell(reduce={"nccl": all_reduce(torch, dist, device, group)})
    except Exception as error:
        tell(reduce={backend: {"error": describe(error)}})


def all_reduce(torch, dist, device, group):
    """Return the MB/s of an all-reduce over all tasks, whose sum has to be right."""
    tensor = torch.ones(MEGABYTES * 250_000, device=device)
    dist.all_reduce(tensor, group=group)  # the first one also makes connections
    if tensor[0].item() != WORLD:
        raise ValueError(f"the sum is {tensor[0].item():g}, not {WORLD}")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        tensor[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return MEGABYTES / min(seconds)  # the best: others may have waited for a busy core


def measure_links(torch, dist):
    """Tell the MB/s from other nodes to this one: in each round all send to another one."""
    places = [["", 0]] * WORLD
    dist.all_gather_object(places, [NODE, LOCAL])
    leaders = [rank for rank, (_, local) in enumerate(places) if local == 0]
    sent, received = torch.ones(MEGABYTES * 250_000), torch.ones(MEGABYTES * 250_000)
    for shift in range(1, min(len(leaders), MOST_PEERS + 1)):
        dist.barrier()
        if LOCAL == 0:
            place = leaders.index(RANK)
            source = leaders[place - shift]
            start = time.perf_counter()
            sending = dist.isend(sent, leaders[(place + shift) % len(leaders)])
            dist.recv(received, source)
            tell(rates={places[source][0]: MEGABYTES / (time.perf_counter() - start)})
            sending.wait()


# mpi.


def try_mpi(_):
    """Have MPI count its processes. Where srun's PMIx does not fit, each one is alone."""
    try:
        mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)  # Open MPI 4 and 5
        world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
    except OSError:
        mpi = ctypes.CDLL("libmpi.so.12", ctypes.RTLD_GLOBAL)  # MPICH, Intel MPI
        world = 0x44000000
    size = ctypes.c_int()
    tell(mpi=0, tasks=WORLD)  # MPI_Init may end this process
    mpi.MPI_Init(None, None)
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    tell(mpi=size.value)
    mpi.MPI_Finalize()


def main():
    what, nodes = sys.argv[1], sys.argv[2:]
    functions = {"nodes": find_nodes, "torch": try_torch, "mpi": try_mpi}
    try:
        functions[what](nodes)
        tell(done={what: ""})
    except Exception as error:
        tell(done={what: describe(error)})
    os._exit(0)  # a thread that hangs in a look-up cannot be joined


if __name__ == "__main__":
    main()
