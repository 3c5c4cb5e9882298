"""Try a cluster in one job: preflight, the examples that VENV can run, a kill, a notice, a requeue, and speeds.

On SLURM:    VENV=~/project/.venv sbatch trial.slurm
Afterwards:  python trial.py --draw trial-JOBID.txt   (writes trial-JOBID.html)

It starts programs of the repository, each with a limit, as long as the job's time permits; what does not fit is named
as left out. The report, trial-JOBID.txt, is written anew after each step, and has no names of users, hosts, paths,
accounts and partitions (trial_report.py). The folder trial-JOBID has the logs, with all names.
"""

import argparse
import csv
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trial_report import Row, cleaner, describe, draw, known_names, report_text

ROOT = Path(__file__).resolve().parents[1]
# It can be stopped at any step, and nothing starts its processes again: it is killed, stopped, and its speeds count.
MAIN = "srun_multinode"
FIRST = [MAIN, "torchrun_multinode", "ddp_spawn", "lightning", "deepspeed", "horovod_cpu"]  # then the others
FEW_EPOCHS, EPOCHS, GPU_EPOCHS = 4, 8, 20  # of the main one so many that it can be killed in between
BATCH, BATCHES = 128, {"fsdp": 16, "lora": 8, "torchrun_vision": 32}  # at least, of all processes together
# By how much losses may differ, see `difference`. Sums in another order differ by a rounding, which grows with every
# step. So the first epoch is compared: it was 0.0001 % on CPUs, and 8 % with gradients averaged within nodes only.
BOUND = 0.01
NOT_COMPARED = {"torchrun_vision": "batch norm goes by the batch of a process"}
PREFLIGHT_SECONDS, RUN_SECONDS, GPU_SECONDS = 300, 180, 600  # the most that a step gets
NOTICE_SECONDS = 90  # in which a run ends after a kill or a notice
LEAST, RESERVE = 45, 45  # seconds for which a run is begun; at the end, for the requeue and the report
NEEDS = {"on_gpu": 300, "requeue": -RESERVE}  # seconds for which these are begun
INSISTS = 15  # seconds from SIGTERM to SIGKILL


class EndedError(BaseException):
    """SLURM has asked this job to end."""


@dataclass
class Trial:
    """The job, and what is known so far."""

    id: str
    nodes: list[str]
    cpus: int  # of each node
    gpus: int  # of each node
    end: float  # when the last step has to be over, as time.time() tells it
    work: Path
    rows: list[Row] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # names of steps
    begun: float = field(default_factory=time.time)
    asked: float = 0  # when SLURM was asked to start this job again

    @property
    def each(self) -> int:
        """How many processes a node has: as many as GPUs, else two, as run.slurm of the examples has them."""
        return self.gpus or 2

    def epochs(self, example: str) -> int:
        """Return how many epochs an example trains."""
        return FEW_EPOCHS if example != MAIN else GPU_EPOCHS if self.gpus else EPOCHS

    def left(self) -> float:
        """Return how many seconds are left for steps."""
        return self.end - time.time()

    def write(self, more: list[Row]) -> None:
        """Write the report, with rows that may still change, and what a start of this job after this one reads."""
        clean = cleaner(known_names(self.nodes))
        minutes = (time.time() - self.begun) / 60
        system = describe(len(self.nodes), self.cpus, self.gpus)
        state = json.dumps({name: vars(self)[name] for name in ("rows", "done", "begun", "asked")})
        write(self.work / "state.json", state)
        write(self.work.with_suffix(".txt"), report_text(clean(system), minutes, clean(self.rows + more)))


