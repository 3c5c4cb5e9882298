"""The contract that every example keeps, docs/dev/contract.md, tested on a copy of its folder, on CPU over Gloo."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs, samples
from harness.launchers import HOROVOD, LAUNCHERS, PRINTED, SECOND_LAUNCHERS, Launcher, copy_example
from harness.processes import wait_until
from harness.runs import Reference

EPOCHS = 5  # of a run with the default settings
# Their checkpoints are those of torchrun_multinode or of lightning, whose ordinary tests hold for them.
SAVED_AS_OTHERS = ("accelerate", "horovod_lightning", "torchrun_vision")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each test that starts the example run once more with its second launcher, if it has one.

    That takes minutes. So only test_default_run does so in `nox -s checks`, the others in `nox -s weekly`.
    """
    if metafunc.function in (test_readme_and_requirements, test_bad_input):  # which use no launcher
        return
    rows = [pytest.param(None, id=pytest.HIDDEN_PARAM)]
    for example, row in SECOND_LAUNCHERS.items():
        when = "checks" if metafunc.function == test_default_run else "weekly"
        marks = [pytest.mark.only(example), pytest.mark.runs(when)]
        rows.append(pytest.param(row, id="second launcher", marks=marks))
    metafunc.parametrize("launcher", rows, indirect=True)


