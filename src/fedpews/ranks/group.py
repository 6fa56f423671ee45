"""The ranks of a run, and messages between the first, which leads, and the others.

torchrun's store outlives a restart, with the addresses of processes that are dead (pytorch/pytorch#135712), and agents
on several machines need not agree on the number of restarts. So the first rank names each attempt, and the keys of an
attempt begin with its name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from fedpews.errors import (
    CheckpointError,
    ConfigError,
    DataMissing,
    FedpewsError,
    RankLost,
    RunFailed,
    first_line,
)
from fedpews.ranks.rank import Rank

TENSOR = "$tensor"
"""In the JSON of a message: the key of the tensor that belongs there."""


@dataclass(frozen=True)
class Message:
    """JSON values, tensors and dataclasses of both, in nested dicts and lists; a dataclass arrives as a dict.

    >>> unpack(pack(Message("train", {"lr": 0.1, "x": {"w": torch.ones(2)}}), torch.device("cpu")))
    Message(kind='train', body={'lr': 0.1, 'x': {'w': tensor([1., 1.])}})
    """

    kind: str
    body: dict[str, Any] = field(default_factory=dict)


def pack(message: Message, device: torch.device) -> Tensor:
    """(bytes,) uint8: a safetensors file. A tensor that occurs several times is sent once."""
    tensors: dict[str, Tensor] = {}

    def encode(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return vars(value)
        # one model for all clients is one tensor in all their downloads
        key = str(id(value))
        if key not in tensors:
            tensors[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {TENSOR: key}

    body = json.dumps(message.body, default=encode)
    data = save(tensors, {"kind": message.kind, "body": body})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def unpack(data: Tensor) -> Message:
    """The inverse of ``pack``; the tensors are on the device of the bytes."""
    content = bytes(data.cpu().numpy())
    # the format: the length of a JSON header in eight bytes, then the header
    about = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    tensors = {key: value.to(data.device) for key, value in load(content).items()}

    def decode(value: dict[str, Any]) -> Any:
        return tensors[value[TENSOR]] if TENSOR in value else value

    return Message(about["kind"], json.loads(about["body"], object_hook=decode))


PAUSE = 0.05
"""Seconds between two checks for ranks that have joined."""


def meet(store: Store, here: Rank, patience: timedelta) -> tuple[Store, bool]:
    """A store for this attempt alone, once all ranks have joined, and whether there was an attempt before it."""
    name = uuid4().hex
    if here.rank > 0:
        # a new name, to which no rank can have answered yet
        store.set(f"came/{here.rank}", name)
        store.wait([f"attempt/{name}"], patience)
        name = store.get(f"attempt/{name}").decode()
        store.set(f"{name}/{here.rank}", "here")
        return PrefixStore(name, store), here.restarts > 0
    again = store.add("attempts", 1) > 1
    missing = set(range(1, here.world))
    until = time.monotonic() + patience.total_seconds()
    while missing and time.monotonic() < until:
        for rank in sorted(missing):
            # this may be the name of a dead process, which will not answer; the living one overwrites it
            if store.check([f"came/{rank}"]):
                store.set(f"attempt/{store.get(f'came/{rank}').decode()}", name)
            if store.check([f"{name}/{rank}"]):
                missing.remove(rank)
        time.sleep(PAUSE)
    if missing:
        raise RankLost(f"of {here.world} ranks, {sorted(missing)} did not join within {patience}")
    return PrefixStore(name, store), again or here.restarts > 0


LEADER = 0
"""The rank that runs the server and writes the folder."""

ERROR = "error"

PATIENCE = timedelta(hours=6)
"""The longest wait for a silent rank. A dead process is noticed at once; this is for a broken network."""


@dataclass
class Group:
    """All ranks of a run, seen from rank ``here``."""

    here: Rank
    device: torch.device
    again: bool = False
    """Whether torchrun restarted all ranks, because one had died."""
    lost: list[int] = field(default_factory=list)
    """Ranks that are gone: nothing can be sent to them or received from them."""

    @property
    def others(self) -> range:
        """All ranks but the first."""
        return range(1, self.here.world)

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
        """A rank's answer to a request; if the rank failed, its error is raised here."""
        message = self.receive(rank)
        if message.kind == ERROR:
            raise read_error(message, rank)
        return message

    def _do(self, rank: int, action: Callable[[torch.Tensor, int], Any], tensor: torch.Tensor) -> None:
        try:
            action(tensor, rank)
        except RuntimeError as error:
            # torch has no exception of its own for a broken connection
            self.lost.append(rank)
            raise RankLost(
                f"rank {rank} of {self.here.world} is gone (killed, or its machine is down); continue with the same "
                "command and --resume, with any number of ranks"
            ) from error


def error_message(error: BaseException) -> Message:
    """The error of a rank, for the first rank, which prints it."""
    if isinstance(error, FedpewsError):
        return Message(ERROR, {"code": error.exit_code, "text": str(error)})
    return Message(ERROR, {"code": RunFailed.exit_code, "text": first_line(error)})


def read_error(message: Message, rank: int) -> FedpewsError:
    """The inverse of ``error_message``: an error that ends the command with the same code."""
    kinds = {kind.exit_code: kind for kind in (ConfigError, DataMissing, CheckpointError, RunFailed)}
    return kinds.get(message.body["code"], RunFailed)(f"rank {rank}: {message.body['text']}")


@contextmanager
def joined(here: Rank, device: torch.device) -> Iterator[Group]:
    """All ranks, once each of them has joined."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    common, _, _ = next(rendezvous("env://", here.rank, here.world, timeout=PATIENCE))
    store, again = meet(PrefixStore("fedpews", common), here, PATIENCE)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=here.rank,
        world_size=here.world,
        timeout=PATIENCE,
    )
    yield Group(here, device, again)
    # not after an error: it would wait for the others, which may never answer
    dist.destroy_process_group()


def device_name(wanted: str, here: Rank) -> str:
    """The device of this rank: each rank of a machine has its own GPU."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return wanted
    if wanted != "cuda":
        raise ConfigError(
            f"runtime.device is {wanted!r}, but {here.local_world} ranks run on this machine and each needs its "
            "own; set cuda (a GPU for each rank), cpu or auto"
        )
    if here.local_world > torch.cuda.device_count():
        raise ConfigError(
            f"{here.local_world} ranks run on this machine, which has {torch.cuda.device_count()} GPUs; "
            "start at most one rank for each (--nproc-per-node), or set runtime.device=cpu"
        )
    return f"cuda:{here.local_rank}"
