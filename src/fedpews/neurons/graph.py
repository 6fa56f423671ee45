"""Which elements of which parameter belong to which hidden neuron, and what follows from that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedpews.errors import ConfigError
from fedpews.neurons.channels import Side, groups, is_norm, places, width
from fedpews.trees import Tree


@dataclass(frozen=True)
class Axis:
    """One dimension of one parameter or buffer, and the hidden neuron each position on it belongs to.

    ``neurons`` is int64, one entry per position; −1 means no neuron, so always kept. ``reads`` tells two
    kinds apart: a consumer's input columns read the neuron's output; all else (fan-in row, bias, norm scale,
    shift and running statistics, depthwise kernels) makes the neuron up. ``rank`` is the number of dimensions
    of the whole tensor.
    """

    dim: int
    neurons: Tensor
    reads: bool
    rank: int


@dataclass(frozen=True)
class Layer:
    """Neurons ``start`` … ``start + size − 1``; ``name`` is the module, or the coupled modules, that make them."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Hidden:
    """One hidden layer, described by hand for :meth:`NeuronGraph.by_hand`.

    ``made_by``: the linear or convolution layer that computes the neurons, or several when their outputs are
    added.
    ``read_by``: every layer that takes the neurons as input. A flatten is understood from the sizes: four
    channels read by 36 inputs are nine inputs each. After a concatenation give the inputs too: ``("head", 8,
    12)`` reads the neurons at inputs 8 … 11.
    ``through``: what lies between and treats channels one by one: norms, PReLU, depthwise convolutions.
    """

    made_by: str | Sequence[str]
    read_by: Sequence[str | tuple[str, int, int]]
    through: Sequence[str] = ()


