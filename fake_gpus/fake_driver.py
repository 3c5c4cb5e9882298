"""The Python half of the fake GPUs: what `torch.cuda` asks the driver, and NCCL. See gpus.cpp for the rest.

It replaces what PyTorch's Python calls in C++, and nothing above that: torch.cuda itself, autocast, DDP and FSDP are
PyTorch's own, so that a name which they do not have is missed here, too.
"""

import contextlib
import glob
import importlib.util
import json
import os
import sys
import time
import types
import uuid

VERSION = "2.15.0"  # of PyTorch, whose internals these are
MEMORY = 16 << 30


def visible():
    """Return how many GPUs the process sees: those of CUDA_VISIBLE_DEVICES, as the driver reads it."""
    there = int(os.environ["FAKE_GPUS"])
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return there
    if names.startswith("MIG-"):
        return 1  # however many are named
    count = 0
    for name in names.split(","):
        if not name.strip().isdigit() or int(name) >= there:
            break  # the driver ignores it, and all after it
        count += 1
    return count


def is_mig():
    """Return whether the GPUs are slices of one, which NVML cannot count."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")


class Context:
    """Whether this process has initialized CUDA, and whether its parent had, before a fork."""

    touched = bad_fork = False


def in_child():
    Context.bad_fork = Context.touched


def touch(result=None):
    """Note that CUDA is initialized: a fork from now on is no good."""
    if Context.bad_fork:
        raise RuntimeError("fake GPUs: CUDA was initialized before this process was forked")
    Context.touched = True
    return result


def load(path):
    spec = importlib.util.spec_from_file_location("gpus", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(torch):
    """Have PyTorch find as many GPUs as FAKE_GPUS and CUDA_VISIBLE_DEVICES say."""
    if torch.__version__.partition("+")[0] != VERSION or not torch.version.cuda:
        sys.exit(f"fake GPUs: they know PyTorch {VERSION}, built for CUDA, not {torch.__version__}")
    gpus = load(os.path.join(os.path.dirname(__file__), "gpus.so"))
    calls = {}
    with quiet():  # PyTorch warns that kernels are replaced
        gpus.install(visible())
    os.register_at_fork(after_in_child=in_child)
    replace_driver(torch, gpus, calls)
    replace_streams(torch)
    replace_accelerator(torch, gpus)
    replace_nccl(torch, gpus)
    torch.backends.cudnn.enabled = False  # which chooses kernels of its own, as these do
    for switch in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{switch}_sdp")(False)
    follow_clipping(torch, gpus)
    if os.environ.get("FAKE_GPUS_RECORD"):
        keep_record(torch, gpus, calls)


@contextlib.contextmanager
def quiet():
    """Drop what C++ writes to stderr meanwhile."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def replace_driver(torch, gpus, calls):
    """Replace the functions of `torch._C` behind torch.cuda; count calls of torch.cuda's own functions."""

    def count():  # as with the real one, the question alone initializes the driver
        if Context.bad_fork:
            return 0
        return touch(visible())

    def init():
        touch()
        torch.cuda.default_generators = tuple(torch.Generator() for _ in range(visible()))

    def stats(device):
        now, peak = gpus.memory()
        return {"allocated_bytes": {"all": {"current": now, "peak": peak}}}

    functions = {
        "init": init,
        "getDeviceCount": count,
        "getDevice": gpus.get_device,
        "setDevice": lambda device: touch(gpus.set_device(device)),
        "exchangeDevice": gpus.exchange_device,
        "maybeExchangeDevice": gpus.exchange_device,
        "isInBadFork": lambda: Context.bad_fork,
        "synchronize": lambda: gpus.count("synchronize"),
        "memoryStats": stats,
        "resetPeakMemoryStats": lambda device: gpus.reset_peak(),
        "emptyCache": lambda: None,
        "hasPrimaryContext": lambda device: gpus.own() == device,
        "isCurrentStreamCapturing": lambda: False,
        "getArchFlags": lambda: "sm_80",
        "getCompiledVersion": lambda: 13020,
        "ipc_collect": lambda: None,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = gpus.exchange_device
    torch.cuda._is_in_bad_fork = functions["isInBadFork"]
    torch.cuda._cudart = torch.cuda._cudart or types.SimpleNamespace()
    torch.cuda._device_count_nvml = lambda: -1 if is_mig() else visible()
    torch.cuda._queued_calls.clear()  # they look at the GPU's age
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.mem_get_info = lambda device=None: (MEMORY, MEMORY)
    properties = {"name": "fake GPU", "major": 8, "minor": 0, "total_memory": MEMORY, "multi_processor_count": 1}
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(**properties, gcnArchName="")
    torch.cuda.get_device_name = lambda device=None: "fake GPU"
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    real = torch.UntypedStorage.resize_

    def resize_(storage, size):  # FSDP frees weights, and takes memory for them again
        if storage.device.type != "cuda":
            return real(storage, size)
        gpus.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    torch.UntypedStorage.resize_ = resize_
    copied = torch.UntypedStorage.clone

    def clone(storage):  # deepcopy() of a tensor: Lightning copies the metrics that it has logged
        if storage.device.type != "cuda":
            return copied(storage)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = clone
    for name in ("set_device", "synchronize", "max_memory_allocated", "reset_peak_memory_stats", "device_count"):
        setattr(torch.cuda, name, counted(getattr(torch.cuda, name), name, calls))


def counted(function, name, calls):
    def call(*args, **kwargs):
        calls[name] = calls.get(name, 0) + 1
        return function(*args, **kwargs)

    return call


def replace_streams(torch):
    """Streams and events of GPUs that compute at once: whoever waits has nothing to wait for."""

    class Stream:
        def __init__(self, device=None, priority=0, **_):
            self.device = torch.device("cuda", torch.cuda.current_device() if device is None else gpu(device))
            self.device_index, self.stream_id, self.device_type = self.device.index, 0, 1
            self.cuda_stream = self.priority = 0

        def record_event(self, event=None):
            return event or Event()

        def wait_event(self, event):
            pass

        def wait_stream(self, stream):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

        def is_capturing(self):
            return False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __eq__(self, other):
            return isinstance(other, Stream) and self.device == other.device

        def __hash__(self):
            return hash(self.device)

    class Event:
        def __init__(self, enable_timing=False, **_):
            pass

        def record(self, stream=None):
            pass

        def wait(self, stream=None):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

        def elapsed_time(self, other):
            return 1.0

    def gpu(device):
        return device if isinstance(device, int) else torch.device(device).index or 0

    def stream(device=None):
        return Stream(device)

    torch.cuda.Stream = torch.cuda.streams.Stream = Stream
    torch.cuda.Event = torch.cuda.streams.Event = Event
    torch.cuda.current_stream = torch.cuda.default_stream = stream
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext(stream)


def replace_accelerator(torch, gpus):
    """The functions of `torch._C` behind torch.accelerator."""
    functions = {
        "getAccelerator": lambda: torch.device("cuda") if visible() else None,
        "getDeviceIndex": gpus.get_device,
        "setDeviceIndex": lambda device: touch(gpus.set_device(device)),
        "exchangeDevice": gpus.exchange_device,
        "maybeExchangeDevice": gpus.exchange_device,
        "getStream": lambda device=None: torch.cuda.Stream(),
        "setStream": lambda stream: None,
        "synchronizeDevice": lambda device=None: gpus.count("synchronize"),
        "emptyCache": lambda: None,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_accelerator_{name}", function)
    torch.accelerator.device_count = lambda: torch.cuda.device_count()
    torch.accelerator.is_available = lambda: torch.cuda.device_count() > 0
    torch.accelerator.current_stream = lambda device=None: torch.cuda.Stream(device)
    torch.get_device_module = device_module(torch, torch.get_device_module)


def device_module(torch, real):
    def get(device=None):
        return torch.cuda if device is None and visible() else real(device)

    return get


def replace_nccl(torch, gpus):
    """Register a process group named NCCL, which takes tensors on GPUs alone and computes with Gloo."""
    import torch.distributed.distributed_c10d as c10d

    def create(options, backend_options):
        c10d._nccl2_device(options)  # PyTorch's choice of a device, where none was named
        gloo = c10d._create_gloo_process_group(options, None)
        gpus.count("nccl group")
        return gpus.Nccl(gloo, options.group_rank, options.group_size)

    c10d._NCCL_AVAILABLE = True
    c10d.Backend._ensure_backend_registered("nccl")
    c10d.Backend._plugins["NCCL"] = c10d.Backend._BackendPlugin(create, True)
    torch.cuda.nccl.version = lambda: (2, 27, 0)


def follow_clipping(torch, gpus):
    """Refuse to clip gradients that a GradScaler has scaled and not unscaled yet: they would nearly vanish."""
    scaled = []  # optimizers are not known to clip_grad_norm_: the last scale() and unscale_() count
    scaler, clip = torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_

    def scale(self, outputs, *args, real=scaler.scale):
        scaled[:] = [True] * self.is_enabled()
        return real(self, outputs, *args)

    def unscale_(self, optimizer, real=scaler.unscale_):
        scaled.clear()
        return real(self, optimizer)

    def clip_grad_norm_(*args, **kwargs):
        if scaled:
            raise RuntimeError("fake GPUs: gradients are clipped before GradScaler.unscale_")
        gpus.count("clip")
        return clip(*args, **kwargs)

    scaler.scale, scaler.unscale_ = scale, unscale_
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def wait_for_others():
    """Wait until the ranks that this process has started have ended: Lightning's first process ends them with itself.

    They have LOCAL_RANK in their environment, and it has not. What they leave is written by then.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not has_rank("self"):
        children = []
        for path in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError), open(path, "rb") as file:  # names are cut after 15 bytes
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    children.append(path.split("/")[2])
        if not any(map(has_rank, children)):
            break
        time.sleep(0.05)


def has_rank(pid):
    """Return whether a process was started with LOCAL_RANK; one that has ended was not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return b"\0LOCAL_RANK=" in b"\0" + file.read()
    return False


def keep_record(torch, gpus, calls):
    """Write at the process's end, also one by os._exit, what was done, to a file in the folder FAKE_GPUS_RECORD."""
    import atexit

    names = {}  # by process: one that calls what is registered with atexit, and then os._exit, writes its file again

    def write():
        facts = {
            "pid": os.getpid(),
            "rank": os.environ.get("RANK"),
            "own": gpus.own(),
            "calls": calls,
            "counts": gpus.counts(),
        }
        facts |= {"argv": sys.argv, "initialized": Context.touched}
        if gpus.own() >= 0:
            own = names.setdefault(os.getpid(), f"{os.getpid()}-{uuid.uuid4().hex[:6]}.json")
            name = os.path.join(os.environ["FAKE_GPUS_RECORD"], own)
            with open(f"{name}.part", "w") as file:
                json.dump(facts, file)
            os.replace(f"{name}.part", name)
            wait_for_others()

    def exit_now(status, real=os._exit):
        write()
        real(status)

    atexit.register(write)
    os._exit = exit_now
