"""What each example promises: it learns, exactly, to ddp_spawn's bits; and it survives what breaks.

docs/maintaining.md has the contract.
"""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import EXAMPLES, LAUNCHERS, PRINTED
from harness.processes import wait_until
from harness.runs import Reference
from verify import checks

EPOCHS = 5  # of a run with the default settings


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
    assert rows[-1]["train_loss"] < launcher.last_below < launcher.first_above < rows[0]["train_loss"]
    if launcher.convnet:
        outputs.assert_exact_metrics(reference.output)

    lines = reference.stdout.splitlines()
    shape = (
        rf"2 processes on 1 node, {launcher.backend} on cpu, \d+ threads? each, global batch {launcher.global_batch}"
    )
    assert sum(bool(re.fullmatch(f"{re.escape(launcher.first_line)}: {shape}", line)) for line in lines) == 1
    words, unit, factor, digits = PRINTED[launcher.metric]
    epoch = rf"epoch +(\d+)/{EPOCHS} \| train loss ([\d.]+) .* {words} +([\d.]+){unit}"
    values = [tuple(map(float, match.groups())) for match in map(re.compile(epoch).search, lines) if match]
    shown = [round(row[launcher.metric] * factor, digits) for row in rows]
    expected = [(row["epoch"], round(row["train_loss"], 4), value) for row, value in zip(rows, shown, strict=True)]
    assert values == expected
    assert sum(line.startswith("finished: ") for line in lines) == 1
    outputs.assert_recorded(reference.output)


@pytest.mark.runs("smoke")
@pytest.mark.only(*[name for name, row in LAUNCHERS.items() if row.convnet and row.pytorch and name != "ddp_spawn"])
def test_same_bits_as_ddp_spawn(reference: Reference, ddp_spawn_output: Path, example: str) -> None:
    """The same seed and data, 2 processes, fp32: every way to average gradients ends with the bits of plain PyTorch.

    So do the metrics, but that torchmetrics adds up losses in another order: there they agree to 1e-12.
    """
    if not LAUNCHERS[example].torchvision:
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


