"""How bad input has to end: with one clear line and the right status."""

import re
from collections.abc import Mapping
from pathlib import Path

from harness.launchers import LAUNCHERS
from harness.runs import Run


class RefusedError(Exception):
    """What fail() of the plumbing raises where it must not end the process of the tests."""


def assert_refused(run: Run, status: int, *texts: str) -> None:
    """Check that bad input ended a run with `status` and one clear line, without a traceback.

    Where the processes of a run have lost one, they may say so, in a line of their own.

    A launcher that makes a status of its own, other than train.py's 2, may add its own traceback, with no file of ours.
    """
    lines = {line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")}
    lines.discard("train.py: error: another process of the run has ended: what that one says is the cause")
    assert len(lines) == 1, f"not one error line but {len(lines)}:\n{run.stdout}\n{run.stderr}"
    assert all(text in min(lines) for text in texts), f"{texts} not in {lines}"
    ours = r'File "(.*/)?(train|train_lm|plumbing/\w+|data|models)\.py"'
    # A loader worker that has just been started when the run ends prints a traceback with no line of a file.
    unfinished = re.sub(r"Traceback [^\n]*\n  File \"<string>\"(.*\n)+?.*pickle data was truncated\n", "", run.stderr)
    assert not re.search("Traceback" if status == 2 else ours, unfinished), run.stderr
    assert run.status == status, f"status {run.status}, not {status}"


# What torchrun sets, for a process that is the only one; and it makes a folder for reports of errors.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
MAKE_REPORTS = """
folder = os.path.join(tempfile.gettempdir(), "torchelastic_a", "none_b", "attempt_0", "0")
os.makedirs(folder)
os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")
"""
# Numbers that cannot work, with what the line has to say; each for the examples that have the flag.
BAD_NUMBERS = {
    "--epochs 0": ["--epochs must be 1 or more, not 0"],
    "--epochs 99999999999": ["--epochs must be at most 2147483647, not 99999999999"],
    "--epochs 1e3": ["--epochs", "invalid int value: '1e3'"],
    "--batch-size -1": ["--batch-size must be 1 or more, not -1"],
    "--batch-size 4294967296": ["--batch-size must be at most 2147483647"],
    "--global-batch 18446744073709551616": ["--global-batch must be at most 2147483647"],
    "--lr inf": ["--lr must be 0 or more, not inf"],
    "--lr -0.1": ["--lr must be 0 or more, not -0.1"],
    "--lr 0,001": ["--lr", "invalid float value: '0,001'"],
    "--seed -1": ["--seed must be 0 or more, not -1"],
    "--seed 4294967296": ["--seed must be at most 4294967295, not 4294967296"],
    "--seed 18446744073709551616": ["--seed must be at most 4294967295"],
    "--timeout 2000001": ["--timeout must be at most 2000000"],
    "--timeout 99999999999999999999": ["--timeout must be at most 2000000"],
    "--timeout -5": ["--timeout must be 1 or more"],
    "--warmup-steps 99999999999999999999": ["--warmup-steps must be at most 2147483647"],
    "--max-grad-norm 0": ["--max-grad-norm must be above 0, not 0: leave it out"],
    "--max-grad-norm -0.0": ["--max-grad-norm must be above 0"],
    "--max-grad-norm inf": ["--max-grad-norm must be 0 or more, not inf"],
    "--gradient-accumulation-steps 0": ["--gradient-accumulation-steps must be 1 or more, not 0"],
    "--gradient-accumulation-steps 99999999999": ["--gradient-accumulation-steps must be at most 2147483647"],
    "--keep-epochs 0": ["--keep-epochs must be 1 or more, not 0"],
    "--keep-epochs -3": ["--keep-epochs must be 1 or more, not -3"],
    "--vocabulary 0": ["--vocabulary must be 1 or more, not 0"],
    "--vocabulary 99999999999": ["--vocabulary must be at most 2147483647"],
    "--workers 1000000": ["--workers must be at most", "not 1000000"],
    "--prefetch 0": ["--prefetch must be 1 or more, not 0"],
    "--image-size 0": ["--image-size must be 1 or more, not 0"],
    "--checkpoint-every 0": ["--checkpoint-every", "must be 1 or more steps, such as 500, or minutes", "'0'"],
    "--checkpoint-every 0min": ["--checkpoint-every", "must be 1 or more steps", "'0min'"],
    "--checkpoint-every 1e9min": ["--checkpoint-every", "must be 1 or more steps", "'1e9min'"],
    "--checkpoint-every 10s": ["--checkpoint-every", "must be 1 or more steps", "'10s'"],
    "--context 0": ["--context must be 1 or more, not 0"],
    "--width 0": ["--width must be 1 or more, not 0"],
    "--heads 0": ["--heads must be 1 or more, not 0"],
    "--tokens 0": ["--tokens must be 1 or more, not 0"],
    "--tensor-parallel 0": ["--tensor-parallel must be 1 or more, not 0"],
    "--replicas 0": ["--replicas must be 1 or more, not 0"],
    "--peak-tflops nan": ["--peak-tflops must be 0 or more, not nan"],
    "--lora-rank 0": ["--lora-rank must be 1 or more, not 0"],
    "--lora-alpha nan": ["--lora-alpha must be 0 or more, not nan"],
    "--lora-dropout 1": ["--lora-dropout must be from 0 to below 1"],
    "--processes 0": ["--processes must be 1 or more, not 0"],
    "--devices 0": ["--devices must be 1 or more, not 0"],
}
# The same of programs beside train.py: what they are called with, besides.
OTHER_PROGRAMS = {"predict": "--images images", "more.train_lm": ""}
BAD_NUMBERS_OF_OTHERS = {
    ("predict", "--part 0"): ["--part must be 1 or more, not 0"],
    ("predict", "--batch-size 0"): ["--batch-size must be 1 or more, not 0"],
    ("predict", "--workers 99999"): ["--workers must be at most"],
    ("predict", "--timeout 99999999999"): ["--timeout must be at most 2000000"],
    ("more.train_lm", "--context 0"): ["--context must be 1 or more, not 0"],
    ("more.train_lm", "--seed -7"): ["--seed must be 0 or more, not -7"],
}


def bad_numbers(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return the calls of an example's parsers with numbers that cannot work, and what each has to say."""
    text = (folder / "train.py").read_text() + (folder / "plumbing" / "settings.py").read_text()
    calls = {
        ("train.parse_args()", words): says for words, says in BAD_NUMBERS.items() if f'"{words.split()[0]}"' in text
    }
    for (program, words), says in BAD_NUMBERS_OF_OTHERS.items():
        if (folder / f"{program.replace('.', '/')}.py").exists():
            call = f"__import__('importlib').import_module('{program}').parse_args()"
            calls[call, f"{OTHER_PROGRAMS[program]} {words}"] = says
    return calls


END = "end of a case\n"
EACH = """
import os, sys, tempfile, train
if "torch" in sys.modules:
    import torch._dynamo  # which every optimizer imports: once here, not in each child
for call, words in {cases}:
    sys.argv = ["train.py", *words.split()]
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            exec(call)
        except SystemExit as end:  # an interpreter with PyTorch needs a second for its own end
            sys.stderr.flush()
            os._exit(end.code)
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.wait()[1]))
    os.write(2, {end!r})
"""


def assert_calls_refused(folder: Path, cases: Mapping[tuple[str, str], list[str]], **environment: str) -> None:
    """Check that each call, with its command line of train.py, ends with status 2 and one line that has all its texts.

    No traceback is shown, and nothing is left in the temporary folder. One process here, without a launcher, imports
    train.py, and has a child for each of them: a start for each would take minutes.
    """
    (folder / "each.py").write_text(EACH.format(cases=list(cases), end=END.encode()))
    run = Run(["python", "each.py"], folder, environment).wait()
    assert run.stdout == "status 2\n" * len(cases), run.stdout + run.stderr
    *parts, _ = run.stderr.split(END)
    for part, (case, texts) in zip(parts, cases.items(), strict=True):
        lines = [line for line in part.splitlines() if line.startswith("train.py: error: ")]
        assert len(lines) == 1 and all(text in lines[0] for text in texts), f"{case}: {part}"
    assert "Traceback" not in run.stderr and not run.left, f"{run.stderr}\n{run.left}"


def assert_arguments_refused(
    folder: Path, texts: Mapping[str, list[str]], call: str = "train.parse_args()", **environment: str
) -> None:
    """Check that `call` refuses each of these command lines, in an environment with these variables, too."""
    assert_calls_refused(folder, {(call, words): expected for words, expected in texts.items()}, **environment)


def assert_runs_refused(
    example: str, folder: Path, texts: Mapping[str, list[str]], calls: Mapping[tuple[str, str], list[str]]
) -> None:
    """Check that a run of one process, which no launcher has to start, refuses each of these command lines; and calls.

    Each process ends before it trains.
    """
    row = LAUNCHERS[example]
    _, _, alone = " ".join(row.command(1)).partition("train.py")
    call, variables = row.alone, {}
    if row.local.startswith(("torchrun", "accelerate")):
        call, variables = MAKE_REPORTS + call, TORCHRUN
    cases = {(call, f"{alone} {words}"): expected for words, expected in texts.items()}
    assert_calls_refused(folder, {**cases, **calls}, **variables)
