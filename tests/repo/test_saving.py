"""What keeps a run's only checkpoint, and an earlier run's results, in the one process of a group."""

import csv
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem

import plumbing
from harness.refusals import RefusedError
from plumbing import checks, files, shards, stopping


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Arguments of train.py in a process that is a group by itself, and whose checks are as new."""
    monkeypatch.setattr(checks, "last_saved", {"step": None, "epochs": None})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Namespace(output_dir=tmp_path, steps_per_epoch=4, scale_lr=None, world_size=1, resume=False, batch_size=8)
    dist.destroy_process_group()


def test_second_save_at_one_step(args: Namespace) -> None:
    """The folder that run.json names stays until the next one is complete, also where both are of one step."""
    progress = {"step": 3, "history": []}
    for names in (["epoch0-step3"], ["epoch0-step3", "epoch0-step3-again"], ["epoch0-step3-again", "epoch0-step3"]):
        folder = shards.begin(args, progress)
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"weights")
        assert [path.name for path in (args.output_dir / "checkpoint").glob("epoch*") if path != folder] == names[:-1]
        shards.complete(args, progress, folder)
        run = plumbing.load_checkpoint(args.output_dir / shards.CHECKPOINT)
        assert run["tag"] == names[-1] and shards.check(args, run) == folder
        assert [path.name for path in (args.output_dir / "checkpoint").glob("epoch*")] == names[-1:]


def test_save_in_the_background_uses_no_gpu(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes copies. To its thread the first GPU belongs, on which each process would take memory (vllm 37449)."""
    streams: list[object] = []

    def loader(resolve: Any, **_: Any) -> filesystem._SerialCpuLoader:
        streams.append(resolve)
        return filesystem._SerialCpuLoader(resolve)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", loader)
    monkeypatch.setattr(shards, "BACKGROUND", {"group": None, "thread": None})
    progress = {"step": 3, "history": []}
    weights = torch.ones(4)
    folder = shards.begin(args, progress)
    shards.save_in_background(args, {"weights": weights}, progress, folder)
    weights.zero_()  # training goes on
    shards.wait_for_save()
    assert plumbing.load_checkpoint(args.output_dir / shards.CHECKPOINT)["tag"] == folder.name and not streams
    dcp.load({"weights": weights}, checkpoint_id=folder)
    assert weights.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("error", ["CUDA error: uncorrectable ECC error", "gloo: Connection closed by peer"])
def test_errors_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """What a GPU or the network reports while a checkpoint is written is not said to be a full disk."""

    def save(_: object) -> None:
        raise RuntimeError(error)

    for module in (shards, files):
        monkeypatch.setattr(module, "fail", pytest.fail)
    with pytest.raises(RuntimeError, match=error), shards.write_errors(tmp_path):
        save(None)
    if "CUDA" in error:
        with pytest.raises(RuntimeError, match=error):
            files.write(tmp_path / "checkpoint.pt", save)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saved", [0, 3, 4])
def test_stop_in_an_evaluation(args: Namespace, monkeypatch: pytest.MonkeyPatch, saved: int) -> None:
    """It saves the steps that are not saved yet, and otherwise nothing, which would look like progress."""
    done: list[str] = []
    monkeypatch.setattr(stopping, "stop_requested", lambda: True)
    monkeypatch.setattr(stopping, "stop", lambda *_: done.append("stop"))
    checks.note_saved({"step": saved, "history": []})
    model, progress = nn.Linear(2, 2), {"step": 4, "history": []}

    def save(args: Namespace, model: nn.Module, progress: dict[str, Any]) -> None:
        plumbing.check_results(args, model, progress)
        done.append("save")

    batches = plumbing.until_stopped(args, progress, [1, 2, 3], save, model)
    assert list(batches) == [1, 2, 3] and done == ["save"] * (saved < 4) + ["stop"] * 3


