"""Fine-tuning: low-rank adapters (LoRA), and parameters that are frozen by pattern."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fedpews.errors import ConfigError, first_line, nearest, need_extra
from fedpews.models.table import LoraTable
from fedpews.neurons.network import Network

COMPONENTS = ".lora_A."
"""In the name of a layer whose outputs are the components of an adapter."""


def matching(names: Iterable[str], patterns: Sequence[str], key: str) -> set[str]:
    """The names that a pattern matches; a pattern that matches none is an error.

    ``*`` stands for any text, and a module's name for everything in it.

    >>> sorted(matching(["body.0.weight", "body.1.weight", "head.bias"], ["body.*.weight", "head"], "train.freeze"))
    ['body.0.weight', 'body.1.weight', 'head.bias']
    """
    known, selected = list(names), set()
    for pattern in patterns:
        matches = {n for n in known if fnmatchcase(n, pattern) or n.startswith(f"{pattern}.")}
        if not matches:
            parts = {part for name in known for part in (name, name.partition(".")[0])}
            raise ConfigError(f"{key}: no parameter matches {pattern!r}; {nearest(pattern, sorted(parts))}")
        selected |= matches
    return selected


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that a pattern matches."""
    parameters = dict(module.named_parameters())
    for name in matching(parameters, patterns, "train.freeze"):
        parameters[name].requires_grad_(False)
    if not any(value.requires_grad for value in parameters.values()):
        raise ConfigError(f"train.freeze: {', '.join(patterns)} leaves nothing to train")


def add_lora(module: nn.Module, table: LoraTable, head: str) -> None:
    """Add an adapter to each target layer, and freeze all but the adapters and what trains in full.

    Args:
        head: the layer that computes the outputs, which trains in full by default.
    """
    peft = need_extra("peft", "peft", "model.lora")
    full = matching(
        (name for name, _ in module.named_parameters()),
        [head] if table.full is None else table.full,
        "model.lora.full",
    )
    targets = _targets(module, table.targets, full)
    config = peft.LoraConfig(
        r=table.rank, lora_alpha=table.alpha or table.rank, lora_dropout=0.0, target_modules=targets
    )
    try:
        peft.inject_adapter_in_model(config, module)
    except Exception as error:
        raise ConfigError(f"model.lora: peft cannot add the adapters: {first_line(error)}") from error
    for name, value in module.named_parameters():
        value.requires_grad_(is_adapter(name) or name in full)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return COMPONENTS in name or ".lora_B." in name


def has_adapters(net: Network) -> bool:
    """Whether a network trains adapters, so that its base is neither sent nor saved."""
    return any(map(is_adapter, net.trainable))


def _targets(module: nn.Module, wanted: Sequence[str] | None, full: Collection[str]) -> list[str]:
    layers = {name: layer for name, layer in module.named_modules() if name}
    if wanted is None:
        # exactly Linear: torch's own attention reads the weights of its projection without calling it
        wanted = [n for n, layer in layers.items() if type(layer) is nn.Linear and f"{n}.weight" not in full]
        if not wanted:
            raise ConfigError("model.lora.targets: the model has no linear layer to adapt; name its layers")
        return wanted
    for target in wanted:
        matches = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matches:
            ends = {name.rpartition(".")[2] for name in layers if not name.rpartition(".")[2].isdigit()}
            raise ConfigError(
                f"model.lora.targets: no layer is called {target!r}; {nearest(target, sorted(ends))}"
            )
        if any(isinstance(layers[name], nn.MultiheadAttention) for name in matches):
            raise ConfigError(f"model.lora.targets: {target!r} is a MultiheadAttention; choose linear layers")
    return list(wanted)
