"""Start a train.py as its users do, with the hook, and compare the results of its runs."""

import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cached_property, partial
from pathlib import Path

import numpy as np

SRUN = """srun --mpi=none --overlap --kill-on-bad-exit=1 --ntasks={n} bash -c '
    code=. && source ./job.sh; export MASTER_ADDR=$(scontrol show hostnames | head -n 1)
    choose_interface; export MASTER_PORT=$((10000 + (SLURM_JOB_ID + SLURM_STEP_ID) % 20000))
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python train.py "$@"' bash"""
LAUNCHERS = {
    "spawn": "python train.py --processes {n}",
    "srun": SRUN,
    "torchrun": "torchrun --standalone --nproc-per-node={n} train.py",
}
LIMITS = {"--limit-steps": 8, "--global-batch": 48, "--timeout": 120}
# A column of metrics.csv is a result if its name has one of these words; others can be times.
RESULTS = "loss|acc(uracy|[^a-z]|$)|score|error|perplexity|precision|recall|f1|auc|iou|bleu"


class Verdict(Exception):
    """The end of a row that is not ok: the verdict, and the reason."""


Fail, Weak, Unchecked = (partial(Verdict, verdict) for verdict in ("FAIL", "weak", "not checked"))


def readings(run):
    """Return what loaders read, in order: for each use that is no look at one batch, all notes."""
    found = {}
    for note in run.of("loader"):
        if note["train"] or not 0 < note["taken"] <= note["batch"] < len(note["indices"]):
            found.setdefault((note["step"], note["train"], note.get("of", 0)), []).append(note)
    return [found[key] for key in sorted(found)]


def unlisted(*notes):
    """Return why it is not known which samples are read, or None."""
    why = [note["unlisted"] for note in notes if "unlisted" in note]
    own = len({note.get("of") for note in notes}) > 1
    return why[0] if why else "each process has its own data set" if own else None


def said(found):
    return ", ".join(f"{name} by {far:.0e}" for name, far in list(found.items())[:4])


class Run:
    """The results of a run: its status, its log, the notes of the hook, and its metrics."""

    def __init__(self, place, folder, status, seconds):
        """Read the log and the whole lines of the hook's notes: a kill can cut the last line."""
        self.place, self.folder, self.status, self.seconds = place, folder, status, seconds
        self.text = (place / "log").read_text(errors="replace")
        files = sorted(place.glob("notes/*.jsonl"))
        self.notes = [json.loads(n) for file in files for n in file.read_text().split("\n")[:-1]]
        self.steps = max([note["step"] for note in self.of("exit")], default=0)
        self.good = status == 0 and (folder / "metrics.csv").exists()
        lines = [line for line in self.text.splitlines() if "torch.distributed" not in line]
        said = [line for line in lines if "rror: " in line] or lines or ["no output"]
        self.error = f"{said[-1].strip()[:300]} (log: {place / 'log'})"

    def of(self, event):
        return [note for note in self.notes if note["event"] == event]

    @property
    def results(self):
        """Results in metrics.csv, by column and epoch, and all tensors in model.pt, by name."""
        found = {}
        with open(self.folder / "metrics.csv", newline="") as file:
            for n, row in enumerate(csv.DictReader(file), 1):
                for name in filter(re.compile(RESULTS, re.IGNORECASE).search, row):
                    with contextlib.suppress(TypeError, ValueError):  # no number
                        found[f"{name} of epoch {n}"] = float(row[name])
        with contextlib.suppress(Exception):  # no file, no dict of tensors, or no PyTorch
            import torch

            weights = torch.load(self.folder / "model.pt", "cpu").items()
            found |= {f"model.pt {n}": v for n, v in weights if hasattr(v, "numel") and v.numel()}
        return found


def exact(value):
    """Return a number or a tensor as an array in fp64; apart() converts only two at a time."""
    if hasattr(value, "is_complex"):
        value = value.detach().cdouble() if value.is_complex() else value.detach().double()
    return np.nan_to_num(np.asarray(value), nan=9e99)


