"""Test and measure the examples on the GPUs of this machine, in ten minutes.

    python -m benchmarks.on_gpu --minutes 9 --out FOLDER                  # all of it, what matters most first
    python -m benchmarks.on_gpu --out FOLDER --only prepare fsdp scripts  # some steps, or groups of steps
    python -m benchmarks.on_gpu --out FOLDER --tiny                       # small sizes, to see whether it works
    python -m benchmarks.on_gpu --list                                    # all steps
    python -m benchmarks.on_gpu --fill FOLDER ...                         # put what was measured into RESULTS.md

It takes the Python and the PyTorch (2.6 to 2.15) that it is started with, and needs no network. What that lacks comes
from `python -m benchmarks.on_gpu_files`, which is run where there is a network: --wheels FOLDER, --sources FOLDER.

Each step has a limit, and all have one together. results.json is written after each step, and has a row for all that
was planned: measured, failed, or left out, with the reason. STEP.log is what a step has printed, table.md the table.

tests    tests/test_gpu.py of each example that uses GPUs, side by side
fsdp     a GPT of 124 million weights, 1,024 tokens a sample, random tokens
vision   ResNet-50 at 224 pixels, AdamW, from batches in memory and from JPEG files
lora     a Llama of 1.1 billion random weights, 1,024 tokens a sample, LoRA and all weights
small    the ConvNet at a batch of 4,096 with the examples that have it
scripts  public scripts, with the same model, sizes and precision, each right after the figure that it stands beside
preflight  its rows for GPUs, and the all-reduce of several GPUs
profile  what the kernels of a step are, where a figure has missed its goal
"""

import argparse
import dataclasses
import functools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import gpu_checks, gpu_steps, gpu_table
from benchmarks.gpu_figures import FIGURES, FULL, TINY, Bench, measure
from benchmarks.gpu_steps import Results, Step, say
from harness.launchers import ROOT

FIRST = ("sanity", "prepare")  # the others need what these find and make


def read_args() -> argparse.Namespace:
    """Read the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.on_gpu", description=__doc__, formatter_class=layout)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for results.json, table.md and the logs")
    parser.add_argument("--minutes", type=float, default=9, help="for all steps together")
    parser.add_argument("--seconds", type=float, default=5, help="of an epoch; three epochs count")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[], help="steps, or groups of them: see --list")
    parser.add_argument(
        "--in-order", action="store_true", help="run the steps as --only names them, not by their worth"
    )
    parser.add_argument("--without", nargs="+", metavar="STEP", default=[], help="steps, or groups of them")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which also a CPU trains in minutes")
    parser.add_argument("--at-once", type=int, metavar="N", help="steps side by side (default: 1, with --tiny 2)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages that this Python lacks")
    parser.add_argument("--sources", type=Path, metavar="FOLDER", help="public scripts: OWNER+NAME/...")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for data and checkpoints (default: in memory)")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 TFLOP/s of a GPU, where its name is unknown")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--fill", nargs="+", type=Path, metavar="FOLDER", help="write RESULTS.md from these and end")
    args = parser.parse_args()
    for name in ("wheels", "sources"):
        folder = getattr(args, name)
        if folder and not folder.is_dir():
            parser.error(f"--{name} {folder}: there is no such folder")
    here = f"3{sys.version_info.minor}"
    for wheel in sorted(args.wheels.glob("*.whl")) if args.wheels else ():
        named = re.search(r"-(?:cp|py)(3\d+)-(?:cp\d+|none)-", wheel.name)
        if named and named[1] != here:
            parser.error(f"--wheels: {wheel.name} is for another Python than this {sys.version.split()[0]}")
    if not (args.out or args.list or args.fill):
        parser.error("--out FOLDER is missing: it says where the results go")
    if args.out and (args.out / "results.json").exists():
        parser.error(f"--out {args.out} has results of an earlier run: give another folder")
    args.at_once = args.at_once or (2 if args.tiny else 1)
    args.error = parser.error
    return args


def make_bench(args: argparse.Namespace, work: Path, programs: Path) -> Bench:
    """Return what all steps share, as far as it is known before the first of them."""
    variables = {"PATH": f"{gpu_steps.make_commands(programs / 'bin')}:{os.environ['PATH']}"}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(programs / "inductor")}
    if args.wheels:
        packages = install(args.wheels, programs / "packages")
        variables["PYTHONPATH"] = ":".join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    return Bench(
        out=args.out,
        work=work,
        programs=programs,
        sizes=TINY if args.tiny else FULL,
        seconds=args.seconds,
        tiny=args.tiny,
        peak=args.peak_tflops,
        gpus=0,
        processes=1,
        variables=variables,
        cores=len(os.sched_getaffinity(0)),
        sources=args.sources.resolve() if args.sources else None,
    )


def install(wheels: Path, target: Path) -> Path:
    """Unpack the wheels of a folder into another one, for PYTHONPATH, and return that; what they need is there."""
    found = sorted(wheels.glob("*.whl"))
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    say(f"--wheels: {len(found)} unpacked")
    return target


def make_plan(bench: Bench) -> list[Step]:
    """Return all steps, in the order of their worth."""
    steps = [gpu_checks.sanity(bench), gpu_checks.prepare(bench), gpu_checks.tests(bench)]
    for figure in FIGURES:
        run = functools.partial(measure, bench, figure)
        steps.append(Step(figure.slug, figure.group, figure.limit, figure.needs, (figure.name,), run))
        steps += gpu_checks.scripts_beside(bench, figure)
    return [*steps, gpu_checks.preflight(bench), *gpu_checks.profiles(bench)]


def chosen(plan: Sequence[Step], args: argparse.Namespace) -> list[Step]:
    """Return the steps that --only and --without leave."""
    names = {step.name for step in plan} | {step.group for step in plan}
    if unknown := set(args.only + args.without) - names:
        args.error(f"there is no step {' and no '.join(sorted(unknown))}: see --list")
    kept = [step for step in plan if not args.only or {step.name, step.group} & {*args.only, *FIRST}]
    kept = [step for step in kept if not {step.name, step.group} & set(args.without)]
    if args.in_order:
        order = [*FIRST, *args.only]
        kept.sort(key=lambda step: min(order.index(name) for name in (step.name, step.group) if name in order))
    if args.tiny:  # a busy machine is no fault here
        kept = [dataclasses.replace(step, limit=4 * step.limit, needs=0) for step in kept]
    return [step for step in kept if step.name != "prepare" or needed_groups(kept)]


def needed_groups(plan: Sequence[Step]) -> set[str]:
    """Return the groups of figures whose data the steps need; a script's are those of the figure beside it."""
    groups = {step.group for step in plan} & {"vision", "lora", "small"}
    rows = [name for step in plan if step.group in ("scripts", "profile") for name in step.rows]
    return groups | {group for group in ("vision", "lora") if any(f" {group} " in name for name in rows)}


