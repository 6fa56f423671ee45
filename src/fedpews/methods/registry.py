"""Methods and server optimisers by name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from fedpews.errors import ConfigError
from fedpews.methods.contract import Method
from fedpews.methods.options import check, nearest
from fedpews.methods.server import SGD, ServerOptimizer
from fedpews.own_code import load_module

METHODS: dict[str, str] = {
    "fedavg": "fedpews.methods.fedavg:FedAvg",
    "fedprox": "fedpews.methods.fedprox:FedProx",
    "scaffold": "fedpews.methods.scaffold:Scaffold",
    "fednova": "fedpews.methods.fednova:FedNova",
    "moon": "fedpews.methods.moon:Moon",
    "ist": "fedpews.methods.ist:IST",
    "fedpm": "fedpews.methods.fedpm:FedPM",
    "lotteryfl": "fedpews.methods.lotteryfl:LotteryFL",
    "fedweit": "fedpews.methods.fedweit:FedWeIT",
    "fjord": "fedpews.methods.fjord:FjORD",
    "heterofl": "fedpews.methods.heterofl:HeteroFL",
    "fedrolex": "fedpews.methods.fedrolex:FedRolex",
}
"""Name -> where its class is; nothing is imported before it is asked for. Add your own, or name it
``module:Class`` or ``path/to/file.py:Class`` wherever a method's name is expected."""

SERVERS: dict[str, str] = {
    "fedavgm": "fedpews.methods.server:Momentum",
    "fedadagrad": "fedpews.methods.server:Adagrad",
    "fedyogi": "fedpews.methods.server:Yogi",
    "fedadam": "fedpews.methods.server:Adam",
}
"""Server optimisers, for every method that has a ``server``."""


def make(name: str, server: ServerOptimizer | None = None, **options: Any) -> Method:
    """A method by its name, with its options checked.

    >>> make("fedprox", mu=0.1).mu
    0.1
    """
    cls = method_class(name)
    checked = check(cls, options, name)
    if server is not None and takes_server(name):
        checked["server"] = server
    elif server is not None and server != SGD():
        raise ConfigError(f"{name} does not average at the server, so it takes no server optimiser or rate.")
    method: Method = cls(**checked)
    return method


def make_server(name: str | None = None, **options: Any) -> ServerOptimizer:
    """A server optimiser by its name; without one, the plain server step with its rate ``lr``.

    >>> make_server("fedadam", lr=0.01).lr
    0.01
    """
    cls = SGD if name is None else _find(name, SERVERS, "server optimiser")
    server: ServerOptimizer = cls(**check(cls, options, name or "the server", "server"))
    return server


def method_class(name: str) -> type[Any]:
    """The class behind a method's name, or behind ``module:Class``."""
    return _find(name, METHODS, "method")


def takes_server(name: str) -> bool:
    """Whether server optimisers go with the method."""
    return any(field.name == "server" for field in dataclasses.fields(method_class(name)))


def takes_warmup(name: str) -> bool:
    """Whether the warmup goes with the method: it must train the whole network with no masks of its own."""
    return bool(method_class(name).takes_warmup)


def describe(name: str) -> str:
    """One line about a method or a server optimiser, from its docstring."""
    cls = _find(name, METHODS | SERVERS, "method")
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def _find(name: str, places: dict[str, str], what: str) -> type[Any]:
    place = places.get(name, name)
    module, colon, attribute = place.rpartition(":")
    if not colon:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, places)}")
    try:
        cls = getattr(load_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the {what} {name!r} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"the {what} {name!r} must be a dataclass, so that its options are known.")
    return cls
