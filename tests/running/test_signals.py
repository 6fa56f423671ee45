"""Signals: which ones finish a round and save, and what a second one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpews
from fedpews.callbacks import stop_signal
from fedpews.engines.compiled.cache import remove_abandoned, run_apart, scratch_folder
from fedpews.errors import Interrupted
from fedpews.results.checkpoint import newest
from waiting import when

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


NOTHING = fedpews.Callback()


def run(out: Path, watcher: fedpews.Callback = NOTHING, resume: bool = False, **more: Any) -> fedpews.Result:
    given: dict[str, Any] = {"rounds": 8, "train": {"steps": 2}, "runtime": {"engine": "eager"}}
    clients = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    return fedpews.run(
        clients=clients,
        test=(X, Y),
        method="fedavg",
        out=out,
        callbacks=[watcher],
        resume=resume,
        **given | more,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_of_them_finishes_the_round_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    def kill(records: Sequence[dict[str, Any]]) -> None:
        if records[0]["round"] == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="stopped after round 3 of 8; saved as of round 3"):
        run(tmp_path, fedpews.Callback(round=kill))
    found = newest(tmp_path)
    assert found is not None
    assert found.round == 3
    assert len(run(tmp_path, resume=True).rounds) == 8


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_stops_at_once_and_says_where_the_run_goes_on(tmp_path: Path) -> None:
    """Two signals come while the clients of a long round train."""
    heard: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def kill_twice() -> None:
        when(lambda: signal.getsignal(signal.SIGINT) is not before)
        os.kill(os.getpid(), signal.SIGINT)
        when(lambda: heard)
        os.kill(os.getpid(), signal.SIGINT)

    passes: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(1)
            return super().forward(x)

    killer = threading.Thread(target=kill_twice)
    watcher = fedpews.Callback(
        begin=lambda *_: killer.start(), stopping=lambda: heard.append("finishing this round")
    )
    with pytest.raises(Interrupted, match="stopped at once; nothing was saved yet"):
        run(tmp_path, watcher, model=lambda: Counting(5, 2), train={"steps": 10**5, "batch_size": 4})
    killer.join()
    assert heard == ["finishing this round"]
    assert len(passes) < 10**5


def test_a_command_run_apart_has_a_process_group_of_its_own() -> None:
    code = "import os; print(os.getpgid(0) == os.getpid())"
    assert run_apart([sys.executable, "-c", code]).stdout.strip() == "True"


def test_whoever_stops_at_once_leaves_no_compiler_behind(tmp_path: Path) -> None:
    """The command starts another one, as a compiler does."""
    file = tmp_path / "number"
    script = f"sleep 1000 & echo $! > {file}; wait"

    def kill() -> None:
        when(lambda: file.exists() and file.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        run_apart(["sh", "-c", script])
    killer.join()
    command = ["ps", "-o", "stat=", "-p", file.read_text().strip()]

    def is_gone() -> bool:
        state = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return not state or state.startswith("Z")

    when(is_gone)


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
        # of another machine, long ago; the clock of this one may have jumped
        os.utime(other, (0, 0))
        os.utime(mine, (0, 0))
        remove_abandoned(tmp_path)
        assert list(tmp_path.iterdir()) == [mine]
