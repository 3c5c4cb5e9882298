"""What only the lightning example promises: ddp_spawn's bits, no srun no SLURM, its loggers, its terminal."""

import csv
import os
import pty
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from tests.harness import edits, outputs, runs
from tests.harness.processes import clean_environment, wait_until
from tests.harness.runs import Reference

pytestmark = pytest.mark.only("lightning")

# What salloc's shell, a notebook or a batch script on the first of two nodes has in its environment.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NODELIST": "node[1-2]"}
ALLOCATION |= {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.only("lightning", "horovod_lightning")
def test_same_bits_as_ddp_spawn(example: str, tmp_path: Path, reference: Reference) -> None:
    """The same seed and data, 2 processes, fp32: plain PyTorch ends with the same bits and the same metrics."""
    output = runs.train_ddp_spawn(tmp_path)
    assert outputs.largest_difference(outputs.read_model(reference.output), outputs.read_model(output)) == 0
    for ours, theirs in zip(*map(outputs.read_metrics, (reference.output, output)), strict=True):
        assert outputs.without_times([ours])[0] == pytest.approx(outputs.without_times([theirs])[0], rel=1e-12)


def test_in_an_allocation(example: str, folder: Path, reference: Reference) -> None:
    """With SLURM's variables but without srun it trains on this node, and resumes to the same bits.

    Once as in a batch script, once as in a shell that `srun --pty` has started. Lightning's loggers, asked for,
    log what metrics.csv has; the reference run, without one, leaves nothing of theirs.
    """
    batch, shell = {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "40000"}
    run = runs.train(example, folder, 2, "--epochs", 2, "--logger", "CSVLogger", **ALLOCATION, **batch)
    assert "2 processes on 1 node, gloo on cpu" in run.stdout and run.stderr == ""
    logs = folder / "output" / "lightning_logs"
    with open(logs / "version_0" / "metrics.csv", newline="") as file:
        logged = list(csv.DictReader(file))
    for name in ("train_loss", "test_loss", "test_accuracy"):
        values = [float(row[name]) for row in logged if row[name]]
        assert values == pytest.approx([row[name] for row in outputs.read_metrics(folder / "output")], rel=1e-6), name
    run = runs.train(example, folder, 2, "--resume", "--logger", "TensorBoardLogger", **ALLOCATION, **shell)
    assert "continuing after epoch 2 of 5" in run.stdout
    assert list(logs.glob("version_1/events.out.tfevents.*"))
    outputs.assert_same_run(folder / "output", reference.output)
    files = {path.name for path in reference.output.iterdir()}
    assert files == {".lock", "metrics.csv", "checkpoint.ckpt", "model.pt"} and reference.stderr == ""


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
        "train.SRUN, kept = True, dict(os.environ)\n"
        f"for name, (variables, words, _) in {CASES!r}.items():\n"
        "    os.environ.clear()\n"
        "    os.environ.update(kept | {key: value for key, value in variables.items() if value})\n"
        "    sys.argv = ['train.py', *words.split()]\n"
        "    try:\n"
        "        print(name, train.parse_args().world_size)\n"
        "    except SystemExit as end:\n"
        "        print(name, 'status', end.code)\n"
        "train.SRUN, train.torch.cuda.device_count, sys.argv[1:] = False, lambda: 1, ['--devices', '2']\n"
        "train.parse_args()\n"
    )
    run = runs.Run(["python", "each.py"], folder).wait(120)
    assert run.stdout.splitlines() == ["fits 4", *(f"{name} status 2" for name in list(CASES)[1:])], run.stderr
    *errors, gpus = [line for line in run.stderr.splitlines() if line.startswith("train.py: error: ")]
    for line, (_, _, text) in zip(errors, list(CASES.values())[1:], strict=True):
        assert text in line and "#SBATCH --ntasks-per-node" in line, line
    assert "--devices 2 is more than the 1 GPUs" in gpus and run.status == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_parent_killed(example: str, folder: Path, number: signal.Signals) -> None:
    """A signal to the parent alone: its processes end with it; no traceback."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_until("epoch  1/")
    os.kill(run.process.pid, number)
    wait_until(lambda: not run.pids(), 10, "the end of the processes that have lost their parent")
    run.wait(10)
    assert run.status == -number and "Traceback" not in run.stderr


def test_worker_terminated(example: str, folder: Path) -> None:
    """SIGTERM to one process ends the run: Lightning's own handler, which waits for the others, is not in place."""
    run = runs.start(example, folder, 2, "--epochs", 1000)
    run.read_until("epoch  1/")
    os.kill(max(run.workers()), signal.SIGTERM)
    run.wait(60)
    assert run.status == 1 and "process 1 terminated with signal SIGTERM" in run.stderr, run.stderr


def test_on_a_terminal(example: str, folder: Path, reference: Reference) -> None:
    """Lightning's progress bar is drawn on a terminal only, and the lines of the contract are there as well."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = ["python", "train.py", "--devices", "1", "--epochs", "1"]
    with subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # how a terminal says that nothing more comes
            os.close(ours)
    assert process.returncode == 0
    assert b"Epoch 0:" in shown and b"epoch  1/1 | train loss" in shown and b"finished" in shown
    assert "Epoch 0:" not in reference.stdout


def test_cuda_is_left_to_the_processes(example: str, folder: Path) -> None:
    """The process that forks the others does not ask CUDA: once asked, it does not work in forked processes."""
    line = "from common import data\n"
    note = "torch.cuda.is_available = lambda: print('asked by', os.getpid(), flush=True)\n"
    edits.edit(folder / "train.py", line, line + note)
    run = runs.start(example, folder, 2, "--epochs", 1, SLURM_GPUS_ON_NODE="2", ALLOW_CPU="1").wait(120)
    assert run.status == 0 and "finished" in run.stdout, run.stderr
    assert "asked by" in run.stdout and f"asked by {run.process.pid}\n" not in run.stdout