@dataclass(frozen=True)
class NeuronGraph:
    """The hidden neurons of a model and every slice of a parameter or buffer that each of them owns.

    ``layers`` are in forward order. ``axes`` is keyed as in ``named_parameters`` and ``named_buffers``; a
    name it lacks belongs to no neuron. ``norms`` has the neuron of each channel of every norm on the way, by
    module name, because a norm without parameters has to be resized too when the network is cut.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> graph = NeuronGraph.by_hand(model, [Hidden("0", read_by=["2"])])
    >>> graph.size
    3
    >>> graph.expand(torch.tensor([True, False, True]))["2.weight"]
    tensor([[ True, False,  True]])
    """

    layers: tuple[Layer, ...]
    axes: Mapping[str, tuple[Axis, ...]]
    norms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of hidden neurons, h."""
        return sum(layer.size for layer in self.layers)

    def gate(self, params: Mapping[str, Tensor], gates: Tensor) -> Tree:
        """Multiply what the next layers read from each neuron by its gate; ``gates`` is (h,).

        With gates of 0 and 1 the forward pass is that of the network with the closed neurons removed, and no
        element of a closed neuron has a gradient. Gates may be any real numbers and carry a gradient
        themselves. Pure: fit for ``vmap``, ``grad`` and ``make_fx``.
        """
        padded = _padded(gates)
        gated = dict(params)
        for name, axes in self.axes.items():
            if name in gated:
                for axis in axes:
                    if axis.reads:
                        gated[name] = gated[name] * _along(axis, padded)
        return gated

    def expand(self, neurons: Tensor) -> Tree:
        """The parameter mask: an element is kept iff the neurons on all its sides are.

        ``neurons`` is (h,), boolean or 0/1 numbers; the masks have its dtype. Each broadcasts against its
        parameter; only names that belong to some neuron appear.
        """
        padded = _padded(neurons)
        masks: Tree = {}
        for name, (first, *others) in self.axes.items():
            mask = _along(first, padded)
            for axis in others:
                mask = mask * _along(axis, padded)
            masks[name] = mask
        return masks

    def slice(self, params: Mapping[str, Tensor], neurons: Tensor) -> Tree:
        """The tensors of the physically smaller network that has only the open ``neurons``; (h,) boolean."""
        padded = _padded(neurons)
        sliced = dict(params)
        for name, axes in self.axes.items():
            if name in sliced:
                for axis in axes:
                    sliced[name] = sliced[name].index_select(axis.dim, _open(axis, padded))
        return sliced

    def scatter(self, full: Mapping[str, Tensor], sliced: Mapping[str, Tensor], neurons: Tensor) -> Tree:
        """The inverse of :meth:`slice`: the sliced values back in their places, all else as in ``full``."""
        padded = _padded(neurons)
        return {
            name: _put(
                value, sliced[name], [(axis.dim, _open(axis, padded)) for axis in self.axes.get(name, ())]
            )
            for name, value in full.items()
        }

    @classmethod
    def by_hand(cls, model: nn.Module, hidden: Sequence[Hidden]) -> NeuronGraph:
        """The graph of a model that cannot be traced: one :class:`Hidden` per hidden layer, in forward order.

        :func:`fedpews.neurons.verify` then checks it on an example.

        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2))
        >>> graph = NeuronGraph.by_hand(model, [Hidden("0", through=["1"], read_by=["3"])])
        >>> graph.axes["3.weight"][0].neurons[:12]
        tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
        """
        draft = _Draft(model)
        layers: list[Layer] = []
        start = 0
        for layer in hidden:
            made_by = (layer.made_by,) if isinstance(layer.made_by, str) else tuple(layer.made_by)
            if not made_by or not layer.read_by:
                raise ConfigError(
                    f"{layer} must name a layer that makes the neurons and one that reads them."
                )
            channels = draft.width(made_by[0], "out")
            tied = [count for name in (*made_by, *layer.through) if (count := groups(draft.module(name)))]
            size = math.gcd(channels, *tied)
            neurons = start + torch.arange(size).repeat_interleave(channels // size)
            for name in (*made_by, *layer.through):
                draft.claim(name, "out", neurons)
            for reader in layer.read_by:
                name, *span = (reader,) if isinstance(reader, str) else reader
                draft.claim(name, "in", neurons, *span)
            layers.append(Layer(" + ".join(made_by), start, size))
            start += size
        return assemble(model, layers, draft.channels)


class _Draft:
    """Which neuron each channel of each layer carries, as told by hand."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.channels: dict[tuple[str, Side], Tensor] = {}

    def module(self, name: str) -> nn.Module:
        if name not in self._modules:
            known = ", ".join(repr(known) for known, module in self._modules.items() if places(module))
            raise ConfigError(f"the model has no layer {name!r}; its layers are {known}.")
        return self._modules[name]

    def width(self, name: str, side: Side) -> int:
        count = width(self.module(name), side)
        if count is None:
            raise ConfigError(
                f"layer {name!r} is a {type(self.module(name)).__name__}; only linear, convolution, norm, PReLU and "
                "embedding layers can make, pass on or read neurons."
            )
        return count

    def claim(self, name: str, side: Side, neurons: Tensor, first: int = 0, last: int | None = None) -> None:
        """Let channels ``first`` … ``last − 1`` carry these neurons, each repeated as often as they fit."""
        total = self.width(name, side)
        last = total if last is None else last
        if not 0 <= first < last <= total or (last - first) % len(neurons):
            raise ConfigError(
                f"layer {name!r} has {total} {side}put channels, and {len(neurons)} channels do not fit evenly into "
                f"those from {first} to {last - 1}."
            )
        carried = self.channels.setdefault((name, side), torch.full((total,), -1))
        if bool((carried[first:last] >= 0).any()):
            raise ConfigError(f"{side}put channels {first} to {last - 1} of layer {name!r} are given twice.")
        carried[first:last] = neurons.repeat_interleave((last - first) // len(neurons))


def assemble(
    model: nn.Module,
    layers: Sequence[Layer],
    channels: Mapping[tuple[str, Side], Tensor],
    loose: Mapping[str, tuple[int, Tensor]] | None = None,
) -> NeuronGraph:
    """The graph that follows from the neuron of every channel of every layer, (name, side) -> (channels,).

    ``loose`` are parameters outside the layers we know: their dimension that runs over channels, and its
    neurons.
    """
    modules = dict(model.named_modules())
    tensors = (*model.named_parameters(), *model.named_buffers())
    names = {id(value): name for name, value in reversed(tensors)}
    found: dict[str, dict[int, Axis]] = {name: {} for name, _ in tensors}
    for (layer, side), neurons in channels.items():
        for place in places(modules[layer]):
            if place.side != side:
                continue
            value = getattr(modules[layer], place.tensor)
            if id(value) not in names:
                raise ConfigError(
                    f"layer {layer!r} computes its {place.tensor} from other parameters (weight_norm, spectral_norm?), "
                    "so no element of it belongs to one neuron. Remove the parametrization, or skip the layer."
                )
            name = names[id(value)]
            axis = Axis(place.dim, neurons, place.reads, value.dim())
            known = found[name].get(place.dim, axis)
            if not torch.equal(known.neurons, neurons):
                raise ConfigError(
                    f"layers that share {name!r} use it for different neurons; skip layer {layer!r}."
                )
            found[name][place.dim] = Axis(place.dim, neurons, place.reads or known.reads, value.dim())
    for name, (dim, neurons) in (loose or {}).items():
        found[name][dim] = Axis(dim, neurons, False, model.get_parameter(name).dim())
    axes = {name: tuple(by_dim[dim] for dim in sorted(by_dim)) for name, by_dim in found.items() if by_dim}
    norms = {name: neurons for (name, _), neurons in channels.items() if is_norm(modules[name])}
    return NeuronGraph(tuple(layers), axes, norms)


def _padded(values: Tensor) -> Tensor:
    """The values of the neurons, and a one at the end for positions without a neuron (index −1)."""
    return torch.cat([values, values.new_ones(1)])


def _along(axis: Axis, padded: Tensor) -> Tensor:
    """The values of an axis' neurons, shaped to broadcast along it."""
    shape = [1] * axis.rank
    shape[axis.dim] = -1
    return padded[axis.neurons].view(shape)


def _open(axis: Axis, padded: Tensor) -> Tensor:
    """The positions of an axis that stay."""
    return padded[axis.neurons].nonzero().squeeze(1)


def _put(full: Tensor, part: Tensor, places: Sequence[tuple[int, Tensor]]) -> Tensor:
    """``full`` with ``part`` at the given positions of each given dimension."""
    if not places:
        return part
    (dim, index), *others = places
    rows = _put(full.index_select(dim, index), part, others)
    return full.index_copy(dim, index, rows)
