"""Models by name, of timm, torchvision or transformers, or your own as ``module:Class``, built for the data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, first_line, nearest, need_extra
from fedpews.outside import offline
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

LIBRARIES = ("timm", "torchvision", "transformers")

FROM_DATA = {"inputs", "channels", "size", "classes"}
"""Arguments of a model that are filled in from the data, where its signature has them."""


def build(name: str, shape: Sequence[int], classes: int, options: Mapping[str, Any]) -> nn.Module:
    """A model for inputs of a shape and a number of classes.

    ``name`` is one of ``MODELS``, ``timm:NAME``, ``torchvision:NAME`` or ``transformers:NAME``, ``module:Class`` or
    ``path/to/file.py:Class``. A class is called with its options and, where its signature has them, with ``inputs``
    (all features), ``channels``, ``size`` (height and width) and ``classes``. A class with ``needs_images = True``
    refuses other inputs. Nothing is fetched unless an option asks for it.

    >>> build("mlp", (5,), 4, {"hidden": [8]}).classifier
    Linear(in_features=8, out_features=4, bias=True)
    """
    make = _build_from_library if name.partition(":")[0] in LIBRARIES else _build_class
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


def _build_from_library(name: str, shape: Sequence[int], classes: int, options: dict[str, Any]) -> Any:
    """The model of ``timm:NAME``, ``torchvision:NAME`` or ``transformers:NAME`` for the data.

    Options go to ``timm.create_model``, ``torchvision.models.get_model`` or the configuration of transformers.
    """
    library, _, model = name.partition(":")
    module = need_extra("models", library, f"model {name}")
    if library == "transformers":
        fetch = bool(options.pop("fetch", False))
        # without this, a lookup of adapters would ask the hub even for local files only
        with nullcontext() if fetch else offline():
            return _transformers(module, model, shape, classes, options, fetch)
    if len(shape) != 3:
        raise ConfigError(f"model {name} needs images, not inputs of shape {tuple(shape)}")
    is_timm = library == "timm"
    known = module.list_models() if is_timm else module.models.list_models(module=module.models)
    # timm's names may end in those of weights: resnet18.a1_in1k
    if model.partition(".")[0] not in known:
        hint = nearest(model, known, f"see {library}'s list_models()")
        raise ConfigError(f"{library} has no model {model!r}; {hint}")
    if is_timm:
        return module.create_model(model, num_classes=classes, in_chans=shape[0], **options)
    if shape[0] != 3:
        raise ConfigError(f"model {name} needs RGB images, the data has {shape[0]} channel(s)")
    return module.models.get_model(model, num_classes=classes, **options)


def _transformers(
    transformers: Any, name: str, shape: Sequence[int], classes: int, options: dict[str, Any], fetch: bool
) -> Any:
    """A folder, a config.json, a kind of model such as ``bert``, or a name in the hub's cache.

    The options ``auto`` (the class that adds the head) and ``fetch`` (from the hub) are ours.
    """
    kind = "ImageClassification" if len(shape) == 3 else "SequenceClassification"
    auto = getattr(transformers, str(options.pop("auto", f"AutoModelFor{kind}")))
    settings, path = {"num_labels": classes} | options, Path(name).expanduser()
    if name in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(name)
        if len(shape) == 3:
            fitting = {"image_size": shape[1], "num_channels": shape[0]}
            settings = {key: value for key, value in fitting.items() if hasattr(config, key)} | settings
        return auto.from_config(transformers.AutoConfig.for_model(name, **settings))
    if path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors"))):
        return auto.from_config(transformers.AutoConfig.from_pretrained(path, **settings))
    if not path.is_dir() and name.count("/") != 1 and not fetch:
        raise ConfigError(
            f"model transformers:{name}: there is no such folder or configuration; "
            f"{nearest(name, transformers.CONFIG_MAPPING, 'give a folder, a config.json or a kind such as bert')}"
        )
    try:
        return auto.from_pretrained(
            path if path.is_dir() else name,
            local_files_only=not fetch,
            # a pickle could run code
            use_safetensors=True,
            # the head of a pretrained model has other classes
            ignore_mismatched_sizes=True,
            **settings,
        )
    except OSError as error:
        if fetch or path.is_dir():
            raise
        raise ConfigError(
            f"model transformers:{name} is not on this machine; model.fetch = true fetches it from the hub"
        ) from error


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
