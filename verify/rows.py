"""The rows of the table: what each compares, and what has to be true if it fails."""

import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

from verify.program import Program, Refused, apart

KEPT = ("first", "again", "plain", "one")  # runs that several rows use
ROWS = {}  # by name: what it checks, about how many runs it adds, its method


class Row(NamedTuple):
    """A row of the table; the verdict is ok, weak, FAIL or not checked."""

    name: str
    verdict: str
    text: str


class Verdict(Exception):
    """How a row ends that is not ok: the verdict, and the reason."""


Fail, Weak, Unchecked = (partial(Verdict, verdict) for verdict in ("FAIL", "weak", "not checked"))


def row(what, runs):
    """Make a method of Checks a row; its docstring says what has to be true if it fails."""

    def keep(method):
        ROWS[method.__name__] = what, runs, method
        return method

    return keep


def readings(run):
    """Return what loaders read, in order: for each place in the program the notes of all ranks."""
    found, places = {}, Counter()
    for note in run.of("loader"):
        key = note["step"], note["train"]
        places[note["rank"], key] += 1
        note["place"] = places[note["rank"], key]  # of several loaders that begin at the same step
        found.setdefault((*key, note["place"]), []).append(note)
    return [found[key] for key in sorted(found)]


def count(notes, taken=False):
    """Count how often each sample is read in an epoch, or has been taken in the steps of a run."""
    counts = Counter()
    for note in notes:
        counts.update(note["indices"][: note["batches"] * note["batch"] if taken else None])
    return counts


def unlisted(*notes):
    """Return why it is not known which samples are read, or None."""
    why = [note["unlisted"] for note in notes if "unlisted" in note]
    own = len({note.get("of") for note in notes}) > 1
    return why[0] if why else "each process has a data set of its own" if own else None


def said(found):
    return ", ".join(f"{name} by {far:.0e}" for name, far in list(found.items())[:4])


