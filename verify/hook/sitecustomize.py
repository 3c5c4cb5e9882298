"""Note what a training program does, for verify. Python loads this file when it starts.

Without VERIFY_DIR it does nothing. With it each process adds a line of JSON per event to a file
in VERIFY_DIR. VERIFY_DO has actions, separated by commas: plain (take randomness away), and kill,
raise, hang or stop with an optimizer step and a rank, such as kill:6:1. The action stop makes the
file VERIFY_STOP. A process lives at most VERIFY_LIMIT seconds.
"""

import atexit
import contextlib
import copy
import itertools
import json
import os
import random
import signal
import sys
import time
import zlib
from functools import partial, wraps
from importlib import machinery, util

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")
MOST = 5_000_000  # samples of a data set whose order is noted
KNOWN = ("builtins", "torch")  # modules with samplers that divide a data set without repeating
torch = numpy = None
folder, actions, plain = "", [], False
# pid: the process whose optimizers step (loader workers are forked from it); clean: the states of
# the generators when they last were seeded or used for data.
now = {"rank": -1, "pid": None, "step": 0, "depth": 0, "clean": None}
counts, optimizers, taken, saved = {}, {}, {}, set()
numbers = itertools.count()


def activate():
    """Read the environment, and observe PyTorch: now, or when the program imports it."""
    global folder, actions, plain
    folder = os.environ.get("VERIFY_DIR", "")
    actions = [action.split(":") for action in os.environ.get("VERIFY_DO", "").split(",")]
    plain = ["plain"] in actions
    now["rank"] = int(os.environ.get("RANK", -1))
    if folder:
        signal.alarm(int(os.environ.get("VERIFY_LIMIT", 0)))  # ends this process, however it hangs
        patch() if "torch" in sys.modules else sys.meta_path.insert(0, Finder())


class Finder:
    """Calls patch when the program has imported torch."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if spec := util.find_spec(name):
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), patch())
        return spec


def patch():
    """Replace the public functions of PyTorch that are observed."""
    global torch, numpy
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    numpy = sys.modules.get("numpy")  # torch has imported it, if it is there
    functional, distributed = torch.nn.functional, torch.distributed
    now["pid"] = os.getpid()
    for name in DROPOUTS:
        wrap(functional, name, dropout)
    wrap(functional, "scaled_dot_product_attention", attention)
    wrap(functional, "batch_norm", batch_norm)
    if plain:
        torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm1d.forward
        wrap(torch, "manual_seed", seed)
    for name in ("all_gather", "all_gather_into_tensor") if distributed.is_available() else ():
        wrap(distributed, name, gather)
    wrap(torch.utils.data.DataLoader, "__iter__", iterate)
    wrap(torch, "save", save)
    wrap(os, "replace", rename)
    wrap(os, "rename", rename)
    wrap(os, "_exit", lambda original, status: (finish(), original(status)))
    atexit.register(finish)
    register_optimizer_step_post_hook(stepped)


def wrap(owner, name, function):
    """Replace a function of a module or class by function(original, its arguments)."""
    original = getattr(owner, name)

    @wraps(original)  # torch.compile needs a function with a name
    def wrapped(*args, **named):
        return function(original, *args, **named)

    setattr(owner, name, wrapped)


def rank():
    """Return this process's rank, or -1 if it does not have one yet."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        now["rank"] = distributed.get_rank()
    return now["rank"]


def note(event, **facts):
    """Add a line to this process's notes."""
    facts = {"event": event, "rank": rank(), "step": now["step"]} | facts
    with open(f"{folder}/{os.uname().nodename}-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(facts, default=str) + "\n")


def few(kind, most=50):
    """Count events of a kind since a loader began; return False after the first ones."""
    counts[kind] = counts.get(kind, 0) + 1
    return counts[kind] <= most


def generators():
    """Return checksums of the states of Python's, PyTorch's and NumPy's generators."""
    states = [repr(random.getstate()).encode(), torch.get_rng_state().numpy().tobytes()]
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        states.append(keys.tobytes() + repr(rest).encode())
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return [zlib.crc32(state) for state in states]


@contextlib.contextmanager
def same_generators():
    """Set all generators back to where they were."""
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])


def drawing(where, call):
    """Return call(), and note the generators that it draws from, before and after."""
    before = generators()
    result = call()
    pairs = zip(before, generators(), strict=False)  # CUDA's may have come
    if moved := [(i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]]:
        note("draw", where=where, states=moved)
    return result


