"""The data room: named sources, combinations of them, your own data, and every way to deal it to clients.

`load` is the one way in by name; `from_clients` is the one for data already in Python. The catalogue and the
partitions can be listed without importing torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.data.catalogue import SOURCES, Source
    from fedpews.data.federation import Federation, build, from_clients
    from fedpews.data.partition import PARTITIONS

__all__ = ["PARTITIONS", "SOURCES", "Federation", "Source", "build", "from_clients", "load"]

_HOMES = {
    "PARTITIONS": "partition",
    "SOURCES": "catalogue",
    "Federation": "federation",
    "Source": "catalogue",
    "build": "federation",
    "from_clients": "federation",
}


def load(
    name: str,
    *,
    partition: str | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    data_dir: Path | str | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    classes_per_client: int | None = None,
    class_lists: Sequence[Sequence[int]] | None = None,
) -> Federation:
    """A data set by name, dealt to clients.

    >>> data = load("synthetic-3.2k", partition="parity")
    >>> data.counts().tolist()
    [[800, 0, 800, 0], [0, 800, 0, 800]]
    """
    from fedpews.data import pool

    samples = pool.load(name, seed, data_dir, train_per_class, test_per_class)
    return pool.deal(samples, partition, clients, alpha, seed, classes_per_client, class_lists)


def __getattr__(name: str) -> Any:
    """Import a public name's home when it is first asked for, so listing names stays quick."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"fedpews.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedpews.data' has no attribute {name!r}")
