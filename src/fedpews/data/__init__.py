"""Named data sets, combinations of them, your own data, and every way to assign samples to clients.

`load` takes a name, `from_clients` data in Python; both return a `Federation`. Names are imported when they are first
used, so that the catalogue and the partitions are listed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpews.data.catalogue import SOURCES as SOURCES
    from fedpews.data.catalogue import get as get
    from fedpews.data.catalogue import status as status
    from fedpews.data.federation import Federation as Federation
    from fedpews.data.federation import build as build
    from fedpews.data.federation import from_clients as from_clients
    from fedpews.data.loading import load as load
    from fedpews.data.partition import PARTITIONS as PARTITIONS

_MODULES = {
    "PARTITIONS": "partition",
    "SOURCES": "catalogue",
    "Federation": "federation",
    "build": "federation",
    "from_clients": "federation",
    "get": "catalogue",
    "load": "loading",
    "status": "catalogue",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"fedpews.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fedpews.data' has no attribute {name!r}")
