"""Python's collector of reference cycles, kept from searching what a run does not change."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """While this lasts, objects that are there now are not searched for cycles.

    torch and the libraries around it make up a million of them. A search takes a fifth of a second, as long as several
    rounds of small clients, and rounds make enough objects of their own to cause one every few rounds.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # whoever froze objects before us wants them to stay so
        if not was_frozen:
            gc.unfreeze()
