"""The channels of torch's layers, and a neuron graph described by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedpews.errors import ConfigError

Side = Literal["in", "out"]


@dataclass(frozen=True)
class ChannelDim:
    """A dimension of a layer's tensor that runs over the layer's input or output channels."""

    tensor: str
    dim: int
    side: Side
    reads: bool


@dataclass(frozen=True)
class Layer:
    """Neurons ``start`` … ``start + size − 1``; ``name`` is the module that makes them, or several bound ones."""

    name: str
    start: int
    size: int


def channel_dims(module: nn.Module) -> tuple[ChannelDim, ...]:
    """Every dimension of a layer's own tensors that runs over its channels; none for a layer we do not know.

    A layer that works channel by channel (a norm, PReLU, an embedding, a depthwise convolution) has one side,
    "out". A grouped convolution ties its inputs to its outputs, so none of its weights counts as reading.
    """
    dims: list[ChannelDim] = []
    if isinstance(module, nn.Linear):
        dims = [
            ChannelDim("weight", 0, "out", False),
            ChannelDim("bias", 0, "out", False),
            ChannelDim("weight", 1, "in", True),
        ]
    elif isinstance(module, _ConvNd):
        out_dim, in_dim = (1, 0) if module.transposed else (0, 1)
        if module.groups == 1:
            dims = [ChannelDim("weight", out_dim, "out", False), ChannelDim("weight", in_dim, "in", True)]
        elif is_depthwise(module) or not module.transposed:
            dims = [ChannelDim("weight", 0, "out", False)]
        else:
            dims = [ChannelDim("weight", 0, "in", False)]
        dims.append(ChannelDim("bias", 0, "out", False))
    elif isinstance(module, _NormBase):
        dims = [
            ChannelDim(name, 0, "out", False) for name in ("weight", "bias", "running_mean", "running_var")
        ]
    elif isinstance(module, nn.GroupNorm):
        dims = [ChannelDim(name, 0, "out", False) for name in ("weight", "bias")]
    elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
        dims = [ChannelDim("weight", 0, "out", False)]
    elif isinstance(module, nn.Embedding):
        dims = [ChannelDim("weight", 1, "out", False)]
    return tuple(entry for entry in dims if isinstance(getattr(module, entry.tensor, None), Tensor))


def width(module: nn.Module, side: Side) -> int | None:
    """The number of channels on one side of a layer; None for a layer we do not know."""
    if isinstance(module, nn.Linear):
        return module.out_features if side == "out" else module.in_features
    if isinstance(module, _ConvNd):
        return module.out_channels if side == "out" else module.in_channels
    if isinstance(module, _NormBase):
        return module.num_features
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return module.num_parameters
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return None


def groups(module: nn.Module) -> int | None:
    """Into how many inseparable groups a layer ties its channels; None if it ties none together.

    A GroupNorm mixes the channels of a group, a grouped convolution binds a group of outputs to a group of
    inputs: either way the whole group is one neuron, and removing it leaves a layer with one group less.
    """
    if isinstance(module, nn.GroupNorm):
        return module.num_groups
    if isinstance(module, _ConvNd) and module.groups > 1:
        return module.groups
    return None


def groups_left(module: nn.Module, channels: int) -> int:
    """How many groups a GroupNorm, or a grouped convolution, has when so many of its channels are left."""
    if isinstance(module, nn.GroupNorm):
        return module.num_groups * channels // module.num_channels
    assert isinstance(module, _ConvNd), "no other layer has groups"
    return module.groups * channels // (module.in_channels if module.transposed else module.out_channels)


def is_norm(module: nn.Module) -> bool:
    """Whether this is a norm whose channels (or groups of them) stand on their own."""
    return isinstance(module, _NormBase | nn.GroupNorm)


def is_depthwise(module: nn.Module) -> bool:
    """Whether this is a convolution that gives every input channel one output channel of its own."""
    return isinstance(module, _ConvNd) and module.groups == module.in_channels == module.out_channels > 1


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
        known = ", ".join(repr(name) for name, module in modules.items() if channel_dims(module))
        raise ConfigError(f"the model has no layer {name!r}; it has {known}.")
    kind = type(modules[name]).__name__
    if (
        any(entry.reads for entry in channel_dims(modules[name])) != makes_or_reads
        or width(modules[name], "out") is None
    ):
        role = "made_by and read_by take linear layers and ungrouped convolutions"
        other = "through takes norms (not LayerNorm), PReLU and grouped convolutions"
        raise ConfigError(f"layer {name!r} is a {kind}; {role if makes_or_reads else other}.")
