"""The rows of the table: what each compares, and what it means if they differ."""

import itertools
import shutil
from pathlib import Path
from collections import Counter
from typing import NamedTuple

from verify.program import BATCH, Program, Refused, columns_apart, weights_apart

KEPT = ("first", "again", "plain", "one")  # runs that several rows use

ARITHMETIC = """Look at: the sampler (each sample once, one order for all processes); sums over processes
(loss and samples, not a mean of means, not rank 0's); the learning rate (not times the number of
processes); what is outside of DDP; words or classes numbered by a set(); a loss over a batch
(contrastive) has to gather all of it"""
RESUMED = """Look at: what no checkpoint has (optimizer, scheduler, averaged weights, counters, a best value);
random numbers (dropout, augmentation), which need a seed by step and rank; set_epoch(); the place
in the epoch"""
ADVICE = {
    "seed": "Something is not seeded: weights, sampler, augmentation, or the order of a set()",
    "samples": """Divide each set once: DistributedSampler for training, with set_epoch(epoch) before each epoch;
Subset(test_set, range(rank, len(test_set), world_size)) for testing""",
    "random": """Seed with the rank and the epoch before the loop that makes the loader's workers, and with the
rank and the step before dropout""",
    "weights": """All that the optimizer trains, a loss with weights too, has to be inside DDP, and DDP has to be
what is called; rank 0's buffers (BatchNorm) have to be broadcast before the evaluation""",
    "checkpoint": """Let rank 0 alone write, to another name, and rename it by os.replace; do not catch what
torch.load raises, and do not start over""",
    "processes": ARITHMETIC,
    "accumulation": """Divide the loss by the batches of a step; clip, step and zero_grad once a step, after the
last backward(), which alone has to be outside of no_sync()""",
    "killed": RESUMED,
    "dies": "The others have to end: look for except, and for threads that go on",
    "stopped": RESUMED
    + "; train.py has to look for the file stop in --output-dir, save, and end with 0",
    "raises": "Look for except around the training, and for an exit with status 0",
    "hangs": "Give the process group a time limit, and call longrun.alive in each loop",
    "bf16": "Add losses and counts in fp32 or fp64; compute the loss from logits in fp32",
}


class Row(NamedTuple):
    """A row of the table; the verdict is ok, weak, FAIL or not checked."""

    name: str
    verdict: str
    text: str


class Unchecked(Exception):
    """Why a row cannot be checked."""


class Broken(Exception):
    """The first run has failed."""


def first(program):
    """Return the run with which others are compared."""
    run = program.run("first")
    if not run.good:
        raise Broken(run.error)
    return run


def changes(columns):
    return [name for name in columns if any(word in name for word in ("loss", "acc", "score"))]


def columns_differ(program, one, other):
    """Return the columns that differ, without those that differ in two equal runs, too."""
    columns = columns_apart(one, other)
    if len(changes(columns)) < len(columns):  # such as a time with an unusual name
        usual = columns_apart(first(program), program.run("again"))
        columns = {
            name: columns[name] for name in columns if name in changes(columns) or name not in usual
        }
    return columns


def worst(columns, weights=(0, "")):
    """Return the largest difference, and where all of them are."""
    found = [weights, *columns.values()]
    return max(apart for apart, _ in found), "; ".join(where for _, where in found if where)


def seed(program):
    """same seed twice"""
    one, other = first(program), program.run("again")
    if not other.good:
        return "FAIL", f"the second run has failed: {other.error}"
    columns, weights = columns_apart(one, other), weights_apart(one, other)
    metrics = {name: columns[name] for name in changes(columns)}
    apart, where = worst(metrics, weights)
    if apart and not any(note["cuda"] for note in one.of("weights")):
        return "FAIL", where
    program.noise = apart
    if apart:
        return "weak", f"on GPUs two equal runs differ by {apart:.1e}; so may those below"
    same = "two runs have the same model.pt and the same metrics"
    return "ok", same + f", but for {', '.join(columns)}" * bool(columns)


