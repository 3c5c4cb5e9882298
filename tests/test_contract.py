"""What each example promises: it learns, exactly, to ddp_spawn's bits; and it survives what breaks.

docs/maintaining.md has the contract.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import edits, outputs, runs
from harness.launchers import EXAMPLES, LAUNCHERS
from harness.processes import command_lines, wait_until
from harness.runs import Reference
from tests import forked, refusals
from tests.conftest import ci_with
from tests.test_horovod_cpu import MPI_AS_ROOT, MPIRUN
from verify import checks

EPOCHS = 5  # of a run with the default settings

# One of each framework. In .ci/run verify kills ddp_spawn, and test_fsdp.py kills fsdp while it saves.
KILLED_HERE = {*EXAMPLES} - {"ddp_spawn", "fsdp", "horovod_lightning", "torchrun_vision"}
OWN_SAVES = ("ddp_spawn", "deepspeed", "fsdp", "horovod_tensorflow", "lightning", "lora")
# How train.py prints a column of metrics.csv: the words before the number, the unit after it, by what the column is
# multiplied, and how many digits follow the point.
PRINTED = {"test_accuracy": ("test acc", "%", 100, 2), "test_loss": ("test loss", "", 1, 4)}
# Than which the training loss of the first epoch is higher, and that of the last one lower.
BOUNDS = {"fsdp": (2.6, 2.3), "lora": (5, 4.4), "torchrun_vision": (1.3, 1)}


@pytest.mark.runs("smoke")
def test_default_run(example: str, reference: Reference) -> None:
    """The README's command learns; its printed lines, metrics.csv and the model agree with each other.

    Nothing is left in the temporary folder.
    """
    launcher = LAUNCHERS[example]
    assert not reference.left
    rows = outputs.read_metrics(reference.output)
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert all(row["world_size"] == 2 and row["seconds"] > 0 and row["samples_per_second"] > 0 for row in rows)
    assert launcher.has_learnt(rows[-1])
    first_above, last_below = BOUNDS.get(example, (1, 0.2))
    assert rows[-1]["train_loss"] < last_below < first_above < rows[0]["train_loss"]
    if launcher.convnet:
        outputs.assert_exact_metrics(reference.output)

    lines = reference.stdout.splitlines()
    shape = rf"2 processes on 1 node, gloo on cpu, \d+ threads? each, global batch {launcher.global_batch}"
    assert sum(bool(re.fullmatch(f"{re.escape(launcher.first_line)}: {shape}", line)) for line in lines) == 1
    words, unit, factor, digits = PRINTED[launcher.metric]
    epoch = rf"epoch +(\d+)/{EPOCHS} \| train loss ([\d.]+) .* {words} +([\d.]+){unit}"
    values = [tuple(map(float, match.groups())) for match in map(re.compile(epoch).search, lines) if match]
    shown = [round(row[launcher.metric] * factor, digits) for row in rows]
    expected = [(row["epoch"], round(row["train_loss"], 4), value) for row, value in zip(rows, shown, strict=True)]
    assert values == expected
    assert sum(line.startswith("finished: ") for line in lines) == 1

    run = outputs.read_run(reference.output)
    assert run["command"][0].endswith("train.py") and run["settings"]["seed"] == 0
    assert run["torch"] or run["starts"][0]["tensorflow"]
    ((start,), (stop,)) = run["starts"], run["stops"]
    assert start["step"] == 0 and start["time"] > 1.7e9
    assert stop["reason"].startswith("finished") and stop["step"] > 0 and stop["time"] > start["time"]


@pytest.mark.runs("smoke")
@pytest.mark.only(*[name for name, row in LAUNCHERS.items() if row.convnet and row.pytorch and name != "ddp_spawn"])
def test_same_bits_as_ddp_spawn(reference: Reference, ddp_spawn_output: Path, example: str) -> None:
    """The same seed and data, 2 processes, fp32: every way to average gradients ends with the bits of plain PyTorch.

    So do the metrics, but that torchmetrics adds up losses in another order: there they agree to 1e-12.
    """
    if example not in ("lightning", "horovod_lightning"):
        return outputs.assert_same_run(reference.output, ddp_spawn_output)
    assert outputs.largest_difference(*map(outputs.read_model, (reference.output, ddp_spawn_output))) == 0
    for ours, theirs in zip(*map(outputs.read_metrics, (reference.output, ddp_spawn_output)), strict=True):
        assert outputs.without_times([ours])[0] == pytest.approx(outputs.without_times([theirs])[0], rel=1e-12)


@pytest.fixture
def finished(folder: Path, reference: Reference) -> Path:
    """A copy of the example's folder with the reference run in it."""
    shutil.copytree(reference.output, folder / "output")
    return folder


