"""The options of methods and tasks: fields of a frozen dataclass, checked whenever one is made.

The type and the limits of an option are its annotation, in pydantic's words::

    mu: Annotated[float, Field(ge=0)] = 0.01
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedpews.errors import ConfigError, explain, nearest

T = TypeVar("T")

Count = Annotated[int, Field(ge=1, strict=True)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Share = Annotated[float, Field(gt=0, le=1)]


def field(default: Any, text: str, **limits: Any) -> Any:
    """A key of a table: its default and what it means."""
    return Field(default, description=text, **limits)


class Table(BaseModel):
    """The base of a configuration's tables."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Options:
    """The base of dataclasses whose fields a user sets: it checks them, and converts 1 to 1.0."""

    def __post_init__(self) -> None:
        cls: type = type(self)
        values = {name: getattr(self, name) for name in option_types(cls)}
        # TOML and the command line have lists only
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        try:
            checked = _model(cls)(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, f"{cls.__name__}.")) from error
        for name in values:
            # the dataclass is frozen
            object.__setattr__(self, name, getattr(checked, name))


def make(cls: type[T], options: Mapping[str, Any], prefix: str, owner: str, **others: Any) -> T:
    """An object with the options of a configuration, or a ConfigError that names the key.

    Args:
        prefix: of the keys, such as ``method.``.
        owner: the name of the class in a configuration.
        others: fields that are no options, such as an inner method.

    >>> from fedpews.methods.fedprox import FedProx
    >>> make(FedProx, {"mu": 1}, "method.", "fedprox").mu
    1.0
    """
    known = option_types(cls)
    for name in options:
        if name not in known:
            raise ConfigError(f"{owner} has no option {prefix}{name}; {nearest(name, known)}")
    try:
        return cls(**options, **others)
    except ConfigError as error:
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(explain(error.__cause__, prefix)) from None
        raise


def option_types(cls: type) -> dict[str, Any]:
    """The options of a class by name: its fields of plain types. Others (an inner method) are not for users to set."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names if _is_plain(hints[name])}


def option_defaults(cls: type) -> dict[str, Any]:
    """The default of each option, in the order of the signature."""
    known = option_types(cls)
    return {
        name: parameter.default
        for name, parameter in inspect.signature(cls).parameters.items()
        if name in known
    }


def option_texts(cls: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its arguments, under Args."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = (inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]).partition("\n\n")[0]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
            texts[name] = " ".join(text.split()).removesuffix(".").replace("``", "`")
    return texts


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
