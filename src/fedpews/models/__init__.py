"""Models by name, or your own as ``module:Class``, built for the data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, first_line, nearest
from fedpews.models.libraries import LIBRARIES, library_model
from fedpews.user_code import load_named

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "mlp": "fedpews.models.networks:MLP",
    "cnn": "fedpews.models.networks:CNN",
    "resnet": "fedpews.models.networks:ResNet",
    "vit": "fedpews.models.networks:ViT",
}
"""Name -> its class, which is imported when it is used."""

FROM_DATA = {"inputs", "channels", "size", "classes"}
"""Arguments of a model that are filled in from the data, where its signature has them."""


def build(name: str, shape: Sequence[int], classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A model for inputs of a shape and a number of classes.

    ``name`` is one of ``MODELS``, ``timm:NAME``, ``torchvision:NAME`` or ``transformers:NAME``, ``module:Class`` or
    ``path/to/file.py:Class``. A class is called with its options
    and, where its signature has them, with ``inputs`` (all features), ``channels``, ``size`` (height and width) and
    ``classes``. A class with ``needs_images = True`` refuses other inputs.

    >>> build("mlp", (5,), 4, {"hidden": [8]}).classifier
    Linear(in_features=8, out_features=4, bias=True)
    """
    make = library_model if name.partition(":")[0] in LIBRARIES else _build_class
    try:
        model = make(name, shape, classes, dict(options))
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's own file or a library raises
        raise ConfigError(
            f"model {name} cannot be built for inputs {tuple(shape)} and {classes} classes: {first_line(error)}"
        ) from error
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name} is a {type(model).__name__}, not a torch.nn.Module")
    return model


def _build_class(name: str, shape: Sequence[int], classes: int, options: dict[str, Any]) -> Any:
    target = model_class(name)
    parameters = inspect.signature(target).parameters.values()
    known = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    if not any(each.kind == each.VAR_KEYWORD for each in parameters):
        for option in sorted(options.keys() - known):
            raise ConfigError(f"model {name} has no option model.{option}; {nearest(option, known)}")
    if getattr(target, "needs_images", False) and len(shape) != 3:
        raise ConfigError(
            f"model {name} needs images (channels, height, width), the data has inputs of shape {tuple(shape)}; "
            "choose model mlp, or give the data that shape"
        )
    offered = {"classes": classes, "inputs": math.prod(shape)}
    if len(shape) == 3:
        offered |= {"channels": shape[0], "size": shape[1]}
        if "size" in known - options.keys() and shape[1] != shape[2]:
            raise ConfigError(
                f"model {name} needs square images, the data has {shape[1]}×{shape[2]}; choose model resnet"
            )
    return target(**{key: value for key, value in offered.items() if key in known} | options)


def describe_models() -> list[tuple[str, str]]:
    """Every model's name with the first line of its docstring."""
    return [(name, (inspect.getdoc(model_class(name)) or "").splitlines()[0]) for name in MODELS]


def model_class(name: str) -> Any:
    """The class of a name or of ``module:Class``."""
    target = MODELS.get(name, name)
    if ":" not in target:
        raise ConfigError(f"there is no model {name!r}; {nearest(name, MODELS)} (Your own: module:Class.)")
    from torch import nn

    try:
        return load_named(target, nn.Module)
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