def content(output: Path) -> dict[str, bytes]:
    """Return the bytes of each file that a run has written, by its name."""
    return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}


@ci_with(*KILLED_HERE)
@pytest.mark.runs("smoke", *KILLED_HERE)
def test_killed_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to all processes at a random moment, and --resume: the same bits, no row twice or missing."""
    kill_and_resume(example, folder, reference, [runs.kill_all])


@pytest.mark.runs("full")
def test_killed_twice(example: str, folder: Path, reference: Reference) -> None:
    """A run that is killed at two random moments, first one process alone, then all: the same bits."""
    kill_and_resume(example, folder, reference, [kill_one, runs.kill_all])


# How a launcher names a killed process, by an option of the command. Once in some hundred times torchrun reads the
# report that another process is just writing, of its lost connection, and fails on that instead. With Lightning the
# first process is one of those that train: it may see the lost connection first.
KILLED = {
    "--processes": r"process \d(.|\n)*SIGKILL",
    "--devices": r"Child process with PID \d+ terminated with code -9|Connection (closed|reset) by peer",
    "--gloo": r"Process name: \d\nExit code: 137",
    "train.py": r"rank *: \d(.|\n)*SIGKILL|Failed to parse reply file",
}


def kill_one(run: runs.Run) -> None:
    """Send SIGKILL to one worker: within 60 s the run ends non-zero and says which process died.

    The process that was started is none of them, nor are its forks, by which horovodrun asks what it can do.
    """

    def others() -> list[int]:
        started = command_lines([run.process.pid])
        return [pid for pid in run.workers() if command_lines([pid]) not in ([], started)]

    wait_until(others, 300, "a worker that has loaded its framework", pause=0.1)
    os.kill(max(others()), signal.SIGKILL)
    run.wait(60, leaves=30)
    assert run.status != 0 and "finished" not in run.stdout  # Lightning may kill its first process, too
    pattern = next(pattern for option, pattern in KILLED.items() if option in run.command)
    assert re.search(pattern, run.stderr), run.stderr


def kill_and_resume(
    example: str, folder: Path, reference: Reference, kills: list[Callable[[runs.Run], object]]
) -> None:
    """Kill a run at a random moment in each of these ways, resume it each time, and compare its end with the reference.

    One kill in four comes before the run's first line: in its imports, its rendezvous, or as it reads the checkpoint.
    The others come in a step, an evaluation, a save, or after them all. At the end of the kills there is a checkpoint,
    which the last run reads. Each run may do two epochs, so that on a fast machine, too, none is over before its kill.
    The variable KILL_SEED repeats the moments of an earlier test, as far as a machine can.
    """
    seed = os.environ.get("KILL_SEED") or str(random.randrange(10**6))
    print(f"the moments of the kills: KILL_SEED={seed} in the environment repeats them")
    moments = random.Random(seed)
    edits.hold_epochs(folder, 0)
    first_line = 6.0  # s that it takes to come, until a run has shown it
    saved, number, last = folder / "output" / "metrics.csv", 0, len(kills) - 1
    while number <= last or not saved.exists():
        edits.hold(folder, 2 * min(number, last) + 2)
        started = time.monotonic()
        run = runs.start(example, folder, 2, *["--resume"] * bool(number))
        if number <= last and moments.randrange(4) == 0:
            time.sleep(first_line * moments.random())
        else:
            run.read_until(LAUNCHERS[example].first_line)
            first_line = time.monotonic() - started
            if moments.randrange(2) or (number >= last and not saved.exists()):  # it sees the end of an epoch
                run.read_until("train loss")
            time.sleep(0.6 * moments.random())
        kills[min(number, last)](run)
        number += 1
    edits.hold(folder, edits.GO_ON)
    runs.train(example, folder, 2, "--resume")
    outputs.assert_same_run(folder / "output", reference.output)


def ask_to_stop(run: runs.Run) -> int:
    """Ask a run to stop: all processes save after the same step, and it ends well. Return that step's number."""
    output = run.folder / "output"
    (output / "stop").touch()
    run.wait()
    assert run.status == 0, run.stderr
    assert not run.left
    assert (output / "stopped").exists() and not (output / "stop").exists()
    stop = outputs.read_run(output)["stops"][-1]
    assert stop["reason"].startswith("stopped after") and f"\n{stop['reason']}\n" in run.stdout, run.stdout
    return stop["step"]