def bits(program, other, what):
    """Compare a run with the first one: it has to end with the same bits, on GPUs nearly."""
    one = first(program)
    if not other.good:
        return "FAIL", f"{what} has failed: {other.error}"
    if program.noise is None and any(note["cuda"] for note in one.of("weights")):
        seed(program)
    noise = program.noise or 0
    apart, where = worst(columns_differ(program, one, other), weights_apart(one, other))
    if apart > 10 * noise:
        return "FAIL", f"{what} ends with other numbers: {where}"
    if apart:
        return "weak", f"{what} differs by {apart:.1e}; two equal runs by {noise:.1e}"
    return "ok", f"{what} has the same model.pt and the same metrics"


def plain(program, name, processes=2, more=(), parts=1):
    """Return a run without randomness, in fp64 if train.py can."""
    if program.batch(BATCH, processes, parts) is None:
        raise Unchecked("train.py has neither --global-batch nor --batch-size")
    if 0 < program.gpus < processes:
        raise Unchecked(f"{processes} processes on {program.gpus} GPUs")
    run = program.run(name, processes, [*program.exact, *more], parts=parts, actions="plain")
    if not run.good and program.exact and name == "plain":
        program.exact = []  # fp64 fails: go on without
        return plain(program, "plain-fp32")
    if not run.good:
        raise Unchecked(
            f"train.py fails ({' '.join(more) or f'{processes} processes'}): {run.error}"
        )
    return run


def arithmetic(program, one, other, what):
    """Compare two runs without randomness: they have to compute the same."""
    columns = columns_differ(program, one, other)
    if program.exact:
        apart, where = worst(columns, weights_apart(one, other, counters=False))
        good, limit = apart <= 1e-9, "1e-9"
    else:  # a gradient near 0 changes its sign, and Adam makes a whole step of it: no weights
        losses = {name: columns[name] for name in columns if "loss" in name}
        apart, where = worst(losses)
        good = apart <= 1e-3 and worst(columns)[0] <= 0.05
        where, limit = where or worst(columns)[1], "1e-3"
    if good and program.exact:
        return "ok", f"{what}: the same to {apart:.0e}"
    if good:
        return (
            "weak",
            f"{what}: the same to {apart:.0e} in fp32; small mistakes need --precision fp64",
        )
    if why := doubt(one, other):
        raise Unchecked(f"{what}: {apart:.0e} apart; {why}")
    return "FAIL", f"{what}: {apart:.0e} apart, not {limit}: {where}"


def doubt(one, other):
    """Return why two runs of a right program could differ, or None."""
    if one.of("draws") or other.of("draws"):
        return "training draws random numbers besides dropout's, which the hook cannot take away"
    if one.of("unstable") or other.of("unstable"):
        return "the data set has random numbers of its own, which the hook cannot take away"
    for pair in zip(readings(one), readings(other), strict=False):
        if why := pair[0].unlisted or pair[1].unlisted:
            return f"the order of the samples is not known ({why})"
        if own_sets(*pair):
            return "each process has a data set of its own"
        counts = [Counter(itertools.chain(*each.indices(taken=True))) for each in pair]
        if counts[0] != counts[1] and max([*counts[0].values(), *counts[1].values()]) == 1:
            return "a step has other samples"
    return None


