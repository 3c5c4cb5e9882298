"""What only accelerate promises: its launcher's settings, accumulation and clipping by its calls, restarts."""

import os
import re
import signal
from pathlib import Path

import pytest

from harness import edits, outputs, refusals, runs
from harness.launchers import LAUNCHERS, ROOT, copy_example
from harness.processes import wait_until
from harness.runs import Reference
from tests.test_torchrun_multinode import BAD_INTERVALS, saved_step, stop

pytestmark = pytest.mark.only("accelerate")


def test_bad_input(example: str, folder: Path) -> None:
    """Bad values of its own flags are refused with one clear line each; so is a start without its launcher."""
    texts = {
        "--gradient-accumulation-steps 0": ["--gradient-accumulation-steps", "1 or more"],
        **{f"--checkpoint-every {bad}": ["--checkpoint-every", "1 or more", bad] for bad in BAD_INTERVALS},
        "--max-grad-norm -1": ["--max-grad-norm", "0 or more"],
        "": [" ".join(LAUNCHERS[example].command(2))],
    }
    refusals.assert_arguments_refused(folder, texts)


CASES = {
    "ACCELERATE_MIXED_PRECISION=bf16": "mixed_precision is bf16: use --precision of train.py",
    "ACCELERATE_USE_DEEPSPEED=true": "take the example deepspeed",
    "ACCELERATE_USE_FSDP=true": "take the example fsdp",
}


def test_settings_of_its_launcher(example: str, folder: Path) -> None:
    """What accelerate's own flags or a config file ask for, and train.py would not do, is refused."""
    (folder / "each.py").write_text(
        "import os, sys, train\n"
        f"for variable in {[*CASES]}:\n"
        "    name, _, value = variable.partition('=')\n"
        "    os.environ[name] = value\n"
        "    try:\n"
        "        train.parse_args()\n"
        "    except SystemExit as end:\n"
        "        print('status', end.code)\n"
        "    del os.environ[name]\n"
        "os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'\n"
        "sys.argv += ['--precision', 'bf16']\n"
        "train.parse_args()\n"
    )
    run = runs.Run(["python", "each.py"], folder, {"TORCHELASTIC_RUN_ID": "none"}).wait()
    errors = [line for line in run.stderr.splitlines() if ": error: " in line]
    assert run.stdout == "status 2\n" * len(CASES), run.stderr
    for line, text in zip(errors, CASES.values(), strict=True):
        assert text in line, line


@pytest.mark.runs("weekly")
def test_stopped_while_compiled(example: str, folder: Path, reference: Reference) -> None:
    """Where accelerate compiles the model, a checkpoint in mid-epoch has the names of a run without that."""
    launcher = LAUNCHERS[example].local.format(n=2).replace(" train.py", " --dynamo_backend eager train.py")
    step = stop(example, runs.Run([*launcher.split(), "--checkpoint-every", "5"], folder))
    runs.train(example, folder, 2, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
def test_own_words_count(example: str, folder: Path, reference: Reference) -> None:
    """Neither a variable in the environment nor a timeout that is accelerate's own default has it choose another."""
    line = "    # Train.\n"
    group = 'dist.group.WORLD._get_backend(torch.device("cpu"))'
    edits.edit(folder / "train.py", line, f"    print(f'waits {{{group}.options._timeout.total_seconds()}}')\n{line}")
    run = runs.train(example, folder, 2, "--timeout", 600, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    assert re.findall(r"waits ([\d.]+)", run.stdout) == ["600.0"] * 2  # without line ends: two may share a line
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
def test_stopped_and_resumed(example: str, folder: Path, reference: Reference) -> None:
    """Asked to stop in mid-epoch, all processes stop after the same step; --resume continues there, to the same bits.

    In the second run one process alone sees the request, as on one of several nodes: it has to tell the other.
    """
    step = stop(example, runs.start(example, folder, 2))
    edits.edit(
        folder / "plumbing" / "stopping.py", "    return os.path.exists(", "    return rank() == 1 and os.path.exists("
    )
    again = runs.start(example, folder, 2, "--resume")
    again.read_until(f"continuing after epoch {step // 11} of 5, step {step % 11}")
    step = stop(example, again)
    runs.train(example, folder, 2, "--resume")
    runs.assert_continued(folder / "output", step)
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
def test_worker_killed_and_started_again(example: str, folder: Path, reference: Reference) -> None:
    """SIGKILL to one worker in mid-epoch: its launcher starts the group again, which continues from the last step."""
    command = LAUNCHERS[example].local.format(n=2).replace(" train.py", " --max_restarts 1 train.py")
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    run = runs.Run([*command.split(), "--checkpoint-every", "1", "--resume"], folder, variables)
    run.read_epoch(1)
    wait_until(lambda: saved_step(folder / "output") >= 11 + 2, 300, "a checkpoint in mid-epoch")
    os.kill(max(run.workers()), signal.SIGKILL)
    run.wait()
    assert run.status == 0, run.stderr
    assert re.search(r"continuing after epoch [1-4] of 5, step \d+", run.stdout), run.stdout
    outputs.assert_same_run(folder / "output", reference.output)


@pytest.mark.runs("weekly")
def test_mixed_precision_and_own_configuration(example: str, folder: Path, tmp_path: Path) -> None:
    """In bf16 it has ddp_spawn's bits, too, whatever `accelerate config` has left in the user's home folder."""
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    left = "distributed_type: FSDP\nmixed_precision: fp16\nnum_machines: 3\n"
    (tmp_path / "home" / "accelerate" / "default_config.yaml").write_text(left)
    words = ("--precision", "bf16", "--epochs", "2")
    run = runs.train(example, folder, 2, *words, HF_HOME=str(tmp_path / "home"))
    assert "not passed to" not in run.stderr, run.stderr
    other = copy_example(ROOT / "examples" / "ddp_spawn", tmp_path / "ddp_spawn")
    runs.train("ddp_spawn", other, 2, *words)
    outputs.assert_same_run(folder / "output", other / "output")
