"""Where clients' memories are: at the rank that trains them, and with every checkpoint in the run's folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedpews.errors import RankLost
from fedpews.ranks.group import LEADER, Group
from fedpews.ranks.packing import Message
from fedpews.ranks.share import Key, Share
from fedpews.results.memories import MemoryStore, Version
from fedpews.trees import Nest

COLLECTED = 32
"""Memories that a rank hands over in one message."""


class RankMemories:
    """The leader's view of all memories, for checkpoints.

    A client with a memory stays at its rank, so the memory does not travel. When the run is saved, those that changed
    are handed to the leader, which writes them as it would alone: a run goes on with any number of ranks, or one.
    A rank that dies takes with it what its clients learned since, so such a run goes on from that checkpoint.
    """

    def __init__(self, group: Group, saved: MemoryStore) -> None:
        self._group, self._saved = group, saved
        self.share: Share | None = None
        """The leader's own share of the work."""
        self._homes: dict[Key, int] = {}
        self._changed: dict[Key, None] = {}  # since the last checkpoint; an ordered set

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._saved.restore(saved)

    def get(self, seed: int, client: int) -> Nest | None:
        """Nothing: whoever trains the client has it."""
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Nothing to do: it was kept where the client was trained."""

    def home(self, key: Key) -> int | None:
        """The rank that has a client's memory; None if the client may go to any."""
        return self._homes.get(key)

    def saved(self, key: Key) -> Nest | None:
        """The memory of a client that has no rank yet, from the checkpoint that the run goes on from."""
        return None if key in self._homes else self._saved.get(*key)

    def settle(self, key: Key, rank: int) -> None:
        """The client's memory is at a rank from now on."""
        self._homes[key] = rank

    def changed(self, key: Key, rank: int, keeps: bool) -> None:
        """A round is complete in which this client was trained; ``keeps`` says whether it has a memory."""
        if keeps or key in self._homes:
            self._homes[key] = rank
            self._changed[key] = None

    def commit(self) -> dict[str, Version]:
        """Collect what changed, and write it."""
        # whatever a rank still had to say of its clients is unknown now, also where it was only asked to evaluate them
        if self._homes and self._group.lost:
            raise RankLost(
                f"rank {self._group.lost[0]} of {self._group.place.world} is gone, and the memories of its clients "
                "with it; go on from the last checkpoint with the same command and --resume, with any number of ranks"
            )
        for rank in range(self._group.place.world):
            here = [key for key in self._changed if self._homes[key] == rank]
            for first in range(0, len(here), COLLECTED):
                self._collect(rank, here[first : first + COLLECTED])
        self._changed = {}
        return self._saved.commit()

    def keep(self, files: Collection[str]) -> None:
        self._saved.keep(files)

    def _collect(self, rank: int, keys: Sequence[Key]) -> None:
        if rank == LEADER:
            assert self.share is not None
            held = self.share.recall(keys).tensors
        else:
            self._group.send(rank, Message("memories", {"clients": list(keys)}))
            held = self._group.answer(rank).tensors
        for key in keys:
            self._saved.put(*key, held[f"{key[0]}-{key[1]}"])