class Reading(NamedTuple):
    """What the loaders of all ranks read at one place of the program, from one epoch's start."""

    train: bool
    place: int  # of several loaders that begin at the same step
    loaders: dict  # by rank, what the hook has noted

    @property
    def unlisted(self):
        return next(
            (note["unlisted"] for note in self.loaders.values() if "unlisted" in note), None
        )

    @property
    def batch(self):
        return sum(note["batch"] for note in self.loaders.values())

    @property
    def levels(self):
        """For each rank the size `of` the set that all ranks divide, and the `indices` in it.

        A rank can have its own Subset: then the set is the one inside.
        """
        levels = {rank: note["levels"] for rank, note in self.loaders.items()}
        while (
            len(parts := {each[0].get("part") for each in levels.values()}) > 1
            and None not in parts
        ):
            levels = {rank: each[1:] for rank, each in levels.items()}
        return {rank: each[0] for rank, each in levels.items()}

    def indices(self, taken=False):
        """Return the indices that each rank reads in a whole epoch, or those that it has taken."""
        most = [note["count"] * note["batch"] if taken else None for note in self.loaders.values()]
        return [
            level["indices"][:end] for level, end in zip(self.levels.values(), most, strict=True)
        ]


def readings(run):
    """Return what the loaders of a run read, in order."""
    exits = {note["rank"]: note["taken"] for note in run.of("exit")}
    found, places = {}, Counter()
    for note in run.of("loader"):
        rank, step = note["rank"], note["step"]
        note["count"], last = exits.get(rank, {}).get(str(note["number"]), (0, step))
        train = last > step or (note["count"] == 1 and note["grad"])
        places[rank, step, train] += 1
        found.setdefault((step, train, places[rank, step, train]), {})[rank] = note
    return [
        Reading(train, place, found[step, train, place]) for step, train, place in sorted(found)
    ]


def own_sets(one, other):
    """Return whether the size of the data set depends on the rank, or on the number of ranks."""
    return len({level["of"] for each in (one, other) for level in each.levels.values()}) > 1


def samples(program):
    """each sample once"""
    found, unknown, said, before = [], [], [], {}
    every = readings(first(program))
    for number, reading in enumerate(every):
        what = "training" if reading.train else "test"
        if reading.unlisted:
            unknown.append(f"{what} samples: {reading.unlisted}")
            continue
        counts, size, wrong = divided(reading, every)
        if reading.train:
            order = [note["levels"][0]["indices"] for note in reading.loaders.values()]
            if order == before.get(reading.place) and sorted(order[0]) != order[0]:
                wrong.append("two epochs have the same order")
            before[reading.place] = order
        if not wrong:
            said.append(f"{what}: {sum(map(bool, counts.values()))} of {size}")
            continue
        wrong = f"{what} samples: {', '.join(wrong)}"
        custom = [name for note in reading.loaders.values() for name in note["custom"]]
        repeats = any(len(part) - len(set(part)) > reading.batch for part in reading.indices())
        if custom or (reading.train and repeats):
            unknown.append(f"{wrong}, as {custom[0] if custom else 'the sampler'} may want it")
        elif not reading.train and set(counts.values()) == {len(reading.loaders)}:
            unknown.append("each process reads all test samples")
        elif own_sets(reading, readings(plain(program, "one", 1))[number]):
            unknown.append("each process has a data set of its own")
        else:
            found.append(wrong)
    if found:
        return "FAIL", "; ".join(dict.fromkeys(found))
    if unknown or not every:
        raise Unchecked(
            "; ".join(dict.fromkeys(unknown)) or "no loader of torch.utils.data is used"
        )
    return "ok", "; ".join(dict.fromkeys(said))


def divided(reading, every):
    """Count how often each sample is read; return this, the number of samples, and what is wrong."""
    levels = reading.levels
    size, counts = max(level["of"] for level in levels.values()), Counter()
    counts.update(itertools.chain(*reading.indices()))
    again = sum(counts.values()) - len(counts)
    ids = {(rank, level["id"]) for rank, level in levels.items()}
    for other in every:  # one set can be divided into training and test samples
        if other.train != reading.train and not other.unlisted:
            same = [level for rank, level in other.levels.items() if (rank, level["id"]) in ids]
            counts.update({index: 0 for level in same for index in level["indices"]})
    allowed = reading.batch - 1 if reading.train else 0
    wrong = [f"{size - len(counts)} of {size} are read by no process"] * (
        size - len(counts) > allowed
    )
    return counts, size, wrong + [f"{again} are read again"] * (again > allowed)


