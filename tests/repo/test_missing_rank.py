"""hangs.py, with a clock that runs faster: after hours the processes look at different moments, and agree all the same.

The shipped functions run in one process, each rank in its own threads; only the store, the clock and the stack, by
which they would tell each other where they stand, are made up.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from harness import runs
from harness.launchers import ROOT
from harness.processes import wait_until

HANGS = ROOT / "plumbing" / "hangs.py"

FASTER = 80  # times the speed of the real clock
RANKS = 8


class Store(dict):
    """What rank 0 keeps for all processes; as a clone and as a part of itself it is the same."""

    def __bool__(self) -> bool:
        return True  # a store is there, also while it is empty

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> None:
        self.pop(key, None)

    def clone(self) -> "Store":
        return self


def shipped(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> ModuleType:
    """Return hangs.py, with a fast clock and a store of this process."""
    spec = importlib.util.spec_from_file_location("hangs", HANGS)
    hangs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hangs)
    store = Store()
    group = Namespace(PrefixStore=lambda name, store: store, _get_default_store=lambda: store)
    fake = Namespace(distributed_c10d=group)
    modules = Namespace(modules={"torch.distributed": fake}, _current_frames=None)
    clock = Namespace(
        monotonic=lambda: time.monotonic() * FASTER,
        perf_counter=time.perf_counter,
        sleep=lambda seconds: time.sleep(seconds / FASTER),
    )
    for name, value in {
        "sys": modules,
        "time": clock,
        "say": said.append,
        "place": lambda: "train.py:80, train_one_epoch: pending.wait()",
        "collective": lambda: "gloo:all_reduce number 7",
    }.items():
        monkeypatch.setattr(hangs, name, value)
    return hangs


@pytest.mark.parametrize("drift", [0, 0.99], ids=["at once", "drifted"])
def test_missing_names_the_one_rank(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    """At the default timeout the one rank that does not answer is named, also where the others look up to 5 s apart."""
    said: list[str] = []
    hangs = shipped(monkeypatch, said)
    args, progress, hosts = Namespace(timeout=300), {"step": 7}, [f"node{rank // 2}" for rank in range(RANKS)]
    watching = [rank for rank in range(RANKS) if rank != 5]
    for rank in watching:
        hangs.watch(args, progress, rank, hosts)
        time.sleep(drift * 5 / FASTER / RANKS)  # they wake every 5 s of the fast clock, each at another moment
    wait_until(lambda: any(line.startswith("missing:") for line in said), 20, "the line that says who is missing")
    assert sum("no step for" in line for line in said) == len(watching)
    (verdict,) = [line for line in said if line.startswith("missing:")]
    assert verdict.startswith("missing: rank 5 on node2 (no answer"), verdict
    assert "waiting: rank 0, 1, 2, 3, 4, 6, 7 in gloo:all_reduce number 7" in verdict


# What a program may wait for before it trains, without a limit: what its line then begins with.
BEFORE = {
    "a file that does not answer": "open('pipe')",
    "another process's lock": "fcntl.lockf(open('lock', 'w'), fcntl.LOCK_EX)",
    "a lock file that a killed process has left": "while os.path.exists('lock'): time.sleep(0.01)",
    "a server that does not answer": "socket.create_connection(server.getsockname()).recv(1)",
    "a program": "subprocess.run(['sleep', '600'])",
    "a thread": "threading.Event().wait()",
    "nothing: it computes": "while True: pass",
}
START = """
import argparse, fcntl, os, socket, subprocess, threading, time
from plumbing import hangs

server = socket.create_server(("127.0.0.1", 0))
hangs.watch_start(argparse.Namespace(timeout=1, epochs=1))
def load_data():
    {waits}
load_data()
"""


@pytest.mark.parametrize("what", BEFORE)
def test_before_training(tmp_path: Path, what: str) -> None:
    """A process that comes to no training says where it stands, before the others give up."""
    (tmp_path / "plumbing").mkdir()
    shutil.copy(HANGS, tmp_path / "plumbing")
    (tmp_path / "train.py").write_text(START.format(waits=BEFORE[what]))
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        run = runs.Run([sys.executable, "train.py"], tmp_path, {"RANK": "3"})
        try:
            wait_until(lambda: "training" in Path(run.errors.name).read_text(), 60, "a line")
        finally:
            run.end()
    (line,) = run.stderr.splitlines()
    assert f"rank 3] training has not begun after 1 s (--timeout 1): train.py:8, load_data: {BEFORE[what]}" in line


@pytest.mark.parametrize(("seconds", "lines"), [(200, 0), (290, 1), (400, 1)])
def test_a_long_start(monkeypatch: pytest.MonkeyPatch, seconds: int, lines: int) -> None:
    """A start that takes long and ends well is told once, and so is its end; from then on steps count."""
    said: list[str] = []
    hangs = shipped(monkeypatch, said)
    args, progress = Namespace(timeout=300, epochs=1), {"step": 0}
    hangs.watch_start(args)
    time.sleep(seconds / FASTER)
    hangs.watch(args, progress, 0, ["node0"])
    for _ in range(40):  # seconds: what waits for a step looks every 5
        progress["step"] += 1
        time.sleep(1 / FASTER)
    began = [line for line in said if line.startswith("training has not begun after 2")]
    assert len(began) == lines and len(said) == 2 * lines, said
    assert not lines or (said[1].startswith("training begins after ") and "gloo:all_reduce number 7" in said[0])


def test_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that trains nothing, torchrun_vision's predict.py, it is not said that training has not begun."""
    said: list[str] = []
    hangs = shipped(monkeypatch, said)
    hangs.watch_start(Namespace(timeout=300))
    time.sleep(300 / FASTER)
    assert said == []
