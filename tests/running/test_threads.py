"""Two runs in threads of one process: each gives the numbers that it gives alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import fedpews
from fedpews import seeds
from fedpews.trees import Tree

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Meeting:
    """Where threads wait for each other between draws, so that their draws mix; and a lock.

    Nobody waits any more once the lock has kept a thread from coming.
    """

    def __init__(self, threads: int) -> None:
        self._barrier, self._lock = threading.Barrier(threads, timeout=60), threading.RLock()

    def wait(self) -> None:
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._barrier.abort()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def run(model: Callable[[], nn.Module], seed: int) -> Tree:
    return fedpews.run(
        model=model,
        method="fedavg",
        clients=[(X[:20], Y[:20]), (X[20:], Y[20:])],
        test=(X, Y),
        rounds=1,
        seeds=(seed,),
        train={"steps": 2},
        runtime={"engine": "eager"},
    ).params[seed]


def drawn_in_two_steps(meeting: Meeting) -> nn.Module:
    first = nn.Linear(5, 8)
    meeting.wait()
    second = nn.Linear(8, 2)
    meeting.wait()
    return nn.Sequential(first, nn.ReLU(), second)


def with_dropout(meeting: Meeting) -> nn.Module:
    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled() and threading.current_thread().name.startswith("client"):
                meeting.wait()
            return x

    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(), Waiting(), nn.Dropout(), nn.Linear(8, 2))


@pytest.mark.parametrize("make", [drawn_in_two_steps, with_dropout])
def test_runs_in_two_threads_give_the_numbers_of_each_alone(
    make: Callable[[Meeting], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [run(lambda: make(Meeting(1)), seed) for seed in (0, 1)]
    both = Meeting(2)
    monkeypatch.setattr(seeds, "_GENERATOR", both)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: run(lambda: make(both), seed), (0, 1)))
    for one, other in zip(alone, together, strict=True):
        for name, value in one.items():
            assert torch.equal(other[name], value), name
