"""What only the lightning example promises: ddp_spawn's bits, no srun no SLURM, its loggers, its terminal."""

import csv
import os
import pty
import signal
import termios
from pathlib import Path
from typing import Any

import pytest

from harness import edits, outputs, runs
from harness.processes import clean_environment, running
from harness.runs import Reference

pytestmark = pytest.mark.only("lightning")
# What salloc's shell, a notebook or a batch script on the first of two nodes has in its environment.
ALLOCATION: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}
ALLOCATION |= {"SLURM_NODELIST": "node[1-2]", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
ALLOCATION |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
KERNEL: dict[str, Any] = {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}
KERNEL |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}


def test_in_an_allocation(example: str, folder: Path, reference: Reference) -> None:
    """With SLURM's variables but without srun it trains on this node, and resumes to the same bits.

    Once as in a batch script, once as in a shell that `srun --pty` has started, or in a notebook whose kernel has used
    Lightning. Lightning's loggers, asked for, log what metrics.csv has; the reference run leaves nothing of theirs. The
    checkpoint can be read once more after fit.
    """
    batch = ALLOCATION | {"SLURM_STEP_ID": "4294967291"}
    shell = ALLOCATION | {"SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "40000"}
    run = runs.train(example, folder, 2, "--epochs", 2, "--logger", "CSVLogger", **batch)
    assert "2 processes on 1 node, gloo on cpu" in run.stdout and run.stderr == ""
    logs = folder / "output" / "lightning_logs"
    with open(logs / "version_0" / "metrics.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    for name in ("train_loss", "test_loss", "test_accuracy"):
        values = [float(row[name]) for row in logged if row[name]]
        assert values == pytest.approx([row[name] for row in outputs.read_metrics(folder / "output")], rel=1e-6), name
    line = "    trainer.fit(model, train_loader, test_loader, ckpt_path=path)\n"
    again = line.replace("fit(model, train_loader,", "validate(model,").replace("=path", '="best", verbose=False')
    edits.edit(folder / "train.py", line, line + again)
    run = runs.train(example, folder, 2, "--resume", "--logger", "TensorBoardLogger", **shell, **KERNEL)
    assert "continuing after epoch 2 of 5" in run.stdout
    assert list(logs.glob("version_1/events.out.tfevents.*"))
    outputs.assert_same_run(folder / "output", reference.output)
    files = {path.name for path in reference.output.iterdir()}
    assert files == {".lock", "metrics.csv", "run.json", "checkpoint.pt", "model.pt"} and reference.stderr == ""


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
CASES = {
    "fits": (STEP, "--epochs 1", ""),
    "--ntasks instead": ({**STEP, "SLURM_NTASKS_PER_NODE": ""}, "", "4 tasks on 2 nodes"),
    "a smaller step": ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, "", "2 tasks on 2 nodes, not 2 on each"),
    "--devices": (STEP, "--devices 4", "4 tasks on 2 nodes, not 4 on each"),
    "GPUs": ({**STEP, "SLURM_GPUS_ON_NODE": "4"}, "", "4 tasks on 2 nodes, not 4 on each"),
}


def test_wrong_tasks(example: str, folder: Path) -> None:
    """Tasks that differ from what Lightning would wait for are refused, with the header line to change."""
    (folder / "each.py").write_text(
        "import os, sys, train\n"
        "kept = dict(os.environ)\n"
        f"for name, (variables, words, _) in {CASES!r}.items():\n"
        "    os.environ.clear()\n"
        "    os.environ.update(kept | {key: value for key, value in variables.items() if value})\n"
        "    sys.argv = ['train.py', *words.split()]\n"
        "    try:\n"
        "        print(name, train.parse_args().world_size)\n"
        "    except SystemExit as end:\n"
        "        print(name, 'status', end.code)\n"
        "os.environ.pop('SLURM_STEP_ID')\n"
        "train.torch.cuda.device_count, sys.argv[1:] = lambda: 1, ['--devices', '2']\n"
        "train.parse_args()\n"
    )
    run = runs.Run(["python", "each.py"], folder).wait()
    assert run.stdout.splitlines() == ["fits 4", *(f"{name} status 2" for name in list(CASES)[1:])], run.stderr
    *errors, gpus = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    for line, (_, _, text) in zip(errors, list(CASES.values())[1:], strict=True):
        assert text in line and "#SBATCH --ntasks-per-node" in line, line
    assert "2 processes on " in gpus and "which has 1 GPUs" in gpus and run.status == 2


@pytest.mark.runs("weekly")
def test_worker_terminated(example: str, folder: Path) -> None:
    """SIGTERM to one process ends the run: Lightning's own handler, which waits for the others, is not in place."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_epoch(1)
    os.kill(max(run.workers()), signal.SIGTERM)
    run.wait(60, leaves=30)
    assert run.status == 1 and "process 1 ended with SIGTERM" in run.stderr, run.stderr


@pytest.mark.runs("weekly")
def test_on_a_terminal(example: str, folder: Path, reference: Reference) -> None:
    """Lightning's progress bar is drawn on a terminal only, and the lines of the contract are there as well."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = ["python", "train.py", "--devices", "1", "--epochs", "1"]
    with running(command, cwd=folder, env=clean_environment(), stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # how a terminal says that nothing more comes
            os.close(ours)
        process.wait(300)
    assert process.returncode == 0
    assert b"Epoch 0:" in shown and b"epoch  1/1 | train loss" in shown and b"finished" in shown
    assert "Epoch 0:" not in reference.stdout