def random(program):
    """own random numbers"""
    states = {}
    for note in first(program).of("draw"):
        states.setdefault(note["where"], {}).setdefault(note["rank"], set()).update(
            map(tuple, note["states"])
        )
    if not states:
        raise Unchecked("nothing is drawn at dropout or at reading")
    for where, ranks in states.items():
        for one, other in itertools.combinations(ranks, 2):
            if same := ranks[one] & ranks[other]:
                return (
                    "FAIL",
                    f"ranks {one} and {other} draw the same numbers at {where} ({len(same)} times)",
                )
    counts = [f"{len(set().union(*ranks.values()))} at {where}" for where, ranks in states.items()]
    return "ok", f"all draws differ: {', '.join(counts)}"


def weights(program):
    """equal weights"""
    run, sums, norms, nodes = first(program), {}, {}, set()
    for note in run.of("weights"):
        if note["sums"] is None:
            raise Unchecked("the weights are sharded")
        sums.setdefault((note["step"], note["optimizer"], note["steps"]), {})[note["rank"]] = note[
            "sums"
        ]
    for note in run.of("norm"):
        norms.setdefault(note["step"], {}).setdefault(note["rank"], []).append(note["sums"])
    if not sums:
        raise Unchecked("no optimizer of torch.optim is used")
    for (step, *_), ranks in sorted(sums.items()):
        if len({len(values) for values in ranks.values()}) > 1:
            raise Unchecked("each process trains other tensors")
        apart = [
            n for n, values in enumerate(zip(*ranks.values(), strict=True)) if len(set(values)) > 1
        ]
        if apart:
            return (
                "FAIL",
                f"{len(apart)} trained tensors (number {apart[0]}) differ between ranks after step {step}",
            )
    for step, ranks in norms.items():
        if any(
            a != b
            for values in zip(*ranks.values(), strict=False)
            for a, b in itertools.pairwise(values)
        ):
            return (
                "FAIL",
                f"BatchNorm evaluates with other statistics on each rank after step {step}",
            )
    return (
        "ok",
        f"after {run.steps} steps {len(next(iter(sums.values())))} ranks have the same bits",
    )