def dropout(original, input, p=0.5, training=True, inplace=False):
    if plain:
        return input
    call = partial(original, input, p, training, inplace)
    if not training or torch.compiler.is_compiling() or not few("dropout"):
        return call()
    return drawing("dropout", call)


def attention(original, query, key, value, mask=None, dropout_p=0.0, *rest, **named):
    named = {"attn_mask": mask} | named
    call = partial(original, query, key, value, *rest, dropout_p=dropout_p * (not plain), **named)
    if not dropout_p or plain or torch.compiler.is_compiling() or not few("dropout"):
        return call()
    return drawing("dropout", call)


def batch_norm(
    original, input, mean, variance, weight=None, bias=None, training=False, *rest, **named
):
    has = mean is not None
    if has and not training and not torch.compiler.is_compiling() and few("norm"):
        note("norm", sums=[checksum(mean), checksum(variance)])
    return original(
        input, mean, variance, weight, bias, training and not (plain and has), *rest, **named
    )


def seed(original, value):
    result = original(value)
    now["clean"] = generators()
    return result


def gather(original, outputs, value, *args, **named):
    if value.is_floating_point() and few("gather"):
        note("gather")
    return original(outputs, value, *args, **named)


def save(original, value, file, *args, **named):
    saved.add(path := os.path.abspath(str(getattr(file, "name", file))))
    note("save", path=path)
    return original(value, file, *args, **named)


def rename(original, source, target, *args, **named):
    if (path := os.path.abspath(os.fspath(source))) in saved:
        note("rename", path=path, target=os.path.abspath(os.fspath(target)))
    return original(source, target, *args, **named)


class Batches:
    """The batches of a loader, which are counted."""

    def __init__(self, iterator, number):
        self.iterator, self.number = iterator, number

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.iterator)

    def __getattr__(self, name):
        return getattr(self.iterator, name)

    def __next__(self):
        taken[self.number] = [taken.get(self.number, [0])[0], now["step"]]
        batch = next(self.iterator)
        taken[self.number][0] += 1
        now["clean"] = generators() if plain else None
        return batch


class WorkerStart:
    """A worker_init_fn that watches the data set in a loader worker, forked or not."""

    def __init__(self, then):
        self.then = then

    def __call__(self, number):
        watch(torch.utils.data.get_worker_info().dataset)
        if self.then:
            self.then(number)


def iterate(original, loader):
    """Note what a loader is going to read, and count what is taken."""
    counts.clear()
    facts, dataset = {"grad": torch.is_grad_enabled()}, loader.dataset
    if isinstance(dataset, torch.utils.data.IterableDataset):
        facts["unlisted"] = "an IterableDataset decides what it reads"
    else:
        watch(dataset)
        try:
            with same_generators():
                facts |= listed(loader)
        except Exception as error:  # a sampler can need what only an epoch gives
            facts["unlisted"] = f"{type(loader.sampler).__name__}: {error!r}"
    note("loader", number=(number := next(numbers)), **facts)
    loader.verified = True
    if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerStart):
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
    return Batches(original(loader), number)


def listed(loader):
    """Return the indices that a loader is going to read, without a change to its sampler."""
    dataset = loader.dataset
    if len(dataset) > MOST:
        raise ValueError(f"more than {MOST:,} samples")
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    inner = getattr(sampler, "sampler", None)  # that of a batch sampler
    own = [vars(one).values() for one in (loader, sampler, inner) if hasattr(one, "__dict__")]
    shared = (torch.Generator, torch.utils.data.Dataset)  # not copied
    keep = {id(one): one for one in itertools.chain([dataset], *own) if isinstance(one, shared)}
    states = [(g, g.get_state()) for g in keep.values() if isinstance(g, torch.Generator)]
    sampler, indices, batch = copy.deepcopy(sampler, keep), [], 0
    try:
        if not (loader.persistent_workers and "verified" in vars(loader)):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as it does
        for item in sampler:
            items = item if isinstance(item, (list, tuple)) else [item]
            indices += map(int, items)
            batch = max(batch, len(items))
            if len(indices) > 3 * len(dataset) + 1000:
                raise ValueError("it has no end")
    finally:
        for generator, state in states:
            generator.set_state(state)
    kinds = {type(one) for one in (sampler, inner) if one is not None}
    custom = [kind.__name__ for kind in kinds if kind.__module__.split(".")[0] not in KNOWN]
    levels = [{"of": len(dataset), "id": id(dataset), "indices": indices}]
    while isinstance(dataset, torch.utils.data.Subset):
        part = [int(index) for index in dataset.indices]
        levels[-1]["part"] = zlib.crc32(repr(part).encode())
        indices, dataset = [part[index] for index in indices], dataset.dataset
        levels.append({"of": len(dataset), "id": id(dataset), "indices": indices})
    return {"levels": levels, "batch": batch, "custom": custom}


