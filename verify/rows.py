"""The rows of the table: what each compares, and what it most often means if it fails."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from verify.program import Program, Refused, columns_apart, weights_apart

ARITHMETIC = """the sampler has one order for all processes and gives each sample to one; sums over
processes are sums of losses and of samples, not a mean of means or rank 0's; the learning rate does
not depend on the number; nothing trains outside of DDP; no set() numbers words or classes"""
RESUMED = """the checkpoint has all that training changes (optimizer, scheduler, averaged weights,
counters); dropout is seeded by step and rank; set_epoch() is called; the epoch goes on where it
stopped"""
ENDS = "no except goes on, no thread outlives the training, each exit has a status that is not 0"
LOOK = {  # what has to be true
    "seed": "weights, sampler and augmentation are seeded; no order is that of a set()",
    "samples": """training has a DistributedSampler and calls set_epoch(); testing reads
Subset(test_set, range(rank, len(test_set), world_size))""",
    "random": "the seed has the rank, also before the first loader is made (its workers)",
    "weights": """all that the optimizer trains is inside DDP (a loss, too), which is what is called;
rank 0's buffers are broadcast before an evaluation""",
    "checkpoint": """rank 0 alone writes, to another name, and renames that by os.replace; what
torch.load raises is not caught""",
    "processes": ARITHMETIC,
    "accumulation": """the loss is divided by the batches of a step; clip, step and zero_grad come once
a step, after the last backward(), which alone is outside of no_sync()""",
    "killed": RESUMED,
    "stopped": RESUMED + "; the file stop in --output-dir is looked for, and renamed to stopped",
    "dies": ENDS,
    "raises": ENDS,
    "hangs": "the process group has a time limit, and each loop calls longrun.alive",
    "bf16": "losses and counts are added in fp32 or fp64",
}
KEPT = ("first", "again", "plain", "one")  # runs that several rows use


class Row(NamedTuple):
    """A row of the table; the verdict is ok, weak, FAIL or not checked."""

    name: str
    verdict: str
    text: str


class Fail(Exception):
    """A row has failed."""


class Unchecked(Exception):
    """A row cannot be checked."""


class Reading(NamedTuple):
    """What the loaders of all ranks read at one place of the program, in a whole epoch."""

    train: bool
    place: int  # of several loaders that begin at the same step
    loaders: dict  # by rank, what the hook has noted

    @property
    def unlisted(self):
        return next((note["unlisted"] for note in self.loaders.values() if "unlisted" in note), "")

    @property
    def batch(self):
        return sum(note["batch"] for note in self.loaders.values())

    @property
    def levels(self):
        """For each rank the size `of` the set that all ranks divide, and the `indices` in it.

        A rank can have its own Subset: then the set is the one inside.
        """
        levels = [note["levels"] for note in self.loaders.values()]
        while len(parts := {each[0].get("part") for each in levels}) > 1 and None not in parts:
            levels = [each[1:] for each in levels]
        return {rank: each[0] for rank, each in zip(self.loaders, levels, strict=True)}

    def taken(self):
        """Count how often each sample has been taken in the steps of this run."""
        most = [note["count"] * note["batch"] for note in self.loaders.values()]
        levels = zip(self.levels.values(), most, strict=True)
        return Counter(index for level, end in levels for index in level["indices"][:end])

    def sizes(self):
        return {level["of"] for level in self.levels.values()}


def readings(run):
    """Return what the loaders of a run read, in order."""
    exits = {note["rank"]: note["taken"] for note in run.of("exit")}
    found, places = {}, Counter()
    for note in run.of("loader"):
        rank, step = note["rank"], note["step"]
        count, last = exits.get(rank, {}).get(str(note["number"]), (0, step))
        train = last > step or (count == 1 and note["grad"])
        places[rank, step, train] += 1
        key = step, train, places[rank, step, train]
        found.setdefault(key, {})[rank] = note | {"count": count}
    return [Reading(key[1], key[2], found[key]) for key in sorted(found)]


def worst(columns, weights=(0, "")):
    """Return the largest difference, and where all of them are."""
    found = [weights, *columns.values()]
    return max(apart for apart, _ in found), "; ".join(where for _, where in found if where)