def checkpoint(program):
    """the checkpoint"""
    run, writers, places = first(program), {}, Counter()
    renamed = {(note["rank"], note["path"]): note["target"] for note in run.of("rename")}
    for note in run.of("save"):
        path = renamed.get((note["rank"], note["path"]), note["path"])
        if Path(path).is_relative_to(run.folder):
            writers.setdefault(path, set()).add(note["rank"])
            places[path] += path == note["path"]
    if not writers:
        raise Unchecked("torch.save writes nothing into --output-dir")
    for path, ranks in writers.items():
        if len(ranks) > 1:
            return "FAIL", f"ranks {sorted(ranks)} write {path}"
        if places[path] > 1:
            return "FAIL", f"{path} is written in place: a kill in between leaves half of it"
    said = f"each whole, by one rank: {', '.join(sorted(Path(path).name for path in writers))}"
    if "--resume" not in program.help:
        return "weak", f"{said}; no --resume, so that a cut file was not tried"
    folder = program.output / "cut" / "output"
    shutil.copytree(run.folder, folder)
    files = [folder / Path(path).relative_to(run.folder) for path in writers]
    files = {path: path.read_bytes() for path in files if path.name != "model.pt" and path.exists()}
    files = {path: content[: len(content) // 2] for path, content in files.items()}
    for path, half in files.items():
        path.write_bytes(half)
    other = program.run("cut", more=["--resume"], into=folder)
    names = ", ".join(path.name for path in files)
    if other.status == 0:
        return "FAIL", f"with half of {names} it trains on, status 0"
    if changed := [path.name for path, half in files.items() if path.read_bytes() != half]:
        return "FAIL", f"half of {', '.join(changed)} is refused, but the file is changed"
    return "ok", f"{said}; half of {names} is refused and left"


def processes(program):
    """2 processes as 1 and as 3"""
    base, results, unknown = plain(program, "plain"), [], []
    for name, number in (("one", 1), ("three", 3)):
        try:
            run = plain(program, name, number)
            results.append(arithmetic(program, base, run, f"{number} process{'es' * (number > 1)}"))
        except Unchecked as why:
            unknown.append(str(why))
    return summary(results, unknown)


def summary(results, unknown):
    """Return one verdict for several comparisons."""
    if not results:
        raise Unchecked("; ".join(unknown))
    verdicts = [verdict for verdict, _ in results]
    verdict = "FAIL" if "FAIL" in verdicts else "weak" if "weak" in verdicts or unknown else "ok"
    said = [text for one, text in results if one == verdict or verdict != "FAIL"]
    return verdict, "; ".join(said + [f"not checked: {why}" for why in unknown])


def accumulation(program):
    """half batches, accumulated"""
    needs(program, "--gradient-accumulation-steps")
    base, more, clip = plain(program, "plain"), ["--gradient-accumulation-steps", "2"], []
    norms = sorted(note["norm"] for note in base.of("weights", rank=0) if note["norm"])
    if "--max-grad-norm" in program.help and norms:
        clip = ["--max-grad-norm", str(norms[len(norms) // 2])]  # clips some of the steps
        base = plain(program, "clipped", more=clip)
    run = plain(program, "halves", more=[*more, *clip], parts=2)
    result = arithmetic(program, base, run, f"half batches{' with clipping' * bool(clip)}")
    if result[0] == "FAIL" and run.of("gather"):
        raise Unchecked(
            "the loss gathers a batch of all processes, and half a batch is another one"
        )
    return result


def needs(program, *flags):
    """Raise Unchecked unless train.py has these flags."""
    if missing := [flag for flag in flags if flag not in program.help]:
        raise Unchecked(f"train.py has no {missing[0]}")


def act(program, what, epoch=2, rank=1, more=(), wait=0):
    """Return a run in which the hook does something in the middle of epoch 1 or 2."""
    run = first(program)
    starts = [
        note["step"] for each in readings(run) if each.train for note in each.loaders.values()
    ]
    middle = next((step for step in sorted(starts) if step > 0), run.steps // 2)
    step = max(1, middle // 2) if epoch == 1 else middle + max(1, (run.steps - middle) // 2)
    run = program.run(what, actions=f"{what}:{step}:{rank}", more=more, wait=wait)
    if not run.acted:
        raise Unchecked(f"no optimizer of torch.optim came to step {step}: {run.error}")
    return run


def ends(run):
    """Judge how a run ended after one of its processes failed."""
    if run.status is None:
        return "FAIL", f"the other processes go on after {run.after:.0f} s (log: {run.log})"
    if run.status:
        return "ok", f"all end within {run.after:.0f} s, status {run.status}"
    if run.of("exit", rank=1):
        return "ok", f"the launcher starts it again; all end {run.after:.0f} s later, status 0"
    return "FAIL", f"the run ends with status 0 (log: {run.log})"


def killed(program):
    """killed, resumed"""
    needs(program, "--resume")
    run = act(program, "kill")
    if run.good:  # the launcher has started it again
        return bits(program, run, "a run that was killed and started again")
    again = program.run("kill-resumed", more=["--resume"], into=run.folder)
    if again.good and again.steps >= first(program).steps:
        return "FAIL", "the resumed run began again at the first step"
    return bits(program, again, "killed in epoch 2 and resumed, it")


def dies(program):
    """one process is killed"""
    return ends(act(program, "kill"))


def raises(program):
    """one process raises"""
    run = act(program, "raise")
    if run.status == 0:
        return "FAIL", f"an exception is swallowed: status 0 (log: {run.log})"
    return ends(run)


def hangs(program):
    """one process hangs"""
    needs(program, "--timeout")
    wait = max(10, round(program.run("first").seconds))
    return ends(act(program, "hang", more=["--timeout", str(wait)], wait=wait))


def stopped(program):
    """stopped, resumed"""
    needs(program, "--resume")
    run = act(program, "stop", epoch=1, rank=0)
    if run.status != 0:
        return "FAIL", f"asked to stop it ends with status {run.status}: {run.error}"
    if (run.folder / "model.pt").exists():
        return "FAIL", f"it does not stop when the file {run.folder / 'stop'} is made"
    if not (run.folder / "stopped").exists():
        return "FAIL", f"{run.folder / 'stop'} is not renamed to stopped, which job.sh looks for"
    again = program.run("stop-resumed", more=["--resume"], into=run.folder)
    result = bits(program, again, f"stopped after step {run.steps} and resumed, it")
    if result[0] == "FAIL" and first(program).of("draw", where="reading in loader workers"):
        raise Unchecked(f"augmentation in loader workers within an epoch: {result[1]}")
    return result


def bf16(program):
    """bf16 as fp64"""
    needs(program, "--precision", "bf16", "--limit-steps")
    more = ["--epochs", "1", "--limit-steps", "300"]  # in bf16 256 + 1 is 256
    more += ["--lr", "0"] * ("--lr" in program.help)  # only the sums differ
    precise = program.exact or ["--precision", "fp32"] * ("fp32" in program.help)
    runs = []
    for name, precision in (("sums", precise), ("sums-bf16", ["--precision", "bf16"])):
        runs.append(program.run(name, more=[*more, *precision], size=2, actions="plain"))
        if not runs[-1].good:
            raise Unchecked(f"train.py fails with a batch of 1: {runs[-1].error}")
    columns = columns_apart(*runs)
    apart, where = worst({name: columns[name] for name in columns if "loss" in name})
    if apart > 0.05:
        return "FAIL", f"losses are {apart:.0%} apart: {where}"
    few = runs[0].steps <= 256
    return "weak" if few else "ok", f"losses agree to {apart:.1%} after {runs[0].steps} steps"


ROWS = {  # the name of a row: its function, and about how many runs it adds
    "seed": (seed, 1),
    "samples": (samples, 0),
    "random": (random, 0),
    "weights": (weights, 0),
    "checkpoint": (checkpoint, 1),
    "processes": (processes, 3),
    "accumulation": (accumulation, 2),
    "killed": (killed, 2),
    "dies": (dies, 0),
    "stopped": (stopped, 2),
    "raises": (raises, 1),
    "hangs": (hangs, 2),
    "bf16": (bf16, 3),
}


def check(folder, rows=(), launcher=None, flags=(), tell=lambda line: None):
    """Check FOLDER/train.py, and yield a Row after the other; none: all rows.

    launcher is a name in LAUNCHERS, or a command with {n}; flags go to train.py; tell is called
    with lines about the progress. Raises Refused, with one line, if there is nothing to check.
    """
    if unknown := [name for name in rows if name not in ROWS]:
        raise Refused(f"there is no row {unknown[0]}: choose from {', '.join(ROWS)}")
    program = Program(folder, launcher, flags, tell)
    rows, failed = [name for name in ROWS if name in (rows or ROWS)], False
    program.left = 1 + sum(ROWS[name][1] for name in rows)
    tell(f"{program.launcher} {' '.join(program.base)}: about {program.left} runs")
    for name in rows:
        try:
            verdict, text = ROWS[name][0](program)
        except Unchecked as why:
            verdict, text = "not checked", str(why)
        except Broken as why:
            yield Row(name, "FAIL", f"train.py has failed in the first run: {why}")
            return
        if verdict == "FAIL":
            text += f"\n{ADVICE[name]}\nThe logs are in {program.output}"
            failed = True
        for path in () if failed else program.output.glob("*/output/*.pt"):
            if path.parts[-3] not in KEPT:
                path.unlink()
        yield Row(name, verdict, text)
