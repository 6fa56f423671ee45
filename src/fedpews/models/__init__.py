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
    "mlp": "fedpews.models.mlp:MLP",
    "cnn": "fedpews.models.cnn:CNN",
    "resnet": "fedpews.models.resnet:ResNet",
    "vit": "fedpews.models.vit:ViT",
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
    if name.partition(":")[0] in LIBRARIES:
        return library_model(name, shape, classes, options)
    target = model_class(name)
    known = _parameters(target)
    for option in options:
        if option not in known and "**" not in known:
            raise ConfigError(f"model {name} has no option model.{option}; {nearest(option, known)}")
    if getattr(target, "needs_images", False) and len(shape) != 3:
        raise ConfigError(
            f"model {name} needs images (channels, height, width), the data has inputs of shape {tuple(shape)}; "
            "choose model mlp, or give the data that shape"
        )
    offered = {"classes": classes, "inputs": math.prod(shape)}
    if len(shape) == 3:
        offered |= {"channels": shape[0], "size": shape[1]}
        if "size" in known and "size" not in options and shape[1] != shape[2]:
            raise ConfigError(
                f"model {name} needs square images, the data has {shape[1]}×{shape[2]}; choose model resnet"
            )
    arguments = {key: value for key, value in offered.items() if key in known} | dict(options)
    try:
        model = target(**arguments)
    except Exception as error:
        raise ConfigError(
            f"model {name} cannot be built for inputs {tuple(shape)} and {classes} classes: {first_line(error)}"
        ) from error
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name} is a {type(model).__name__}, not a torch.nn.Module")
    return model


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


def _parameters(target: Any) -> set[str]:
    """The parameters that may be given by name; ``**`` stands for any name."""
    kinds = {parameter.name: parameter.kind for parameter in inspect.signature(target).parameters.values()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    any_name = {"**"} if inspect.Parameter.VAR_KEYWORD in kinds.values() else set()
    return {name for name, kind in kinds.items() if kind in by_name} | any_name
