"""hangs.py, with a clock that the test moves: after hours each looks at another moment, and all agree all the same.

The shipped functions run in one process, each rank in its own threads; only the store, the clock and the stack, by
which they would tell each other where they stand, are made up.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness import runs
from harness.launchers import ROOT
from harness.processes import wait_until
from plumbing import hangs

HANGS = ROOT / "plumbing" / "hangs.py"

RANKS = 8


class Clock:
    """A clock that stands still as long as a thread of the module that is tested is awake, however slow the machine is.

    The test moves it by `forward`. It wakes each thread at the moment until which that has slept.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.awake = 0  # threads
        self.until: list[float] = []  # the moments at which the sleeping threads wake
        self.changed = threading.Condition()

    def sleep(self, seconds: float) -> None:
        """Take the place of time.sleep."""
        with self.changed:
            moment = self.now + seconds
            self.until.append(moment)
            self.awake -= 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.now >= moment)

    def forward(self, seconds: float) -> None:
        """Let so many seconds pass."""
        with self.changed:
            end = self.now + seconds
            while True:
                assert self.changed.wait_for(lambda: not self.awake, 300), "a thread neither sleeps nor ends"
                self.now = min([*self.until, end])
                later = [moment for moment in self.until if moment > self.now]
                self.awake = len(self.until) - len(later)
                self.until = later
                self.changed.notify_all()
                if not self.awake:
                    return

    def thread(self, **options: Any) -> threading.Thread:
        """Take the place of threading.Thread, for threads that sleep by this clock."""
        clock = self

        class Thread(threading.Thread):
            def start(self) -> None:
                with clock.changed:
                    clock.awake += 1
                super().start()

            def run(self) -> None:
                super().run()
                with clock.changed:
                    clock.awake -= 1
                    clock.changed.notify_all()

        return Thread(**options)


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


def shipped(monkeypatch: pytest.MonkeyPatch, said: list[str], clock: Clock) -> ModuleType:
    """Return hangs.py, with this clock and a store of this process."""
    spec = importlib.util.spec_from_file_location("hangs", HANGS)
    hangs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hangs)
    store = Store()
    group = Namespace(PrefixStore=lambda name, store: store, _get_default_store=lambda: store)
    fake = Namespace(distributed_c10d=group)
    modules = Namespace(modules={"torch.distributed": fake}, _current_frames=None)
    for name, value in {
        "sys": modules,
        "time": Namespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter, sleep=clock.sleep),
        "threading": Namespace(Thread=clock.thread),
        "say": said.append,
        "place": lambda: "train.py:80, train_one_epoch: pending.wait()",
        "collective": lambda: "gloo:all_reduce number 7",
    }.items():
        monkeypatch.setattr(hangs, name, value)
    return hangs


def test_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process waits in the first collective that is neither retired nor, with NCCL, completed (pytorch 166095)."""
    states = [(True, "scheduled"), (False, "completed"), (False, "started"), (False, "scheduled")]
    entries = [
        {"retired": retired, "state": state, "profiling_name": "nccl:all_reduce", "collective_seq_id": number}
        for number, (retired, state) in enumerate(states)
    ]
    recorder = torch._C._distributed_c10d
    monkeypatch.setattr(recorder, "_dump_fr_trace_json", lambda: json.dumps({"entries": entries}))
    assert hangs.collective() == "nccl:all_reduce number 2"
    del entries[2:]
    assert hangs.collective() == ""


@pytest.mark.parametrize("drift", [0, 0.99], ids=["at once", "drifted"])
def test_missing_names_the_one_rank(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    """At the default timeout the one rank that does not answer is named, also where the others look up to 5 s apart."""
    said: list[str] = []
    clock = Clock()
    hangs = shipped(monkeypatch, said, clock)
    args, progress, hosts = Namespace(timeout=300), {"step": 7}, [f"node{rank // 2}" for rank in range(RANKS)]
    watching = [rank for rank in range(RANKS) if rank != 5]
    for rank in watching:
        hangs.watch(args, progress, rank, hosts)
        clock.forward(drift * 5 / RANKS)  # they wake every 5 s, each at another moment
    clock.forward(300 - clock.now)
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
            wait_until(lambda: "training" in Path(run.errors.name).read_text(), 300, "a line")
        finally:
            run.end()
    (line,) = run.stderr.splitlines()
    place = re.escape(f"train.py:8, load_data: {BEFORE[what]}")
    assert re.search(rf"rank 3\] training has not begun after \d+ s \(--timeout 1\): {place}", line), line


@pytest.mark.parametrize(("seconds", "lines"), [(200, 0), (290, 1), (400, 1)])
def test_a_long_start(monkeypatch: pytest.MonkeyPatch, seconds: int, lines: int) -> None:
    """A start that takes long and ends well is told once, and so is its end; from then on steps count."""
    said: list[str] = []
    clock = Clock()
    hangs = shipped(monkeypatch, said, clock)
    args, progress = Namespace(timeout=300, epochs=1), {"step": 0}
    hangs.watch_start(args)
    clock.forward(seconds)
    hangs.watch(args, progress, 0, ["node0"])
    for _ in range(40):  # seconds: what waits for a step looks every 5
        progress["step"] += 1
        clock.forward(1)
    began = [line for line in said if line.startswith("training has not begun after 24")]
    assert len(began) == lines and len(said) == 2 * lines, said
    assert not lines or (said[1].startswith("training begins after ") and "gloo:all_reduce number 7" in said[0])


def test_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that trains nothing, torchrun_vision's predict.py, it is not said that training has not begun."""
    said: list[str] = []
    clock = Clock()
    hangs = shipped(monkeypatch, said, clock)
    hangs.watch_start(Namespace(timeout=300))
    clock.forward(300)
    assert said == []
