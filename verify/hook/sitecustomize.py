"""Note what a training program does, for verify. Python loads this file when it starts.

Without VERIFY_DIR it does nothing. With it each process writes its events to a file there, as lines
of JSON. VERIFY_DO is "plain" (take randomness away), or an action with an optimizer step and a
rank, such as kill:6:1: kill, raise, hang, or stop, which makes the file VERIFY_STOP. A process
lives at most VERIFY_LIMIT seconds.
"""

import atexit
import copy
import json
import os
import pickle
import random
import signal
import sys
import time
import zlib
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from importlib import machinery, util

DROPOUTS = ["dropout", "dropout1d", "dropout2d", "dropout3d"]
DROPOUTS += ["alpha_dropout", "feature_alpha_dropout"]
MOST = 5_000_000  # samples of a data set whose order is noted


class Finder:
    """Calls hook.patch when the program has imported torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            if spec := util.find_spec(name):
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (execute(module), hook.patch())
            return spec


class Hook:
    """What this process does. Many methods stand in for a function, `original`."""

    def activate(self):
        """Read the environment, and observe PyTorch: now, or when the program imports it."""
        self.folder, what = os.environ.get("VERIFY_DIR"), os.environ.get("VERIFY_DO", "")
        self.action, self.plain = what.split(":"), what == "plain"
        self.rank, self.step, self.depth = int(os.environ.get("RANK", -1)), 0, 0
        self.counts, self.optimizers, self.loaders, self.saved = {}, {}, [], set()
        self.clean = None  # the generators as they last were seeded, or used for data
        if self.folder:
            signal.alarm(int(os.environ.get("VERIFY_LIMIT", 0)))  # it may hang in any way
            self.patch() if "torch" in sys.modules else sys.meta_path.insert(0, Finder())

    def patch(self):
        """Replace the public functions of PyTorch that are observed."""
        global torch, numpy
        import numpy
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.process = os.getpid()
        functional, wrap = torch.nn.functional, self.wrap
        wrap(functional, self.dropout, *DROPOUTS)
        wrap(functional, self.batch_norm, "batch_norm")
        wrap(torch.distributed, self.gather, "all_gather", "all_gather_into_tensor")
        wrap(torch.utils.data.DataLoader, self.iterate, "__iter__")
        wrap(torch, self.save, "save")
        wrap(os, self.rename, "replace", "rename")
        wrap(os, lambda original, status: (self.finish(), original(status)), "_exit")
        atexit.register(self.finish)
        register_optimizer_step_post_hook(self.stepped)
        if self.plain:
            wrap(functional, self.attention, "scaled_dot_product_attention")
            wrap(torch, self.seed, "manual_seed")
            torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm1d.forward

    def wrap(self, owner, function, *names):
        """Replace functions of a module or class by function(original, its arguments)."""
        for name in names:
            setattr(owner, name, around(getattr(owner, name), function))

    def note(self, event, **facts):
        """Add an event to this process's notes."""
        if torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        facts = {"event": event, "rank": self.rank, "step": self.step} | facts
        with open(f"{self.folder}/{os.uname().nodename}-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(facts, default=str) + "\n")

    def few(self, kind, most=50):
        """Count events of a kind since a loader began; return False after the first ones."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return self.counts[kind] <= most

    def generators(self):
        """Return checksums of the states of Python's, NumPy's and PyTorch's generators."""
        states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state().numpy()]
        if torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state().numpy())
        return [zlib.crc32(pickle.dumps(state)) for state in states]

    @contextmanager
    def same_generators(self):
        """Set the generators back to where they were."""
        python, array = random.getstate(), numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            yield
        random.setstate(python)
        numpy.random.set_state(array)

    def drawing(self, where, call):
        """Return call(), and note the generators from which it draws, before and after."""
        if torch.compiler.is_compiling() or not self.few(where):
            return call()
        before = self.generators()
        result = call()
        pairs = zip(range(9), before, self.generators(), strict=False)
        if moved := [pair for pair in pairs if pair[1] != pair[2]]:
            self.note("draw", where=where, states=moved)
        return result

    def dropout(self, original, input, p=0.5, training=True, inplace=False):
        if self.plain:
            return input
        call = partial(original, input, p, training, inplace)
        return self.drawing("dropout", call) if training else call()

    def attention(self, original, query, key, value, attn_mask=None, dropout_p=0.0, *rest, **named):
        return original(query, key, value, attn_mask, 0.0, *rest, **named)

    def batch_norm(self, original, input, mean, *args, **named):
        variance, weight, bias, training, *rest = args
        if mean is not None and not torch.compiler.is_compiling():
            if not training and self.few("norm"):
                self.note("norm", sums=[self.checksum(mean), self.checksum(variance)])
            training = training and not self.plain
        return original(input, mean, variance, weight, bias, training, *rest, **named)

    def seed(self, original, value):
        result, self.clean = original(value), self.generators()
        return result

    def gather(self, original, outputs, value, *args, **named):
        if value.is_floating_point() and self.few("gather"):
            self.note("gather")
        return original(outputs, value, *args, **named)

    def save(self, original, value, file, *args, **named):
        self.saved.add(path := os.path.abspath(str(getattr(file, "name", file))))
        self.note("save", path=path)
        return original(value, file, *args, **named)

    def rename(self, original, source, target, *args, **named):
        if (path := os.path.abspath(source)) in self.saved:
            self.note("rename", path=path, target=os.path.abspath(target))
        return original(source, target, *args, **named)

    def iterate(self, original, loader):
        """Note what a loader is going to read, and count what is taken."""
        self.counts.clear()
        facts = {
            "step": self.step,
            "last": self.step,
            "batches": 0,
            "grad": torch.is_grad_enabled(),
        }
        self.loaders.append(facts)
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            facts["unlisted"] = "an IterableDataset decides what is read"
        else:
            self.watch(loader.dataset)
            with self.same_generators():
                try:
                    facts |= self.listed(loader)
                except Exception as error:  # a sampler can need what only an epoch gives
                    facts["unlisted"] = f"{type(loader.sampler).__name__}: {error!r}"
        if self.plain:
            loader.num_workers = loader.timeout = 0
        elif loader.num_workers and loader.multiprocessing_context is None:
            loader.multiprocessing_context = "fork"  # otherwise its workers are not watched
        loader.verified = True
        return self.counted(original(loader), facts)

    def counted(self, iterator, facts):
        for batch in iterator:
            facts["batches"] += 1
            self.clean = self.generators() if self.plain else None
            yield batch
            facts["last"] = self.step

    def listed(self, loader):
        """Return the indices that a loader is going to read, without a change to its sampler."""
        data, dataset, indices, batch = torch.utils.data, loader.dataset, [], 0
        if len(dataset) > MOST:
            raise ValueError(f"more than {MOST:,} samples")
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = getattr(sampler, "sampler", sampler)  # that of a batch sampler
        parts = [vars(one).values() for one in (loader, sampler, inner) if hasattr(one, "__dict__")]
        kinds = (torch.Generator, data.Dataset)  # not copied
        keep = {id(part): part for part in sum(map(list, parts), []) if isinstance(part, kinds)}
        states = [(one, one.get_state()) for one in keep.values() if hasattr(one, "get_state")]
        if not (loader.persistent_workers and hasattr(loader, "verified")):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as it does
        for item in copy.deepcopy(sampler, keep | {id(dataset): dataset}):
            indices += map(int, items := item if isinstance(item, (list, tuple)) else [item])
            batch = max(batch, len(items))
            if len(indices) > 3 * len(dataset) + 1000:
                raise ValueError("it has no end")
        for generator, state in states:
            generator.set_state(state)
        facts = {"batch": batch, "id": id(dataset), "len": len(dataset)}
        while isinstance(dataset, data.Subset):  # the indices in the set inside
            indices, dataset = [int(dataset.indices[i]) for i in indices], dataset.dataset
        return facts | {"indices": indices, "of": len(dataset)}

    def watch(self, dataset):
        """Watch the reads of a data set, and of those that it is made of."""
        for owner in type(dataset).__mro__:
            for name in {"__getitem__", "__getitems__"} & vars(owner).keys():
                if owner.__module__ != "builtins" and not hasattr(vars(owner)[name], "verified"):
                    self.wrap(owner, self.read, name)
        own = (torch.Generator, numpy.random.Generator, random.Random)
        if any(isinstance(value, own) for value in getattr(dataset, "__dict__", {}).values()):
            self.note("draws")  # random numbers that are not taken away
        for inner in (getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())):
            if isinstance(inner, torch.utils.data.Dataset):
                self.watch(inner)

    def read(self, original, dataset, index):
        """Read a sample, or a batch; plain: with generators that are seeded by its index."""
        outer, call = self.depth == 0, partial(original, dataset)
        many = index if isinstance(index, (list, tuple)) else [index]
        worker = " in loader workers" * (torch.utils.data.get_worker_info() is not None)
        self.depth += 1
        try:
            if not self.plain:
                call = partial(call, index)
                return self.drawing("reading" + worker, call) if outer else call()
            # A data set around another one goes on with the numbers of its sample.
            with self.same_generators() if outer else nullcontext():
                result, still = self.seeded(call, index, many[0])
                if still or len(many) == 1:
                    return result
                return joined([self.seeded(call, [one], one)[0] for one in many])
        finally:
            self.depth -= 1

    def seeded(self, call, index, number):
        """Return what is read with seeded generators, and whether it draws no numbers."""
        torch.default_generator.manual_seed(int(number))
        random.seed(int(number))
        numpy.random.seed(int(number) % 2**32)
        before = self.generators()
        return call(index), before == self.generators()

    def checksum(self, value):
        """Return a checksum of at most 50,000 values of a tensor."""
        value = value.detach().reshape(-1)[:: max(1, value.numel() // 50_000)]
        return zlib.crc32(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())

    def stepped(self, optimizer, *_):
        """Note an optimizer's step, and act if this step is named."""
        self.process = os.getpid()
        mine = self.optimizers.setdefault(id(optimizer), [len(self.optimizers), 0, optimizer])
        mine[1] += 1
        self.step = max(steps for _, steps, _ in self.optimizers.values())
        if self.clean not in (None, self.generators()):
            self.note("draws")
        if self.few("step", 20):
            values = [value for group in optimizer.param_groups for value in group["params"]]
            facts = {"optimizer": mine[:2], "cuda": any(value.is_cuda for value in values)}
            if not any(hasattr(value, "to_local") for value in values):  # not sharded
                squares = (
                    v.grad.abs().double().square().sum().item()
                    for v in values
                    if v.grad is not None
                )
                facts |= {"sums": list(map(self.checksum, values)), "norm": sum(squares) ** 0.5}
            self.note("weights", **facts)
        done = f"{self.folder}/done"  # a launcher can start the processes again
        if self.action[1:] == [str(self.step), str(self.rank)] and not os.path.exists(done):
            open(done, "w").close()
            self.act(self.action[0])

    def act(self, what):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stop":
            open(os.environ["VERIFY_STOP"], "w").close()
        if what == "raise":
            raise RuntimeError("raised by verify")
        while what == "hang":
            time.sleep(1)

    def finish(self):
        """Note what the loaders have read, and the GPUs; not in a loader's worker."""
        if self.process == os.getpid():
            for facts in self.loaders:
                once = facts["batches"] == 1 and facts["grad"]  # its last batch was its first
                self.note("loader", train=once or facts["last"] > facts["step"], **facts)
            self.note("exit", gpus=torch.cuda.device_count())
            self.process = None


def around(original, function):
    """Return a function (torch.compile needs one) that calls function(original, arguments)."""

    @wraps(original)
    def wrapped(*args, **named):
        return function(original, *args, **named)

    wrapped.verified = True
    return wrapped


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


hook = Hook()
hook.activate()
here = os.path.dirname(os.path.abspath(__file__))  # another sitecustomize can follow in the path
others = [path for path in sys.path if os.path.abspath(path) != here]
if following := machinery.PathFinder.find_spec("sitecustomize", others):
    following.loader.exec_module(util.module_from_spec(following))
