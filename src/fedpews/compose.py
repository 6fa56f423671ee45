"""From a name such as ``scaffold+fedadam+pews`` to a method: only this module parses such names.

A name is a base method, then in any order a server optimiser, a warmup and a way to give clients models of their
own (``fedbn``, ``ditto``), joined by ``+``; without a base it is FedAvg. Classes are registered where they are defined,
and imported when they are used, so that a list of names does not wait for torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedpews.errors import ConfigError, first_line, nearest
from fedpews.options import Options, make, option_types
from fedpews.registry import Kind, registered
from fedpews.user_code import load_module

if TYPE_CHECKING:
    from fedpews.methods.contract import Method
    from fedpews.methods.optimizers import Optimizer
    from fedpews.methods.server_optimizers import ServerOptimizer

METHODS = registered("method")
"""Base methods. Add your own, or name it ``module:Class`` or ``path/to/file.py:Class`` wherever a method is named."""

SERVERS = registered("server")
"""Server optimisers, for every method that has a ``server``."""

OPTIMIZERS = registered("optimizer")
"""Local optimisers, for every method that has an ``optimizer``: the rules that the server's are made of."""

PERSONAL = registered("personal")
"""What gives each client a model of its own, around a method and its warmup."""

MASKS = registered("masks")
"""The masks of a warmup, by its kind: what decides which neurons a client owns."""

WARMUPS = {"pews" if kind == "learned" else f"pews-{kind}": kind for kind in MASKS}
"""The suffixes of a name that ask for a warmup, and its kind."""

if TYPE_CHECKING:
    WarmupKind = str
else:
    WarmupKind = Literal[("none", *MASKS)]

TRAIN_KEYS = ("momentum", "weight_decay", "clip_norm")
"""Options of most methods that a configuration has under ``train``."""

METHOD_KEYS = (
    *(f"train.{key}" for key in TRAIN_KEYS), "train.optimizer", "train.server_lr", "optimizer", "server", "warmup",
)  # fmt: skip
"""The keys and tables of a configuration that a method is made with."""


@dataclass(frozen=True)
class MethodName:
    """A method's name, split into its parts.

    >>> MethodName.parse("scaffold+fedadam+pews")
    MethodName(base='scaffold', server='fedadam', warmup='learned', personal=None)
    >>> str(MethodName.parse("fedavg+fedadam"))
    'fedadam'
    """

    base: str = "fedavg"
    server: str | None = None
    warmup: WarmupKind = "none"
    personal: str | None = None

    @classmethod
    def parse(cls, text: str) -> MethodName:
        """Split a name; a part that is unknown, or that is given twice, is a ConfigError."""
        nouns = {"base": "method", "server": "server optimiser", "warmup": "warmup", "personal": "wrapper"}
        roles = {"base": METHODS, "server": SERVERS, "warmup": WARMUPS, "personal": PERSONAL}
        parts: dict[str, Any] = {}
        for written in text.split("+"):
            # a module or a file may have capitals
            part = written if ":" in written else written.lower()
            role = "base" if ":" in part else next((role for role in roles if part in roles[role]), None)
            if role is None:
                known = nearest(part, [name for names in roles.values() for name in names])
                raise ConfigError(f"method.name {text!r}: {part!r} is unknown; {known}")
            if role in parts:
                raise ConfigError(f"method.name {text!r}: {part!r} is a second {nouns[role]}; use only one")
            parts[role] = WARMUPS.get(part, part)
        return cls(**parts)

    @property
    def tables(self) -> dict[str, str]:
        """By each part of the name, the table of a configuration with its options.

        >>> MethodName.parse("fedprox+fedadam+pews").tables
        {'fedprox': 'method', 'fedadam': 'server', 'pews': 'warmup'}
        """
        base = self.base.rpartition(":")[2]
        tables = {base: "method", self.server: "server", self._suffix: "warmup", self.personal: "method"}
        return {part: table for part, table in tables.items() if part is not None}

    @property
    def _suffix(self) -> str | None:
        return {kind: name for name, kind in WARMUPS.items()}.get(self.warmup)

    def __str__(self) -> str:
        base = [self.base] if self.server is None or self.base != "fedavg" else []
        return "+".join([*base, *filter(None, (self.server, self._suffix, self.personal))])


