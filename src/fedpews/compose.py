"""From a name such as ``scaffold+fedadam+pews`` to a method: the only place that takes such names apart.

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
from fedpews.registry import registered
from fedpews.user_code import load_module

if TYPE_CHECKING:
    from fedpews.methods.contract import Method
    from fedpews.methods.optimizers import Optimizer
    from fedpews.methods.server_optimizers import ServerOptimizer

METHODS = registered("method")
"""Base methods. Add your own, or name it ``module:Class`` or ``path/to/file.py:Class`` wherever a method is named."""

SERVERS = registered("server")
"""Server optimisers, for every method that has a ``server``."""

PLAIN_SERVER = "fedpews.methods.server_optimizers:SGD"
"""The server's step when no optimiser is named."""

OPTIMIZERS = registered("optimizer")
"""Local optimisers, for every method that has an ``optimizer``: the rules that the server's are made of."""

PERSONAL = registered("personal")
"""What gives each client a model of its own, around a method and its warmup."""

MASKS = registered("masks")
"""The masks of a warmup, by its kind: what decides which neurons a client owns."""

WARMUPS = {"pews" if kind == "learned" else f"pews-{kind}": kind for kind in MASKS}
"""The suffixes of a name that ask for a warmup, and its kind."""

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[("none", *MASKS)]


METHOD_KEYS = (
    "train.optimizer", "train.momentum", "train.weight_decay", "train.clip_norm", "train.server_lr",
    "optimizer", "server", "warmup",
)  # fmt: skip
"""The keys and tables of a configuration that a method is made with."""


@dataclass(frozen=True)
class MethodName:
    """A method's name, taken apart.

    >>> MethodName.parse("scaffold+fedadam+pews")
    MethodName(base='scaffold', server='fedadam', warmup='learned', personal=None)
    >>> str(MethodName.parse("fedavg+fedadam"))
    'fedadam'
    """

    base: str = "fedavg"
    server: str | None = None
    warmup: Kind = "none"
    personal: str | None = None

    @classmethod
    def parse(cls, text: str) -> MethodName:
        """Take a name apart; a part that is unknown, or there twice, is a ConfigError."""
        found: dict[str, Any] = {}
        value: Any
        for written in text.split("+"):
            # a module or a file has capitals of its own
            part = written if ":" in written else written.lower()
            if part in METHODS or ":" in part:
                place, value = "base", part
            elif part in SERVERS:
                place, value = "server", part
            elif part in WARMUPS:
                place, value = "warmup", WARMUPS[part]
            elif part in PERSONAL:
                place, value = "personal", part
            else:
                known = nearest(part, [*METHODS, *SERVERS, *WARMUPS, *PERSONAL])
                raise ConfigError(f"method.name {text!r}: {part!r} is unknown; {known}")
            if place in found:
                raise ConfigError(
                    f"method.name {text!r}: {part!r} is out of place, there is a {place} already"
                )
            found[place] = value
        return cls(**found)

    @property
    def tables(self) -> dict[str, str]:
        """By each part of the name, the table of a configuration with its options.

        >>> MethodName.parse("fedprox+fedadam+pews").tables
        {'fedprox': 'method', 'fedadam': 'server', 'pews': 'warmup'}
        """
        found = {self.base.rpartition(":")[2]: "method", self.server: "server", self._suffix: "warmup"}
        found[self.personal] = "method"
        return {part: table for part, table in found.items() if part is not None}

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
    parts = name if isinstance(name, MethodName) else MethodName.parse(name)
    around, options = _split(parts, options)
    local = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer or {})
    made = _base(parts, dict(server or {}), local, options)
    if parts.warmup == "none":
        if warmup:
            raise ConfigError(f"{parts} has no warmup; add +pews (or -fixed, -auto, -random) to its name")
    else:
        made = _with_warmup(made, parts.warmup, dict(warmup or {}))
    if parts.personal is not None:
        if parts.personal == "local" and parts.warmup != "none":
            raise ConfigError("clients that share nothing have no use for a warmup; leave it or local out")
        made = make(personal_class(parts.personal), around, "method.", parts.personal, inner=made)
    return made


