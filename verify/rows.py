"""The rows of the table: what each compares, and what has to be true if it fails."""

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from verify.program import Program, Refused, apart

KEPT = ("first", "again", "plain", "one")  # runs that several rows use
ROWS = {}  # by name: what it checks, about how many runs it adds, what has to be true, its method
RESUMED = """the checkpoint has all that training changes (optimizer, scheduler, averaged weights,
counters), dropout is seeded by step and rank, and a resume goes on at its place in the epoch"""
ENDS = "no except goes on, no thread outlives the training, and failures end with a status above 0"


class Row(NamedTuple):
    """A row of the table; the verdict is ok, weak, FAIL or not checked."""

    name: str
    verdict: str
    text: str


class Fail(Exception):
    """A row has failed."""


class Unchecked(Exception):
    """A row cannot be checked."""


class Weak(str):
    """What is true, with the reason why it says little."""


class Reading(NamedTuple):
    """What the loaders of all ranks read at one place of the program, in a whole epoch."""

    train: bool
    place: int  # of several loaders that begin at the same step
    notes: list  # of the hook, one of each rank
    unlisted: str  # why the samples are not known

    def counts(self, taken=False):
        """Count how often each sample is read, or has been taken in the steps of this run."""
        most = [note["count"] * note["batch"] if taken else None for note in self.notes]
        parts = [note["indices"][:end] for note, end in zip(self.notes, most, strict=True)]
        return Counter(itertools.chain(*parts))

    def sizes(self):
        return {note["of"] for note in self.notes}


def readings(run):
    """Return what the loaders of a run read, in order."""
    exits = {note["rank"]: note["taken"] for note in run.of("exit")}
    found, places = {}, Counter()
    for note in run.of("loader"):
        step, rank = note["step"], note["rank"]
        note["count"], last = exits.get(rank, {}).get(str(note["number"]), (0, step))
        train = last > step or (note["count"] == 1 and note["grad"])
        places[rank, step, train] += 1
        found.setdefault((step, train, places[rank, step, train]), []).append(note)
    why = {key: next(filter(None, (n.get("unlisted") for n in found[key])), "") for key in found}
    return [Reading(key[1], key[2], found[key], why[key]) for key in sorted(found)]


def row(runs, look):
    """Make a method of Checks a row; its docstring says what it checks."""

    def keep(method):
        ROWS[method.__name__] = method.__doc__, runs, look, method
        return method

    return keep