@pytest.fixture(autouse=True)
def launcher(request: pytest.FixtureRequest, example: str, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Start the example with its own launcher or, where that is the test's parameter, with its second one."""
    if row := getattr(request, "param", None):
        monkeypatch.setitem(LAUNCHERS, example, row)
    return LAUNCHERS[example]


@pytest.fixture
def reference(
    request: pytest.FixtureRequest, example: str, launcher: Launcher, source: Path, session_folder: Path
) -> Reference:
    """Return the reference run of tests/conftest.py; with a second launcher, of which no README tells, make one."""
    if launcher is not SECOND_LAUNCHERS.get(example):
        return request.getfixturevalue("reference")

    def make(folder: Path) -> list[Reference]:
        copy_example(source, folder)
        run = runs.train(example, folder, 2)
        return [Reference(folder / "output", run.stdout, run.stderr, run.left)]

    return runs.references(session_folder / f"second-{example}", make)[0]


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

    assert "more-state.md" not in reference.stdout  # what training changes is in the checkpoint
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
    assert sum(f"finished: {words}" in line for line in lines) == 1
    waited = r"; waited for others: rank (\d) on \S+ [\d.]+ s \(the slowest\) to rank (\d) [\d.]+ s"
    used = re.compile(r"used: \d{3,} MB of memory in the largest process" + waited)
    assert [sorted(match.groups()) for match in map(used.fullmatch, lines) if match] == [["0", "1"]]
    outputs.assert_recorded(reference.output)


COMPARED = [name for name, row in LAUNCHERS.items() if row.convnet and row.pytorch and name != "ddp_spawn"]


@pytest.mark.runs("smoke")
@pytest.mark.only(*COMPARED)
def test_same_bits_as_ddp_spawn(reference: Reference, ddp_spawn_output: Path, example: str) -> None:
    """The same seed and data, 2 processes, fp32: every way to average gradients ends with the bits of plain PyTorch.

    So do the metrics, but that torchmetrics adds up losses in another order: there they agree to 1e-12.
    """
    if not LAUNCHERS[example].torchvision:
        return outputs.assert_same_run(reference.output, ddp_spawn_output)
    assert outputs.largest_difference(*map(outputs.read_model, (reference.output, ddp_spawn_output))) == 0
    for ours, theirs in zip(*map(outputs.read_metrics, (reference.output, ddp_spawn_output)), strict=True):
        assert outputs.without_times([ours])[0] == pytest.approx(outputs.without_times([theirs])[0], rel=1e-12)


@pytest.mark.runs("one")
def test_resume_of_a_finished_run(example: str, folder: Path, reference: Reference) -> None:
    """With --resume a finished run writes its model again and ends well."""
    shutil.copytree(reference.output, folder / "output")
    (folder / "output" / LAUNCHERS[example].model).unlink()
    run = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch 5 of 5" in run.stdout and "train loss" not in run.stdout
    outputs.assert_same_run(folder / "output", reference.output)


REMOVED_FLAG = """
def resume_settings(args, *others):
    left = {name: value for name, value in vars(args).items() if name != "seed"}
    return all_settings(type(args)(**left), *others)


"""


@pytest.mark.runs("one")
def test_another_learning_rate(example: str, folder: Path, reference: Reference) -> None:
    """A run may be resumed with another --lr, and that one counts: with 0 the weights stay as they are.

    Nor do --scale-lr, --warmup-steps and --max-grad-norm have to stay. A setting that the checkpoint has, and train.py
    no longer, since somebody has removed the flag, is no damage: here, --seed.
    """
    shutil.copytree(reference.output, folder / "output")
    train_py = folder / "train.py"
    edits.edit(
        folder / "plumbing" / "checkpoints.py", "def resume_settings(args", REMOVED_FLAG + "def all_settings(args"
    )
    words = ["--resume", "--epochs", EPOCHS + 1, "--lr", 0, "--scale-lr", "sqrt", "--warmup-steps", 2]
    words += ["--max-grad-norm", 0.5] * ('"--max-grad-norm"' in train_py.read_text())
    run = runs.train(example, folder, 2, *words)
    assert f"epoch  {EPOCHS + 1}/{EPOCHS + 1}" in run.stdout
    weights, before = (outputs.read_model(path) for path in (folder / "output", reference.output))
    for name in [name for name in weights if re.search("running_|num_batches", name)]:  # BatchNorm's statistics
        del weights[name], before[name]
    assert outputs.largest_difference(weights, before) == 0


@pytest.mark.runs("one")
def test_scaled_learning_rate(example: str, folder: Path, reference: Reference) -> None:
    """2 processes with --scale-lr sqrt take their steps with 2**0.5 times the --lr, to the bit, in all processes.

    It rises along a line in the first steps of a run, also of one that was killed in them and resumed, and then stays,
    or falls along a schedule of the example's. tests/repo/test_form.py has more of the rule, which all examples share.
    """
    edits.note_rates(folder, LAUNCHERS[example])
    edits.hold_epochs(folder, LAUNCHERS[example])
    (folder / edits.HOLD).write_text("1")
    exact = 0 if LAUNCHERS[example].pytorch else 1e-6  # TensorFlow keeps the rate as a 32-bit number
    steps = outputs.read_run(reference.output)["stops"][-1]["step"] // EPOCHS
    warm_up = steps * 3 // 2
    words = f"--epochs 2 --warmup-steps {warm_up} --scale-lr sqrt --lr 0.0005".split()
    killed = runs.start(example, folder, 2, *words)
    killed.read_epoch(1)
    runs.kill_all(example, killed)
    (folder / edits.HOLD).unlink()
    runs.train(example, folder, 2, *words, "--resume")
    rates, scaled = edits.noted_rates(folder), 0.0005 * 2**0.5
    expected = [scaled * ((step + 1) / (warm_up + 1)) for step in range(warm_up + 1)]
    assert rates[: warm_up + 1] == pytest.approx(expected, rel=exact, abs=0)
    assert len(rates) == 2 * steps and max(rates) == rates[warm_up]


@pytest.mark.runs("smoke", "ddp_spawn", "torchrun_multinode")
@pytest.mark.runs("weekly", *SAVED_AS_OTHERS)
def test_killed_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to all processes at a random moment, and --resume: the same bits, no row twice or missing.

    With the launch patterns one process alone is killed before that, at another moment of the same run. All see the
    samples in the order that the examples share: DistributedSampler's, new in each epoch; collectives have --timeout.
    The last run has listed its imports: torchvision, which takes seconds, is one only if the framework needs it. Nor is
    torch where another framework trains: users of that need not have it.
    """
    kills: list[Callable[[str, runs.Run], object]] = [runs.kill_one] * LAUNCHERS[example].pattern + [runs.kill_all]
    if LAUNCHERS[example].pytorch:
        edits.note_order(folder)
    run = runs.kill_and_resume(example, folder, reference, kills, PYTHONPROFILEIMPORTTIME="1")
    if LAUNCHERS[example].pytorch:
        samples.assert_order(folder, EPOCHS)
        noted, horovod = folder / "timeouts", "horovod" in example
        assert noted.exists() != horovod and (horovod or set(noted.read_text().split()) == {"300.0"})
    imports = set(re.findall(r"\| +([\w.]+)$", run.stderr, re.MULTILINE))
    assert imports & {"torch.distributed", "tensorflow.python"}, "the list of imports is missing"
    assert ("torch" in imports) == LAUNCHERS[example].pytorch
    if "transformers" not in imports:  # which imports it where it is installed, as no requirement of ours
        assert ("torchvision" in imports) == LAUNCHERS[example].torchvision


@pytest.mark.only("fsdp", "lora", "torchrun_vision")
@pytest.mark.runs("weekly")  # torchrun_multinode has an ordinary test of the same functions
def test_saved_by_the_clock(example: str, folder: Path, reference: Reference) -> None:
    """All save within an epoch when a time has passed on the clock of one; killed then and resumed: the same bits."""
    edits.edit(folder / "plumbing" / "stopping.py", "return int(seconds - ", "return int(rank() == 1 and seconds - ")
    run = runs.start(example, folder, 2, "--checkpoint-every", "0.001min")
    run.read_epoch(1)
    file = next((folder / "output").glob("checkpoint/run.json"), folder / "output" / "checkpoint.pt")
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns != before, 300, "a checkpoint within the second epoch", pause=0.01)
    runs.kill_all(example, run)
    last = runs.train(example, folder, 2, "--resume")
    assert re.search(rf"continuing after epoch 1 of {EPOCHS}, step [1-9]", last.stdout), last.stdout
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
@pytest.mark.parametrize("repeat", range(5))
def test_killed_ten_times(example: str, folder: Path, reference: Reference, repeat: int) -> None:
    """Five runs, each killed at two random moments."""
    runs.kill_and_resume(example, folder, reference, [runs.kill_all, runs.kill_all])


def train_in_fp64(example: str, folder: Path, processes: int, arguments: str) -> None:
    """Train with processes of one thread each, in fp64 where the example can."""
    precision = "fp64" if LAUNCHERS[example].fp64 else "fp32"
    words = f"{arguments} --precision {precision}".split()
    runs.train(example, folder, processes, *words, SLURM_CPUS_PER_TASK=str(processes))


@pytest.mark.runs("weekly")  # test_another_number_of_processes and test_scaled_learning_rate are ordinary
@pytest.mark.only("convnet")
def test_three_processes(example: str, folder: Path) -> None:
    """3 processes with batch 32 take the steps of 1 process with batch 96; both evaluate exactly (359 samples).

    --scale-lr makes their learning rates equal, too. In fp64: in fp32 Adam turns differences in the last bit into
    differences of 1e-3; where there is no fp64, only the first epoch's loss is compared.
    """
    train_in_fp64(example, folder, 3, "--batch-size 32 --lr 0.0005 --scale-lr linear --epochs 2 --output-dir three")
    train_in_fp64(example, folder, 1, "--batch-size 96 --lr 0.0015 --epochs 2 --output-dir one")
    outputs.assert_exact_metrics(folder / "three")
    outputs.assert_exact_metrics(folder / "one")
    rows, same = (outputs.without_times(outputs.read_metrics(folder / name)) for name in ("three", "one"))
    assert [row.pop("world_size") for row in rows] == [3, 3] and [row.pop("world_size") for row in same] == [1, 1]
    if not LAUNCHERS[example].fp64:
        assert rows[0]["train_loss"] == pytest.approx(same[0]["train_loss"], rel=1e-3)
        return
    assert outputs.largest_difference(outputs.read_model(folder / "three"), outputs.read_model(folder / "one")) < 1e-9
    assert all(row == pytest.approx(other, rel=1e-9) for row, other in zip(rows, same, strict=True))


@pytest.mark.runs("weekly")
@pytest.mark.only("convnet")
def test_three_processes_resumed(example: str, folder: Path) -> None:
    """With three processes the order in which gradients are added counts: a resumed run keeps it."""
    for arguments in (
        "--epochs 2 --output-dir whole",
        "--epochs 1 --output-dir resumed",
        "--epochs 2 --output-dir resumed --resume",
    ):
        train_in_fp64(example, folder, 3, f"--batch-size 32 {arguments}")
    outputs.assert_same_run(folder / "resumed", folder / "whole")


@pytest.mark.runs("one")  # that all see the same order, the examples' equal bits say, too
@pytest.mark.only("convnet")
@pytest.mark.only("pytorch")
def test_bf16_and_order(example: str, folder: Path, reference: Reference) -> None:
    """After two epochs bf16 is within one point of fp32's accuracy, with another loss; the weights are left in fp32.

    It sees the samples in the order that all examples share: DistributedSampler's, seeded with --seed, new each epoch.
    """
    rank = LAUNCHERS[example].rank
    line = "        batch = self.images[indices]"
    note = "        if len(indices) > 1:  # the fingerprint of the data reads one at a time\n"
    note += f"            print(*indices, file=open('seen-%d-%d' % (len(self), {rank}), 'a'))\n"
    edits.edit(folder / "common" / "data.py", line, note + line)
    epochs = 2  # processors without bf16 imitate it, and take long
    runs.train(example, folder, 2, "--precision", "bf16", "--epochs", epochs)
    for rank in range(2):
        expected = [indices for epoch in range(epochs) for indices in samples.batches(1438, rank, 2, 64, epoch)]
        lines = (folder / f"seen-1438-{rank}").read_text().splitlines()
        assert [[int(word) for word in line.split()] for line in lines] == expected
    evaluated = [int(word) for rank in range(2) for word in (folder / f"seen-359-{rank}").read_text().split()]
    assert sorted(evaluated) == sorted(list(range(359)) * epochs)
    assert all(str(weight.dtype) == "torch.float32" for weight in outputs.read_model(folder / "output").values())
    bf16, fp32 = (outputs.read_metrics(output)[epochs - 1] for output in (folder / "output", reference.output))
    assert abs(bf16["test_accuracy"] - fp32["test_accuracy"]) <= 0.01
    assert abs(bf16["train_loss"] - fp32["train_loss"]) > 1e-5


@pytest.mark.runs("patterns")
@pytest.mark.only("convnet")  # whose code it changes
def test_exception_in_one_worker(example: str, folder: Path) -> None:
    """An exception on rank 1 alone: its traceback is shown and the run ends non-zero within 60 s of that."""
    rank = LAUNCHERS[example].rank
    edits.plant(folder, f"if {rank} == 1:\n    raise ArithmeticError('planted on rank 1')\n")
    run = runs.start(example, folder, 2)
    shown = Path(run.errors.name)
    wait_until(lambda: "planted on rank 1" in shown.read_text(), 300, "the exception's traceback")
    run.wait(60)
    assert run.status > 0
    assert "Traceback" in run.stderr and "ArithmeticError: planted on rank 1" in run.stderr, run.stderr
    assert not (folder / "output" / LAUNCHERS[example].model).exists()


@pytest.mark.waits
@pytest.mark.runs("one")
def test_one_worker_hangs(example: str, folder: Path, reference: Reference) -> None:
    """A worker that stops answering: the others say so, give up after --timeout, and the run ends non-zero in time.

    Horovod has no store by which they could tell each other: there the stopped one is that of which there is no line.
    Another --seed gives another model: its loss is another from the first epoch on.
    """
    timeout = 40  # of which a fifth is left when they say so: time enough for that on a busy machine
    run = runs.start(example, folder, 2, "--timeout", timeout, "--seed", 1)
    run.read_epoch(1)
    loss, other = (outputs.read_metrics(path)[0]["train_loss"] for path in (folder / "output", reference.output))
    assert abs(loss - other) > 1e-3
    os.kill(max(run.workers()), signal.SIGSTOP)
    run.wait(timeout + 60, leaves=60)
    assert run.status > 0 and "finished" not in run.stdout
    told = re.findall(rf"rank (\d)\] no step for (\d+) s \(--timeout {timeout}\), after step \d+: ", run.stderr)
    assert all(0.8 * timeout <= int(seconds) for _, seconds in told), told
    standing = {rank for rank, _ in told}
    assert standing in ({"0"}, {"1"}), run.stderr
    end = "Timeout (" if example in HOROVOD else "Traceback"
    assert run.stderr.index("no step for") < run.stderr.index(end), run.stderr
    if example not in HOROVOD:
        (missing,) = {"0", "1"} - standing
        answer = (
            rf"missing: rank {missing} on \S+ \(no answer: .*\); waiting: rank {standing.pop()} in gloo:\w+ number \d"
        )
        # Where rank 0 has the store, nobody answers once that one has stopped.
        assert re.search(answer, run.stderr) or (missing == "0" and "no answer from" in run.stderr), run.stderr


NO_LOCKS = """
import errno, fcntl, pathlib, plumbing
def lockf(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = lockf
error = plumbing.lock(pathlib.Path("."))
print("does without", error)
"""


@pytest.mark.runs("one")
def test_two_runs_in_one_folder(example: str, folder: Path) -> None:
    """While a run writes to its --output-dir a second one is refused, even with --resume; the first continues.

    That a run which was killed leaves nothing behind that would stop the next one, test_killed_and_resumed shows. On a
    file system that has no locks, as some on networks have none, nothing is refused.
    """
    first = runs.start(example, folder, 2, "--epochs", 10000)
    first.read_epoch(1)
    second = runs.start(example, folder, 1, "--resume").wait()
    refusals.assert_refused(second, LAUNCHERS[example].status_after_bad_input, "another run", "--output-dir output")
    assert not second.left
    first.read_until("epoch ")
    first.kill()
    first.wait()
    none = runs.Run(["python", "-c", NO_LOCKS], folder).wait()
    assert none.stdout == "does without None\n", none.stderr


NO_KERNELS = """
import torch, plumbing
def ones(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device" + chr(10) + "For")
torch.ones, torch.cuda.get_device_name = ones, lambda device: "Tesla V100"
plumbing.check_gpu(torch.device("cuda", 0))
"""


@pytest.mark.runs("one")
@pytest.mark.only("gpus")
def test_gpus_that_cannot_be_used(example: str, folder: Path, tmp_path: Path) -> None:
    """A job with GPUs that PyTorch cannot use does not train on the CPU unasked: one line, with driver and remedy."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 470.57.02\necho 470.57.02\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    run = runs.start(example, folder, 1, SLURM_GPUS_ON_NODE="2", PATH=path).wait()
    row = "no GPU, AMD, V100, an NVIDIA driver below 580"
    texts = [f"PyTorch {version('torch')}", "470.57.02", f'the row "{row}" of README.md']
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, " GPUs", *texts, "ALLOW_CPU=1")
    assert not (folder / "output").exists() and f"\n| {row} |" in (folder / "README.md").read_text()

    # A GPU that PyTorch finds, but for which this build has no kernels, which is only noticed when one is started.
    old = runs.Run(["python", "-c", NO_KERNELS], folder, {"PATH": path}).wait(300)
    (line,) = re.findall(r".*: error: .*", old.stderr)
    assert old.status == 2 and all(text in line for text in [*texts, "no kernel image"]), old.stderr


BAD_ARGUMENTS = {
    "--precision fp8": ["--precision", "'fp8'", "bf16"],
    "--epochs -1": ["--epochs", "1 or more", "-1"],
    "--batch-size 0": ["--batch-size", "1 or more", "0"],
    "--global-batch 0": ["--global-batch", "1 or more", "0"],
    "--timeout 0": ["--timeout", "1 or more", "0"],
    "--warmup-steps -1": ["--warmup-steps", "0 or more", "-1"],
    "--scale-lr": ["--scale-lr", "expected one argument"],
    "--scale-lr cubic": ["--scale-lr", "'cubic'", "linear", "sqrt"],
    "--lr -1": ["--lr", "0 or more", "-1"],
    "--lr nan": ["--lr", "0 or more", "nan"],
    "--no-such-flag": ["--no-such-flag"],
}


@pytest.fixture
def finished(folder: Path, reference: Reference) -> Path:
    """A copy of the example's folder with the reference run in it."""
    shutil.copytree(reference.output, folder / "output")
    return folder


def content(output: Path) -> dict[str, bytes]:
    """Return the bytes of each file that a run has written, by its path."""
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def damage(example: str, output: Path, change: Callable[[bytearray], object]) -> None:
    """Change the content of one file of a run's checkpoint."""
    (checkpoint,) = output.glob(LAUNCHERS[example].checkpoint)
    old = bytearray(checkpoint.read_bytes())
    change(old)
    checkpoint.write_bytes(old)


@pytest.mark.runs("one")
@pytest.mark.only("any_world_size")
@pytest.mark.parametrize("numbers", [(2, 1), pytest.param((2, 1, 3), marks=pytest.mark.runs("weekly"))], ids=str)
def test_another_number_of_processes(example: str, folder: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """As many processes, all but the last ended within an epoch, train as one does, to a rounding, in fp64.

    The global batch is the same; each sample of an epoch is used once, whichever processes it is shared by.
    """
    launcher, output = LAUNCHERS[example], folder / "output"
    rounding = 1e-6 if example == "lora" else 1e-9  # RMSNorm of transformers computes in fp32, whatever the weights are
    edits.note_use(folder, launcher)
    if launcher.convnet:
        # Four steps in an epoch, since fp64 takes long; parts that are filled up to the same length would have a fifth.
        edits.leave_digits(folder, 479)
    if example == "torchrun_vision":
        edits.without_batchnorm(folder)
    *before, last = numbers
    epochs = len(numbers)
    words = f"--precision fp64 --epochs {epochs} --global-batch {launcher.global_batch // 4 * 3}".split()
    runs.train(example, folder, 1, *words, NUMBER="0")
    reference = output.rename(tmp_path / "reference")
    steps = {"STEPS": "yes"} if launcher.stops_at_a_step else {}
    for number, processes in enumerate(before, 1):
        environment = {"NUMBER": str(number), "END_IN": str(number), **steps}
        ended = runs.start(example, folder, processes, *words, "--resume", **environment).wait(leaves=30)
        assert (ended.status == 0) == launcher.stops_at_a_step, ended.stderr
        assert len(outputs.read_metrics(output)) == number, "it has not ended within an epoch"
    runs.train(example, folder, last, *words, "--resume", NUMBER=str(epochs))
    wanted = samples.used(folder, 0, range(epochs))
    found: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for number in range(1, epochs + 1):  # of an epoch in which a run was killed, nothing counts
        complete = launcher.stops_at_a_step or number == epochs
        for epoch, indices in samples.used(folder, number, range(epochs if complete else number)).items():
            found[epoch] += indices
    for epoch in range(epochs):
        assert sorted(found[epoch]) == wanted[epoch] and len(wanted[epoch]) == len(set(wanted[epoch])) > 0
    assert outputs.largest_difference(outputs.read_model(output), outputs.read_model(reference)) < rounding
    rows = zip(outputs.read_metrics(output), outputs.read_metrics(reference), strict=True)
    for ours, theirs in rows:
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=rounding)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=rounding)
    assert [row["world_size"] for row in outputs.read_metrics(output)] == [*numbers]


# Reads the checkpoint.
READ = """
from plumbing import checkpoints
args = train.parse_args()
vars(args).pop("zero_stage", None)  # deepspeed has it from a file
checkpoints.checks.look_at_model = lambda *_: None  # there is no model yet
name = getattr(train, "CHECKPOINT", checkpoints.CHECKPOINT)
name = train.shards.CHECKPOINT if getattr(args, "shard", hasattr(train, "shards")) else name
checkpoints.accept(checkpoints.read_checkpoint(args, None, name))
"""


def test_bad_input(example: str, finished: Path) -> None:
    """Bad arguments, input and checkpoints end a run with one clear line; the checkpoint is left untouched.

    In one process without a launcher; what the launcher makes of it, test_bad_checkpoint shows.
    """
    launcher, output = LAUNCHERS[example], finished / "output"
    truncated = shutil.copytree(output, finished / "truncated")
    damage(example, truncated, lambda old: old.__delitem__(slice(len(old) // 2, None)))
    settings, same = [f"global_batch {launcher.global_batch}"], f"--resume --global-batch {launcher.global_batch}"
    settings += [] if launcher.any_world_size else ["one file of DeepSpeed for each process, whose number was 2:"]
    texts = {
        "": ["output/checkpoint", "--resume", "--output-dir"],
        "--output-dir train.py/output": ["--output-dir", "train.py/output", "another folder"],
        "--resume --batch-size 24": ["output/checkpoint", *settings],
        # DeepSpeed's files are looked at by all processes together, which there have to be as many of.
        f"{same} --output-dir truncated": [
            "truncated/checkpoint",
            *(["damaged", "move it away"] if launcher.any_world_size else settings[1:]),
        ],
    }
    if launcher.convnet:
        texts["--dataset mnist"] = ["no mnist in data/MNIST/raw", f"{launcher.download} mnist --data-dir data"]
        texts["--batch-size 1439"] = ["--batch-size 1439", "1438"]
    cifar = {"--dataset cifar": ["--dataset", "'cifar'", "digits"]} if launcher.convnet else {}
    before = content(output), content(truncated)
    calls = {(READ, f"{same} --epochs {EPOCHS - 1}"): ["output/checkpoint", "5 epochs", "not 4"]}
    calls[READ, f"{same} --seed 1"] = ["output/checkpoint", "seed 0:"]
    calls[READ, f"{same} --precision bf16"] = ["output/checkpoint", "precision fp32:"]
    calls |= {("train.parse_args()", words): expected for words, expected in (BAD_ARGUMENTS | cifar).items()}
    refusals.assert_runs_refused(example, finished, texts, calls | refusals.bad_numbers(finished))
    assert (content(output), content(truncated)) == before


@pytest.mark.runs("weekly", *SAVED_AS_OTHERS)
def test_bad_checkpoint(example: str, finished: Path) -> None:
    """One bit has changed: with its launcher and 2 processes, too, a run ends with one clear line and in time."""
    output = finished / "output"

    def flip(old: bytearray) -> None:
        old[len(old) // 2] ^= 1

    damage(example, output, flip)
    before = content(output)
    run = runs.start(example, finished, 2, "--resume").wait()
    texts = ["output/checkpoint", "damaged", "move it away"]
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *texts)
    assert content(output) == before


@pytest.mark.runs("weekly")
@pytest.mark.only("convnet")
def test_two_processes_refuse(example: str, folder: Path) -> None:
    """Data that are missing: its launcher and 2 processes end with one clear line."""
    run = runs.start(example, folder, 2, "--dataset", "mnist").wait()
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, "no mnist in data/MNIST/raw")


@pytest.mark.runs("smoke")
def test_readme_and_requirements(example: str, source: Path) -> None:
    """The README has its sections, narrow lines, and the tests' command; requirements.txt pins exactly."""
    readme = (source / "README.md").read_text()
    titles = ["What it shows", "Run locally", "Run on SLURM", "Expected output", "Make it yours", "When it fails"]
    assert re.findall("^## (.+)$", readme, re.MULTILINE) == titles
    assert (source / "minimal.py").exists() == ("Read `minimal.py` and `minimal.slurm` first" in readme)
    first = readme.partition("\n## ")[0].splitlines()[2:]
    assert len(first) == 3 and all(
        name in " ".join(first) for name in ("`train.py`", "`sbatch run.slurm`", "`plumbing/`")
    )
    prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
    assert "../" not in prose, "a link out of the folder, which is copied alone"
    local = readme.partition("## Run locally")[2].partition("## ")[0]
    assert " ".join(LAUNCHERS[example].command(2)) in local.splitlines()
    for line in (source / "requirements.txt").read_text().splitlines():
        assert re.match(r"[a-z-]+==[\d.]+( |$)", line), line


@pytest.mark.only(*[name for name, row in LAUNCHERS.items() if row.stops_at_a_step])
@pytest.mark.runs("weekly", "accelerate", "fsdp", "lora", "torchrun_vision")
def test_stopped_in_an_evaluation(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in an evaluation, all processes save what was trained; a resume evaluates, to the same bits.

    One process alone sees the request, as on one of several nodes.
    """
    once = "rank() == 1 and len(progress['history']) == 1 and not args.resume"
    edits.edit(
        folder / "plumbing" / "stopping.py",
        "        yield batch\n",
        f"        yield batch\n        if {once}:\n            open(os.environ['STOP_FILE'], 'w')\n",
    )
    run = runs.train(example, folder, 2)
    steps = outputs.read_run(folder / "output")["settings"]["steps_per_epoch"]
    assert f"stopped by a signal after step {steps} of epoch 2: use --resume" in run.stdout
    assert len(outputs.read_metrics(folder / "output")) == 1
    run = runs.train(example, folder, 2, "--resume")
    assert f"continuing after epoch 1 of 5, step {steps}" in run.stdout
    assert [start["step"] for start in outputs.read_run(folder / "output")["starts"]] == [0, 2 * steps]
    outputs.assert_same_run(folder / "output", reference.output)


def peak(output: Path) -> float:
    """Return the memory of a run's largest process, in MB, as run.json has it for its last start."""
    return max(used["mb"] for used in outputs.read_run(output)["stops"][-1]["used"])


def enlarge(folder: Path) -> None:
    """Give an example's ConvNet 37.8 million weights, so that a checkpoint has 450 MB."""
    models = folder / "common" / "models.py"
    text = models.read_text()
    assert text.count("9216, 128") == text.count("128, 10") == 1
    models.write_text(text.replace("9216, 128", "9216, 4096").replace("128, 10", "4096, 10"))


@pytest.mark.only("ddp_spawn", "torchrun_multinode", "lightning", "accelerate", "srun_multinode")
@pytest.mark.runs("weekly")
def test_memory_of_a_resume(example: str, folder: Path) -> None:
    """A resumed process needs at most 1.2 times the memory of one that was not interrupted, with a model of 150 MB.

    Nor does the checkpoint go from rank 0 to the others, but where these do not see its file: then it does.
    """
    enlarge(folder)
    plumbing = folder / "plumbing" / "checkpoints.py"
    line = "    shared = [found]\n"
    edits.edit(plumbing, line, f"    print('sends the checkpoint', flush=True)\n{line}")
    words = ["--epochs", 2, "--batch-size", 128]
    whole = runs.train(example, folder, 2, *words, "--output-dir", "whole", seconds=600)
    runs.train(example, folder, 2, "--epochs", 1, *words[2:], seconds=600)
    shutil.copytree(folder / "output", folder / "own-disk")
    resumed = runs.train(example, folder, 2, *words, "--resume", seconds=600)
    assert "sends the checkpoint" not in whole.stdout + resumed.stdout
    outputs.assert_same_run(folder / "output", folder / "whole")
    assert peak(folder / "output") <= 1.2 * peak(folder / "whole")
    edits.edit(plumbing, "def content_of(path):\n", "def content_of(path):\n    path /= 'none' * (rank() == 1)\n")
    own = runs.train(example, folder, 2, *words, "--resume", "--output-dir", "own-disk", seconds=600)
    assert own.stdout.count("sends the checkpoint") == 2
    outputs.assert_same_run(folder / "own-disk", folder / "whole")


LARGE = {  # words for a model of about as many weights; lora's is made with them
    "deepspeed": "--batch-size 128",
    "fsdp": "--width 1024 --layers 3 --tokens 4000 --context 32",
    "lora": "--full --model-dir large",
}


@pytest.mark.only(*LARGE)
@pytest.mark.runs("weekly")
def test_memory_of_a_resume_with_other_checkpoints(example: str, folder: Path) -> None:
    """The same bound holds where each process has files of its own, or a checkpoint has a model of Hugging Face's."""
    if example == "deepspeed":
        enlarge(folder)
    if example == "lora":
        edits.edit(folder / "make_model.py", "hidden_size=256", "hidden_size=1024")
        edits.edit(folder / "make_model.py", "intermediate_size=768", "intermediate_size=2048")
        made = runs.Run(["python", "make_model.py", "--folder", "large"], folder).wait()
        assert made.status == 0, made.stderr
    words = LARGE[example].split()
    runs.train(example, folder, 2, *words, "--epochs", 2, "--output-dir", "whole", seconds=600)
    runs.train(example, folder, 2, *words, "--epochs", 1, seconds=600)
    runs.train(example, folder, 2, *words, "--epochs", 2, "--resume", seconds=600)
    outputs.assert_same_run(folder / "output", folder / "whole")
    print({name: peak(folder / name) for name in ("whole", "output")})
    assert peak(folder / "output") <= 1.2 * peak(folder / "whole")