def test_loader_of_accelerate(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that accelerator.prepare() has divided once more, so that some samples were never tested, is refused."""
    monkeypatch.setattr(stopping, "fail", lambda message: pytest.fail(message, pytrace=False))
    prepared = type("DataLoaderShard", (list,), {"__module__": "accelerate.data_loader"})([1, 2])
    with pytest.raises(pytest.fail.Exception, match=r"accelerator\.prepare\(\) would divide .* test_loader once more"):
        next(plumbing.until_stopped(args, {"step": 4, "history": []}, prepared, None))


LEFT = {
    "model.pt": True,
    "model.keras": True,
    "adapter": True,
    "model": True,
    "checkpoint-epoch-3.pt": False,
    "checkpoint-best.pt": False,
    "metrics.csv": None,
    "checkpoint": None,
}


@pytest.mark.parametrize("left", LEFT)
def test_earlier_run_without_its_checkpoint(args: Namespace, left: str) -> None:
    """What a run has trained is refused; with --resume a run goes on that was killed while it saved the first time."""
    (args.output_dir / left).mkdir()
    for args.resume in (False, True):
        error = plumbing.read_checkpoint(args, nn.Linear(2, 2))
        if LEFT[left] is None or args.resume > LEFT[left]:
            assert error is None
        else:
            assert f" has {left} of an earlier run, and no checkpoint.pt: choose another --output-dir" in error


def test_later_epochs_stay(args: Namespace) -> None:
    """A run that begins anew beside checkpoints of later epochs does not remove them."""
    args.keep_epochs = 1
    for number in (1, 2, 9):
        (args.output_dir / f"checkpoint-epoch-{number}.pt").touch()
    progress = {"step": 8, "history": [{"test_loss": 2.0}, {"test_loss": 1.0}]}
    assert plumbing.checkpoints.kept_names(args, progress) == ["checkpoint-epoch-2.pt", "checkpoint-best.pt"]
    assert {path.name for path in args.output_dir.iterdir()} == {"checkpoint-epoch-2.pt", "checkpoint-epoch-9.pt"}


def test_another_metric_after_a_resume(args: Namespace) -> None:
    """Each value stands under its name, also where the first epochs were without it; a tensor is its number."""
    rows = [{"epoch": 1, "seconds": 2.0}, {"epoch": 2, "test_auc": torch.tensor(0.5), "seconds": 3.0}]
    files.write_metrics(args, {"history": rows})
    with open(args.output_dir / "metrics.csv") as file:
        read = list(csv.DictReader(file))
    assert read == [
        {"epoch": "1", "seconds": "2.0", "test_auc": "nan"},
        {"epoch": "2", "seconds": "3.0", "test_auc": "0.5"},
    ]


@pytest.mark.parametrize("form", ["tensor", "dict", "tuple"])
def test_output_of_several_tensors(form: str) -> None:
    """The order of sums is fixed through each tensor that a model returns."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 2), []

        def forward(self, inputs: torch.Tensor) -> Any:
            output = self.layer(inputs)
            output.register_hook(self.seen.append)
            number = torch.ones(1, dtype=torch.int64)
            return {"tensor": output, "dict": {"out": output, "number": number}, "tuple": (output, [number])}[form]

    model = Model()
    plumbing.fix_summation_order(model, torch.zeros(1, 4))
    assert [gradient.tolist() for gradient in model.seen] == [[[1.0, 1.0]]] and model.training


@pytest.mark.usefixtures("refusing")
def test_config_beside_train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's file is the one of the path that was given; in a job it is the copy of that."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    for number, path in enumerate((tmp_path / "ds_config.json", tmp_path / "code" / "ds_config.json")):
        path.write_text(json.dumps({"number": number, "optimizer": {"type": "AdamW"}}))
    monkeypatch.setattr("sys.argv", [str(tmp_path / "code" / "train.py")])
    assert plumbing.read_config(Path("ds_config.json"))["number"] == 0
    (tmp_path / "code" / ".commit").touch()  # see keep_program() of plumbing/requeue.sh
    assert plumbing.read_config(Path("ds_config.json"))["number"] == 1
    with pytest.raises(RefusedError, match="cannot read --deepspeed_config other"):
        plumbing.read_config(Path("other.json"))