# The others are stopped by verify, or in tests/slurm/test_long_jobs.py.
@pytest.mark.only("horovod_lightning", "horovod_tensorflow", "torchrun_vision")
@ci_with("horovod_tensorflow", "torchrun_vision")
def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """The file OUTPUT/stop ends a run with status 0 and one line; --resume goes on there, to the same bits."""
    edits.hold_epochs(folder, 2)
    run = runs.start(example, folder, 2)
    run.read_until("epoch  1/")
    step = ask_to_stop(run)
    edits.hold(folder, edits.GO_ON)
    places = r"step \d+ of epoch \d" if LAUNCHERS[example].any_step else r"epoch \d"
    assert re.search(rf"^stopped after {places}: continue with --resume$", run.stdout, re.MULTILINE), run.stdout
    resumed = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch " in resumed.stdout
    assert outputs.read_run(folder / "output")["starts"][-1]["step"] == step
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.only(*OWN_SAVES)
@ci_with("ddp_spawn")
def test_finished_and_resumed(example: str, finished: Path, reference: Reference) -> None:
    """With --resume a finished run writes its model again; with more epochs and --lr 0 its weights stay as they are."""
    output = finished / "output"
    (output / LAUNCHERS[example].model).unlink()
    run = runs.train(example, finished, 2, "--resume")
    assert "continuing after epoch 5 of 5" in run.stdout and "train loss" not in run.stdout
    outputs.assert_same_run(output, reference.output)
    runs.train(example, finished, 2, "--resume", "--epochs", EPOCHS + 1, "--lr", 0)
    assert len(outputs.read_metrics(output)) == EPOCHS + 1
    before, after = map(outputs.read_model, (reference.output, output))
    statistics = [name for name in before if "running_" in name or "num_batches" in name]  # of BatchNorm
    for weights in before, after:
        for name in statistics:
            weights.pop(name)
    assert outputs.largest_difference(before, after) == 0


PLAIN_MODEL = """
from torch import nn

def make(classes):
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, classes))
"""


def leave_digits(folder: Path, part: str, samples: int) -> None:
    """Leave only the first samples of the digits to train with, or to test, in an example's copy."""
    path = folder / "common" / "digits.npz"
    with np.load(path) as file:
        arrays = {name: array[:samples] if name.startswith(f"{part}_") else array for name, array in file.items()}
    np.savez(path, **arrays)