def method(
    name: str | MethodName,
    *,
    warmup: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | str | None = None,
    **options: Any,
) -> Method:
    """A method by its name, with all options checked.

    Args:
        name: such as ``fedprox``, ``scaffold+fedadam`` or ``fedavg+pews``; see `fedpews list methods`.
        warmup: with a warmup: ``rounds`` (W) and the options of `Learned`, `Fixed`, `Auto` or `Random`.
        server: the server optimiser's options, such as ``lr``.
        optimizer: the local optimiser's ``name`` and options, or its name alone; by default SGD.
        options: the base method's own, and those of `ditto` or `fedrep`.

    >>> method("fedprox+pews", mu=0.1, warmup={"rounds": 25, "diversity": 5.0}).inner.mu
    0.1
    """
    from fedpews.warmup import with_warmup

    parts = name if isinstance(name, MethodName) else MethodName.parse(name)
    local = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer or {})
    inner: dict[str, Any] = {}
    takes = method_fields(parts.base)
    if "optimizer" in takes:
        inner |= {"optimizer": local_optimizer(**local)} if local else {}
    elif local:
        raise ConfigError(f"{parts.base} has its own update rule, so it does not accept train.optimizer")
    if "server" in takes:
        inner["server"] = server_optimizer(parts.server, **(server or {}))
    elif server or parts.server:
        raise ConfigError(
            f"{parts.base} does not average at the server, so it accepts no server optimiser and no server rate"
        )
    personal = None if parts.personal is None else find_class("personal", parts.personal)
    # options of what gives clients their own models; the rest is for the base method
    around = (
        {} if personal is None else {key: options.pop(key) for key in options.keys() & option_types(personal)}
    )
    composed: Method = make(find_class("method", parts.base), options, "method.", parts.base, **inner)
    if parts.warmup != "none":
        given = dict(warmup or {})
        if "rounds" not in given:
            raise ConfigError("a warmup needs a number of rounds W: warmup={'rounds': 25}")
        rounds, masks = given.pop("rounds"), find_class("masks", parts.warmup)
        composed = with_warmup(composed, rounds, make(masks, given, "warmup.", f"the {parts.warmup} warmup"))
    elif warmup:
        raise ConfigError(f"{parts} has no warmup; add +pews (or -fixed, -auto, -random) to its name")
    if parts.personal == "local" and parts.warmup != "none":
        raise ConfigError("local training shares nothing, so it needs no warmup; remove the warmup or local")
    if personal is not None:
        composed = make(personal, around, "method.", str(parts.personal), inner=composed)
    return composed


def server_optimizer(name: str | None = None, **options: Any) -> ServerOptimizer:
    """A server optimiser by its name; without one, the plain server step with its rate ``lr``.

    >>> server_optimizer("fedadam", lr=0.01).lr
    0.01
    """
    cls = find_class("server", name or "fedpews.methods.server_optimizers:SGD")
    server: ServerOptimizer = make(cls, options, "server.", name or "the server")
    return server


def local_optimizer(name: str = "sgd", **options: Any) -> Optimizer:
    """A client's optimiser by its name.

    >>> local_optimizer("adam", beta2=0.99).beta2
    0.99
    """
    optimizer: Optimizer = make(find_class("optimizer", name), options, "optimizer.", name)
    return optimizer


def find_class(kind: Kind, name: str) -> type[Any]:
    """The class of a kind behind a name, or behind ``module:Class``.

    >>> find_class("method", "fedprox").__name__
    'FedProx'
    """
    known, what = registered(kind), {"server": "server optimiser", "optimizer": "optimiser"}.get(kind, kind)
    module, colon, attribute = known.get(name, name).rpartition(":")
    if not colon:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, known)}")
    try:
        cls = getattr(load_module(module), attribute)
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"the {what} {name!r} cannot be loaded: {first_line(error)}") from error
    # of ours: any other dataclass has an __init__ that was not written to be called from a configuration
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and issubclass(cls, Options)):
        raise ConfigError(
            f"the {what} {name!r} must be a dataclass that extends fedpews.Method or an Optimizer, so that its "
            "options are known"
        )
    return cls


def method_fields(name: str) -> set[str]:
    """The fields of a base method: ``server`` and ``optimizer`` if it takes those."""
    return {field.name for field in dataclasses.fields(find_class("method", name))}


def unused_keys(name: MethodName) -> list[str]:
    """The keys and tables of a configuration that a method does not read."""
    fields = method_fields(name.base)
    keys = [f"train.{key}" for key in (*TRAIN_KEYS, "optimizer") if key not in fields]
    keys += [] if "server" in fields else ["train.server_lr", "server"]
    keys += [] if "optimizer" in fields else ["optimizer"]
    # λ is chosen for learned masks; FedPeWS-Auto has its own
    return keys if name.warmup == "learned" else [*keys, "warmup.diversity"]


def describe(name: str) -> str:
    """One line about a part of a method's name: the first of its docstring, or of its file if it is alone there."""
    kind: Kind = "server" if name in SERVERS else "personal" if name in PERSONAL else "method"
    if name in WARMUPS:
        kind, name = "masks", WARMUPS[name]
    cls = find_class(kind, name)
    is_alone = [path.partition(":")[0] for path in METHODS.values()].count(cls.__module__) == 1
    text = inspect.getdoc(inspect.getmodule(cls) if kind == "method" and is_alone else cls)
    return " ".join((text or "").split("\n\n")[0].split())
