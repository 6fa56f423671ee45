"""The same experiment across real sites, with Flower as the network.

`server_app` and `client_app` make a Flower app of an experiment; `WithWarmup` and `LocalWarmup` bring the warmup to
an app that has its own training loop. Only this package imports ``flwr`` (the extra ``[flower]``); what it uses beyond
flwr's documented API is in ``flwr_private.py``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, need_extra

if TYPE_CHECKING:
    from fedpews.flower.app import client_app, server_app
    from fedpews.flower.local_warmup import LocalWarmup
    from fedpews.flower.with_warmup import WithWarmup

_HOMES = {
    "LocalWarmup": "local_warmup",
    "WithWarmup": "with_warmup",
    "client_app": "app",
    "server_app": "app",
}

SUPPORTED = ("1.41", "1.42")
"""The versions of flwr that tests/flower passed with."""

__all__ = ["LocalWarmup", "WithWarmup", "client_app", "server_app"]


def check_flwr(purpose: str) -> None:
    """Refuse a flwr that is missing or was never tried, before any of its undocumented functions is imported."""
    need_extra("flower", "flwr", purpose)
    installed = version("flwr")
    if ".".join(installed.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(
            f"{purpose} needs flwr {' or '.join(SUPPORTED)}, and {installed} is installed: "
            "pip install 'fedpews[flower]'"
        )


def __getattr__(name: str) -> Any:
    """Import what is asked for: a site starts a process per message, so none of them may load too much."""
    if name in _HOMES:
        check_flwr(f"fedpews.flower.{name}")
        return getattr(import_module(f"fedpews.flower.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fedpews.flower' has no attribute {name!r}")
