"""Models of timm, torchvision and transformers by their names; nothing is fetched unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, nearest, need_extra
from fedpews.outside import offline

LIBRARIES = ("timm", "torchvision", "transformers")


def library_model(name: str, shape: Sequence[int], classes: int, options: dict[str, Any]) -> Any:
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
