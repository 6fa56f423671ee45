"""Which of the processes that torchrun started this one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fedpews.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank among all, and among those of its machine.

    >>> told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    >>> Place.here(told | {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"})
    Place(rank=3, world=4, local_rank=1, local_world=2, restarts=0)
    """

    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    restarts: int = 0
    """How often torchrun says that it started all ranks anew, because one of them had died."""

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self.world > 1

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Place | None:
        """What torchrun says in the environment; None for a process that it did not start."""
        told = os.environ if environment is None else environment
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= told.keys():
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        given = {name: told.get(name, "1" if name == "LOCAL_WORLD_SIZE" else "0") for name in names}
        try:
            return cls(*(int(given[name]) for name in names))
        except ValueError as error:
            raise ConfigError(
                f"the environment says which rank this is, but not in whole numbers: {given}"
            ) from error
