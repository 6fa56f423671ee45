"""Models by name, and how to build one for given data."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "mlp": "fedpews.models.mlp:MLP",
    "cnn": "fedpews.models.cnn:CNN",
}
"""Name -> where its class is; nothing is imported before it is asked for."""


def build(name: str, shape: Sequence[int], classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A model for inputs of a shape and a number of classes.

    ``name`` is one of ``MODELS`` or ``module:Class``. A class is called with its options and, as far as its
    signature has them, with ``inputs`` (all features), ``channels``, ``size`` (height) and ``classes``.
    """
    target = _find(name)
    offered = {"classes": classes, "inputs": math.prod(shape)}
    if len(shape) == 3:
        offered |= {"channels": shape[0], "size": shape[1]}
    known = inspect.signature(target).parameters
    for option in options:
        if option not in known:
            raise ConfigError(
                f"model {name} has no option model.{option}; it has {', '.join(known) or 'none'}"
            )
    if name == "cnn" and len(shape) != 3:
        raise ConfigError(
            f"model cnn needs images (channels, height, width), the data has inputs of shape {tuple(shape)}"
        )
    try:
        model = target(**{key: value for key, value in offered.items() if key in known} | dict(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model {name} cannot be built for inputs {tuple(shape)} and {classes} classes: {error}"
        ) from error
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name} is a {type(model).__name__}, not a torch.nn.Module")
    return model


def _find(name: str) -> Any:
    module, colon, attribute = MODELS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"there is no model {name!r}; there is {', '.join(MODELS)}, or give module:Class")
    if str(Path.cwd()) not in sys.path:  # a model beside the configuration, as `python -m` would find it
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r} cannot be loaded: {error}") from error


def describe_models() -> list[tuple[str, str]]:
    """Every model's name with the first line of its docstring."""
    return [(name, (inspect.getdoc(_find(name)) or "").splitlines()[0]) for name in MODELS]