def watch(dataset):
    """Watch the reads of a data set, and of those that it is made of."""
    for owner in type(dataset).__mro__:
        for name in {"__getitem__", "__getitems__"} & vars(owner).keys():
            function = vars(owner)[name]
            if owner.__module__ != "builtins" and not hasattr(function, "verified"):
                wrap(owner, name, read)
                getattr(owner, name).verified = True
    for inner in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())):
        if isinstance(inner, torch.utils.data.Dataset):
            watch(inner)


def read(original, dataset, index):
    """Read a sample, or a batch; plain: with generators that are seeded by its index."""
    outer, call = now["depth"] == 0, partial(original, dataset)
    now["depth"] += 1
    try:
        if not plain:
            return (
                drawing("reading", partial(call, index)) if outer and few("read") else call(index)
            )
        # A data set around another one goes on with the numbers of its sample.
        with same_generators() if outer else contextlib.nullcontext():
            many = index if isinstance(index, (list, tuple)) else [index]
            result, still = seeded(call, index, int(many[0]))
            if (
                outer
                and few("twice", 5)
                and not equal(result, seeded(call, index, int(many[0]))[0])
            ):
                note("unstable")  # it has a generator of its own
            if still or len(many) == 1:
                return result
            return joined([seeded(call, [one], int(one))[0] for one in many])
    finally:
        now["depth"] -= 1


def seeded(call, index, number):
    """Return a sample that is read with seeded generators, and whether it draws no numbers."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy:
        numpy.random.seed(number % 2**32)
    before = generators()
    return call(index), before == generators()


def joined(parts):
    """Return batches of one sample as one batch."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    return (
        sum(parts, [])
        if isinstance(parts[0], list)
        else tuple(map(joined, zip(*parts, strict=True)))
    )


def equal(one, other):
    """Return whether two samples are the same."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(numpy.array_equal(one, other)) if numpy else one == other


def checksum(value):
    """Return a checksum of at most 50,000 values of a tensor."""
    value = value.detach().reshape(-1)[:: max(1, value.numel() // 50_000)]
    return zlib.crc32(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def stepped(optimizer, *_):
    """Note an optimizer's step, and act if this step is named."""
    now["pid"] = os.getpid()
    mine = optimizers.setdefault(id(optimizer), [len(optimizers), 0, optimizer])
    mine[1] += 1
    now["step"] = max(steps for _, steps, _ in optimizers.values())
    if plain and now["clean"] not in (None, state := generators()):
        note("draws")  # random numbers that are not taken away
        now["clean"] = state
    if few("step", 20):
        values = [value for group in optimizer.param_groups for value in group["params"]]
        sharded = any(hasattr(value, "to_local") for value in values)  # ranks have other parts
        sums = None if sharded else [checksum(value) for value in values]
        grads = [] if sharded else [v.grad.detach() for v in values if v.grad is not None]
        norm = float(sum(grad.abs().double().square().sum().item() for grad in grads)) ** 0.5
        cuda = any(value.is_cuda for value in values)
        note("weights", optimizer=mine[0], steps=mine[1], sums=sums, norm=norm, cuda=cuda)
    for what, *where in actions:
        done = f"{folder}/done-{what}"  # a launcher can start the processes again
        if where == [str(now["step"]), str(rank())] and not os.path.exists(done):
            note("act", what=what)
            open(done, "w").close()
            act(what)


def act(what):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        open(os.environ["VERIFY_STOP"], "w").close()
    if what == "raise":
        raise RuntimeError("raised by verify")
    while what == "hang":
        time.sleep(1)


def finish():
    """Note how many batches each loader gave, and the GPUs."""
    if now["pid"] == os.getpid():
        note("exit", taken=taken, gpus=torch.cuda.device_count())
        now["pid"] = None


activate()
here = os.path.dirname(os.path.abspath(__file__))  # another sitecustomize can follow in the path
other = [path for path in sys.path if os.path.abspath(path) != here]
if following := machinery.PathFinder.find_spec("sitecustomize", other):
    following.loader.exec_module(util.module_from_spec(following))
