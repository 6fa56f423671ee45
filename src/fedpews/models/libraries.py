"""Models of timm, torchvision and transformers by the names people know; nothing is fetched unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError, first_line, nearest, need_extra
from fedpews.outside import offline

if TYPE_CHECKING:
    from torch import nn

EXTRA = "models"


def library_model(name: str, shape: Sequence[int], classes: int, options: Mapping[str, Any]) -> nn.Module:
    """The model of ``timm:NAME``, ``torchvision:NAME`` or ``transformers:NAME`` for the data.

    Options go to ``timm.create_model``, ``torchvision.models.get_model`` or the configuration of transformers.
    """
    library, _, own = name.partition(":")
    try:
        module = need_extra(EXTRA, library, f"model {name}")
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ConfigError(f"model {name}: {library} cannot be imported: {first_line(error)}") from error
    if library != "transformers" and len(shape) != 3:
        raise ConfigError(
            f"model {name} needs images (channels, height, width), not inputs of {tuple(shape)}"
        )
    try:
        made: nn.Module = LIBRARIES[library](module, own, shape, classes, dict(options))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {name} cannot be built for inputs {tuple(shape)} and {classes} classes: {first_line(error)}"
        ) from error
    return made


def _timm(timm: Any, own: str, shape: Sequence[int], classes: int, options: dict[str, Any]) -> Any:
    if not timm.is_model(own.partition(".")[0]):
        raise ConfigError(_unknown("timm", own, timm.list_models()))
    return timm.create_model(own, num_classes=classes, in_chans=shape[0], **options)


def _torchvision(
    torchvision: Any, own: str, shape: Sequence[int], classes: int, options: dict[str, Any]
) -> Any:
    known = torchvision.models.list_models(module=torchvision.models)
    if own not in known:
        raise ConfigError(_unknown("torchvision", own, known))
    if shape[0] != 3:
        raise ConfigError(f"model torchvision:{own} needs RGB images, the data has {shape[0]} channel(s)")
    return torchvision.models.get_model(own, num_classes=classes, **options)


def _transformers(
    transformers: Any, own: str, shape: Sequence[int], classes: int, options: dict[str, Any]
) -> Any:
    """A folder, a config.json, a kind of model such as ``bert``, or a name in the hub's cache.

    The options ``auto`` (the class that adds the head) and ``fetch`` (from the hub) are ours.
    """
    fetch = bool(options.pop("fetch", False))
    # without this, a lookup of adapters would ask the hub even for local files only
    with nullcontext() if fetch else offline():
        return _of_transformers(transformers, own, shape, classes, options, fetch)


def _of_transformers(
    transformers: Any, own: str, shape: Sequence[int], classes: int, options: dict[str, Any], fetch: bool
) -> Any:
    kind = "ImageClassification" if len(shape) == 3 else "SequenceClassification"
    auto = getattr(transformers, str(options.pop("auto", f"AutoModelFor{kind}")))
    settings, path = {"num_labels": classes} | options, Path(own).expanduser()
    if own in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(own)
        if len(shape) == 3:
            fitting = {"image_size": shape[1], "num_channels": shape[0]}
            settings = {key: value for key, value in fitting.items() if hasattr(config, key)} | settings
        return auto.from_config(transformers.AutoConfig.for_model(own, **settings))
    if path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors"))):
        return auto.from_config(transformers.AutoConfig.from_pretrained(path, **settings))
    if not path.is_dir() and own.count("/") != 1 and not fetch:
        raise ConfigError(
            f"model transformers:{own}: there is no such folder or configuration; "
            f"{nearest(own, transformers.CONFIG_MAPPING, 'give a folder, a config.json or a kind such as bert')}"
        )
    try:
        return auto.from_pretrained(
            own if not path.is_dir() else path,
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
            f"model transformers:{own} is not on this machine; model.fetch = true fetches it from the hub"
        ) from error


LIBRARIES: dict[str, Callable[[Any, str, Sequence[int], int, dict[str, Any]], Any]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
"""Library -> what makes one of its models."""


def _unknown(library: str, own: str, known: Sequence[str]) -> str:
    hint = nearest(own, known, f"see {library}'s list_models()")
    return f"{library} has no model {own!r}; {hint}"