@ci_with("torchrun_multinode")
@pytest.mark.only("any_world_size")
@pytest.mark.only("fp64")
def test_another_number_of_processes(example: str, folder: Path, tmp_path: Path) -> None:
    """Killed with 2 processes, continued with 1, then with 3: at one global batch the training is that of 1 process."""
    output = folder / "output"
    words = ["--precision", "fp64", "--epochs", 3, "--global-batch", 96]
    if LAUNCHERS[example].convnet:
        leave_digits(folder, "train", 200)  # fp64 takes long
        leave_digits(folder, "test", 61)
    elif example == "fsdp":
        words += ["--tokens", "12000", "--context", "32", "--width", "64"]
    else:
        # Without BatchNorm, whose statistics are of one process's batch.
        (folder / "plain_model.py").write_text(PLAIN_MODEL)
        old = "models.get_model(args.model, num_classes=len(args.classes))"
        edits.edit(folder / "train.py", old, "__import__('plain_model').make(len(args.classes))")
        edits.edit(folder / "train.py", "math.pi * step", "0 * step")  # the rate depends on --epochs
    runs.train(example, folder, 1, *words)
    alone = output.rename(tmp_path / "alone")
    run = runs.start(example, folder, 2, *words)
    run.read_until("epoch  1/")
    runs.kill_all(run)
    done = len(outputs.read_metrics(output))
    runs.train(example, folder, 1, *words, "--resume", "--epochs", 2)
    runs.train(example, folder, 3, *words, "--resume")
    rows, others = outputs.read_metrics(output), outputs.read_metrics(alone)
    assert [row["world_size"] for row in rows] == ([2, 1, 3] if done == 1 else [2, 2, 3])
    for name in {"train_loss", "test_loss", "test_accuracy"} & rows[0].keys():
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in others], rel=1e-9)
    assert outputs.largest_difference(*map(outputs.read_model, (output, alone))) < 1e-9


@pytest.mark.only("ddp_spawn", "horovod_tensorflow", "lightning")
@ci_with("ddp_spawn")
def test_second_run_in_the_folder(example: str, folder: Path) -> None:
    """While a run writes to its --output-dir a second one is refused, even with --resume; the first continues.

    The stacks of the first are printed when SIGUSR2 asks for them.
    """
    first = runs.start(example, folder, 2, "--epochs", 10000)
    first.read_until("epoch  1/")
    second = runs.start(example, folder, 1, "--resume").wait()
    refusals.assert_refused(second, LAUNCHERS[example].status_after_bad_input, "another run", "--output-dir output")
    asked = first.workers()  # of lightning's the first has started the others, and is not among them
    for pid in asked:
        os.kill(pid, signal.SIGUSR2)
    stacks = r'File ".*train\.py", line \d+ in main'
    wait_until(lambda: len(re.findall(stacks, first.errors.read_text())) >= len(asked) > 0, 300, "the stacks")
    first.read_until("epoch ")
    first.kill()
    first.wait()


# What the line about a full disk in epoch 6 names.
WRITTEN = {
    "deepspeed": "output/checkpoint/step66",
    "fsdp": "output/checkpoint/step312",
    "lora": "output/checkpoint-84",
}


@pytest.mark.only(*OWN_SAVES)
@ci_with("ddp_spawn")
def test_disk_full(example: str, finished: Path) -> None:
    """A checkpoint that the disk does not take ends the run with one line, and the checkpoint before it stays.

    A limit on the size of a file is in the place of the disk: what is written beyond it fails in the same way.
    """
    checkpoint = finished / "output" / LAUNCHERS[example].checkpoint
    before = checkpoint.read_bytes()
    size = 2000 if LAUNCHERS[example].model.startswith("model.") else 500  # kB; of adapters all is small
    limited = ["bash", "-c", f'ulimit -f {size}; exec "$@"', "bash", *LAUNCHERS[example].command(2)]
    run = runs.Run([*limited, "--resume", "--epochs", "6"], finished).wait()
    written = WRITTEN.get(example, f"output/{LAUNCHERS[example].checkpoint}")
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, f"cannot write {written}")
    assert checkpoint.read_bytes() == before


# verify kills a process of the others, too.
@pytest.mark.only("ddp_spawn", "lightning", "torchrun_multinode")
@pytest.mark.parametrize("which", [pytest.param("process", marks=ci_with("lightning")), "launcher"])
def test_one_killed(example: str, folder: Path, which: str) -> None:
    """A process that dies ends the run within a minute, and is named. When a launcher dies, its processes end."""
    run = runs.start(example, folder, 2, "--epochs", 10000)
    run.read_until("epoch  1/")
    if which == "process":
        kill_one(run)
    else:
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait(60, leaves=30)


