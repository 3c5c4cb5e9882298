"""studies/step_model.py: its formulas at their limits, beside published and measured figures, and its two pages."""

import csv
import json
import math
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import readme
from harness.launchers import ROOT
from harness.processes import clean_environment

PAGE = ROOT / "docs" / "scale-model.md"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def run(*words: str | Path, line: str = "python -m studies.step_model") -> subprocess.CompletedProcess[str]:
    """Run the model's command, or a line of its page, from the repository's root."""
    command = ["bash", "-c", f"{line} {shlex.join(map(str, words))}"]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 1000])
def test_collectives(n: int) -> None:
    """One process exchanges nothing. A ring sends (n - 1) / n of the bytes, twice for an all-reduce, in as many steps.

    Halving sends as many bytes in log2(n) steps; a tree sends all of them in each. The best is none that is slower.
    """
    from studies.step_model import collective

    rounds = math.ceil(math.log2(n))
    for kind in KINDS:
        passes = 2 if kind == "all_reduce" else 1
        volume, latency = (
            {a: collective(kind, n, *figures, algorithm=a) for a in ("ring", "halving", "tree", "best")}
            for figures in ((1.0, 0, 1.0), (0, 1.0, 1.0))
        )
        assert volume["ring"] == volume["halving"] == pytest.approx(passes * (n - 1) / n)
        assert (latency["ring"], latency["halving"]) == (passes * (n - 1), passes * rounds)
        assert volume["best"] == min(volume.values()) and latency["best"] == min(latency.values())
        if kind == "all_reduce":
            assert volume["tree"] == latency["tree"] == 2 * rounds
            halves = [collective(half, n, 3.0, 0.1, 2.0, "ring") for half in KINDS[1:]]
            assert collective(kind, n, 3.0, 0.1, 2.0, "ring") == pytest.approx(sum(halves))


def test_expected_maximum() -> None:
    """The mean of the largest of n normal samples: exact for 1, 2 and 3, as drawn for more; of sums it is less."""
    import numpy as np

    from studies.step_model import expected_maximum, waiting

    exact = {1: 0, 2: 1 / math.sqrt(math.pi), 3: 1.5 / math.sqrt(math.pi)}
    assert {n: expected_maximum(n) for n in exact} == pytest.approx(exact, abs=1e-6)
    for n in (8, 1000):
        drawn = np.random.default_rng(n).standard_normal((20_000, n)).max(1)
        assert expected_maximum(n) == pytest.approx(drawn.mean(), abs=5 * drawn.std() / math.sqrt(len(drawn)))
        summed = np.random.default_rng(n).normal(1, 0.1, (2000, 4, n)).sum(1).max(1).mean() / 4
        assert 1 + waiting(1, 0.1, n, steps=4) == pytest.approx(summed, rel=0.01)


def walk(first: float, second: float, pieces: int) -> float:
    """Simulate pieces that go through one stage and then another, each of which takes one at a time."""
    done = ready = 0.0
    for _ in range(pieces):
        ready += first / pieces
        done = max(done, ready) + second / pieces
    return done


def test_overlap() -> None:
    """The formula is what a walk from piece to piece finds, whichever stage comes first; one piece hides nothing."""
    from studies.step_model import together

    for computing, moving, pieces in ((1, 3, 4), (3, 1, 4), (2, 2, 7), (1, 0, 5), (0, 1, 5), (2, 3, 1)):
        expected = together(computing, moving, pieces)
        assert walk(computing, moving, pieces) == walk(moving, computing, pieces) == pytest.approx(expected)
        apart = together(computing, moving, pieces, overlap=False)
        assert together(computing, moving, 1) == apart == computing + moving