class Checks:
    """The rows: each method returns what is printed."""

    def __init__(self, program):
        self.program, self.noise = program, None

    @property
    def first(self):
        """The run with which others are compared."""
        run = self.program.run("first")
        if not run.good:
            raise Fail(f"train.py has failed in the first run: {run.error}")
        return run

    def needs(self, *flags):
        if missing := [flag for flag in flags if flag not in self.program.help]:
            raise Unchecked(f"train.py has no {missing[0]}")

    def bits(self, other, what):
        """Compare a run with the first one: it has to end with the same bits, on GPUs nearly."""
        if not other.good:
            raise Fail(f"{what} has failed: {other.error}")
        found = apart(self.first, other)
        if found and self.noise is None:
            self.seed()
        found = {name: far for name, far in found.items() if far > 10 * self.noise.get(name, 0)}
        if found:
            raise Fail(f"{what} differs: {self.text(found)}")
        return f"{what} has the same model.pt and metrics"

    def text(self, found):
        return ", ".join(f"{name} by {far:.0e}" for name, far in list(found.items())[:4])

    def plain(self, name="plain", processes=2, more=(), parts=1):
        """Return a run without randomness, in fp64 if train.py can."""
        program, precise = self.program, self.program.precise
        if 0 < program.gpus < processes:
            raise Unchecked(f"{processes} processes on {program.gpus} GPUs")
        more = [*(["--precision", precise] if precise else []), *more]
        run = program.run(name, processes, more, parts=parts, do="plain")
        if not run.good and name == "plain" and precise == "fp64":
            program.precise = "fp32" * ("fp32" in program.help)
            return self.plain("plain-fp32")
        if not run.good:
            raise Unchecked(f"train.py fails with {processes} processes: {run.error}")
        return run

    def arithmetic(self, one, other, what):
        """Compare two runs without randomness: they have to compute the same."""
        fp64, pairs = (
            self.program.precise == "fp64",
            [*zip(readings(one), readings(other), strict=False)],
        )
        found = {n: far for n, far in apart(one, other).items() if "num_batches_tracked" not in n}
        known = [(a, b) for a, b in pairs if not a.unlisted and not b.unlisted]
        if any(a.counts(True) != b.counts(True) for a, b in known if not a.train):
            found = {n: found[n] for n in found if "train" in n or "model.pt" in n}  # other tests
        if not fp64:  # where a gradient is nearly 0, Adam makes a whole step of a rounding
            found = {n: found[n] for n in found if "model.pt" not in n}
        wrong = {n: far for n, far in found.items() if far > (1e-9 if fp64 else 1e-3)}
        if not wrong:
            same = f"{what}: the same to {max(found.values(), default=0):.0e}"
            return same if fp64 else Weak(f"{same}; smaller mistakes need --precision fp64")
        if one.of("draws") or other.of("draws"):
            raise Unchecked(f"{what}: there are random numbers besides dropout's and the loader's")
        if len(known) < len(pairs):
            raise Unchecked(f"{what}: which samples are read is not known")
        for a, b in known:
            counts = a.counts(True), b.counts(True)
            if len(a.sizes() | b.sizes()) > 1:
                raise Unchecked(f"{what}: each process has a data set of its own")
            if a.train and counts[0] != counts[1] and max((counts[0] | counts[1]).values()) == 1:
                raise Unchecked(f"{what}: a step has other samples")
        raise Fail(f"{what} differ: {self.text(wrong)}")

    @row(1, "weights, sampler and augmentation are seeded, and no order is that of a set()")
    def seed(self):
        """same seed twice"""
        one, other = self.first, self.program.run("again")
        if not other.good:
            raise Fail(f"the second run has failed: {other.error}")
        self.noise = apart(one, other)
        known = [n for n in self.noise if any(w in n for w in ("model.pt", "loss", "acc", "score"))]
        if not self.noise:
            return "two runs have the same model.pt and metrics"
        if known and not any(note["cuda"] for note in one.of("weights")):
            raise Fail(self.text(self.noise))
        return Weak(f"two runs differ, and so may those below: {self.text(self.noise)}")

    @row(
        1,
        """training has a DistributedSampler and calls set_epoch(), and testing reads
Subset(test_set, range(rank, len(test_set), world_size))""",
    )
    def samples(self):
        """each sample once"""
        wrong, unknown, said, orders = [], [], [], {}
        ones, twos = readings(self.plain("one", 1)), readings(self.first)
        for two, one in zip(twos, ones, strict=False):  # one process reads what two have to divide
            what = "training samples" if two.train else "test samples"
            if two.unlisted or one.unlisted:
                unknown.append(f"{what}: {two.unlisted or one.unlisted}")
                continue
            counts, whole, ranks = two.counts(), one.counts(), len(two.notes)
            allowed = sum(note["batch"] for note in two.notes) - 1 if two.train else 0
            again, left = (counts - whole).total(), (whole - counts).total()
            order = [note["indices"] for note in two.notes]
            if order == orders.get(two.place) and sorted(order[0]) != order[0]:
                wrong.append("two epochs have the same order")
            orders |= {two.place: order} if two.train else {}
            if max(again, left) <= allowed:
                said.append(f"{what}: {len(counts)} of {max(two.sizes())}")
            elif len(two.sizes() | one.sizes()) > 1:
                unknown.append(f"{what}: each process has a data set of its own")
            elif whole.total() - len(whole) > allowed:
                unknown.append(f"{what}: one process, too, reads some again")
            elif not two.train and counts == Counter({n: whole[n] * ranks for n in whole}):
                unknown.append(f"{what}: each process reads all")
            else:
                wrong.append(f"{what}: {again} are read again, {left} by no process")
        if wrong:
            raise Fail("; ".join(dict.fromkeys(wrong)))
        if unknown or not twos:
            raise Unchecked("; ".join(dict.fromkeys(unknown)) or "there is no DataLoader")
        return "; ".join(dict.fromkeys(said))

    @row(0, "the seed has the rank, also before the first loader starts its workers")
    def random(self):
        """own random numbers"""
        draws = {}
        for note in self.first.of("draw"):
            for state in note["states"]:
                draws.setdefault((note["where"], *state), set()).add(note["rank"])
        if not draws:
            raise Unchecked("no dropout and no augmentation draws")
        if same := [where for (where, *_), ranks in draws.items() if len(ranks) > 1]:
            raise Fail(f"ranks draw the same numbers, {len(same)} of {len(draws)} times: {same[0]}")
        return f"ranks draw other numbers: {', '.join(sorted({where for where, *_ in draws}))}"

    @row(
        0,
        """all that the optimizer trains (a loss, too) is inside DDP, DDP is what is called, and
rank 0's buffers are broadcast before an evaluation""",
    )
    def weights(self):
        """equal weights"""
        sums, norms = {}, {}
        for note in self.first.of("weights"):
            if "sums" not in note:
                raise Unchecked("the weights are sharded")
            sums.setdefault((note["step"], *note["optimizer"]), []).append(note["sums"])
        for note in self.first.of("norm"):
            norms.setdefault(note["step"], {}).setdefault(note["rank"], []).append(note["sums"])
        if not sums:
            raise Unchecked("there is no optimizer of torch.optim")
        for (step, *_), ranks in sorted(sums.items()):
            if len(set(map(len, ranks))) > 1:
                raise Unchecked("each process trains other tensors")
            if wrong := [each for each in zip(*ranks, strict=True) if len(set(each)) > 1]:
                raise Fail(f"{len(wrong)} of {len(ranks[0])} tensors differ after step {step}")
        for step, ranks in norms.items():
            if any(
                one != other for one, *rest in zip(*ranks.values(), strict=False) for other in rest
            ):
                raise Fail(f"ranks evaluate with other BatchNorm statistics after step {step}")
        return f"all ranks have the same bits after {self.first.steps} steps"

    @row(
        1,
        """rank 0 alone writes, to another name, which it renames by os.replace, and what
torch.load raises is not caught""",
    )
    def checkpoint(self):
        """the checkpoint"""
        run, writes, files = self.first, Counter(), {}
        renamed = {(note["rank"], note["path"]): note["target"] for note in run.of("rename")}
        for note in run.of("save"):
            path = renamed.get((note["rank"], note["path"]), note["path"])
            writes[path, note["rank"], path == note["path"]] += 1
        for (path, rank, in_place), times in writes.items():
            if in_place and times > 1:
                raise Fail(f"{path} is written in place: a kill leaves half of it")
            if files.setdefault(path, rank) != rank:
                raise Fail(f"ranks {files[path]} and {rank} write {path}")
        self.needs("--resume")
        folder = self.program.output / "cut" / "output"
        shutil.copytree(run.folder, folder)
        files = [folder / Path(path).name for path in files if not path.endswith("model.pt")]
        halves = {p: p.read_bytes()[: p.stat().st_size // 2] for p in files if p.exists()}
        if not halves:
            raise Unchecked("torch.save writes no checkpoint into --output-dir")
        for path, half in halves.items():
            path.write_bytes(half)
        if self.program.run("cut", more=["--resume"], into=folder).status == 0:
            raise Fail("half of the checkpoint is accepted, or trained over: status 0")
        if any(path.read_bytes() != half for path, half in halves.items()):
            raise Fail("half of the checkpoint is refused, but the file is changed")
        return f"one rank writes each file whole; half of {', '.join(p.name for p in halves)} is refused"

    @row(
        2,
        """the sampler has one order for all processes, sums over processes are sums of losses
and of samples (not a mean of means, not rank 0's), the learning rate does not depend on the number
of processes, nothing trains outside of DDP, and no set() numbers words or classes""",
    )
    def processes(self):
        """2 processes as 1 and as 3"""
        base, said, unknown = self.plain(), [], []
        for name, number in (("one", 1), ("three", 3)):
            try:
                said.append(self.arithmetic(base, self.plain(name, number), f"2 and {number}"))
            except Unchecked as why:
                unknown.append(f"not checked: {why}")
        if not said:
            raise Unchecked("; ".join(unknown))
        text = "; ".join([*said, *unknown])
        return Weak(text) if unknown or isinstance(said[0], Weak) else text

    @row(
        2,
        """the loss is divided by the batches of a step; clip, step and zero_grad come once a
step, after the last backward(), which alone is outside of no_sync()""",
    )
    def accumulation(self):
        """half batches, accumulated"""
        self.needs("--gradient-accumulation-steps")
        base, more = self.plain(), []
        norms = sorted(note.get("norm", 0) for note in base.of("weights"))
        if "--max-grad-norm" in self.program.help and norms:
            more = ["--max-grad-norm", str(norms[len(norms) // 2])]  # clips some of the steps
            base = self.plain("clipped", more=more)
        run = self.plain("halves", 2, ["--gradient-accumulation-steps", "2", *more], parts=2)
        try:
            return self.arithmetic(base, run, f"1 and 2 batches{' with clipping' * bool(more)}")
        except Fail:
            if run.of("gather"):
                raise Unchecked("the loss gathers a batch, and half of one is another") from None
            raise

    def act(self, what, epoch=2, rank=1, **named):
        """Return a run in which the hook does something in the middle of epoch 1 or 2."""
        steps, reads = self.first.steps, readings(self.first)
        starts = {note["step"] for reading in reads if reading.train for note in reading.notes}
        middle = min(starts - {0}, default=steps // 2)  # where epoch 2 begins
        step = max(1, middle // 2) if epoch == 1 else middle + max(1, (steps - middle) // 2)
        run = self.program.run(what, do=f"{what}:{step}:{rank}", **named)
        if not run.acted:
            raise Unchecked(f"no optimizer of torch.optim came to step {step}: {run.error}")
        return run

    @row(2, RESUMED)
    def killed(self):
        """killed, resumed"""
        self.needs("--resume")
        run = self.act("kill")
        again = self.program.run("kill-resumed", more=["--resume"], into=run.folder)
        if again.good and again.steps >= self.first.steps:
            raise Fail("the resumed run begins again at the first step")
        return self.bits(again, "killed in epoch 2 and resumed: it")

    @row(2, RESUMED + "; the file `stop` in --output-dir is looked for, and renamed to `stopped`")
    def stopped(self):
        """stopped, resumed"""
        self.needs("--resume")
        run = self.act("stop", epoch=1, rank=0)
        if run.status != 0 or not (run.folder / "stopped").exists():
            raise Fail(f"asked to stop it ends with status {run.status}, without a file `stopped`")
        again = self.program.run("stop-resumed", more=["--resume"], into=run.folder)
        try:
            return self.bits(again, f"stopped after step {run.steps} and resumed: it")
        except Fail as why:
            if any("workers" in note["where"] for note in self.first.of("draw")):
                raise Unchecked(f"augmentation in loader workers within an epoch: {why}") from why
            raise

    def ends(self, run):
        """Judge how a run ended after one of its processes failed."""
        if not run.status:
            ends = "ends with status 0" if run.status == 0 else f"goes on after {run.after:.0f} s"
            raise Fail(f"the run {ends}")
        return f"all processes end within {run.after:.0f} s, status {run.status}"

    @row(0, ENDS)
    def dies(self):
        """one process is killed"""
        return self.ends(self.act("kill"))

    @row(1, ENDS)
    def raises(self):
        """one process raises"""
        return self.ends(self.act("raise"))

    @row(1, "the process group has a time limit, and each loop calls longrun.alive")
    def hangs(self):
        """one process hangs"""
        self.needs("--timeout")
        wait = max(10, round(self.first.seconds))
        return self.ends(self.act("hang", more=["--timeout", str(wait)], wait=wait))

    @row(2, "losses and counts are added in fp32 or fp64")
    def bf16(self):
        """bf16 as fp64"""
        self.needs("--precision", "fp32", "bf16", "--limit-steps")
        more, runs = ["--epochs", "1", "--limit-steps", "300"], []  # in bf16 256 + 1 is 256
        more += ["--lr", "0"] * ("--lr" in self.program.help)  # only the sums differ
        for precision in (self.program.precise, "bf16"):
            flags = [*more, "--precision", precision]
            runs.append(self.program.run(f"sums-{precision}", 1, flags, size=1, do="plain"))
            if not runs[-1].good:
                raise Unchecked(f"train.py fails with a batch of one sample: {runs[-1].error}")
        found = {name: far for name, far in apart(*runs).items() if "loss" in name}
        if max(found.values(), default=0) > 0.05:
            raise Fail(self.text(found))
        text = f"losses agree after {runs[0].steps} steps: {self.text(found)}"
        return text if runs[0].steps > 256 else Weak(text)


def check(folder, rows=(), launcher=None, flags=(), tell=lambda line: None):
    """Check FOLDER/train.py, and yield one Row after the other; no names: all rows.

    launcher is a name in LAUNCHERS, or a command with {n}; flags go to train.py; tell is called
    with lines about the progress. Raises Refused, with one line, if there is nothing to check.
    """
    if unknown := [name for name in rows if name not in ROWS]:
        raise Refused(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    program, failed = Program(folder, launcher, [*flags], tell), False
    checks, names = Checks(program), [name for name in ROWS if name in (rows or ROWS)]
    program.left = 1 + sum(ROWS[name][1] for name in names)
    tell(f"{program.launcher} {' '.join(program.base)}: about {program.left} runs")
    for name in names:
        try:
            text = ROWS[name][3](checks)
            verdict = "weak" if isinstance(text, Weak) else "ok"
        except Unchecked as why:
            verdict, text = "not checked", str(why)
        except Fail as why:
            verdict, failed = "FAIL", True
            text = f"{why}\nMake sure that {ROWS[name][2]}.\nLogs: {program.output}/*/log"
        for path in () if failed else program.output.glob("*/output/*.pt"):
            if path.parts[-3] not in KEPT:
                path.unlink()
        yield Row(name, verdict, text)
        if "first" in program.runs and not program.runs["first"].good:
            return
