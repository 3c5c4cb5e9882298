"""Fake GPUs: the CPU computes, Gloo stands for NCCL, and a log lists what was called."""

import contextlib
import os
import socket
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

GPUS = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
PLACES = WeakTensorKeyDictionary()  # the GPU of a tensor, or "pinned"; the others are on the CPU
BACKENDS, NOTED = {}, set()  # by type of device; the lines of the log
STATE = {"device": 0, "compared": False}
LOG, _ = tempfile.mkstemp(".log", f"{os.getpid()}-", os.environ["FAKE_GPUS"])
# These functions take tensors of both devices.
FREE = ("copy_", "__getitem__", "__setitem__", "set_", "_has_compatible_shallow_copy_type")
COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter_tensor", "barrier", "send", "recv"),
)


def note(what):
    """Write a line to this process's log, once."""
    if what not in NOTED:
        NOTED.add(what)
        os.write(LOG, f"{what}\n".encode())


def find(device):
    """Return the GPU that this names, or None for another device."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return None
    index = STATE["device"] if device.index is None else device.index
    if index >= len(GPUS):
        raise RuntimeError(f"CUDA error: invalid device ordinal: cuda:{index} of {len(GPUS)} GPUs")
    return torch.device("cuda", index)


def gpu(tensor):
    """Return the GPU that a tensor is on, or None."""
    place = PLACES.get(tensor) if isinstance(tensor, torch.Tensor) else None
    return place if isinstance(place, torch.device) else None


def put(values, device):
    """Note where tensors are now; return them."""
    for tensor in tensors(values):
        PLACES.pop(tensor, None)
        if device:
            PLACES[tensor] = device
    return values


def tensors(values):
    """Return the tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if not isinstance(values, (list, tuple)):
        return []
    return [one for value in values for one in tensors(value)]


class FakeGPUs(TorchFunctionMode):
    """Do on the CPU what PyTorch would do on a GPU, and refuse what a GPU would refuse."""

    def __torch_function__(self, function, _, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{getattr(function.__self__, '__name__', '')}.{name}"
        own = gpu(args[0]) if args else None
        if name in ("to", "cuda", "cpu"):
            return self.move(name, own, *args, **kwargs)
        if name == "data.__set__":  # module.to() does so with each weight
            function(*args)
            return put(args[0], gpu(args[1]))
        if own and name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {own} tensor to numpy. Use Tensor.cpu() first")
        if own and name in ("device.__get__", "is_cuda.__get__", "is_cpu.__get__"):
            return {"device": own, "is_cuda": True, "is_cpu": False}[name.partition(".")[0]]
        device = self.compare(name, args, kwargs)
        if kwargs.get("device") is not None:
            device = find(kwargs["device"])
            kwargs = kwargs | {"device": "cpu"} if device else kwargs
        if device and name.startswith(("_fused", "_amp")):
            note(f"{name} on {device}")
        result = function(*args, **kwargs)
        return put(result, device) if device else result

    def move(self, name, own, tensor, *args, **kwargs):
        """Tensor.to, .cuda and .cpu: return a copy on another device, or the tensor itself."""
        place, target = kwargs.pop("device", args[0] if args else None), own
        place = name if place is None and name != "to" else place
        if isinstance(place, (str, int, torch.device)):
            target = find(place)
            args = ("cpu" if target else place, *args[1:])
        elif isinstance(place, torch.Tensor):
            target = gpu(place)
        result = torch.Tensor.to(tensor, *args, **kwargs)
        if target == own:
            return put(result, own)
        note(f"copied from {own or PLACES.get(tensor, 'ordinary')} memory to {target or 'the CPU'}")
        return put(result.clone() if result is tensor else result, target)

    def compare(self, name, args, kwargs):
        """Return the GPU of a function's tensors; all but single numbers have to be on it."""
        given = tensors([*args, kwargs])
        found = {place for place in map(gpu, given) if place}
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        left = [one for one in given if not gpu(one)]
        left = [one for one in left if one.dim() or (in_place and one is args[0])]
        if len(found) > 1 or (found and left and name not in FREE):
            places = [*map(str, found), *(["cpu"] * bool(left))]
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} on {places}")
        return gpu(args[0]) if name in FREE else next(iter(found), None)


class Stream:
    """A stream, or an event, of a GPU that computes at once: nothing has to be waited for."""

    def __init__(self, *_, **__):
        note("stream or event")

    def wait(self, *_):
        pass

    wait_stream = wait_event = record_event = record = synchronize = wait

    def is_capturing(self):
        return False


