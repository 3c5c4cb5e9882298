"""The contract that every example keeps (see CONTRIBUTING.md), tested on a copy of its folder, on CPU over Gloo."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.harness import edits, outputs, refusals, runs, samples
from tests.harness.launchers import LAUNCHERS, PRINTED, SECOND_LAUNCHERS, Launcher, copy_example
from tests.harness.processes import wait_until
from tests.harness.readme import fences
from tests.harness.runs import Reference

EPOCHS = 5  # of a run with the default settings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each test that starts the example run once more with its second launcher, if it has one.

    That takes minutes. So only test_default_run does so in `nox -s smoke`, the others in `nox -s faults`.
    """
    if metafunc.function is test_readme_and_requirements:
        return
    rows = [pytest.param(None, id=pytest.HIDDEN_PARAM)]
    for example, row in SECOND_LAUNCHERS.items():
        marks = [pytest.mark.only(example), *[pytest.mark.faults] * (metafunc.function != test_default_run)]
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
        return [Reference(folder / "output", run.stdout, run.stderr)]

    return runs.references(session_folder / f"second-{example}", make)[0]


def test_default_run(example: str, reference: Reference) -> None:
    """The README's command learns; its printed lines, metrics.csv and the model agree with each other."""
    launcher = LAUNCHERS[example]
    rows = outputs.read_metrics(reference.output)
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert all(row["world_size"] == 2 and row["seconds"] > 0 and row["samples_per_second"] > 0 for row in rows)
    assert launcher.has_learnt(rows[-1])
    above, below = launcher.train_loss
    assert rows[-1]["train_loss"] < below < above < rows[0]["train_loss"]
    if launcher.convnet:
        outputs.assert_exact_metrics(reference.output)

    lines = reference.stdout.splitlines()
    shape = (
        rf"2 processes on 1 node, {launcher.backend} on cpu, \d+ threads? each, global batch {launcher.global_batch}"
    )
    assert sum(bool(re.fullmatch(f"{re.escape(launcher.first_line)}: {shape}", line)) for line in lines) == 1
    column, (words, unit, factor, digits) = launcher.learns[0], PRINTED[launcher.learns[0]]
    epoch = rf"epoch +(\d+)/{EPOCHS} \| train loss ([\d.]+) .* {words} +([\d.]+){unit}"
    values = [tuple(map(float, match.groups())) for match in map(re.compile(epoch).search, lines) if match]
    expected = [(row["epoch"], round(row["train_loss"], 4), round(row[column] * factor, digits)) for row in rows]
    assert values == expected
    assert sum(f"finished: {words}" in line for line in lines) == 1
    used = r"used: \d+ s, (\d+)% of \d+ cores, \d+ MB a process(?:, \d+ MB of a GPU)?, (\d+) samples/s"
    ((share, speed),) = [match.groups() for match in map(re.compile(used).fullmatch, lines) if match]
    samples = sum(row["samples_per_second"] * row["seconds"] for row in rows)
    assert 1 <= int(share) <= 100 and abs(int(speed) - samples / sum(row["seconds"] for row in rows)) <= 1


@pytest.mark.thorough
def test_resume_of_a_finished_run(example: str, folder: Path, reference: Reference) -> None:
    """With --resume a finished run writes its model again and ends well."""
    shutil.copytree(reference.output, folder / "output")
    (folder / "output" / LAUNCHERS[example].model).unlink()
    run = runs.train(example, folder, 2, "--resume")
    assert "continuing after epoch 5 of 5" in run.stdout and "train loss" not in run.stdout
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.thorough
def test_another_learning_rate(example: str, folder: Path, reference: Reference) -> None:
    """A run may be resumed with another --lr, and that one counts: with 0 the weights stay as they are."""
    shutil.copytree(reference.output, folder / "output")
    run = runs.train(example, folder, 2, "--resume", "--epochs", EPOCHS + 1, "--lr", 0)
    assert f"epoch  {EPOCHS + 1}/{EPOCHS + 1}" in run.stdout
    weights, before = (outputs.read_model(path) for path in (folder / "output", reference.output))
    for name in [name for name in weights if re.search("running_|num_batches", name)]:  # BatchNorm's statistics
        del weights[name], before[name]
    assert outputs.largest_difference(weights, before) == 0