@pytest.mark.only("ddp_spawn")
def test_ranks_that_differ(example: str, folder: Path) -> None:
    """Weights that differ between the ranks, since DDP was forgotten, end the run with one line; nothing is saved."""
    edits.edit(folder / "train.py", "ddp_model = DistributedDataParallel(model)", "ddp_model = model")
    run = runs.start(example, folder, 2).wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, "differ between the ranks")
    assert not (folder / "output" / "checkpoint.pt").exists() and not (folder / "output" / "metrics.csv").exists()


@pytest.mark.only(*OWN_SAVES)
@ci_with("ddp_spawn")
def test_loss_that_is_not_finite(example: str, finished: Path) -> None:
    """A run whose weights are no longer numbers ends with one line, and saves nothing after that."""
    before = content(finished / "output")
    run = runs.start(example, finished, 2, "--epochs", 6, "--limit-steps", 2, "--resume", "--lr", "1e30").wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, "not finite", "nothing is saved")
    after = content(finished / "output")
    names = ["metrics.csv", LAUNCHERS[example].checkpoint, LAUNCHERS[example].model]
    names = [name for name in names if name in before]
    assert len(names) >= 2 and [name for name in names if after[name] != before[name]] == []


# How one process trains that no launcher has started.
SPAWNED = "store = train.dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
ALONE = {name: "train.main(train.parse_args())" for name in EXAMPLES}
ALONE |= {"ddp_spawn": f"{SPAWNED}train.main(0, train.parse_args(), store.port)"}
ALONE |= {"torchrun_vision": "__import__('runpy').run_path('train.py', run_name='__main__')"}
WORDS = {"ddp_spawn": "--processes 1", "lightning": "--devices 1"}
# What is refused before training: the words, and what the line says. The folder has a finished run, in output.
BAD_INPUT = {
    "--precision fp8": ["--precision", "'fp8'", "bf16"],
    "--epochs -1": ["--epochs", "-1"],
    "--batch-size 0": ["--batch-size", "0"],
    "--no-such-flag": ["--no-such-flag"],
    "--output-dir train.py/output": ["--output-dir", "train.py/output"],
    "": ["output/checkpoint.pt", "--resume", "--output-dir"],
    "--resume --seed 1": ["output/checkpoint.pt", "--seed 0"],
    "--resume --precision bf16": ["output/checkpoint.pt", "--precision fp32"],
    "--resume --output-dir cut": ["cut/checkpoint.pt", "damaged"],
    "--resume --output-dir dangling": ["dangling/checkpoint.pt"],
}
CONVNET = {  # and of those that train the ConvNet
    "--dataset mnist --output-dir new": ["mnist", "data/MNIST/raw", "python -m common.data mnist"],
    "--batch-size 1439 --output-dir new": ["1438"],
}
OTHERS = {
    "fsdp": {
        "--data-dir none --output-dir new": ["none/train.bin", "No such file", "tokenize_text.py"],
        "--batch-size 844 --output-dir new": ["843", "too few"],
        "--tokens 100": ["too few for --context 64"],
        "--heads 3": ["--heads must divide --width"],
        "--tensor-parallel 2": ["--tensor-parallel", "the number of processes"],
    },
    "lora": {
        "--model-dir none --output-dir new": ["--model-dir none has no config.json", "make_model.py"],
        "--batch-size 301 --output-dir new": ["--text-file text.txt", "samples are too few"],
        "--context 257 --output-dir new": ["--context 257", "256 tokens"],
    },
    "torchrun_vision": {
        "--data-dir none --output-dir new": ["--data-dir none", "none/train", "make_images.py"],
        "--batch-size 301 --output-dir new": ["300"],
        "--model no_such_model": ["--model", "no_such_model"],
    },
}


