"""The data room: named sources, combinations of them, your own data, and every way to assign it to clients.

`load` is the way in by name, `from_clients` for data already in Python; both end in a `Federation`. Names are
imported when they are first used, so listing the catalogue and the partitions does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.data.catalogue import SOURCES, Source
    from fedpews.data.federation import Federation, build, from_clients
    from fedpews.data.loading import load
    from fedpews.data.partition import PARTITIONS
    from fedpews.data.store import Status, get, status

_HOMES = {
    "PARTITIONS": "partition",
    "SOURCES": "catalogue",
    "Federation": "federation",
    "Source": "catalogue",
    "Status": "store",
    "build": "federation",
    "from_clients": "federation",
    "get": "store",
    "load": "loading",
    "status": "store",
}

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Federation",
    "Source",
    "Status",
    "build",
    "from_clients",
    "get",
    "load",
    "status",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"fedpews.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedpews.data' has no attribute {name!r}")