@pytest.mark.runs("smoke")
def test_killed_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to all processes at a random moment, and --resume: the same bits, no row twice or missing."""
    runs.kill_and_resume(example, folder, reference, [runs.kill_all])


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("repeat", range(5))
def test_killed_ten_times(example: str, folder: Path, reference: Reference, repeat: int) -> None:
    """Five runs, each killed at two random moments: first one process alone, then all."""
    runs.kill_and_resume(example, folder, reference, [runs.kill_one, runs.kill_all])


def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """The file OUTPUT/stop ends a run with status 0 and one line; --resume goes on there, to the same bits."""
    edits.hold_epochs(folder, LAUNCHERS[example])
    (folder / edits.HOLD).write_text("2")
    run = runs.start(example, folder, 2)
    run.read_epoch(1)
    step = runs.ask_to_stop(example, run)
    (folder / edits.HOLD).unlink()
    places = r"step \d+ of epoch \d" if LAUNCHERS[example].stops_at_a_step else r"epoch \d"
    assert re.search(rf"^stopped by a signal after {places}: use --resume$", run.stdout, re.MULTILINE), run.stdout
    resumed = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch " in resumed.stdout
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


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


@pytest.mark.only("any_world_size")
@pytest.mark.only("fp64")
def test_another_number_of_processes(example: str, folder: Path, tmp_path: Path) -> None:
    """Killed with 2 processes, continued with 1, then with 3: at one global batch the training is that of 1 process."""
    output = folder / "output"
    words = ["--precision", "fp64", "--epochs", 3, "--global-batch", 96]
    if LAUNCHERS[example].convnet:
        edits.leave_digits(folder, 200)  # fp64 takes long
        edits.leave_digits(folder, 61, "test")
    elif example == "fsdp":
        words += ["--tokens", "12000", "--context", "32", "--width", "64"]
    else:
        edits.without_batchnorm(folder)
        edits.edit(folder / "train.py", "math.pi * step", "0 * step")  # the rate depends on --epochs
    runs.train(example, folder, 1, *words)
    alone = output.rename(tmp_path / "alone")
    run = runs.start(example, folder, 2, *words)
    run.read_epoch(1)
    runs.kill_all(example, run)
    done = len(outputs.read_metrics(output))
    runs.train(example, folder, 1, *words, "--resume", "--epochs", 2)
    runs.train(example, folder, 3, *words, "--resume")
    rows, others = outputs.read_metrics(output), outputs.read_metrics(alone)
    assert [row["world_size"] for row in rows] == ([2, 1, 3] if done == 1 else [2, 2, 3])
    for name in {"train_loss", "test_loss", "test_accuracy"} & rows[0].keys():
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in others], rel=1e-9)
    assert outputs.largest_difference(*map(outputs.read_model, (output, alone))) < 1e-9


def test_second_run_in_the_folder(example: str, folder: Path) -> None:
    """While a run writes to its --output-dir a second one is refused, even with --resume; the first continues.

    The stacks of the first are printed when SIGUSR2 asks for them.
    """
    first = runs.start(example, folder, 2, "--epochs", 10000)
    first.read_epoch(1)
    second = runs.start(example, folder, 1, "--resume").wait()
    assert_last_line(second, LAUNCHERS[example].status_after_bad_input, "another run", "--output-dir output")
    asked = first.workers()  # of lightning's the first has started the others, and is not among them
    for pid in asked:
        os.kill(pid, signal.SIGUSR2)
    stacks = r'File ".*train\.py", line \d+ in main'
    wait_until(
        lambda: len(re.findall(stacks, Path(first.errors.name).read_text())) >= len(asked) > 0, 300, "the stacks"
    )
    first.read_until("epoch ")
    first.kill()
    first.wait()


def assert_last_line(run: runs.Run, status: int, *texts: str) -> None:
    """Check that a run has ended with this status and one line of error, whose text is the last on the terminal."""
    assert run.status == status, f"status {run.status}, not {status}:\n{run.stdout}\n{run.stderr}"
    errors = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(set(errors)) == 1, run.stderr
    # PyTorch notes which processes it ends, and torchrun draws lines around what a process has reported.
    notes = re.compile(r"W\d{4} .*/spawn\.py:\d+\] Terminating|=*$")
    said = re.sub(r"Traceback .*\n  File \S*/horovodrun\"(.|\n)*", "", run.stderr)  # of its own, about the status
    assert [line for line in said.splitlines() if not notes.match(line)][-1].endswith(errors[-1]), run.stderr
    assert all(text in errors[-1] for text in texts), f"{texts} not in {errors[-1]}"
    assert not re.search(r'File ".*(train|longrun|sharded|data|models)\.py"', run.stderr) and not run.left, run.stderr


def test_disk_full(example: str, folder: Path) -> None:
    """A checkpoint that the disk does not take ends the run with one line, and the checkpoint before it stays.

    A limit on the size of a file is in the place of the disk: what is written beyond it fails in the same way.
    """
    runs.train(example, folder, 2, "--epochs", 1)
    checkpoint = folder / "output" / LAUNCHERS[example].checkpoint
    before = checkpoint.read_bytes()
    size = 2000 if LAUNCHERS[example].model.startswith("model.") else 500  # kB; of adapters all is small
    limited = ["bash", "-c", f'ulimit -f {size}; exec "$@"', "bash", *LAUNCHERS[example].command(2)]
    run = runs.Run([*limited, "--resume", "--epochs", "2"], folder).wait()
    assert_last_line(run, LAUNCHERS[example].status_after_bad_input, f"cannot write {LAUNCHERS[example].written}")
    assert checkpoint.read_bytes() == before


def test_loss_that_is_not_finite(example: str, folder: Path) -> None:
    """A run whose weights are no longer numbers ends with one line, and saves nothing after that."""
    runs.train(example, folder, 2, "--epochs", 1, "--limit-steps", 2)
    before = content(folder / "output")
    run = runs.start(example, folder, 2, "--epochs", 2, "--limit-steps", 2, "--resume", "--lr", "1e30").wait()
    assert_last_line(run, LAUNCHERS[example].status_after_bad_input, "not finite", "nothing is saved")
    after = content(folder / "output")
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
    refusals.assert_calls_refused(finished, calls, **refusals.TORCHRUN)
    assert (content(finished / "output"), content(finished / "cut")) == before
    assert (finished / "dangling" / checkpoint).is_symlink()


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
    assert_last_line(run, status, f"output/{LAUNCHERS[example].checkpoint}", "a model of")
    changed.write_text(text)
    words = ["--resume"]
    samples = {"fsdp": "843 samples", "lora": "training data of", "torchrun_vision": "300 samples"}
    if LAUNCHERS[example].convnet:
        edits.leave_digits(finished, 1400)
    elif example == "fsdp":
        words += ["--tokens", "50000"]
    elif example == "lora":
        (finished / "text.txt").write_text((finished / "text.txt").read_text()[:4000])
    else:
        (finished / "images" / "train" / "one" / "001.png").unlink()
    run = runs.start(example, finished, 2, *words).wait()
    assert_last_line(run, status, f"output/{LAUNCHERS[example].checkpoint}", samples.get(example, "1438 samples"))
    assert content(finished / "output") == before


@pytest.mark.only("accelerate", "deepspeed", "fsdp", "horovod_cpu", "lightning", "lora", "torchrun_vision")
def test_rows_of_verify(example: str, folder: Path) -> None:
    """Three rows of verify find nothing; tests/test_faults.py has all rows, for ddp_spawn and torchrun_multinode.

    Weights that are divided cannot be compared.
    """
    rows = ["samples", "weights", "checkpoint"]
    found = list(checks.check(folder, rows, LAUNCHERS[example].local))
    expected = {name: "ok" for name in rows} | ({"weights": "not checked"} if example == "fsdp" else {})
    assert {name: verdict for name, verdict, _ in found} == expected, found


@pytest.mark.only("torchrun_multinode")
def test_started_again(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to one process: torchrun starts all of them again, with run.slurm's variables, to the same bits."""
    words = re.findall(r"^ *export ((?:\w+=\w+ ?)+) *(?:#.*)?$", (folder / "run.slurm").read_text(), re.MULTILINE)
    variables = dict(word.split("=") for word in " ".join(words).split())
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in variables
    edits.hold_epochs(folder, LAUNCHERS[example])
    (folder / edits.HOLD).write_text("2")
    command = "torchrun --standalone --nproc-per-node=2 --max-restarts=1 train.py --resume"
    run = runs.Run(command.split(), folder, variables)
    run.read_epoch(1)
    os.kill(max(run.workers()), signal.SIGKILL)
    run.read_until("continuing after epoch ")
    (folder / edits.HOLD).unlink()
    assert run.wait().status == 0, run.stderr
    outputs.assert_same_run(folder / "output", reference.output)
