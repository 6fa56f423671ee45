"""The same experiment across real sites, with Flower as the network.

`server_app` and `client_app` make a Flower app of an experiment; `WithWarmup` and `LocalWarmup` bring the warmup to
an app that has its own training loop. Only this room imports ``flwr`` (the extra ``[flower]``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedpews.errors import need_extra

if TYPE_CHECKING:
    from fedpews.flower.adopt.client import LocalWarmup
    from fedpews.flower.adopt.strategy import WithWarmup
    from fedpews.flower.app import client_app, server_app

_HOMES = {
    "LocalWarmup": "adopt.client",
    "WithWarmup": "adopt.strategy",
    "client_app": "app",
    "server_app": "app",
}

__all__ = ["LocalWarmup", "WithWarmup", "client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: a site starts a process per message, so none of them may load too much."""
    if name in _HOMES:
        need_extra("flower", "flwr", f"fedpews.flower.{name}")
        return getattr(import_module(f"fedpews.flower.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedpews.flower' has no attribute {name!r}")
