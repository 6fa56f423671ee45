"""How the ranks of one attempt find each other, and nobody who is gone.

torchrun's store outlives a restart, with the addresses of processes that are dead (pytorch/pytorch#135712), and agents
on several machines need not agree on how many restarts there were. So the first rank names each attempt, and what is
written to find each other stands under that name.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

# documented, but not marked as exported
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from fedpews.errors import RankLost
from fedpews.ranks.place import Place

ROOM = "fedpews"
"""Before all our keys in the store."""

PAUSE = 0.05
"""Seconds between two looks at who has come."""


def meet(place: Place, patience: timedelta) -> tuple[Store, bool]:
    """A store for this attempt alone, once all ranks are here, and whether there was one before it."""
    store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=patience))
    return meet_at(PrefixStore(ROOM, store), place, patience)


def meet_at(store: Store, place: Place, patience: timedelta) -> tuple[Store, bool]:
    """The same, at a store that all ranks have."""
    name = uuid4().hex
    if place.rank > 0:
        # nobody can have answered to a name that is new
        store.set(f"came/{place.rank}", name)
        store.wait([f"attempt/{name}"], patience)
        name = store.get(f"attempt/{name}").decode()
        store.set(f"{name}/{place.rank}", "here")
        return PrefixStore(name, store), place.restarts > 0
    again = store.add("attempts", 1) > 1
    missing = set(range(1, place.world))
    until = time.monotonic() + patience.total_seconds()
    while missing and time.monotonic() < until:
        for rank in sorted(missing):
            # this may be the name of a dead one, who will not answer; the living one overwrites it
            if store.check([f"came/{rank}"]):
                store.set(f"attempt/{store.get(f'came/{rank}').decode()}", name)
            if store.check([f"{name}/{rank}"]):
                missing.remove(rank)
        time.sleep(PAUSE)
    if missing:
        raise RankLost(f"of {place.world} ranks, {sorted(missing)} did not come within {patience}")
    return PrefixStore(name, store), again or place.restarts > 0
