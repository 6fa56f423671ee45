"""The neuron graph of a model that cannot be traced, from a description by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedpews.errors import ConfigError
from fedpews.neurons.channels import Layer, Side, groups, places, width

Inputs = str | tuple[str, int, int]


@dataclass(frozen=True)
class Hidden:
    """One hidden layer.

    ``made_by``: the linear layer or convolution that computes the neurons, or several whose outputs are added.
    ``read_by``: every linear layer or convolution that takes them as input. A flatten is understood from the
    sizes: four channels read by 36 inputs are nine inputs each. After a concatenation say which inputs:
    ``("head", 8, 12)`` reads the neurons at inputs 8 … 11.
    ``through``: what lies between and treats channels one by one or in groups: norms, PReLU, depthwise and
    grouped convolutions. A group counts as one neuron.
    """

    made_by: str | Sequence[str]
    read_by: Sequence[Inputs]
    through: Sequence[Inputs] = ()


def describe(
    model: nn.Module, hidden: Sequence[Hidden]
) -> tuple[list[Layer], dict[tuple[str, Side], Tensor]]:
    """The layers, and the neuron of every channel, (layer's name, side) -> (channels,)."""
    modules = dict(model.named_modules())
    layers: list[Layer] = []
    channels: dict[tuple[str, Side], Tensor] = {}
    start = 0
    for layer in hidden:
        made_by = [layer.made_by] if isinstance(layer.made_by, str) else list(layer.made_by)
        if not made_by or not layer.read_by:
            raise ConfigError(f"{layer}: name the layers that make the neurons and those that read them.")
        for name in (*made_by, *map(_name, layer.read_by)):
            _check(modules, name, makes_or_reads=True)
        for name in map(_name, layer.through):
            _check(modules, name, makes_or_reads=False)
        widths = {name: width(modules[name], "out") or 0 for name in made_by}
        if len(set(widths.values())) > 1:
            raise ConfigError(f"layers that are added must be equally wide; these are {widths}.")
        tied = [count for name in map(_name, layer.through) if (count := groups(modules[name]))]
        size = math.gcd(*widths.values(), *tied)
        neurons = torch.arange(start, start + size)
        sides: list[tuple[Inputs, Side]] = [(name, "out") for name in made_by]
        sides += [(inputs, side) for inputs in layer.through for side in ("in", "out")]
        sides += [(inputs, "in") for inputs in layer.read_by]
        for inputs, side in sides:
            name, first, last = (inputs, 0, None) if isinstance(inputs, str) else inputs
            total = width(modules[name], side) or 0
            last = total if last is None else last
            if not 0 <= first < last <= total or (last - first) % size:
                raise ConfigError(
                    f"{size} neurons do not fit evenly into {side}put channels {first} to {last - 1} of layer "
                    f"{name!r}, which has {total}."
                )
            carried = channels.setdefault((name, side), torch.full((total,), -1))
            if bool((carried[first:last] >= 0).any()):
                raise ConfigError(
                    f"{side}put channels {first} to {last - 1} of layer {name!r} are given twice."
                )
            carried[first:last] = neurons.repeat_interleave((last - first) // size)
        layers.append(Layer(" + ".join(made_by), start, size))
        start += size
    return layers, channels


def _name(inputs: Inputs) -> str:
    return inputs if isinstance(inputs, str) else inputs[0]


def _check(modules: dict[str, nn.Module], name: str, makes_or_reads: bool) -> None:
    """Raise a ConfigError unless there is such a layer and it is of the kind its role needs."""
    if name not in modules:
        known = ", ".join(repr(name) for name, module in modules.items() if places(module))
        raise ConfigError(f"the model has no layer {name!r}; it has {known}.")
    kind = type(modules[name]).__name__
    if (
        any(place.reads for place in places(modules[name])) != makes_or_reads
        or width(modules[name], "out") is None
    ):
        role = "made_by and read_by take linear layers and ungrouped convolutions"
        other = "through takes norms (not LayerNorm), PReLU and grouped convolutions"
        raise ConfigError(f"layer {name!r} is a {kind}; {role if makes_or_reads else other}.")