def write(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def fail(message: str) -> NoReturn:
    """End with status 2 and one line."""
    print(f"trial.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def row(check: str, state: str, result: str, **more: Any) -> Row:
    """Return a row of the report."""
    return {"check": check, "state": state, "result": result, **more}


def ask(*words: str) -> str:
    """Return what a program of SLURM's prints, with times in seconds, which no time zone has twice."""
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)
    return done.stdout + done.stderr


def read_job() -> Trial:
    """Return what SLURM says of this job, with what an earlier start of it has found."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        fail("this is not a SLURM job; submit it: sbatch trial.slurm")
    try:
        shown = ask("scontrol", "show", "job", env["SLURM_JOB_ID"])
        nodes = ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()
    except OSError as error:
        fail(f"cannot run scontrol, which the examples need too: {error}")
    found = re.search(r" EndTime=(\d+)\s", shown)
    end = int(found[1]) if found else time.time() + 1800
    gpus = int(env.get("SLURM_GPUS_ON_NODE") or len(list(filter(None, env.get("SLURM_JOB_GPUS", "").split(",")))))
    if asked := re.search(r" TresPerNode=\S*gpu\S*[:=](\d+)\s", shown):  # of whole nodes steps get no more than that
        gpus = min(gpus, int(asked[1]))
    work, cpus = Path(f"trial-{env['SLURM_JOB_ID']}").absolute(), int(env.get("SLURM_CPUS_PER_TASK", 0))
    trial = Trial(env["SLURM_JOB_ID"], nodes, cpus, gpus, end - RESERVE, work)
    if cpus < trial.each:
        fail(f"ask for {trial.each} cores or more of each node with #SBATCH --cpus-per-task")
    restarted = int(env.get("SLURM_RESTART_COUNT", 0)) > 0
    if work.exists() and not restarted:
        fail(f"{work.name} is of another job with this id: move it away")
    work.mkdir(exist_ok=True)
    if restarted and (work / "state.json").exists():
        vars(trial).update(json.loads((work / "state.json").read_text()))
    return trial


# ---- A program in this allocation ----


def end(process: subprocess.Popen, trial: Trial) -> None:
    """End a process with all that it has started, also on other nodes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(INSISTS)
    with suppress(OSError, subprocess.SubprocessError):
        for step in ask("squeue", "--steps", "--noheader", f"--jobs={trial.id}", "--format=%i").split():
            if step.rpartition(".")[2].isdigit():  # else it is the batch script
                ask("scancel", step)


def watch(process: subprocess.Popen, trial: Trial, most: float, until: Callable[[], bool] = lambda: False) -> str:
    """Wait until a process ends, or something is so; return "" or, if it had to be ended, why."""
    seconds = min(most, trial.left())
    limit = time.monotonic() + seconds
    try:
        while process.poll() is None and not until():
            if time.monotonic() > limit:
                end(process, trial)
                return f"not over after {seconds:.0f} s"
            time.sleep(0.02)
    except BaseException:
        end(process, trial)
        raise
    return ""


def stand_in(trial: Trial) -> Path:
    """Return a program `scontrol`, for PATH, that notes a wish to requeue this job; all else it hands on to SLURM's."""
    path = trial.work / "bin" / "scontrol"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        note = '[[ "$1" != requeue ]] || { touch "$OUTPUT_DIR/asked"; exit; }'
        path.write_text(f'#!/bin/bash\n{note}\nexec "{shutil.which("scontrol")}" "$@"\n')
        path.chmod(0o755)
    return path


def environment(trial: Trial, output: Path, nodes: int, processes: int, tasks: int, restarts: int) -> dict[str, str]:
    """Return the variables of a run.slurm as if SLURM had given it so many nodes, and tasks on each, as its own job."""
    # The cores of a process are the same in all runs.
    cpus = max(1, trial.cpus // trial.each * (1 if tasks > 1 or processes == 1 else processes))
    return os.environ | {
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": ",".join(trial.nodes[:nodes]),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})" if nodes > 1 else str(tasks),
        "SLURM_CPUS_PER_TASK": str(cpus),
        "SLURM_GPUS_ON_NODE": str(min(trial.gpus, processes)),
        "SLURM_RESTART_COUNT": str(restarts),
        "OUTPUT_DIR": str(output),
        "SUCCESSORS": "0",  # it submits no job
        "PATH": f"{stand_in(trial).parent}:{os.environ['PATH']}",
    }


def header(example: str, pattern: str) -> str:
    """Return what run.slurm of an example says, the first group of a pattern."""
    found = re.search(pattern, (ROOT / "examples" / example / "run.slurm").read_text(), re.MULTILINE)
    return found[1] if found else ""


def start(trial: Trial, output: Path, nodes: int, processes: int, restarts: int = 0) -> subprocess.Popen:
    """Start run.slurm in a copy of an example, so many processes on each node; all runs have the same batch.

    `output` is trial-JOBID/EXAMPLE/output/NAME; its log is beside it.
    """
    folder = output.parents[1]
    if not folder.exists():
        left_out = shutil.ignore_patterns("output", "data", "images", "model", "__pycache__", ".venv", "*.out")
        shutil.copytree(ROOT / "examples" / folder.name, folder, ignore=left_out)
        for program in sorted(folder.glob("make_*.py")):  # its data
            words = [sys.executable, program.name]
            subprocess.run(words, cwd=folder, timeout=RUN_SECONDS, capture_output=True, check=True)
    output.mkdir(parents=True, exist_ok=True)
    per_process = header(folder.name, r"^#SBATCH --ntasks-per-node=(\d+)") != "1"
    most = 2 * trial.each  # processes of any run
    batch = -(-BATCHES.get(folder.name, BATCH) // most) * most
    words = ["bash", "run.slurm", "--epochs", str(trial.epochs(folder.name)), "--global-batch", str(batch)]
    env = environment(trial, output, nodes, processes, processes if per_process else 1, restarts)
    if folder.name.startswith("horovod"):
        env.setdefault("LAUNCH", "mpi" if "pmix" in ask("srun", "--mpi=list") else "gloo")
    with open(output.with_suffix(".log"), "a") as log:
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)


def tail(log: Path) -> list[str]:
    """Return the lines of a log that say why it has failed, as far as such lines can be told."""
    text = re.sub(r"\x1b\[[0-9;]*m|[^\S\n]|[\x00-\x08\x0e-\x1f]", " ", log.read_text(errors="replace"))
    lines = [line.strip()[:200] for line in text.splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"error|cannot|refuse|denied|abort|fatal|not found", line, re.I)]
    # What comes of another error, which others may have said:
    causes = [line for line in told if not re.match(r"srun: error: |slurmstepd|run.slurm: error: the job failed", line)]
    return (causes or told or lines)[-4:]


# ---- What a run has left ----


def metrics(output: Path) -> list[dict[str, float]]:
    """Return the rows of metrics.csv, none if there is none or it is damaged."""
    with suppress(OSError, TypeError, ValueError), open(output / "metrics.csv", newline="") as file:
        return [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    return []


def wrong(trial: Trial, output: Path, nodes: int, processes: int) -> str:
    """Return what cannot be right in the figures of a run that has ended well, or ""."""
    rows, last = metrics(output), trial.epochs(output.parents[1].name)
    if [line["epoch"] for line in rows] != list(range(1, last + 1)):
        return f"metrics.csv has not the epochs 1 to {last}"
    try:
        ranks = json.loads((output / "run.json").read_text())["starts"][-1]["ranks"]
    except (OSError, ValueError, LookupError):
        return "run.json is missing or damaged"
    counted = sum(map(len, ranks.values()))
    if (len(ranks), counted) != (nodes, nodes * processes):
        return f"it had {counted} processes on {len(ranks)} nodes, instead of {nodes * processes} on {nodes}"
    for line in rows:
        bad = [name for name, value in line.items() if not math.isfinite(value) or value < 0]
        if bad or line.get("test_accuracy", 0) > 1 or line["world_size"] != nodes * processes:
            return f"epoch {line['epoch']:.0f} says {line}"
    if rows[-1]["train_loss"] >= rows[0]["train_loss"] or rows[-1].get("test_accuracy", 1) < 0.5:
        return (
            f"it has not learnt: the training loss was {rows[0]['train_loss']:.4f}, then {rows[-1]['train_loss']:.4f}"
        )
    return ""


def difference(output: Path, other: Path, epoch: int) -> float:
    """Return by how much the losses of two runs differ after an epoch, as a share of the first training loss."""
    one, two = metrics(output), metrics(other)
    return max(abs(one[epoch][name] - two[epoch][name]) for name in ("train_loss", "test_loss")) / two[0]["train_loss"]


def figures(output: Path, processes: int) -> tuple[str, Row]:
    """Return what a run has learnt and how fast, in words, and its rate: the median of all epochs but the first."""
    lines = metrics(output)
    unit = "tokens" if "tokens_per_second" in lines[0] else "samples"
    rate = statistics.median(line[f"{unit}_per_second"] for line in lines[1:])
    accuracy = lines[-1].get("test_accuracy")
    learnt = f"test loss {lines[-1]['test_loss']:.3f}" if accuracy is None else f"test accuracy {accuracy:.1%}"
    counted = f"{processes} process{'es' * (processes > 1)}"
    return f"{learnt}, {rate:.0f} {unit}/s with {counted}", {"rate": round(rate, 1), "unit": f"{unit}/s"}


# ---- Steps ----


def preflight(trial: Trial) -> list[Row]:
    """Run preflight in this allocation; return its rows."""
    folder, log = trial.work / "preflight", trial.work / "preflight.log"
    shutil.copytree(ROOT / "preflight", folder, ignore=shutil.ignore_patterns("trial*", ".*"), dirs_exist_ok=True)
    with open(log, "w") as file:
        words = ["bash", "run.slurm"]
        process = subprocess.Popen(words, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    problem = watch(process, trial, PREFLIGHT_SECONDS)
    cells = [[cell.strip() for cell in line.split(" |")] for line in log.read_text().splitlines() if " |" in line]
    found = [
        row(f"preflight {name}", state, f"{said}; {advice}".rstrip("; ")) for name, said, state, advice in cells[1:]
    ]
    if problem or not found:
        found.append(row("preflight", "FAIL", problem or f"no table, status {process.returncode}", log=tail(log)))
    return found


def train(trial: Trial, example: str, name: str, nodes: int, processes: int) -> list[Row]:
    """Run an example, and judge what it has left, also beside its run on two nodes."""
    output, begun = trial.work / example / "output" / name, time.monotonic()
    process = start(trial, output, nodes, processes)
    problem = watch(process, trial, RUN_SECONDS)
    if not problem and process.returncode:
        problem = f"run.slurm ended with status {process.returncode}"
    problem = problem or wrong(trial, output, nodes, processes)
    more: Row = {"seconds": round(time.monotonic() - begun, 1)}
    state, beside = "ok", output.with_name("2-nodes")
    if problem:
        return [row(f"{example}, {name}", "FAIL", problem, log=tail(output.with_suffix(".log")), **more)]
    result, rate = figures(output, nodes * processes)
    more |= rate | ({"scale": name} if example == MAIN else {})
    if output != beside and example in NOT_COMPARED:
        result += f"; not compared: {NOT_COMPARED[example]}"
    elif output != beside and not wrong(trial, beside, 2, trial.each):
        share = difference(output, beside, 0)
        state = "ok" if share <= BOUND else "FAIL"
        result += f"; the first losses differ by {share:.3%} from those of 2 nodes"
        result += "" if share <= BOUND else f", and may by {BOUND:.0%}: a step is not the same there"
    return [row(f"{example}, {name}", state, result, **more)]


def training_processes(output: Path) -> list[int]:
    """Return the processes of a run that train on this node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            trains = b"python" in os.path.basename(words[0]) and any(word.endswith(b"/train.py") for word in words)
            if trains and f"OUTPUT_DIR={output}".encode() in variables:
                found.append(int(folder.name))
    return found


def disturb(trial: Trial, check: str, kill: bool) -> list[Row]:
    """Kill a process of the main example, or tell run.slurm that its time is nearly over; then continue its folder."""
    nodes, begun = min(2, len(trial.nodes)), time.monotonic()
    undisturbed = trial.work / MAIN / "output" / ("2-nodes" if nodes == 2 else "1-node")
    output = undisturbed.with_name("killed" if kill else "noticed")

    def answer(state: str, result: str) -> list[Row]:
        more = {"log": tail(output.with_suffix(".log"))} if state == "FAIL" else {}
        return [row(check, state, result, seconds=round(time.monotonic() - begun, 1), **more)]

    if wrong(trial, undisturbed, nodes, trial.each):
        return answer("left out", f"{MAIN} does not run undisturbed")
    process = start(trial, output, nodes, trial.each)
    problem = watch(process, trial, RUN_SECONDS, (output / "checkpoint.pt").exists)
    if not problem and process.poll() is None:
        with suppress(ProcessLookupError, IndexError):
            os.kill(training_processes(output)[-1], signal.SIGKILL) if kill else process.send_signal(signal.SIGUSR1)
        problem = watch(process, trial, NOTICE_SECONDS)
    if problem:
        return answer("FAIL", problem)
    if not process.returncode and len(metrics(output)) == trial.epochs(MAIN):
        return answer("left out", "the run was over before it, or no process of it was seen on this node")
    if kill and not process.returncode:
        return answer("FAIL", "a process was killed, and run.slurm ended with status 0")
    if not kill and (process.returncode or not (output / "asked").exists()):
        return answer("FAIL", f"run.slurm ended with status {process.returncode}, and did not ask for a requeue")
    process = start(trial, output, nodes, trial.each, restarts=1)
    problem = watch(process, trial, RUN_SECONDS)
    if not problem and process.returncode:
        problem = f"the run was continued, and run.slurm ended with status {process.returncode}"
    if problem := problem or wrong(trial, output, nodes, trial.each):
        return answer("FAIL", problem)
    step = json.loads((output / "run.json").read_text())["starts"][-1]["step"]
    if not step:
        return answer("FAIL", "the run began anew: its checkpoint was not there")
    if (output / "model.pt").read_bytes() == (undisturbed / "model.pt").read_bytes():
        return answer("ok", f"continued after step {step}, to the bits of the undisturbed run")
    share = difference(output, undisturbed, -1)
    state = "ok" if trial.gpus and share <= BOUND else "FAIL"
    return answer(state, f"continued after step {step}, to other bits: the last losses differ by {share:.3%}")


def on_gpu(trial: Trial) -> list[Row]:
    """Run benchmarks.on_gpu for the time that is left, and count its rows."""
    seconds, out = min(GPU_SECONDS, trial.left() - 60), trial.work / "on_gpu"
    words = [sys.executable, "-m", "benchmarks.on_gpu", "--minutes", f"{seconds / 60:.1f}", "--out", str(out)]
    with open(out.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    problem = watch(process, trial, seconds + 45)
    path = out / "results.json"
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    if problem or not found:
        return [row("on_gpu", "FAIL", problem or "no results", log=tail(out.with_suffix(".log")))]
    failed = [one["name"] for one in found if one["state"] == "failed"]
    measured = sum(one["state"] == "measured" for one in found)
    result = f"{measured} of {len(found)} rows measured; failed: {', '.join(failed) or 'none'}"
    return [row("on_gpu", "FAIL" if failed else "ok", result)]


def requeue(trial: Trial) -> list[Row]:
    """Have SLURM start this job again, which then comes here once more."""
    if trial.asked:
        return [row("requeue", "ok", f"the job was started again after {time.time() - trial.asked:.0f} s")]
    trial.asked = time.time()
    trial.write([row("requeue", "left out", "SLURM was asked, and has not started the job again yet")])
    done = subprocess.run(["scontrol", "requeue", trial.id], capture_output=True, text=True, timeout=60)
    if done.returncode:
        result = "SLURM refuses it; near its time limit a job of an example submits its successor instead"
        return [row("requeue", "WARN", result, log=[done.stderr.strip()[:200]])]
    time.sleep(RESERVE)  # SLURM ends this process meanwhile
    return [row("requeue", "FAIL", "SLURM has accepted it, but the job goes on")]


Step = tuple[str, Callable[[], list[Row]] | str]


def steps(trial: Trial) -> list[Step]:
    """Return all steps, the most valuable first: a name, and what is run or why it is left out."""
    found: list[Step] = [("preflight", lambda: preflight(trial))]
    names = {path.parent.name for path in ROOT.glob("examples/*/run.slurm")}
    for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        found += steps_of(trial, name)
    if trial.gpus:
        found.append(("on_gpu", lambda: on_gpu(trial)))
    return [*found, ("requeue", lambda: requeue(trial))]


def steps_of(trial: Trial, name: str) -> list[Step]:
    """Return the steps of an example."""
    for module in header(name, r"^prepare ([\w. ]+)").split():
        known = None
        with suppress(ImportError):
            known = importlib.util.find_spec(module)
        if not known:
            return [(name, f"VENV has no {module}")]
    if trial.gpus and name.startswith("horovod"):
        return [(name, "it is for CPUs, and this job has GPUs")]
    found: list[Step] = []
    if header(name, r"^#SBATCH --nodes=(\d+)") != "1":
        two = f"{name}, 2-nodes"
        found.append((two, lambda: train(trial, name, "2-nodes", 2, trial.each)))
        if len(trial.nodes) == 1:
            found = [(two, "the job has one node")]
    found.append((f"{name}, 1-node", lambda: train(trial, name, "1-node", 1, trial.each)))
    if name == MAIN:
        kill, notice = "kill and resume", "notice before the time limit"
        found.append((f"{name}, 1-process", lambda: train(trial, name, "1-process", 1, 1)))
        found += [(kill, lambda: disturb(trial, kill, True)), (notice, lambda: disturb(trial, notice, False))]
    return found


def work(trial: Trial) -> None:
    """Run all steps that fit, and write the report after each of them."""
    for name, run in steps(trial):
        if name in trial.done:
            continue
        lasted = [one["seconds"] for one in trial.rows if "seconds" in one]
        need = NEEDS.get(name, max([LEAST, *(1.3 * seconds for seconds in lasted)]))
        if isinstance(run, str):
            found = [row(name, "left out", run)]
        elif trial.left() < need:
            found = [row(name, "left out", f"{max(0, trial.left()):.0f} s were left, a run may need {need:.0f} s")]
        else:
            print(f"trial.py: {name}", flush=True)
            try:
                found = run()
            except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
                found = [row(name, "FAIL", f"{type(error).__name__}: {error}"[:200])]
        trial.rows += found
        trial.done.append(name)
        trial.write([])


def main() -> None:
    """Be the job, or draw a report."""
    parser = argparse.ArgumentParser("trial.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--draw", type=Path, metavar="REPORT", help="write a page that shows a trial-JOBID.txt, and end"
    )
    args = parser.parse_args()
    if args.draw:
        try:
            print(f"trial.py: {draw(args.draw)}")
        except ValueError as error:
            fail(str(error))
        return
    trial = read_job()

    def ended(*_: object) -> None:
        raise EndedError

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, ended)
    try:
        work(trial)
    except EndedError:
        if trial.asked:
            return  # the next start of this job goes on
        left = [(name, run) for name, run in steps(trial) if name not in trial.done]
        asked = "SLURM has asked the job to end"
        trial.write([row(name, "left out", run if isinstance(run, str) else asked) for name, run in left])
    print(f"trial.py: the report is {trial.work.name}.txt: read it before you send it")
    sys.exit(any(one["state"] == "FAIL" for one in trial.rows))


if __name__ == "__main__":
    main()