def communicate(name, values, group):
    """Note which backend sends tensors; refuse a device without one, and a GPU of two ranks."""
    for tensor in tensors(values):
        device = gpu(tensor)
        kind = "cuda" if device else "cpu"
        backend = BACKENDS.get(kind)
        if not backend:
            raise RuntimeError(f"No backend type associated with device type {kind}: {name}")
        note(f"{name} by {backend} on {device or 'the CPU'}")
        if backend == "nccl" and not group and not STATE["compared"]:
            STATE["compared"], found = True, [None] * dist.get_world_size()
            own = (os.environ.get("SLURMD_NODENAME", socket.gethostname()), GPUS[device.index])
            dist.all_gather_object(found, own)
            if found.count(own) > 1:
                raise RuntimeError(f"Duplicate GPU detected: two ranks use {device}")


def collective(name, real):
    """Return a function of torch.distributed that first looks at its tensors."""

    def call(*args, **kwargs):
        kwargs.pop("device_ids", None)  # of a barrier: Gloo does not take it
        group = any(isinstance(one, dist.ProcessGroup) for one in (*args, *kwargs.values()))
        communicate(name, [*args, kwargs], group)
        return real(*args, **kwargs)

    return call


def replace(place, **answers):
    """Replace functions of a module by other functions, by what they return, or by classes."""

    def call(*args, _name, _answer, **kwargs):
        note(f"{place.__name__}.{_name}")
        return _answer(*args, **kwargs) if callable(_answer) else _answer

    for name, answer in answers.items():
        if not isinstance(answer, type):
            answer = partial(call, _name=name, _answer=answer)
        setattr(place, name, answer)


def install():
    """Replace what needs a GPU in this process's PyTorch."""

    def set_device(device):
        STATE["device"] = find(device).index
        note(f"set_device to cuda:{STATE['device']}")

    def pin_memory(tensor, *_):
        if gpu(tensor):
            raise RuntimeError(f"cannot pin a tensor on {gpu(tensor)}")
        return put(tensor.clone(), "pinned")

    start_autocast, start_ddp = torch.autocast.__init__, DistributedDataParallel.__init__
    start_group = dist.init_process_group

    def autocast(self, device_type, dtype=None, enabled=True, *args, **kwargs):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
            note(f"autocast to {dtype}" if enabled else "autocast, not enabled")
        start_autocast(self, device_type, dtype, enabled, *args, **kwargs)

    def wrap(self, module, *args, process_group=None, **kwargs):
        communicate("DistributedDataParallel", list(module.parameters()), process_group)
        start_ddp(self, module, *args, process_group=process_group, **kwargs)

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        place = "any GPU" if device_id is None else find(device_id)
        note(f"init_process_group with {backend}, {place}")
        pairs = {None: "cpu:gloo,cuda:nccl", "nccl": "cuda:nccl"}.get(backend, backend)
        pairs = pairs if ":" in pairs else f"cpu:{pairs},cuda:{pairs}"
        BACKENDS.update(pair.split(":") for pair in pairs.split(","))
        known = {*BACKENDS.values()} <= {"gloo", "nccl"}
        start_group("gloo" if known else backend, *args, **kwargs)

    common = dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 1 << 20)
    common |= dict.fromkeys(["synchronize", "empty_cache", "reset_peak_memory_stats"])
    common |= {"is_available": True, "device_count": len(GPUS)}
    common |= {"current_stream": Stream, "Stream": Stream}
    device = {"current_device": lambda: STATE["device"], "set_device": set_device}
    replace(torch.accelerator, **common, current_accelerator=torch.device("cuda"))
    replace(torch.accelerator, **{f"{name}_index": answer for name, answer in device.items()})
    replace(torch.cuda, **common, **device, Event=Stream, stream=contextlib.nullcontext)
    replace(torch.cuda, is_current_stream_capturing=False, is_initialized=True)
    replace(torch.cuda, is_bf16_supported=True, get_device_capability=(8, 0))
    replace(torch.cuda, get_device_name="fake GPU", get_rng_state_all=[], set_rng_state_all=None)
    for name in COLLECTIVES:
        setattr(dist, name, collective(name, getattr(dist, name)))
    dist.init_process_group, dist.is_nccl_available = init_process_group, lambda: True
    torch.autocast.__init__, DistributedDataParallel.__init__ = autocast, wrap
    torch.Tensor.pin_memory = pin_memory
    FakeGPUs().__enter__()