class Checks:
    """The rows, as methods: they return what is printed, and whether it is weak."""

    def __init__(self, program):
        self.program, self.noise = program, None

    @property
    def first(self):
        """The run with which others are compared."""
        run = self.program.run("first")
        if not run.good:
            raise Refused(f"train.py has failed in the first run: {run.error}")
        return run

    def needs(self, *flags):
        if missing := [flag for flag in flags if flag not in self.program.help]:
            raise Unchecked(f"train.py has no {missing[0]}")

    def columns(self, one, other):
        """Return the columns that differ, without those that differ in two equal runs, too."""
        columns = columns_apart(one, other)
        if all(any(word in name for word in ("loss", "acc", "score")) for name in columns):
            return columns
        noisy = columns_apart(self.first, self.program.run("again"))  # a time of another name
        return {name: columns[name] for name in columns if name not in noisy}

    def bits(self, other, what):
        """Compare a run with the first one: it has to end with the same bits, on GPUs nearly."""
        if not other.good:
            raise Fail(f"{what} has failed: {other.error}")
        if self.noise is None:
            self.seed()
        apart, where = worst(self.columns(self.first, other), weights_apart(self.first, other))
        if apart > 10 * self.noise:
            raise Fail(f"{what} ends with other numbers: {where}")
        return f"{what} has the same model.pt and metrics" + f" to {apart:.0e}" * bool(
            apart
        ), apart > 0

    def plain(self, name="plain", processes=2, more=(), parts=1):
        """Return a run without randomness, in fp64 if train.py can."""
        if 0 < self.program.gpus < processes:
            raise Unchecked(f"{processes} processes on {self.program.gpus} GPUs")
        more = [*self.program.exact, *more]
        run = self.program.run(name, processes, more, parts=parts, do="plain")
        if not run.good and name == "plain" and self.program.exact:
            self.program.exact = []  # fp64 fails
            return self.plain("plain-fp32")
        if not run.good:
            raise Unchecked(f"train.py fails with {processes} processes: {run.error}")
        return run

    def arithmetic(self, one, other, what):
        """Compare two runs without randomness: they have to compute the same."""
        columns, pairs = self.columns(one, other), list(zip(readings(one), readings(other)))
        if any(
            a.taken() != b.taken() for a, b in pairs if not (a.train or a.unlisted or b.unlisted)
        ):
            columns = {name: columns[name] for name in columns if "train" in name}  # other tests
        if self.program.exact:
            apart, where = worst(columns, weights_apart(one, other, counters=False))
            good = apart <= 1e-9
        else:  # where a gradient is nearly 0, Adam makes a whole step of a rounding: no weights
            apart, where = worst(columns)
            good = (
                apart <= 0.05 and worst({n: columns[n] for n in columns if "loss" in n})[0] < 1e-3
            )
        if good:
            weak = "" if self.program.exact else " (fp32: small mistakes need --precision fp64)"
            return f"{what}: the same to {apart:.0e}{weak}", bool(weak)
        if one.of("draws") or other.of("draws"):
            raise Unchecked(f"{what}: training draws more random numbers than those of dropout")
        if one.of("unstable") or other.of("unstable"):
            raise Unchecked(f"{what}: the data set has a random generator of its own")
        for a, b in pairs:
            if why := a.unlisted or b.unlisted:
                raise Unchecked(f"{what}: the order of the samples is not known: {why}")
            counts = [a.taken(), b.taken()]
            if a.train and len(a.sizes() | b.sizes()) > 1:
                raise Unchecked(f"{what}: each process has a data set of its own")
            if a.train and counts[0] != counts[1] and max((counts[0] | counts[1]).values()) == 1:
                raise Unchecked(f"{what}: a step has other samples")
        raise Fail(f"{what}: {apart:.0e} apart: {where}")

    def seed(self):
        """same seed twice"""
        one, other = self.first, self.program.run("again")
        if not other.good:
            raise Fail(f"the second run has failed: {other.error}")
        columns = columns_apart(one, other)
        known = [name for name in columns if any(word in name for word in ("loss", "acc", "score"))]
        apart, where = worst({n: columns[n] for n in known}, weights_apart(one, other))
        if apart and not any(note["cuda"] for note in one.of("weights")):
            raise Fail(where)
        self.noise = apart
        if apart:
            return f"on GPUs two equal runs differ by {apart:.0e}, and so may those below", True
        return "the same model.pt and metrics" + f", but for {', '.join(columns)}" * bool(
            columns
        ), False

    def samples(self):
        """each sample once"""
        found, unknown, said, orders, every = [], [], [], {}, readings(self.first)
        for number, reading in enumerate(every):
            what = "training" if reading.train else "test"
            if reading.unlisted:
                unknown.append(f"{what} samples: {reading.unlisted}")
                continue
            counts, wrong = self.divided(reading, every)
            order = [note["levels"][0]["indices"] for note in reading.loaders.values()]
            if order == orders.get(reading.place) and sorted(order[0]) != order[0]:
                wrong.append("two epochs have the same order")
            orders |= {reading.place: order} if reading.train else {}
            repeats = any(len(part) - len(set(part)) > reading.batch for part in order)
            if not wrong:
                said.append(f"{what} samples: {sum(map(bool, counts.values()))} of {len(counts)}")
            elif any(note["custom"] for note in reading.loaders.values()) or repeats:
                unknown.append(f"{what} samples: {', '.join(wrong)}, as the sampler may want it")
            elif not reading.train and set(counts.values()) == {len(reading.loaders)}:
                unknown.append("each process reads all test samples")
            elif len(reading.sizes() | readings(self.plain("one", 1))[number].sizes()) > 1:
                unknown.append("each process has a data set of its own")
            else:
                found.append(f"{what} samples: {', '.join(wrong)}")
        if found:
            raise Fail("; ".join(dict.fromkeys(found)))
        if unknown or not every:
            raise Unchecked("; ".join(dict.fromkeys(unknown)) or "there is no DataLoader")
        return "; ".join(dict.fromkeys(said)), False

    def divided(self, reading, every):
        """Count how often each sample is read; return this, and what is wrong."""
        levels, counts = reading.levels, Counter()
        for level in levels.values():
            counts.update(level["indices"])
        again = sum(counts.values()) - len(counts)
        ids = [(rank, level["id"]) for rank, level in levels.items()]
        for other in every:  # one set can be divided into training and test samples
            if other.train != reading.train and not other.unlisted:
                for rank, level in other.levels.items():
                    counts.update(
                        dict.fromkeys(level["indices"] if (rank, level["id"]) in ids else (), 0)
                    )
        allowed = reading.batch - 1 if reading.train else 0
        left = max(reading.sizes()) - len(counts)
        wrong = [f"{left} are read by no process"] * (left > allowed)
        return counts, wrong + [f"{again} are read again"] * (again > allowed)

    def random(self):
        """own random numbers"""
        states = {}
        for note in self.first.of("draw"):
            ranks = states.setdefault(note["where"], {})
            ranks.setdefault(note["rank"], set()).update(map(tuple, note["states"]))
        for where, ranks in states.items():
            for one, other in itertools.combinations(ranks, 2):
                if same := ranks[one] & ranks[other]:
                    raise Fail(
                        f"{where}: ranks {one} and {other} draw the same ({len(same)} times)"
                    )
        if not states:
            raise Unchecked("no dropout and no augmentation draws")
        return f"ranks draw other numbers at {' and at '.join(states)}", False

    def weights(self):
        """equal weights"""
        sums, norms = {}, {}
        for note in self.first.of("weights"):
            if "sums" not in note:
                raise Unchecked("the weights are sharded")
            sums.setdefault(tuple(note["optimizer"]), {})[note["rank"]] = note["sums"]
        for note in self.first.of("norm"):
            norms.setdefault(note["step"], {}).setdefault(note["rank"], []).append(note["sums"])
        if not sums:
            raise Unchecked("there is no optimizer of torch.optim")
        for (_, step), ranks in sorted(sums.items(), key=lambda item: item[0][1]):
            if len(set(map(len, ranks.values()))) > 1:
                raise Unchecked("each process trains other tensors")
            if apart := [n for n, each in enumerate(zip(*ranks.values())) if len(set(each)) > 1]:
                raise Fail(f"{len(apart)} tensors of the optimizer differ after step {step}")
        for step, ranks in norms.items():
            if any(len(set(map(str, each))) > 1 for each in zip(*ranks.values())):
                raise Fail(f"each rank evaluates with its own BatchNorm statistics, step {step}")
        return f"all ranks have the same bits after each of {self.first.steps} steps", False

    def checkpoint(self):
        """the checkpoint"""
        run, writers, in_place = self.first, {}, Counter()
        renamed = {(note["rank"], note["path"]): note["target"] for note in run.of("rename")}
        for note in run.of("save"):
            path = Path(renamed.get((note["rank"], note["path"]), note["path"]))
            if path.is_relative_to(run.folder):
                writers.setdefault(path.relative_to(run.folder), set()).add(note["rank"])
                in_place[path.name] += str(path) == note["path"]
        for path, ranks in writers.items():
            if len(ranks) > 1 or in_place[path.name] > 1:
                how = "in place, so that a kill leaves half of it" if len(ranks) == 1 else "at once"
                raise Fail(f"{path} is written by rank {', '.join(map(str, ranks))} {how}")
        self.needs("--resume")
        folder = self.program.output / "cut" / "output"
        shutil.copytree(run.folder, folder)
        files = [folder / path for path in writers if path.name != "model.pt"]
        files = {path: path.read_bytes() for path in files if path.exists()}
        if not files:
            raise Unchecked("torch.save writes no checkpoint into --output-dir")
        for path, content in files.items():
            path.write_bytes(content[: len(content) // 2])
        other, names = (
            self.program.run("cut", more=["--resume"], into=folder),
            list(map(str, writers)),
        )
        if other.status == 0:
            raise Fail("half of the checkpoint is accepted, or replaced: status 0")
        if any(
            path.read_bytes() != content[: len(content) // 2] for path, content in files.items()
        ):
            raise Fail("half of the checkpoint is refused, but the file is changed")
        return (
            f"rank by rank whole: {', '.join(names)}; half a checkpoint is refused and left",
            False,
        )

    def processes(self):
        """2 processes as 1 and as 3"""
        base, said, unknown, weak = self.plain(), [], [], False
        for name, number in (("one", 1), ("three", 3)):
            what = f"{number} process{'es' * (number > 1)}"
            try:
                text, fp32 = self.arithmetic(base, self.plain(name, number), what)
                said, weak = [*said, text], weak or fp32
            except Unchecked as why:
                unknown.append(f"not checked: {why}")
        if not said:
            raise Unchecked("; ".join(unknown))
        return "; ".join(said + unknown), weak or bool(unknown)

    def accumulation(self):
        """half batches, accumulated"""
        self.needs("--gradient-accumulation-steps")
        base, more = self.plain(), []
        norms = sorted(note["norm"] for note in base.of("weights") if note.get("norm"))
        if "--max-grad-norm" in self.program.help and norms:
            more = ["--max-grad-norm", str(norms[len(norms) // 2])]  # clips some of the steps
            base = self.plain("clipped", more=more)
        run = self.plain("halves", 2, ["--gradient-accumulation-steps", "2", *more], parts=2)
        try:
            return self.arithmetic(base, run, f"half batches{' with clipping' * bool(more)}")
        except Fail:
            if run.of("gather"):
                raise Unchecked("the loss gathers a batch: half of one is another") from None
            raise

    def act(self, what, epoch=2, rank=1, **named):
        """Return a run in which the hook does something in the middle of epoch 1 or 2."""
        steps, starts = (
            self.first.steps,
            [reading for reading in readings(self.first) if reading.train],
        )
        starts = sorted({note["step"] for reading in starts for note in reading.loaders.values()})
        middle = starts[1] if len(starts) > 1 else steps // 2
        step = max(1, middle // 2) if epoch == 1 else middle + max(1, (steps - middle) // 2)
        run = self.program.run(what, do=f"{what}:{step}:{rank}", **named)
        if not run.acted:
            raise Unchecked(f"no optimizer of torch.optim came to step {step}: {run.error}")
        return run

    def ends(self, run):
        """Judge how a run ended after one of its processes failed."""
        if run.status is None:
            raise Fail(f"the others go on after {run.after:.0f} s")
        if run.status == 0:
            raise Fail("the run ends with status 0")
        return f"all end within {run.after:.0f} s, status {run.status}", False

    def killed(self):
        """killed, resumed"""
        self.needs("--resume")
        run = self.act("kill")
        again = self.program.run("kill-resumed", more=["--resume"], into=run.folder)
        if again.good and again.steps >= self.first.steps:
            raise Fail("the resumed run begins again at the first step")
        return self.bits(again, "killed in epoch 2 and resumed, it")

    def stopped(self):
        """stopped, resumed"""
        self.needs("--resume")
        run = self.act("stop", epoch=1, rank=0)
        if run.status != 0 or not (run.folder / "stopped").exists():
            raise Fail(f"asked to stop it ends with status {run.status}, and without `stopped`")
        again = self.program.run("stop-resumed", more=["--resume"], into=run.folder)
        try:
            return self.bits(again, f"stopped after step {run.steps} and resumed, it")
        except Fail as why:
            if any("workers" in note["where"] for note in self.first.of("draw")):
                raise Unchecked(f"augmentation in loader workers within an epoch: {why}") from why
            raise

    def dies(self):
        """one process is killed"""
        return self.ends(self.act("kill"))

    def raises(self):
        """one process raises"""
        return self.ends(self.act("raise"))

    def hangs(self):
        """one process hangs"""
        self.needs("--timeout")
        wait = max(10, round(self.first.seconds))
        return self.ends(self.act("hang", more=["--timeout", str(wait)], wait=wait))

    def bf16(self):
        """bf16 as fp64"""
        self.needs("--precision", "bf16", "--limit-steps")
        more, runs = ["--epochs", "1", "--limit-steps", "300"], []  # in bf16 256 + 1 is 256
        more += ["--lr", "0"] * ("--lr" in self.program.help)  # only the sums differ
        for name, precision in (
            ("sums", "fp64" if self.program.exact else "fp32"),
            ("bf16", "bf16"),
        ):
            flags = [*more, "--precision", precision]
            runs.append(self.program.run(name, 1, flags, size=1, do="plain"))
            if not runs[-1].good:
                raise Unchecked(f"train.py fails with 1 process and a batch of 1: {runs[-1].error}")
        columns = columns_apart(*runs)
        apart, where = worst({name: columns[name] for name in columns if "loss" in name})
        if apart > 0.05:
            raise Fail(f"losses are {apart:.0%} apart: {where}")
        return f"losses agree to {apart:.1%} after {runs[0].steps} steps", runs[0].steps <= 256


ROWS = {  # in the order in which they run: the method, and about how many runs it adds
    "seed": (Checks.seed, 1),
    "samples": (Checks.samples, 0),
    "random": (Checks.random, 0),
    "weights": (Checks.weights, 0),
    "checkpoint": (Checks.checkpoint, 1),
    "processes": (Checks.processes, 3),
    "accumulation": (Checks.accumulation, 2),
    "killed": (Checks.killed, 2),
    "dies": (Checks.dies, 0),
    "stopped": (Checks.stopped, 2),
    "raises": (Checks.raises, 1),
    "hangs": (Checks.hangs, 2),
    "bf16": (Checks.bf16, 3),
}


def check(folder, rows=(), launcher=None, flags=(), tell=lambda line: None):
    """Check FOLDER/train.py, and yield one Row after the other; no names: all rows.

    launcher is a name in LAUNCHERS, or a command with {n}; flags go to train.py; tell is called
    with lines about the progress. Raises Refused, with one line, if there is nothing to check.
    """
    if unknown := [name for name in rows if name not in ROWS]:
        raise Refused(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    program, failed = Program(folder, launcher, [*flags], tell), False
    checks, rows = Checks(program), [name for name in ROWS if name in (rows or ROWS)]
    program.left = 1 + sum(ROWS[name][1] for name in rows)
    tell(f"{program.launcher} {' '.join(program.base)}: about {program.left} runs")
    for name in rows:
        try:
            text, weak = ROWS[name][0](checks)
            verdict = "weak" if weak else "ok"
        except Unchecked as why:
            verdict, text = "not checked", str(why)
        except Fail as why:
            verdict, failed = "FAIL", True
            text = f"{why}\nMake sure that {LOOK[name]}.\nLogs: {program.output}/*/log"
        for path in () if failed else program.output.glob("*/output/*.pt"):
            if path.parts[-3] not in KEPT:
                path.unlink()
        yield Row(name, verdict, text)