@pytest.mark.thorough
def test_scaled_learning_rate(example: str, folder: Path) -> None:
    """2 processes with --scale-lr linear take the steps of twice the --lr, with sqrt of 2**0.5 times, to the bit.

    In each step the optimizer has the rate that the README promises: it rises along a line in the first steps of the
    run, also of one that was killed in them and resumed, and then stays, or falls along a schedule of the example's.
    """
    edits.note_rates(folder, LAUNCHERS[example])
    exact = 0 if LAUNCHERS[example].pytorch else 1e-6  # TensorFlow keeps the rate as a 32-bit number
    words = "--epochs 2 --warmup-steps 1000 --output-dir"
    killed = runs.start(example, folder, 2, *f"{words} killed --scale-lr linear --lr 0.0005".split())
    killed.read_until("epoch  1/")
    runs.kill_all(example, killed)
    runs.train(example, folder, 2, *f"{words} killed --scale-lr linear --lr 0.0005 --resume".split())
    rates = edits.noted_rates(folder)
    assert len(rates) >= 18
    assert rates == pytest.approx([0.001 * ((step + 1) / 1001) for step in range(len(rates))], rel=exact, abs=0)
    runs.train(example, folder, 2, *f"{words} plain --lr 0.001".split())
    assert edits.noted_rates(folder) == rates
    outputs.assert_same_run(folder / "killed", folder / "plain")

    words = "--scale-lr sqrt --lr 0.0005 --warmup-steps 3 --epochs 1"
    runs.train(example, folder, 2, *words.split())
    rates, scaled = edits.noted_rates(folder), 0.0005 * 2**0.5
    assert rates[:4] == pytest.approx([scaled * (step + 1) / 4 for step in range(4)], rel=exact, abs=0)
    assert len(rates) >= 9 and max(rates) == rates[3]


