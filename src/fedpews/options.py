"""The options of methods and tasks: fields of a frozen dataclass, checked whenever one is made.

The type and the limits of an option are its annotation, in pydantic's words::

    mu: Annotated[float, Field(ge=0)] = 0.01
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedpews.errors import ConfigError, explain, nearest

Count = Annotated[int, Field(ge=1, strict=True)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


class Table(BaseModel):
    """The base of a configuration's tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Options:
    """The base of dataclasses whose fields a user sets: it checks them, and converts 1 to 1.0."""

    def __post_init__(self) -> None:
        cls = type(self)
        given = {name: getattr(self, name) for name in option_types(cls)}
        for name, value in check(cls, given, f"{cls.__name__}.").items():
            # the dataclass is frozen
            object.__setattr__(self, name, value)


def check(cls: type, given: Mapping[str, Any], prefix: str = "method.", owner: str = "") -> dict[str, Any]:
    """The options in the types that the class declares, or a ConfigError that says what is allowed.

    >>> from fedpews.methods.fedprox import FedProx
    >>> check(FedProx, {"mu": 1})
    {'mu': 1.0}
    """
    known = option_types(cls)
    for name in given:
        if name not in known:
            raise ConfigError(f"{owner or cls.__name__} has no option {prefix}{name}; {nearest(name, known)}")
    # TOML and the command line have lists only
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        checked = _model(cls)(**listed)
    except ValidationError as error:
        raise ConfigError(explain(error, prefix)) from None
    return {name: getattr(checked, name) for name in given}


def option_types(cls: type) -> dict[str, Any]:
    """The options of a class by name: its fields of plain types. Others (an inner method) are not for users to set."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names if _is_plain(hints[name])}


@cache
def _model(cls: type) -> type[BaseModel]:
    # strict: neither true nor "0.1" is a number; every field may be absent, the dataclass has the defaults
    config = ConfigDict(strict=True, allow_inf_nan=False)
    fields: dict[str, Any] = {name: (hint, None) for name, hint in option_types(cls).items()}
    return create_model(cls.__name__, __config__=config, **fields)


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_plain(get_args(hint)[0])
    if origin in (Union, UnionType):
        return all(map(_is_plain, get_args(hint)))
    return origin in (tuple, Literal) or hint in (bool, int, float, str, NoneType)
