"""The ranks of a run: who there is, and messages between the first, which leads, and the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fedpews.errors import (
    CheckpointError,
    ConfigError,
    DataMissing,
    FedpewsError,
    RankLost,
    RunFailed,
    first_line,
)
from fedpews.ranks.meeting import meet
from fedpews.ranks.packing import Message, pack, unpack
from fedpews.ranks.place import Place

LEADER = 0
"""The rank that runs the server and writes the folder."""

ERROR = "error"

PATIENCE = timedelta(hours=6)
"""How long a silent rank is waited for. A dead process is noticed at once; this is for a cable that was cut."""


@dataclass
class Group:
    """All ranks of a run, seen from one of them."""

    place: Place
    device: torch.device
    again: bool = False
    """Whether torchrun started all ranks anew, because one had died."""
    lost: list[int] = field(default_factory=list)
    """Ranks that are gone: nothing can be sent to them or expected of them any more."""

    @property
    def others(self) -> range:
        """All ranks but the first."""
        return range(1, self.place.world)

    def send(self, rank: int, message: Message) -> None:
        body = pack(message, self.device)
        self._do(rank, dist.send, torch.tensor([body.numel()], device=self.device))
        self._do(rank, dist.send, body)

    def receive(self, rank: int) -> Message:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._do(rank, dist.recv, size)
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._do(rank, dist.recv, body)
        return unpack(body)

    def answer(self, rank: int) -> Message:
        """What a rank says to what it was asked; if it failed, its error is raised here."""
        message = self.receive(rank)
        if message.kind == ERROR:
            raise read_error(message, rank)
        return message

    def _do(self, rank: int, action: Callable[[torch.Tensor, int], Any], tensor: torch.Tensor) -> None:
        try:
            action(tensor, rank)
        except RuntimeError as error:
            # torch has no kind of its own for a connection that broke
            self.lost.append(rank)
            raise RankLost(
                f"rank {rank} of {self.place.world} is gone (killed, or its machine is down); go on with the same "
                "command and --resume, with any number of ranks"
            ) from error


def error_message(error: BaseException) -> Message:
    """What went wrong at a rank, for the one that prints it."""
    if isinstance(error, FedpewsError):
        return Message(ERROR, {"code": error.exit_code, "text": str(error)})
    return Message(ERROR, {"code": RunFailed.exit_code, "text": first_line(error)})


def read_error(message: Message, rank: int) -> FedpewsError:
    """The inverse of ``error_message``: an error that ends the command with the same code."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataMissing, CheckpointError, RunFailed)}
    return kinds.get(message.about["code"], RunFailed)(f"rank {rank}: {message.about['text']}")


@contextmanager
def joined(place: Place, device: torch.device) -> Iterator[Group]:
    """All ranks, once every one of them is here."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, again = meet(place, PATIENCE)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=PATIENCE,
    )
    group = Group(place, device, again)
    yield group
    # after an error the others may never answer, and to take leave would be to wait for them
    dist.destroy_process_group()


def device_name(wanted: str, place: Place) -> str:
    """Where this rank's tensors live: every rank of a machine has a GPU of its own."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    if wanted != "cuda":
        raise ConfigError(
            f"runtime.device is {wanted!r}, but {place.local_world} ranks run on this machine and each needs its "
            "own; say cuda (a GPU for each rank), cpu or auto"
        )
    if place.local_world > torch.cuda.device_count():
        raise ConfigError(
            f"{place.local_world} ranks run on this machine, which has {torch.cuda.device_count()} GPUs; "
            "start at most one rank for each (--nproc-per-node), or set runtime.device=cpu"
        )
    return f"cuda:{place.local_rank}"