def test_killed_twice(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to one process, then to all, at two random moments, and --resume: the same bits, no row twice or missing.

    Beyond the launch patterns, the second is enough, and a train.py that can stop at a step is asked to, instead.
    The last run has listed its imports: torchvision, which takes seconds, is one only if the framework needs it. Nor is
    torch where another framework trains: users of that need not have it.
    """
    interruptions = [runs.kill_one, runs.kill_all]
    if not LAUNCHERS[example].pattern:
        interruptions = [runs.ask_to_stop if LAUNCHERS[example].stops_at_a_step else runs.kill_all]
    run = runs.kill_and_resume(example, folder, reference, interruptions)
    imports = set(re.findall(r"\| +([\w.]+)$", run.stderr, re.MULTILINE))
    assert imports & {"torch.distributed", "tensorflow.python"}, "the list of imports is missing"
    assert ("torchvision" in imports, "torch" in imports) == (
        LAUNCHERS[example].torchvision,
        LAUNCHERS[example].pytorch,
    )


@pytest.mark.faults
@pytest.mark.parametrize("repeat", range(5))
def test_killed_ten_times(example: str, folder: Path, reference: Reference, repeat: int) -> None:
    """Five runs, each killed at two random moments."""
    runs.kill_and_resume(example, folder, reference, [runs.kill_all, runs.kill_all])


@pytest.mark.thorough
@pytest.mark.clause("convnet")
def test_three_processes(example: str, folder: Path) -> None:
    """3 processes with batch 32 take the steps of 1 process with batch 96; both evaluate exactly (359 samples).

    --scale-lr makes their learning rates equal, too. In fp64: in fp32 Adam turns differences in the last bit into
    differences of 1e-3; where there is no fp64, only the first epoch's loss is compared. With three processes the
    order in which gradients are added counts: a resumed run keeps it.
    """
    precision = "fp64" if LAUNCHERS[example].fp64 else "fp32"
    three, one = "--batch-size 32 --lr 0.0005 --scale-lr linear", "--batch-size 96 --lr 0.0015"
    for processes, arguments in (
        (3, f"{three} --epochs 2 --output-dir whole"),
        (3, f"{three} --epochs 1 --output-dir resumed"),
        (3, f"{three} --epochs 2 --output-dir resumed --resume"),
        (1, f"{one} --epochs 2 --output-dir one"),
    ):
        arguments += f" --precision {precision}"
        runs.train(example, folder, processes, *arguments.split(), SLURM_CPUS_PER_TASK=str(processes))  # 1 thread each
    outputs.assert_same_run(folder / "resumed", folder / "whole")
    outputs.assert_exact_metrics(folder / "whole")
    outputs.assert_exact_metrics(folder / "one")
    rows, same = (outputs.without_times(outputs.read_metrics(folder / name)) for name in ("whole", "one"))
    assert [row.pop("world_size") for row in rows] == [3, 3] and [row.pop("world_size") for row in same] == [1, 1]
    if precision == "fp32":
        assert rows[0]["train_loss"] == pytest.approx(same[0]["train_loss"], rel=1e-3)
        return
    assert outputs.largest_difference(outputs.read_model(folder / "whole"), outputs.read_model(folder / "one")) < 1e-9
    assert all(row == pytest.approx(other, rel=1e-9) for row, other in zip(rows, same, strict=True))


@pytest.mark.thorough  # that all see the same order, the examples' equal bits say, too
@pytest.mark.clause("convnet")
@pytest.mark.clause("pytorch")
def test_bf16_and_order(example: str, folder: Path, reference: Reference) -> None:
    """After two epochs bf16 is within one point of fp32's accuracy, with another loss; the weights are left in fp32.

    It sees the samples in the order that all examples share: DistributedSampler's, seeded with --seed, new each epoch.
    """
    rank = LAUNCHERS[example].rank
    line = "        batch = self.images[indices]"
    note = f"        print(*indices, file=open('seen-%d-%d' % (len(self), {rank}), 'a'))\n"
    edits.edit(folder / "common" / "data.py", line, note + line)
    epochs = 2  # processors without bf16 imitate it, and take long
    runs.train(example, folder, 2, "--precision", "bf16", "--epochs", epochs)
    for rank in range(2):
        expected = [indices for epoch in range(epochs) for indices in samples.batches(1438, rank, 2, 64, epoch)]
        lines = (folder / f"seen-1438-{rank}").read_text().splitlines()
        assert [[int(word) for word in line.split()] for line in lines] == expected
    evaluated = [int(word) for rank in range(2) for word in (folder / f"seen-359-{rank}").read_text().split()]
    assert sorted(evaluated) == sorted(list(range(359)) * epochs)
    assert all(weight.dtype == torch.float32 for weight in outputs.read_model(folder / "output").values())
    bf16, fp32 = (outputs.read_metrics(output)[epochs - 1] for output in (folder / "output", reference.output))
    assert abs(bf16["test_accuracy"] - fp32["test_accuracy"]) <= 0.01
    assert abs(bf16["train_loss"] - fp32["train_loss"]) > 1e-5


@pytest.mark.pattern
@pytest.mark.clause("convnet")  # whose code it changes
def test_exception_in_one_worker(example: str, folder: Path) -> None:
    """An exception on rank 1 alone: its traceback is shown and the run ends non-zero within 60 s of that."""
    rank = LAUNCHERS[example].rank
    edits.plant(folder, f"if {rank} == 1:\n    raise ArithmeticError('planted on rank 1')\n")
    run = runs.start(example, folder, 2)
    shown = Path(run.errors.name)
    wait_until(lambda: "planted on rank 1" in shown.read_text(), 120, "the exception's traceback")
    run.wait(60)
    assert run.status > 0
    assert "Traceback" in run.stderr and "ArithmeticError: planted on rank 1" in run.stderr, run.stderr
    assert not (folder / "output" / LAUNCHERS[example].model).exists()


@pytest.mark.thorough
def test_one_worker_hangs(example: str, folder: Path, reference: Reference) -> None:
    """A worker that stops answering: the others give up after --timeout, and the run ends non-zero.

    Another --seed gives another model: its loss is another from the first epoch on.
    """
    run = runs.start(example, folder, 2, "--timeout", 20, "--seed", 1)
    loss = float(re.search(r"train loss ([\d.]+)", run.read_until("epoch  1/"))[1])
    assert abs(loss - outputs.read_metrics(reference.output)[0]["train_loss"]) > 1e-3
    os.kill(max(run.workers()), signal.SIGSTOP)
    run.wait(20 + 60)
    assert run.status > 0 and "finished" not in run.stdout


NO_LOCKS = """
import errno, fcntl, pathlib, train
def lockf(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = lockf
error = train.lock(pathlib.Path("."))
print("does without", error)
"""


@pytest.mark.thorough
def test_two_runs_in_one_folder(example: str, folder: Path) -> None:
    """While a run writes to its --output-dir a second one is refused, even with --resume; the first continues.

    That a run which was killed leaves nothing behind that would stop the next one, test_killed_twice shows. On a file
    system that has no locks, as some on networks have none, nothing is refused.
    """
    first = runs.start(example, folder, 2, "--epochs", 10000)
    first.read_until("epoch  1/")
    second = runs.start(example, folder, 1, "--resume").wait(120)
    refusals.assert_refused(second, LAUNCHERS[example].status_after_bad_input, "another run", "--output-dir output")
    first.read_until("epoch ")
    first.kill()
    first.wait(30)
    none = runs.Run(["python", "-c", NO_LOCKS], folder).wait(60)
    assert none.stdout == "does without None\n", none.stderr


@pytest.mark.thorough
@pytest.mark.clause("gpus")
def test_gpus_that_cannot_be_used(example: str, folder: Path, tmp_path: Path) -> None:
    """A job with GPUs that PyTorch cannot use does not train on the CPU unasked: one line, with driver and remedy."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 470.57.02\necho 470.57.02\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    run = runs.start(example, folder, 1, SLURM_GPUS_ON_NODE="2", PATH=path).wait(120)
    texts = ["2 GPUs", f"PyTorch {torch.__version__}", "470.57.02", "UV_TORCH_BACKEND=auto"]
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *texts)
    assert not (folder / "output").exists()


@pytest.mark.clause("convnet")
@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        pytest.param("--batch-size 720", ["--batch-size 720", "719"], marks=pytest.mark.thorough),
        pytest.param(
            *("--output-dir train.py/output", ["--output-dir", "train.py/output", "another folder"]),
            marks=pytest.mark.thorough,
        ),
        ("--dataset mnist", ["no mnist in data/MNIST/raw", "{download} mnist --data-dir data"]),
    ],
)
def test_bad_input(example: str, folder: Path, arguments: str, texts: list[str]) -> None:
    """Bad input ends with one clear line that says what to do."""
    run = runs.start(example, folder, 2, *arguments.split()).wait(120)
    texts = [text.format(download=LAUNCHERS[example].download) for text in texts]
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *texts)


