"""Note what a training program does, for verify. Python loads this file when it starts.

Each process writes notes to a file in VERIFY_DIR, as lines of JSON. VERIFY_DO is "plain" (without
randomness), or an action, an optimizer step and a rank: kill:6:1.
"""

import atexit
import copy
import json
import math
import os
import pickle
import random
import signal
import sys
import time
import zlib
from functools import partial, wraps
from importlib import machinery, util


class Hook:
    """The observer of this process. Many methods replace a function, `original`."""

    def __init__(self):
        """Replace the public functions of PyTorch that are observed."""
        self.folder, do = os.environ["VERIFY_DIR"], os.environ["VERIFY_DO"]
        self.what, *self.where = do.split(":")  # an action, its step and rank
        self.plain, self.process = do == "plain", os.getpid()
        self.rank, self.step = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", -1))), 0
        self.loaders, self.saved, self.inside = [], {}, []  # inside: optimizers that are in step()
        self.clean = None  # the generators' states after the last seeding or batch
        functional = torch.nn.functional
        wrap(functional, self.dropout, "dropout", "dropout1d", "dropout2d", "dropout3d")
        wrap(functional, self.dropout, "alpha_dropout", "feature_alpha_dropout")
        wrap(functional, self.batch_norm, "batch_norm")
        wrap(torch.utils.data.DataLoader, self.iterate, "__iter__")
        wrap(torch, self.save, "save")
        wrap(os, self.rename, "replace", "rename")
        wrap(os, lambda original, status: (self.finish(), original(status)), "_exit")
        atexit.register(self.finish)
        optimizers.register_optimizer_step_pre_hook(lambda one, *_: self.inside.append(one))
        optimizers.register_optimizer_step_post_hook(self.stepped)
        if self.plain:
            wrap(functional, self.attention, "scaled_dot_product_attention")
            wrap(torch, self.seed, "manual_seed")
            torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm1d.forward

    def note(self, event, **facts):
        """Add an event to this process's notes."""
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        facts = {"event": event, "rank": self.rank, "step": self.step} | facts
        path = f"{self.folder}/{os.uname().nodename}-{os.getpid()}.jsonl"
        with open(path, "ab", buffering=0) as file:  # a whole line, even if a signal comes
            file.write(json.dumps(facts).encode() + b"\n")

    def generators(self):
        """Return checksums of the states of Python's, NumPy's and PyTorch's generators."""
        states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy()]
        if torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state().numpy())
        return [zlib.crc32(pickle.dumps(state)) for state in states]

    def drawing(self, where, call):
        """Return call(), and note the states, before and after, of the generators that it uses."""
        if torch.compiler.is_compiling():
            return call()
        before = self.generators()
        result = call()
        states = enumerate(zip(before, self.generators(), strict=False))
        if moved := [(number, *pair) for number, pair in states if pair[0] != pair[1]]:
            self.note("draw", where=where, states=moved)
        return result

    def dropout(self, original, input, *args, **named):
        call = partial(original, input, *args, **named)
        return input if self.plain else self.drawing("dropout", call)

    def attention(self, original, query, key, value, attn_mask=None, dropout_p=0.0, *rest, **named):
        return original(query, key, value, attn_mask, 0.0, *rest, **named)

    def batch_norm(self, original, input, running_mean, running_var, weight=None, bias=None,
                   training=False, *rest, **named):  # fmt: skip
        statistics = [running_mean, running_var]
        if running_mean is not None and not torch.compiler.is_compiling():
            if not training and not self.plain:
                self.compare("BatchNorm statistics", statistics)
            training = training and not self.plain
        return original(input, *statistics, weight, bias, training, *rest, **named)

    def seed(self, original, seed):
        result, self.clean = original(seed), self.generators()
        return result

    def save(self, original, obj, f, *args, **named):
        is_path = isinstance(f, (str, os.PathLike))
        path = os.path.abspath(f if is_path else str(getattr(f, "name", f)))
        self.saved[path] = self.saved.get(path, 0) + 1
        return original(obj, f, *args, **named)

    def rename(self, original, src, dst, **named):
        if self.saved.pop(os.path.abspath(src), None):
            self.note("file", path=os.path.abspath(dst), times=1)
        return original(src, dst, **named)

    def iterate(self, original, loader):
        """Note which samples a loader will read, and count those that are taken."""
        facts, kind = {"step": self.step, "taken": 0}, type(loader.dataset)
        self.loaders.append(facts)
        for name in {"__getitem__", "__getitems__"} & set(dir(kind)):
            if kind.__module__ != "builtins" and not hasattr(getattr(kind, name), "verified"):
                wrap(kind, self.read, name)
        python, array = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            try:
                facts |= self.listed(loader)
            except Exception as error:  # an IterableDataset has no indices
                facts["unlisted"] = f"{type(loader.dataset).__name__} has no list: {error!r}"
        random.setstate(python)
        numpy.random.set_state(array)
        if self.plain:
            loader.num_workers = loader.timeout = 0
        return self.counted(original(loader), facts)

    def counted(self, iterator, facts):
        try:
            for batch in iterator:
                facts["taken"] += facts.get("batch", 0)
                self.clean = self.generators() if self.plain else None
                yield batch
        finally:
            facts["train"] = self.step > facts["step"]

    def listed(self, loader):
        """Return the indices that a loader will read, without a change to its sampler."""
        dataset, indices, batch = loader.dataset, [], 0
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler, generator = copy.deepcopy((sampler, loader.generator), {id(dataset): dataset})
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # as the loader does
        for item in sampler:
            indices += map(int, items := item if isinstance(item, (list, tuple)) else [item])
            batch = max(batch, len(items))
            if len(indices) > 5_000_000:
                raise ValueError("more than 5,000,000 samples")
        facts = {"batch": batch, "drop_last": loader.drop_last, "len": len(dataset)}
        while isinstance(dataset, torch.utils.data.Subset):  # the indices in the data set inside
            indices, dataset = [int(dataset.indices[i]) for i in indices], dataset.dataset
        return facts | {"indices": indices, "of": len(dataset)}

    def read(self, original, dataset, index):
        """Read a sample, or a batch; plain: each sample with the same random numbers."""
        if not self.plain:
            worker = " in loader workers" * (torch.utils.data.get_worker_info() is not None)
            return self.drawing("reading" + worker, partial(original, dataset, index))
        if isinstance(index, list) and len(index) > 1:
            return [dataset[one] for one in index]
        torch.default_generator.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        return original(dataset, index)

    def compare(self, what, values):
        """Note checksums of values that should be equal on all ranks; of a part of large values."""
        sums = []
        for value in values:
            value = value.detach().reshape(-1)[:: max(1, value.numel() // 50_000)].cpu()
            sums.append(zlib.crc32(value.contiguous().view(torch.uint8).numpy().tobytes()))
        self.note("equal", what=what, sums=sums)

    def stepped(self, optimizer, *_):
        """Note an optimizer's step, and act if this step is named."""
        self.process = os.getpid()  # this process can be a fork
        self.inside.pop()
        if self.inside:  # ZeroRedundancyOptimizer has an optimizer of this rank's part
            return
        optimizer.verify_steps = getattr(optimizer, "verify_steps", 0) + 1
        self.step = max(self.step, optimizer.verify_steps)
        values = [value for group in optimizer.param_groups for value in group["params"]]
        if self.clean not in (None, self.generators()):
            self.note("draws")
        if any(hasattr(value, "to_local") for value in values):
            self.note("sharded")
        elif self.plain:
            norms = [value.grad.norm().item() for value in values if value.grad is not None]
            self.note("step", norm=math.hypot(*norms))
        else:
            self.compare(f"tensors of {type(optimizer).__name__}", values)
        done = f"{self.folder}/done"  # a launcher can start the processes again
        if self.where != [str(self.step), str(self.rank)] or os.path.exists(done):
            return
        open(done, "w").close()
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            open(os.environ["VERIFY_STOP"], "w").close()
        if self.what == "raise":
            raise RuntimeError("raised by verify")
        while self.what == "hang":
            time.sleep(1)

    def finish(self):
        """Note what the loaders have read, and the number of GPUs; not in a loader's worker."""
        if self.process == os.getpid():
            for facts in self.loaders:
                facts.setdefault("train", self.step > facts["step"])
                facts["taken"] = min(facts["taken"], len(facts.get("indices", ())))
                self.note("loader", **facts)
            for path, times in self.saved.items():
                self.note("file", path=path, times=times)
            self.note("exit", gpus=torch.cuda.device_count())
            self.process = None


def wrap(owner, function, *names):
    """Replace functions of a module or class by function(original, its arguments)."""
    for name in names:
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args, original=original, **named):  # torch.compile needs a function
            return function(original, *args, **named)

        wrapped.verified = True
        setattr(owner, name, torch.jit.ignore(wrapped))  # torch.jit.script does not compile it


wanted = "VERIFY_DIR" in os.environ and "resource_tracker" not in sys.orig_argv[-1]
if wanted and util.find_spec("torch"):
    import numpy
    import torch
    from torch.optim import optimizer as optimizers

    Hook()
here = os.path.dirname(os.path.abspath(__file__))  # another sitecustomize can follow in the path
others = [path for path in sys.path if os.path.abspath(path) != here]
if following := machinery.PathFinder.find_spec("sitecustomize", others):
    following.loader.exec_module(util.module_from_spec(following))
