"""Signals: which ones finish a round and save, and what a second one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedpews
from fedpews.engines.compiled.apart import remove_abandoned, run_apart, scratch_folder
from fedpews.errors import Interrupted
from fedpews.results.checkpoints import newest
from fedpews.stopping import stop_signal
from fedpews.studies.plan import plan
from fedpews.studies.study import load_study

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def run(
    out: Path, watcher: fedpews.Watcher | None = None, resume: bool = False, **more: Any
) -> fedpews.Result:
    given: dict[str, Any] = {"rounds": 8, "train": {"steps": 2}, "runtime": {"engine": "eager"}}
    clients = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    return fedpews.run(
        clients=clients, test=(X, Y), method="fedavg", out=out, watcher=watcher, resume=resume, **given | more
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_of_them_finishes_the_round_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    def kill(records: Sequence[dict[str, Any]]) -> None:
        if records[0]["round"] == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped after round 3 of 8; saved as of round 3"):
        run(tmp_path, fedpews.Watcher(round=kill))
    found = newest(tmp_path)
    assert found is not None
    assert found.round == 3
    assert len(run(tmp_path, resume=True).rounds) == 8


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signal(lambda: None) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_stops_at_once_and_says_where_the_run_goes_on(tmp_path: Path) -> None:
    """The round that is under way would take minutes: two signals come while its clients train."""
    heard: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def kill_twice() -> None:
        while signal.getsignal(signal.SIGINT) is before:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        while not heard:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=kill_twice)
    began = time.monotonic()
    watcher = fedpews.Watcher(
        begin=lambda *_: killer.start(), stopping=lambda: heard.append("finishing this round")
    )
    with pytest.raises(Interrupted, match="stopped at once; nothing was saved yet"):
        run(tmp_path, watcher, train={"steps": 10**5, "batch_size": 4})
    killer.join()
    assert heard == ["finishing this round"]
    # not an assertion of speed: a round of this length takes a hundred times as long
    assert time.monotonic() - began < 60


def test_a_plan_that_is_told_to_stop_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*_: Any) -> None:
        raise Interrupted("stopped after round 1 of 6")

    monkeypatch.setattr("fedpews.studies.plan.round_seconds", told)
    study = load_study("table1")
    with pytest.raises(Interrupted):
        list(plan(study, tmp_path))


def test_a_command_run_apart_has_a_process_group_of_its_own() -> None:
    code = "import os; print(os.getpgid(0) == os.getpid())"
    assert run_apart([sys.executable, "-c", code]).stdout.strip() == "True"


def test_whoever_stops_at_once_leaves_no_compiler_behind(tmp_path: Path) -> None:
    """The command starts another one, as a compiler does."""
    file = tmp_path / "number"
    script = f"sleep 1000 & echo $! > {file}; wait"
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_apart(["sh", "-c", script])
    number = int(file.read_text())
    for _ in range(100):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True
        ).stdout
        if not state or state.startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError("what the compiler started is still running")


def test_the_folder_of_a_killed_build_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    with scratch_folder(tmp_path) as mine:
        dead = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{done.pid}-")
        dead.mkdir()
        (dead / "model.cpp").write_text("")
        other = tmp_path / "building-elsewhere-1-abc"
        other.mkdir()
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, other.name])
        # of another machine, long ago
        os.utime(other, (0, 0))
        remove_abandoned(tmp_path)
        assert list(tmp_path.iterdir()) == [mine]
