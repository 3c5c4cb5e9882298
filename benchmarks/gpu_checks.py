"""The steps of on_gpu.py that are no figures: what is here, data, tests, public scripts, preflight, profiles."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import gpu_peers, gpu_steps
from benchmarks.edits import CannotRun
from benchmarks.gpu_figures import FIGURES, OWN, PEAKS, Bench, Figure
from benchmarks.gpu_steps import FAILED, LEFT_OUT, MEASURED, LeftOut, Monitor, Row, Step, say
from harness.launchers import LAUNCHERS, ROOT, copy_example

WITH_GPUS = [name for name, row in LAUNCHERS.items() if row.gpus]
PACKAGES = ("torch", "torchvision", "transformers", "peft", "lightning", "accelerate", "deepspeed", "datasets", "numpy")
NEEDED = {  # by an example, beside torch
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed", "hjson", "pydantic"),
    "lightning": ("lightning",),
    "lora": ("transformers", "peft"),
    "torchrun_vision": ("torchvision",),
}
NEEDED_BY_SCRIPTS = {"huggingface/peft": "datasets"}

SANITY = """
import importlib.metadata, importlib.util, json, sys, time, torch
found = {"python": sys.version.split()[0], "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
found["versions"], found["absent"] = {}, []
for name in sys.argv[2:]:
    if importlib.util.find_spec(name) is None:
        found["absent"].append(name)
        continue
    try:
        found["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found["versions"][name] = "?"
found["cuda"] = torch.version.cuda
if found["gpus"]:
    properties = torch.cuda.get_device_properties(0)
    found["card"], found["card_mb"] = properties.name, properties.total_memory >> 20
    found["capability"] = list(torch.cuda.get_device_capability(0))
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if sys.argv[1] == "full" else ""
if found["gpus"] and sys.argv[1] == "full":
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 20 * 2 * 8192**3 / (time.perf_counter() - start) / 1e12)
    found["matmul_tflops"] = round(best)
print(json.dumps(found))
"""


def sanity(bench: Bench) -> Step:
    """See what this machine has; it takes seconds, and all that follows goes by it."""

    def look(limit: float) -> list[Row]:
        names = dict.fromkeys([*PACKAGES, *(name for needed in NEEDED.values() for name in needed)])
        words = [sys.executable, "-c", SANITY, "tiny" if bench.tiny else "full", *names]
        done = gpu_steps.run(words, bench.work, bench.out / "sanity.log", limit, bench.variables)
        if done.status or done.over:
            raise RuntimeError(done.why())
        found = json.loads(done.text.splitlines()[-1])
        bench.gpus, bench.processes = found["gpus"], max(1, found["gpus"])
        if found["gpus"]:
            bench.peak = bench.peak or peak_of(found["card"])
            found |= ask_driver()
        for example, needed in NEEDED.items():
            if lacking := [name for name in needed if name in found["absent"]]:
                bench.missing[example] = f"no {' and no '.join(lacking)} here"
        found |= {"cores": bench.cores, "peak_tflops": bench.peak, "commit": commit()}
        found["memory_gb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
        found["shm_gb"] = round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
        found["work"] = str(bench.work.parent)
        for repository, needed in NEEDED_BY_SCRIPTS.items():
            if needed in found["absent"]:
                bench.missing[repository] = f"no {needed} here"
        bench.found |= found
        absent = ", ".join(found.pop("absent"))
        rows: list[Row] = [{"name": "sanity", "state": MEASURED, **found, "absent": absent}]
        why = "" if shutil.which("nvidia-smi") else "there is no nvidia-smi"
        rows.append({"name": "power", "state": LEFT_OUT if why else MEASURED, "reason": why})
        why = "" if bench.gpus > 1 else ("there is one GPU" if bench.gpus else "there is no GPU")
        rows.append({"name": "two GPUs", "state": LEFT_OUT if why else MEASURED, "reason": why})
        return rows

    return Step("sanity", "sanity", 60, 5, ("sanity", "power", "two GPUs"), look)


def peak_of(card: str) -> float | None:
    """Return the dense bf16 TFLOP/s of a card by its name, if it is known."""
    words = re.findall(r"\w+", card)
    if "MIG" in words:  # a slice
        return None
    return next((peak for name, peak in PEAKS.items() if set(name.split()) <= set(words)), None)


def ask_driver() -> dict[str, str]:
    """Return the driver's version and what the cards are set to."""
    if not shutil.which("nvidia-smi"):
        return {}
    fields = "driver_version,power.limit,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    driver, *rest = (said.splitlines() or [""])[0].split(", ")
    return {"driver": driver, "settings": ", ".join(rest)}


def commit() -> str:
    """Return the commit of this repository, if git knows it."""
    try:
        words = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError:
        return ""


def prepare(bench: Bench) -> Step:
    """Make the data of the figures, side by side, as far as they are needed."""
    kinds = {"vision": "jpeg", "lora": "model", "small": "data"}

    def make(limit: float) -> list[Row]:
        wanted = [kind for group, kind in kinds.items() if group in bench.groups]
        start = time.monotonic()

        def one(kind: str) -> gpu_steps.Done:
            words = [sys.executable, "-m", "benchmarks.gpu_data", kind, bench.work / kind]
            words += ["--tiny"] * bench.tiny
            log = bench.out / f"prepare-{kind}.log"
            return gpu_steps.run(words, ROOT, log, limit, bench.variables)

        with ThreadPoolExecutor(len(kinds)) as pool:
            done = dict(zip(wanted, pool.map(one, wanted), strict=True))
        problems = []
        for kind, ended in done.items():
            if ended.status or ended.over:
                problems.append(f"{kind}: {ended.why()}")
            else:
                bench.made |= json.loads(ended.text.splitlines()[-1])
        row: Row = {"name": "prepare", "state": FAILED if problems else MEASURED, "reason": "; ".join(problems)}
        return [row | bench.made | {"seconds": round(time.monotonic() - start, 1)}]

    return Step("prepare", "prepare", 90, 20, ("prepare",), make)


# The tests.


def tests(bench: Bench) -> Step:
    """Run tests/test_gpu.py with each example, side by side, each on cores of its own."""
    # torchrun_vision has most of them: it gets two shares, and two processes.
    shares = [name for name in WITH_GPUS for _ in range(1 + (name == "torchrun_vision"))]
    names = tuple(f"tests {name}" for name in WITH_GPUS)

    def run(limit: float) -> list[Row]:
        cores = sorted(os.sched_getaffinity(0))
        until = time.monotonic() + limit

        def one(example: str) -> Row:
            if reason := bench.missing.get(example):
                return {"name": f"tests {example}", "state": LEFT_OUT, "reason": reason}
            slots = [number for number, name in enumerate(shares) if name == example]
            mine = {core for slot in slots for core in slot_of(slot, len(shares), cores)}
            report = bench.out / f"tests-{example}.jsonl"
            words = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu_test_report", "-p", "no:cacheprovider"]
            words += ["-m", "gpu", "--tb=short", "-rP", f"--example={example}", "tests/test_gpu.py"]
            words += [f"--basetemp={bench.programs / f'tests-{example}'}"]
            words += ["-n", "2"] if len(slots) > 1 and len(mine) > 2 else ["-p", "no:xdist"]
            variables = bench.variables | {"TEST_REPORT": str(report)}
            log = bench.out / f"tests-{example}.log"
            done = gpu_steps.run(words, ROOT, log, until - time.monotonic() - 3, variables, mine)
            return row_of_tests(example, report, done)

        with ThreadPoolExecutor(max(2, min(len(WITH_GPUS), len(cores)))) as pool:
            return list(pool.map(one, WITH_GPUS))

    return Step("tests", "tests", 170, 60, names, run)


def slot_of(slot: int, slots: int, cores: Sequence[int]) -> list[int]:
    """Return the cores of one of several slots: all cores are shared out, and each slot has at least one."""
    first, last = slot * len(cores) // slots, (slot + 1) * len(cores) // slots
    return list(cores[first : max(last, first + 1)])


def row_of_tests(example: str, report: Path, done: gpu_steps.Done) -> Row:
    """Return what became of an example's tests, also of those that had not ended at the limit."""
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    collected = dict.fromkeys(name for line in lines for name in line.get("collected", []))
    outcome = {line["test"]: line for line in lines if "test" in line}
    by_test = {name: outcome.get(name, {}).get("outcome", "not ended") for name in {**collected, **outcome}}
    counts = {what: list(by_test.values()).count(what) for what in ("passed", "failed", "skipped", "not ended")}
    failures = [line for line in outcome.values() if line["outcome"] == "failed"]
    reasons = sorted({line["reason"] for line in outcome.values() if line["outcome"] == "skipped"})
    row: Row = {"step": "tests", "name": f"tests {example}", "state": MEASURED, "counts": counts, "by_test": by_test}
    row["skips"] = reasons
    row["longest_s"] = round(max((line.get("seconds", 0) for line in outcome.values()), default=0), 1)
    bad = [f"{line['test']}: {line['reason']}" for line in failures]
    bad += [f"{name}: not ended" for name, what in by_test.items() if what == "not ended"]
    if not by_test or (not bad and done.status not in (0, 5)):
        bad.append(done.why())
    if bad:
        row |= {"state": FAILED, "reason": "; ".join(bad), "tails": {one["test"]: one["tail"] for one in failures}}
    return row


# Public scripts.


def scripts_beside(bench: Bench, figure: Figure) -> list[Step]:
    """Return the steps that run the public scripts which stand beside a figure."""
    if figure.memory or "--full" in figure.words:
        return []

    def run(script: gpu_peers.Script) -> Callable[[float], list[Row]]:
        def one(limit: float) -> list[Row]:
            return [run_script(bench, figure, script, limit)]

        return one

    beside = [one for one in gpu_peers.SCRIPTS if (one.beside, one.variant) == (figure.example, figure.variant)]
    limits = figure.limit, figure.needs
    names = [(one, f"{one.name} beside {figure.name}") for one in beside]
    return [Step(f"script-{one.name}", "scripts", *limits, (name,), run(one)) for one, name in names]


def script_sizes(bench: Bench, figure: Figure) -> gpu_peers.Sizes:
    """Return the sizes of a figure as the public scripts take them."""
    data, steps = bench.data(figure), bench.steps(figure)
    sizes: dict[str, Any] = {"device": "cuda" if bench.gpus else "cpu", "processes": bench.processes}
    sizes["every"] = 2 if bench.tiny else 10
    if figure.group == "fsdp":
        names = ("layers", "heads", "width", "vocabulary", "context", "batch")
        sizes |= {name: data[name] for name in names} | {"steps": max(9, 3 * steps)}
    elif figure.group == "vision":
        sizes |= {"images": data["images"], "image_model": data["model"], "image_size": data["image_size"]}
        sizes |= {"image_batch": data["batch"], "image_epochs": 2, "image_rounds": 3}
        sizes["workers"] = max(1, bench.cores // bench.processes - 1)
    else:
        sizes |= {"model": data["model_dir"], "lora_context": data["context"], "lora_rank": data["rank"]}
        sizes |= {"lora_batch": data["batch"], "lora_steps": max(9, 3 * steps), "lora_alpha": 8}
    return gpu_peers.Sizes(**sizes)


def run_script(bench: Bench, figure: Figure, script: gpu_peers.Script, limit: float) -> Row:
    """Run a public script within its limit; return its row."""
    if not bench.sources:
        raise LeftOut(f"no --sources with {script.repository}")
    if reason := bench.missing.get(script.repository) or bench.why_no_script(figure):
        raise LeftOut(reason)
    name = f"script-{script.name}"
    folder = bench.work / "runs" / name
    row: Row = {"name": f"{script.name} beside {figure.name}", "beside": figure.name, "unit": script.unit}
    row["batch"] = bench.batch(figure)
    try:
        command = script.prepare(bench.sources, folder, script_sizes(bench, figure))
        with Monitor() as monitor:
            done = gpu_steps.run(command, folder, bench.out / f"{name}.log", limit, bench.variables)
        row |= {"command": " ".join(command)}
        if done.status and not done.over:
            return row | {"state": FAILED, "reason": done.why()}
        row |= {"state": MEASURED, "value": script.speed(done.text)}
        row["remark"] = f"ended at its limit, {done.over:.0f} s" if done.over else ""
        clocks = [moment for moment, line in done.lines if "clock: " in line]
        return row | monitor.medians(clocks[1], clocks[-1])
    except CannotRun as error:
        return row | {"state": FAILED, "reason": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Preflight, and what the kernels of a step are.


def preflight(bench: Bench) -> Step:
    """Run preflight as a job of one node would, with a SLURM that is none: it only asks it for the node's name."""
    kept = ("gpus", "wheel", "python", "limits", "reduce", "sizes")

    def run(limit: float) -> list[Row]:
        folder = Path(shutil.copytree(ROOT / "preflight", bench.programs / "preflight"))
        (folder / "scontrol").write_text('#!/bin/sh\necho "$3"\n')
        (folder / "scontrol").chmod(0o755)
        tasks, node = bench.processes, "localhost"
        job = {"JOB_ID": 4321, "STEP_ID": 0, "JOB_NODELIST": node, "STEP_NUM_TASKS": tasks, "GPUS_ON_NODE": bench.gpus}
        job |= {"CPUS_PER_TASK": max(1, bench.cores // tasks), "STEP_TASKS_PER_NODE": tasks}
        job |= {"LAUNCH_NODE_IPADDR": "127.0.0.1"}
        variables = {f"SLURM_{name}": str(value) for name, value in job.items()}
        variables |= {"SLURMD_NODENAME": node, "PREFLIGHT_TOKEN": os.urandom(16).hex()}
        variables["PATH"] = f"{folder}:{bench.variables['PATH']}"
        start = "for rank in $(seq 0 $(($1 - 1))); do SLURM_PROCID=$rank SLURM_LOCALID=$rank python preflight.py & done"
        words = ["bash", "-c", f"{start}; wait", "bash", tasks]
        log = bench.out / "preflight.log"
        done = gpu_steps.run(words, folder, log, limit, bench.variables | variables)
        said = {}
        for line in done.text.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 4 and cells[0] in kept:
                said[cells[0]] = f"{cells[2]}: {cells[1]}"
        if "gpus" not in said:
            raise RuntimeError(done.why())
        rows: list[Row] = [{"name": "preflight", "state": MEASURED, **said}]
        if bench.gpus > 1:
            rows.append({"name": "NCCL all-reduce", "state": MEASURED, "text": said["sizes"]})
        else:
            why = f"there is {'one' if bench.gpus else 'no'} GPU, and it takes two"
            rows.append({"name": "NCCL all-reduce", "state": LEFT_OUT, "reason": why})
        return rows

    return Step("preflight", "preflight", 60, 20, ("preflight", "NCCL all-reduce"), run)


GOALS = {  # of a figure: what it is to reach on an H100 or H200
    "fsdp GPT 124M bf16 --compile": ("peak_share", 0.4),
    "vision ResNet-50 memory bf16": ("value", 2500),
    "vision ResNet-50 JPEG bf16": ("value", 2250),
}
STEPS = 19  # of a run that is profiled: measured_train.py takes the middle ones


def profiles(bench: Bench) -> list[Step]:
    """Return the steps that profile what has missed its goal, or was not measured in this run."""
    wanted = [figure for figure in FIGURES if figure.name in GOALS and figure.memory | (figure.group == "fsdp")]

    def run(figure: Figure) -> Callable[[float], list[Row]]:
        def one(limit: float) -> list[Row]:
            column, goal = GOALS[figure.name]
            if not bench.tiny and (reached := bench.reached.get(figure.name, {}).get(column, 0)) >= goal:
                raise LeftOut(f"{figure.name} has kept its goal, {goal:,}: {reached:,.4g}")
            return [profile(bench, figure, limit)]

        return one

    return [
        Step(f"profile-{figure.group}", "profile", 75, 30, (f"profile of {figure.name}",), run(figure))
        for figure in wanted
    ]


def profile(bench: Bench, figure: Figure, limit: float) -> Row:
    """Profile a few steps of a figure; return its most expensive kernels."""
    if reason := bench.why_not(figure):
        raise LeftOut(reason)
    folder = copy_example(ROOT / "examples" / figure.example, bench.work / "runs" / f"profile-{figure.group}")
    shutil.copy(Path(__file__).with_name(OWN), folder)
    written = bench.out / f"profile-{figure.group}.json"
    variables = bench.variables | {"PROFILE": str(written)}
    if figure.memory:
        variables["BATCHES_IN_MEMORY"] = "4"
    command = bench.command(figure, OWN, steps=STEPS, epochs=1)
    done = gpu_steps.run(command, folder, bench.out / f"profile-{figure.group}.log", limit, variables)
    shutil.rmtree(folder, ignore_errors=True)
    if not written.exists():
        raise RuntimeError(done.why())
    found = json.loads(written.read_text())
    if not found["kernels"]:
        raise RuntimeError("the profiler has recorded no kernel")
    for kernel in found["kernels"]:
        say(f"  {kernel['ms']:8.3f} ms {kernel['share']:6.1%} {kernel['count']:6.1f}x {kernel['name'][:90]}")
    for name in ("operators", "python"):
        for one in found[name][: {"operators": 8, "python": 30}[name]]:
            say(f"  {name:9} {one['ms']:8.3f} ms {one['own_ms']:8.3f} own {one['count']:6.1f}x {one['name'][:80]}")
    return {"name": f"profile of {figure.name}", "state": MEASURED, "command": " ".join(command), **found}
