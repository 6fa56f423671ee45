"""Where a torch layer keeps its channels: the one table that knows layer types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

Side = Literal["in", "out"]


@dataclass(frozen=True)
class Place:
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


def places(module: nn.Module) -> tuple[Place, ...]:
    """Every dimension of a layer's own tensors that runs over its channels; none for a layer we do not know.

    A layer that works channel by channel (a norm, PReLU, an embedding, a depthwise convolution) has one side,
    "out". A grouped convolution ties its inputs to its outputs, so none of its weights counts as reading.
    """
    found: list[Place] = []
    if isinstance(module, nn.Linear):
        found = [
            Place("weight", 0, "out", False),
            Place("bias", 0, "out", False),
            Place("weight", 1, "in", True),
        ]
    elif isinstance(module, _ConvNd):
        out_dim, in_dim = (1, 0) if module.transposed else (0, 1)
        if module.groups == 1:
            found = [Place("weight", out_dim, "out", False), Place("weight", in_dim, "in", True)]
        elif is_depthwise(module) or not module.transposed:
            found = [Place("weight", 0, "out", False)]
        else:
            found = [Place("weight", 0, "in", False)]
        found.append(Place("bias", 0, "out", False))
    elif isinstance(module, _NormBase):
        found = [Place(name, 0, "out", False) for name in ("weight", "bias", "running_mean", "running_var")]
    elif isinstance(module, nn.GroupNorm):
        found = [Place(name, 0, "out", False) for name in ("weight", "bias")]
    elif isinstance(module, nn.PReLU) and module.num_parameters > 1:
        found = [Place("weight", 0, "out", False)]
    elif isinstance(module, nn.Embedding):
        found = [Place("weight", 1, "out", False)]
    return tuple(place for place in found if isinstance(getattr(module, place.tensor, None), Tensor))


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