def in_memory(needed: int) -> str | None:
    """Return a folder in memory, if it has so much room: a checkpoint of 13 GB would wait for a disk."""
    shared = Path("/dev/shm")
    if shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > needed:
        return str(shared)
    return None


def main() -> None:
    """Run the steps that were asked for, and write what was found."""
    args = read_args()
    if args.fill:
        print(gpu_table.fill(args.fill, ROOT / "benchmarks" / "RESULTS.md"))
        return
    if args.list:
        work = Path(tempfile.gettempdir())
        bench = Bench(work, work, work, FULL, 5, False, None, 0, 1, {}, 1)
        for step in make_plan(bench):
            print(f"{step.group:9} {step.name:44} at most {step.limit:3.0f} s")
        return
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    results = Results(args.out / "results.json")
    signal.signal(signal.SIGTERM, stop)
    place = args.work or in_memory((1 if args.tiny else 40) << 30)
    options: dict[str, Any] = {"prefix": "on-gpu-", "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(dir=place, **options) as work, tempfile.TemporaryDirectory(**options) as programs:
        bench = make_bench(args, Path(work), Path(programs))
        plan = chosen(make_plan(bench), args)
        bench.groups = needed_groups(plan)
        results.plan = [name for step in plan for name in step.rows]
        results.about = {"tiny": args.tiny, "minutes": args.minutes, "seconds": args.seconds, "started": time.time()}
        results.about["argv"] = sys.argv[1:]
        results.write()
        try:
            carry_out_all(bench, plan, deadline, args.at_once, results)
        finally:
            results.about["ended"] = time.time()
            results.write()
            (args.out / "table.md").write_text(gpu_table.document([args.out]))
    print(gpu_table.document([args.out]), flush=True)
    failed = [row for row in results.rows if row["state"] == gpu_steps.FAILED]
    say(f"{len(results.rows)} rows, {len(failed)} failed; {args.out}: results.json, table.md, logs")
    sys.exit(1 if failed else 0)


def stop(number: int, _: FrameType | None) -> None:
    """End as at an exception: what runs is ended, and the table is written."""
    signal.signal(number, signal.SIG_IGN)
    gpu_steps.STOPPED.set()
    raise SystemExit(128 + number)


def carry_out_all(bench: Bench, plan: Sequence[Step], deadline: float, at_once: int, results: Results) -> None:
    """Run the steps, the first ones one after another, and add the rows of each as soon as it has ended."""

    def one(step: Step) -> None:
        if not gpu_steps.STOPPED.is_set():
            results.add(gpu_steps.carry_out(step, deadline))
            if step.name == "sanity":
                results.about |= bench.found

    first = [step for step in plan if step.name in FIRST]
    for step in first:
        one(step)
    others = [step for step in plan if step not in first]
    if at_once == 1:
        for step in others:
            one(step)
        return
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, others))


if __name__ == "__main__":
    main()