def apart(one, other):
    """Return relative differences by name (of weights: relative to the largest weight)."""
    one, other = one.results, other.results
    if not one:
        raise Unchecked("there is no number in metrics.csv and no tensor in model.pt")
    weights = [np.abs(exact(one[n])).max() for n in one if n.startswith("model.pt")]
    found = dict.fromkeys(one.keys() ^ other.keys(), float("inf"))
    for name in one.keys() & other.keys():
        a, b = exact(one[name]), exact(other[name])
        size = max(1e-300, *(weights if name.startswith("model.pt") else [np.abs(a).max()]))
        far = float(np.abs(a - b).max() / size) if a.shape == b.shape else float("inf")
        found |= {name: far} if far else {}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


class Checks:
    """The rows: each returns a text, or raises a Verdict; a FAIL also prints its docstring."""

    def __init__(self, folder, launcher, flags):
        """Remove the files of an earlier check, and ask train.py for its flags."""
        self.folder, self.runs = folder, {}
        self.output, self.launcher, self.hidden = folder / "verify-output", "python train.py", {}
        shutil.rmtree(self.output, ignore_errors=True)
        run = self.start("help", 1, ["--help"])
        self.help = set(run.text.translate(str.maketrans("[](){},", "       ")).split())
        if any(note["gpus"] == 1 for note in run.of("exit")) and not launcher:
            self.hidden = {"CUDA_VISIBLE_DEVICES": "", "ALLOW_CPU": "1"}  # 2 processes need 2 GPUs
        launcher = launcher or ("spawn" if "--processes" in self.help else "torchrun")
        self.launcher = LAUNCHERS.get(launcher, launcher)
        self.base = [str(x) for pair in LIMITS.items() if pair[0] in self.help for x in pair]
        self.flags = [*self.base, *flags, *["--epochs", "2"] * ("--epochs" in self.help)]
        self.precise = next((p for p in ("fp64", "fp32") if {"--precision", p} <= self.help), "")
        self.limit = 1e-9 if self.precise == "fp64" else 1e-3

    def train(self, name, processes=2, more=(), **named):
        """Return the run with this name; start it if it has not been started; see start."""
        if name not in self.runs:
            self.runs[name] = run = self.start(name, processes, [*self.flags, *more], **named)
            print(f"      {name}: {run.seconds:.0f} s", flush=True)
        return self.runs[name]

    def start(self, name, processes, flags, do="", into=None, limit=0):
        """Run train.py to the end, or to a limit in seconds (0: none): then the status is None."""
        place = self.output / name
        output = into or place / "output"
        (place / "notes").mkdir(parents=True)
        words = ["timeout", "--kill-after=40", str(limit)]
        words += shlex.split(self.launcher.replace("{n}", str(processes)))
        paths = {"PYTHONPATH": Path(__file__).parent / "hook", "PATH": Path(sys.executable).parent}
        variables = {key: f"{path}:{os.environ.get(key, '')}" for key, path in paths.items()}
        variables |= {"VERIFY_DIR": str(place / "notes"), "VERIFY_DO": do, "COLUMNS": "1000"}
        variables |= {"VERIFY_STOP": str(output / "stop"), "ALLOW_OTHER_WEIGHTS": "1"} | self.hidden
        began = time.monotonic()
        with open(place / "log", "w") as log:
            process = subprocess.Popen(
                [*words, *flags, "--output-dir", str(output)], env=os.environ | variables,
                cwd=self.folder, start_new_session=True, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            status = process.wait()
        finally:  # torchrun and srun end their processes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        seconds = time.monotonic() - began
        return Run(place, output, None if 0 < limit < seconds else status, seconds)

    def run(self, name, verdict=Fail, **named):
        """Return a run, which must end well."""
        run = self.train(name, **named)
        if not run.good:
            raise verdict(f"train.py fails in the run `{name}`: {run.error}")
        return run

    first = property(lambda self: self.run("first"))  # with which others are compared
    noise = cached_property(lambda self: apart(self.first, self.run("again")))

    def needs(self, *flags):
        if missing := [flag for flag in flags if flag not in self.help]:
            raise Unchecked(f"train.py has no {missing[0]}")

    def plain(self, name="two", processes=2, more=()):
        """Return a run without randomness, in fp64 if train.py has it."""
        more = [*(["--precision", self.precise] * bool(self.precise)), *more]
        return self.run(name, Unchecked, processes=processes, more=more, do="plain")

    def arithmetic(self, base, *others):
        """Compare runs without randomness: they must compute the same."""
        fp64, texts = self.precise == "fp64", []
        for run in others:
            doubts = ["random numbers besides dropout's"] * bool(base.of("draws") + run.of("draws"))
            found = {n: f for n, f in apart(base, run).items() if "num_batches_tracked" not in n}
            for a, b in zip(readings(base), readings(run), strict=False):
                if why := unlisted(*a, *b):
                    doubts.append(why)
                elif sum(note["taken"] for note in a) != sum(note["taken"] for note in b):
                    doubts += ["other samples"] * a[0]["train"]
                    whole = all(note["taken"] == len(note["indices"]) for note in a + b)
                    found = {n: found[n] for n in found if whole or "train" in n or "model.pt" in n}
            if not fp64:  # where a gradient is nearly 0, rounding decides Adam's step
                found = {n: far for n, far in found.items() if "loss" in n}
            what, far = f"runs {base.place.name}, {run.place.name}", max(found.values(), default=0)
            if far > self.limit:
                verdict, why = (Unchecked, doubts[0]) if doubts else (Fail, said(found))
                raise verdict(f"{what}: {why}")
            texts.append(f"{what}: the same to {far:.0e}")
        if not fp64:
            verdict = Weak if any("loss" in name for name in base.results) else Unchecked
            raise verdict("; ".join([*texts, "only --precision fp64 shows small mistakes"]))
        return "; ".join(texts)

    def seed(self):
        """same seed twice: all random numbers are seeded, and no order comes from a set()."""
        if self.noise:
            verdict = Weak if any(note["gpus"] for note in self.first.of("exit")) else Fail
            raise verdict(f"two runs differ, and so may those below: {said(self.noise)}")
        return "two runs have the same model.pt and metrics"

    def samples(self):
        """each sample once: training uses a DistributedSampler and set_epoch(); testing reads
        Subset(test_set, range(rank, len(test_set), world_size)).
        """
        single = readings(self.plain("one", 1))  # what several processes have to divide
        found, orders = {} if single else {"there is no DataLoader": Unchecked}, []
        for two, one in zip(readings(self.first), single, strict=False):
            train = two[0]["train"]
            what = "training samples" if train else "test samples"
            if why := unlisted(*two, *one):
                found[f"{what}: {why}"] = Unchecked
                continue
            order = [note["indices"] for note in two]
            counts = Counter(sum(order, []))
            whole = Counter(sum((note["indices"] for note in one), []))
            again, left = (counts - whole).total(), (whole - counts).total()
            if train and order in orders and sorted(order[0]) != order[0]:
                found["two epochs have the same order"] = Fail
            orders += [order] * train
            if not train and one[0]["drop_last"] and len(whole) < one[0]["len"]:
                found[f"{what}: the last batch is dropped"] = Fail
            elif max(again, left) < (sum(note["batch"] for note in two) if train else 1):
                found[f"{what}: {len(counts)} of {two[0]['of']}"] = None
            elif whole.total() > len(whole) or not train and again == whole.total():
                found[f"{what}: some are read again, which may be intended"] = Unchecked
            else:  # a test can leave out what is read again
                same = not (train or left) and {"--global-batch", "fp64"} <= self.help
                far = apart(self.plain("one", 1), self.plain()) if same else {}
                seen = [n for n in far if far[n] > self.limit and not re.search("train|model", n)]
                text = f"{what}: {again} are read again, {left} by no process"
                found[text] = Fail if train or left or seen else Unchecked
        for verdict in (Fail, Unchecked):
            if texts := [text for text in found if found[text] is verdict]:
                raise verdict("; ".join(texts))
        return "; ".join(found)

    def random(self):
        """own random numbers: the seed depends on the rank, also when a loader starts workers."""
        draws = {}
        for note in self.first.of("draw"):
            for state in note["states"]:
                draws.setdefault((note["where"], *state), set()).add(note["rank"])
        if not draws:
            raise Unchecked("no dropout or augmentation draws random numbers")
        if same := [where for (where, *_), ranks in draws.items() if len(ranks) > 1]:
            raise Fail(f"{same[0]}: ranks draw the same in {len(same)} of {len(draws)} draws")
        return f"ranks draw different numbers: {', '.join(sorted({where for where, *_ in draws}))}"

    def weights(self):
        """equal weights: all that the optimizer trains (also in a loss) is inside DDP, the program
        calls the DDP model, and rank 0's buffers are broadcast before an evaluation.
        """
        found = {}
        for note in self.first.of("equal"):
            ranks = found.setdefault((note["step"], note["what"]), {})
            ranks.setdefault(note["rank"], []).append(note["sums"])
        if not found or self.first.of("sharded"):
            raise Unchecked("the weights are sharded, or there is no optimizer of torch.optim")
        for (step, what), ranks in sorted(found.items()):
            for sums in zip(*ranks.values(), strict=False):
                if wrong := sum(len(set(each)) > 1 for each in zip(*sums, strict=False)):
                    raise Fail(f"{wrong} of {len(sums[0])} {what} differ after step {step}")
        return f"all ranks have the same bits after {self.first.steps} steps"

    def checkpoint(self):
        """the checkpoint: only rank 0 writes it, with os.replace; no torch.load error is caught."""
        writers, halves, folder = {}, {}, self.output / "cut" / "output"
        for note in self.first.of("file"):
            path = Path(note["path"])
            if self.first.folder in path.parents:
                if writers.setdefault(path, note["rank"]) != note["rank"]:
                    raise Fail(f"ranks {writers[path]} and {note['rank']} write {path}")
                if note["times"] > 1:
                    raise Fail(f"{path} is written in place: a kill leaves half of it")
        self.needs("--resume")
        shutil.copytree(self.first.folder, folder)
        for path in writers:
            path = folder / path.relative_to(self.first.folder)
            if path.exists() and path.name != "model.pt":
                os.truncate(path, path.stat().st_size // 2)
                halves[path] = path.read_bytes()
        if not halves:
            raise Unchecked("torch.save writes no checkpoint into --output-dir")
        status = self.train("cut", more=["--resume"], into=folder).status
        if status == 0 or any(path.read_bytes() != half for path, half in halves.items()):
            raise Fail(f"half of a checkpoint is accepted, or written over: status {status}")
        return f"{len(writers)} files, each of one rank, and whole; half of a checkpoint is refused"

    def processes(self):
        """2 processes as 1 and as 3: all processes use one order of samples; losses and samples
        are summed over processes (no mean of means, not rank 0's alone); the learning rate does not
        depend on the number of processes; all weights are inside DDP; no set() numbers words.
        """
        self.needs("--global-batch")
        return self.arithmetic(self.plain(), self.plain("one", 1), self.plain("three", 3))

    def accumulation(self):
        """half batches, accumulated: the loss is divided by the batches per step; clip, step and
        zero_grad come once a step, after the last backward(), which alone is outside of no_sync().
        """
        self.needs("--global-batch", "--gradient-accumulation-steps")
        base, clip = self.plain(), []
        norms = sorted(note["norm"] for note in base.of("step"))
        if "--max-grad-norm" in self.help and norms:
            clip = ["--max-grad-norm", str(norms[len(norms) // 2])]  # clips some of the steps
            base = self.plain("clipped", more=clip)
        run = self.plain("halves", more=["--gradient-accumulation-steps", "2", *clip])
        return self.arithmetic(base, run)

    def act(self, what, epoch=2, rank=1):
        """Return a run in which the hook does something in the middle of epoch 1 or 2."""
        step, seconds = max(1, self.first.steps * (2 * epoch - 1) // 4), round(self.first.seconds)
        wait, limit = max(20, seconds), seconds + max(30, 5 * seconds)
        more = ["--timeout", str(wait)] if "--timeout" in self.help else []
        run = self.train(what, more=more, do=f"{what}:{step}:{rank}", limit=wait + limit)
        if not (run.place / "notes" / "done").exists():
            raise Unchecked(f"no optimizer of torch.optim reached step {step}: {run.error}")
        return run

    def resume(self, run, what):
        """Continue a run: it must end with the bits of the first run (on GPUs: nearly)."""
        again = self.run(f"{run.place.name}-resumed", more=["--resume"], into=run.folder)
        if again.steps >= self.first.steps:
            raise Fail("the resumed run begins again at the first step")
        found = apart(self.first, again)
        if found and any(far > 10 * self.noise.get(name, 0) for name, far in found.items()):
            raise Fail(f"{what} has other results: {said(found)}")
        if found:
            raise Weak(f"{what} differs about as much as two equal runs: {said(found)}")
        return f"{what} has the same model.pt and metrics"

    def killed(self):
        """killed, resumed: the checkpoint has all that training changes (optimizer, scheduler,
        averaged weights, counters); dropout is seeded by step and rank.
        """
        self.needs("--resume")
        return self.resume(self.act("kill"), "a run killed in epoch 2 and resumed")

    def stopped(self):
        """stopped, resumed: train.py looks for the file `stop` in --output-dir, and renames it to
        `stopped`; the checkpoint has the place in the epoch; dropout is seeded by the step.
        """
        self.needs("--resume")
        run = self.act("stop", epoch=1, rank=0)
        if run.status != 0 or not (run.folder / "stopped").exists():
            raise Fail(f"asked to stop, it has status {run.status}, or no file `stopped`")
        if any("workers" in note["where"] for note in self.first.of("draw")):
            raise Unchecked("it stops, but augmentation in loader workers begins its epoch again")
        return self.resume(run, f"a run stopped after step {run.steps} and resumed")

    def ends(self):
        """one process raises; is killed; hangs: no except around a step goes on, no thread outlives
        the training, the process group has a time limit, and each loop calls longrun.alive.
        """
        self.needs("--timeout")
        if wrong := next((it for it in ("raise", "kill", "hang") if not self.act(it).status), None):
            raise Fail(f"`{wrong}`: the run has status {self.runs[wrong].status} (None: no end)")
        return "after each of them the run ends with a status above 0"

    def bf16(self):
        """bf16 as fp64: losses and counts are summed in fp32 or fp64."""
        self.needs("--precision", "bf16", "--global-batch", "--limit-steps")
        more = ["--epochs", "1", "--global-batch", "1", "--limit-steps", "300"]  # 256 + 1 is 256
        more += ["--lr", "0"] * ("--lr" in self.help)  # only the sums differ
        run = self.plain("sums", 1, more)
        other = self.plain("sums-bf16", 1, [*more, "--precision", "bf16"])
        found = {name: far for name, far in apart(run, other).items() if "loss" in name}
        if max(found.values(), default=0) > 0.05:
            raise Fail(said(found))
        return f"after {run.steps} steps: {said(found) or 'the same losses'}"


ROWS = ["seed", "samples", "random", "weights", "checkpoint", "processes", "accumulation"]
ROWS += ["killed", "stopped", "ends", "bf16"]


def check(folder, rows=ROWS, launcher=None, flags=()):
    """Check FOLDER/train.py with a launcher and flags; yield each row's name, verdict, text."""
    checks = Checks(Path(folder).resolve(), launcher, [*flags])
    print("      about", len(rows) + 5, "times", *checks.launcher.split(), *checks.base, flush=True)
    for name in (name for name in ROWS if name in rows):
        what, _, look = " ".join(getattr(checks, name).__doc__.split()).partition(": ")
        try:
            verdict, text = "ok", getattr(checks, name)()
        except Verdict as why:
            verdict, text = why.args
        if verdict == "FAIL":
            text = f"{text}\nMake sure: {look}\nLogs: {checks.output}/*/log"
        yield name, verdict, f"{what}: {text}"
        if "first" in checks.runs and not checks.runs["first"].good:
            return