class Checks:
    """The rows: each method returns a text, or raises a Verdict."""

    def __init__(self, program):
        self.program, self.run, self.noise = program, program.run, None

    @property
    def first(self):
        """The run with which others are compared."""
        return self.must(self.run("first"), "the first run")

    def must(self, run, what, verdict=Fail):
        if not run.good:
            raise verdict(f"train.py fails in {what}: {run.error}")
        return run

    def needs(self, *flags):
        if missing := [flag for flag in flags if flag not in self.program.help]:
            raise Unchecked(f"train.py has no {missing[0]}")

    def bits(self, other, what, doubt=None):
        """Compare a run with the first one: it has to end with the same bits, on GPUs nearly."""
        found = apart(self.first, self.must(other, what))
        if found and self.noise is None:
            self.noise = apart(self.first, self.must(self.run("again"), "the second run"))
        if wrong := {
            name: far for name, far in found.items() if far > 10 * self.noise.get(name, 0)
        }:
            raise Unchecked(doubt) if doubt else Fail(f"{what} has other results: {said(wrong)}")
        if found:
            raise Weak(f"{what} differs as two equal runs do: {said(found)}")
        return f"{what} has the same model.pt and metrics"

    def plain(self, name="plain", processes=2, more=(), parts=1):
        """Return a run without randomness, in fp64 if train.py can."""
        program, precise = self.program, self.program.precise
        if 0 < program.gpus < processes:
            raise Unchecked(f"{processes} processes on {program.gpus} GPUs")
        more = [*(["--precision", precise] if precise else []), *more]
        run = self.run(name, processes, more, parts=parts, do="plain")
        if not run.good and name == "plain" and precise == "fp64":
            program.precise = "fp32" * ("fp32" in program.help)
            return self.plain("plain-fp32")
        return self.must(run, f"a run of {processes} processes {' '.join(more)}", Unchecked)

    def arithmetic(self, one, other, what, doubt=None):
        """Compare two runs without randomness: they have to compute the same."""
        fp64, doubts = self.program.precise == "fp64", [doubt] if doubt else []
        found = {n: far for n, far in apart(one, other).items() if "num_batches_tracked" not in n}
        if one.of("draws") or other.of("draws"):
            doubts.append("random numbers besides dropout's")
        for a, b in zip(readings(one), readings(other), strict=False):
            if why := unlisted(*a, *b):
                doubts.append(why)
            elif (first := count(a, True)) != (second := count(b, True)):
                if not a[0]["train"]:  # test batches have other sizes
                    found = {n: found[n] for n in found if "train" in n or "model.pt" in n}
                elif max((first | second).values()) == 1:
                    doubts.append("a step has other samples")
        if not fp64:  # where a gradient is nearly 0, Adam makes a whole step of a rounding
            found = {n: found[n] for n in found if "model.pt" not in n}
        limits = {n: 1e-9 if fp64 else 1e-3 if "loss" in n else 0.05 for n in found}
        if wrong := {n: far for n, far in found.items() if far > limits[n]}:
            raise Unchecked(f"{what}: {doubts[0]}") if doubts else Fail(f"{what}: {said(wrong)}")
        same = f"{what}: the same to {max(found.values(), default=0):.0e}"
        if not fp64:
            raise Weak(f"{same}; smaller mistakes need --precision fp64")
        return same

    @row("same seed twice", 1)
    def seed(self):
        """Weights, sampler and augmentation are seeded; no order is that of a set()."""
        one, other = self.first, self.must(self.run("again"), "the second run")
        self.noise = found = apart(one, other)
        known = [
            n for n in found if any(word in n for word in ("model.pt", "loss", "acc", "score"))
        ]
        if known and not any(note["cuda"] for note in one.of("weights")):
            raise Fail(said(found))
        if found:
            raise Weak(f"two runs differ, and so may those below: {said(found)}")
        return "two runs have the same model.pt and metrics"

    @row("each sample once", 1)
    def samples(self):
        """Training has a DistributedSampler and calls set_epoch(); testing reads
        Subset(test_set, range(rank, len(test_set), world_size)).
        """
        wrong, unknown, good, orders, seen = [], [], [], {}, {}
        single = readings(self.plain("one", 1))  # it reads what several processes have to divide
        for note in (notes[0] for notes in single if not unlisted(*notes)):
            seen.setdefault(note["id"], set()).update(note["indices"])
        for two, one in zip(readings(self.first), single, strict=False):
            train, place = two[0]["train"], two[0]["place"]
            what = "training samples" if train else "test samples"
            if why := unlisted(*two, *one):
                unknown.append(f"{what}: {why}")
                continue
            counts, whole, order = count(two), count(one), [note["indices"] for note in two]
            if train and order == orders.get(place) and sorted(order[0]) != order[0]:
                wrong.append("two epochs have the same order")
            orders |= {place: order} if train else {}
            again, left = (counts - whole).total(), (whole - counts).total()
            allowed = sum(note["batch"] for note in two) - 1 if train else 0
            never = one[0]["len"] - len(seen[one[0]["id"]])
            if never > allowed:
                (unknown if train else wrong).append(f"{what}: {never} are in no batch")
            elif max(again, left) <= allowed:
                good.append(f"{what}: {len(counts)} of {two[0]['of']}")
            elif whole.total() - len(whole) > allowed:
                unknown.append(f"{what}: one process, too, reads some again")
            elif not train and counts == Counter({n: whole[n] * len(two) for n in whole}):
                unknown.append(f"{what}: each process reads all")
            else:
                wrong.append(f"{what}: {again} are read again, {left} by no process")
        if wrong:
            raise Fail("; ".join(dict.fromkeys(wrong)))
        if unknown or not good:
            raise Unchecked("; ".join(dict.fromkeys(unknown)) or "there is no DataLoader")
        return "; ".join(dict.fromkeys(good))

    @row("own random numbers", 0)
    def random(self):
        """The seed has the rank, also before the first loader starts its workers."""
        draws = {}
        for note in self.first.of("draw"):
            for state in note["states"]:
                draws.setdefault((note["where"], *state), set()).add(note["rank"])
        if not draws:
            raise Unchecked("no dropout and no augmentation draws")
        if same := [where for (where, *_), ranks in draws.items() if len(ranks) > 1]:
            raise Fail(f"{same[0]}: ranks draw the same in {len(same)} of {len(draws)} draws")
        return f"ranks draw other numbers: {', '.join(sorted({where for where, *_ in draws}))}"

    @row("equal weights", 0)
    def weights(self):
        """All that the optimizer trains (a loss, too) is inside DDP, DDP is what is called, and
        rank 0's buffers are broadcast before an evaluation.
        """
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
            for one, *rest in zip(*ranks.values(), strict=False):
                if any(one != other for other in rest):
                    raise Fail(f"other BatchNorm statistics on each rank after step {step}")
        return f"all ranks have the same bits after {self.first.steps} steps"

    @row("the checkpoint", 1)
    def checkpoint(self):
        """Rank 0 alone writes, to another name, which it renames by os.replace; what torch.load
        raises is not caught.
        """
        run, writes, files = self.first, Counter(), {}
        renamed = {(note["rank"], note["path"]): note["target"] for note in run.of("rename")}
        for note in run.of("save"):
            path = renamed.get((note["rank"], note["path"]), note["path"])
            if Path(path).is_relative_to(run.folder):
                writes[path, note["rank"], path == note["path"]] += 1
        for (path, rank, in_place), times in writes.items():
            if files.setdefault(path, rank) != rank:
                raise Fail(f"ranks {files[path]} and {rank} write {path}")
            if in_place and times > 1:
                raise Fail(f"{path} is written in place: a kill leaves half of it")
        self.needs("--resume")
        folder = self.program.output / "cut" / "output"
        shutil.copytree(run.folder, folder)
        paths = [folder / Path(path).name for path in files if not path.endswith("model.pt")]
        halves = {p: p.read_bytes()[: p.stat().st_size // 2] for p in paths if p.exists()}
        if not halves:
            raise Unchecked("torch.save writes no checkpoint into --output-dir")
        for path, half in halves.items():
            path.write_bytes(half)
        if self.run("cut", more=["--resume"], into=folder).status == 0:
            raise Fail("half of the checkpoint is accepted, or trained over: status 0")
        if any(path.read_bytes() != half for path, half in halves.items()):
            raise Fail("half of the checkpoint is refused, but the file is changed")
        names = ", ".join(path.name for path in halves)
        return f"each file is one rank's, and whole; half of {names} is refused"

    @row("2 processes as 1 and as 3", 2)
    def processes(self):
        """The sampler has one order for all processes; sums over processes are sums of losses and
        of samples (not a mean of means, not rank 0's); the learning rate does not depend on the
        number of processes; nothing trains outside of DDP; no set() numbers words or classes.
        """
        base = self.plain()
        one = self.arithmetic(base, self.plain("one", 1), "2 and 1")
        if 0 < self.program.gpus < 3:
            raise Weak(f"{one}; 3 processes need 3 GPUs")
        return f"{one}; {self.arithmetic(base, self.plain('three', 3), '2 and 3')}"

    @row("half batches, accumulated", 2)
    def accumulation(self):
        """The loss is divided by the batches of a step; clip, step and zero_grad come once a step,
        after the last backward(), which alone is outside of no_sync().
        """
        self.needs("--gradient-accumulation-steps")
        base, more = self.plain(), []
        norms = sorted(note.get("norm", 0) for note in base.of("weights"))
        if "--max-grad-norm" in self.program.help and norms:
            more = ["--max-grad-norm", str(norms[len(norms) // 2])]  # clips some of the steps
            base = self.plain("clipped", more=more)
        run = self.plain("halves", 2, ["--gradient-accumulation-steps", "2", *more], parts=2)
        gathers = (
            "the loss gathers a batch, and half of it is another" if run.of("gather") else None
        )
        what = f"1 and 2 batches{' with clipping' * bool(more)}"
        return self.arithmetic(base, run, what, gathers)

    def act(self, what, epoch=2, rank=1, **named):
        """Return a run in which the hook does something in the middle of epoch 1 or 2."""
        steps = self.first.steps
        starts = {notes[0]["step"] for notes in readings(self.first) if notes[0]["train"]}
        middle = min(starts - {0}, default=steps // 2)  # where epoch 2 begins
        step = max(1, middle // 2) if epoch == 1 else middle + max(1, (steps - middle) // 2)
        run = self.run(what, do=f"{what}:{step}:{rank}", **named)
        if not run.acted:
            raise Unchecked(f"no optimizer of torch.optim came to step {step}: {run.error}")
        return run

    @row("killed, resumed", 2)
    def killed(self):
        """The checkpoint has all that training changes (optimizer, scheduler, averaged weights,
        counters); dropout is seeded by step and rank; set_epoch() is called after a resume, too.
        """
        self.needs("--resume")
        run = self.act("kill")
        again = self.run("kill-resumed", more=["--resume"], into=run.folder)
        if again.good and again.steps >= self.first.steps:
            raise Fail("the resumed run begins again at the first step")
        return self.bits(again, "a run killed in epoch 2 and resumed")

    @row("stopped, resumed", 2)
    def stopped(self):
        """The file `stop` in --output-dir is looked for, and renamed to `stopped`; the checkpoint
        has the place in the epoch, and all that training changes; dropout is seeded by the step.
        """
        self.needs("--resume")
        run = self.act("stop", epoch=1, rank=0)
        if run.status != 0 or not (run.folder / "stopped").exists():
            raise Fail(f"asked to stop it ends with status {run.status} and no file `stopped`")
        again = self.run("stop-resumed", more=["--resume"], into=run.folder)
        within = any("workers" in note["where"] for note in self.first.of("draw"))
        doubt = "augmentation in loader workers within an epoch" if within else None
        return self.bits(again, f"a run stopped after step {run.steps} and resumed", doubt)

    def ends(self, run):
        """Judge how a run ended after one of its processes failed."""
        if not run.status:
            ends = "ends with status 0" if run.status == 0 else f"goes on after {run.after:.0f} s"
            raise Fail(f"the run {ends}")
        return f"all processes end within {run.after:.0f} s, status {run.status}"

    @row("one process is killed", 0)
    def dies(self):
        """No thread outlives the training, and no except hides that another process is gone."""
        return self.ends(self.act("kill"))

    @row("one process raises", 1)
    def raises(self):
        """No except around a step goes on, and a failure ends with a status above 0."""
        return self.ends(self.act("raise"))

    @row("one process hangs", 1)
    def hangs(self):
        """The process group has a time limit, and each loop calls longrun.alive."""
        self.needs("--timeout")
        wait = max(10, round(self.first.seconds))
        return self.ends(self.act("hang", more=["--timeout", str(wait)], wait=wait))

    @row("bf16 as fp64", 2)
    def bf16(self):
        """Losses and counts are added in fp32 or fp64."""
        self.needs("--precision", "fp32", "bf16", "--limit-steps")
        more, runs = ["--epochs", "1", "--limit-steps", "300"], []  # in bf16 256 + 1 is 256
        more += ["--lr", "0"] * ("--lr" in self.program.help)  # only the sums differ
        for precision in (self.program.precise, "bf16"):
            flags = [*more, "--precision", precision]
            run = self.run(f"sums-{precision}", 1, flags, size=1, do="plain")
            runs.append(self.must(run, "a run with a batch of one sample", Unchecked))
        found = {name: far for name, far in apart(*runs).items() if "loss" in name}
        text = f"after {runs[0].steps} steps: {said(found) or 'the same losses'}"
        if max(found.values(), default=0) > 0.05:
            raise Fail(text)
        if runs[0].steps <= 256:
            raise Weak(text)
        return text


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
    tell(
        f"{' '.join(program.launcher.split())} {' '.join(program.base)}: about {program.left} runs"
    )
    for name in names:
        try:
            verdict, text = "ok", ROWS[name][2](checks)
        except Verdict as why:
            verdict, text = why.args
            if verdict == "FAIL":
                look = " ".join(ROWS[name][2].__doc__.split())
                text, failed = f"{text}\nMake sure: {look}\nLogs: {program.output}/*/log", True
        for path in () if failed else program.output.glob("*/output/*.pt"):
            if path.parts[-3] not in KEPT:
                path.unlink()
        yield Row(name, verdict, text)
        if "first" in program.runs and not program.runs["first"].good:
            return