def test_ways() -> None:
    """One processor only computes. FSDP moves 1.5 times DDP's bytes, local SGD a period's part, tensor parallelism
    activations for weights; and a share of the time that nothing hides is what the model of the parts says."""
    from studies.step_model import CLUSTERS, MODELS, STATES, WAYS, Step, ddp, fsdp, fsdp_tp, held, local_sgd, step

    cluster = replace(CLUSTERS["h100"], processors=1, scatter=0, latency=0, latency_inside=0, fsdp_overlap=False)
    model = MODELS["1B"]
    for way in (ddp, local_sgd, fsdp):
        assert way(model, 2.0, 1, cluster) == Step(2.0)
        spread = replace(cluster, scatter=0.1)
        assert way(model, 2.0, 4, spread).waiting > 0 == way(model, 2.0, 1, spread).waiting
        assert way(model, 2.0, 8, cluster).efficiency > way(model, 2.0, 8, replace(cluster, bandwidth=1e9)).efficiency
    plain = ddp(model, 0.0, 8, cluster).exchange
    assert plain == pytest.approx(2 * 7 / 8 * model.size / cluster.bandwidth)
    assert fsdp(model, 0.0, 8, cluster).exchange == pytest.approx(1.5 * plain)
    assert fsdp(model, 0.0, 8, replace(cluster, whole_scatter=True)).exchange == pytest.approx(2 * plain)
    assert local_sgd(model, 0.0, 8, cluster, 16).exchange == pytest.approx(plain / 16)
    node = replace(cluster, processors=8)
    inside = fsdp_tp(model, 2.0, 1, node).exchange  # on one node there are activations only
    moved = 4 * model.layers * 2 * 7 / 8 * (8 * model.samples * model.width * 2)
    assert inside == pytest.approx(moved / node.bandwidth_inside)
    assert held(model, "DDP", 64) == STATES * model.weights > 8 * held(model, "FSDP", 64)
    # On hidden exchanges, reading and saving: each is what its figure says, and no efficiency is above 1.
    assert isinstance(found := step("1B", "FSDP", 2, cluster, save_every=100), Step)
    written = 12 * model.weights / cluster.storage_write / 100
    assert found.saving == pytest.approx(written * (found.seconds - found.saving))
    slow = replace(cluster, storage_read=2 * model.samples * model.sample_bytes / 60)
    assert isinstance(read := step("1B", "FSDP", 2, slow, math.inf), Step) and read.seconds == pytest.approx(60)
    for name in MODELS:
        for way in WAYS:
            one = step(name, way, 1000, CLUSTERS["ethernet"])
            assert isinstance(one, str) or 0 < one.efficiency < 1


def test_models() -> None:
    """The two small models are those of common/; the large ones have about the weights that their shape gives."""
    from common.models import ConvNet, TinyGPT
    from studies.step_model import MODELS

    for name, model in (("ConvNet", ConvNet()), ("TinyGPT", TinyGPT())):
        assert MODELS[name].weights == sum(weight.numel() for weight in model.parameters())
    for name, weights in (("1B", 1e9), ("7B", 7e9), ("70B", 70e9)):
        assert 12 * MODELS[name].layers * MODELS[name].width ** 2 == pytest.approx(weights, rel=0.1)


def test_published() -> None:
    """Table 2 of Narayanan et al. 2021 (ZeRO-3), to 15 %: two figures are fitted to two of six rows."""
    from studies.step_model import ZERO_3, predicted

    for row in ZERO_3:
        assert predicted(row) == pytest.approx(row.teraflops, rel=0.15), row
    assert {row.teraflops for row in ZERO_3} == {144, 88, 44, 138, 98, 48}