def test_bad_arguments(example: str, folder: Path) -> None:
    """Each argument that cannot be right is refused with one line of its own."""
    texts = {
        "--precision fp8": ["--precision", "'fp8'", "bf16"],
        "--epochs -1": ["--epochs", "1 or more", "-1"],
        "--batch-size 0": ["--batch-size", "1 or more", "0"],
        "--timeout 0": ["--timeout", "1 or more", "0"],
        "--warmup-steps -1": ["--warmup-steps", "0 or more", "-1"],
        "--scale-lr": ["--scale-lr", "expected one argument"],
        "--scale-lr cubic": ["--scale-lr", "'cubic'", "linear", "sqrt"],
        "--lr -1": ["--lr", "0 or more", "-1"],
        "--lr nan": ["--lr", "0 or more", "nan"],
        "--no-such-flag": ["--no-such-flag"],
    }
    if LAUNCHERS[example].convnet:
        texts["--dataset cifar"] = ["--dataset", "'cifar'", "digits"]
    refusals.assert_arguments_refused(folder, texts)


@pytest.mark.parametrize(
    ("case", "processes", "arguments", "texts"),
    [
        pytest.param(
            *("fewer epochs", 2, "--resume --epochs 4", ["output/checkpoint", "5 epochs", "not 4"]),
            marks=pytest.mark.thorough,
        ),
        ("there already", 1, "", ["output/checkpoint", "--resume", "--output-dir"]),
        pytest.param(
            *(
                "other settings",
                1,
                "--resume --batch-size 32",
                ["output/checkpoint", "world_size 2", "batch_size {each}"],
            ),
            marks=pytest.mark.thorough,
        ),
        ("one bit flipped", 2, "--resume", ["output/checkpoint", "damaged", "move it away"]),
        pytest.param(
            *("truncated", 2, "--resume", ["output/checkpoint", "damaged", "move it away"]), marks=pytest.mark.faults
        ),
    ],
)
def test_bad_checkpoint(
    example: str, folder: Path, reference: Reference, case: str, processes: int, arguments: str, texts: list[str]
) -> None:
    """A checkpoint that cannot be used is refused with its path, and left untouched."""
    shutil.copytree(reference.output, folder / "output")
    (checkpoint,) = (folder / "output").glob(LAUNCHERS[example].checkpoint)
    content = bytearray(checkpoint.read_bytes())
    if case == "one bit flipped":
        content[len(content) // 2] ^= 1
    elif case == "truncated":
        del content[len(content) // 2 :]
    checkpoint.write_bytes(content)
    run = runs.start(example, folder, processes, *arguments.split()).wait(120)
    texts = [text.format(each=LAUNCHERS[example].global_batch // 2) for text in texts]
    if case == "other settings" and LAUNCHERS[example].any_world_size:
        texts = ["output/checkpoint", f"global_batch {LAUNCHERS[example].global_batch}:"]
    refusals.assert_refused(run, LAUNCHERS[example].status_after_bad_input, *texts)
    assert checkpoint.read_bytes() == content
    left, before = ({path.relative_to(top) for path in top.rglob("*")} for top in (folder / "output", reference.output))
    assert left == before


def test_readme_and_requirements(example: str, source: Path) -> None:
    """The README has its sections and the command that these tests run, and requirements.txt pins exactly."""
    readme = (source / "README.md").read_text()
    titles = ["What it shows", "Run locally", "Run on SLURM", "Expected output", "Make it yours", "When it fails"]
    assert re.findall("^## (.+)$", readme, re.MULTILINE) == titles
    recipes = [text for language in ("python", "diff") for text in fences(source / "README.md", language)]
    assert len(readme.splitlines()) - sum(len(text.splitlines()) + 2 for text in recipes) <= 145
    local = readme.partition("## Run locally")[2].partition("## ")[0]
    assert " ".join(LAUNCHERS[example].command(2)) in local.splitlines()
    for line in (source / "requirements.txt").read_text().splitlines():
        assert re.match(r"[a-z-]+==[\d.]+( |$)", line), line
