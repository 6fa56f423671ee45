"""Ranks as threads of one process: the same messages, packed and unpacked, without the seconds that processes take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fedpews.errors import RankLost
from fedpews.experiment import Experiment
from fedpews.ranks.group import Group, Message, pack, unpack
from fedpews.ranks.rank import Rank
from fedpews.ranks.running import lead, serve
from fedpews.result import Result

GONE = torch.zeros(0, dtype=torch.uint8)


class Cables:
    """A queue of bytes from every rank to every other."""

    def __init__(self, world: int) -> None:
        ranks = range(world)
        self.queues: dict[tuple[int, int], SimpleQueue[Tensor]] = {
            (a, b): SimpleQueue() for a in ranks for b in ranks
        }
        self.kinds: list[tuple[int, int, str, int]] = []
        """(from, to, kind, bytes) of all that was sent."""


class ThreadGroup(Group):
    """A rank that talks to the others through queues."""

    def __init__(self, here: Rank, cables: Cables, dies_in: int | None = None) -> None:
        super().__init__(here, torch.device("cpu"))
        self.cables, self.dies_in = cables, dies_in

    def send(self, rank: int, message: Message) -> None:
        data = pack(message, self.device)
        self.cables.kinds.append((self.here.rank, rank, message.kind, data.numel()))
        self.cables.queues[self.here.rank, rank].put(data)

    def receive(self, rank: int) -> Message:
        data = self.cables.queues[rank, self.here.rank].get()
        if not data.numel():
            self.lost.append(rank)
            raise RankLost(f"rank {rank} is gone")
        message = unpack(data)
        if message.kind == "train" and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in == 0:
                raise RankLost("killed")
        return message


def run_over(
    world: int,
    experiment: Experiment | Callable[[int], Experiment],
    out: Path,
    *,
    resume: bool = False,
    dies_in: int | None = None,
    **more: Any,
) -> tuple[Result, Cables]:
    """A run over so many ranks.

    Args:
        experiment: the same for all, or one for each rank.
        dies_in: the last rank dies in this round, as a killed process would.
    """
    cables = Cables(world)
    one = experiment if callable(experiment) else lambda rank: experiment

    def follow(rank: int) -> None:
        dies = dies_in if rank == world - 1 else None
        try:
            serve(ThreadGroup(Rank(rank, world, rank, world), cables, dies), one(rank), None)
        except RankLost:
            # what the system does with the connections of a process that ended
            cables.queues[rank, 0].put(GONE)

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, world)]
    group = ThreadGroup(Rank(0, world, 0, world), cables)
    for thread in threads:
        thread.start()
    try:
        result = lead(group, one(0), out=out, resume=resume, **more)
    finally:
        for rank in group.others:
            cables.queues[0, rank].put(GONE)
        for thread in threads:
            thread.join()
    return result, cables