def test_measured() -> None:
    """What nodes of the lab have measured, to 15 %, as the page says: three ways, four numbers of nodes, three rates.

    The exchange is a good part of what was measured, and as many bytes as the model says have left the first node.
    """
    from studies.step_model import CLUSTERS, Model, ddp, fsdp, local_sgd

    weights, units, period = 12 * (316**2 + 316), 4, 8  # DDP's buckets or FSDP's units; steps of local SGD
    model = Model(weights, 1, 1, 0, 4, units)
    ways = {"DDP": 2, "FSDP": 4, "local SGD": 2 / period}  # Gloo's reduce-scatter is an all-reduce
    page = PAGE.read_text()
    with open(ROOT / "studies" / "step_model_check.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4 * len(ways) == len({(row["rate"], row["way"], row["nodes"]) for row in rows})
    assert len({row["rate"] for row in rows}) == 3
    for row in rows:
        given: dict[str, Any] = {name: float(row[name]) for name in ("latency", "bandwidth", "scatter")}
        common = (float(row["computing"]), nodes := int(row["nodes"]), replace(CLUSTERS["ethernet"], **given))
        if row["way"] == "DDP":
            step = ddp(model, *common, bucket=model.size / units)
        else:
            step = fsdp(model, *common) if row["way"] == "FSDP" else local_sgd(model, *common, period)
        seconds = float(row["seconds"])
        assert step.seconds == pytest.approx(seconds, rel=0.15), row
        text = f"{1000 * seconds:.0f}, {1000 * step.seconds:.0f} ({step.seconds / seconds - 1:+.0%})"
        assert re.search(rf"^\| {row['way']} \| {nodes} .*\| {re.escape(text)} \|", page, re.MULTILINE), text
        volume = ways[row["way"]] * (nodes - 1) / nodes * 4 * weights / 1e6
        assert float(row["sent_mb"]) == pytest.approx(volume, rel=0.1, abs=0.01), row
        if nodes == 8 and row["way"] != "local SGD":
            assert seconds > 1.5 * common[0]


def test_votes() -> None:
    """What a vote of up to 256 ranks took is a ring's messages, to a fifth, with the latency of 32 ranks' messages.

    By halving and doubling it would have been much less; the model takes rings for Gloo, and only for it.
    """
    from studies.step_model import CLUSTERS, collective, exchange

    (head, table) = PAGE.read_text().split("| ranks | s to join |")[1].split("|---|\n", 1)
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    measured = {int(row[0]): float(row[2]) for row in rows}
    assert "s for a vote" in head and list(measured) == [32, 64, 128, 256, 512]
    latency = measured[32] / collective("all_reduce", 32, 0, 1, 1, "ring")
    for ranks, seconds in measured.items():
        assert ranks == 512 or collective("all_reduce", ranks, 0, latency, 1, "ring") == pytest.approx(seconds, rel=0.2)
        assert collective("all_reduce", ranks, 0, latency, 1, "halving") < seconds / 5
    gloo, nccl = CLUSTERS["ethernet"], replace(CLUSTERS["h100"], processors=1)
    assert exchange("all_reduce", 512, 0, gloo) == collective("all_reduce", 512, 0, gloo.latency, 1, "ring")
    assert exchange("all_reduce", 512, 0, nccl) == collective("all_reduce", 512, 0, nccl.latency, 1, "halving")


def test_page() -> None:
    """The tables of both pages are what their commands print."""
    page = (ROOT / "docs" / "scale.md").read_text() + PAGE.read_text()
    for line in (
        readme.command("docs/scale.md", "python -m studies.step_model"),
        readme.command("docs/scale-model.md", "python -m studies.step_model --parts ..."),
        readme.command("docs/scale-model.md", "python -m studies.step_model --cluster ethernet ..."),
        readme.command("docs/scale-model.md", "python -m studies.step_model --published"),
    ):
        done = run(line=line)
        assert done.returncode == 0 and done.stdout.count("\n") > 4, done.stderr
        assert done.stdout in page, f"write it anew:\n{done.stdout}"


def test_bad_input(tmp_path: Path) -> None:
    """Each is refused with one line that says what is wrong."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"processors": 8}')
    for words, message in (
        (["--cluster", "none.json"], "none.json: No such file or directory; or take one of h100, ethernet"),
        (["--cluster", wrong], "must be a JSON object with the figures processors flops memory latency_inside"),
        (["--nodes", "0"], "--nodes: must be a whole number, 1 or more: 0"),
        (["--bandwidth", "0"], "--bandwidth: must be above 0"),
        (["--scatter", "-1"], "--scatter: "),
        (["--measure", tmp_path / "here.json"], "start it with torchrun --nproc-per-node=2 -m studies.step_model"),
    ):
        done = run(*words)
        assert done.returncode == 2 and done.stderr.count("error:") == 1 and message in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [wrong]


@pytest.mark.runs("weekly")
def test_own_figures(tmp_path: Path) -> None:
    """Two processes measure themselves and the link between them; the model takes the file that they write."""
    file = tmp_path / "here.json"
    # Without --standalone torchrun takes port 29500, which another test may have just now.
    line = readme.command(
        "docs/scale.md", "... --measure here.json", {"torchrun": "torchrun --standalone", "here.json": file}
    )
    done = run(line=line)
    assert done.returncode == 0 and "measured on 1 node(s); assumed: storage_read, " in done.stdout, done.stderr
    found = json.loads(file.read_text())
    assert found["processors"] == 2 and set(found["steps"]) == {"ConvNet", "TinyGPT"}
    assert 0 < found["latency_inside"] < 0.01 < 1 < found["bandwidth_inside"] and 0 < found["scatter"] < 3
    line = readme.command("docs/scale.md", "... --cluster here.json", {"here.json": file})
    rows = [row.split(" | ") for row in run("--nodes", "1", "2", line=line).stdout.splitlines()]
    (convnet,) = (row for row in rows if row[:2] == ["| ConvNet", "DDP"])
    assert all(0 < float(cell.strip(" |")) < 1 for cell in convnet[2:]), rows
