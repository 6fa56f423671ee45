"""The rank of this process among those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fedpews.errors import ConfigError


@dataclass(frozen=True)
class Rank:
    """A rank among all, and among those of its machine.

    >>> environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    >>> Rank.here(environment | {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"})
    Rank(rank=3, world=4, local_rank=1, local_world=2, restarts=0)
    """

    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0
    """How many times torchrun restarted all ranks, because one of them had died."""

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self.world > 1

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Rank | None:
        """The rank that torchrun sets in the environment; None for a process that torchrun did not start."""
        environment = os.environ if environment is None else environment
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        given = {name: environment.get(name, "1" if name == "LOCAL_WORLD_SIZE" else "0") for name in names}
        try:
            return cls(*(int(given[name]) for name in names))
        except ValueError as error:
            raise ConfigError(
                f"the environment variables of torchrun must be whole numbers: {given}"
            ) from error
