"""What training changes and no checkpoint has, such as an average of the weights.

A resumed run would begin it anew, and nothing would say so. Rank 0 looks for it once, when the
first checkpoint of a run is written.
"""

import contextlib
import gc
import sys
import zlib
from collections import deque
from itertools import islice
from pathlib import Path

from . import hangs

PAGE = "See docs/more-state.md of the repository"
# note() writes here a checksum of each tensor that find() has found before the first step.
checksums = {}


def note():
    """Note what is there before the first step."""
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):  # what only advises must end no run
            checksums.update({place: checksum for place, _, checksum in find(set())})


def lines(state):
    """Return what to print if this is the first checkpoint, whose content is `state`."""
    with contextlib.suppress(Exception):  # as above
        return compare(state) if checksums else []
    return []


def compare(state):
    """Return lines(), and forget what was noted, so that nothing is looked at again."""
    said = []
    noted = dict(checksums)
    checksums.clear()
    saved = {tensor.data_ptr() for tensor in tensors_in(state)}
    optimizer = sys.modules["torch"].optim.Optimizer
    names = set()
    for place, kind, checksum in find(saved):
        # An optimizer gets its state in the first step. Others that are new may stay as they are.
        default = None if issubclass(kind, optimizer) else checksum
        if noted.get(place, default) != checksum:
            names.add(kind.__name__)
    if names:
        what = f"training changes what the checkpoint does not have ({', '.join(sorted(names))})"
        said.append(f"{what}: a resumed run begins it anew. {PAGE}")
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), optimizer)]
    trained = [weight for one in optimizers for weight in one.state]  # some have words, too
    frozen = sum(not getattr(weight, "requires_grad", True) for weight in trained)
    if frozen:
        what = f"weights that were trained before, {frozen} tensors, are frozen now"
        said.append(f"{what}: is this the right stage? {PAGE}")
    return said


def find(saved):
    """Yield a place, a class and a checksum for each tensor whose address is not in `saved`.

    The tensors are those of all optimizers and modules, and of objects of the example's classes.
    """
    readers = {}
    for one in gc.get_objects():
        kind = type(one)
        if kind not in readers:
            readers[kind] = reader(kind)
        if readers[kind] is None:
            continue
        tensors = []
        with contextlib.suppress(AttributeError):  # it is not complete yet
            tensors = tensors_in(readers[kind](one))
        for number, tensor in enumerate(tensors):
            if tensor.data_ptr() not in saved:
                first = tensor.detach().reshape(-1)[:1000].tolist()
                checksum = zlib.crc32(repr(first).encode())
                yield (id(one), number), kind, checksum


def reader(kind):
    """Return a function that returns what an object of a class may train, or None."""
    torch = sys.modules["torch"]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "site-packages"
    if issubclass(kind, torch.optim.Optimizer):
        return lambda optimizer: optimizer.state
    if issubclass(kind, torch.utils.data.Dataset):
        return None  # it may keep samples that it has read
    if "site-packages" not in file and is_own(Path(file).resolve()):
        return lambda own: getattr(own, "__dict__", {})
    if issubclass(kind, torch.nn.Module):
        return lambda module: [*module.parameters(False), *module.buffers(False)]
    return None


def is_own(path):
    """Return whether a file is train.py or one beside it."""
    return hangs.is_own(path) and not path.is_relative_to(hangs.PLUMBING)


def tensors_in(value, depth=6):
    """Return the tensors in nested lists and dicts that are whole, and no part of a graph."""
    torch = sys.modules["torch"]
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        whole = value.layout is torch.strided and value.device.type != "meta" and value.numel()
        return [value] if whole and value.grad_fn is None else []
    if isinstance(value, dict):
        value = list(islice(value.values(), 10_000))
    if not depth or not isinstance(value, (list, tuple, deque)):
        return []
    # A list may have millions of labels. A state has its tensors in dicts.
    several = islice(value, None if type(value) is tuple else 1000)
    return [tensor for part in several for tensor in tensors_in(part, depth - 1)]