def _split(parts: MethodName, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of what gives clients their own models, and the base method's."""
    if parts.personal is None:
        return {}, options
    cls = personal_class(parts.personal)
    around = {key: value for key, value in options.items() if key in option_types(cls)}
    rest = {key: value for key, value in options.items() if key not in around}
    return around, rest


def _base(
    parts: MethodName, server: dict[str, Any], local: dict[str, Any], options: dict[str, Any]
) -> Method:
    cls, made = method_class(parts.base), {}
    if takes_optimizer(parts.base):
        if local:
            made["optimizer"] = local_optimizer(**local)
    elif local:
        raise ConfigError(f"{parts.base} trains by a rule of its own, so it takes no train.optimizer")
    if takes_server(parts.base):
        made["server"] = server_optimizer(parts.server, **server)
    elif server or parts.server:
        raise ConfigError(
            f"{parts.base} does not average at the server, so it takes no server optimiser and no server rate"
        )
    method: Method = make(cls, options, "method.", parts.base, **made)
    return method


def _with_warmup(method: Method, kind: Kind, given: dict[str, Any]) -> Method:
    from fedpews.warmup import with_warmup

    if "rounds" not in given:
        raise ConfigError("a warmup needs its number of rounds W: warmup={'rounds': 25}")
    rounds = given.pop("rounds")
    masks = masks_class(kind)
    return with_warmup(method, rounds, make(masks, given, "warmup.", f"the {kind} warmup"))


def server_optimizer(name: str | None = None, **options: Any) -> ServerOptimizer:
    """A server optimiser by its name; without one, the plain server step with its rate ``lr``.

    >>> server_optimizer("fedadam", lr=0.01).lr
    0.01
    """
    cls = server_class(name) if name else _load(PLAIN_SERVER, "server step", "plain")
    server: ServerOptimizer = make(cls, options, "server.", name or "the server")
    return server


def local_optimizer(name: str = "sgd", **options: Any) -> Optimizer:
    """A client's optimiser by its name.

    >>> local_optimizer("adam", beta2=0.99).beta2
    0.99
    """
    cls = optimizer_class(name)
    optimizer: Optimizer = make(cls, options, "optimizer.", name)
    return optimizer


def method_class(name: str) -> type[Any]:
    """The class behind a base method's name, or behind ``module:Class``."""
    return _find(name, METHODS, "method")


def server_class(name: str) -> type[Any]:
    """The class behind a server optimiser's name."""
    return _find(name, SERVERS, "server optimiser")


def optimizer_class(name: str) -> type[Any]:
    """The class behind a local optimiser's name, or behind ``module:Class``."""
    return _find(name, OPTIMIZERS, "optimiser")


def personal_class(name: str) -> type[Any]:
    """The class behind what gives clients their own models."""
    return _find(name, PERSONAL, "way to models of clients' own")


def masks_class(kind: Kind) -> type[Any]:
    """What decides who owns which neurons in this kind of warmup: Learned, Fixed, Auto or Random."""
    return _load(MASKS[kind], "kind of warmup", kind)


def takes_server(name: str) -> bool:
    """Whether server optimisers go with the base method."""
    return any(field.name == "server" for field in dataclasses.fields(method_class(name)))


def takes_optimizer(name: str) -> bool:
    """Whether local optimisers go with the base method."""
    return any(field.name == "optimizer" for field in dataclasses.fields(method_class(name)))


def unused_keys(name: MethodName) -> list[str]:
    """The keys and tables of a configuration that a method does not read."""
    names = {field.name for field in dataclasses.fields(method_class(name.base))}
    keys = [
        f"train.{key}" for key in ("momentum", "weight_decay", "clip_norm", "optimizer") if key not in names
    ]
    if "server" not in names:
        keys += ["train.server_lr", "server"]
    if "optimizer" not in names:
        keys.append("optimizer")
    # λ is chosen for learned masks; FedPeWS-Auto has its own
    return keys if name.warmup == "learned" else [*keys, "warmup.diversity"]


def describe(name: str) -> str:
    """One line about a part of a method's name: the first of its docstring, or of its file if it is alone there."""
    cls = _find(name, METHODS | SERVERS | PERSONAL, "method")
    is_alone = [path.partition(":")[0] for path in METHODS.values()].count(cls.__module__) == 1
    text = inspect.getdoc(inspect.getmodule(cls) if name in METHODS and is_alone else cls)
    return " ".join((text or "").split("\n\n")[0].split())


def _find(name: str, places: Mapping[str, str], what: str) -> type[Any]:
    place = places.get(name, name)
    if ":" not in place:
        raise ConfigError(f"there is no {what} {name!r}; {nearest(name, places)}")
    return _load(place, what, name)


def _load(place: str, what: str, name: str) -> type[Any]:
    module, _, attribute = place.rpartition(":")
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