@ci_with(*OTHERS, "ddp_spawn", "horovod_tensorflow")
def test_bad_input(example: str, finished: Path) -> None:
    """Bad arguments, input and checkpoints end a run with one line and status 2, and what is there stays as it is."""
    for name in ("cut", "dangling"):
        shutil.copytree(finished / "output", finished / name)
    checkpoint = LAUNCHERS[example].checkpoint
    cut = finished / "cut" / checkpoint
    os.truncate(cut, cut.stat().st_size // 2)
    (finished / "dangling" / checkpoint).unlink()
    (finished / "dangling" / checkpoint).symlink_to("/nonexistent/checkpoint")
    before = content(finished / "output"), content(finished / "cut")
    cases = BAD_INPUT | OTHERS.get(example, CONVNET)
    batch = LAUNCHERS[example].global_batch
    cases |= {"--resume --global-batch 48": ["output/checkpoint.pt", f"--global-batch {batch}"]}
    cases = {words: [text.replace("checkpoint.pt", checkpoint) for text in says] for words, says in cases.items()}
    calls = {(ALONE[example], f"{WORDS.get(example, '')} {words}"): says for words, says in cases.items()}
    refusals.assert_calls_refused(finished, calls)
    assert (content(finished / "output"), content(finished / "cut")) == before
    assert (finished / "dangling" / checkpoint).is_symlink()


@pytest.mark.only(*OWN_SAVES, "torchrun_vision")
@ci_with("ddp_spawn")
def test_checkpoint_of_another_model_or_data(example: str, finished: Path) -> None:
    """A checkpoint of other weights, or of other data, is refused by all processes with one line, the last."""
    status, before = LAUNCHERS[example].status_after_bad_input, content(finished / "output")
    models, train = finished / "common" / "models.py", finished / "train.py"
    changed, old, new = models, "128", "64"
    if example == "fsdp":
        changed, old, new = train, "args.width, args.heads", "64, args.heads"
    elif not LAUNCHERS[example].convnet:
        changed, old, new = train, "num_classes=len(args.classes)", "num_classes=7"
    if example == "lora":
        changed, old, new = train, "r=args.lora_rank", "r=7"
    text = changed.read_text()
    changed.write_text(text.replace(old, new))
    run = runs.start(example, finished, 2, "--resume").wait()
    refusals.assert_refused(run, status, f"output/{LAUNCHERS[example].checkpoint}", "a model of")
    changed.write_text(text)
    words = ["--resume"]
    others = {"fsdp": "843 samples", "lora": "training data of", "torchrun_vision": "300 samples"}
    samples = others.get(example, "1438 samples")
    if LAUNCHERS[example].convnet:
        leave_digits(finished, "train", 1400)
    elif example == "fsdp":
        words += ["--tokens", "50000"]
    elif example == "lora":
        (finished / "text.txt").write_text((finished / "text.txt").read_text()[:4000])
    else:
        (finished / "images" / "train" / "one" / "001.png").unlink()
    run = runs.start(example, finished, 2, *words).wait()
    refusals.assert_refused(run, status, f"output/{LAUNCHERS[example].checkpoint}", samples)
    assert content(finished / "output") == before


# Of those whose ranks are forked: what train.py imports.
FORKED = {
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
    "fsdp": ["torch.distributed.checkpoint"],
    "lightning": ["lightning"],
    "lora": ["datasets", "peft", "transformers", "trl"],
    "torchrun_vision": ["torchvision"],
}


@pytest.mark.only("horovod_cpu", *FORKED)
def test_rows_of_verify(example: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of verify find nothing; tests/test_faults.py has all rows, for ddp_spawn and torchrun_multinode.

    Weights that are divided cannot be compared. With augmentation in loader workers a stopped epoch begins again.
    """
    rows = ["samples", "weights", "checkpoint"]
    if example not in ("horovod_cpu", "torchrun_vision"):
        rows.append("stopped")
    if example == "horovod_cpu":
        for name, value in MPI_AS_ROOT.items():
            monkeypatch.setenv(name, value)
        found = list(checks.check(folder, rows, MPIRUN))
    else:
        words = "{n} train.py --devices {n}" if example == "lightning" else "{n} train.py"
        with forked.launcher(str(tmp_path / "s"), *FORKED[example]) as command:
            found = list(checks.check(folder, rows, f"{command} {words}"))
    expected = {name: "not checked" if (example, name) == ("fsdp", "weights") else "ok" for name in rows}
    assert {name: verdict for name, verdict, _ in found} == expected, found
